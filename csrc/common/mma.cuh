// SPDX-License-Identifier: MIT OR Apache-2.0
//
// mma.sync.m16n8k16 with f32 sums: sm_80 and up.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <stdint.h>

namespace aril {

// c[16, 8] += a[16, 16] b[16, 8]. Of lane (g = lane / 4, q = lane % 4), a0 holds row g and a1 row g
// + 8 at columns 2q, 2q + 1; a2 and a3 likewise at columns 2q + 8, 2q + 9; b0 and b1 column g at
// those rows; c rows g, g, g + 8, g + 8 at columns 2q, 2q + 1.
template <typename T>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                             uint32_t a3, uint32_t b0, uint32_t b1);

#define ARIL_MMA(type, name)                                                                 \
  template <>                                                                                \
  __device__ __forceinline__ void mma_m16n8k16<type>(float(&c)[4], uint32_t a0, uint32_t a1, \
                                                     uint32_t a2, uint32_t a3, uint32_t b0,  \
                                                     uint32_t b1) {                          \
    asm("mma.sync.aligned.m16n8k16.row.col.f32." name "." name                               \
        ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "                                       \
        "{%0,%1,%2,%3};"                                                                     \
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])                                     \
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));                             \
  }
ARIL_MMA(__nv_bfloat16, "bf16")
ARIL_MMA(__half, "f16")
#undef ARIL_MMA

}  // namespace aril
