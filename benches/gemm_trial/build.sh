#!/bin/bash
# Builds ./gemm_trial, with a static CUDA runtime. NV: the root of a toolkit, or the folder nvidia/cu13 of the CUDA wheels.
set -e
cd "$(dirname "$0")"
NV=${NV:-/usr/local/cuda}
$NV/bin/nvcc -O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -I$NV/include -I../../csrc -I. \
  main.cu ../../csrc/linear.cu ../../csrc/routing.cu -o "${1:-gemm_trial}" -L$NV/lib -cudart static -ldl -lpthread
