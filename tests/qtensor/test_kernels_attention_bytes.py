"""Attention over a cache with 8 bits or fewer: all families give the NumPy reference's bits, in any batch and order."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from notso.qtensor.backends.cpu import kernel_choice, ops
from notso.qtensor.errors import OperandError
from notso.qtensor.reference import kv_cache
from notso.qtensor.reference import kv_cache as reference

FORMATS: tuple[ops.KVFormat, ...] = ("k8v8", "k8v4", "k4v4", "k4v3")
LENGTHS = (1, 2, 15, 16, 17, 64, 65, 127, 128, 129, 257, 300)

Floats = npt.NDArray[np.float32]
Every = Callable[[Callable[[], npt.NDArray[Any]]], npt.NDArray[Any]]


@dataclass
class Stored:
    """Sequences in a cache whose unused bytes are random."""

    pool: ops.KeyValuePool
    tables: npt.NDArray[np.int32]
    window: tuple[npt.NDArray[np.int32], ops.KeyValuePool] | None
    keys: list[Floats]  # (length, KH, D) for each sequence
    values: list[Floats]

    def held(self, sequence: int, position: int) -> list[reference.RoundedVectors]:
        """Return keys and values as rounded for the row at `position`: (position + 1, KH, D)."""
        key_bits, value_bits = kv_cache.BITS[self.pool.format]
        own = np.arange(position + 1) // 128
        first_or_last = ((own == 0) | (own == own[-1]))[:, None]
        sides = []
        for x, bits in ((self.keys[sequence], key_bits), (self.values[sequence], value_bits)):
            exact, coarse = (reference.round_vectors(x[: position + 1], b) for b in (8, bits))
            levels = np.where(first_or_last[..., None], exact.levels, coarse.levels)
            sides.append(reference.RoundedVectors(levels, np.where(first_or_last, exact.scales, coarse.scales)))
        return sides

    def expected(self, q: Floats, positions: list[int], sequences: list[int]) -> Floats:
        """Return the reference's result, row by row."""
        rows = [
            reference.attention(q[i : i + 1], *self.held(s, p), p, scale_of(q))
            for i, (s, p) in enumerate(zip(sequences, positions, strict=True))
        ]
        return np.concatenate(rows)


def scale_of(q: Floats) -> float:
    return 1 / math.sqrt(q.shape[2])


def store(
    lengths: list[int], kv_heads: int, dim: int, rng: np.random.Generator, format: ops.KVFormat, spread: float = 1.0
) -> Stored:
    keys = [rng.standard_normal((n, kv_heads, dim), np.float32) * np.float32(spread) for n in lengths]
    values = [rng.standard_normal((n, kv_heads, dim), np.float32) for n in lengths]
    stored = empty(lengths, kv_heads, dim, rng, format)
    stored.keys, stored.values = keys, values
    put(stored)
    return stored


