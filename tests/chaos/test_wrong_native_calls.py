"""Invalid calls of native operations, below Python's checks, are refused without writing a byte or give correct
results."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from chaos.ledger import LONG, Ledger
from fuzz import test_ops_fuzz as fuzz

from notso.qtensor.backends.cpu import kernel_choice

CALLS = 182_000 if LONG else 14 * 10


def test_invalid_native_calls_never_write_out_of_bounds(ledger: Ledger, kernels_as_they_were: None) -> None:
    failed = 0
    each = CALLS // len(fuzz.OPERATIONS)
    for name in fuzz.OPERATIONS:
        for seed in range(1_000_000, 1_000_000 + each):  # other seeds than the fuzzer's own
            try:
                with np.errstate(all="ignore"):
                    fuzz.one_call(name, seed)
            except AssertionError:
                failed += 1
    ledger.note(
        "engine",
        "native operations with wrong arguments: type, shape, order, location, range, size",
        f"{each * len(fuzz.OPERATIONS):,} calls of {len(fuzz.OPERATIONS)} operations, three in five wrong; none wrote"
        " outside its output, refused calls wrote nothing, valid calls gave numpy's results",
        failed,
    )


@pytest.fixture
def kernels_as_they_were() -> Iterator[None]:
    before = kernel_choice.kernels()
    yield
    kernel_choice.use_kernels(before)
