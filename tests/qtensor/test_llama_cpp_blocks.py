"""Blocks quantized by llama.cpp dequantize to llama.cpp's values bit for bit, in NumPy and in the native module."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from golden.store import FOLDER

from notso.qtensor.backends.cpu import kernel_choice, ops
from notso.qtensor.formats import FORMATS, FORMATS_BY_NAME, Format
from notso.qtensor.reference import blocks
from notso.qtensor.tensor import QTensor

QUANTIZED = [format for format in FORMATS.values() if not format.is_float]

FAR = 0.9
"""Maximum root mean square of the errors, as a fraction of that of the values. Ternary blocks have 0.8, and a wrong
layout has at least 1."""


@pytest.fixture(scope="module")
def golden() -> dict[str, npt.NDArray[np.generic]]:
    with np.load(FOLDER / "llama_cpp_blocks.npz", allow_pickle=False) as file:
        return dict(file)


def test_golden_file_contains_every_quantized_format(golden: dict[str, npt.NDArray[np.generic]]) -> None:
    names = {name.partition(".")[0] for name in golden} - {"source", "importance"}
    assert {FORMATS_BY_NAME[name] for name in names} == set(QUANTIZED)


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_dequantized_values_match_llama_cpp(format: Format, golden: dict[str, npt.NDArray[np.generic]]) -> None:
    packed, expected = golden[f"{format.name}.blocks"].astype(np.uint8), golden[f"{format.name}.values"]
    np.testing.assert_array_equal(blocks.dequantize(format, packed), expected)
    weight = QTensor("w", format, expected.shape, packed.reshape(-1))
    ids = np.arange(len(expected), dtype=np.int32)
    for family in kernel_choice.available_kernels():
        kernel_choice.use_kernels(family)
        rows = np.full(expected.shape, np.nan, np.float32)
        ops.embed_rows(weight, ids, rows)
        np.testing.assert_array_equal(rows, expected, err_msg=family)


@pytest.mark.parametrize("format", QUANTIZED, ids=str)
def test_golden_values_are_close_to_the_source(format: Format, golden: dict[str, npt.NDArray[np.generic]]) -> None:
    """The dequantized values are close to the originals, so the golden file is plausible."""
    source, values = golden["source"].astype(np.float64), golden[f"{format.name}.values"].astype(np.float64)
    weight = golden["importance"].astype(np.float64)
    error = np.sqrt(((values - source) ** 2 * weight).sum(axis=1) / (source**2 * weight).sum(axis=1))
    assert error.max() < FAR
