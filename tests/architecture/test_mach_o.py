"""Faults of libraries in macOS wheels are found, such as a missing signature or a newer minimum system."""

from __future__ import annotations

import hashlib
import struct

import mach_o
import pytest

PAGE = 4096
ARM64, X86_64 = 0x0100000C, 0x01000007
DYLIB = 6
LC_SYMTAB, LC_DYSYMTAB, LC_LOAD_DYLIB, LC_ID_DYLIB, LC_SEGMENT_64, LC_UUID, LC_CODE_SIGNATURE, LC_BUILD_VERSION = (
    2,
    0xB,
    0xC,
    0xD,
    0x19,
    0x1B,
    0x1D,
    0x32,
)


def library(
    *,
    cpu: int = ARM64,
    system: int = 11,
    symbols: tuple[str, ...] = ("_malloc", "_PyLong_FromLong"),
    needed: tuple[str, ...] = (mach_o.LIBSYSTEM,),
    name: str = "@rpath/_native.abi3.so",
    signed: bool = True,
    local: tuple[str, ...] = (),
) -> bytes:
    """Create a Mach-O library without code, in the layout of a linker."""

    def text(command: int, word: str) -> bytes:
        data = word.encode() + bytes(8 - len(word) % 8)
        return struct.pack("<6I", command, 24 + len(data), 24, 0, 0x10000, 0x10000) + data

    names = b"\0" + b"".join(each.encode() + b"\0" for each in (*local, *symbols))
    table, at = b"", 1
    for each in (*local, *symbols):
        kind = 0x66 if each in local else 0x01  # path of an object file; or undefined, external, from the first library
        table += struct.pack("<IBBHQ", at, kind, 0, 1 << 8, 0)
        at += len(each) + 1
    first = len(local)
    indirect = struct.pack("<4I", first, 0x80000000, 0 if local else 0x80000000, first + 1)
    names += bytes(-len(names) % 16)
    start, size = PAGE, len(table) + len(indirect) + len(names)
    end = start + size
    pages = -(-end // PAGE)
    identifier = b"x\0"
    hashes = 44 + len(identifier)
    directory = struct.pack(
        ">9I4BI", mach_o.CODE_DIRECTORY, hashes + 32 * pages, 0x20001, 2, hashes, 44, 0, pages, end, 32, 2, 0, 12, 0
    )
    signature_bytes = 20 + hashes + 32 * pages if signed else 0
    commands = [
        struct.pack("<2I16s4Q4I", LC_SEGMENT_64, 72, b"__TEXT", 0, PAGE, 0, PAGE, 5, 5, 0, 0),
        struct.pack(
            "<2I16s4Q4I", LC_SEGMENT_64, 72, b"__LINKEDIT", PAGE, PAGE, start, size + signature_bytes, 1, 1, 0, 0
        ),
        text(LC_ID_DYLIB, name),
        struct.pack("<6I", LC_SYMTAB, 24, start, first + len(symbols), start + len(table) + len(indirect), len(names)),
        struct.pack(
            "<20I", LC_DYSYMTAB, 80, 0, first, first, 0, first, len(symbols), *[0] * 6, start + len(table), 4, *[0] * 4
        ),
        struct.pack("<2I16s", LC_UUID, 24, repr(local).encode()[-16:]),
        struct.pack("<6I", LC_BUILD_VERSION, 24, 1, system << 16, system << 16, 0),
        *(text(LC_LOAD_DYLIB, each) for each in needed),
    ]
    if signed:
        commands.append(struct.pack("<4I", LC_CODE_SIGNATURE, 16, end, signature_bytes))
    head = struct.pack("<8I", 0xFEEDFACF, cpu, 0, DYLIB, len(commands), sum(map(len, commands)), 0x85, 0)
    data = (head + b"".join(commands)).ljust(PAGE, b"\0") + table + indirect + names
    if not signed:
        return data
    sums = b"".join(hashlib.sha256(data[page * PAGE : min((page + 1) * PAGE, end)]).digest() for page in range(pages))
    return data + struct.pack(">5I", 0xFADE0CC0, signature_bytes, 1, 0, 20) + directory + identifier + sums


def test_valid_library_has_no_faults() -> None:
    assert not list(mach_o.faults(library(), "arm64"))
    assert not list(mach_o.faults(library(cpu=X86_64, signed=False), "x86_64"))  # signatures are optional on Intel


@pytest.mark.parametrize(
    ("planted", "fault"),
    [
        (library(signed=False), "it is not signed"),
        (library(symbols=("_malloc", "_fork")), "it uses _fork"),
        (library(symbols=("_malloc", "__ZNSt3__15mutex4lockEv")), "it uses __ZNSt3__15mutex4lockEv"),
        (library(system=13), "its minimum macOS version is 13.0"),
        (library(cpu=X86_64), "it is for x86_64"),
        (
            library(needed=(mach_o.LIBSYSTEM, "/usr/lib/libc++.1.dylib")),
            "it is linked to /usr/lib/libSystem.B.dylib, /usr/lib/libc++",
        ),
        (library(name="/home/somebody/_native.abi3.so"), "its install name is /home/somebody/_native.abi3.so"),
        (b"\x7fELF" + bytes(100), "it is not a Mach-O library"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_library_fault_is_found(planted: bytes, fault: str) -> None:
    found = list(mach_o.faults(planted, "arm64"))
    assert len(found) == 1 and found[0].startswith(fault)


def test_bytes_changed_after_signing_are_found() -> None:
    changed = bytearray(library())
    changed[PAGE - 1] ^= 1
    assert list(mach_o.faults(bytes(changed), "arm64")) == ["page 0 does not match the signature"]


@pytest.mark.parametrize("machine", ["arm64", "x86_64"])
def test_stripped_library_contains_no_build_paths(machine: str) -> None:
    kind = {"cpu": ARM64, "signed": True} if machine == "arm64" else {"cpu": X86_64, "signed": False}
    made = [
        library(local=(*(f"{home}/{each}.o" for each in range(400)), "_helper"), **kind)  # type: ignore[arg-type]
        for home in ("/home/me", "/home/somebody/else")
    ]
    here, there = map(mach_o.stripped, made)
    assert here == there and b"/home" not in here
    assert not list(mach_o.faults(here, machine))
    assert here[PAGE:].startswith(library(**kind)[PAGE : PAGE + 48])  # type: ignore[arg-type]
    (planted,) = mach_o.faults(mach_o.stripped(library(symbols=("_malloc", "_fork"), local=("/x.o",), **kind)), machine)  # type: ignore[arg-type]
    assert planted == "it uses _fork"


@pytest.mark.parametrize(
    ("word", "name"),
    [
        (0x4E829420, "sdot"),  # v0.4s, v1.16b, v2.16b
        (0x4F82E020, "sdot"),  # v0.4s, v1.16b, v2.4b[0]
        (0x6E829420, "udot"),
        (0x4E82A420, "smmla"),
        (0x6E82A420, "ummla"),
        (0x4E829C20, "usdot"),
        (0x6E42FC20, "bfdot"),
        (0x04A00000, "sve"),  # add z0.s, z0.s, z0.s
    ],
)
def test_arm_instruction_extensions_are_identified(word: int, name: str) -> None:
    nop, add = 0xD503201F, 0x4EA28420  # add v0.4s, v1.4s, v2.4s
    assert mach_o.instructions(struct.pack("<3I", nop, word, add)) == {name}
    assert not mach_o.instructions(struct.pack("<2I", nop, add))
