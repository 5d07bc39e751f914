"""Sampling, compared with a simple implementation that performs the documented steps in order."""

from __future__ import annotations

import math
import time
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from notso.smollm3.errors import EngineError, InvalidRequestError
from notso.smollm3.sampling.sampler import Sampler, likeliest, log_probabilities
from notso.smollm3.values.sampling_params import SamplingParams

VOCABULARY = 128_256
Floats = NDArray[np.float32]


def slow_distribution(logits: Floats, params: SamplingParams, history: list[int]) -> dict[int, float]:
    """Return the probability of each token, most likely first, in plain Python and double precision."""
    values = [float(value) for value in logits]
    window = history[-params.penalty_window :] if params.penalty_window else history
    for token, count in Counter(window).items():
        penalty = params.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
        values[token] -= params.presence_penalty + count * params.frequency_penalty
    for token, bias in params.logit_bias.items():
        values[token] += bias
    ranked = sorted(range(len(values)), key=lambda token: (-values[token], token))
    if params.temperature == 0:
        return {ranked[0]: 1.0}
    weights = {token: math.exp((values[token] - values[ranked[0]]) / params.temperature) for token in ranked}
    weights = {token: weight for token, weight in weights.items() if weight > 0}
    if params.top_k:
        weights = dict(list(weights.items())[: params.top_k])
    share, total, kept = 0.0, sum(weights.values()), {}
    for token, weight in weights.items():
        kept[token] = weight
        share += weight
        if share >= params.top_p * total:
            break
    kept = {token: weight for token, weight in kept.items() if weight >= params.min_p}
    total = sum(kept.values())
    return {token: weight / total for token, weight in kept.items()}


# Multiples of 1/8, so that penalties and bias are exact in single precision, too; many tokens are equal.
EIGHTHS = st.integers(-160, 160).map(lambda n: n / 8)
LOGITS = st.lists(EIGHTHS, min_size=1, max_size=40)
PARAMS = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.one_of(st.just(0.0), st.floats(0.05, 2)),
        "top_k": st.integers(0, 50),
        "top_p": st.floats(0.01, 1),
        "min_p": st.floats(0, 1),
        "repetition_penalty": st.sampled_from([0.5, 1, 2]),
        "presence_penalty": st.integers(-16, 16).map(lambda n: n / 8),
        "frequency_penalty": st.integers(-16, 16).map(lambda n: n / 8),
        "penalty_window": st.integers(0, 20),
    },
)


@settings(max_examples=500)
@given(values=LOGITS, options=PARAMS, data=st.data())
def test_sampled_tokens_are_allowed_by_the_reference_implementation(
    values: list[float], options: dict[str, Any], data: Any
) -> None:
    logits = np.array(values, dtype=np.float32)
    tokens = st.integers(0, len(values) - 1)
    history = data.draw(st.lists(tokens, max_size=30))
    bias = data.draw(st.dictionaries(tokens, EIGHTHS, max_size=3))
    params = SamplingParams(**options, logit_bias=bias)
    before = logits.copy()
    sampler = Sampler(params, seed=data.draw(st.integers(-(2**63), 2**64 - 1)))
    token = sampler.sample(logits, history, position=data.draw(st.integers(0, 2**20)))
    assert np.array_equal(logits, before)
    expected = slow_distribution(logits, params, history)
    if token not in expected:
        # Single and double precision may differ for a token exactly at the threshold of top_p or min_p.
        nudged = SamplingParams(
            **{
                **options,
                "top_p": min(1.0, params.top_p * 1.00001),
                "min_p": params.min_p * 0.99999,
            },
            logit_bias=bias,
        )
        assert token in slow_distribution(logits, nudged, history)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 1.0, "top_p": 1.0},
        {"temperature": 1.3, "top_k": 5, "top_p": 1.0},
        {"temperature": 1.0, "top_k": 8, "top_p": 0.7},
        {"temperature": 1.0, "top_p": 1.0, "min_p": 0.2},
        {"temperature": 1.5, "top_p": 0.9, "min_p": 0.1},
        {"temperature": 0.9, "repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.2},
        {"temperature": 1.0, "logit_bias": {3: 2.0, 7: -100.0}},
    ],
)
def test_sampled_frequencies_match_the_probabilities(options: dict[str, Any]) -> None:
    """Chi-square over 8,000 draws with fixed seeds; a correct sampler is below the limit with 99.9 % probability."""
    logits = np.random.default_rng(5).normal(0, 1.5, 30).astype(np.float32)
    history = [1, 2, 2, 9, 9, 9]
    params = SamplingParams(**options)
    expected = slow_distribution(logits, params, history)
    sampler = Sampler(params, seed=11)
    draws = 8_000
    counts = Counter(sampler.sample(logits, history, position) for position in range(draws))
    assert set(counts) <= set(expected)
    common = {token: share for token, share in expected.items() if share * draws >= 5}
    square = sum((counts[token] - share * draws) ** 2 / (share * draws) for token, share in common.items())
    freedom = max(len(common) - 1, 1)
    assert square < freedom + 3.1 * math.sqrt(2 * freedom) + 7


