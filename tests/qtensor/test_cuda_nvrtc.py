"""Compile the CUDA kernels with NVRTC, which needs no CUDA toolkit: `pip install nvidia-cuda-nvrtc`.

The source is the same, with stubs of the standard library's headers. Nothing is executed.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from qtensor.test_cuda_machine_code import ARCHITECTURES, KERNELS, KERNELS_SOURCE, NATIVE, Resources, excesses

PACKAGE = "nvidia-cuda-nvrtc"
OPTIONS = ("-default-device", "-fmad=false", "-std=c++20", "--ptxas-options=-v")
HEADERS = {
    "cstring": "",
    "cstdint": """
        typedef signed char int8_t; typedef short int16_t; typedef int int32_t; typedef long long int64_t;
        typedef unsigned char uint8_t; typedef unsigned short uint16_t; typedef unsigned int uint32_t;
        typedef unsigned long long uint64_t;""",
    "cstddef": "namespace std { typedef decltype(sizeof(0)) size_t; }\n#define offsetof(t, m) __builtin_offsetof(t, m)",
}


def library() -> Path | None:
    """Return the path of the package's library, if it is installed."""
    try:
        files = importlib.metadata.files(PACKAGE) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return next((Path(str(each.locate())) for each in files if each.name.startswith("libnvrtc.so")), None)


LIBRARY = library()

pytestmark = [
    pytest.mark.long("native"),
    pytest.mark.timeout(900),
    pytest.mark.skipif(LIBRARY is None, reason=f"{PACKAGE} is not installed"),
]


@pytest.fixture(scope="module")
def nvrtc() -> Iterator[ctypes.CDLL]:
    yield ctypes.CDLL(str(LIBRARY))


def compiled(nvrtc: ctypes.CDLL, architecture: int) -> dict[str, Resources]:
    """Return the resources of each kernel, as reported by the compiler."""
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    array = ctypes.c_char_p * len(HEADERS)
    names, texts = array(*map(str.encode, HEADERS)), array(*map(str.encode, HEADERS.values()))
    source = KERNELS_SOURCE.read_bytes()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", len(HEADERS), texts, names) == 0
    options = [*OPTIONS, f"--gpu-architecture=sm_{architecture}", f"-I{NATIVE}"]
    given = (ctypes.c_char_p * len(options))(*map(str.encode, options))
    failed = nvrtc.nvrtcCompileProgram(program, len(options), given)
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    said = log.value.decode()
    assert not failed, said[-4000:]
    pattern = r"entry function '(\w+)'.*?(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers"
    found = re.findall(pattern, said, re.DOTALL)
    return {name: Resources(int(registers), int(stored) + int(loaded)) for name, stored, loaded, registers in found}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_nvrtc_kernels_do_not_spill_and_stay_within_register_limits(nvrtc: ctypes.CDLL, architecture: int) -> None:
    kernels = compiled(nvrtc, architecture)
    assert len(kernels) == KERNELS, sorted(kernels)
    assert not excesses(kernels)
