// SPDX-License-Identifier: MIT OR Apache-2.0
//
// Products of 8-by-8 cores on the tensor cores: mma.sync from sm_80 on, wgmma on sm_90. Both add up
// 16 columns at a time, and leave the same bits.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "async.cuh"

namespace aril {

// c[16, 8] += a[16, 16] b[16, 8]. Of lane (g = lane / 4, q = lane % 4), a.x holds row g and a.y
// row g + 8 at columns 2q, 2q + 1; a.z and a.w likewise at columns 2q + 8, 2q + 9; b0 and b1 column
// g at those rows; c rows g, g, g + 8, g + 8 at columns 2q, 2q + 1.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], const uint4& a, uint32_t b0,
                                             uint32_t b1);

#define ARIL_MMA(type, name)                                                                    \
  template <>                                                                                   \
  __device__ __forceinline__ void mma_m16n8k16<type>(float(&c)[4], const uint4& a, uint32_t b0, \
                                                     uint32_t b1) {                             \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                                  \
        ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "                                          \
        "{%0,%1,%2,%3};"                                                                        \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                        \
        : "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "r"(b0), "r"(b1));                            \
  }
ARIL_MMA(__nv_bfloat16, "bf16")
ARIL_MMA(__half, "f16")
#undef ARIL_MMA

// Four cores, of whose 8 rows of 16 bytes lane i names the (i % 8)th of the (i / 8)th. Lane (g, q)
// gets columns 2q, 2q + 1 of row g of each.
__device__ __forceinline__ uint4 ldmatrix_x4(const void* row) {
  uint4 cores;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(cores.x), "=r"(cores.y), "=r"(cores.z), "=r"(cores.w)
               : "r"(shared_address(row))
               : "memory");
  return cores;
}

}  // namespace aril
