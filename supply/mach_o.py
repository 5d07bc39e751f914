"""Checks a library of a macOS wheel without a Mac: `python supply/mach_o.py LIBRARY arm64|x86_64 [BUILD]`.

It must be for that processor and run on macOS 11; need libSystem alone and take nothing from it but the names below
(those of Python are abi3audit's); name no folder; and on Apple silicon, which loads nothing else, carry a signature
whose hashes are those of its bytes. In the folder where it was built, the objects of both NEON families are searched
for instructions that the M1 lacks. Needs lief.
"""

from __future__ import annotations

import hashlib
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

OLDEST = (11, 0)  # macOS; the first on Apple silicon
LIBSYSTEM = "/usr/lib/libSystem.B.dylib"
SYMBOLS = Path(__file__).with_name("libsystem.txt")

CODE_DIRECTORY = 0xFADE0C02  # kern/cs_blobs.h
SHA256 = 2


def faults(library: bytes, machine: str) -> Iterator[str]:
    """Why a library may not be in a wheel."""
    import lief

    lief.logging.disable()
    universal = lief.MachO.parse(list(library))
    if universal is None or universal.size != 1:
        yield "it is not a Mach-O library for one processor"
        return
    binary = universal.at(0)
    if (found := binary.header.cpu_type.name.lower()) != machine:
        yield f"it is for {found}"
    oldest = tuple(binary.build_version.minos[:2]) if binary.has_build_version else None
    if oldest != OLDEST:
        yield f"it needs macOS {'.'.join(map(str, oldest)) if oldest else 'of an unknown version'}"
    needed = [each.name for each in binary.libraries if each.command != lief.MachO.LoadCommand.TYPE.ID_DYLIB]
    if needed != [LIBSYSTEM]:
        yield f"it needs {', '.join(needed) or 'no library'}"
    own = [each.name for each in binary.libraries if each.command == lief.MachO.LoadCommand.TYPE.ID_DYLIB]
    yield from (f"it is called {name}" for name in own if not name.startswith("@rpath/"))
    allowed = set(SYMBOLS.read_text().split())
    foreign = {
        symbol.name
        for symbol in binary.symbols
        if symbol.raw_type & 0x0F == 1 and not symbol.name.startswith(("_Py", "__Py"))  # undefined and external
    }
    yield from (f"it takes {name}" for name in sorted(foreign - allowed))
    if machine == "arm64":
        yield from unsigned_parts(library)


# (mask, value) of A64 instructions. The first family runs on every chip from the M1 on, the second on those with i8mm.
DOT = {
    "sdot": ((0xBFE0FC00, 0x0E809400), (0xBFC0F400, 0x0F80E000)),
    "udot": ((0xBFE0FC00, 0x2E809400), (0xBFC0F400, 0x2F80E000)),
}
I8MM = {
    "smmla": ((0xFFE0FC00, 0x4E80A400),),
    "ummla": ((0xFFE0FC00, 0x6E80A400),),
    "usmmla": ((0xFFE0FC00, 0x4E80AC00),),
    "usdot": ((0xBFE0FC00, 0x0E809C00), (0xBFC0F400, 0x0F80F000)),
}
LATER = {
    "bfdot": ((0xBFE0FC00, 0x2E40FC00), (0xBFC0F400, 0x0F40F000)),
    "bfmmla": ((0xFFE0FC00, 0x6E40EC00),),
    "sve": ((0x1E000000, 0x04000000),),
}
FAMILIES = {"neon": ({"sdot", "udot"}, {*I8MM, *LATER}), "neon_i8mm": ({"sdot", "smmla"}, {*LATER})}
"""What a family's object must and may not contain."""


def instructions(code: bytes) -> set[str]:
    """Names of those above that machine code of A64 contains."""
    words = {word for (word,) in struct.iter_unpack("<I", code[: len(code) // 4 * 4])}
    return {
        name
        for name, patterns in (DOT | I8MM | LATER).items()
        if any(word & mask == value for word in words for mask, value in patterns)
    }


def kernel_faults(build: Path) -> Iterator[str]:
    """What the objects of the NEON families lack or have too much."""
    import lief

    for family, (wanted, foreign) in FAMILIES.items():
        path = build / "CMakeFiles" / f"kernels_{family}.dir" / "native" / "kernels" / "neon" / "table.cpp.o"
        binary = lief.MachO.parse(str(path)).at(0)
        found = instructions(b"".join(bytes(each.content) for each in binary.sections if each.name == "__text"))
        yield from (f"{family} lacks {name}" for name in sorted(wanted - found))
        yield from (f"{family} has {name}" for name in sorted(foreign & found))


def unsigned_parts(library: bytes) -> Iterator[str]:
    """What of a library its ad-hoc signature does not hold for."""
    import lief

    binary = lief.MachO.parse(list(library)).at(0)
    if not binary.has_code_signature:
        yield "it is not signed"
        return
    start = binary.code_signature.data_offset
    blobs = struct.unpack_from(">3I", library, start)[2]
    index = [struct.unpack_from(">2I", library, start + 12 + 8 * each) for each in range(blobs)]
    directories = [
        start + offset for _, offset in index if struct.unpack_from(">I", library, start + offset)[0] == CODE_DIRECTORY
    ]
    if not directories:
        yield "its signature names no hashes"
    for directory in directories:
        hashes, _, _, pages, limit = struct.unpack_from(">5I", library, directory + 16)
        size, kind, _, shift = struct.unpack_from(">4B", library, directory + 36)
        if (size, kind, limit) != (32, SHA256, start):
            yield "its signature is not of SHA-256 over all that precedes it"
            return
        for page in range(pages):
            data = library[page << shift : min((page + 1) << shift, limit)]
            at = directory + hashes + size * page
            if hashlib.sha256(data).digest() != library[at : at + size]:
                yield f"page {page} is not the one that was signed"


if __name__ == "__main__":
    found = list(faults(Path(sys.argv[1]).read_bytes(), sys.argv[2]))
    found += [fault for folder in sys.argv[3:] for fault in kernel_faults(Path(folder))]
    if found:
        raise SystemExit(f"{sys.argv[1]}: {'; '.join(found)}")
