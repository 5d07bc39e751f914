"""Filter chain for requests with typical_p or XTC, each filter applied to what the previous one left.

Order: top_k, typical_p, top_p, min_p, XTC, as in llama.cpp's default chain (`common_params_sampling.samplers`, rules in
src/llama-sampling.cpp), but after temperature. Typical sampling: Meister et al., "Locally typical sampling", 2022; XTC
("exclude top choices"): github.com/p-e-w.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from notso.smollm3.sampling.top_p import Indices, ranked
from notso.smollm3.values.sampling_params import SamplingParams

Floats = NDArray[np.float32]

# Shares of the largest weight: only weights above the first sufficient one are sorted.
_SHARES = (1e-2, 1e-4, 1e-7)
# The same for typical_p, in nats.
_DEVIATIONS = (0.5, 1.0, 2.0, 4.0, 8.0)


def left_by_all(weights: Floats, params: SamplingParams, chance: float) -> tuple[Indices, Floats]:
    """Return the tokens that remain of weights (V,), likeliest first, and their weights."""
    # XTC applies if `chance`, in [0, 1), is below `xtc_probability`. At least one token is always left.
    ids = np.flatnonzero(weights)
    if 0 < params.top_k < len(ids):
        held = weights[ids]
        least = np.partition(held, len(ids) - params.top_k)[len(ids) - params.top_k]
        listed = ids[held >= least]
        ids = np.sort(ranked(listed, weights[listed])[: params.top_k])
    if params.typical_p < 1.0:
        ids = _typical(ids, weights[ids], params.typical_p)
    if params.top_p < 1.0:
        ids = _nucleus(ids, weights[ids], params.top_p)
    if params.min_p > 0.0:
        held = weights[ids]
        ids = ids[held >= np.float32(params.min_p) * held.max()]
    ids = ranked(ids, weights[ids])
    held = weights[ids]
    if chance < params.xtc_probability:
        first = last_of_top_choices(held, params.xtc_threshold)
        return ids[first:], held[first:]
    return ids, held


def last_of_top_choices(weights: Floats, threshold: float) -> int:
    """Return the index of the smallest weight with share `threshold`; weights descend."""
    total = float(weights.sum(dtype=np.float64))
    return max(0, int(np.count_nonzero(weights >= threshold * total)) - 1)


def _typical(ids: Indices, weights: Floats, share: float) -> Indices:
    # Keeps tokens with a surprise closest to the expected one until they hold `share`; the result is sorted by id.
    total = float(weights.sum(dtype=np.float64))
    surprises = np.log(total) - np.log(weights, dtype=np.float64)
    expected = float(np.dot(weights, surprises)) / total
    deviations = np.abs(surprises - expected)
    for most in (*_DEVIATIONS, np.inf):
        near = np.flatnonzero(deviations <= most)
        if weights[near].sum(dtype=np.float64) >= share * total:
            break
    near = near[np.argsort(deviations[near], kind="stable")]
    sums = np.cumsum(weights[near], dtype=np.float64)
    return np.sort(ids[near[: int(np.searchsorted(sums, share * total)) + 1]])


def _nucleus(ids: Indices, weights: Floats, share: float) -> Indices:
    least, greatest = share * float(weights.sum(dtype=np.float64)), weights.max()
    for floor in (*_SHARES, 0.0):
        listed = weights >= np.float32(floor) * greatest
        if weights[listed].sum(dtype=np.float64) >= least:
            break
    ids, weights = ids[listed], weights[listed]
    order = ranked(np.arange(len(ids)), weights)
    sums = np.cumsum(weights[order], dtype=np.float64)
    return ids[order[: int(np.searchsorted(sums, least)) + 1]]
