"""Strip the library of a macOS wheel, or check it, without a Mac:

    python supply/mach_o.py LIBRARY strip|arm64|x86_64 [BUILD]

The library must be for that architecture and for macOS 11, depend only on libSystem, use only the symbols in
libsystem.txt (abi3audit checks those of Python), and have a relative install name. For Apple silicon, which requires
signatures, it must be signed and the hashes in its signature must be correct. In the build folder, the object files of
both NEON families are searched for instructions that the M1 does not have. Needs lief.

zig leaves the paths of all object files in a library, and its own stripping damages the symbol table; so this script
removes local symbols after linking, and signs the library again.
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
    """Yield the reasons why a library may not be in a wheel."""
    import lief

    lief.logging.disable()
    universal = lief.MachO.parse(list(library))
    if universal is None or universal.size != 1:
        yield "it is not a Mach-O library for one architecture"
        return
    binary = universal.at(0)
    if (found := binary.header.cpu_type.name.lower()) != machine:
        yield f"it is for {found}"
    oldest = tuple(binary.build_version.minos[:2]) if binary.has_build_version else None
    if oldest != OLDEST:
        yield f"its minimum macOS version is {'.'.join(map(str, oldest)) if oldest else 'unknown'}"
    needed = [each.name for each in binary.libraries if each.command != lief.MachO.LoadCommand.TYPE.ID_DYLIB]
    if needed != [LIBSYSTEM]:
        yield f"it is linked to {', '.join(needed) or 'no library'}"
    own = [each.name for each in binary.libraries if each.command == lief.MachO.LoadCommand.TYPE.ID_DYLIB]
    yield from (f"its install name is {name}" for name in own if not name.startswith("@rpath/"))
    allowed = set(SYMBOLS.read_text().split())
    foreign = {
        symbol.name
        for symbol in binary.symbols
        if symbol.raw_type & 0x0F == 1 and not symbol.name.startswith(("_Py", "__Py"))  # undefined and external
    }
    yield from (f"it uses {name}" for name in sorted(foreign - allowed))
    if machine == "arm64":
        yield from unsigned_parts(library)


# (mask, value) of A64 instructions. The family neon runs on every chip from the M1 on, neon_i8mm on those with i8mm.
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
"""Instructions that a family's object file must and must not contain."""


