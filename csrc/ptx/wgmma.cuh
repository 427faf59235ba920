// SPDX-License-Identifier: MIT OR Apache-2.0
//
// wgmma of sm_90a: products of 64 rows and 16 columns at a time, by 128 threads. The sums stand as
// after mma_m16n8k16, 16 rows for each warp.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "async.cuh"

namespace aril {

#if __CUDA_ARCH_FEAT_SM90_ALL
// An operand made of cores of 8 rows of 16 bytes: the bytes from a core to the one with the next
// columns, and to the one with the next rows.
__device__ __forceinline__ uint64_t core_operand(const void* shared, int to_columns, int to_rows) {
  return (shared_address(shared) & 0x3ffff) >> 4 | static_cast<uint64_t>(to_columns >> 4) << 16 |
         static_cast<uint64_t>(to_rows >> 4) << 32;
}

// An operand of rows of 128 bytes, whose 16 bytes i stand at i ^ (row % 8), eight rows after the
// other; from one of the first 16 bytes of a row on.
__device__ __forceinline__ uint64_t swizzled_operand(const void* shared) {
  return core_operand(shared, 16, 1024) | uint64_t{1} << 62;
}

__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

template <int kColumns>
__device__ __forceinline__ void fence_operands(float (&sums)[kColumns][4]) {
#pragma unroll
  for (int c = 0; c < kColumns; ++c) {
#pragma unroll
    for (int e = 0; e < 4; ++e) asm volatile("" : "+f"(sums[c][e])::"memory");
  }
}

__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// sums = rows cores, or += if `adds`; 8 * kColumns columns of sums.
template <typename T, int kColumns>
__device__ __forceinline__ void wgmma_k16(float (&sums)[kColumns][4], uint64_t rows, uint64_t cores,
                                          bool adds);

#define ARIL_COLUMN(c) "+f"(sums[c][0]), "+f"(sums[c][1]), "+f"(sums[c][2]), "+f"(sums[c][3])
#define ARIL_SUMS_2 ARIL_COLUMN(0), ARIL_COLUMN(1)
#define ARIL_SUMS_4 ARIL_SUMS_2, ARIL_COLUMN(2), ARIL_COLUMN(3)
#define ARIL_SUMS_8 ARIL_SUMS_4, ARIL_COLUMN(4), ARIL_COLUMN(5), ARIL_COLUMN(6), ARIL_COLUMN(7)
#define ARIL_NAMES_2 "%0,%1,%2,%3,%4,%5,%6,%7"
#define ARIL_NAMES_4 ARIL_NAMES_2 ",%8,%9,%10,%11,%12,%13,%14,%15"
#define ARIL_NAMES_8 ARIL_NAMES_4 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define ARIL_WGMMA(type, name, columns, n, rows_at, core_operand, adds_at)            \
  template <>                                                                         \
  __device__ __forceinline__ void wgmma_k16<type, columns>(                           \
      float(&sums)[columns][4], uint64_t rows, uint64_t cores, bool adds) {           \
    asm volatile("{\n.reg .pred adds;\nsetp.ne.b32 adds, " adds_at                    \
                 ", 0;\nwgmma.mma_async.sync.aligned.m64n" n "k16.f32." name "." name \
                 " {" ARIL_NAMES_##columns "}, " rows_at ", " core_operand            \
                                           ", adds, 1, 1, 0, 0;\n}\n"                 \
                 : ARIL_SUMS_##columns                                                \
                 : "l"(rows), "l"(cores), "r"(static_cast<int>(adds)));               \
  }
#define ARIL_WGMMAS(type, name)                        \
  ARIL_WGMMA(type, name, 2, "16", "%8", "%9", "%10")   \
  ARIL_WGMMA(type, name, 4, "32", "%16", "%17", "%18") \
  ARIL_WGMMA(type, name, 8, "64", "%32", "%33", "%34")
ARIL_WGMMAS(__nv_bfloat16, "bf16")
ARIL_WGMMAS(__half, "f16")
#undef ARIL_WGMMAS
#undef ARIL_WGMMA
#undef ARIL_NAMES_8
#undef ARIL_NAMES_4
#undef ARIL_NAMES_2
#undef ARIL_SUMS_8
#undef ARIL_SUMS_4
#undef ARIL_SUMS_2
#undef ARIL_COLUMN
#endif

}  // namespace aril
