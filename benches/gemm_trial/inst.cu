#include "reg.h"
template <int MW, int MG, int NG, int NB, int MODE>
static void add() {
  using C = Cfg<MW, MG, NG, NB, MODE>;
  reg().push_back({C::T, C::RB, MODE, C::WGS, C::H0, C::kVBytes, C::kChunk,
                   (const void*)k_gemm<MW, MG, NG, NB, MODE>});
}
#define CAT2(a, b) a##b
#define CAT(a, b) CAT2(a, b)
void CAT(init, PART)() {
#if PART == 0
  add<1, 1, 1, 96, 2>();
  add<1, 1, 1, 64, 2>();
  add<1, 1, 2, 96, 0>();
#elif PART == 1
  add<1, 2, 1, 96, 2>();
  add<1, 2, 1, 64, 2>();
  add<1, 2, 1, 192, 0>();
#elif PART == 2
  add<1, 2, 1, 96, 1>();
  add<1, 2, 1, 64, 1>();
  add<1, 2, 1, 192, 1>();
#else
  add<2, 2, 1, 128, 1>();
#endif
}
