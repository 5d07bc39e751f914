"""Random blocks are valid, have the requested size, vary, and depend only on the seed."""

from __future__ import annotations

import numpy as np
import pytest

from notso.qtensor.formats import FORMATS, Format
from notso.qtensor.reference import blocks
from notso.qtensor.reference.random_blocks import random_blocks


@pytest.mark.parametrize("std", [0.02, 0.5])
@pytest.mark.parametrize("format", list(FORMATS.values()), ids=str)
def test_random_blocks_have_the_requested_distribution(format: Format, std: float) -> None:
    count = 2000 if format.block_values > 1 else 50000
    packed = random_blocks(format, count, np.random.default_rng(1), std)
    assert packed.shape == (count, format.block_bytes) and packed.dtype == np.uint8
    numbers = blocks.dequantize(format, packed)
    assert np.isfinite(numbers).all()
    assert numbers.std() == pytest.approx(std, rel=0.15)
    assert abs(numbers.mean()) < 0.05 * std
    np.testing.assert_array_equal(packed, random_blocks(format, count, np.random.default_rng(1), std))
    assert len(np.unique(packed, axis=0)) > 0.9 * min(count, 2000)
