"""Draws from tens of thousands of candidates in order of rank, without putting them all in order.

Ranking takes most of the time that a flat distribution costs. But only two places in the order matter: where the
nucleus ends, and where the draw falls. So the candidates are dealt into buckets of nearly equal weight, whose sums say
which bucket each place is in, and those two buckets alone are ranked.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Indices = NDArray[np.intp]

_PIECE = 16_384  # taken at a time: memory for all at once would be fetched from the system each time
_BUCKET_BITS = 16  # of a weight's 32 that a bucket does not tell apart: weights in it differ by less than a hundredth


def sample_among_many(weights: Floats, nucleus_sum: float | None, uniform: float) -> int:
    """The index of `weights` (float32, >= 0) that `uniform` in [0, 1) falls on.

    It is the one that `ranked` and running sums would find, of the likeliest whose sum first reaches `nucleus_sum`
    (None: of all).
    """
    # Of floats that are not below 0, larger ones have larger bits.
    bits = (weights.view(np.uint32) >> np.uint32(_BUCKET_BITS)).astype(np.uint16)
    buckets = bits.max() - bits
    ends = np.cumsum(_bucket_sums(buckets, weights))

    def ranked_bucket(bucket: int) -> tuple[Indices, Doubles]:
        members = np.flatnonzero(buckets == bucket)
        order = ranked(members, weights[members])
        before = ends[bucket - 1] if bucket else 0.0
        return order, before + np.cumsum(weights[order], dtype=np.float64)

    last = int(np.searchsorted(ends, ends[-1]))  # what lies behind weighs nothing
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
    """Sums of the weights in each bucket. They are exact in any order: in one, all have the same exponent."""
    sums = np.zeros(int(buckets.max()) + 1)
    for start in range(0, len(weights), _PIECE):
        piece = slice(start, start + _PIECE)
        sums += np.bincount(buckets[piece], weights=weights[piece], minlength=len(sums))
    return sums


def ranked(ids: Indices, weights: Floats) -> Indices:
    """`ids` by falling weight (float32, >= 0), then by id."""
    # One sort of whole numbers is several times faster than a stable one of floats: the bits of floats that are not
    # negative rank as the floats do, and an id below them parts equal weights.
    keys = (~weights.view(np.uint32)).astype(np.uint64) << np.uint64(32) | ids.astype(np.uint64)
    keys.sort()
    return (keys & np.uint64(0xFFFF_FFFF)).astype(np.intp)
