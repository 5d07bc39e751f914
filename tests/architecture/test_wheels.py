"""Tools for building and testing wheels: the parts that need neither a compiler nor root."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path

import bare_debian
import pytest
import target
import wheels
from emulation import DEBIAN_NAMES, ELF_NUMBERS, registration
from packaging.requirements import Requirement
from target import MACHINES, ROOT, pip_target


def test_the_newest_glibc_of_a_library_is_found() -> None:
    names = b"\0malloc\0GLIBC_2.4\0libc.so.6\0GLIBC_2.17\0GLIBC_2.2.5\0GLIBC_PRIVATE\0"
    assert wheels.glibc(names) == (2, 17) <= wheels.GLIBC
    assert wheels.glibc(names + b"GLIBC_2.34\0") == (2, 34) > wheels.GLIBC


@pytest.mark.parametrize("name", wheels.TARGETS)
def test_compiler_wrapper_passes_target_and_zig_cpu_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "BUILD", tmp_path / "wheels")
    said = tmp_path / "python"
    said.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    said.chmod(0o755)
    wanted = wheels.TARGETS[name]
    command = [wheels.compiler(said, wanted), "-O3", "-march=armv8.2-a+dotprod+i8mm", "-DNAME=a b", "-c"]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert words == [
        *("-m", "ziglang", "c++", "-target", wanted.zig),
        *("-O3", "-mcpu=generic+v8_2a+dotprod+i8mm", "-DNAME=a b", "-c"),
    ]


def test_pip_target_allows_only_archives_of_the_machine() -> None:
    for machine in MACHINES:
        platforms = [word for word in pip_target("3.13", machine) if word.startswith("manylinux")]
        assert platforms and all(each.endswith(f"_{machine}") for each in platforms)
    assert set(MACHINES) == set(DEBIAN_NAMES) == set(ELF_NUMBERS)


def test_binfmt_registration_matches_the_elf_header() -> None:
    """binfmt_misc compares a program's bytes under the mask with the magic bytes."""
    _, name, kind, _, magic, mask, qemu, flags = registration("aarch64", "/usr/bin/qemu").split(":")
    assert (name, kind, qemu, flags) == ("aarch64", "M", "/usr/bin/qemu", "F")
    head, under = (each.encode().decode("unicode_escape").encode("latin-1") for each in (magic, mask))
    program = b"\x7fELF\x02\x01\x01\x03" + bytes(8) + b"\x03\x00\xb7\x00"  # for Linux, position-independent
    assert len(head) == len(under) == len(program) == 20

    def is_known(first: bytes) -> bool:
        return all(a & m == b & m for a, b, m in zip(first, head, under, strict=True))

    assert is_known(program)
    assert not is_known(program[:18] + b"\x3e\x00") and not is_known(b"#!/bin/sh".ljust(20, b"\0"))


def test_apt_lists_keep_only_fetched_packages(tmp_path: Path) -> None:
    (tmp_path / "debootstrap").mkdir()
    (tmp_path / "debootstrap" / "debpaths").write_text("apt /var/apt.deb\nzlib1g /var/zlib1g.deb\n")
    lists = tmp_path / "var" / "lib" / "apt" / "lists"
    lists.mkdir(parents=True)
    listed = lists / "somewhere_main_binary-arm64_Packages"
    listed.write_text("\n\n".join(f"Package: {name}\nVersion: 1" for name in ("apt", "apt-utils", "zlib1g")) + "\n\n")
    bare_debian.shorten_lists(tmp_path)
    assert listed.read_text() == "Package: apt\nVersion: 1\n\nPackage: zlib1g\nVersion: 1\n\n"


