"""Fixtures for tests of this layer: every kernel family of this CPU, and weights of every kind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from twins import same_bits

from notso.qtensor.backends.cpu import kernel_choice
from notso.qtensor.formats import Format
from notso.qtensor.reference.random_blocks import HALVES, random_blocks, write_halves
from notso.qtensor.tensor import QTensor

Floats = npt.NDArray[np.float32]
EveryFamily = Callable[[Callable[[], npt.NDArray[Any]]], npt.NDArray[Any]]
MakeWeight = Callable[..., QTensor]


@pytest.fixture(scope="session")
def bits_equal() -> Callable[[npt.NDArray[Any], npt.NDArray[Any]], bool]:
    """Return a comparison by bits in which all NaN are equal."""
    return same_bits


@pytest.fixture(autouse=True)
def backend_restored() -> Iterator[None]:
    """Restore the kernels and threads after a test."""
    family, threads = kernel_choice.kernels(), kernel_choice.threads()
    yield
    kernel_choice.use_kernels(family)
    kernel_choice.set_threads(threads)


@pytest.fixture
def every_family() -> EveryFamily:
    """Return a function that runs a computation with every kernel family and asserts that the bits are equal."""

    def run(compute: Callable[[], npt.NDArray[Any]]) -> npt.NDArray[Any]:
        kernel_choice.use_kernels("generic")
        expected = compute()
        for family in kernel_choice.available_kernels():
            if family == "generic":
                continue
            kernel_choice.use_kernels(family)
            result = compute()
            if not same_bits(expected, result):
                places = np.argwhere(~((expected == result) | ((expected != expected) & (result != result))))
                shown = ", ".join(f"{tuple(p)}: {expected[tuple(p)]!r} != {result[tuple(p)]!r}" for p in places[:4])
                pytest.fail(f"{family} differs from generic in {len(places)} of {expected.size} places: {shown}")
        return expected

    return run


def _halves(rng: np.random.Generator, count: int, kind: str) -> npt.NDArray[np.uint8]:
    """Return bytes of `count` random float16 values, which are finite unless kind is "nonfinite"."""
    bits = rng.integers(0, 1 << 16, count, dtype=np.uint16)
    if kind == "nonfinite":
        bits[rng.random(count) < 0.5] |= 0x7C00  # infinities and NaN
    else:
        exponent = bits >> 10 & 31
        bits[exponent == 31] &= 0x83FF  # turn infinities and NaN into subnormals
    return bits.astype("<u2")[:, None].view(np.uint8)


@pytest.fixture(scope="session")
def make_weight() -> MakeWeight:
    """Return make_weight(format, rows, cols, rng, kind="plain", offset=0), which creates a QTensor. `offset` is the
    distance of its bytes from an aligned address.

    Kinds: plain (like trained weights), wild (random bytes with finite float16 fields: all signs, subnormals and
    65504), ones (all bytes 0xff except the float16 fields), zero, nonfinite.
    """

    def make(
        format: Format, rows: int, cols: int, rng: np.random.Generator, kind: str = "plain", offset: int = 0
    ) -> QTensor:
        count = rows * cols // format.block_values
        if kind == "plain" or format.is_float:
            blocks = random_blocks(format, count, rng, std=0.05)
            if kind == "zero":
                blocks[:] = 0
        else:
            fill = {"zero": 0, "ones": 255}.get(kind)
            blocks = rng.integers(0, 256, (count, format.block_bytes), dtype=np.uint8)
            if fill is not None:
                blocks[:] = fill
            if format.name == "MXFP4":  # limit its exponents, so that sums of products are finite
                blocks[:, 0] = np.minimum(blocks[:, 0], 200)
            if kind != "zero" and format in HALVES:
                halves = [_halves(rng, count, kind).view("<f2")[:, 0] for _ in HALVES[format]]
                write_halves(format, blocks, np.stack(halves, axis=1).astype(np.float32))
        room = np.full(blocks.size + 64, 0xA5, np.uint8)
        begin = -room.ctypes.data % 32 + offset
        data = room[begin : begin + blocks.size]
        data[:] = blocks.reshape(-1)
        return QTensor(f"{kind} {format.name}", format, (rows, cols), data)

    return make