def test_draw_depends_only_on_seed_and_position() -> None:
    logits = np.zeros(1000, dtype=np.float32)
    params = SamplingParams(temperature=1.0, top_p=1.0)
    forwards = [Sampler(params, 42).sample(logits, [], position) for position in range(50)]
    sampler = Sampler(params, 42)
    backwards = [sampler.sample(logits, [1, 2], position) for position in reversed(range(50))]
    assert forwards == backwards[::-1]
    assert len(set(forwards)) > 40
    np.random.seed(1)  # the global state has no effect
    assert Sampler(params, 42).sample(logits, [], 0) == forwards[0]
    others = [Sampler(params, seed).sample(logits, [], 0) for seed in range(50)]
    assert len(set(others)) > 40
    assert Sampler(params, -1).sample(logits, [], 3) == Sampler(params, 2**64 - 1).sample(logits, [], 3)


def philox(key: int, counter: int) -> int:
    """Return the first word of Philox4x64-10, by its authors' definition, for a key and counter below 2^64."""
    words, keys, mask = [counter, 0, 0, 0], [key, 0], 2**64 - 1
    for _ in range(10):
        first, second = 0xD2E7470EE14C6C93 * words[0], 0xCA5A826395121157 * words[2]
        words = [(second >> 64) ^ words[1] ^ keys[0], second & mask, (first >> 64) ^ words[3] ^ keys[1], first & mask]
        keys = [(keys[0] + 0x9E3779B97F4A7C15) & mask, (keys[1] + 0xBB67AE8584CAA73B) & mask]
    return words[0]


@pytest.mark.parametrize("position", [0, 1, 2**20, 2**63 - 1])
def test_random_numbers_match_numpy_philox(position: int) -> None:
    for seed in (0, 5, 2**64 - 1):
        bits = np.random.Philox(key=seed, counter=position).random_raw()  # increments the counter before it draws
        assert Sampler(SamplingParams(), seed)._uniform(position) == float(bits >> 11) * 2.0**-53


def test_draws_of_a_seed_are_stable_across_versions() -> None:
    """Draws are defined by a published function, so library updates do not change them."""
    logits = np.zeros(10_000, dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=1.0, top_p=1.0), 2026)
    drawn = [sampler.sample(logits, [], position) for position in range(50)]
    assert drawn[:5] == [4220, 5517, 6870, 4102, 5271]
    assert drawn == [philox(2026, position + 1) * 10_000 >> 64 for position in range(50)]


