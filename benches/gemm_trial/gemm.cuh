// y[T,N] = x[T,K] W[N,K]^T + B v', tokens = M of wgmma, W's rows = N, 5-D TMA of W permutes rows of
// each 32 as B's cores are.
#pragma once
#include <cuda.h>
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <stdint.h>

#include "wgmma.h"
#define DI __device__ __forceinline__
typedef __nv_bfloat16 bf16;
DI uint32_t s2u(const void* p) { return (uint32_t)__cvta_generic_to_shared(p); }
DI void mbar_init(uint32_t b, int n) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n));
}
DI void mbar_expect(uint32_t b, int n) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n)
               : "memory");
}
DI void mbar_arrive(uint32_t b) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(b) : "memory");
}
DI void mbar_arrive_cl(uint32_t b) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(b) : "memory");
}
DI void mbar_wait(uint32_t b, int ph) {
  asm volatile(
      "{\n.reg .pred P;\nLW_%=: mbarrier.try_wait.parity.shared::cta.b64 P, [%0], %1;\n@P bra "
      "LD_%=;\nbra LW_%=;\nLD_%=:\n}" ::"r"(b),
      "r"(ph)
      : "memory");
}
DI void tma2d(uint32_t dst, const CUtensorMap* m, int cx, int cy, uint32_t bar, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3}], [%4], %5;" ::"r"(dst),
      "l"(m), "r"(cx), "r"(cy), "r"(bar), "l"(hint)
      : "memory");
}
DI void tma2d_mc(uint32_t dst, const CUtensorMap* m, int cx, int cy, uint32_t bar, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::"
      "cluster.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5, %6;" ::"r"(dst),
      "l"(m), "r"(cx), "r"(cy), "r"(bar), "h"((uint16_t)3), "l"(hint)
      : "memory");
}
DI void tma5d(uint32_t dst, const CUtensorMap* m, int cx, int g, uint32_t bar, uint64_t hint) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint "
      "[%0], [%1, {%2, %3, %3, %3, %4}], [%5], %6;" ::"r"(dst),
      "l"(m), "r"(cx), "r"(0), "r"(g), "r"(bar), "l"(hint)
      : "memory");
}
DI void bulk(uint32_t dst, const void* src, int bytes, uint32_t bar) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(dst),
      "l"(src), "r"(bytes), "r"(bar)
      : "memory");
}
DI uint32_t ctarank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(r));
  return r;
}
DI uint32_t nctarank() {
  uint32_t r;
  asm volatile("mov.u32 %0, %%cluster_nctarank;" : "=r"(r));
  return r;
}
DI uint32_t mapa(uint32_t a, uint32_t c) {
  uint32_t r;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(c));
  return r;
}
DI uint32_t pack(float a, float b) {
  __nv_bfloat162 h = __floats2bfloat162_rn(a, b);
  return *(uint32_t*)&h;
}
DI void wg_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DI void wg_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N>
DI void wg_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}
template <int N>
DI void regs_inc() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(N));
}
template <int N>
DI void regs_dec() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(N));
}
DI void st_async4(uint32_t a, float x, float y, float z, float w, uint32_t bar) {
  asm volatile(
      "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, "
      "[%5];" ::"r"(a),
      "f"(x), "f"(y), "f"(z), "f"(w), "r"(bar)
      : "memory");
}
DI void ldsm4(uint32_t (&r)[4], uint32_t a) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(a)
               : "memory");
}
DI void mma(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2, uint32_t a3, uint32_t b0,
            uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
DI void pdl_wait() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
DI void pdl_go() { asm volatile("griddepcontrol.launch_dependents;" ::: "memory"); }
DI unsigned ld_acq(const unsigned* p) {
  unsigned v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
DI uint64_t desc128(uint32_t a) {
  return (uint64_t)((a & 0x3FFFF) >> 4) | (1ull << 16) | (64ull << 32) | (1ull << 62);
}

DI uint64_t desc_core(uint32_t a, int to_columns, int to_rows) {
  return (uint64_t)((a & 0x3FFFF) >> 4) | (uint64_t)(to_columns >> 4) << 16 |
         (uint64_t)(to_rows >> 4) << 32;
}

struct Desc {
  const bf16 *a, *b;
  int rank;
  float scaling;
};  // as aril_descriptor
struct List {
  int n;
  int pad[3];
  int slot[256];
  unsigned mask[256][8];
};  // adapters of 256 tokens, and whose each token is
constexpr uint64_t kFirst = 0x12F0000000000000ull, kLast = 0x14F0000000000000ull;
constexpr int kStepBytes = 4096;  // of v' of 64 tokens and 16 ranks: two terms of [8][2] cores

struct GemmParams {
  CUtensorMap w[3], x;
  bf16* y;
  int N, T, K;
  int S, out[3], first[4];       // slices: outputs, first block of rows; [S]: all
  int items, ntok, kc;           // of all clusters; token tiles; stages of a block and item
  int stages, trig, per;         // per: adapters in a stage of B
  int lora, steps, chunk_bytes;  // steps of 16 ranks in v'
  const Desc* table;
  const List* list;
  const char* vp;
  unsigned* flag;
  int xmode;  // 0 flag, 1 x is old, 2 wait
  unsigned long long* ts;
};
DI unsigned long long now() {
  unsigned long long t;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t));
  return t;
}
#define TS(k)                                                        \
  do {                                                               \
    if (p.ts && lane == 0) p.ts[(size_t)blockIdx.x * 8 + k] = now(); \
  } while (0)
