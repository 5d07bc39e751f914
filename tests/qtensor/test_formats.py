"""Names, numbers and sizes of the block formats."""

from __future__ import annotations

import gguf
import pytest

from notso.qtensor.errors import OperandError
from notso.qtensor.formats import (
    FORMATS,
    FORMATS_BY_NAME,
    Q4_K,
    Q6_K,
    UNSUPPORTED_NAMES,
    Format,
    format_name,
    kv_block_bytes,
    row_bytes,
)


@pytest.mark.parametrize("format", list(FORMATS.values()), ids=str)
def test_format_sizes_match_the_gguf_package(format: Format) -> None:
    theirs = gguf.GGMLQuantizationType(format.ggml_type)
    assert theirs.name == format.name
    assert gguf.GGML_QUANT_SIZES[theirs] == (format.block_values, format.block_bytes)


def test_every_format_of_the_gguf_package_has_a_name() -> None:
    for theirs in gguf.GGMLQuantizationType:
        assert format_name(theirs.value) == theirs.name
    assert not set(FORMATS) & set(UNSUPPORTED_NAMES)
    assert format_name(9999) == "unknown type 9999"


def test_row_bytes_requires_whole_blocks() -> None:
    assert (row_bytes(Q4_K, 2048), row_bytes(Q4_K, 11008)) == (1152, 6192)
    assert (row_bytes(Q6_K, 2048), row_bytes(Q6_K, 11008)) == (1680, 9030)
    for bad in (0, -256, 255, 257):
        with pytest.raises(OperandError):
            row_bytes(Q4_K, bad)


def test_format_is_found_by_name() -> None:
    assert FORMATS_BY_NAME["Q4_K"] is Q4_K
    assert not Q4_K.is_float


@pytest.mark.parametrize(
    ("heads", "dim", "message"),
    [
        (0, 64, "cannot have 0 heads"),
        (4, 0, "must be a positive multiple of 16"),
        (4, 72, "head size of 72 is not supported"),
    ],
)
def test_unsupported_cache_heads_are_refused(heads: int, dim: int, message: str) -> None:
    with pytest.raises(OperandError, match=message):
        kv_block_bytes("k8v8", heads, dim)