def plain_sample(logits: Floats, params: SamplingParams, history: list[int], uniform: float) -> int | None:
    """Apply the documented steps to all tokens without shortcuts; return None for nonfinite logits."""
    logits = logits.copy()
    window = history[-params.penalty_window :] if params.penalty_window else history
    for token, count in Counter(window).items():
        value, penalty = float(logits[token]), params.repetition_penalty
        value = float(np.float32(value / penalty if value > 0 else value * penalty))
        logits[token] = value - (params.presence_penalty + params.frequency_penalty * count)
    for token, bias in params.logit_bias.items():
        logits[token] += np.float32(bias)
    best = int(np.argmax(logits))
    if not np.isfinite(logits[best]) or params.temperature < 1e-5:
        return best if np.isfinite(logits[best]) else None
    with np.errstate(over="ignore"):
        weights = np.exp((logits - logits[best]) / np.float32(params.temperature))
    has_filters = params.top_k or params.top_p < 1.0 or params.min_p > 0.0
    ids = np.lexsort((np.arange(len(weights)), -weights)) if has_filters else np.arange(len(weights))
    total = float(weights.sum(dtype=np.float64))
    if params.top_k:
        ids = ids[: params.top_k]
        total = float(np.cumsum(weights[ids], dtype=np.float64)[-1])
    if params.top_p < 1.0:
        ids = ids[: int(np.searchsorted(np.cumsum(weights[ids], dtype=np.float64), params.top_p * total)) + 1]
    ids = ids[weights[ids] >= np.float32(params.min_p)]
    sums = np.cumsum(weights[ids], dtype=np.float64)
    return int(ids[min(int(np.searchsorted(sums, uniform * sums[-1], side="right")), len(ids) - 1)])


@pytest.mark.parametrize("seed", range(8))
def test_shortcuts_give_the_same_token_as_the_full_computation(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is exactly that of the formula, with ties, biases that change the maximum, excluded tokens, and NaN."""
    random = np.random.default_rng(seed)
    told = Counter[bool]()
    short_list = Sampler._sample_short_list

    def counted(*arguments: Any) -> int:
        index = short_list(*arguments)
        told[index >= 0] += 1
        return index

    monkeypatch.setattr(Sampler, "_sample_short_list", counted)

    def one_of(*values: Any) -> Any:
        return values[random.integers(len(values))]

    for _ in range(120):
        size = one_of(1, 50, 3000, 3000, 20_000)
        values = random.normal(0, one_of(0.01, 1, 2.5, 5), size)
        values[random.integers(0, size, 5)] += one_of(0, 0, 5, 15, 30)
        values = np.round(values * 8) / 8 if one_of(True, False) else values
        logits = (values * one_of(1, 1, 1, 1e-3, 1e20)).astype(np.float32)
        if one_of(True, False, False, False):
            logits[random.integers(0, size, one_of(1, size))] = -np.inf
        if random.random() < 0.05:
            logits[random.integers(0, size)] = one_of(np.nan, np.inf)
        bias = {int(token): one_of(-100.0, 0.5, 16.0, 100.0) for token in random.integers(0, size, one_of(0, 0, 1, 40))}
        if one_of(True, False, False):
            bias[int(np.argmax(logits))] = one_of(-100.0, -1.0, 0.0, 1.0)
        params = SamplingParams(
            temperature=one_of(0, 0, 0.6, 0.6, 1.0, 1e-4),
            top_p=one_of(0.95, 0.95, 1.0, 0.999999, 0.3),
            top_k=one_of(0, 0, 0, 1, 40, 5000),
            min_p=one_of(0, 0, 0.05, 1.0, 1e-9, 1e-12),
            logit_bias=bias,
            repetition_penalty=one_of(1, 1, 0.5),
            presence_penalty=one_of(0, 0, 0.5),
        )
        history = [int(token) for token in random.integers(0, size, one_of(0, 10, 300))]
        position = int(random.integers(0, 1 << 20))
        expected = plain_sample(logits, params, history, (philox(seed, position + 1) >> 11) * 2.0**-53)
        before, drawn = logits.tobytes(), None
        try:
            drawn = Sampler(params, seed).sample(logits, history, position)
        except EngineError:
            assert not np.isfinite(logits).all()
        assert drawn == expected
        assert logits.tobytes() == before
    assert min(told[True], told[False]) > 5


@pytest.mark.parametrize("faint", [1e-13, 1e-8, 3e-10, 3e-8, 5e-8, 1e-6])
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9995}, {"top_k": 1200}, {"top_p": 1.0, "min_p": 2e-8}])
def test_nucleus_end_accounts_for_many_unlikely_tokens(
    faint: float, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thousand tokens with a small weight, one is the last of the nucleus; many more weigh almost nothing. The
    largest random number selects the nucleus's last token."""
    last = 1 - 2.0**-53
    monkeypatch.setattr(Sampler, "_uniform", lambda *_: last)
    params = SamplingParams(temperature=0.6, **options)
    for seed in range(20):
        random = np.random.default_rng(seed)
        weights = np.full(60_000, faint) * random.uniform(0.9, 1.1, 60_000)
        weights[random.integers(0, 60_000, 1000)] = random.uniform(1e-5, 1e-4, 1000)
        weights[random.integers(0, 60_000, 3)] = 1.0
        logits = (17 + 0.6 * np.log(weights)).astype(np.float32)
        assert Sampler(params, 1).sample(logits, [], 0) == plain_sample(logits, params, [], last)


def test_greedy_sampling_picks_the_lowest_id_of_equal_logits() -> None:
    logits = np.array([1, 3, 2, 3, 3], dtype=np.float32)
    assert Sampler(SamplingParams(temperature=0), 1).sample(logits, [], 0) == 1
    assert Sampler(SamplingParams(temperature=1e-6), 1).sample(logits, [], 0) == 1
    assert Sampler(SamplingParams(temperature=0, logit_bias={4: 0.5}), 1).sample(logits, [], 0) == 4
    assert Sampler(SamplingParams(temperature=0, presence_penalty=1), 1).sample(logits, [1], 0) == 3
    for bias, best in (({0: 2}, 0), ({2: 1}, 1), ({1: -1}, 3), ({1: -1, 2: 1}, 2), ({1: 0}, 1), ({4: 1, 3: 1}, 3)):
        assert Sampler(SamplingParams(temperature=0, logit_bias=bias), 1).sample(logits, [], 0) == best


@pytest.mark.parametrize("options", [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0, "top_p": 1.0}])
def test_narrowest_filters_leave_only_the_likeliest_token(options: dict[str, Any]) -> None:
    logits = np.random.default_rng(3).normal(0, 1, 5000).astype(np.float32)
    sampler = Sampler(SamplingParams(temperature=2.0, **options), 9)
    assert {sampler.sample(logits, [], position) for position in range(200)} == {int(logits.argmax())}