def empty(lengths: list[int], kv_heads: int, dim: int, rng: np.random.Generator, format: ops.KVFormat) -> Stored:
    tiles = max(-(-length // 128) for length in lengths)
    blocks = len(lengths) * tiles + 3

    def table() -> npt.NDArray[np.int32]:
        return rng.permutation(blocks)[: len(lengths) * tiles].astype(np.int32).reshape(len(lengths), tiles)

    def pool(format: ops.KVFormat) -> ops.KeyValuePool:
        made = ops.key_value_pool(blocks, kv_heads, dim, format)
        made.data[:] = rng.integers(0, 256, made.data.shape)
        return made

    main = pool(format)
    return Stored(main, table(), (table(), pool("k8v8")) if main.needs_window else None, [], [])


def put(stored: Stored) -> None:
    for s, keys in enumerate(stored.keys):
        places = np.arange(len(keys), dtype=np.int32), np.full(len(keys), s, np.int32)
        ops.store_key_values(keys, stored.values[s], *places, stored.tables, stored.pool, stored.window)


def drawn() -> list[Any]:
    """Return every size and every format of a head, in some combinations; in all if native code has changed."""
    pairs = itertools.product(enumerate((16, 32, 48, 64, 128)), enumerate(FORMATS))
    long = pytest.mark.long("native")
    return [pytest.param(dim, format, marks=[long] if (i - j) % 3 else []) for (i, dim), (j, format) in pairs]


def attend(q: Floats, positions: list[int], sequences: list[int], stored: Stored) -> Floats:
    out = np.full_like(q, np.nan)
    places = np.array(positions, np.int32), np.array(sequences, np.int32)
    ops.attention(q, *places, stored.tables, stored.pool, scale_of(q), out, stored.window)
    return out


@pytest.mark.parametrize(("dim", "format"), drawn())
def test_attention_matches_numpy_bit_for_bit(dim: int, format: ops.KVFormat, every_family: Every) -> None:
    for heads, kv_heads in ((1, 1), (4, 1), (3, 3), (16, 4), (6, 2), (5, 1)):
        rng = np.random.default_rng([dim, heads])
        for length in LENGTHS if (dim, heads) in ((32, 4), (128, 16)) else (1, 17, 290):
            stored = store([length], kv_heads, dim, rng, format)
            rows = min(length, 5)
            q = rng.standard_normal((rows, heads, dim), np.float32)
            positions = list(range(length - rows, length))
            result = every_family(lambda q=q, p=positions, rows=rows, s=stored: attend(q, p, [0] * rows, s))
            np.testing.assert_array_equal(result, stored.expected(q, positions, [0] * rows))


@pytest.mark.parametrize("format", FORMATS)
def test_stored_bytes_match_numpy(format: ops.KVFormat, every_family: Every) -> None:
    """The stored bytes equal NumPy's, including NaN, infinities and zero vectors; other bytes are unchanged."""
    rng = np.random.default_rng(7)
    keys, values = rng.standard_normal((2, 9, 2, 48), np.float32) * np.float32(3)
    keys[1, 0, 5], keys[2, 1, 7], keys[3, 0], keys[4, 1] = np.nan, np.inf, 0, 1e-20
    keys[5], values[5, 0], values[6] = 1e9, 1e-6, -np.inf
    positions = np.array([0, 3, 4, 127, 128, 130, 1, 200, 255], np.int32)
    sequences = np.array([0, 0, 0, 0, 0, 1, 1, 1, 1], np.int32)

    def run() -> npt.NDArray[np.uint8]:
        stored = empty([256, 256], 2, 48, np.random.default_rng(8), format)
        pairs = [(stored.pool, stored.tables)]
        if stored.window is not None:
            tables, pool = stored.window
            stored.tables[0, 1] = tables[1, 1] = -1  # missing in only one of the two tables
            pairs.append((pool, tables))
        wanted = []
        for pool, tables in pairs:
            data = pool.data.copy()
            there = tables[sequences, positions // 128] >= 0
            kv_cache.put(data, pool.format, keys[there], values[there], positions[there], tables[sequences[there]])
            wanted.append(data)
        ops.store_key_values(keys, values, positions, sequences, stored.tables, stored.pool, stored.window)
        for (pool, _), data in zip(pairs, wanted, strict=True):
            np.testing.assert_array_equal(pool.data, data)
        return np.concatenate([pool.data.reshape(-1) for pool, _ in pairs])

    every_family(run)


@pytest.mark.parametrize("format", FORMATS)
def test_stored_blocks_unpack_to_rounded_vectors(format: ops.KVFormat) -> None:
    rng = np.random.default_rng(8)
    stored = store([128], 3, 32, rng, format)
    k, v = kv_cache.unpack_block(stored.pool.block(stored.tables[0, 0]), format, 3, 32)
    for side, x, bits in zip((k, v), (stored.keys[0], stored.values[0]), kv_cache.BITS[format], strict=True):
        expected = reference.round_vectors(x, bits)
        np.testing.assert_array_equal(side.levels, expected.levels)
        np.testing.assert_array_equal(side.scales, expected.scales)


@pytest.mark.parametrize("format", FORMATS)
def test_prefill_gives_the_bits_of_single_rows(format: ops.KVFormat, every_family: Every) -> None:
    rng = np.random.default_rng(1)
    stored = store([300], 2, 64, rng, format)
    q = rng.standard_normal((300, 8, 64), np.float32)
    whole = every_family(lambda: attend(q, list(range(300)), [0] * 300, stored))
    for chunk in (1, 7, 64, 129):
        parts = [range(i, min(i + chunk, 300)) for i in range(0, 300, chunk)]
        pieces = [attend(q[p.start : p.stop], list(p), [0] * len(p), stored) for p in parts]
        np.testing.assert_array_equal(whole, np.concatenate(pieces))
    some = [0, 127, 128, 255, 256, 299]
    np.testing.assert_array_equal(whole[some], stored.expected(q[some], some, [0] * len(some)))


@pytest.mark.parametrize("format", FORMATS)
def test_batched_sequences_do_not_affect_each_other(format: ops.KVFormat, every_family: Every) -> None:
    rng = np.random.default_rng(2)
    lengths = [1, 129, 40, 128, 390, 7]
    stored = store(lengths, 2, 32, rng, format)
    rows = [(s, p) for s, n in enumerate(lengths) for p in sorted({0, n // 2, n - 1})]
    for order in (rows, [rows[i] for i in rng.permutation(len(rows))], rows[::-1]):
        q = rng.standard_normal((len(order), 4, 32), np.float32)
        sequences, positions = [s for s, _ in order], [p for _, p in order]
        result = every_family(lambda q=q, p=positions, s=sequences: attend(q, p, s, stored))
        np.testing.assert_array_equal(result, stored.expected(q, positions, sequences))
        for threads in (2, 3):
            kernel_choice.set_threads(threads)
            np.testing.assert_array_equal(result, attend(q, positions, sequences, stored))
        kernel_choice.set_threads(1)


@pytest.mark.parametrize("format", FORMATS)
def test_peaked_and_flat_scores_match_numpy(format: ops.KVFormat, every_family: Every) -> None:
    rng = np.random.default_rng(4)
    for spread in (0.0, 1e-6, 40.0):
        stored = store([300], 1, 64, rng, format, spread)
        q = rng.standard_normal((4, 4, 64), np.float32) * np.float32(3)
        positions = [5, 130, 256, 299]
        result = every_family(lambda q=q, s=stored, p=positions: attend(q, p, [0] * 4, s))
        np.testing.assert_array_equal(result, stored.expected(q, positions, [0] * 4))


@pytest.mark.parametrize("format", FORMATS)
def test_nan_affects_only_attending_heads_and_rows(format: ops.KVFormat, every_family: Every) -> None:
    rng = np.random.default_rng(5)
    for bad in (np.nan, np.inf):
        stored = store([200], 1, 32, rng, format)
        q = rng.standard_normal((3, 4, 32), np.float32)
        q[1, 2, 9] = bad
        result = every_family(lambda q=q, s=stored: attend(q, [10, 130, 139], [0] * 3, s))
        finite = np.isfinite(result).all(axis=2)
        assert not finite[1, 2] and finite.sum() == 11
        for part in (stored.keys, stored.values):
            kept = part[0].copy()
            part[0][150, 0, 3] = bad
            put(stored)
            q = rng.standard_normal((4, 2, 32), np.float32)
            result = every_family(lambda q=q, s=stored: attend(q, [100, 149, 150, 199], [0] * 4, s))
            assert np.isfinite(result[:2]).all() and np.isnan(result[2:]).all()
            part[0] = kept


def test_missing_tiles_are_rejected_unless_unused() -> None:
    """Below 8 bits, a row needs its first and last tile from the window pool, and all others from the main pool."""
    rng = np.random.default_rng(6)
    stored = store([400], 1, 16, rng, "k4v4")
    assert stored.window is not None
    tables, window = stored.tables, stored.window[0]
    q = rng.standard_normal((1, 2, 16), np.float32)
    whole = attend(q, [390], [0], stored)
    unused = [(tables, 0), (tables, 3), (window, 1), (window, 2)]
    for table, tile in unused:
        table[0, tile] = -1
    np.testing.assert_array_equal(whole, attend(q, [390], [0], stored))
    for table, tile in ((tables, 1), (tables, 2), (window, 0), (window, 3)):
        kept = table[0, tile]
        for wrong in (-1, -2, stored.pool.blocks):
            table[0, tile] = wrong
            with pytest.raises(OperandError, match="outside the pool"):
                attend(q, [390], [0], stored)
        table[0, tile] = kept
    np.testing.assert_array_equal(whole, attend(q, [390], [0], stored))
    k = stored.keys[0][:1]
    row = np.array([300], np.int32), np.zeros(1, np.int32)
    tables[0, 2] = window[0, 2] = -1
    with pytest.raises(OperandError, match="no block"):
        ops.store_key_values(k, k, *row, tables, stored.pool, stored.window)
    tables[0, 2] = stored.pool.blocks
    with pytest.raises(OperandError, match="outside the pool"):
        ops.store_key_values(k, k, *row, tables, stored.pool, stored.window)


def test_window_pool_is_required_only_below_8_bits() -> None:
    rng = np.random.default_rng(9)
    for format in ops.KV_FORMATS:
        stored = store([3], 1, 16, rng, format)
        q = rng.standard_normal((1, 2, 16), np.float32)
        other = None if stored.window else (stored.tables, ops.key_value_pool(4, 1, 16, "k8v8"))
        with pytest.raises(OperandError, match="window"):
            attend(q, [2], [0], Stored(stored.pool, stored.tables, other, [], []))
        if stored.window:
            for wrong in (stored.pool, ops.key_value_pool(4, 1, 16), ops.key_value_pool(4, 2, 16, "k8v8")):
                with pytest.raises(OperandError):
                    attend(q, [2], [0], Stored(stored.pool, stored.tables, (stored.window[0], wrong), [], []))