template <int N>
DI void pin(float (&d)[N]) {
#pragma unroll
  for (int i = 0; i < N; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// MODE 0 alone, 1 two blocks of other rows share x, 2 two blocks share K
template <int MW, int MG, int NG, int NB, int MODE>
struct Cfg {
  static constexpr int T = 64 * MW * MG, RB = NB * NG, WGS = MG * NG, ACC = MW * NB / 2,
                       G = NB / 32, H0 = MODE == 2 ? (G + 1) / 2 : G;
  static constexpr bool kBig = ACC > 96;
  static constexpr int kCap = kBig || WGS <= 1 ? 384 : 512;  // threads that registers are left for
  static constexpr bool kMove = WGS == 2 && ACC >= 96;
  static constexpr int kChunk = MW > 1 ? 16 : 32,
                       kVBytes =
                           T / 64 * kChunk / 16 * kStepBytes;  // ranks at a time, and their v'
};
template <int MW, int MG, int NG, int NB, int MODE>
__global__ void __launch_bounds__(Cfg<MW, MG, NG, NB, MODE>::kCap, 1)
    k_gemm(const __grid_constant__ GemmParams p) {
  using C = Cfg<MW, MG, NG, NB, MODE>;
  if (threadIdx.x == 0 && p.ts) p.ts[(size_t)blockIdx.x * 8] = now();
  extern __shared__ uint8_t smem_raw[];
  constexpr int T = C::T, RB = C::RB, WGS = C::WGS, G = C::G, H0 = C::H0, SH = MODE == 1 ? 2 : 1,
                CLS = MODE ? 2 : 1;
  constexpr int kStage = RB * 128 + T * 128, kChunk = C::kChunk;
  static_assert(MODE != 2 || (NG == 1 && MW == 1), "");
  const uint32_t base = (s2u(smem_raw) + 1023) & ~1023u;
  const int tid = threadIdx.x, warp = tid >> 5, lane = tid & 31;
  const int c = MODE ? (int)ctarank() : 0, cid = blockIdx.x / CLS, ncl = gridDim.x / CLS,
            stages = p.stages;
  const uint32_t vreg = base + stages * kStage, recv = vreg + (p.lora ? C::kVBytes : 0),
                 bars = recv + (MODE == 2 ? WGS * H0 * 8192 : 0), rbar = bars + stages * 24,
                 vfull = rbar + 8, vempty = rbar + 16;
  auto full = [&](int s) { return bars + s * 24; };
  auto wempty = [&](int s) { return bars + s * 24 + 8; };
  auto xempty = [&](int s) { return bars + s * 24 + 16; };
  struct Item {
    int h, slice, n0, valid;
  };
  auto item = [&](int i) {
    Item r;
    r.h = i % p.ntok;
    int rb = i / p.ntok;
    if (MODE == 1) rb = rb * 2 + c;
    r.slice = 0;
    while (r.slice + 1 < p.S && rb >= p.first[r.slice + 1]) r.slice++;
    r.n0 = (rb - p.first[r.slice]) * RB;
    r.valid = rb < p.first[p.S];
    return r;
  };
  // columns of the tile that this block finishes
  const int own0 = MODE == 2 && c ? H0 * 32 : 0, own1 = MODE == 2 && !c ? H0 * 32 : NB * NG;
  auto listof = [&](int h) { return p.list + h * T / 256; };
  const int nch = (p.steps * 16 + kChunk - 1) / kChunk;
  auto nexp = [&](int h) {
    const int na = p.lora ? __ldg(&listof(h)->n) : 0;
    return (na + p.per - 1) / p.per * nch;
  };
  constexpr int pw = WGS * 4;
  if (warp == pw) {
    if (lane == 0) {
      for (int s = 0; s < stages; s++) {
        mbar_init(full(s), 2);
        mbar_init(wempty(s), WGS * 4);
        mbar_init(xempty(s), WGS * 4 * SH);
      }
      mbar_init(vfull, 1);
      mbar_init(vempty, WGS * 4);
      if (MODE == 2) {
        mbar_init(rbar, 1);
        mbar_expect(rbar, WGS * (c ? G - H0 : H0) * 8192);
      }
      asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
      asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncwarp();
    asm volatile("bar.arrive 0, %0;" ::"n"(WGS * 128 + 128) : "memory");
  } else {
    asm volatile("bar.sync 0, %0;" ::"n"(WGS * 128 + 128) : "memory");
  }
  if (MODE) asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");

  if (warp >= pw) {
    if constexpr (C::kMove) regs_dec<40>();
    if (warp == pw) {  // ---------------- W and B
      int s = 0, ph = 0, n = 0;
      auto get = [&]() {
        if (n >= stages) mbar_wait(wempty(s), ph ^ 1);
      };
      auto adv = [&]() {
        n++;
        if (++s == stages) {
          s = 0;
          ph ^= 1;
        }
      };
      for (int i = cid; i < p.items; i += ncl) {
        const Item m = item(i);
        const List* L = listof(m.h);
        const int na = p.lora ? __ldg(&L->n) : 0;
        const bf16* b = nullptr;
        int rank = 0;
        auto fetch = [&](int batch) {
          const int a = batch + lane;
          rank = 0;
          if (a < na) {
            const Desc* d = p.table + (size_t)__ldg(&L->slot[a]) * p.S + m.slice;
            b = d->b;
            rank = d->rank;
          }
        };
        fetch(0);
        if (lane == 0) {
          const int k0 = MODE == 2 ? c * p.kc : 0, g0 = m.valid ? m.n0 / 32 : 1 << 24;
          for (int k = 0; k < p.kc; k++) {
            get();
            mbar_expect(full(s), RB * 128);
            tma5d(base + s * kStage, &p.w[m.slice], (k0 + k) * 64, g0, full(s), kFirst);
            adv();
          }
        }
        __syncwarp();
        s = __shfl_sync(~0u, s, 0);
        ph = __shfl_sync(~0u, ph, 0);
        n = __shfl_sync(~0u, n, 0);
        const int t0 = (m.n0 + own0) / 64,
                  t1 = min((m.n0 + own1 - 1) / 64 + 1, (p.out[m.slice] + 63) / 64),
                  nt = m.valid ? t1 - t0 : 0;
        if (na > 0)
          for (int ch = 0; ch < nch; ch++) {
            for (int e = 0; e * p.per < na; e++) {
              get();
              const int a0 = e * p.per, a1 = min(na, a0 + p.per),
                        batch = a0 / 32 * 32;  // per divides 32
              if (a0 % 32 == 0 && (e > 0 || ch > 0)) fetch(batch);
              const int a = batch + lane, r0 = ch * kChunk, nrt = (min(rank - r0, kChunk) + 7) / 8;
              const bool mine = a >= a0 && a < a1 && nrt > 0 && nt > 0;
              int bytes = mine ? nrt * nt * 1024 : 0;
#pragma unroll
              for (int o = 16; o; o >>= 1) bytes += __shfl_xor_sync(~0u, bytes, o);
              if (lane == 0) mbar_expect(full(s), bytes);
              __syncwarp();
              if (mine) {
                const int rt = (rank + 7) / 8;
                const uint32_t d = base + s * kStage + (a - a0) * p.chunk_bytes;
                const char* src = (const char*)b + (size_t)t0 * rt * 1024 + r0 / 8 * 1024;
                if (rt == nrt)
                  bulk(d, src, nrt * nt * 1024, full(s));
                else
                  for (int t = 0; t < nt; t++)
                    bulk(d + t * nrt * 1024, src + (size_t)t * rt * 1024, nrt * 1024, full(s));
              }
              adv();
            }
          }
      }
    } else if (warp == pw + 1) {  // ---------------- x and v'
      if (p.xmode == 0) {
        bool ok = false;
        if (lane == 0)
          for (int i = 0; i < 4096 && !ok; i++) ok = ld_acq(p.flag) != 0;
        __syncwarp();
        ok = __shfl_sync(~0u, ok, 0);
        if (!ok) pdl_wait();
      } else if (p.xmode == 2)
        pdl_wait();
      TS(1);
      if (MODE) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
      if (lane == 0) {
        asm volatile("fence.proxy.async;" ::: "memory");
        int s = 0, ph = 0, n = 0, main = 0, total = 0, nv = 0;
        bool waited = false;
        for (int i = cid; i < p.items; i += ncl) total += p.kc;
        total = total > p.trig ? total - p.trig : 0;
        auto get = [&]() {
          if (n >= stages) mbar_wait(xempty(s), ph ^ 1);
        };
        auto adv = [&]() {
          n++;
          if (++s == stages) {
            s = 0;
            ph ^= 1;
          }
        };
        if (total == 0) pdl_go();
        for (int i = cid; i < p.items; i += ncl) {
          const Item m = item(i);
          const int na = p.lora ? __ldg(&listof(m.h)->n) : 0;
          const int k0 = MODE == 2 ? c * p.kc : 0;
          for (int k = 0; k < p.kc; k++) {
            get();
            mbar_expect(full(s), T * 128);
            const uint32_t d = base + s * kStage + RB * 128;
            if (SH == 2)
              tma2d_mc(d + c * (T / 2) * 128, &p.x, (k0 + k) * 64, m.h * T + c * (T / 2), full(s),
                       kLast);
            else
              tma2d(d, &p.x, (k0 + k) * 64, m.h * T, full(s), kLast);
            adv();
            if (++main == total) pdl_go();
          }
          if (na > 0)
            for (int ch = 0; ch < nch; ch++) {
              if (!waited) {
                pdl_wait();
                asm volatile("fence.proxy.async;" ::: "memory");
                waited = true;
                if (p.ts) p.ts[(size_t)blockIdx.x * 8 + 3] = now();
              }
              const int tiles = min(T / 64, (p.T + 63) / 64 - m.h * (T / 64)),
                        cs = min(p.steps - ch * (kChunk / 16), kChunk / 16) * kStepBytes;
              if (nv > 0) mbar_wait(vempty, (nv - 1) & 1);
              nv++;
              mbar_expect(vfull, tiles * cs);
              for (int t = 0; t < tiles; t++)
                bulk(vreg + t * cs,
                     p.vp + ((size_t)(m.slice * ((p.T + 63) / 64) + m.h * (T / 64) + t) * p.steps +
                             ch * (kChunk / 16)) *
                                kStepBytes,
                     cs, vfull);
              for (int e = 0; e * p.per < na; e++) {
                get();
                mbar_arrive(full(s));
                adv();
              }
            }
        }
        if (p.lora && !waited) pdl_wait();
      }
    } else if (MODE)
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  } else {  // ---------------- consumers
    if constexpr (C::kMove) regs_inc<C::kBig ? 232 : 168>();
    if (MODE) asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    const int wg = warp >> 2, wt = tid & 127, ww = warp & 3, g = lane >> 2, q = lane & 3,
              mg = wg % MG, ng = wg / MG;
    int s = 0, ph = 0, n = 0, prev = -1, total = 0, vph = 0;  // n: stages taken
    if (MODE == 1)
      for (int i = cid; i < p.items; i += ncl) total += p.kc + nexp(item(i).h);
    const uint32_t peer = MODE == 1 ? mapa(bars, c ^ 1) : 0;
    auto free_stage = [&](int st, int number) {
      if (lane == 0) {
        mbar_arrive(wempty(st));
        if (SH == 1)
          mbar_arrive(xempty(st));
        else if (number + stages < total) {
          mbar_arrive(xempty(st));
          mbar_arrive_cl(peer + st * 24 + 16);
        }
      }
    };
    auto next = [&]() {
      prev = s;
      n++;
      if (++s == stages) {
        s = 0;
        ph ^= 1;
      }
    };
    float acc[MW][NB / 2];
    const int tile_tok = mg * MW * 64;  // of this warpgroup's first row
    for (int i = cid; i < p.items; i += ncl) {
      const Item m = item(i);
      const List* L = listof(m.h);
      const int na = p.lora ? __ldg(&L->n) : 0, off = m.h * T % 256;
      unsigned masks[MW], relevant;
      int rank_l;  // lane l: of adapter l of 32
      auto look = [&](int a) {
        rank_l = 0;
        unsigned any = 0;
        if (a + lane < na)
          rank_l = __ldg(&p.table[(size_t)__ldg(&L->slot[a + lane]) * p.S + m.slice].rank);
#pragma unroll
        for (int w = 0; w < MW; w++) {
          const int t = (off + tile_tok + w * 64) / 32;
          uint2 both = make_uint2(0, 0);
          if (a + lane < na) both = __ldg((const uint2*)&L->mask[a + lane][t]);
          masks[w] = (ww < 2 ? both.x : both.y) >> (ww & 1) * 16 & 0xFFFF;
          any |= both.x | both.y;
        }
        relevant = __ballot_sync(~0u, any != 0);
      };
      look(0);
#pragma unroll
      for (int w = 0; w < MW; w++) {
#pragma unroll
        for (int k = 0; k < NB / 2; k++) acc[w][k] = 0.f;
        pin(acc[w]);
      }
#pragma unroll 1
      for (int k = 0; k < p.kc; k++) {
        const uint64_t da = desc128(base + s * kStage + RB * 128 + mg * MW * 8192),
                       db = desc128(base + s * kStage + ng * NB * 128);
        mbar_wait(full(s), ph);
        wg_fence();
#pragma unroll
        for (int ks = 0; ks < 4; ks++)
#pragma unroll
          for (int w = 0; w < MW; w++) Mma<NB>::ss(acc[w], da + w * 512 + 2 * ks, db + 2 * ks);
        wg_commit();
        wg_wait<1>();
        __syncwarp();
        if (prev >= 0) free_stage(prev, n - 1);
        next();
      }
      wg_wait<0>();
      __syncwarp();
      free_stage(prev, n - 1);
      prev = -1;
#pragma unroll
      for (int w = 0; w < MW; w++) pin(acc[w]);
      if (warp == 0) TS(2);
      float own[MW][H0 * 16];
      if constexpr (MODE == 2) {
        const uint32_t rv = mapa(recv, c ^ 1), rb = mapa(rbar, c ^ 1);
#pragma unroll
        for (int i32 = 0; i32 < G; i32++) {
          const bool low = i32 < H0;
          if (low == (c == 1)) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
              const int o = (i32 * 4 + j) * 4;
              st_async4(rv + ((wg * H0 + (low ? i32 : i32 - H0)) * 4 + j) * 2048 + wt * 16,
                        acc[0][o], acc[0][o + 1], acc[0][o + 2], acc[0][o + 3], rb);
            }
          }
        }
#pragma unroll
        for (int k = 0; k < H0 * 16; k++)
          own[0][k] = c && H0 * 16 + k < NB / 2 ? acc[0][H0 * 16 + k < NB / 2 ? H0 * 16 + k : k]
                                                : acc[0][k];
      } else {
#pragma unroll
        for (int w = 0; w < MW; w++)
#pragma unroll
          for (int k = 0; k < H0 * 16; k++) own[w][k] = acc[w][k];
      }
      const int grp0 = (m.n0 + own0 + ng * NB) / 32, tile0 = (m.n0 + own0) / 64;
      if (na > 0)
        for (int ch = 0; ch < nch; ch++) {
          mbar_wait(vfull, vph);
          vph ^= 1;
          const int cs = min(p.steps - ch * (kChunk / 16), kChunk / 16) * (kStepBytes / 16);
          const uint64_t dv = desc_core(vreg, 128, 256) + mg * MW * cs;
#pragma unroll 1
          for (int a0 = 0; a0 < na; a0 += p.per) {
            if (a0 % 32 == 0 && (a0 > 0 || ch > 0)) look(a0);
            mbar_wait(full(s), ph);
            unsigned bits = (relevant >> (a0 & 31)) & (p.per == 32 ? ~0u : (1u << p.per) - 1);
#pragma unroll 1
            while (bits) {
              const int k = __ffs(bits) - 1, a = (a0 & 31) + k;
              bits &= bits - 1;
              const int nrt = max(0,
                                  (min(__shfl_sync(~0u, rank_l, a) - ch * kChunk, kChunk) + 7) / 8),
                        st = nrt / 2;
              const uint32_t cb = base + s * kStage + k * p.chunk_bytes;
#pragma unroll 1
              for (int t = 0; t < st; t++) {
#pragma unroll
                for (int w = 0; w < MW; w++) {
                  const unsigned mask = __shfl_sync(~0u, masks[w], a);
                  const bool lo = mask >> g & 1, hi = mask >> (g + 8) & 1;
                  const uint64_t da = dv + w * cs + t * 256;
                  float d[2][16];
                  auto add = [&](int i32) {
                    float (&z)[16] = d[i32 & 1];
#pragma unroll
                    for (int j = 0; j < 4; j++) {
                      const int o = (i32 * 4 + j) * 4;
                      if (lo) {
                        own[w][o] += z[j * 4];
                        own[w][o + 1] += z[j * 4 + 1];
                      }
                      if (hi) {
                        own[w][o + 2] += z[j * 4 + 2];
                        own[w][o + 3] += z[j * 4 + 3];
                      }
                    }
                  };
#pragma unroll
                  for (int i32 = 0; i32 < H0; i32++) {
                    const int grp = grp0 + i32;
                    const uint64_t db =
                        desc_core(cb + ((grp / 2 - tile0) * nrt * 2 + grp % 2) * 512, 1024, 128) +
                        t * 128;
                    wg_fence();
                    mma32_first(d[i32 & 1], da, db);
                    Mma<32>::ss(d[i32 & 1], da + 128, db);
                    wg_commit();
                    if (i32 > 0) {
                      wg_wait<1>();
                      pin(d[(i32 - 1) & 1]);
                      add(i32 - 1);
                    }
                  }
                  wg_wait<0>();
                  pin(d[(H0 - 1) & 1]);
                  add(H0 - 1);
                }
              }
            }
            __syncwarp();
            free_stage(s, n);
            next();
            prev = -1;
          }
          if (lane == 0) mbar_arrive(vempty);
        }
      if (warp == 0) TS(5);
      if constexpr (MODE == 2) {
        mbar_wait(rbar, 0);
#pragma unroll
        for (int i32 = 0; i32 < H0; i32++)
          if (i32 * 32 < own1 - own0) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
              const int o = (i32 * 4 + j) * 4;
              float4 b;
              asm volatile("ld.shared.v4.f32 {%0,%1,%2,%3}, [%4];"
                           : "=f"(b.x), "=f"(b.y), "=f"(b.z), "=f"(b.w)
                           : "r"(recv + ((wg * H0 + i32) * 4 + j) * 2048 + wt * 16)
                           : "memory");
              own[0][o] += b.x;
              own[0][o + 1] += b.y;
              own[0][o + 2] += b.z;
              own[0][o + 3] += b.w;
            }
          }
      }
#pragma unroll
      for (int w = 0; w < MW; w++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int t = m.h * T + tile_tok + w * 64 + ww * 16 + g + half * 8;
          bf16* row = p.y + (size_t)t * p.N + m.n0 + own0 + ng * NB + q * 8;
          for (int j = 0; j < m.slice; j++) row += p.out[j];
#pragma unroll
          for (int i32 = 0; i32 < H0; i32++) {
            const int o = i32 * 16 + half * 2;
            if (t < p.T && m.valid && i32 * 32 < own1 - own0 &&
                m.n0 + own0 + ng * NB + i32 * 32 + q * 8 < p.out[m.slice])
              *(uint4*)(row + i32 * 32) = make_uint4(
                  pack(own[w][o], own[w][o + 1]), pack(own[w][o + 4], own[w][o + 5]),
                  pack(own[w][o + 8], own[w][o + 9]), pack(own[w][o + 12], own[w][o + 13]));
          }
        }
      if (warp == 0) TS(6);
    }
  }
}

