out=['#pragma once','#include <stdint.h>','template <int N> struct Mma;']
for n in (32,64,96,128,192):
    k=n//2
    regs=','.join('%%%d'%i for i in range(k))
    outs=','.join('"+f"(d[%d])'%i for i in range(k))
    out.append(f'template <> struct Mma<{n}> {{ static __device__ __forceinline__ void ss(float (&d)[{k}], uint64_t a, uint64_t b) {{')
    out.append(f'  asm volatile("wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{regs}}}, %{k}, %{k+1}, 1, 1, 1, 0, 0;" : {outs} : "l"(a), "l"(b)); }} }};')
open('wgmma.h','w').write('\n'.join(out)+'\n')
k=16
regs=','.join('%%%d'%i for i in range(k)); outs=','.join('"=f"(d[%d])'%i for i in range(k))
open('wgmma.h','a').write('''// sums that begin at zero
static __device__ __forceinline__ void mma32_first(float (&d)[16], uint64_t a, uint64_t b) {
  asm volatile("{\\n.reg .pred p;\\nsetp.ne.b32 p, 0, 0;\\nwgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {%s}, %%16, %%17, p, 1, 1, 0, 0;\\n}" : %s : "l"(a), "l"(b)); }
''' % (regs, outs))
