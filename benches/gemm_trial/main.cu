// Checks and times the trial. LTLIB=<libcublasLt.so.13> ./gemm_trial check | decode T... | prefill T...
#include <dlfcn.h>

#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <string>
#include <vector>

#include "reg.h"
std::vector<Entry>& reg() {
  static std::vector<Entry> r;
  return r;
}
void init0();
void init1();
void init2();
void init3();
static cudaStream_t st;
static CUresult (*enc)(CUtensorMap*, CUtensorMapDataType, cuuint32_t, void*, const cuuint64_t*,
                       const cuuint64_t*, const cuuint32_t*, const cuuint32_t*,
                       CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                       CUtensorMapFloatOOBfill);
#define CK(x)                                                                                \
  do {                                                                                       \
    cudaError_t e_ = (x);                                                                    \
    if (e_ != cudaSuccess) {                                                                 \
      printf("CUDA error %s at %s:%d %s\n", cudaGetErrorString(e_), __FILE__, __LINE__, #x); \
      fflush(stdout);                                                                        \
      exit(1);                                                                               \
    }                                                                                        \
  } while (0)
#include "lt.h"
__global__ void k_rand(bf16* p, size_t n, uint64_t seed, float sc) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
       i += (size_t)gridDim.x * blockDim.x) {
    uint64_t z = (i + seed * 0x9E3779B97F4A7C15ull) * 0xBF58476D1CE4E5B9ull;
    z ^= z >> 31;
    z *= 0x94D049BB133111EBull;
    z ^= z >> 29;
    z *= 0xBF58476D1CE4E5B9ull;
    z ^= z >> 32;
    p[i] = __float2bfloat16(((float)(uint32_t)z / 2147483648.f - 1.f) * sc);
  }
}
__global__ void k_nan(bf16* p, size_t n) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n;
       i += (size_t)gridDim.x * blockDim.x)
    ((uint16_t*)p)[i] = 0x7FC0;
}
__device__ double blk(double a) {
  __shared__ double s[8];
  for (int o = 16; o; o >>= 1) a += __shfl_down_sync(~0u, a, o);
  if (!(threadIdx.x & 31)) s[threadIdx.x >> 5] = a;
  __syncthreads();
  double r = 0;
  for (int i = 0; i < 8; i++) r += s[i];
  __syncthreads();
  return r;
}
__device__ double AT(const Desc& d, int r, int k) {
  int rt = (d.rank + 7) / 8;
  return __bfloat162float(
      d.a[(((size_t)(k / 256) * rt + r / 8) * 32 + k % 256 / 8) * 64 + r % 8 * 8 + k % 8]);
}
__device__ double BT(const Desc& d, int n, int r) {
  int rt = (d.rank + 7) / 8, m = n % 32;
  return __bfloat162float(
      d.b[(((size_t)(n / 64) * rt + r / 8) * 8 + n % 64 / 32 * 4 + m % 8 / 2) * 64 +
          (m / 8 * 2 + m % 2) * 8 + r % 8]);
}
__global__ void k_refv(const bf16* x, const Desc* table, const int* slot, int K, int S, int R,
                       double* v) {
  int j = blockIdx.x / R, r = blockIdx.x % R, t = blockIdx.y;
  double a = 0;
  if (slot[t] >= 0) {
    Desc d = table[slot[t] * S + j];
    if (r < d.rank)
      for (int k = threadIdx.x; k < K; k += 256)
        a += (double)__bfloat162float(x[(size_t)t * K + k]) * AT(d, r, k);
  }
  a = blk(a);
  if (!threadIdx.x) v[((size_t)t * S + j) * R + r] = a;
}
__global__ void k_ref(const bf16* x, const bf16* W, const Desc* table, const int* slot,
                      const float* sc, int N, int K, int R, int S, int s1, int s2, const double* v,
                      double* yb, double* yd) {
  int n = blockIdx.x, t = blockIdx.y;
  double a = 0;
  for (int k = threadIdx.x; k < K; k += 256)
    a += (double)__bfloat162float(x[(size_t)t * K + k]) * __bfloat162float(W[(size_t)n * K + k]);
  a = blk(a);
  if (!threadIdx.x) {
    yb[(size_t)t * N + n] = a;
    double d = 0;
    if (slot[t] >= 0) {
      int j = (n >= s1) + (n >= s2);
      Desc m = table[slot[t] * S + j];
      int nn = n - (j == 2 ? s2 : j == 1 ? s1 : 0);
      for (int r = 0; r < m.rank; r++) d += BT(m, nn, r) * v[((size_t)t * S + j) * R + r];
      d *= sc[t] * m.scaling;
    }
    yd[(size_t)t * N + n] = d;
  }
}
__global__ void k_read(const uint4* p, size_t n, uint32_t* o) {
  uint32_t a = 0;
  size_t st = (size_t)gridDim.x * blockDim.x, i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  for (; i + 7 * st < n; i += 8 * st) {
    uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = __ldcs(p + i + j * st);
#pragma unroll
    for (int j = 0; j < 8; j++) a ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  if (a == 0x12345) *o = a;
}
struct Shape {
  const char* name;
  int N, K, S, out[3];
};
static Shape SH[4] = {{"qkv", 6144, 4096, 3, {4096, 1024, 1024}},
                      {"o", 4096, 4096, 1, {4096}},
                      {"gate_up", 24576, 4096, 2, {12288, 12288}},
                      {"down", 4096, 12288, 1, {4096}}};
static int NC = 8;
constexpr int NL = 16;
static bf16 *W[4], *W0, *X[4], *POOL, *Y;
static size_t poolN, YST;
static uint4* VP;
static unsigned* FLAG;
static CUtensorMap tmap(const void* p, int rank, std::vector<int64_t> d, std::vector<int64_t> sd,
                        std::vector<int> b) {
  CUtensorMap m;
  cuuint64_t dd[5], ss[5];
  cuuint32_t bb[5], e[5] = {1, 1, 1, 1, 1};
  for (int i = 0; i < rank; i++) {
    dd[i] = d[i];
    bb[i] = b[i];
    if (i) ss[i - 1] = sd[i - 1];
  }
  CUresult r = enc(&m, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, (void*)p, dd, ss, bb, e,
                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                   CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  if (r) {
    printf("encode failed %d\n", r);
    exit(1);
  }
  return m;
}
template <class F>
static double bench(int n, F f, int reps = 7) {
  cudaGraph_t gr;
  cudaGraphExec_t ge;
  CK(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal));
  bool ok = true;
  for (int i = 0; i < n && ok; i++) ok = f(i);
  CK(cudaStreamEndCapture(st, &gr));
  if (!ok) {
    cudaGraphDestroy(gr);
    return -1;
  }
  CK(cudaGraphInstantiate(&ge, gr, 0));
  cudaEvent_t a, b;
  cudaEventCreate(&a);
  cudaEventCreate(&b);
  std::vector<float> v;
  for (int i = 0; i < reps + 2; i++) {
    CK(cudaEventRecord(a, st));
    CK(cudaGraphLaunch(ge, st));
    CK(cudaEventRecord(b, st));
    CK(cudaStreamSynchronize(st));
    float ms;
    cudaEventElapsedTime(&ms, a, b);
    if (i >= 2) v.push_back(ms);
  }
  CK(cudaGetLastError());
  cudaGraphExecDestroy(ge);
  cudaGraphDestroy(gr);
  cudaEventDestroy(a);
  cudaEventDestroy(b);
  std::sort(v.begin(), v.end());
  return v[v.size() / 2] * 1000.0 / n;
}
template <class V>
static V* up(const std::vector<V>& h) {
  V* d;
  size_t n = std::max<size_t>(h.size(), 1) * sizeof(V);
  CK(cudaMalloc(&d, n));
  if (h.size()) CK(cudaMemcpy(d, h.data(), h.size() * sizeof(V), cudaMemcpyHostToDevice));
  return d;
}
struct Batch {
  int T, nad, R;
  std::vector<int> slot;
  List* list;
  Tile* tile;
  int tiles;
  int* tokens;
  float* scales;
  std::vector<float> sc;
};
static Batch batch(int T, int nad, int R, bool sorted, std::vector<int> slot = {}) {
  Batch b;
  b.T = T;
  b.nad = nad;
  b.R = R;
  if (slot.empty())
    for (int t = 0; t < T; t++)
      slot.push_back(nad == 0 ? -1 : sorted ? (int)((long)t * nad / T) : t % nad);
  b.slot = slot;
  for (int t = 0; t < T; t++) b.sc.push_back(0.5f + 0.125f * (t % 8));
  std::vector<List> L((T + 255) / 256);
  memset(L.data(), 0, L.size() * sizeof(List));
  for (int t = 0; t < T; t++)
    if (slot[t] >= 0) {
      List& l = L[t / 256];
      int a = 0;
      while (a < l.n && l.slot[a] != slot[t]) a++;
      if (a == l.n) l.slot[l.n++] = slot[t];
      l.mask[a][t % 256 / 32] |= 1u << t % 32;
    }
  std::vector<Tile> tl;
  std::vector<int> tk;
  for (int s = 0; s < std::max(nad, 1); s++) {
    int b0 = tk.size();
    for (int t = 0; t < T; t++)
      if (slot[t] == s) tk.push_back(t);
    for (int i = b0; i < (int)tk.size(); i += 16)
      tl.push_back({s, i, std::min(16, (int)tk.size() - i)});
  }
  b.list = up(L);
  b.tile = up(tl);
  b.tiles = tl.size();
  b.tokens = up(tk);
  b.scales = up(b.sc);
  return b;
}
static void drop(Batch& b) {
  CK(cudaDeviceSynchronize());
  cudaFree(b.list);
  cudaFree(b.tile);
  cudaFree(b.tokens);
  cudaFree(b.scales);
}
// descriptors of `sets` copies of nad adapters, cold one after the other
struct Tables {
  Desc* d;
  int sets, nad;
};
static Tables tables(int s, int nad, const std::vector<int>& ranks, int sets) {
  const Shape& h = SH[s];
  std::vector<Desc> v;
  size_t at = 0, one = 0;
  for (int a = 0; a < nad; a++)
    for (int j = 0; j < h.S; j++) {
      int rt = (ranks[a % ranks.size()] + 7) / 8 * 8;
      one += (size_t)rt * ((h.K + 255) / 256 * 256) + (size_t)rt * ((h.out[j] + 63) / 64 * 64);
    }
  sets = std::max<int>(1, std::min<size_t>(sets, poolN / one));
  for (int c = 0; c < sets; c++)
    for (int a = 0; a < nad; a++)
      for (int j = 0; j < h.S; j++) {
        int r = ranks[a % ranks.size()], rt = (r + 7) / 8 * 8;
        Desc d;
        d.a = POOL + at;
        at += (size_t)rt * ((h.K + 255) / 256 * 256);
        d.b = POOL + at;
        at += (size_t)rt * ((h.out[j] + 63) / 64 * 64);
        d.rank = r;
        d.scaling = 0.5f + a % 4 * 0.25f;
        v.push_back(d);
      }
  return {up(v), sets, nad};
}
struct GC {
  int T, RB, MODE, budget, trig, places = 4;
};
static unsigned long long* TSB = nullptr;
static int ts_node = -1;
static std::string cname(const GC& c) {
  char b[96];
  snprintf(b, 96, "T%d RB%d M%d sm%d tr%d pl%d", c.T, c.RB, c.MODE, c.budget, c.trig, c.places);
  return b;
}
static const Entry* find(const GC& c) {
  for (auto& e : reg())
    if (e.T == c.T && e.RB == c.RB && e.MODE == c.MODE) return &e;
  return nullptr;
}
static int xmode = 0, NOSHR = 0, shr_most = 256;
static bool noexp = false;
static bool shrink(int s, const Batch& b, const Desc* table, const bf16* x) {
  const Shape& h = SH[s];
  ShrinkParams p;
  memset(&p, 0, sizeof p);
  p.x = x;
  p.K = h.K;
  p.S = h.S;
  p.steps = (b.R + 15) / 16;
  p.tiles = b.tiles;
  p.table = table;
  p.tile = b.tile;
  p.tokens = b.tokens;
  p.scales = b.scales;
  p.vp = (char*)VP;
  p.tiles64 = (b.T + 63) / 64;
  p.flag = FLAG;
  p.xmode = xmode;
  p.ts = TSB ? TSB + (size_t)(ts_node * 2) * 1024 * 8 : nullptr;
  int units = p.tiles * p.S * p.steps, C = kC, most = b.T > 256 ? 132 * 6 : shr_most;
  cudaLaunchConfig_t lc = {};
  lc.gridDim = std::max(1, std::min(units, most / C)) * C;
  lc.blockDim = 128;
  lc.stream = st;
  cudaLaunchAttribute at[3];
  at[0].id = cudaLaunchAttributeClusterDimension;
  at[0].val.clusterDim.x = C;
  at[0].val.clusterDim.y = at[0].val.clusterDim.z = 1;
  at[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  at[1].val.programmaticStreamSerializationAllowed = 1;
  at[2].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
  at[2].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicyLoadBalancing;
  lc.attrs = at;
  lc.numAttrs = 3;
  void* args[] = {&p};
  CK(cudaLaunchKernelExC(&lc, (const void*)k_shrink<2>, args));
  return true;
}
static bool gemm(int s, const GC& c, const Batch& b, const Desc* table, const bf16* x,
                 const bf16* w, bf16* y, bool lora) {
  const Shape& h = SH[s];
  const Entry* e = find(c);
  if (!e) return false;
  const int CL = c.MODE ? 2 : 1;
  GemmParams p;
  memset(&p, 0, sizeof p);
  p.N = h.N;
  p.T = b.T;
  p.K = h.K;
  p.S = h.S;
  int nrb = 0;
  size_t at = 0;
  for (int j = 0; j < h.S; j++) {
    p.out[j] = h.out[j];
    p.first[j] = nrb;
    nrb += (h.out[j] + c.RB - 1) / c.RB;
    int64_t ld = h.K * 2;
    p.w[j] = tmap(w + at, 5, {h.K, 2, 4, 4, h.out[j] / 32}, {ld, 8 * ld, 2 * ld, 32 * ld},
                  {64, 2, 4, 4, c.RB / 32});
    at += (size_t)h.out[j] * h.K;
  }
  p.first[h.S] = nrb;
  p.ntok = (b.T + c.T - 1) / c.T;
  p.x = tmap(x, 2, {h.K, b.T}, {h.K * 2}, {64, c.MODE == 1 ? c.T / 2 : c.T});
  p.items = (c.MODE == 1 ? (nrb + 1) / 2 : nrb) * p.ntok;
  p.kc = h.K / 64 / (c.MODE == 2 ? 2 : 1);
  p.lora = lora && !noexp;
  p.steps = (b.R + 15) / 16;
  p.trig = c.trig;
  p.ts = TSB ? TSB + (size_t)(ts_node * 2 + 1) * 1024 * 8 : nullptr;
  const int stage = c.RB * 128 + c.T * 128,
            fixed =
                1024 + (c.MODE == 2 ? e->WGS * e->H0 * 8192 : 0) + (p.lora ? e->vbytes : 0) + 64;
  p.stages = std::min(24, (c.budget * 1024 - fixed) / (stage + 24));
  if (p.stages < 3) return false;
  const int sm = fixed + p.stages * (stage + 24);
  const int chunk = std::min(p.steps * 16, e->chunk), cols = c.MODE == 2 ? e->H0 * 32 : c.RB,
            nt = c.RB % 64 == 0 && cols % 64 == 0 ? cols / 64 : (cols + 32 + 63) / 64;
  p.chunk_bytes = nt * chunk * 128;
  if (c.MODE == 2 && c.RB == 64) p.chunk_bytes = chunk * 128;
  p.per = 16;
  while (p.per > 1 && p.per * p.chunk_bytes > stage) p.per /= 2;
  if (p.lora && p.per * p.chunk_bytes > stage) {
    printf("stage too small\n");
    return false;
  }
  p.table = table;
  p.list = b.list;
  p.vp = (const char*)VP;
  p.flag = FLAG;
  p.xmode = lora ? xmode : 2;
  p.y = y;
  const int clusters = p.items, most = c.MODE ? 66 : 132;
  if (c.MODE == 2 && clusters > most) return false;
  const int rounds = (clusters + most - 1) / most,
            grid = rounds > 2 ? most : (clusters + rounds - 1) / rounds;
  cudaLaunchConfig_t lc = {};
  lc.gridDim = grid * CL;
  lc.blockDim = e->WGS * 128 + 128;
  lc.dynamicSmemBytes = sm;
  lc.stream = st;
  static std::map<const void*, int> smset;
  if (smset[e->fn] < sm) {
    CK(cudaFuncSetAttribute(e->fn, cudaFuncAttributeMaxDynamicSharedMemorySize, sm));
    smset[e->fn] = sm;
  }
  cudaLaunchAttribute a2[3];
  a2[0].id = cudaLaunchAttributeClusterDimension;
  a2[0].val.clusterDim.x = CL;
  a2[0].val.clusterDim.y = a2[0].val.clusterDim.z = 1;
  a2[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  a2[1].val.programmaticStreamSerializationAllowed = 1;
  a2[2].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
  a2[2].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicyLoadBalancing;
  lc.attrs = a2;
  lc.numAttrs = 3;
  void* args[] = {&p};
  CK(cudaLaunchKernelExC(&lc, e->fn, args));
  return true;
}
static bool node(int s, const GC& c, const Batch& b, const Tables* t, int L, int i) {
  const Desc* d = t ? t->d + (size_t)(L % t->sets) * t->nad * SH[s].S : nullptr;
  if (t && !NOSHR) shrink(s, b, d, X[s]);
  return gemm(s, c, b, d, X[s], W[s] + (size_t)(L % NC) * SH[s].N * SH[s].K, Y + (i % 4) * YST,
              t && NOSHR != 2);
}
static int fails = 0;
static void check(int s, const GC& c, int T, int nad, std::vector<int> ranks, bool sorted,
                  int bad_slot) {
  const Shape& h = SH[s];
  size_t n = (size_t)T * h.N;
  double *v, *yb, *yd;
  int R = *std::max_element(ranks.begin(), ranks.end());
  CK(cudaMalloc(&v, (size_t)T * h.S * R * 8));
  CK(cudaMalloc(&yb, n * 8));
  CK(cudaMalloc(&yd, n * 8));
  Batch b0 = batch(T, nad, R, sorted);
  std::vector<int> sl = b0.slot;
  sl[T / 3] = -1;
  if (T > 40) sl[T - 1] = -1;
  drop(b0);
  Batch b = batch(T, nad, R, sorted, sl);
  Tables t = tables(s, nad, ranks, 1);
  int* ds = up(sl);
  float* dsc = up(b.sc);
  k_refv<<<dim3(h.S * R, T), 256, 0, st>>>(X[s], t.d, ds, h.K, h.S, R, v);
  k_ref<<<dim3(h.N, T), 256, 0, st>>>(X[s], W[s], t.d, ds, dsc, h.N, h.K, R, h.S,
                                      h.S > 1 ? h.out[0] : INT_MAX,
                                      h.S > 2 ? h.out[0] + h.out[1] : INT_MAX, v, yb, yd);
  CK(cudaStreamSynchronize(st));
  std::vector<double> hb(n), hd(n);
  CK(cudaMemcpy(hb.data(), yb, n * 8, cudaMemcpyDeviceToHost));
  CK(cudaMemcpy(hd.data(), yd, n * 8, cudaMemcpyDeviceToHost));
  std::vector<uint16_t> y0(n), y1(n), y2(n);
  bool ok = true;
  auto f = [](uint16_t u) {
    uint32_t w = (uint32_t)u << 16;
    float x;
    memcpy(&x, &w, 4);
    return (double)x;
  };
  auto go = [&](bool lora, const bf16* w, std::vector<uint16_t>& out) {
    CK(cudaMemsetAsync(Y, 0xFF, n * 2, st));
    CK(cudaMemsetAsync(VP, 0xFF, (size_t)(T + 63) / 64 * h.S * ((R + 15) / 16) * 4096, st));
    CK(cudaDeviceSynchronize());
    if (lora) shrink(s, b, t.d, X[s]);
    ok = gemm(s, c, b, t.d, X[s], w, Y, lora) && ok;
    cudaError_t e = cudaStreamSynchronize(st);
    if (e) {
      printf("check %s T%d %s lora %d: %s\n", h.name, T, cname(c).c_str(), lora,
             cudaGetErrorString(e));
      exit(1);
    }
    CK(cudaMemcpy(out.data(), Y, n * 2, cudaMemcpyDeviceToHost));
  };
  auto err = [&](const std::vector<uint16_t>& y, bool base, bool delta, size_t& bad) {
    double num = 0, den = 0;
    for (size_t i = 0; i < n; i++) {
      double r = (base ? hb[i] : 0) + (delta ? hd[i] : 0), d = f(y[i]) - r;
      if (d != d)
        bad++;
      else
        num += d * d;
      den += r * r;
    }
    return sqrt(num / (den + 1e-30));
  };
  size_t bad = 0, bits = 0, cross = 0;
  go(false, W[s], y0);
  double eb = err(y0, true, false, bad);
  if (!ok) {
    printf("check %s %s: not launched\n", h.name, cname(c).c_str());
    fails++;
    return;
  }
  go(true, W0, y1);
  double ed = err(y1, false, true, bad);
  go(true, W[s], y1);
  double ey = err(y1, true, true, bad);
  int rep = 0;
  for (int q = 0; q < 3; q++) {
    go(true, W[s], y2);
    rep += memcmp(y1.data(), y2.data(), n * 2) != 0;
  }
  for (int tk = 0; tk < T; tk++)
    if (sl[tk] < 0) bits += memcmp(&y0[(size_t)tk * h.N], &y1[(size_t)tk * h.N], h.N * 2) != 0;
  // NaN factors of one slot: no other token's bits change
  {
    std::vector<Desc> hd2(nad * h.S);
    CK(cudaMemcpy(hd2.data(), t.d, hd2.size() * sizeof(Desc), cudaMemcpyDeviceToHost));
    bf16* q;
    size_t big = (size_t)64 * std::max(h.K, h.N) * 2;
    CK(cudaMalloc(&q, big * 4));
    k_nan<<<256, 256, 0, st>>>(q, big * 2);
    for (int j = 0; j < h.S; j++) {
      hd2[bad_slot * h.S + j].a = q;
      hd2[bad_slot * h.S + j].b = q;
    }
    Desc* d2 = up(hd2);
    std::swap(t.d, d2);
    go(true, W[s], y2);
    std::swap(t.d, d2);
    for (int tk = 0; tk < T; tk++)
      if (sl[tk] != bad_slot)
        cross += memcmp(&y2[(size_t)tk * h.N], &y1[(size_t)tk * h.N], h.N * 2) != 0;
    cudaFree(q);
    cudaFree(d2);
  }
  bool good = eb < 2.5e-3 && ey < 2.5e-3 && ed < 2.5e-3 && !bad && !rep && !bits && !cross;
  fails += !good;
  printf(
      "check %-8s T%-4d %-24s ad%-3d r%d %s: err base %.2e y %.2e delta %.2e NaN/unwritten %zu "
      "nondet %d base-row bits %zu NaN crossed %zu %s\n",
      h.name, T, cname(c).c_str(), nad, R, sorted ? "sorted" : "mixed ", eb, ey, ed, bad, rep, bits,
      cross, good ? "ok" : "BAD");
  cudaFree(v);
  cudaFree(yb);
  cudaFree(yd);
  cudaFree(ds);
  cudaFree(dsc);
  cudaFree(t.d);
  drop(b);
}
static GC pick(int s, int T) {
  if (T > 256) return GC{256, 128, 1, 226, 4};
  if (T <= 64)
    return s == 0 ? GC{64, 96, 2, 218, 4} : s == 2 ? GC{64, 192, 0, 218, 4} : GC{64, 64, 2, 218, 4};
  if (T <= 128)
    return s == 0   ? GC{128, 96, 2, 218, 4}
           : s == 2 ? GC{128, 192, 0, 218, 4}
                    : GC{128, 64, 2, 218, 4};
  return s == 0   ? GC{128, 96, 1, 218, 4}
         : s == 2 ? GC{128, 192, 1, 218, 4}
                  : GC{128, 64, 1, 218, 4};
}
int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  std::string mode = argc > 1 ? argv[1] : "check";
  init0();
  init1();
  init2();
  init3();
  CK(cudaStreamCreate(&st));
  cudaDriverEntryPointQueryResult qr;
  CK(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", (void**)&enc, 12000,
                                      cudaEnableDefault, &qr));
  CK(cudaFuncSetAttribute((const void*)k_shrink<2>, cudaFuncAttributePreferredSharedMemoryCarveout,
                          100));
  for (auto& e : reg())
    CK(cudaFuncSetAttribute(e.fn, cudaFuncAttributePreferredSharedMemoryCarveout, 100));
  bool lt = lt_init();
  cudaDeviceProp dp;
  CK(cudaGetDeviceProperties(&dp, 0));
  printf("%s, %d SMs\n", dp.name, dp.multiProcessorCount);
  if (const char* e = getenv("XMODE")) xmode = atoi(e);
  if (const char* e = getenv("SHM")) shr_most = atoi(e);
  std::vector<int> Ts;
  for (int i = 2; i < argc; i++)
    if (atoi(argv[i])) Ts.push_back(atoi(argv[i]));
  int TMAX = mode == "check" ? 512 : 256;
  for (int t : Ts) TMAX = std::max(TMAX, t);
  if (mode == "check") NC = 1;
  if (mode == "prefill") NC = 4;
  YST = (size_t)SH[2].N * TMAX;
  auto al = [&](size_t n, uint64_t seed, float sc) {
    bf16* p;
    CK(cudaMalloc(&p, n * 2));
    k_rand<<<1056, 256, 0, st>>>(p, n, seed, sc);
    return p;
  };
  for (int s = 0; s < 4; s++) {
    W[s] = al((size_t)SH[s].N * SH[s].K * NC, 11 + s, 1.7f / sqrtf(SH[s].K));
    X[s] = al((size_t)TMAX * SH[s].K, 31 + s, 1.f);
  }
  poolN = (size_t)(mode == "decode" ? 6 : 1) << 30;
  POOL = al(poolN, 51, 0.03f);
  size_t w0 = (size_t)SH[2].N * SH[2].K;
  CK(cudaMalloc(&W0, w0 * 2));
  CK(cudaMemset(W0, 0, w0 * 2));
  CK(cudaMalloc(&Y, YST * 2 * 4));
  CK(cudaMalloc(&VP, (size_t)256 << 20));
  CK(cudaMemset(VP, 0, (size_t)256 << 20));
  CK(cudaMalloc(&FLAG, 256));
  CK(cudaMemset(FLAG, 0, 256));
  CK(cudaStreamSynchronize(st));
  if (mode == "check") {
    for (int xm : {2, 0, 1}) {
      xmode = xm;
      for (int T : {40, 64, 100, 128, 200, 256, 512})
        for (int s : {0, 1, 2, 3}) {
          if (xm && (T == 40 || T == 100 || T == 200)) continue;
          if (T > 128 && s == 3) continue;
          if (T > 256 && (s > 1 || xm != 2)) continue;
          GC c = pick(s, T);
          check(s, c, T, 8, {16}, false, 3);
          if (xm != 2) continue;
          if (s < 3) {
            check(s, c, T, 3, {64, 16, 32}, true, 1);
            check(s, c, T, 5, {16, 48, 32, 128, 80}, false, 3);
            check(s, c, T, T == 40 ? 40 : T / 2, {16}, false, 2);
          }
        }
    }
    printf("%d checks failed\n", fails);
    return fails != 0;
  }
  double hbm;
  {
    double best = 1e9;
    size_t n = poolN * 2 / 16;
    for (int bl : {132 * 4, 132 * 8, 132 * 16})
      best = std::min(best, bench(1, [&](int) {
                        k_read<<<bl, 256, 0, st>>>((uint4*)POOL, n, (uint32_t*)Y);
                        return true;
                      }));
    hbm = n * 16 / best * 1e-6;
    printf("HBM read %.3f TB/s\n", hbm);
  }
  const bool pre = mode == "prefill";
  const int NN = pre ? 2 : NL;
  std::vector<std::string> table;
  for (int T : Ts) {
    LtOp lo[4];
    double lop[4];
    for (int s = 0; s < 4 && lt; s++) {
      lo[s] = lt_op(SH[s].N, SH[s].K, T);
      lop[s] = 1e9;
      int n = pre ? 2 : std::max(8, std::min(24, (int)(8e8 / ((double)SH[s].N * SH[s].K * 2))));
      for (size_t i = 0; i < lo[s].h.size(); i++) {
        if (lt_run(lo[s], i, W[s], X[s], Y, st)) continue;
        CK(cudaStreamSynchronize(st));
        double u = bench(
            n,
            [&](int k) {
              return lt_run(lo[s], i, W[s] + (size_t)(k % NC) * SH[s].N * SH[s].K, X[s],
                            Y + (k % 4) * YST, st) == 0;
            },
            3);
        if (u > 0 && u < lop[s]) {
          lop[s] = u;
          lo[s].best = i;
        }
      }
    }
    auto ltchain = [&]() {
      return 4 * bench(
                     4 * NN,
                     [&](int i) {
                       int s = i % 4;
                       return lt_run(lo[s], lo[s].best,
                                     W[s] + (size_t)(i / 4 % NC) * SH[s].N * SH[s].K, X[s],
                                     Y + (i % 4) * YST, st) == 0;
                     },
                     9);
    };
    GC best[4];
    Batch none = batch(T, 0, 16, true), b16 = batch(T, 8, 16, false);
    auto single = [&](int s, const GC& c, const Batch& b, const Tables* t, int reps = 5) {
      int n = pre ? 3 : std::max(6, std::min(24, (int)(8e8 / ((double)SH[s].N * SH[s].K * 2))));
      return bench(n, [&](int i) { return node(s, c, b, t, i, i); }, reps);
    };
    GC bbase[4];
    for (int s = 0; s < 4;
         s++) {  // tune: budgets and triggers, with 8 x r16 unsorted, and without adapters
      Tables t = tables(s, 8, {16}, NL);
      std::vector<GC> ds;
      GC d = pick(s, T);
      double ob = 1e9, ou = 1e9;
      ds.push_back(d);
      if (pre) {
        d.T = 128;
        d.RB = 192;
        ds.push_back(d);
      } else {
        if (T > 64 && T <= 128 && s == 2) ds.push_back(GC{128, 192, 1, 190, 4});
        if (T > 128) {
          if (s == 0) ds.push_back(GC{128, 96, 0, 190, 4});
          if (s == 1 || s == 3) ds.push_back(GC{128, 64, 0, 190, 4});
          if (s == 2) ds.push_back(GC{128, 192, 0, 190, 4});
        }
      }
      for (auto d2 : ds)
        for (int bud : {130, 160, 190, 218})
          for (int tr : {2, 6, 12, 10000})
            for (int pe : {0}) {
              if (pre && (bud < 190 || tr == 2)) continue;
              GC c = d2;
              c.budget = bud;
              c.trig = tr;
              c.places = 4 + pe;
              double b0 = pe ? 1e9 : single(s, c, none, nullptr, 3), u = single(s, c, b16, &t, 3);
              if (b0 > 0 && b0 < ob) {
                ob = b0;
                bbase[s] = c;
              }
              if (u > 0 && u < ou) {
                ou = u;
                best[s] = c;
              }
              if (getenv("V"))
                printf("   %s %-8s base %.2f r16 %.2f\n", cname(c).c_str(), SH[s].name, pe ? 0 : b0,
                       u);
            }
      printf("T%d %-8s lt %.2f base %.2f (%s) r16 mixed %.2f (%s)", T, SH[s].name, lop[s], ob,
             cname(bbase[s]).c_str(), ou, cname(best[s]).c_str());
      NOSHR = 1;
      int xs = xmode;
      xmode = 2;
      double ex = single(s, best[s], b16, &t);
      xmode = xs;
      NOSHR = 0;
      double sh = bench(
          8, [&](int i) { return shrink(s, b16, t.d + (size_t)(i % t.sets) * 8 * SH[s].S, X[s]); },
          5);
      Tables t64 = tables(s, 8, {64}, NL);
      Batch b64 = batch(T, 8, 64, false);
      double sh64 = bench(
          8,
          [&](int i) { return shrink(s, b64, t64.d + (size_t)(i % t64.sets) * 8 * SH[s].S, X[s]); },
          5);
      double u64 = single(s, best[s], b64, &t64);
      NOSHR = 1;
      xmode = 2;
      double ex64 = single(s, best[s], b64, &t64);
      xmode = xs;
      NOSHR = 0;
      printf(" expand alone %.2f shrink alone %.2f | r64 %.2f expand %.2f shrink %.2f\n", ex, sh,
             u64, ex64, sh64);
      CK(cudaDeviceSynchronize());
      cudaFree(t.d);
      cudaFree(t64.d);
      drop(b64);
    }
    auto trace = [&](int nad, int R, bool sorted) {  // one layer inside a chain of six
      Batch b = batch(T, nad, std::max(R, 16), sorted);
      Tables t[4];
      if (nad)
        for (int s = 0; s < 4; s++) t[s] = tables(s, nad, {R}, NL);
      size_t n = (size_t)5 * 2 * 1024 * 8;
      CK(cudaMalloc(&TSB, n * 8));
      CK(cudaMemset(TSB, 0, n * 8));
      unsigned long long* keep = TSB;
      bench(
          24,
          [&](int i) {
            int s = i % 4;
            ts_node = i / 4 == 3 ? s : 4;
            bool ok = node(s, nad ? best[s] : bbase[s], b, nad ? &t[s] : nullptr, i / 4, i);
            return ok;
          },
          3);
      TSB = nullptr;
      std::vector<unsigned long long> h(n);
      CK(cudaMemcpy(h.data(), keep, n * 8, cudaMemcpyDeviceToHost));
      cudaFree(keep);
      unsigned long long t0 = ~0ull;
      for (int bl = 0; bl < 1024; bl++)
        for (int w = 0; w < 2; w++)
          if (h[((size_t)w * 1024 + bl) * 8]) t0 = std::min(t0, h[((size_t)w * 1024 + bl) * 8]);
      const char* nm[2][7] = {{"start", "x", "end"},
                              {"start", "x", "main end", "v", "delta", "added", "end"}};
      for (int s = 0; s < 4; s++)
        for (int w = nad ? 0 : 1; w < 2; w++) {
          printf("   trace T%d ad%d r%d %-8s %s:", T, nad, R, SH[s].name, w ? "gemm  " : "shrink");
          for (int k = 0; k < (w ? 7 : 3); k++) {
            double lo = 1e18, hi = 0, su = 0;
            int c = 0;
            for (int bl = 0; bl < 1024; bl++) {
              auto v = h[((size_t)(s * 2 + w) * 1024 + bl) * 8 + k];
              if (v) {
                double d = ((double)v - (double)t0) * 1e-3;
                lo = std::min(lo, d);
                hi = std::max(hi, d);
                su += d;
                c++;
              }
            }
            if (c) printf(" %s %.1f/%.1f/%.1f", nm[w][k], lo, su / c, hi);
          }
          printf("\n");
        }
      drop(b);
      if (nad)
        for (int s = 0; s < 4; s++) cudaFree(t[s].d);
    };
    if (getenv("TR")) {
      trace(0, 16, true);
      trace(8, 16, false);
      trace(8, 64, false);
    }
    auto chain = [&](int nad, int R, bool sorted) {
      Batch b = batch(T, nad, std::max(R, 16), sorted);
      Tables t[4];
      if (nad)
        for (int s = 0; s < 4; s++) t[s] = tables(s, nad, {R}, NL);
      double u =
          4 * bench(
                  4 * NN,
                  [&](int i) {
                    int s = i % 4;
                    return node(s, nad ? best[s] : bbase[s], b, nad ? &t[s] : nullptr, i / 4, i);
                  },
                  9);
      drop(b);
      if (nad)
        for (int s = 0; s < 4; s++) cudaFree(t[s].d);
      return u;
    };
    double l = lt ? ltchain() : 1, b0 = chain(0, 16, true);
    char line[400];
    snprintf(line, 400, "T=%-5d lt %.1f base %.1f (%.3f)", T, l, b0, b0 / l);
    std::string out = line;
    int xs = xmode;
    for (int R : {16, 64})
      for (bool so : {false, true}) {
        double u = chain(8, R, so);
        snprintf(line, 400, " | 8 r%d %s %.1f (%.3f)", R, so ? "sorted" : "mixed", u, u / l);
        out += line;
      }
    if (!pre && T <= 128) {
      double u = chain(T, 16, true);
      snprintf(line, 400, " | %d r16 %.1f (%.3f)", T, u, u / l);
      out += line;
      if (T <= 64) {
        u = chain(T, 64, true);
        snprintf(line, 400, " | %d r64 %.1f (%.3f)", T, u, u / l);
        out += line;
      }
    }
    for (int xm : {1, 2}) {
      xmode = xm;
      double u = chain(8, 16, false);
      snprintf(line, 400, " | x%d 8 r16 mixed %.1f (%.3f)", xm, u, u / l);
      out += line;
    }
    xmode = xs;
    NOSHR = 1;
    xmode = 2;
    {
      double u = chain(8, 16, false);
      snprintf(line, 400, " | no shrink %.1f (%.3f)", u, u / l);
      out += line;
    }
    NOSHR = 2;
    xmode = xs;
    {
      NOSHR = 0;
      noexp = true;
      double u = chain(8, 16, false);
      noexp = false;
      snprintf(line, 400, " | no expand %.1f (%.3f)", u, u / l);
      out += line;
    }
    NOSHR = 0;
    snprintf(line, 400, " | again lt %.1f base %.1f", lt ? ltchain() : 1, chain(0, 16, true));
    out += line;
    table.push_back(out);
    printf("%s\n", out.c_str());
    drop(none);
    drop(b16);
  }
  printf("---- table\n");
  for (auto& t : table) printf("%s\n", t.c_str());
  CK(cudaDeviceSynchronize());
  return 0;
}
