"""Comparisons with other implementations, and the reason for each tolerance."""

from __future__ import annotations

import itertools

import numpy as np
from golden.store import TOP, Floats, Golden, shared, top_tokens

from notso.smollm3 import Engine

FLOAT_TOLERANCE = 1e-3
"""Maximum error of a float model's logits, relative to their range. We keep keys and values in half precision, and
transformers does not; everything else is float32 in both."""

ROUNDING_TOLERANCE = 1e-6
"""Maximum error if both have half precision: rounding of float32 over eight layers."""

LEAST_TOP1 = 0.99
"""Minimum share of positions with llama.cpp's most likely token. Both multiply blocks by 8-bit activations; if two
tokens are about equally likely, rounding decides."""

LEAST_TOP5 = 0.98
"""Minimum share of llama.cpp's top five tokens that are in our top five."""

OTHER_TOP5 = 0.01
"""The share may be lower by this than llama.cpp's agreement with itself, if that is low: with an adapter's random
values, the fifth place is undecided."""

CLEAR_LEAD = 0.01
"""Minimum lead of the most likely token, relative to the logit range, that rounding cannot reverse: several times the
observed differences between modes of llama.cpp."""


def logits_of(engine: Engine, kept: Golden, adapter: str | None = None) -> Floats:
    """Return our logits (P, V), list after list."""
    return np.concatenate([engine.logits(ids, adapter=adapter) for ids in kept.lists])


def error_of(ours: Floats, kept: Golden) -> float:
    """Return the maximum error of fully stored positions and of all top tokens, relative to the logit range."""
    whole = np.abs(ours[kept.rows] - kept.logits).max(initial=0)
    likeliest = np.abs(_at(ours, kept.top_ids) - kept.top_logits).max()
    return float(max(whole, likeliest) / kept.logit_range)


def check_floats(engine: Engine, kept: Golden, adapter: str | None = None) -> None:
    """Check the logits of an unquantized model, and that its greedy continuations are equal."""
    ours = logits_of(engine, kept, adapter)
    assert error_of(ours, kept) < FLOAT_TOLERANCE
    assert greedy_of(ours, kept) == continuations(kept)


def check_half_cache(engine: Engine, kept: Golden) -> None:
    """Check logits against an oracle whose cache has half precision, too. Only rounding errors of float32 remain,
    except where a key or value lies close to the middle of two half-precision values and was rounded to the other
    one."""
    errors = np.abs(logits_of(engine, kept)[kept.rows] - kept.logits).max(1) / kept.logit_range
    assert (errors < ROUNDING_TOLERANCE).sum() >= 3
    assert errors.max() < FLOAT_TOLERANCE / 2


def check_trained_blocks(engine: Engine, kept: Golden, adapter: str | None = None) -> None:
    """Check the most likely token and the top five. Common beginnings of chats count once."""
    ours, fresh = top_tokens(logits_of(engine, kept, adapter)), kept.first_seen
    equal, both = (ours[:, 0] == kept.top_ids[:, 0])[fresh], shared(ours, kept.top_ids)[fresh]
    assert fresh.sum() > 1000
    assert equal.mean() >= LEAST_TOP1
    assert equal[_clear(kept)[fresh]].all()
    assert both.mean() / TOP >= min(LEAST_TOP5, kept.noise_top5 - OTHER_TOP5)
    assert (both >= TOP - 1).mean() >= 0.995  # nearly all: the fifth and the sixth token may change places


def check_rounding(engine: Engine, floats: Golden, blocks: Golden) -> None:
    """Check that our blocks are about as far from float arithmetic as llama.cpp's: 8-bit activations cost both the
    same.

    `floats` and `blocks` begin with the same ids, list by list. Compared are logits of the most likely token, where
    both oracles have the same one. An error a quarter larger than llama.cpp's may be chance.
    """
    starts = zip(floats.starts, blocks.lengths.tolist(), strict=True)
    rows = np.concatenate([np.arange(start, start + length) for start, length in starts])
    assert floats.ids[rows].tolist() == blocks.ids.tolist()
    tokens, exact = blocks.top_ids[:, 0], floats.top_logits[rows, 0]
    counted = blocks.first_seen & (floats.top_ids[rows, 0] == tokens)
    ours = _at(logits_of(engine, blocks), tokens[:, None])[:, 0] - exact
    theirs = blocks.top_logits[:, 0] - exact
    assert counted.sum() > 1000
    assert np.sqrt((ours[counted] ** 2).mean()) < 1.25 * np.sqrt((theirs[counted] ** 2).mean())


def check_random_blocks(engine: Engine, kept: Golden) -> None:
    """Check a model with random weights, which has no clear favorites: llama.cpp's own results with a batch and with
    single tokens agree at only 95 % of these positions. So the most likely token is compared where its lead exceeds
    that noise; other positions may not be worse than llama.cpp's own agreement."""
    logits = logits_of(engine, kept)
    ours, clear = top_tokens(logits), _clear(kept)
    equal = ours[:, 0] == kept.top_ids[:, 0]
    assert clear.sum() > 80
    assert equal[clear].mean() >= LEAST_TOP1
    assert equal.mean() >= kept.noise_top1 - 0.02
    assert shared(ours, kept.top_ids).mean() / TOP >= kept.noise_top5 - 0.04
    errors = _at(logits, kept.top_ids) - kept.top_logits
    assert np.sqrt((errors**2).mean()) / kept.logit_range < CLEAR_LEAD


def greedy_of(ours: Floats, kept: Golden) -> list[list[int]]:
    """Return the greedy continuation of each list's prompt."""
    best = ours.argmax(1)
    ends = itertools.pairwise([*kept.starts, len(kept.ids)])
    return [
        best[start + prompt - 1 : end - 1].tolist()
        for (start, end), prompt in zip(ends, kept.prompt_lengths.tolist(), strict=True)
    ]


def continuations(kept: Golden) -> list[list[int]]:
    """Return the tokens that the oracle appended to each list."""
    return [ids[prompt:] for ids, prompt in zip(kept.lists, kept.prompt_lengths.tolist(), strict=True)]


def _at(logits: Floats, ids: np.ndarray) -> Floats:
    return np.take_along_axis(logits, ids.astype(int), 1)


def _clear(kept: Golden) -> np.ndarray:
    """Return a mask (P,) of positions where the oracle's most likely token leads clearly."""
    return (kept.top_logits[:, 0] - kept.top_logits[:, 1]) / kept.logit_range > CLEAR_LEAD