@pytest.mark.parametrize("options", [{"top_k": 3, "top_p": 1.0}, {"top_p": 0.3 - 1e-6}, {"top_k": 3, "top_p": 0.999}])
def test_equal_tokens_are_cut_by_id(options: dict[str, Any]) -> None:
    """Ten equal tokens are reduced to three: those with the lowest ids, with equal probabilities."""
    logits = np.full(10, 1.5, dtype=np.float32)
    sampler = Sampler(SamplingParams(temperature=1.0, **options), 4)
    assert {sampler.sample(logits, [], position) for position in range(200)} == {0, 1, 2}
    everything = Sampler(SamplingParams(temperature=1.0, min_p=1.0, top_p=1.0), 4)
    assert {everything.sample(logits, [], position) for position in range(400)} == set(range(10))


@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"top_k": 4}, {"top_p": 1.0, "temperature": 2.0}])
def test_token_with_logit_minus_infinity_is_never_sampled(options: dict[str, Any]) -> None:
    logits = np.full(300, -np.inf, dtype=np.float32)
    logits[77] = -40
    for params in (SamplingParams(**options), SamplingParams(**options, repetition_penalty=1.5, logit_bias={5: 100})):
        sampler = Sampler(params, 1)
        assert {sampler.sample(logits, [5, 77], position) for position in range(100)} == {77}
    logits[78] = -40
    drawn = {Sampler(SamplingParams(**options), 1).sample(logits, [], position) for position in range(100)}
    assert drawn <= {77, 78}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("options", [{}, {"temperature": 0}, {"repetition_penalty": 1.1}, {"top_k": 1}])
def test_nonfinite_logits_raise_engine_error(bad: float, options: dict[str, Any]) -> None:
    for place in (0, 57, 99):
        logits = np.zeros(100, dtype=np.float32)
        logits[place] = bad
        with pytest.raises(EngineError, match="not finite"):
            Sampler(SamplingParams(**options), 1).sample(logits, [3], 0)
    nothing = np.full(100, -np.inf, dtype=np.float32)
    with pytest.raises(EngineError, match="not finite"):
        Sampler(SamplingParams(**options), 1).sample(nothing, [3], 0)


