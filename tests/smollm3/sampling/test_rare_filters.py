"""typical_p and XTC, compared with a simple implementation that performs the documented steps in order."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from notso.smollm3.sampling.sampler import Sampler, apply_filters, last_of_top_choices
from notso.smollm3.values.sampling_params import SamplingParams

EDGE = 1e-5  # single and double precision may differ for a token this close to a threshold


def slow_left(weights: list[float], params: SamplingParams, crossed: bool) -> list[int]:
    """Return the remaining tokens, most likely first, in plain Python and double precision."""

    def total(tokens: list[int]) -> float:
        return sum(weights[token] for token in tokens)

    def until(tokens: list[int], share: float) -> list[int]:
        kept, held = [], 0.0
        for token in tokens:
            kept.append(token)
            held += weights[token]
            if held >= share:
                break
        return kept

    left = sorted((token for token, weight in enumerate(weights) if weight > 0), key=lambda t: (-weights[t], t))
    left = left[: params.top_k or None]
    if params.typical_p < 1:
        surprise = {token: -math.log(weights[token] / total(left)) for token in left}
        entropy = sum(weights[token] / total(left) * surprise[token] for token in left)
        nearest = sorted(sorted(left), key=lambda token: abs(surprise[token] - entropy))
        left = sorted(until(nearest, params.typical_p * total(left)), key=lambda t: (-weights[t], t))
    if params.top_p < 1:
        left = until(left, params.top_p * total(left))
    left = [token for token in left if weights[token] >= params.min_p * weights[left[0]]]
    if crossed:
        top = [token for token in left if weights[token] >= params.xtc_threshold * total(left)]
        left = left[max(0, len(top) - 1) :]
    return left


@settings(max_examples=500)
@given(
    exponents=st.lists(st.integers(0, 60), min_size=1, max_size=40),
    options=st.fixed_dictionaries(
        {},
        optional={
            "top_k": st.integers(0, 50),
            "typical_p": st.floats(0.05, 1),
            "top_p": st.floats(0.05, 1),
            "min_p": st.floats(0, 1),
            "xtc_threshold": st.floats(0, 0.6),
        },
    ),
    crossed=st.booleans(),
)
def test_remaining_tokens_match_the_reference_implementation(
    exponents: list[int], options: dict[str, Any], crossed: bool
) -> None:
    weights = np.exp(-np.array(exponents, np.float32) / 4)
    weights /= weights.max()
    params = SamplingParams(**options, xtc_probability=0.5)
    ids, held = apply_filters(weights.astype(np.float32), params, 0.25 if crossed else 0.75)
    assert len(ids)
    np.testing.assert_array_equal(held, weights[ids])
    plain = [float(weight) for weight in weights]
    expected = [slow_left(plain, params, crossed)]
    for name, sign in (("typical_p", 1), ("typical_p", -1), ("top_p", 1), ("top_p", -1), ("min_p", 1), ("min_p", -1)):
        value = min(1.0, max(1e-9, getattr(params, name) * (1 + sign * EDGE)))
        if name in options:
            expected.append(slow_left(plain, SamplingParams(**{**options, name: value}), crossed))
    for value in (params.xtc_threshold * (1 + EDGE), params.xtc_threshold * (1 - EDGE)):
        expected.append(slow_left(plain, SamplingParams(**{**options, "xtc_threshold": value}), crossed))
    # In single precision, nearly equal deviations may be in any order.
    assert ids.tolist() in expected or ("typical_p" in options and _has_close_deviations(plain, params, ids))


def _has_close_deviations(weights: list[float], params: SamplingParams, ids: np.ndarray) -> bool:
    left = sorted(weights, reverse=True)[: params.top_k or None]
    shares = [weight / sum(left) for weight in left]
    entropy = sum(-share * math.log(share) for share in shares)
    deviations = sorted({share: abs(-math.log(share) - entropy) for share in shares}.values())
    return any(b - a < EDGE for a, b in itertools.pairwise(deviations))


def test_xtc_removes_all_top_choices_except_the_last() -> None:
    """From llama.cpp's tests/test-sampling.cpp: 0.4, 0.3, 0.2, 0.1 with thresholds of about 0.1, 0.2, 0.3 and above."""
    shares = np.array([0.4, 0.3, 0.2, 0.1], np.float32)
    assert last_of_top_choices(shares, 0.09) == 3
    assert last_of_top_choices(shares, 0.19) == 2
    assert last_of_top_choices(shares, 0.29) == 1
    assert last_of_top_choices(shares, 0.39) == 0
    assert last_of_top_choices(shares, 0.6) == 0


