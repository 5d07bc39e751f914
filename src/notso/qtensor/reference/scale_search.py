"""Choosing scales: the part of quantising that is a matter of quality, not of layout.

A file's own blocks never pass through here; it serves tests, synthetic files and small exports. Each search tries a
few scales around the obvious one, fits the best scale to the integers each gives (least squares), and keeps the fit
with the smallest squared error.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float32]
Integers: TypeAlias = npt.NDArray[Any]

STRETCHES = np.linspace(-1.0, 1.0, 9)  # how far, in integer steps, the largest value may be moved


def as_half(x: Floats) -> Floats:
    """`x` rounded to what a float16 field can hold, still float32."""
    return x.astype(np.float16).astype(np.float32)


def _reciprocal(x: Floats) -> Floats:
    """1 / x, and 0 where x is 0 (or so small that 1 / x is infinite)."""
    usable = np.abs(x) > np.float32(1e-37)
    return np.where(usable, 1 / np.where(usable, x, np.float32(1)), np.float32(0)).astype(np.float32)


def symmetric(scale: Floats, x: Floats, low: int, high: int) -> tuple[Floats, Integers]:
    """scale (n,), x (n, values) -> the scale as float16 holds it, q = x / scale to nearest within low..high."""
    d = as_half(scale)
    return d, np.clip(np.rint(x * _reciprocal(d)[:, None]), low, high).astype(np.int32)


def _fit_with_minimum(x: Floats, top: int) -> tuple[Floats, Floats]:
    """x (n, 32) -> scale and minimum (n,), both >= 0, so that x is near scale * q - minimum with q in 0..top."""
    low = np.minimum(x.min(axis=1), np.float32(0))
    spread = x.max(axis=1) - low
    best_scale, best_minimum = spread / np.float32(top), -low
    best_error = np.full(len(x), np.inf, np.float32)
    n = x.shape[1]
    for stretch in STRETCHES:
        inverse = np.float32(top + stretch) * _reciprocal(spread)
        q = np.clip(np.rint((x - low[:, None]) * inverse[:, None]), 0, top)
        sum_q, sum_qq, sum_x, sum_qx = q.sum(axis=1), (q * q).sum(axis=1), x.sum(axis=1), (q * x).sum(axis=1)
        scale = (n * sum_qx - sum_q * sum_x) * _reciprocal(n * sum_qq - sum_q * sum_q)
        minimum = (scale * sum_q - sum_x) / np.float32(n)
        through_zero = minimum < 0  # the stored minimum cannot be negative: fit the scale alone
        scale = np.maximum(np.where(through_zero, sum_qx * _reciprocal(sum_qq), scale), 0)
        minimum = np.where(through_zero, np.float32(0), minimum)
        error = np.square(scale[:, None] * q - minimum[:, None] - x).sum(axis=1)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale, best_minimum = np.where(better, scale, best_scale), np.where(better, minimum, best_minimum)
    return best_scale.astype(np.float32), best_minimum.astype(np.float32)


def super_blocks(x: Floats, top: int) -> tuple[Floats, Floats, Integers, Integers, Integers]:
    """x (n, 256) -> d (n,), dmin (n,), scales (n, 8), mins (n, 8) in 0..63, q (n, 256) in 0..top."""
    groups = x.reshape(-1, 32)
    scale, minimum = (part.reshape(-1, 8) for part in _fit_with_minimum(groups, top))
    d, scales = symmetric(scale.max(axis=1) / np.float32(63), scale, 0, 63)
    dmin, mins = symmetric(minimum.max(axis=1) / np.float32(63), minimum, 0, 63)
    stored_scale, stored_minimum = d[:, None] * scales, dmin[:, None] * mins
    shifted = x.reshape(-1, 8, 32) + stored_minimum[:, :, None]
    q = np.clip(np.rint(shifted * _reciprocal(stored_scale.astype(np.float32))[:, :, None]), 0, top)
    return d, dmin, scales, mins, q.astype(np.int32).reshape(len(x), 256)


def signed_super_blocks(x: Floats) -> tuple[Floats, Integers, Integers]:
    """x (n, 256) -> d (n,), scales (n, 16) in -128..127, q (n, 256) in -32..31."""
    groups = x.reshape(-1, 16)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)[:, 0]
    best_scale = np.zeros(len(groups), np.float32)
    best_error = np.full(len(groups), np.inf, np.float32)
    for stretch in STRETCHES:  # the extreme goes to about -32: the negative side reaches one further
        inverse = np.float32(-32 + stretch) * _reciprocal(extreme)
        q = np.clip(np.rint(groups * inverse[:, None]), -32, 31)
        scale = (q * groups).sum(axis=1) * _reciprocal((q * q).sum(axis=1))
        error = np.square(scale[:, None] * q - groups).sum(axis=1)
        better = error < best_error
        best_error, best_scale = np.where(better, error, best_error), np.where(better, scale, best_scale)
    scale = best_scale.reshape(-1, 16)
    largest = np.take_along_axis(scale, np.abs(scale).argmax(axis=1)[:, None], axis=1)[:, 0]
    d, scales = symmetric(largest / np.float32(-128), scale, -128, 127)
    stored = (d[:, None] * scales).astype(np.float32)
    q = np.clip(np.rint(x.reshape(-1, 16, 16) * _reciprocal(stored)[:, :, None]), -32, 31)
    return d, scales, q.astype(np.int32).reshape(len(x), 256)
