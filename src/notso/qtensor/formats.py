"""Supported block formats, names of unsupported ones, and KV cache formats.

A row consists of blocks, each with a fixed number of values and bytes. `reference/unpacked_blocks.py`
(readable) and `native/blocks.h` (fast) define the layouts.

native/cache_format.h defines the byte layout of KV cache formats.
"""

# The name of a KV format gives the bits per element: k8v4 stores keys in 8 bits and values in 4. Every format but f16
# also stores a half-precision scale per vector (the key or value of a head at one position), so k8v8 takes 8.125 bits
# per element for heads of size 128.

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from notso.qtensor.errors import OperandError

KVFormat: TypeAlias = Literal["f16", "k8v8", "k8v4", "k4v4", "k4v3"]

TILE_POSITIONS = 128  # positions per KV cache block; a tile is the part of a sequence that one block stores

# Maximum head dimension of KV formats other than f16: up to this size, float32 represents sums of byte products
# exactly.
MAX_BYTE_DIM = 1024

SCALE_BYTES = 2


@dataclass(frozen=True, slots=True)
class KVBits:
    """Bits per element of keys and of values, without scales."""

    key: int
    value: int

    @property
    def is_low_bit(self) -> bool:
        return min(self.key, self.value) < 8

    def pair_bytes(self, head_dim: int) -> int:
        scales = 0 if self.key == 16 else 2 * SCALE_BYTES
        return (self.key + self.value) * head_dim // 8 + scales


# KV formats, largest first, numbered as in native/cache_format.h.
KV_FORMATS: dict[KVFormat, KVBits] = {
    "f16": KVBits(16, 16),
    "k8v8": KVBits(8, 8),
    "k8v4": KVBits(8, 4),
    "k4v4": KVBits(4, 4),
    "k4v3": KVBits(4, 3),
}

KV_FORMAT_NUMBERS: dict[KVFormat, int] = {name: number for number, name in enumerate(KV_FORMATS)}


def kv_block_bytes(format: KVFormat, kv_heads: int, head_dim: int) -> int:
    """Return a block's size in bytes. Raises OperandError for an unknown format or unsupported heads."""
    if format not in KV_FORMATS:
        raise OperandError(f"unknown KV format {format!r}; choices: {', '.join(KV_FORMATS)}")
    if kv_heads < 1:
        raise OperandError(f"a cache cannot have {kv_heads} heads")
    if head_dim < 1 or head_dim % 16:
        raise OperandError(f"a head size of {head_dim} is not supported; it must be a positive multiple of 16")
    if format != "f16" and head_dim > MAX_BYTE_DIM:
        raise OperandError(f"KV format {format} supports head sizes up to {MAX_BYTE_DIM}, not {head_dim}")
    return kv_heads * TILE_POSITIONS * KV_FORMATS[format].pair_bytes(head_dim)


@dataclass(frozen=True, slots=True)
class Format:
    """A storage format; `ggml_type` is its number in GGUF files."""

    name: str
    ggml_type: int
    block_values: int
    block_bytes: int

    @property
    def is_float(self) -> bool:
        return self.block_values == 1

    @property
    def bits_per_value(self) -> float:
        return 8 * self.block_bytes / self.block_values

    def __str__(self) -> str:
        return self.name


F32 = Format("F32", 0, 1, 4)
F16 = Format("F16", 1, 1, 2)
Q4_0 = Format("Q4_0", 2, 32, 18)
Q4_1 = Format("Q4_1", 3, 32, 20)
Q5_0 = Format("Q5_0", 6, 32, 22)
Q5_1 = Format("Q5_1", 7, 32, 24)
Q8_0 = Format("Q8_0", 8, 32, 34)
Q2_K = Format("Q2_K", 10, 256, 84)
Q3_K = Format("Q3_K", 11, 256, 110)
Q4_K = Format("Q4_K", 12, 256, 144)
Q5_K = Format("Q5_K", 13, 256, 176)
Q6_K = Format("Q6_K", 14, 256, 210)
IQ2_XXS = Format("IQ2_XXS", 16, 256, 66)
IQ2_XS = Format("IQ2_XS", 17, 256, 74)
IQ3_XXS = Format("IQ3_XXS", 18, 256, 98)
IQ1_S = Format("IQ1_S", 19, 256, 50)
IQ4_NL = Format("IQ4_NL", 20, 32, 18)
IQ3_S = Format("IQ3_S", 21, 256, 110)
IQ2_S = Format("IQ2_S", 22, 256, 82)
IQ4_XS = Format("IQ4_XS", 23, 256, 136)
IQ1_M = Format("IQ1_M", 29, 256, 56)
BF16 = Format("BF16", 30, 1, 2)
TQ1_0 = Format("TQ1_0", 34, 256, 54)
TQ2_0 = Format("TQ2_0", 35, 256, 66)
MXFP4 = Format("MXFP4", 39, 32, 17)

FORMATS: dict[int, Format] = {
    f.ggml_type: f
    for f in (
        *(F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S),
        *(IQ4_NL, IQ3_S, IQ2_S, IQ4_XS, IQ1_M, BF16, TQ1_0, TQ2_0, MXFP4),
    )
}
FORMATS_BY_NAME: dict[str, Format] = {f.name: f for f in FORMATS.values()}

# Other format numbers assigned by ggml, for error messages. "removed": no longer in ggml.
UNSUPPORTED_NAMES: dict[int, str] = {
    4: "Q4_2 (removed)",
    5: "Q4_3 (removed)",
    9: "Q8_1",
    15: "Q8_K",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    31: "Q4_0_4_4 (removed)",
    32: "Q4_0_4_8 (removed)",
    33: "Q4_0_8_8 (removed)",
    36: "IQ4_NL_4_4 (removed)",
    37: "IQ4_NL_4_8 (removed)",
    38: "IQ4_NL_8_8 (removed)",
    40: "NVFP4",
    41: "Q1_0",
}


def format_name(ggml_type: int) -> str:
    """Return the name for a format number, even an unsupported one."""
    if ggml_type in FORMATS:
        return FORMATS[ggml_type].name
    return UNSUPPORTED_NAMES.get(ggml_type, f"unknown type {ggml_type}")


def row_bytes(format: Format, cols: int) -> int:
    """Return a row's size in bytes. Raises OperandError for incomplete blocks."""
    if cols < 1 or cols % format.block_values:
        raise OperandError(
            f"row length {cols} is not a positive multiple of {format.name}'s block size of {format.block_values}"
        )
    return cols // format.block_values * format.block_bytes
