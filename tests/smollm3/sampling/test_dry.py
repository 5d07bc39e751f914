"""DRY penalties, compared with a simple implementation that searches for every repetition again."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notso.smollm3 import Engine, SamplingParams
from notso.smollm3.sampling.sampler import (
    MAX_PENALTY,
    BreakerTokens,
    RepetitionFinder,
    SequenceBreakers,
    common_suffix_lengths,
)


def breakers_of(sequences: list[list[int]]) -> BreakerTokens:
    longer: dict[int, dict[int, dict[tuple[int, ...], frozenset[int]]]] = {}
    for head, *tail in sequences:
        if tail:
            tails = longer.setdefault(tail[-1], {}).setdefault(len(tail), {})
            tails[tuple(tail)] = tails.get(tuple(tail), frozenset()) | {head}
    return BreakerTokens(frozenset(sequence[0] for sequence in sequences if len(sequence) == 1), longer)


def slow_penalties(history: list[int], params: SamplingParams, breakers: list[list[int]]) -> dict[int, float]:
    """Return the penalty of each token's logit according to llama.cpp, in plain Python."""
    window = history if params.dry_penalty_last_n < 0 else history[max(0, len(history) - params.dry_penalty_last_n) :]
    behind = len(window)
    for back in range(len(window)):
        end = len(history) - back
        if any(history[max(0, end - len(each)) : end] == each for each in breakers):
            behind = back
            break
    longest: dict[int, int] = {}
    for at in range(len(window) - 1):
        length = 0
        while length < min(at + 1, behind) and window[at - length] == window[len(window) - 1 - length]:
            length += 1
        if length >= params.dry_allowed_length:
            longest[window[at + 1]] = max(length, longest.get(window[at + 1], 0))
    if len(window) <= params.dry_allowed_length or behind < params.dry_allowed_length:
        return {}
    return {
        token: params.dry_multiplier * params.dry_base ** (length - params.dry_allowed_length)
        for token, length in longest.items()
        if [token] not in breakers
    }


TOKENS = st.integers(0, 3)


@settings(max_examples=500)
@given(
    prompt=st.lists(TOKENS, max_size=30),
    answer=st.lists(TOKENS, max_size=30),
    breakers=st.lists(st.lists(TOKENS, min_size=1, max_size=3), max_size=2),
    options=st.fixed_dictionaries(
        {},
        optional={
            "dry_base": st.floats(1, 3),
            "dry_allowed_length": st.integers(0, 5),
            "dry_penalty_last_n": st.integers(-1, 40),
        },
    ),
)
def test_penalties_match_the_reference_implementation(
    prompt: list[int], answer: list[int], breakers: list[list[int]], options: dict[str, Any]
) -> None:
    params = SamplingParams(dry_multiplier=0.8, **options)
    repetitions = RepetitionFinder(params, breakers_of(breakers))
    history = list(prompt)
    for token in [*answer, None]:
        ids, falls = repetitions.penalties(history)
        expected = slow_penalties(history, params, breakers)
        assert ids.tolist() == sorted(expected)
        np.testing.assert_allclose(falls, [expected[each] for each in sorted(expected)], rtol=1e-5)
        if token is not None:
            history.append(token)


@pytest.mark.parametrize(
    ("history", "multiplier", "base", "allowed", "breakers", "expected"),
    [
        ([0, 1], 1.0, 1.1, 2, [], {}),
        ([0, 1, 2, 0, 1], 1.0, 1.1, 2, [], {2: 1.0}),
        ([0, 1, 3, 4, 0, 1], 1.0, 1.1, 2, [[3]], {}),
        ([0, 1, 2, 0, 1], 2.0, 1.1, 2, [], {2: 2.0}),
        ([0, 1, 2, 3, 4, 0, 1], 1.0, 1.1, 4, [], {}),
    ],
)
def test_penalties_match_llama_cpp_test_cases(
    history: list[int], multiplier: float, base: float, allowed: int, breakers: Any, expected: dict[int, float]
) -> None:
    """Cases from llama.cpp's tests/test-sampling.cpp."""
    params = SamplingParams(dry_multiplier=multiplier, dry_base=base, dry_allowed_length=allowed)
    ids, falls = RepetitionFinder(params, breakers_of(breakers)).penalties(history)
    assert dict(zip(ids.tolist(), falls.tolist(), strict=True)) == pytest.approx(expected)


def test_common_endings_handle_long_repetitions() -> None:
    """Work is proportional to the length: all comparisons except one per position find equal tokens."""
    length = 20_000
    assert common_suffix_lengths([7] * length).tolist() == [*range(1, length), 0]


def test_penalties_stay_finite() -> None:
    ids, falls = RepetitionFinder(SamplingParams(dry_multiplier=100, dry_base=100), BreakerTokens()).penalties(
        [7] * 5000
    )
    assert ids.tolist() == [7] and falls.tolist() == [np.float32(MAX_PENALTY)]


def test_sequence_breakers_cover_all_tokens_that_contain_one() -> None:
    with Engine.load() as engine:
        tokenizer = engine.tokenizer
        found = SequenceBreakers(tokenizer).of(("\n", "end."))
    assert all(
        (token in found.single) == (b"\n" in tokenizer.token_bytes(token) or b"end." in tokenizer.token_bytes(token))
        for token in range(tokenizer.vocab_size)
    )
    sequences = [
        (head, *tail)
        for lengths in found.tails.values()
        for tails in lengths.values()
        for tail, heads in tails.items()
        for head in heads
    ]
    assert sequences
    assert all(
        last == tail[-1] and length == len(tail)
        for last, lengths in found.tails.items()
        for length, tails in lengths.items()
        for tail in tails
    )
    assert all(tokenizer.decode(sequence).endswith("end.") for sequence in sequences)
    assert tuple(tokenizer.encode("end.")) in {*sequences, *((token,) for token in found.single)}


def test_breakers_that_many_tokens_can_begin_are_looked_up_at_once() -> None:
    with Engine.load() as engine:
        tokenizer = engine.tokenizer
        found = SequenceBreakers(tokenizer).of(tuple(f"{letter} !" for letter in "acdehilnorst"))
    tails = [heads for lengths in found.tails.values() for each in lengths.values() for heads in each.values()]
    assert len(tails) < 5 and len(frozenset().union(*tails)) > 1000
