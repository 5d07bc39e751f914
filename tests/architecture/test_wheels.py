"""What wheels are built with and where they are tried: the parts of it that need neither a compiler nor root."""

from __future__ import annotations

import subprocess
from pathlib import Path

import bare_debian
import pytest
import wheels
from emulation import DEBIAN_NAMES, ELF_NUMBERS, registration
from target import MACHINES, pip_target


def test_the_newest_glibc_of_a_library_is_found() -> None:
    names = b"\0malloc\0GLIBC_2.4\0libc.so.6\0GLIBC_2.17\0GLIBC_2.2.5\0GLIBC_PRIVATE\0"
    assert wheels.glibc(names) == (2, 17) <= wheels.GLIBC
    assert wheels.glibc(names + b"GLIBC_2.34\0") == (2, 34) > wheels.GLIBC


@pytest.mark.parametrize("machine", MACHINES)
def test_the_compiler_is_told_the_machine_and_zigs_spelling(
    machine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheels, "BUILD", tmp_path / "wheels")
    said = tmp_path / "python"
    said.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    said.chmod(0o755)
    command = [wheels.compiler(said, machine), "-O3", "-march=armv8.2-a+dotprod+i8mm", "-DNAME=a b", "-c"]
    words = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    assert words == [
        *("-m", "ziglang", "c++", "-target", f"{machine}-linux-gnu.2.17"),
        *("-O3", "-mcpu=generic+v8_2a+dotprod+i8mm", "-DNAME=a b", "-c"),
    ]


def test_pip_takes_archives_of_that_machine_alone() -> None:
    for machine in MACHINES:
        platforms = [word for word in pip_target("3.13", machine) if word.startswith("manylinux")]
        assert platforms and all(each.endswith(f"_{machine}") for each in platforms)
    assert set(MACHINES) == set(DEBIAN_NAMES) == set(ELF_NUMBERS)


def test_programs_of_another_machine_are_known_by_their_head() -> None:
    """As binfmt_misc reads it: a program is one whose bytes under the mask are those of the magic."""
    _, name, kind, _, magic, mask, qemu, flags = registration("aarch64", "/usr/bin/qemu").split(":")
    assert (name, kind, qemu, flags) == ("aarch64", "M", "/usr/bin/qemu", "F")
    head, under = (each.encode().decode("unicode_escape").encode("latin-1") for each in (magic, mask))
    program = b"\x7fELF\x02\x01\x01\x03" + bytes(8) + b"\x03\x00\xb7\x00"  # of Linux, position-independent
    assert len(head) == len(under) == len(program) == 20

    def is_known(first: bytes) -> bool:
        return all(a & m == b & m for a, b, m in zip(first, head, under, strict=True))

    assert is_known(program)
    assert not is_known(program[:18] + b"\x3e\x00") and not is_known(b"#!/bin/sh".ljust(20, b"\0"))


def test_only_fetched_packages_stay_listed(tmp_path: Path) -> None:
    (tmp_path / "debootstrap").mkdir()
    (tmp_path / "debootstrap" / "debpaths").write_text("apt /var/apt.deb\nzlib1g /var/zlib1g.deb\n")
    lists = tmp_path / "var" / "lib" / "apt" / "lists"
    lists.mkdir(parents=True)
    listed = lists / "somewhere_main_binary-arm64_Packages"
    listed.write_text("\n\n".join(f"Package: {name}\nVersion: 1" for name in ("apt", "apt-utils", "zlib1g")) + "\n\n")
    bare_debian.shorten_lists(tmp_path)
    assert listed.read_text() == "Package: apt\nVersion: 1\n\nPackage: zlib1g\nVersion: 1\n\n"
