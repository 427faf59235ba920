"""Compiles every kernel with CUDA 12, as far as that can be had from wheels: `cuda_12.py SITE_PACKAGES`.

Those wheels have no nvcc, but NVRTC, which is the same compiler for device code alone. The kernels are those of
codegen.budget, for an H100. The host's part of csrc, which launches them, is not compiled.
"""

import ctypes
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

ARCH = "sm_90a"
COLUMNS = 4  # in front of a kernel's name in codegen.budget

# Headers of the C++ library, which NVRTC does without.
STANDARD = {
    "stdint.h": "#pragma once\n#include <cuda/std/cstdint>\nusing namespace cuda::std;\n",
    "stdlib.h": "#pragma once\n",
    "type_traits": "#pragma once\n#include <cuda/std/type_traits>\nnamespace std { using namespace cuda::std; }\n",
}
# What the host's functions in headers call.
DECLARATIONS = ["cuda_runtime.h", "cuda_device_runtime_api.h"]


def strings(values):
    return (ctypes.c_char_p * len(values))(*(value.encode() for value in values))


def check(status, log=""):
    if status != 0:
        sys.exit(f"NVRTC fails with {status}\n{log}")


def kernels():
    budget = (ROOT / "tests/codegen.budget").read_text().splitlines()
    return [line.split(maxsplit=COLUMNS)[COLUMNS] for line in budget]


def compile_for_h100(nvrtc, packages, names):
    headers = [header.relative_to(ROOT / "csrc") for header in sorted(ROOT.glob("csrc/**/*.cuh"))]
    source = "".join(f"#include <{header}>\n" for header in [*DECLARATIONS, *headers])
    includes = [ROOT / "csrc", *packages.glob("nvidia/*/include")]
    # Functions without annotations are the host's, which NVRTC otherwise refuses.
    options = [f"--gpu-architecture={ARCH}", "-std=c++17", "-default-device", *(f"-I{path}" for path in includes)]

    program = ctypes.c_void_p()
    standard = strings(STANDARD.values()), strings(STANDARD)
    check(nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"csrc.cu", len(STANDARD), *standard))
    for name in names:
        check(nvrtc.nvrtcAddNameExpression(program, name.encode()))
    status = nvrtc.nvrtcCompileProgram(program, len(options), strings(options))
    size = ctypes.c_size_t()
    check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)))
    log = ctypes.create_string_buffer(size.value)
    check(nvrtc.nvrtcGetProgramLog(program, log))
    check(status, log.value.decode())
    check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)))
    return f"{ARCH}: {len(names)} kernels, {size.value} bytes"


def main():
    packages = Path(sys.argv[1])
    nvrtc = ctypes.CDLL(str(packages / "nvidia/cuda_nvrtc/lib/libnvrtc.so.12"))
    major, minor = ctypes.c_int(), ctypes.c_int()
    check(nvrtc.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor)))
    print(f"CUDA {major.value}.{minor.value}")
    print(compile_for_h100(nvrtc, packages, kernels()))


if __name__ == "__main__":
    main()
