#pragma once
#include <vector>

#include "gemm.cuh"
struct Entry {
  int T, RB, MODE, WGS, H0, vbytes, chunk;
  const void* fn;
};
extern std::vector<Entry>& reg();
