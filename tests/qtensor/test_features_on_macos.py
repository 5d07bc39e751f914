"""On macOS, kernels are chosen by sysctlbyname: the macOS source is compiled here with a fake sysctlbyname."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

NATIVE = Path(__file__).parents[2] / "native"

SYSCTL = """
#pragma once
#include <cstddef>
int sysctlbyname(const char* name, void* old, size_t* size, void* set, size_t set_size);
"""
PROGRAM = """
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include "runtime/cpu_features.h"
#include <sys/sysctl.h>

// The environment variable SAYS lists the features that exist.
int sysctlbyname(const char* name, void* old, size_t* size, void*, size_t) {
  if (*size != sizeof(int)) return -1;
  const int value = std::strstr(std::getenv("SAYS"), name) != nullptr;
  std::memcpy(old, &value, sizeof value);
  return 0;
}

int main() {
  for (const auto& name : qtensor::detect_cpu_features().names()) std::printf("%s ", name.c_str());
}
"""
DOT, I8MM = "hw.optional.arm.FEAT_DotProd", "hw.optional.arm.FEAT_I8MM"


def built(folder: Path, processor: str) -> Path:
    compiler = next((found for name in ("c++", "g++", "clang++") if (found := shutil.which(name))), None)
    if compiler is None:
        pytest.skip("no C++ compiler is installed")
    (folder / "sys").mkdir()
    (folder / "sys" / "sysctl.h").write_text(SYSCTL)
    (folder / "main.cpp").write_text(PROGRAM)
    macos = [f"-I{folder}", f"-I{NATIVE}", "-U__linux__", "-D__APPLE__", f"-D{processor}"]
    source = NATIVE / "runtime" / "cpu_features.cpp"
    subprocess.run([compiler, "-std=c++20", *macos, folder / "main.cpp", source, "-o", folder / "features"], check=True)
    return folder / "features"


def test_dotprod_and_i8mm_are_detected_by_sysctl(tmp_path: Path) -> None:
    """The M1 has dot products but no i8mm; the M2 and later chips have both."""
    program = built(tmp_path, "QTENSOR_ARM64")
    found = [
        subprocess.check_output([program], env={"SAYS": says}, text=True).split()
        for says in ("", DOT, f"{DOT} {I8MM}", I8MM)
    ]
    assert found == [[], ["dotprod"], ["dotprod", "i8mm"], []]


def test_avx512_is_detected_by_sysctl(tmp_path: Path) -> None:
    """XCR0 does not show AVX-512 before its first use. Tiles are not checked."""
    try:
        program = built(tmp_path, "QTENSOR_X86")
    except subprocess.CalledProcessError:
        pytest.skip("this processor is not x86")
    without, said = (
        subprocess.check_output([program], env={"SAYS": says}, text=True).split()
        for says in ("", "hw.optional.avx512f")
    )
    assert not {"avx512_vnni", "amx_int8"} & set(without) and "amx_int8" not in said
    linux = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    assert ("avx512_vnni" in said) == ("avx512_vnni" in linux)
