// Checks and times aril_linear_forward. Build: build.sh. Run: ./harness check | time [..]
#include "aril.h"
#include <algorithm>
#include <climits>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <string>
#include <vector>
static int aril_tune_smem, aril_tune_trigger, aril_tune_prefetch, aril_tune_boxes;
namespace aril { int32_t load_fused_linear(); }
#define CK(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { printf("CUDA error %s at %s:%d %s\n", cudaGetErrorString(e_), __FILE__, __LINE__, #x); fflush(stdout); exit(1); } } while (0)
#define OK(x) do { int e_ = (x); if (e_ != 0) { printf("aril status %d at %s:%d %s\n", e_, __FILE__, __LINE__, #x); fflush(stdout); exit(1); } } while (0)
static int cdiv(int a, int b) { return (a + b - 1) / b; }
typedef uint16_t u16;
// ---------------------------------------------------------------- cuBLASLt by dlopen
typedef void* ltp; struct Algo { uint64_t d[8]; };
struct Heur { Algo algo; size_t ws; int state; float waves; int res[4]; };
static int (*lt_create)(ltp*); static int (*lt_dcreate)(ltp*, int, int); static int (*lt_dset)(ltp, int, const void*, size_t);
static int (*lt_lcreate)(ltp*, int, uint64_t, uint64_t, int64_t); static int (*lt_pcreate)(ltp*); static int (*lt_pset)(ltp, int, const void*, size_t);
static int (*lt_heur)(ltp, ltp, ltp, ltp, ltp, ltp, ltp, int, Heur*, int*);
static int (*lt_mm)(ltp, ltp, const void*, const void*, ltp, const void*, ltp, const void*, const void*, ltp, void*, ltp, const Algo*, void*, size_t, cudaStream_t);
static ltp LT; static void* ltws; static size_t ltwsn = 32 << 20;
static bool lt_init() {
  void* h = dlopen(getenv("LTLIB") ? getenv("LTLIB") : "libcublasLt.so.13", RTLD_NOW | RTLD_GLOBAL);
  if (!h) { printf("no cublasLt: %s\n", dlerror()); return false; }
#define SY(v, n) *(void**)&v = dlsym(h, n)
  SY(lt_create, "cublasLtCreate"); SY(lt_dcreate, "cublasLtMatmulDescCreate"); SY(lt_dset, "cublasLtMatmulDescSetAttribute");
  SY(lt_lcreate, "cublasLtMatrixLayoutCreate"); SY(lt_pcreate, "cublasLtMatmulPreferenceCreate"); SY(lt_pset, "cublasLtMatmulPreferenceSetAttribute");
  SY(lt_heur, "cublasLtMatmulAlgoGetHeuristic"); SY(lt_mm, "cublasLtMatmul");
  if (lt_create(&LT)) return false;
  CK(cudaMalloc(&ltws, ltwsn)); return true;
}
struct LtOp { ltp d, a, b, c; std::vector<Heur> h; int best = 0; };
static LtOp lt_op(int N, int K, int T) {
  LtOp o; lt_dcreate(&o.d, 68, 0); int t = 1; lt_dset(o.d, 3, &t, 4);
  lt_lcreate(&o.a, 14, K, N, K); lt_lcreate(&o.b, 14, K, T, K); lt_lcreate(&o.c, 14, N, T, N);
  ltp pr; lt_pcreate(&pr); lt_pset(pr, 1, &ltwsn, 8);
  o.h.resize(16); int n = 0; lt_heur(LT, o.d, o.a, o.b, o.c, o.c, pr, 16, o.h.data(), &n);
  o.h.resize(n); return o;
}
static int lt_run(LtOp& o, int i, const void* W, const void* x, void* y, cudaStream_t s) {
  float al = 1, be = 0;
  return lt_mm(LT, o.d, &al, W, o.a, x, o.b, &be, y, o.c, y, o.c, &o.h[i].algo, ltws, ltwsn, s);
}
// ---------------------------------------------------------------- elements
static float tof(u16 b, int dt) {
  if (dt == ARIL_BF16) { uint32_t w = (uint32_t)b << 16; float f; memcpy(&f, &w, 4); return f; }
  __half_raw r; r.x = b; return __half2float(__half(r));
}
static u16 fromf(float f, int dt) {
  if (dt == ARIL_BF16) { __nv_bfloat16 h = __float2bfloat16(f); u16 b; memcpy(&b, &h, 2); return b; }
  __half h = __float2half(f); u16 b; memcpy(&b, &h, 2); return b;
}
struct Rng { uint64_t s; uint32_t next() { s += 0x9E3779B97F4A7C15ull; uint64_t z = s; z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9ull; z = (z ^ z >> 27) * 0x94D049BB133111EBull; return (uint32_t)(z >> 32); }
  float uni() { return (next() >> 8) * (1.f / 8388608.f) - 1.f; } };
