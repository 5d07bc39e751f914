"""Top-p sampling from tens of thousands of candidates without a full sort.

Sorting dominates the cost for flat distributions, but only two ranks matter: the end of the nucleus, and the draw.
Candidates are put in buckets of nearly equal weight; bucket sums locate both ranks, and only those buckets are sorted.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Indices = NDArray[np.intp]

_PIECE = 16_384  # chunk size: temporaries for all at once would be mapped anew by the system each time
_BUCKET_BITS = 16  # low bits that a bucket ignores: weights within one differ by less than 1 %


def sample_among_many(weights: Floats, nucleus_sum: float | None, uniform: float) -> int:
    """Return the index of weights (float32, >= 0) on which `uniform` falls, within a nucleus."""
    # The bits of nonnegative floats have the order of their values.
    # Equals `ranked` and cumulative sums over the likeliest weights that first reach `nucleus_sum` (None: all).
    bits = (weights.view(np.uint32) >> np.uint32(_BUCKET_BITS)).astype(np.uint16)
    buckets = bits.max() - bits
    ends = np.cumsum(_bucket_sums(buckets, weights))

    def ranked_bucket(bucket: int) -> tuple[Indices, Doubles]:
        members = np.flatnonzero(buckets == bucket)
        order = ranked(members, weights[members])
        before = ends[bucket - 1] if bucket else 0.0
        return order, before + np.cumsum(weights[order], dtype=np.float64)

    last = int(np.searchsorted(ends, ends[-1]))  # later buckets have zero weight
    if nucleus_sum is not None:
        last = min(int(np.searchsorted(ends, nucleus_sum)), last)
    order, sums = ranked_bucket(last)
    if nucleus_sum is not None:
        kept = int(np.searchsorted(sums, nucleus_sum)) + 1
        order, sums = order[:kept], sums[:kept]
    sampled = uniform * float(sums[-1])
    bucket = int(np.searchsorted(ends, sampled, side="right"))
    if bucket < last:
        order, sums = ranked_bucket(bucket)
    return int(order[min(int(np.searchsorted(sums, sampled, side="right")), len(order) - 1)])


def _bucket_sums(buckets: NDArray[np.uint16], weights: Floats) -> Doubles:
    # Exact in any order: the weights in a bucket share an exponent.
    sums = np.zeros(int(buckets.max()) + 1)
    for start in range(0, len(weights), _PIECE):
        piece = slice(start, start + _PIECE)
        sums += np.bincount(buckets[piece], weights=weights[piece], minlength=len(sums))
    return sums


def ranked(ids: Indices, weights: Floats) -> Indices:
    """Sort `ids` by descending weight, then id."""
    # One integer sort is several times faster than a stable float sort: nonnegative floats order like their bits, and
    # the id in the low bits breaks ties.
    keys = (~weights.view(np.uint32)).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFF_FFFF)).astype(np.intp)
