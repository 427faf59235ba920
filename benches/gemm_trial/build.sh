#!/bin/bash
# Builds ./gemm_trial, with a static CUDA runtime. NV: the root of a toolkit, or the folder nvidia/cu13 of the CUDA wheels.
set -e
cd "$(dirname "$0")"
NV=${NV:-/usr/local/cuda}
python3 gen_wgmma.py
F="-O3 -std=c++17 -gencode=arch=compute_90a,code=sm_90a -I$NV/include -Xptxas -v"
O=${O:-/tmp/gemm_trial-obj}; mkdir -p $O
pids=()
for p in 0 1 2 3; do $NV/bin/nvcc $F -DPART=$p -c inst.cu -o $O/inst$p.o 2> $O/inst$p.log & pids+=($!); done
$NV/bin/nvcc $F -c main.cu -o $O/main.o 2> $O/main.log & pids+=($!)
for p in "${pids[@]}"; do wait $p || { grep -h error $O/*.log; exit 1; }; done
$NV/bin/nvcc $O/main.o $O/inst?.o -o ${1:-gemm_trial} -L$NV/lib -cudart static -ldl -lpthread -Xcompiler -static-libstdc++,-static-libgcc
grep -hE "C75|error" $O/*.log || true
grep -hE "Compiling|stack frame|Used" $O/inst?.log $O/main.log | sed 's/ptxas info *: //'
