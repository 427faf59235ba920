// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Elements and vectors of 16 bytes: conversion, loads, and asynchronous copies.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include <type_traits>

#include "../ptx/async.cuh"

namespace aril {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float(float x) {
  return x;
}
template <>
__device__ __forceinline__ __half from_float(float x) {
  return __float2half_rn(x);
}
template <>
__device__ __forceinline__ __nv_bfloat16 from_float(float x) {
  return __float2bfloat16_rn(x);
}

// The elements that 16 bytes hold.
template <typename T>
struct Vec {
  static constexpr int kSize = 16 / sizeof(T);
  uint4 bits;

  // Loads elements at any address; zero at and beyond `valid`. Another kernel may have written
  // them.
  __device__ __forceinline__ static Vec load_from_anywhere(const T* source, int valid,
                                                           bool aligned) {
    if (aligned && valid >= kSize) return {*reinterpret_cast<const uint4*>(source)};
    T elements[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) elements[i] = i < valid ? source[i] : from_float<T>(0.0f);
    Vec vec;
    memcpy(&vec.bits, elements, sizeof(elements));
    return vec;
  }

  // At an address that is aligned to 16 bytes.
  __device__ __forceinline__ static Vec load(const T* source) {
    return {*reinterpret_cast<const uint4*>(source)};
  }

  // Rounds values(0), values(1), ...
  template <typename F>
  __device__ __forceinline__ static void store(T* target, const F& values) {
    T elements[kSize];
#pragma unroll
    for (int i = 0; i < kSize; ++i) elements[i] = from_float<T>(values(i));
    uint4 bits;
    memcpy(&bits, elements, sizeof(bits));
    *reinterpret_cast<uint4*>(target) = bits;
  }

  __device__ __forceinline__ float operator[](int i) const {
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      const uint32_t words[] = {bits.x, bits.y, bits.z, bits.w};
      return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
    }
    T elements[kSize];
    memcpy(elements, &bits, sizeof(bits));
    return to_float(elements[i]);
  }
};

// Starts a copy of features [k, k + Vec<T>::kSize) of a row to shared memory; zero beyond
// `in_features`. A row that is not aligned to 16 bytes is copied synchronously.
template <typename T>
__device__ __forceinline__ void copy_vec_async(void* shared, const T* row, int k, int in_features,
                                               bool aligned) {
  const int valid = max(0, min(in_features - k, Vec<T>::kSize));
  if (aligned) {
    copy_async(shared, valid > 0 ? row + k : row, valid * static_cast<int>(sizeof(T)));
  } else {
    *static_cast<uint4*>(shared) = Vec<T>::load_from_anywhere(row + k, valid, false).bits;
  }
}

// Loads four bytes that are read only once, without keeping them in L1.
__device__ __forceinline__ uint32_t load_once(const void* pointer) {
  uint32_t word;
  asm volatile("ld.global.L1::no_allocate.b32 %0, [%1];" : "=r"(word) : "l"(pointer));
  return word;
}

// The same of eight bytes.
__device__ __forceinline__ uint2 load_pair_once(const void* pointer) {
  uint2 words;
  asm volatile("ld.global.L1::no_allocate.v2.b32 {%0, %1}, [%2];"
               : "=r"(words.x), "=r"(words.y)
               : "l"(pointer));
  return words;
}

}  // namespace aril
