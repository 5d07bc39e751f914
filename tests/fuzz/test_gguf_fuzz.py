"""Randomly damaged GGUF files load safely or raise GGUFError, and none takes long.

Runs for a few seconds by default; `FUZZ_SECONDS=300` (or `make fuzz`) runs longer. A failure prints the seed of its
file: `FUZZ_SEED=<n>` runs only that file.
"""

from __future__ import annotations

import os
import random
import struct
import time
from pathlib import Path

from notso.qtensor.errors import GGUFError
from notso.qtensor.formats import FORMATS
from notso.qtensor.gguf import VALUE_TYPES, GGUFFile

SECONDS = float(os.environ.get("FUZZ_SECONDS", "3"))
ONE_SEED = os.environ.get("FUZZ_SEED")
MAX_SECONDS = 0.5  # of CPU time for a file of a few kilobytes; a hundred times the usual time
NASTY = (
    0,
    1,
    2,
    31,
    32,
    255,
    256,
    257,
    4096,
    4097,
    2**16,
    10**6,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**32,
    2**62,
    2**63,
    2**64 - 1,
)
SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}


def number(rng: random.Random, honest: int, bits: int) -> bytes:
    """Return mostly the correct value, and sometimes an extreme or a random one."""
    if rng.random() < 0.03:
        honest = rng.choice(NASTY) if rng.random() < 0.8 else rng.getrandbits(bits)
    return (honest & (1 << bits) - 1).to_bytes(bits // 8, "little")


def string(rng: random.Random, raw: bytes) -> bytes:
    if rng.random() < 0.03:
        raw = rng.choice([b"", b"\0", b"\xff", b"x" * 300, raw + b"\xc3", raw * 40])
    return number(rng, len(raw), 64) + raw


def value(rng: random.Random, kind: int) -> bytes:
    if kind == 8:
        return string(rng, rng.choice([b"abc", "grüße".encode(), b"", rng.randbytes(rng.randrange(4))]))
    if kind == 9:
        item = rng.choice([*SIZES, 8, 8, 9])
        count = rng.randrange(6)
        return number(rng, item, 32) + number(rng, count, 64) + b"".join(value(rng, item) for _ in range(count))
    if kind == 7:
        return bytes([rng.choice([0, 1, 1, 1, 1, 2])])
    return rng.randbytes(SIZES.get(kind, 3))


def random_file(rng: random.Random) -> bytes:
    """Return a file in GGUF's structure with a few wrong values, and possibly some bytes changed, removed or added."""
    entries = []
    for i in range(rng.randrange(6)):
        kind = rng.choice(list(VALUE_TYPES))
        entries.append(
            string(rng, f"key.{i if rng.random() < 0.95 else 0}".encode()) + number(rng, kind, 32) + value(rng, kind)
        )
    if rng.random() < 0.3:
        kind = 4 if rng.random() < 0.8 else rng.randrange(14)
        aligned = rng.choice([8, 32, 64, 4096, *NASTY[:8]])
        entries.append(string(rng, b"general.alignment") + number(rng, kind, 32) + struct.pack("<I", aligned))
    tensors, offset = [], 0
    for i in range(rng.randrange(4)):
        format = rng.choice(list(FORMATS.values()))
        sides = [format.block_values * rng.randrange(1, 4), *(rng.randrange(1, 4) for _ in range(rng.randrange(4)))]
        size = format.block_bytes * sides[0] // format.block_values
        for side in sides[1:]:
            size *= side
        name = string(rng, f"t{i if rng.random() < 0.95 else 0}".encode())
        shape = number(rng, len(sides), 32) + b"".join(number(rng, side, 64) for side in sides)
        tensors.append(name + shape + number(rng, format.ggml_type, 32) + number(rng, offset, 64))
        offset += -(-size // 32) * 32
    counts = number(rng, len(tensors), 64) + number(rng, len(entries), 64)
    header = b"GGUF" + number(rng, 3, 32) + counts + b"".join(entries) + b"".join(tensors)
    whole = bytearray(header + bytes(-len(header) % 32) + rng.randbytes(offset))
    for _ in range(rng.choice([0, 0, 0, 1, 2, 8])):
        at = rng.randrange(min(len(whole), len(header)) or 1)
        match rng.randrange(4):
            case 0:
                whole[at] ^= 1 << rng.randrange(8)
            case 1:
                del whole[at : at + rng.choice([1, 4, 8, 1000])]
            case 2:
                whole[at:at] = rng.randbytes(rng.choice([1, 4, 8]))
            case 3:
                whole[at : at + 8] = struct.pack("<Q", rng.choice(NASTY))
        if not whole:
            break
    return bytes(whole)


def loads(path: Path) -> bool:
    """Return whether the file loads. If it does, access everything in it; errors other than GGUFError are bugs."""
    try:
        with GGUFFile.open(path) as file:
            dict(file.metadata)
            for tensor in file.tensors.values():
                tensor.dequantize(0, min(tensor.rows, 2))
    except GGUFError as error:
        assert str(error).isprintable() and error.field
        return False
    return True


def test_fuzzed_gguf_files_load_or_raise_gguf_error(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    base = 0 if "FUZZ_SECONDS" not in os.environ else random.SystemRandom().getrandbits(48)
    seeds = iter([int(ONE_SEED)]) if ONE_SEED else iter(range(base, base + 10**12))
    ends_at = time.monotonic() + SECONDS
    accepted = tried = 0
    for seed in seeds:
        path.write_bytes(random_file(random.Random(seed)))
        started = time.thread_time()
        try:
            accepted += loads(path)
        except BaseException as error:
            raise AssertionError(f"FUZZ_SEED={seed}: {type(error).__name__}: {error}") from error
        assert time.thread_time() - started < MAX_SECONDS, f"FUZZ_SEED={seed} took too long"
        tried += 1
        if time.monotonic() > ends_at:
            break
    print(f"{tried} files, {accepted} loaded")
    if not ONE_SEED:
        assert 0.05 * tried < accepted < 0.95 * tried  # both outcomes are frequent
