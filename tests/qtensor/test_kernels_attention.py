"""Causal attention over a half-precision cache: all families equal the generic one, and that one NumPy's."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from notso.qtensor.backends.cpu import ops
from notso.qtensor.reference import ops as reference

# Relative to the largest value: a few hundred products summed in float32, exp, and a division.
ATTENTION_TOLERANCE = 2e-6
LENGTHS = (1, 2, 15, 16, 17, 31, 33, 63, 65, 127, 128, 129, 255, 256, 257, 300)
NAN_HALF = 0x7E00

Floats = npt.NDArray[np.float32]
Every = Callable[[Callable[[], npt.NDArray[Any]]], npt.NDArray[Any]]


@dataclass
class Stored:
    """Sequences of keys and values in a cache whose unused places contain NaN; `keys` and `values` are float32."""

    pool: ops.KeyValuePool
    tables: npt.NDArray[np.int32]
    keys: list[Floats]  # (length, KH, D) for each sequence
    values: list[Floats]


def halves(pool: ops.KeyValuePool) -> npt.NDArray[np.uint16]:
    """Return the whole pool as a writable array."""
    return pool.data.view(np.uint16)


def keys_and_values(pool: ops.KeyValuePool) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """Return views of keys (B, KH, D, 128) and values (B, KH, 128, D) of a pool with one run."""
    (run,), shape = halves(pool), (pool.blocks, pool.kv_heads)
    both = run.swapaxes(0, 1).reshape(*shape, 2, -1)
    return both[:, :, 0].reshape(*shape, -1, 128), both[:, :, 1].reshape(*shape, 128, -1)


def as_half(x: Floats) -> Floats:
    return x.astype(np.float16).astype(np.float32)


def store(lengths: list[int], kv_heads: int, dim: int, rng: np.random.Generator, spread: float = 1.0) -> Stored:
    tiles = max(-(-length // 128) for length in lengths)
    blocks = len(lengths) * tiles + 3
    pool = ops.key_value_pool(blocks, kv_heads, dim)
    halves(pool)[:] = NAN_HALF
    tables = rng.permutation(blocks)[: len(lengths) * tiles].astype(np.int32).reshape(len(lengths), tiles)
    keys = [rng.standard_normal((n, kv_heads, dim), np.float32) * np.float32(spread) for n in lengths]
    values = [rng.standard_normal((n, kv_heads, dim), np.float32) for n in lengths]
    for s, n in enumerate(lengths):
        places = np.arange(n, dtype=np.int32), np.full(n, s, np.int32)
        ops.store_key_values(keys[s], values[s], *places, tables, pool)
    return Stored(pool, tables, [as_half(k) for k in keys], [as_half(v) for v in values])


def attend(q: Floats, positions: list[int], sequences: list[int], stored: Stored, scale: float | None = None) -> Floats:
    out = np.full_like(q, np.nan)
    scale = 1 / math.sqrt(q.shape[2]) if scale is None else scale
    places = np.array(positions, np.int32), np.array(sequences, np.int32)
    ops.attention(q, *places, stored.tables, stored.pool, scale, out)
    return out


@pytest.mark.parametrize("dim", [16, 32, 48, 64, 80, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 1), (3, 3), (16, 4), (6, 2), (5, 1)])
def test_attention_matches_numpy(dim: int, heads: int, kv_heads: int, every_family: Every) -> None:
    rng = np.random.default_rng([dim, heads])
    for length in LENGTHS if (dim, heads) in ((16, 4), (128, 16)) else (1, 17, 130):
        stored = store([length], kv_heads, dim, rng)
        rows = min(length, 5)
        q = rng.standard_normal((rows, heads, dim), np.float32)
        positions = list(range(length - rows, length))
        result = every_family(lambda q=q, p=positions, rows=rows, s=stored: attend(q, p, [0] * rows, s))
        expected = reference.attention(q, stored.keys[0], stored.values[0], length - rows)
        assert np.abs(result - expected).max() < ATTENTION_TOLERANCE * np.abs(stored.values[0]).max()


def test_prefill_gives_the_bits_of_single_rows(every_family: Every) -> None:
    rng = np.random.default_rng(1)
    stored = store([300], 2, 64, rng)
    q = rng.standard_normal((300, 8, 64), np.float32)
    whole = every_family(lambda: attend(q, list(range(300)), [0] * 300, stored))
    alone = np.concatenate([attend(q[i : i + 1], [i], [0], stored) for i in range(300)])
    np.testing.assert_array_equal(whole, alone)
    for chunk in (7, 64, 129):
        parts = [range(i, min(i + chunk, 300)) for i in range(0, 300, chunk)]
        pieces = [attend(q[p.start : p.stop], list(p), [0] * len(p), stored) for p in parts]
        np.testing.assert_array_equal(whole, np.concatenate(pieces))


def test_batched_sequences_do_not_affect_each_other(every_family: Every) -> None:
    rng = np.random.default_rng(2)
    lengths = [1, 129, 40, 128, 300, 7]
    stored = store(lengths, 2, 32, rng)
    rows = [(s, p) for s, n in enumerate(lengths) for p in sorted({0, n // 2, n - 1})]
    for order in (rows, [rows[i] for i in rng.permutation(len(rows))], rows[::-1]):
        q = rng.standard_normal((len(order), 4, 32), np.float32)
        sequences, positions = [s for s, _ in order], [p for _, p in order]
        result = every_family(lambda q=q, p=positions, s=sequences: attend(q, p, s, stored))
        for i, (s, p) in enumerate(order):
            expected = reference.attention(q[i : i + 1], stored.keys[s], stored.values[s], p)
            assert np.abs(result[i] - expected[0]).max() < ATTENTION_TOLERANCE * np.abs(stored.values[s]).max()
            np.testing.assert_array_equal(result[i : i + 1], attend(q[i : i + 1], [p], [s], stored))


@pytest.mark.parametrize("length", [1, 16, 33, 127, 128, 129, 200])
def test_cache_contents_beyond_the_length_are_ignored(length: int, every_family: Every) -> None:
    """The caches above contain NaN after each sequence. Here, bits are compared with zeros, huge values and
    infinities."""
    rng = np.random.default_rng(length)
    stored = store([length], 1, 64, rng)
    q = rng.standard_normal((1, 4, 64), np.float32)
    expected = every_family(lambda: attend(q, [length - 1], [0], stored))
    assert np.isfinite(expected).all()
    for garbage in (0, 0x7BFF, 0x7C00, 0xFC00):  # zero, 65504, infinities
        other = store([length], 1, 64, np.random.default_rng(length))
        held = halves(other.pool)
        held[held == NAN_HALF] = garbage
        result = every_family(lambda other=other: attend(q, [length - 1], [0], other))
        np.testing.assert_array_equal(result, expected)


def test_sequences_sharing_a_block_give_identical_results(every_family: Every) -> None:
    """Two sequences with a common prefix have the same block in both tables, and give the same bits."""
    rng = np.random.default_rng(3)
    stored = store([256, 256], 1, 32, rng)
    stored.tables[1, 0] = stored.tables[0, 0]
    q = np.repeat(rng.standard_normal((1, 2, 32), np.float32), 2, axis=0)
    result = every_family(lambda: attend(q, [127, 127], [0, 1], stored))
    np.testing.assert_array_equal(result[0], result[1])
    assert not np.array_equal(*attend(q, [128, 128], [0, 1], stored))


def test_peaked_and_flat_scores_match_numpy(every_family: Every) -> None:
    """The softmax over tiles is correct with one dominant key and with identical keys."""
    rng = np.random.default_rng(4)
    for spread in (0.0, 30.0):
        stored = store([300], 1, 64, rng, spread)
        q = rng.standard_normal((4, 4, 64), np.float32)
        result = every_family(lambda q=q, s=stored: attend(q, [5, 130, 256, 299], [0] * 4, s))
        for i, p in enumerate([5, 130, 256, 299]):
            expected = reference.attention(q[i : i + 1], stored.keys[0], stored.values[0], p)
            # before exp, a score of a thousand is rounded to a multiple of 6e-5
            np.testing.assert_allclose(result[i], expected[0], atol=3e-4 if spread else 1e-6)


def test_nan_in_query_affects_only_one_head(every_family: Every) -> None:
    rng = np.random.default_rng(5)
    stored = store([140], 1, 32, rng)
    for bad in (np.nan, np.inf):
        q = rng.standard_normal((3, 4, 32), np.float32)
        q[1, 2, 9] = bad
        result = every_family(lambda q=q: attend(q, [10, 130, 139], [0] * 3, stored))
        finite = np.isfinite(result).all(axis=2)
        assert not finite[1, 2] and finite.sum() == 11


def test_nan_in_cache_affects_only_attending_rows(every_family: Every) -> None:
    rng = np.random.default_rng(6)
    stored = store([200], 1, 32, rng)
    block = stored.tables[0, 150 // 128]
    keys, values = keys_and_values(stored.pool)
    for part in (0, 1):
        kept = stored.pool.read_block(block)
        if part == 0:
            keys[block, 0, 3, 150 % 128] = NAN_HALF
        else:
            values[block, 0, 150 % 128, 3] = NAN_HALF
        q = rng.standard_normal((4, 2, 32), np.float32)
        result = every_family(lambda q=q: attend(q, [100, 149, 150, 199], [0] * 4, stored))
        assert np.isfinite(result[:2]).all() and np.isnan(result[2:]).any(axis=2).all()
        stored.pool.write_block(block, kept)


def test_stored_values_are_rounded_to_half_precision(every_family: Every) -> None:
    """Stored values are rounded to nearest even, in the layout that the class documents; other places are unchanged."""
    rng = np.random.default_rng(7)
    special = [0.0, -0.0, 1e-8, 5.9604645e-8, 2.9802322e-8, 6.1e-5, 65504.0, 65519.9, 65520.0, 1e30, -1e30, 2049, 2051]
    k = rng.standard_normal((5, 2, 16), np.float32)
    k[3, 1, : len(special)] = special
    v = -k
    positions, sequences = np.array([0, 3, 127, 128, 130], np.int32), np.array([0, 0, 0, 0, 1], np.int32)
    tables = np.array([[4, 1], [0, 3]], np.int32)

    def stored() -> npt.NDArray[np.uint16]:
        pool = ops.key_value_pool(6, 2, 16)
        halves(pool)[:] = 7
        ops.store_key_values(k, v, positions, sequences, tables, pool)
        keys, values = keys_and_values(pool)
        for i, (s, p) in enumerate(zip(sequences, positions, strict=True)):
            block = tables[s, p // 128]
            with np.errstate(over="ignore"):
                np.testing.assert_array_equal(keys[block, :, :, p % 128], k[i].astype(np.float16).view(np.uint16))
                np.testing.assert_array_equal(values[block, :, p % 128, :], v[i].astype(np.float16).view(np.uint16))
        assert (halves(pool) != 7).sum() == 2 * k.size
        return pool.data

    every_family(stored)
