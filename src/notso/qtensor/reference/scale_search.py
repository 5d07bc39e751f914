"""Search for block scales during quantization.

Existing blocks never pass through here. The search minimizes sum(w * (block value - x)^2), with w the importance of
each value. It tries several scales around the obvious one, fits the scale to the resulting integers by least squares,
and keeps the best. Minima are refitted to their stored scales, and finally a super-block's halves to all of its
integers.

Groups are columns, (values per group, groups), so that sums over a group are evaluated in a fixed order, independent of
neighbors.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[Any]

STRETCHES = np.linspace(-1.0, 1.0, 9)  # shifts of the largest value, in integer steps
SIGNED_STRETCHES = np.linspace(-1.0, 3.0, 13)  # the extreme maps to about -32, and need not use the full range


def as_half(x: Floats) -> Floats:
    """Return `x` rounded to float16, as float32."""
    return x.astype(np.float16).astype(np.float32)


def _reciprocal(x: Floats) -> Floats:
    # Zero where x is zero, or too small for a finite reciprocal.
    usable = np.abs(x) > np.float32(1e-37)
    return np.where(usable, 1 / np.where(usable, x, np.float32(1)), np.float32(0)).astype(np.float32)


def symmetric(scale: Floats, x: Floats, low: int, high: int) -> tuple[Floats, Integers]:
    """Return float16 scales (n,) and q = x / scale, rounded to low..high."""
    d = as_half(scale)
    return d, np.clip(np.rint(x * _reciprocal(d)[:, None]), low, high).astype(np.int32)


def _columns(x: Floats, group: int) -> Floats:
    return np.ascontiguousarray(x.reshape(-1, group).T)


def _fit_with_minimum(x: Floats, w: Floats, top: int) -> tuple[Floats, Floats]:
    # Fits scale and minimum (n,), both >= 0, with x near scale * q - minimum for q in 0..top; x and w are (32, n).
    low = np.minimum(x.min(axis=0), np.float32(0))
    y = x - low  # nonnegative, so that the differences below do not cancel
    spread = y.max(axis=0)
    sum_w, wy = w.sum(axis=0), w * y
    sum_y = wy.sum(axis=0)
    best_scale, best_minimum = spread / np.float32(top), -low
    best_error = np.full(x.shape[1], np.inf, np.float32)
    for stretch in STRETCHES:
        inverse = np.float32(top + stretch) * _reciprocal(spread)
        q = np.clip(np.rint(y * inverse), 0, top)
        wq = w * q
        sum_q, sum_qq, sum_qy = wq.sum(axis=0), (wq * q).sum(axis=0), (wy * q).sum(axis=0)
        scale = (sum_w * sum_qy - sum_q * sum_y) * _reciprocal(sum_w * sum_qq - sum_q * sum_q)
        lowered = (scale * sum_q - sum_y) * _reciprocal(sum_w)  # minimum of y
        through_zero = lowered < low  # the stored minimum cannot be negative: fit only the scale
        scale = np.maximum(np.where(through_zero, (sum_qy + low * sum_q) * _reciprocal(sum_qq), scale), 0)
        lowered = np.where(through_zero, low, lowered)
        error = scale * (scale * sum_qq - 2 * (lowered * sum_q + sum_qy)) + lowered * (lowered * sum_w + 2 * sum_y)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
        best_minimum = np.where(better, lowered - low, best_minimum)
    return best_scale.astype(np.float32), best_minimum.astype(np.float32)


def super_blocks(x: Floats, w: Floats, top: int) -> tuple[Floats, Floats, Integers, Integers, Integers]:
    """Return d, dmin (n,), scales, mins (n, 8) in 0..63, q in 0..top for x, w (n, 256)."""
    columns, weights = _columns(x, 32), _columns(w, 32)
    scale, minimum = (part.reshape(-1, 8) for part in _fit_with_minimum(columns, weights, top))
    d, scales = symmetric(scale.max(axis=1) / np.float32(63), scale, 0, 63)
    # The minimum partly compensates for the rounding of its scale.
    stored = (d[:, None] * scales.astype(np.float32)).reshape(-1)
    q = np.clip(np.rint((columns + minimum.reshape(-1)) * _reciprocal(stored)), 0, top)
    fitted = (weights * (stored * q - columns)).sum(axis=0) * _reciprocal(weights.sum(axis=0))
    minimum = np.where(stored > 0, np.maximum(fitted, 0), minimum.reshape(-1)).astype(np.float32).reshape(-1, 8)
    dmin, mins = symmetric(minimum.max(axis=1) / np.float32(63), minimum, 0, 63)
    q = _integers(columns, d, dmin, scales, mins, top)
    d, dmin = _refit(columns, weights, d, dmin, scales, mins, q)
    q = _integers(columns, d, dmin, scales, mins, top)
    return d, dmin, scales, mins, q.T.astype(np.int32).reshape(len(x), 256)


def _integers(x: Floats, d: Floats, dmin: Floats, scales: Integers, mins: Integers, top: int) -> Floats:
    stored = (d[:, None] * scales.astype(np.float32)).reshape(-1)
    minimum = (dmin[:, None] * mins.astype(np.float32)).reshape(-1)
    q: Floats = np.clip(np.rint((x + minimum) * _reciprocal(stored)), 0, top)
    return q


def _refit(
    x: Floats, w: Floats, d: Floats, dmin: Floats, scales: Integers, mins: Integers, q: Floats
) -> tuple[Floats, Floats]:
    # Least squares in double precision for d and dmin of each super-block, with fixed integers. Values that are not
    # both positive stay unchanged.
    s, m = scales.astype(np.float64), mins.astype(np.float64)
    wq, wx = w * q, w * x

    def by_block(sums: Floats) -> npt.NDArray[np.float64]:
        return sums.astype(np.float64).reshape(-1, 8)

    ss = (s * s * by_block((wq * q).sum(axis=0))).sum(axis=1)
    sm = (s * m * by_block(wq.sum(axis=0))).sum(axis=1)
    mm = (m * m * by_block(w.sum(axis=0))).sum(axis=1)
    sx = (s * by_block((wq * x).sum(axis=0))).sum(axis=1)
    mx = (m * by_block(wx.sum(axis=0))).sum(axis=1)
    determinant = ss * mm - sm * sm
    solvable = determinant > 1e-9 * ss * mm
    safe = np.where(solvable, determinant, 1)
    fitted_d, fitted_dmin = (sx * mm - sm * mx) / safe, (sm * sx - ss * mx) / safe
    # Without a minimum there is a single unknown.
    alone = ~solvable & (mm == 0) & (ss > 0)
    fitted_d = np.where(alone, sx / np.where(alone, ss, 1), fitted_d)
    usable = (fitted_d > 0) & (fitted_d < 2 * d) & (alone | (solvable & (fitted_dmin > 0) & (fitted_dmin < 2 * dmin)))
    return (
        np.where(usable, as_half(np.where(usable, fitted_d, 0).astype(np.float32)), d),
        np.where(usable & ~alone, as_half(np.where(usable & ~alone, fitted_dmin, 0).astype(np.float32)), dmin),
    )


def signed_super_blocks(x: Floats, w: Floats) -> tuple[Floats, Integers, Integers]:
    """Return d (n,), scales (n, 16) in -128..127, q in -32..31 for x, w (n, 256)."""
    groups, weights = _columns(x, 16), _columns(w, 16)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=0)[None], axis=0)[0]
    wx = weights * groups
    best_scale = np.zeros(groups.shape[1], np.float32)
    best_gain = np.full(groups.shape[1], -np.inf, np.float32)
    for stretch in SIGNED_STRETCHES:
        inverse = np.float32(-32 + stretch) * _reciprocal(extreme)
        q = np.clip(np.rint(groups * inverse), -32, 31)
        sum_qx = (q * wx).sum(axis=0)
        scale = sum_qx * _reciprocal((weights * q * q).sum(axis=0))
        gain = sum_qx * scale  # reduction of the error relative to zeros
        better = gain > best_gain
        best_gain, best_scale = np.where(better, gain, best_gain), np.where(better, scale, best_scale)
    scale = best_scale.reshape(-1, 16)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)[:, 0]
    d, scales = symmetric(largest / np.float32(-128), scale, -128, 127)
    q = _signed_integers(groups, d, scales)
    steps = scales.astype(np.float64)
    qx = (steps * (q * wx).sum(axis=0).astype(np.float64).reshape(-1, 16)).sum(axis=1)
    qq = (steps * steps * (weights * q * q).sum(axis=0).astype(np.float64).reshape(-1, 16)).sum(axis=1)
    fitted = qx / np.where(qq > 0, qq, 1)
    usable = (qq > 0) & (np.abs(fitted) < 2 * np.abs(d)) & (np.sign(fitted) == np.sign(d))
    d = np.where(usable, as_half(np.where(usable, fitted, 0).astype(np.float32)), d)
    return d, scales, _signed_integers(groups, d, scales).T.astype(np.int32).reshape(len(x), 256)


def _signed_integers(x: Floats, d: Floats, scales: Integers) -> Floats:
    stored = (d[:, None] * scales.astype(np.float32)).reshape(-1)
    q: Floats = np.clip(np.rint(x * _reciprocal(stored)), -32, 31)
    return q