def instructions(code: bytes) -> set[str]:
    """Return the names of the instructions above that occur in A64 machine code."""
    words = {word for (word,) in struct.iter_unpack("<I", code[: len(code) // 4 * 4])}
    return {
        name
        for name, patterns in (DOT | I8MM | LATER).items()
        if any(word & mask == value for word in words for mask, value in patterns)
    }


def kernel_faults(build: Path) -> Iterator[str]:
    """Yield missing and forbidden instructions of the NEON families' object files."""
    import lief

    for family, (wanted, foreign) in FAMILIES.items():
        path = build / "CMakeFiles" / f"kernels_{family}.dir" / "native" / "kernels" / "neon" / "table.cpp.o"
        binary = lief.MachO.parse(str(path)).at(0)
        found = instructions(b"".join(bytes(each.content) for each in binary.sections if each.name == "__text"))
        yield from (f"{family} does not use {name}" for name in sorted(wanted - found))
        yield from (f"{family} must not use {name}" for name in sorted(foreign & found))


def unsigned_parts(library: bytes) -> Iterator[str]:
    """Yield errors in the ad-hoc signature of a library."""
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
        yield "its signature has no hashes"
    for directory in directories:
        hashes, _, _, pages, limit = struct.unpack_from(">5I", library, directory + 16)
        size, kind, _, shift = struct.unpack_from(">4B", library, directory + 36)
        if (size, kind, limit) != (32, SHA256, start):
            yield "its signature must contain SHA-256 hashes of everything before it"
            return
        for page in range(pages):
            data = library[page << shift : min((page + 1) << shift, limit)]
            at = directory + hashes + size * page
            if hashlib.sha256(data).digest() != library[at : at + size]:
                yield f"page {page} does not match the signature"


SYMTAB, DYSYMTAB, SEGMENT, UUID, SIGNATURE = 0x2, 0xB, 0x19, 0x1B, 0x1D  # mach-o/loader.h
_LOCAL = 0x80000000
_SPECIAL = 0xC0000000  # local and absolute entries of the indirect table, which have no symbol


def stripped(library: bytes) -> bytes:
    """Return a library without local symbols and paths of object files, signed again if it was signed."""
    data = bytearray(library)
    at, commands = 32, {}
    for _ in range(struct.unpack_from("<I", data, 16)[0]):
        kind, size = struct.unpack_from("<2I", data, at)
        if kind != SEGMENT or data[at + 8 : at + 24].rstrip(b"\0") == b"__LINKEDIT":
            commands[kind] = at
        at += size
    start, count, names_at, _ = struct.unpack_from("<4I", data, commands[SYMTAB] + 8)
    numbers = list(struct.unpack_from("<18I", data, commands[DYSYMTAB] + 8))
    local, indirect_at, indirect_count = numbers[1], numbers[12], numbers[13]
    table, names = b"", b"\0"
    for each in range(local, count):
        place, rest = struct.unpack_from("<I12s", library, start + 16 * each)
        name = library[names_at + place : library.index(b"\0", names_at + place) + 1]
        table += struct.pack("<I12s", len(names), rest)
        names += name
    indirect = struct.unpack_from(f"<{indirect_count}I", library, indirect_at)
    table_end = start + len(table)
    data[start:] = table + struct.pack(
        f"<{indirect_count}I",
        *(each if each & _SPECIAL else _LOCAL if each < local else each - local for each in indirect),
    )
    struct.pack_into("<4I", data, commands[SYMTAB] + 8, start, count - local, len(data), len(names))
    numbers[:6] = [0, 0, 0, numbers[3], numbers[3], numbers[5]]
    numbers[12] = table_end
    struct.pack_into("<18I", data, commands[DYSYMTAB] + 8, *numbers)
    data += names + bytes(-(len(data) + len(names)) % 16)
    first = struct.unpack_from("<Q", data, commands[SEGMENT] + 40)[0]  # the file offset of __LINKEDIT
    head = _head_of_signature(library, commands[SIGNATURE], len(data)) if SIGNATURE in commands else b""
    size = len(head) and len(head) + 32 * -(-len(data) // 4096)
    struct.pack_into("<Q", data, commands[SEGMENT] + 48, len(data) + size - first)
    if head:
        struct.pack_into("<2I", data, commands[SIGNATURE] + 8, len(data), size)
    data[commands[UUID] + 8 : commands[UUID] + 24] = bytes(16)
    data[commands[UUID] + 8 : commands[UUID] + 24] = hashlib.sha256(data).digest()[:16]
    pages = [data[page : page + 4096] for page in range(0, len(data), 4096)] if head else []
    return bytes(data + head + b"".join(hashlib.sha256(page).digest() for page in pages))


def _head_of_signature(library: bytes, command: int, limit: int) -> bytes:
    # Return a signature that consists of a code directory only, without the pages' hashes, which the caller appends.
    start = struct.unpack_from("<I", library, command + 8)[0]
    directory = next(
        start + offset
        for _, offset in struct.iter_unpack(">2I", library[start + 12 : start + 12 + 8 * library[start + 11]])
        if struct.unpack_from(">I", library, start + offset)[0] == CODE_DIRECTORY
    )
    hashes, _, special = struct.unpack_from(">3I", library, directory + 16)
    head = bytearray(library[directory : directory + hashes - 32 * special])
    size = len(head) + 32 * -(-limit // 4096)
    struct.pack_into(">I", head, 4, size)
    struct.pack_into(">I", head, 16, len(head))
    struct.pack_into(">3I", head, 24, 0, -(-limit // 4096), limit)
    head[39] = 12  # pages of 4 KiB
    return struct.pack(">5I", 0xFADE0CC0, 20 + size, 1, 0, 20) + bytes(head)


if __name__ == "__main__":
    if sys.argv[2] == "strip":
        path = Path(sys.argv[1])
        path.write_bytes(stripped(path.read_bytes()))
        raise SystemExit
    found = list(faults(Path(sys.argv[1]).read_bytes(), sys.argv[2]))
    found += [fault for folder in sys.argv[3:] for fault in kernel_faults(Path(folder))]
    if found:
        raise SystemExit(f"{sys.argv[1]}: {'; '.join(found)}")
