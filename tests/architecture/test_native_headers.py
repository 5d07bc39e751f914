"""Native headers are self-contained: each compiles alone for its kernel family, and families share no code."""

from __future__ import annotations

import os
import platform
import re
import shlex
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

import aarch64
import pytest

NATIVE = Path(__file__).parents[2] / "native"
CONTRACTS = sorted(NATIVE.glob("*.h"))
KERNELS = sorted((NATIVE / "kernels").rglob("*.h"))
ON_X86 = platform.machine() in ("x86_64", "AMD64")
ON_ARM64 = platform.machine() in ("aarch64", "arm64")
# Headers shared by several families are compiled for a family that includes all of them.
SHARED = {"portable": "neon" if ON_ARM64 else "avx512", "x86": "avx512"}


def named(path: Path) -> str:
    return str(path.relative_to(NATIVE))


@cache
def settings() -> dict[str, list[str]]:
    """Return the variables that kernels.cmake sets, with references to earlier variables replaced."""
    found: dict[str, list[str]] = {"CMAKE_CURRENT_LIST_DIR": [str(NATIVE)], "CMAKE_BINARY_DIR": ["build"]}
    text = re.sub(r"#.*", "", (NATIVE / "kernels.cmake").read_text("utf-8"))
    for name, words in re.findall(r"\bset\((\w+) ([^()]*)\)", text):
        value: list[str] = []
        for word in words.split():
            whole = re.fullmatch(r"\$\{(\w+)\}", word)
            value += found.get(whole[1], []) if whole else [re.sub(r"\$\{(\w+)\}", lambda m: found[m[1]][0], word)]
        found[name] = value
    return found


def flags(path: Path) -> list[str]:
    """Return compiler options of the family in whose folder the header is."""
    folder = path.parent.name if path.parent != NATIVE else "generic"
    family = SHARED.get(folder, folder).upper()
    known = "-DQTENSOR_ARM64" if family == "NEON" else "-DQTENSOR_X86"
    options = [] if family == "GENERIC" else [*settings()[family], known]
    return [*options, "-I", str(NATIVE), *(word for at in settings()[f"{family}_HEADERS"] for word in ("-I", at))]


def compiler(path: Path) -> list[str]:
    """Return the compiler for a header: a cross compiler if it is for another architecture."""
    cross = aarch64.compiler() if path.parent.name == "neon" and not ON_ARM64 else None
    return [cross] if cross else compiler_of_this_machine()


@cache
def compiler_of_this_machine() -> list[str]:
    found = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not found:
        pytest.skip("there is no C++ compiler")
    return shlex.split(found)


def complaints(path: Path, text: str) -> str:
    """Compile `text` as a file in the folder of `path`, and return the compiler's errors."""
    command = [
        *compiler(path),
        "-std=c++20",
        "-fsyntax-only",
        "-x",
        "c++",
        *flags(path),
        "-iquote",
        str(path.parent),
        "-",
    ]
    run = subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)
    return "" if run.returncode == 0 else run.stderr[:2000] or "failed"


def headers_of_this_machine() -> list[Path]:
    """Return headers for this processor, and those for AArch64 if there is a cross compiler."""
    folders = {"generic"} | ({"portable", "x86", "avx2", "avx512", "amx"} if ON_X86 else set())
    folders |= {"portable", "neon"} if ON_ARM64 else {"neon"} if aarch64.compiler() else set()
    return [*CONTRACTS, *(path for path in KERNELS if path.parent.name in folders)]


@pytest.mark.long("native")
def test_every_header_compiles_alone() -> None:
    headers = headers_of_this_machine()
    assert len(CONTRACTS) == 5 and len(KERNELS) > 40
    compiler_of_this_machine()
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        said = list(pool.map(lambda path: complaints(path, f'#include "{named(path)}"\n'), headers))
    wrong = [f"{named(path)}: {words}" for path, words in zip(headers, said, strict=True) if words]
    assert not wrong, "\n".join(wrong)


def test_missing_include_is_detected() -> None:
    """These three includes are the only ones that provide the names that the headers use from them."""
    for name, include in (
        ("kernels/portable/float_kernels.h", "vec16.h"),
        ("kernels/generic/byte_dots.h", "kernels/portable/level_tables.h"),
        ("kernel_table.h", "blocks.h"),
    ):
        path = NATIVE / name
        if path not in headers_of_this_machine():
            continue
        text = path.read_text("utf-8")
        assert f'#include "{include}"\n' in text
        assert not complaints(path, text)
        assert complaints(path, text.replace(f'#include "{include}"\n', "")), f"{name} without {include}"


def test_every_header_has_pragma_once() -> None:
    wrong = [named(path) for path in NATIVE.rglob("*.h") if "\n#pragma once\n" not in path.read_text("utf-8")]
    assert not wrong


def test_kernel_headers_use_an_anonymous_namespace() -> None:
    """Code compiled for one instruction set must never be linked into code for another."""
    wrong = []
    for path in KERNELS:
        text = path.read_text("utf-8")
        code = re.sub(r"//.*|^#.*$", "", text, flags=re.MULTILINE).strip()
        inside = code.startswith("namespace qtensor {\nnamespace {\n") and text.endswith(
            "\n}  // namespace\n}  // namespace qtensor\n"
        )
        if code and not inside:
            wrong.append(named(path))
    assert not wrong


def test_sources_include_their_own_header_first() -> None:
    """This checks that headers in runtime and ops are self-contained, too."""
    wrong = []
    for path in [*(NATIVE / "runtime").glob("*.cpp"), *(NATIVE / "ops").glob("*.cpp")]:
        first = re.search(r'^#include ["<]([^">]+)', path.read_text("utf-8"), re.MULTILINE)
        if first is None or first[1] != named(path.with_suffix(".h")):
            wrong.append(named(path))
    assert not wrong


# Folders that each folder may include from; all may include headers in native/ itself.
ROOMS = {
    "runtime": {"runtime"},
    "ops": {"ops", "runtime"},
    "kernels": {"kernels"},
    "bindings": {"bindings", "cuda", "ops", "runtime"},
    "cuda": {"cuda"},
}
# Exceptions to ROOMS. ops/dequantize.cpp uses the generic kernels and the shared unpacking of blocks as its reference,
# and all devices share one table of the KV cache's levels.
SHARED_INCLUDES = {
    ("ops/dequantize.cpp", "kernels/generic/vec16.h"),
    ("ops/dequantize.cpp", "kernels/portable/unpacked_blocks.h"),
    ("cuda/launches.h", "kernels/portable/level_tables.h"),
}


def test_native_folders_include_only_allowed_folders() -> None:
    wrong = []
    for path in NATIVE.rglob("*"):
        room = path.relative_to(NATIVE).parts[0]
        if path.suffix not in (".h", ".cpp") or room not in ROOMS:
            continue
        for include in re.findall(r'#include "([^"]+)"', path.read_text("utf-8")):
            there = include.split("/")[0] if "/" in include else ""
            if there in ROOMS and there not in ROOMS[room] and (named(path), include) not in SHARED_INCLUDES:
                wrong.append(f"{named(path)} includes {include}")
    assert not wrong
    assert {path.name for path in NATIVE.iterdir() if path.is_dir()} == set(ROOMS)