// ---------------------------------------------------------------- shrink: v' of 16 tokens of one
// slot and 16 ranks of a slice by a cluster of 8
struct Tile {
  int slot, begin, count;
};
struct ShrinkParams {
  const bf16* x;
  int K, S, steps, tiles;  // steps of 16 ranks a slice
  const Desc* table;
  const Tile* tile;
  const int* tokens;
  const float* scales;
  char* vp;
  int tiles64;
  unsigned* flag;
  int xmode;
  unsigned long long* ts;
};
constexpr int kC = 8, kWarps = 4;
template <int NG2>
__global__ void __launch_bounds__(640, 1) k_shrink(const __grid_constant__ ShrinkParams p) {
  __shared__ __align__(16) float sums[kWarps][NG2][32][4];
  __shared__ __align__(
      16) float inbox[2][kC][NG2 * 16];  // [..][from][token][rank]: of this block's NG2 tokens
  __shared__ __align__(8) unsigned long long bar[2];
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, g = lane >> 2, q = lane & 3;
  const int c = ctarank(), cl = blockIdx.x / kC, ncl = gridDim.x / kC;
  const bool lead = blockIdx.x == 0 && threadIdx.x == 0;
  if (warp == 0) TS(0);
  if (lead) {
    *(volatile unsigned*)p.flag = 0;
    __threadfence();
  }
  if (threadIdx.x == 0) {
    mbar_init(s2u(&bar[0]), 1);
    mbar_init(s2u(&bar[1]), 1);
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  }
  __syncthreads();
  if (p.xmode != 1) pdl_go();
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
  const int units = p.tiles * p.S * p.steps,
            part = (p.K / 32 + kC * kWarps - 1) / (kC * kWarps);  // steps of 32 features of a warp
  const int kb = (c * kWarps + warp) * part, ke = min(p.K / 32, kb + part);
  constexpr int B = 4;  // steps in flight
  bool waited = false;
  auto wait = [&]() {
    if (!waited) {
      pdl_wait();
      waited = true;
      if (lead) asm volatile("st.release.gpu.global.u32 [%0], 1;" ::"l"(p.flag) : "memory");
      if (warp == 0) TS(1);
      if (p.xmode == 1) pdl_go();
      asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    }
  };
  struct Unit {
    Tile tl;
    Desc d;
    int st, slice, rt;
    const char* a;
  };
  auto unit = [&](int u) {
    Unit r;
    r.st = u % p.steps;
    r.slice = u / p.steps % p.S;
    r.tl = p.tile[u / (p.steps * p.S)];
    r.d = p.table[(size_t)r.tl.slot * p.S + r.slice];
    r.rt = (r.d.rank + 7) / 8;
    r.a = (const char*)r.d.a + (size_t)r.st * 2 * 4096 + q * 128 + g * 16;
    return r;
  };
  uint4 lo[B], hi[B];
  auto load_a = [&](const Unit& r, int k) {
#pragma unroll
    for (int i = 0; i < B; i++) {
      const char* s = r.a + (size_t)((k + i) / 8) * r.rt * 4096 + (k + i) % 8 * 512;
      const bool in = k + i < ke && r.st * 2 < r.rt;
      lo[i] = in ? __ldcs((const uint4*)s) : make_uint4(0, 0, 0, 0);
      hi[i] = in && r.st * 2 + 1 < r.rt ? __ldcs((const uint4*)(s + 4096)) : make_uint4(0, 0, 0, 0);
    }
  };
  int turn = 0;
  Unit r;
  if (cl < units) {
    r = unit(cl);
    load_a(r, kb);
  }
  for (int u = cl; u < units; u += ncl) {
    Unit nx = r;
    if (u + ncl < units) nx = unit(u + ncl);
    const int mt = c * NG2 + threadIdx.x / 2;
    int tok = -1;
    float sc = 0;  // this thread's share of v': a token, eight ranks
    if (threadIdx.x < NG2 * 2 && mt < r.tl.count) {
      tok = p.tokens[r.tl.begin + mt];
      sc = r.d.scaling * p.scales[tok];
    }
    const bf16* xr[NG2];
    bool live[NG2];
#pragma unroll
    for (int n = 0; n < NG2; n++) {
      live[n] = n * 8 + g < r.tl.count;
      xr[n] = p.x + (size_t)(live[n] ? p.tokens[r.tl.begin + n * 8 + g] : 0) * p.K + q * 8;
    }
    wait();
    const bool work = r.st * 2 < r.rt;
    float f[NG2][4] = {};
    if (work) {
#pragma unroll 1
      for (int k = kb; k < ke; k += B) {
        uint4 xv[NG2][B];
#pragma unroll
        for (int n = 0; n < NG2; n++)
#pragma unroll
          for (int i = 0; i < B; i++)
            xv[n][i] = live[n] && k + i < ke ? *(const uint4*)(xr[n] + (k + i) * 32)
                                             : make_uint4(0, 0, 0, 0);
#pragma unroll
        for (int n = 0; n < NG2; n++) {
          if (n * 8 >= r.tl.count) break;
#pragma unroll
          for (int i = 0; i < B; i++) {
            mma(f[n], lo[i].x, hi[i].x, lo[i].y, hi[i].y, xv[n][i].x, xv[n][i].y);
            mma(f[n], lo[i].z, hi[i].z, lo[i].w, hi[i].w, xv[n][i].z, xv[n][i].w);
          }
        }
        if (k + B < ke) load_a(r, k + B);
      }
    }
    if (u + ncl < units) load_a(nx, kb);
    if (work) {
#pragma unroll
      for (int n = 0; n < NG2; n++)
        *(float4*)sums[warp][n][lane] = make_float4(f[n][0], f[n][1], f[n][2], f[n][3]);
      __syncthreads();
      const uint32_t mybar = s2u(&bar[turn & 1]);
      if (threadIdx.x == 0) mbar_expect(mybar, kC * NG2 * 64);
      // four ranks of a token to the block that finishes it
      if (threadIdx.x < NG2 * 32) {
        const int t = threadIdx.x / 4, rk = threadIdx.x % 4 * 4;
        float s[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const int rank = rk + e, ln = rank % 8 * 4 + t % 8 / 2, ix = rank / 8 * 2 + t % 2;
          float z = sums[0][t / 8][ln][ix];
#pragma unroll
          for (int w = 1; w < kWarps; w++) z += sums[w][t / 8][ln][ix];
          s[e] = z;
        }
        const int to = t / NG2;
        st_async4(mapa(s2u(&inbox[turn & 1][c][t % NG2 * 16 + rk]), to), s[0], s[1], s[2], s[3],
                  mapa(mybar, to));
      }
      if (threadIdx.x < 32) {
        mbar_wait(mybar, turn >> 1 & 1);
        if (tok >= 0) {
          const int hf = threadIdx.x % 2, lt = threadIdx.x / 2;
          float z[8] = {};
          uint4 o, l;  // eight ranks of a token
#pragma unroll
          for (int b = 0; b < kC; b++) {
            const float4 x0 = *(const float4*)&inbox[turn & 1][b][lt * 16 + 8 * hf],
                         x1 = *(const float4*)&inbox[turn & 1][b][lt * 16 + 8 * hf + 4];
            z[0] += x0.x;
            z[1] += x0.y;
            z[2] += x0.z;
            z[3] += x0.w;
            z[4] += x1.x;
            z[5] += x1.y;
            z[6] += x1.z;
            z[7] += x1.w;
          }
          auto low = [](float v) { return v - __bfloat162float(__float2bfloat16_rn(v)); };
#pragma unroll
          for (int e = 0; e < 8; e++) z[e] *= sc;
          o = make_uint4(pack(z[0], z[1]), pack(z[2], z[3]), pack(z[4], z[5]), pack(z[6], z[7]));
          l = make_uint4(pack(low(z[0]), low(z[1])), pack(low(z[2]), low(z[3])),
                         pack(low(z[4]), low(z[5])), pack(low(z[6]), low(z[7])));
          char* to = p.vp +
                     ((size_t)(r.slice * p.tiles64 + tok / 64) * p.steps + r.st) * kStepBytes +
                     tok % 64 / 8 * 256 + hf * 128 + tok % 8 * 16;
          *(uint4*)to = o;
          *(uint4*)(to + 2048) = l;
        }
      }
      __syncthreads();  // sums are free, and nobody is more than a turn ahead
      turn++;
    }
    r = nx;
  }
  wait();
  if (warp == 0) TS(2);
}