__device__ double el(u16 b, int dt) { if (dt == ARIL_BF16) return (double)__uint_as_float((uint32_t)b << 16); __half_raw r; r.x = b; return (double)__half2float(__half(r)); }
__global__ void k_ref(const u16* x, int64_t xs, const u16* W, int64_t ws, int K, int dt, double* y, double* mag, int N) {  // grid (N, T)
  int n = blockIdx.x, t = blockIdx.y; __shared__ double s[128], m[128]; double a = 0, b = 0;
  for (int k = threadIdx.x; k < K; k += 128) { double p = el(x[t * xs + k], dt) * el(W[n * ws + k], dt); a += p; b += fabs(p); }
  s[threadIdx.x] = a; m[threadIdx.x] = b; __syncthreads();
  for (int o = 64; o; o >>= 1) { if (threadIdx.x < o) { s[threadIdx.x] += s[threadIdx.x + o]; m[threadIdx.x] += m[threadIdx.x + o]; } __syncthreads(); }
  if (!threadIdx.x) { y[(size_t)t * N + n] = s[0]; mag[(size_t)t * N + n] = m[0]; }
}
__global__ void k_hold(volatile int* stop, int* up) { extern __shared__ char sm[]; sm[threadIdx.x] = 1; if (threadIdx.x == 0) { atomicAdd(up, 1); __threadfence_system(); while (!*stop) __nanosleep(1000); } }
static cudaStream_t st;
template <class V> static V* up(const std::vector<V>& h) { V* d; CK(cudaMalloc(&d, h.size() * sizeof(V) + 64)); CK(cudaMemcpy(d, h.data(), h.size() * sizeof(V), cudaMemcpyHostToDevice)); return d; }
static std::vector<void*> bag;
template <class V> static V* keep(V* p) { bag.push_back((void*)p); return p; }
static void drop() { for (auto p : bag) CK(cudaFree(p)); bag.clear(); }
// ---------------------------------------------------------------- packing
static size_t aelems(int r, int K) { return (size_t)cdiv(r, 8) * 8 * cdiv(K, 256) * 256; }
static size_t belems(int r, int N) { return (size_t)cdiv(r, 8) * 8 * cdiv(N, 64) * 64; }
static size_t aat(int r, int rank, int k) { return (size_t)(k / 256) * cdiv(r, 8) * 8 * 256 + (rank / 8 * 32 + k % 256 / 8) * 64 + rank % 8 * 8 + k % 8; }
static size_t bat(int r, int o, int rank) { int core = o % 64 / 32 * 4 + o % 8 / 2, n = o % 32 / 8 * 2 + o % 2; return (size_t)(o / 64) * cdiv(r, 8) * 8 * 64 + rank / 8 * 512 + core * 64 + n * 8 + rank % 8; }
static int nclusters(const std::vector<int>& out, int units) { int c = 0; for (int o : out) c += cdiv(cdiv(o, 32) * 2, units); return c; }
static void plan(const std::vector<int>& out, int& splits, int& units) {
  int u = 0; for (int o : out) u += cdiv(o, 32) * 2;
  splits = u > 66 * 12 ? 1 : 2; units = cdiv(u, 132 / splits); while (nclusters(out, units) > 132 / splits && !(splits == 2 && units == 12)) units++;
}
struct Case { const char* name; int dt, K; std::vector<int> out; int T; std::vector<std::vector<int>> ranks; std::vector<int> slots; bool scales, bias, accum, exact; int wgap, xgap, ygap, yoff; int splits = 0, units = 0; };
static int fails = 0, ran = 0;
struct World {  // device state of a case
  aril_forward_args a; std::vector<u16> y0; int N; size_t ysz; u16* y; aril_forward_map map;
  std::vector<u16> run(bool reset_exchange = false) {
    (void)reset_exchange; CK(cudaMemcpy(y, y0.data(), ysz * 2, cudaMemcpyHostToDevice)); a.map = &map;
    OK(aril_linear_forward(&a, st)); CK(cudaStreamSynchronize(st)); std::vector<u16> r(ysz); CK(cudaMemcpy(r.data(), y, ysz * 2, cudaMemcpyDeviceToHost)); return r; }
};
static void check(const Case& c) {
  Rng g{(uint64_t)c.K * 7919 + c.T * 31 + c.dt}; int S = c.out.size(), N = 0; for (int o : c.out) N += o; ran++;
  auto val = [&](float sc) { return fromf(c.exact ? (float)((int)(g.next() % 5) - 2) : g.uni() * sc, c.dt); };
  int nanv = c.dt == ARIL_BF16 ? 0x7fc0 : 0x7e00;
  int xs = c.K + c.xgap, ws = c.K + c.wgap, ys = N + c.ygap; World w{}; w.N = N; auto& a = w.a;
  std::vector<u16> x((size_t)c.T * xs + 64, nanv), bias(N);
  for (int t = 0; t < c.T; t++) for (int k = 0; k < c.K; k++) x[(size_t)t * xs + k] = val(1.f);
  for (auto& b : bias) b = val(1.f);
  a.dtype = c.dt; a.num_tokens = c.T; a.in_features = c.K; a.num_slices = S; a.accumulates = c.accum; a.polls = 1 << 12; a.withholds = 0;
  int sp, un; plan(c.out, sp, un); aril_base_weights bw{}; bw.splits = c.splits ? c.splits : sp; bw.units = c.units ? c.units : un; bw.dtype = c.dt; bw.in_features = c.K; bw.num_slices = S; std::vector<u16*> Wd;
  for (int s = 0; s < S; s++) {
    std::vector<u16> W((size_t)c.out[s] * ws + 64, nanv); for (int n = 0; n < c.out[s]; n++) for (int k = 0; k < c.K; k++) W[(size_t)n * ws + k] = val(1.7f / sqrtf(c.K));
    Wd.push_back(keep(up(W))); bw.out_features[s] = a.out_features[s] = c.out[s]; bw.slices[s] = Wd[s]; bw.strides[s] = ws; }
  OK(aril_forward_maps(&bw, &w.map));
  u16* xd = keep(up(x)); a.x = xd; a.x_stride = xs; a.bias = c.bias ? keep(up(bias)) : nullptr;
  w.ysz = (size_t)c.T * ys + c.yoff + 64; w.y0.assign(w.ysz, nanv);
  if (c.accum) for (int t = 0; t < c.T; t++) for (int n = 0; n < N; n++) w.y0[c.yoff + (size_t)t * ys + n] = val(1.f);
  w.y = keep(up(w.y0)); a.y = w.y + c.yoff; a.y_stride = ys;
  // adapters
  int nslots = c.ranks.size() + 1, entries = S + 2, maxr = 1; for (auto& r : c.ranks) for (int v : r) maxr = std::max(maxr, v);
  std::vector<u16> nowhere(4096, 0xffff); u16* nw = keep(up(nowhere));
  std::vector<aril_descriptor> tab((size_t)nslots * entries, {nw, nw, 0, NAN}); std::vector<std::vector<u16>> Ah(nslots * S), Bh(nslots * S); std::vector<float> scal(nslots * S);
  std::vector<u16*> Au(nslots * S), Bu(nslots * S);
  for (int d = 0; d < (int)c.ranks.size(); d++) for (int s = 0; s < S; s++) { int r = c.ranks[d][s]; if (!r) continue;
    auto &A = Ah[d * S + s], &B = Bh[d * S + s]; A.resize((size_t)r * c.K); B.resize((size_t)c.out[s] * r); std::vector<u16> Ap(aelems(r, c.K) + 2048, 0), Bp(belems(r, c.out[s]) + 2048, 0);
    std::fill(Ap.end() - 2048, Ap.end(), nanv); std::fill(Bp.end() - 2048, Bp.end(), nanv);
    for (int i = 0; i < r; i++) for (int k = 0; k < c.K; k++) Ap[aat(r, i, k)] = A[(size_t)i * c.K + k] = val(1.7f / sqrtf(c.K));
    for (int o = 0; o < c.out[s]; o++) for (int i = 0; i < r; i++) Bp[bat(r, o, i)] = B[(size_t)o * r + i] = val(0.5f);
    scal[d * S + s] = c.exact ? 0.5f * (1 << (d % 3)) : 0.3f + 0.1f * d + 0.05f * s;
    Au[d * S + s] = keep(up(A)); Bu[d * S + s] = keep(up(B));
    tab[(size_t)d * entries + s] = {keep(up(Ap)), keep(up(Bp)), r, scal[d * S + s]}; }
  std::vector<float> sc(64, NAN); for (int t = 0; t < c.T; t++) sc[t] = c.scales ? (t % 4) * 0.5f : 1.f;
  std::vector<int> sl(64, 0); for (int t = 0; t < c.T; t++) sl[t] = c.slots[t % c.slots.size()];
  auto set_routing = [&](const std::vector<int>& s, const std::vector<float>& f, int n) { CK(cudaMemcpy(a.routing.slots, s.data(), 64 * 4, cudaMemcpyHostToDevice)); CK(cudaMemcpy(a.routing.scales, f.data(), 64 * 4, cudaMemcpyHostToDevice)); CK(cudaMemcpy(a.routing.num_tokens, &n, 4, cudaMemcpyHostToDevice)); };
  a.routing.slots = keep(up(sl)); a.routing.scales = keep(up(sc)); a.routing.num_tokens = keep(up(std::vector<int>{c.T}));
  a.weights = {keep(up(tab)), nslots, entries, maxr};
  size_t ex = 128 + (size_t)4 * c.T * S * cdiv(maxr, 16) * 16 / 2 * 16; std::vector<u16> exh(ex / 2, 0xffff); std::fill(exh.begin(), exh.begin() + 64, 0); a.mailbox_bytes = ex; a.mailbox = keep(up(exh));
  // reference
  std::vector<double> ref((size_t)c.T * N, 0), mag((size_t)c.T * N, 0);
  double *yd, *md; CK(cudaMalloc(&yd, (size_t)c.T * 65536 * 8)); CK(cudaMalloc(&md, (size_t)c.T * 65536 * 8)); keep(yd); keep(md);
  auto product = [&](const u16* xx, int64_t xst, const u16* WW, int64_t wst, int n, int k, int T, std::vector<double>& o, std::vector<double>& m) {
    k_ref<<<dim3(n, T), 128, 0, st>>>(xx, xst, WW, wst, k, c.dt, yd, md, n); o.resize((size_t)T * n); m.resize((size_t)T * n); CK(cudaStreamSynchronize(st));
    CK(cudaMemcpy(o.data(), yd, o.size() * 8, cudaMemcpyDeviceToHost)); CK(cudaMemcpy(m.data(), md, m.size() * 8, cudaMemcpyDeviceToHost)); };
  std::vector<double> o, m; int n0 = 0;
  for (int s = 0; s < S; s++) { product(xd, xs, Wd[s], ws, c.out[s], c.K, c.T, o, m);
    for (int t = 0; t < c.T; t++) for (int n = 0; n < c.out[s]; n++) { ref[(size_t)t * N + n0 + n] = o[(size_t)t * c.out[s] + n]; mag[(size_t)t * N + n0 + n] = m[(size_t)t * c.out[s] + n]; }
    for (int t = 0; t < c.T; t++) { int d = sl[t]; if (d < 0 || d >= (int)c.ranks.size() || !c.ranks[d][s]) continue; int r = c.ranks[d][s]; std::vector<double> v, vm;
      product(xd + (size_t)t * xs, xs, Au[d * S + s], c.K, r, c.K, 1, v, vm); double f = (double)scal[d * S + s] * sc[t];
      for (int n = 0; n < c.out[s]; n++) { double e = 0, em = 0; for (int i = 0; i < r; i++) { double b = tof(Bh[d * S + s][(size_t)n * r + i], c.dt); e += b * v[i]; em += fabs(b) * vm[i]; } ref[(size_t)t * N + n0 + n] += f * e; mag[(size_t)t * N + n0 + n] += fabs(f) * em; } }
    n0 += c.out[s]; }
  for (int t = 0; t < c.T; t++) for (int n = 0; n < N; n++) { double e = 0; if (c.bias) e += tof(bias[n], c.dt); if (c.accum) e += tof(w.y0[c.yoff + (size_t)t * ys + n], c.dt); ref[(size_t)t * N + n] += e; mag[(size_t)t * N + n] += fabs(e); }
  auto bad = [&](const char* what, long cnt, const char* more = "") { if (cnt) { fails++; printf("FAIL %-18s dt%d K%d N%d T%d splits%d: %s: %ld %s\n", c.name, c.dt, c.K, N, c.T, bw.splits, what, cnt, more); } };
  auto y = w.run(); double worst = 0; long wrong = 0, touched = 0; char more[200] = ""; double ulp = c.dt == ARIL_BF16 ? 1.0 / 256 : 1.0 / 2048;
  std::vector<bool> cov(w.ysz, false);
  for (int t = 0; t < c.T; t++) for (int n = 0; n < N; n++) { size_t i = c.yoff + (size_t)t * ys + n; cov[i] = true; double r = ref[(size_t)t * N + n], got = tof(y[i], c.dt);
    double err = fabs(got - r), tol = c.exact ? 0 : ulp * fabs(r) + 3e-6 * mag[(size_t)t * N + n] + 1e-7; bool ok = c.exact ? got == (double)tof(fromf((float)r, c.dt), c.dt) : err <= tol;
    if (!ok) { if (!wrong) snprintf(more, 200, "first t%d n%d got %g want %g (y0 %g)", t, n, got, r, tof(w.y0[i], c.dt)); wrong++; } if (!c.exact && tol > 0) worst = std::max(worst, err / tol); }
  for (size_t i = 0; i < w.ysz; i++) if (!cov[i] && y[i] != w.y0[i]) touched++;
  bad("wrong elements", wrong, more); bad("touched outside", touched);
  auto rows_differ = [&](const std::vector<u16>& p, const std::vector<u16>& q, std::function<int(int)> f, int T) { long n = 0; for (int t = 0; t < T; t++) if (memcmp(&p[c.yoff + (size_t)t * ys], &q[c.yoff + (size_t)f(t) * ys], N * 2)) n++; return n; };
  auto same = [](int t) { return t; };
  for (int i = 0; i < 3; i++) bad("repeat differs", rows_differ(w.run(), y, same, c.T));
  a.withholds = 1; a.polls = 2; bad("way out differs", rows_differ(w.run(), y, same, c.T)); a.withholds = 0; a.polls = 0; bad("no polls differs", rows_differ(w.run(), y, same, c.T)); a.polls = 1 << 12;
  for (int T : {1, 7, 8, 9, 16, 17, 33}) if (T < c.T) { a.num_tokens = T; bad("fewer tokens differ", rows_differ(w.run(), y, same, T)); a.num_tokens = c.T; }
  // base rows alone, and without a table
  { auto t0 = a.weights; a.weights.table = nullptr; auto yb = w.run(); a.weights = t0; long n = 0; for (int t = 0; t < c.T; t++) { int d = sl[t]; bool base = d < 0 || d >= (int)c.ranks.size(); if (base && memcmp(&yb[c.yoff + (size_t)t * ys], &y[c.yoff + (size_t)t * ys], N * 2)) n++; } bad("base rows differ", n);
    std::vector<int> none(64, -1); set_routing(none, sc, c.T); bad("all base differs", rows_differ(w.run(), yb, same, c.T)); }
  // permuted, with y permuted alike
  { std::vector<int> p(c.T); for (int t = 0; t < c.T; t++) p[t] = t; for (int t = c.T - 1; t > 0; t--) std::swap(p[t], p[g.next() % (t + 1)]);
    std::vector<u16> x2 = x, y2 = w.y0, ysave = w.y0; std::vector<int> s2 = sl; std::vector<float> f2 = sc;
    for (int t = 0; t < c.T; t++) { memcpy(&x2[(size_t)t * xs], &x[(size_t)p[t] * xs], c.K * 2); memcpy(&y2[c.yoff + (size_t)t * ys], &w.y0[c.yoff + (size_t)p[t] * ys], N * 2); s2[t] = sl[p[t]]; f2[t] = sc[p[t]]; }
    CK(cudaMemcpy(xd, x2.data(), x2.size() * 2, cudaMemcpyHostToDevice)); w.y0 = y2; set_routing(s2, f2, c.T); bad("permuted differs", rows_differ(w.run(), y, [&](int t) { return p[t]; }, c.T));
    CK(cudaMemcpy(xd, x.data(), x.size() * 2, cudaMemcpyHostToDevice)); w.y0 = ysave; set_routing(sl, sc, c.T); }
  // other shares of rows
  { auto m0 = w.map; int u0 = bw.units; for (int uu : {1, u0 + 1, u0 * 2, 7}) { if (bw.splits == 2 && uu > 12) continue; bw.units = uu; OK(aril_forward_maps(&bw, &w.map)); bad("other units differ", rows_differ(w.run(), y, same, c.T)); } bw.units = u0; w.map = m0; }
  // beside a kernel that holds most multiprocessors
  if (strstr(c.name, "hold")) { int *stop, *ups; CK(cudaMallocHost(&stop, 4)); CK(cudaMalloc(&ups, 4)); CK(cudaMemset(ups, 0, 4)); *stop = 0; cudaStream_t s2; CK(cudaStreamCreateWithFlags(&s2, cudaStreamNonBlocking)); CK(cudaFuncSetAttribute(k_hold, cudaFuncAttributeMaxDynamicSharedMemorySize, 200 << 10));
    int sms; CK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0)); int fr = getenv("FREE") ? atoi(getenv("FREE")) : 8; k_hold<<<sms - fr, 32, 200 << 10, s2>>>(stop, ups); CK(cudaGetLastError());
    CK(cudaMemcpyAsync(w.y, w.y0.data(), w.ysz * 2, cudaMemcpyHostToDevice, st)); cudaEvent_t e0, e1; cudaEventCreate(&e0); cudaEventCreate(&e1); CK(cudaEventRecord(e0, st)); a.map = &w.map; OK(aril_linear_forward(&a, st)); CK(cudaEventRecord(e1, st)); CK(cudaEventSynchronize(e1));
    float ms; cudaEventElapsedTime(&ms, e0, e1); std::vector<u16> r(w.ysz); CK(cudaMemcpyAsync(r.data(), w.y, w.ysz * 2, cudaMemcpyDeviceToHost, st)); CK(cudaStreamSynchronize(st)); *stop = 1; CK(cudaStreamSynchronize(s2)); bad("held differs", rows_differ(r, y, same, c.T)); printf("  %s: beside a kernel on %d multiprocessors: %.3f ms\n", c.name, sms - fr, ms); cudaStreamDestroy(s2); }
  // a graph with several launches that depend on each other's epochs
  { cudaGraph_t gr; cudaGraphExec_t ge; CK(cudaMemcpy(w.y, w.y0.data(), w.ysz * 2, cudaMemcpyHostToDevice)); CK(cudaStreamBeginCapture(st, cudaStreamCaptureModeGlobal)); int n = c.accum ? 1 : 5; for (int i = 0; i < n; i++) { a.map = &w.map; OK(aril_linear_forward(&a, st)); } CK(cudaStreamEndCapture(st, &gr)); CK(cudaGraphInstantiate(&ge, gr, 0));
    for (int i = 0; i < (c.accum ? 1 : 3); i++) CK(cudaGraphLaunch(ge, st)); CK(cudaStreamSynchronize(st)); std::vector<u16> r(w.ysz); CK(cudaMemcpy(r.data(), w.y, w.ysz * 2, cudaMemcpyDeviceToHost)); bad("graph differs", rows_differ(r, y, same, c.T)); cudaGraphExecDestroy(ge); cudaGraphDestroy(gr); }
  if (getenv("V")) printf("ok?  %-18s dt%d K%d N%d T%d splits%d units %d worst %.2f of the bound\n", c.name, c.dt, c.K, N, c.T, bw.splits, bw.units, worst);
  drop();
}
static std::vector<std::vector<int>> same_ranks(int n, int S, int r) { return std::vector<std::vector<int>>(n, std::vector<int>(S, r)); }
static std::vector<int> cyc(int n, int mod, int off) { std::vector<int> v(n); for (int i = 0; i < n; i++) v[i] = i % mod + off; return v; }
static std::vector<Case> cases(bool small) {
  std::vector<Case> v; std::vector<std::vector<int>> mixed = {{16, 8, 0}, {1, 128, 33}, {64, 0, 7}, {100, 3, 512}, {0, 0, 0}, {24, 40, 96}};
  for (int dt : {0, 1}) for (bool ex : {true, false}) {
    v.push_back({"tails", dt, 264, {72, 40, 8}, 9, mixed, cyc(9, 8, -1), true, true, false, ex, 8, 16, 3, 5});
    v.push_back({"tiny", dt, 8, {1}, 1, {{1}}, {0}, false, false, true, ex, 0, 0, 0, 1});
    v.push_back({"mixed64", dt, 1304, {96, 200, 64}, 64, mixed, cyc(64, 9, -2), true, false, true, ex, 0, 8, 1, 0});
    if (small) continue;
    v.push_back({"one", dt, 4096, {4096}, 1, same_ranks(1, 1, 16), {0}, false, false, false, ex, 0, 0, 0, 0});
    v.push_back({"mixed-hold", dt, 1032, {1000, 300, 36}, 33, mixed, cyc(33, 9, -2), true, true, true, ex, 16, 0, 7, 2});
    v.push_back({"single-split", dt, 2056, {100, 70}, 20, {{16, 16}, {200, 8}}, {0, 1, -1, 0, 0, 5}, true, true, false, ex, 0, 8, 0, 0, 1, 2});
    v.push_back({"single-passes", dt, 520, {1000}, 64, {{64}, {512}, {8}}, {0, 1, -1, 2, 1, 1}, true, false, false, ex, 0, 0, 0, 0, 1, 4});
    v.push_back({"gate_up", dt, 1024, {6400, 6400}, 17, same_ranks(4, 2, 24), cyc(17, 5, -1), true, false, false, ex, 0, 0, 0, 0});
    v.push_back({"slices8", dt, 768, {8, 16, 24, 32, 40, 48, 56, 64}, 31, same_ranks(3, 8, 48), cyc(31, 4, -1), false, true, false, ex, 0, 0, 0, 0});
    v.push_back({"one-adapter", dt, 2048, {512, 256}, 64, same_ranks(1, 2, 72), {0}, false, false, false, ex, 0, 0, 0, 0});
    v.push_back({"distinct", dt, 2048, {512, 256}, 64, same_ranks(64, 2, 16), cyc(64, 64, 0), true, false, true, ex, 0, 0, 0, 0});
    v.push_back({"down", dt, 12288, {640}, 16, same_ranks(8, 1, 64), cyc(16, 8, 0), false, false, false, false, 0, 0, 0, 0});
  }
  if (!small) v.push_back({"qkv-hold", 0, 4096, {4096, 1024, 1024}, 8, same_ranks(8, 3, 16), cyc(8, 8, 0), false, false, false, false, 0, 0, 0, 0});
  return v;
}
// ---------------------------------------------------------------- timing
__global__ void k_rand(__nv_bfloat16* p, size_t n, uint64_t seed, float sc) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    uint64_t z = (i + seed * 0x9E3779B97F4A7C15ull) * 0xBF58476D1CE4E5B9ull; z ^= z >> 31; z *= 0x94D049BB133111EBull; z ^= z >> 29; z *= 0xBF58476D1CE4E5B9ull; z ^= z >> 32;
    p[i] = __float2bfloat16(((float)(uint32_t)z / 2147483648.f - 1.f) * sc);
  }
}
__global__ void k_read(const uint4* p, size_t n, uint32_t* o) {
  uint32_t a = 0; size_t st = (size_t)gridDim.x * blockDim.x, i = blockIdx.x * (size_t)blockDim.x + threadIdx.x;
  for (; i + 7 * st < n; i += 8 * st) { uint4 v[8];
#pragma unroll
    for (int j = 0; j < 8; j++) v[j] = __ldcs(p + i + j * st);
#pragma unroll
    for (int j = 0; j < 8; j++) a ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w; }
  if (a == 0x12345) *o = a;
}
struct Shape { const char* name; std::vector<int> out; int K, NC; int N() const { int n = 0; for (int o : out) n += o; return n; } };
static const int NL = 16;
struct Tune { int smem, trig, pf, boxes; };
template <class F> static double bench(int n, F f, int reps = 9) {
  cudaGraph_t gr; cudaGraphExec_t ge; CK(cudaStreamBeginCapture(st, cudaStreamCaptureModeThreadLocal)); bool ok = true;
  for (int i = 0; i < n && ok; i++) ok = f(i);
  CK(cudaStreamEndCapture(st, &gr)); if (!ok) { cudaGraphDestroy(gr); return -1; }
  CK(cudaGraphInstantiate(&ge, gr, 0)); cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b); std::vector<float> v;
  for (int i = 0; i < reps + 2; i++) { CK(cudaEventRecord(a, st)); CK(cudaGraphLaunch(ge, st)); CK(cudaEventRecord(b, st)); CK(cudaStreamSynchronize(st)); float ms; cudaEventElapsedTime(&ms, a, b); if (i >= 2) v.push_back(ms); }
  CK(cudaGetLastError()); cudaGraphExecDestroy(ge); cudaGraphDestroy(gr); cudaEventDestroy(a); cudaEventDestroy(b);
  std::sort(v.begin(), v.end()); return v[v.size() / 2] * 1000.0 / n;
}
struct Model {
  std::vector<Shape> sh; std::vector<__nv_bfloat16*> W, X; __nv_bfloat16* Y; std::vector<std::vector<aril_forward_map>> maps; std::vector<std::vector<aril_descriptor*>> tabs; void* ex; size_t yst; int *slots, *nt; float* scales; std::vector<void*> mem; int rank = 0, nslots = 0;
  void* al(size_t n) { void* p; CK(cudaMalloc(&p, n)); mem.push_back(p); return p; }
  __nv_bfloat16* rnd(size_t n, uint64_t seed, float sc) { auto p = (__nv_bfloat16*)al(n * 2); k_rand<<<1056, 256, 0, st>>>(p, n, seed, sc); return p; }
  void init(std::vector<Shape> s) { sh = s; yst = 0; for (auto& h : sh) yst = std::max(yst, (size_t)h.N() * 64); int i = 0;
    for (auto& h : sh) { size_t wn = (size_t)h.N() * h.K; W.push_back(rnd(wn * h.NC, 11 + i, 1.7f / sqrtf(h.K))); X.push_back(rnd((size_t)64 * h.K, 31 + i, 1)); std::vector<aril_forward_map> m(h.NC);
      for (int c = 0; c < h.NC; c++) { aril_base_weights bw{}; plan(h.out, bw.splits, bw.units); bw.dtype = 0; bw.in_features = h.K; bw.num_slices = h.out.size(); int n0 = 0; for (size_t k = 0; k < h.out.size(); k++) { bw.out_features[k] = h.out[k]; bw.slices[k] = W[i] + c * wn + (size_t)n0 * h.K; bw.strides[k] = h.K; n0 += h.out[k]; } OK(aril_forward_maps(&bw, &m[c])); }
      maps.push_back(m); i++; }
    Y = (__nv_bfloat16*)al(yst * 2 * 8); ex = al(64 << 20); CK(cudaMemset(ex, 0, 64 << 20)); slots = (int*)al(256); scales = (float*)al(256); nt = (int*)al(4); std::vector<float> one(64, 1.f); CK(cudaMemcpy(scales, one.data(), 256, cudaMemcpyHostToDevice)); }
  void adapters(int r, int n) { rank = r; nslots = n; tabs.clear(); size_t need = 0; for (auto& h : sh) for (int o : h.out) need += (aelems(r, h.K) + belems(r, o)) * n * NL; need += 1 << 20;
    auto base = rnd(need, 77 + r, 0.05f); size_t at = 0;
    for (auto& h : sh) { std::vector<aril_descriptor*> ts; for (int L = 0; L < NL; L++) { int S = h.out.size(); std::vector<aril_descriptor> t(n * S); for (int d = 0; d < n; d++) for (int s = 0; s < S; s++) { t[d * S + s] = {base + at, nullptr, r, 0.5f}; at += aelems(r, h.K); t[d * S + s].b = base + at; at += belems(r, h.out[s]); } auto dt = up(t); mem.push_back(dt); ts.push_back(dt); } tabs.push_back(ts); }
    CK(cudaStreamSynchronize(st)); }
  void route(int T, int n) { std::vector<int> s(64, -1); for (int t = 0; t < T; t++) s[t] = n ? t % n : -1; CK(cudaMemcpy(slots, s.data(), 256, cudaMemcpyHostToDevice)); CK(cudaMemcpy(nt, &T, 4, cudaMemcpyHostToDevice)); }
  bool launch(int s, int L, int T, bool lora, const Tune& tu, int = 0, int = 0) { auto& h = sh[s]; aril_forward_args a{}; a.dtype = 0; a.num_tokens = T; a.polls = 1 << 12; a.in_features = h.K; a.num_slices = h.out.size(); for (size_t k = 0; k < h.out.size(); k++) a.out_features[k] = h.out[k];
    a.map = &maps[s][L % h.NC]; a.x = X[s]; a.x_stride = h.K; a.y = Y + (size_t)(L % 2 * 4 + s) * yst; a.y_stride = h.N(); if (lora) { a.mailbox = ex; a.mailbox_bytes = 64 << 20; a.weights = {tabs[s][L % NL], nslots, (int)h.out.size(), rank}; a.routing.slots = slots; a.routing.scales = scales; a.routing.num_tokens = nt; }
    aril_tune_smem = tu.smem; aril_tune_trigger = tu.trig; aril_tune_prefetch = tu.pf; aril_tune_boxes = tu.boxes; int r = aril_linear_forward(&a, st); if (r) { static int said = 0; if (!said++) printf("launch refused: %d (%s T%d smem %d)\n", r, h.name, T, tu.smem); } return r == 0; }
  double chain(int T, bool lora, const Tune* tu, int reps = 9) { return 4 * bench(4 * NL, [&](int i) { return launch(i % 4, i / 4, T, lora, tu[i % 4]); }, reps); }
  double single(int s, int T, bool lora, const Tune& tu, int reps = 7, int cl = 0, int sp = 0) { return bench(32, [&](int i) { return launch(s, i, T, lora, tu, cl, sp); }, reps); }
  std::map<std::pair<int, int>, LtOp> lts;
  double lt_single(int s, int T) { auto& h = sh[s]; LtOp o = lt_op(h.N(), h.K, T); double best = 1e9; size_t wn = (size_t)h.N() * h.K; for (size_t i = 0; i < o.h.size(); i++) { if (lt_run(o, i, W[s], X[s], Y, st)) continue; CK(cudaStreamSynchronize(st)); double u = bench(24, [&](int k) { return lt_run(o, i, W[s] + (k % h.NC) * wn, X[s], Y, st) == 0; }, 5); if (u > 0 && u < best) { best = u; o.best = i; } } lts[{s, T}] = o; return best; }
  double lt_chain(int T) { return 4 * bench(4 * NL, [&](int i) { int s = i % 4, L = i / 4; auto& h = sh[s]; return lt_run(lts[{s, T}], lts[{s, T}].best, W[s] + (size_t)(L % h.NC) * h.N() * h.K, X[s], Y + (size_t)(L % 2 * 4 + s) * yst, st) == 0; }, 15); }
};
static std::vector<Shape> m8 = {{"qkv", {4096, 1024, 1024}, 4096, 8}, {"o", {4096}, 4096, 10}, {"gate_up", {12288, 12288}, 4096, 4}, {"down", {4096}, 12288, 4}};
static std::vector<Shape> m32 = {{"qkv", {8192, 1024, 1024}, 5120, 4}, {"o", {5120}, 8192, 4}, {"gate_up", {25600, 25600}, 5120, 2}, {"down", {5120}, 25600, 2}};
#include "modes.h"
int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0); std::string mode = argc > 1 ? argv[1] : "check"; CK(cudaStreamCreateWithFlags(&st, cudaStreamNonBlocking)); OK(aril::load_fused_linear());
  if (mode == "check" || mode == "small") { aril_tune_smem = 0; aril_tune_trigger = aril_tune_prefetch = -1; const char* only = argc > 2 ? argv[2] : nullptr; for (auto& c : cases(mode == "small")) if (!only || strstr(c.name, only) && !(argc > 3 && strstr(c.name, argv[3]))) check(c); printf("checked %d cases, %d failures\n", ran, fails); return fails != 0; }
  return timing(argc, argv);
}