# Macros from pyconfig.h that the headers use with the stable ABI, and their values in a Python for macOS ("":
# undefined). ALIGNOF_MAX_ALIGN_T is 8 on arm64, but the headers check only whether it is 0.
READ_OF_PYCONFIG = {
    "ALT_SOABI": "", "HAVE_ALIGNED_REQUIRED": "", "HAVE_FORK": "1", "HAVE_IEEEFP_H": "", "HAVE_SSIZE_T": "1",
    "HAVE_SYS_SELECT_H": "1", "HAVE_SYS_STAT_H": "1", "HAVE_SYS_TERMIO_H": "", "HAVE_SYS_TIME_H": "1",
    "HAVE_USABLE_WCHAR_T": "", "HAVE_WCHAR_H": "1", "HAVE__GETPTY": "", "PYLONG_BITS_IN_DIGIT": "", "Py_DEBUG": "",
    "Py_HASH_ALGORITHM": "", "Py_STATS": "", "Py_TRACE_REFS": "", "SIGNED_RIGHT_SHIFT_ZERO_FILLS": "",
    "SIZEOF_INT": "4", "SIZEOF_LONG": "8", "SIZEOF_PID_T": "4", "SIZEOF_VOID_P": "8", "SIZEOF_WCHAR_T": "4",
    "WITH_DOC_STRINGS": "1",
    "AC_APPLE_UNIVERSAL_BUILD": "", "size_t": "", "socklen_t": "", "gid_t": "", "uid_t": "", "HAVE_STD_ATOMIC": "1",
    "HAVE_BUILTIN_ATOMIC": "1", "PY_FORMAT_SIZE_T": '"z"', "WORDS_BIGENDIAN": "", "HAVE_PTHREAD_STUBS": "",
    "HAVE_SYS_TYPES_H": "1", "Py_GIL_DISABLED": "", "_Py_STACK_GROWS_DOWN": "1",
}  # fmt: skip
OF_THE_BUILD = {"ALIGNOF_MAX_ALIGN_T", "Py_ENABLE_SHARED", "Py_PYCONFIG_H"}
OF_THE_C_LIBRARY = re.compile(
    r"_[A-Z_]+_SOURCE|_FILE_OFFSET_BITS|_REENTRANT|_POSIX_THREADS|_POSIX_PTHREAD_SEMANTICS|_LARGE_FILES|__EXTENSIONS__"
)


def test_pyconfig_macros_used_by_headers_agree_with_macos() -> None:
    """Wheels for macOS are compiled with headers of a Python for Linux, so used macros must not differ."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++, the only compiler that prints used macros, is not installed")
    headers = sysconfig.get_path("include")
    command = [
        compiler,
        "-E",
        "-dU",
        f"-DPy_LIMITED_API={sys.hexversion >> 16 << 16:#x}",
        f"-I{headers}",
        "-x",
        "c++",
        "-",
    ]
    said = subprocess.run(command, input="#include <Python.h>\n", capture_output=True, text=True, check=True).stdout
    read = set(re.findall(r"^#(?:define|undef) (\w+)", said, re.MULTILINE))
    file = Path(sysconfig.get_config_h_filename())
    config = file.read_text()
    for name in re.findall(r"^#\s*include <(\S+)>", config, re.MULTILINE):  # Debian: a file for each architecture
        config += (file.parents[1] / name).read_text() if (file.parents[1] / name).exists() else ""
    here = dict(re.findall(r"^#define (\w+)[ \t]*(.*)$", config, re.MULTILINE))
    here |= dict.fromkeys(re.findall(r"^/\* #undef (\w+) \*/", config, re.MULTILINE), "")
    found = {name for name in read & set(here) if not OF_THE_C_LIBRARY.fullmatch(name)} - OF_THE_BUILD
    assert len(found) > 15 and found - set(READ_OF_PYCONFIG) == set()
    assert {name: here[name] for name in found} == {name: READ_OF_PYCONFIG[name] for name in found}


@pytest.mark.parametrize("platform", ["macosx_11_0_arm64", "macosx_11_0_x86_64"])
def test_macos_dependencies_are_in_the_lock_files(platform: str) -> None:
    """Check that dependencies only for macOS are in the lock files; checking files' tags would need the index."""
    locked = "".join((ROOT / "supply" / name).read_text() for name in ("build.txt", "run.txt"))
    asked = {
        re.split(r"[\s<>=!~;\[]", requirement, maxsplit=1)[0].lower().replace("_", "-")
        for each in metadata.distributions()
        if f"\n{each.name.lower().replace('_', '-')}==" in f"\n{locked}"
        for requirement in each.requires or []
        if _holds_on(requirement, platform.rpartition("_")[2])
    }
    missing = {name for name in asked if not re.search(rf"^{re.escape(name)}==", locked, re.MULTILINE)}
    assert len(asked) > 20 and not missing


def _holds_on(requirement: str, machine: str) -> bool:
    marker = Requirement(requirement).marker
    mac = {"sys_platform": "darwin", "platform_system": "Darwin", "platform_machine": machine, "extra": ""}
    return marker is None or marker.evaluate(mac)


def test_macos_wheel_is_not_selected_for_linux(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(target, "ROOT", tmp_path)
    monkeypatch.setattr(target, "version", lambda: "1.0")
    (tmp_path / "dist").mkdir()
    for tag in ("macosx_11_0_x86_64", "manylinux_2_17_x86_64.manylinux2014_x86_64"):
        (tmp_path / "dist" / f"n-1.0-cp312-abi3-{tag}.whl").touch()
    assert "manylinux" in target.our_wheel("3.13", "x86_64").name
