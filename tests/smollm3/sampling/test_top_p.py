"""Sampling among many candidates gives the same tokens as sorting all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from notso.smollm3.sampling import sampler as sampling
from notso.smollm3.sampling.sampler import Sampler, ranked, sample_among_many
from notso.smollm3.values.sampling_params import SamplingParams

Floats = NDArray[np.float32]
SHAPES: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "flat": lambda rng, size: rng.normal(0, 0.3, size),
    "usual": lambda rng, size: rng.normal(0, 2.0, size),
    "peaked": lambda rng, size: rng.normal(0, 8.0, size),
    "many equal": lambda rng, size: np.round(rng.normal(0, 1.0, size) * 2) / 2,
    "all equal": lambda rng, size: np.zeros(size),
    "two heights": lambda rng, size: np.where(rng.random(size) < 0.5, 0.0, -1.0),
    "ruled out": lambda rng, size: np.where(rng.random(size) < 0.5, -np.inf, rng.normal(0, 1.0, size)),
}
SETTINGS = (
    {},
    {"temperature": 1.0, "top_p": 0.5},
    {"temperature": 1.0, "top_p": 0.999999},
    {"temperature": 2.0, "top_p": 1e-6},
    {"temperature": 1.0, "top_p": 1.0, "min_p": 0.01},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.2},
    {"temperature": 1.0, "top_k": 500, "top_p": 0.9},
)
SIZES = (1, 2, 300, 20_000)


def combinations() -> Iterator[Any]:
    """Yield every combination. By default, each pair of two values runs."""
    for (row, shape), (column, options), (at, size) in product(*map(enumerate, (SHAPES, SETTINGS, SIZES))):
        marks = () if (row + column) % len(SIZES) == at else pytest.mark.long("engine")
        yield pytest.param(shape, options, size, id=f"{size}-{options}-{shape}", marks=marks)


@pytest.mark.parametrize(("shape", "options", "size"), [*combinations()])
def test_sampling_among_many_candidates_equals_ranking_all(
    monkeypatch: pytest.MonkeyPatch, shape: str, options: dict[str, float], size: int
) -> None:
    rng = np.random.default_rng(size)
    sampler = Sampler(SamplingParams(**options), seed=3)  # type: ignore[arg-type]
    for position in range(12):
        logits = SHAPES[shape](rng, size).astype(np.float32)
        logits[rng.integers(size)] = 0.5
        drawn = []
        for many in (0, size + 1):  # lists no candidates, or all of them
            monkeypatch.setattr(sampling, "MANY", many)
            drawn.append(sampler.sample(logits, [], position))
        assert drawn[0] == drawn[1]


@pytest.mark.parametrize("uniform", [0.0, 1e-300, 0.25, 0.5, 1 - 2**-53])
@pytest.mark.parametrize("share", [None, 1e-9, 0.5, 1.0, 2.0])
def test_sample_among_many_matches_ranking_at_the_extremes(uniform: float, share: float | None) -> None:
    weights = np.random.default_rng(1).random(1000).astype(np.float32) ** 3 + np.float32(1e-30)
    weights[::3] = 0.0  # tokens with zero weight are never drawn
    end = None if share is None else share * float(weights.sum(dtype=np.float64))
    order = ranked(np.flatnonzero(weights), weights[weights > 0])
    sums = np.cumsum(weights[order], dtype=np.float64)
    kept = len(sums) if end is None else int(np.searchsorted(sums, end)) + 1
    order, sums = order[:kept], sums[:kept]
    expected = order[min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), len(order) - 1)]
    assert sample_among_many(weights, end, uniform) == expected


def test_ranking_is_by_weight_and_then_by_id() -> None:
    weights = np.array([0.5, 1.0, 0.5, 0.0, 1.0], np.float32)
    assert ranked(np.array([1, 3, 5, 7, 9]), weights).tolist() == [3, 9, 1, 5, 7]