def test_typical_p_keeps_tokens_near_the_entropy() -> None:
    """From llama.cpp's tests/test-sampling.cpp: with 0.97 and three times 0.01, half of the mass is the first token
    alone; with 0.4, 0.2, 0.2, 0.2, it is the three tokens near the entropy."""
    likely = np.array([0.97, 0.01, 0.01, 0.01], np.float32)
    assert apply_filters(likely / 0.97, SamplingParams(typical_p=0.5, top_p=1.0), 0.5)[0].tolist() == [0]
    even = np.array([0.4, 0.2, 0.2, 0.2], np.float32)
    assert apply_filters(even / 0.4, SamplingParams(typical_p=0.5, top_p=1.0), 0.5)[0].tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    "options",
    [
        {"xtc_probability": 0.5, "top_p": 1.0},
        {"xtc_probability": 0.3, "xtc_threshold": 0.05, "min_p": 0.05, "top_p": 1.0},
        {"typical_p": 0.6, "top_p": 1.0},
        {"typical_p": 0.7, "xtc_probability": 0.4, "top_k": 12, "top_p": 0.9},
    ],
)
def test_sampled_frequencies_match_the_probabilities(options: dict[str, Any]) -> None:
    """Chi-square over 8,000 draws with fixed seeds. XTC's decision and the drawn token are independent."""
    logits = np.random.default_rng(5).normal(0, 1.5, 30).astype(np.float32)
    params = SamplingParams(temperature=1.0, **options)
    weights = [float(weight) for weight in np.exp(logits - logits.max())]
    expected: Counter[int] = Counter()
    for crossed, share in ((True, params.xtc_probability), (False, 1 - params.xtc_probability)):
        left = slow_left(weights, params, crossed)
        for token in left:
            expected[token] += share * weights[token] / sum(weights[each] for each in left)
    sampler, draws = Sampler(params, seed=11), 8_000
    counts = Counter(sampler.sample(logits, [], position) for position in range(draws))
    assert set(counts) <= {token for token, share in expected.items() if share}
    common = {token: share for token, share in expected.items() if share * draws >= 5}
    distance = sum((counts[token] - share * draws) ** 2 / (share * draws) for token, share in common.items())
    assert distance < 2 * len(common) + 30


def test_draw_depends_only_on_seed_and_position() -> None:
    logits = np.random.default_rng(1).normal(0, 2, 500).astype(np.float32)
    params = SamplingParams(xtc_probability=0.5, typical_p=0.9)
    one, other = Sampler(params, 3), Sampler(params, 3)
    forwards = [one.sample(logits, [], position) for position in range(50)]
    assert [other.sample(logits, [], position) for position in reversed(range(50))] == forwards[::-1]


def test_masked_tokens_stay_masked() -> None:
    logits = np.full(300, -np.inf, np.float32)
    logits[[7, 8]] = (1.0, 0.5)
    params = SamplingParams(
        temperature=2.0, xtc_probability=0.9, xtc_threshold=0.0, typical_p=0.99, dry_multiplier=5, top_p=1.0
    )
    sampler = Sampler(params, 5)
    assert {sampler.sample(logits, [7, 8, 7, 8, 7, 8], position) for position in range(200)} <= {7, 8}


def test_rare_filters_are_skipped_at_default_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notso.smollm3.sampling.sampler.apply_filters", None)
    logits = np.random.default_rng(2).normal(0, 2, 500).astype(np.float32)
    params = SamplingParams(typical_p=1.0, xtc_probability=0.0, xtc_threshold=0.3, dry_penalty_last_n=0)
    assert Sampler(params, 1).sample(logits, [], 0) == Sampler(SamplingParams(), 1).sample(logits, [], 0)
