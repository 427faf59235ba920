// SPDX-License-Identifier: MIT OR Apache-2.0
//
// mma.sync and ldmatrix. mma.sync and wgmma accumulate 16 columns of K per step and give the same
// bits, so kernels of either kind agree.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

#include "async.cuh"

namespace aril {

// c[16, 8] += a[16, 16] b[16, 8]. Lane (g = lane / 4, q = lane % 4) holds a's rows g (a.x) and g +
// 8 (a.y) at columns 2q and 2q + 1, the same rows at columns 2q + 8 and 2q + 9 (a.z, a.w), b's
// column g at rows 2q, 2q + 1 (b0) and 2q + 8, 2q + 9 (b1), and c's rows g, g, g + 8, g + 8 at
// columns 2q, 2q + 1, 2q, 2q + 1.
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

// Loads four 8-by-8 cores of 16-bit elements. Lane i passes the address of row i % 8 of core i / 8;
// lane (g, q) receives columns 2q and 2q + 1 of row g of each core.
__device__ __forceinline__ uint4 ldmatrix_x4(const void* row) {
  uint4 cores;
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(cores.x), "=r"(cores.y), "=r"(cores.z), "=r"(cores.w)
               : "r"(shared_address(row))
               : "memory");
  return cores;
}

}  // namespace aril
