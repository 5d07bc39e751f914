"""Measure the error of each KV cache format on synthetic attention: the tables in docs/kernels/attention.md.

    python benchmarks/cache_quality.py

Four query heads of 128 dimensions attend to 2,048 positions. The reference is attention over the exact keys and values
in float64.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from notso.qtensor.backends.cpu import ops
from notso.qtensor.reference import kv_cache

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
Rounding = Callable[[Floats], Floats]

POSITIONS, DIM, HEADS, ROWS = 2048, 128, 4, 8
SCALE = DIM**-0.5


class Made:
    """Synthetic keys, values and queries with given statistics."""

    def __init__(self, sharpness: float, outliers: float = 0.0, sink: float = 0.0, seed: int = 1) -> None:
        """sharpness: standard deviation of the scores; outliers: magnitude of the mean of four channels of the keys, as
        in trained models; sink: how far the first position's score exceeds the others."""
        rng = np.random.default_rng(seed)
        self.keys, self.values = rng.standard_normal((2, POSITIONS, 1, DIM), np.float32)
        self.values *= np.exp(0.3 * rng.standard_normal((POSITIONS, 1, 1), np.float32))  # tokens differ in magnitude
        q = rng.standard_normal((ROWS, HEADS, DIM), np.float32)
        if outliers:
            channels = rng.choice(DIM, 4, replace=False)
            self.keys[..., channels] = self.keys[..., channels] * 2 + np.float32(outliers) * np.sign(
                rng.standard_normal(4)
            ).astype(np.float32)
            # Undoes the factor of 2 in the scores. A channel's mean shifts all scores equally, which has no effect.
            q[..., channels] /= np.float32(2)
        self.q = q * np.float32(sharpness)
        if sink:
            self.keys[0, 0] = self.q.mean(axis=(0, 1))
            wanted = sink + sharpness * 3
            own = np.einsum("lhd,d->lh", self.q, self.keys[0, 0]) * SCALE
            self.q += ((wanted - own) / (self.keys[0, 0] @ self.keys[0, 0] * SCALE))[..., None] * self.keys[0, 0]

    def weights(self, keys: Floats) -> Doubles:
        """Return the softmax (ROWS, HEADS, POSITIONS), without a causal mask."""
        scores = np.einsum("lhd,pd->lhp", self.q.astype(np.float64), keys[:, 0].astype(np.float64)) * SCALE
        powers = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=-1, keepdims=True))

    def attend(self, keys: Floats, values: Floats) -> Doubles:
        return np.asarray(self.weights(keys) @ values[:, 0].astype(np.float64))

    def error(self, result: npt.NDArray[np.floating]) -> float:
        """Return the root mean square error in percent of the root mean square of the exact output."""
        exact = self.attend(self.keys, self.values)
        return 100 * float(np.sqrt(np.square(result - exact).mean() / np.square(exact).mean()))

    def kernel(self, format: ops.KVFormat) -> float:
        """Return the error of the attention kernel."""
        tiles = POSITIONS // ops.TILE_POSITIONS
        pool = ops.key_value_pool(tiles, 1, DIM, format)
        table = np.arange(tiles, dtype=np.int32).reshape(1, tiles)
        window = (table, ops.key_value_pool(tiles, 1, DIM, "k8v8")) if pool.needs_window else None
        places = np.arange(POSITIONS, dtype=np.int32), np.zeros(POSITIONS, np.int32)
        ops.store_key_values(self.keys, self.values, *places, table, pool, window)
        out = np.empty_like(self.q)
        last = np.full(ROWS, POSITIONS - 1, np.int32), np.zeros(ROWS, np.int32)
        ops.attention(self.q, *last, table, pool, SCALE, out, window)
        return self.error(out)


def rotated(bits: int) -> Rounding:
    return lambda x: kv_cache.round_vectors(x, bits).values()


def plain(bits: int) -> Rounding:
    """Round to symmetric levels, with one scale per vector and without rotation."""
    most = 2 ** (bits - 1) - 1

    def run(x: Floats) -> Floats:
        step = np.abs(x).max(axis=-1, keepdims=True) / np.float32(most)
        return np.asarray(np.rint(x / step) * step, np.float32)

    return run


def least_squares(bits: int) -> Rounding:
    """Use the scale with the least squared error, which makes every vector slightly shorter."""

    def run(x: Floats) -> Floats:
        turned, levels = kv_cache.rotate(x), kv_cache.round_vectors(x, bits).levels.astype(np.float32)
        step = (turned * levels).sum(axis=-1, keepdims=True) / np.square(levels).sum(axis=-1, keepdims=True)
        return kv_cache.rotate(np.asarray(levels * step, np.float32))

    return run


def weights_of(bits: int, made: Made) -> float:
    """Return the error of rounding only the weights, to `bits` bits of the largest weight in their tile."""
    w = made.weights(made.keys).reshape(ROWS, HEADS, -1, ops.TILE_POSITIONS)
    unit = w.max(axis=-1, keepdims=True) / (2**bits - 1)
    return made.error((np.rint(w / unit) * unit).reshape(ROWS, HEADS, -1) @ made.values[:, 0].astype(np.float64))


CASES = {
    "flat (scores 0.5)": Made(0.5),
    "ordinary (scores 2)": Made(2.0),
    "sharp (scores 5)": Made(5.0),
    "with a sink": Made(2.0, sink=6.0),
    "with outlier channels": Made(2.0, outliers=12.0),
    "with both": Made(2.0, outliers=12.0, sink=6.0),
}


def table(title: str, columns: dict[str, Callable[[Made], float]]) -> None:
    print(f"\n| {title} | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}")
    for name, made in CASES.items():
        print(f"| {name} | {' | '.join(f'{error(made):.3g}' for error in columns.values())} |", flush=True)


def both(keys: Rounding, values: Rounding) -> Callable[[Made], float]:
    return lambda made: made.error(made.attend(keys(made.keys), values(made.values)))


def main() -> None:
    formats: dict[str, Callable[[Made], float]] = {f: (lambda m, f=f: m.kernel(f)) for f in ops.KV_FORMATS}  # type: ignore[misc]
    table("error of the output, %", formats)
    exact: Rounding = lambda x: x  # noqa: E731
    table(
        "keys alone, %",
        {"8 plain": both(plain(8), exact), "8 rotated": both(rotated(8), exact), "4 plain": both(plain(4), exact),
         "4 rotated": both(rotated(4), exact), "4, least squares": both(least_squares(4), exact)},
    )  # fmt: skip
    table(
        "values alone, %",
        {"8 rotated": both(exact, rotated(8)), "4 plain": both(exact, plain(4)), "4 rotated": both(exact, rotated(4)),
         "4, least squares": both(exact, least_squares(4)), "3 rotated": both(exact, rotated(3)),
         "3, least squares": both(exact, least_squares(3))},
    )  # fmt: skip
    table("weights alone, %", {f"{b} bits": (lambda m, b=b: weights_of(b, m)) for b in (7, 8, 14, 15)})  # type: ignore[misc]


if __name__ == "__main__":
    main()