def test_huge_logits_and_tiny_temperatures_do_not_overflow() -> None:
    logits = np.array([-3e38, 3e38, 2.9e38, 0], dtype=np.float32)
    for temperature in (1e-5, 1e-3, 1.0, 2.0):
        assert Sampler(SamplingParams(temperature=temperature), 1).sample(logits, [], 0) == 1
    assert Sampler(SamplingParams(temperature=1.0, repetition_penalty=0.5), 1).sample(logits, [3], 0) == 1


def test_penalties_apply_to_their_window() -> None:
    logits = np.array([2.0, 1.0, 0.0], dtype=np.float32)

    def greedy(history: Any, **options: Any) -> int:
        return Sampler(SamplingParams(temperature=0, **options), 1).sample(logits, history, 0)

    history = [0, 2, 2, 2]
    assert greedy(history, presence_penalty=1.5, penalty_window=3) == 0
    assert greedy(history, presence_penalty=1.5, penalty_window=4) == 1
    assert greedy(history, presence_penalty=1.5, penalty_window=0) == 1
    assert greedy(np.array(history), presence_penalty=1.5, penalty_window=0) == 1
    assert greedy([0, 0], frequency_penalty=0.6) == 1
    assert greedy([0, 1], frequency_penalty=0.6) == 0
    assert greedy([0], repetition_penalty=2.5) == 1
    assert greedy([], repetition_penalty=2.5, presence_penalty=2, frequency_penalty=2) == 0


def test_logit_bias_beyond_the_vocabulary_is_refused() -> None:
    params = SamplingParams(logit_bias={10: 1.0})
    with pytest.raises(InvalidRequestError, match="below 10") as raised:
        Sampler(params, 1, vocab_size=10)
    assert raised.value.param == "logit_bias"
    with pytest.raises(InvalidRequestError, match="below 10"):
        Sampler(params, 1).sample(np.zeros(10, dtype=np.float32), [], 0)
    assert Sampler(params, 1, vocab_size=11).sample(np.zeros(11, dtype=np.float32), [], 0) in range(11)


@settings(max_examples=100)
@given(values=LOGITS)
def test_log_probabilities_match_float64_log_softmax(values: list[float]) -> None:
    logits = np.array(values, dtype=np.float32)
    found = log_probabilities(logits)
    exact = logits.astype(np.float64)
    exact -= exact.max()
    exact -= np.log(np.exp(exact).sum())
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, exact, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(log_probabilities(np.stack([logits, logits]))[1], found)
    assert likeliest(found, 5) == sorted(range(len(values)), key=lambda token: (-found[token], token))[:5]


def test_log_probabilities_of_edge_cases() -> None:
    logits = np.array([0, -np.inf, 0, 0], dtype=np.float32)
    assert log_probabilities(logits).tolist() == pytest.approx([-math.log(3), -math.inf, -math.log(3), -math.log(3)])
    assert likeliest(logits, 2) == [0, 2]
    assert likeliest(logits, 99) == [0, 2, 3, 1]
    assert likeliest(logits, 0) == []
    for bad in (np.nan, np.inf):
        with pytest.raises(EngineError):
            log_probabilities(np.array([0, bad], dtype=np.float32))
    with pytest.raises(EngineError):
        log_probabilities(np.array([-np.inf, -np.inf], dtype=np.float32))


def _best_ms(sampler: Sampler, logits: Floats) -> float:
    best = math.inf
    for position in range(30):
        start = time.thread_time()
        sampler.sample(logits, [], position)
        best = min(best, time.thread_time() - start)
    return best * 1000


def test_sampling_the_full_vocabulary_is_fast() -> None:
    """On the reference machine, about 0.01 ms for greedy sampling, and 0.1 ms with the default settings."""
    logits = np.random.default_rng(0).normal(0, 2.5, VOCABULARY).astype(np.float32)
    logits[:40] += 15
    assert _best_ms(Sampler(SamplingParams(temperature=0), 1), logits) < 0.2
    assert _best_ms(Sampler(SamplingParams(), 1), logits) < 2
    flat = (logits * 0.001).astype(np.float32)
    assert _best_ms(Sampler(SamplingParams(), 1), flat) < 30  # the whole vocabulary must be sorted
