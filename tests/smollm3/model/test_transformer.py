"""The forward pass is exactly this model's: each plausible mistake causes a large error.

The reference is transformers' golden logits for random weights, which `test_parity` compares with the correct model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden.random_models import RANDOM
from golden.store import Floats, Golden

from notso.qtensor import CPU
from notso.qtensor.backends.cpu import ops
from notso.qtensor.gguf import GGUFFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.kv.kv_cache import KVCache
from notso.smollm3.model.input_batch import InputBatch
from notso.smollm3.model.transformer import SmolLM3
from notso.smollm3.model.weights import SmolLM3Weights

RIGHT = 1e-3
"""As in test_parity: maximum error of the correct model, relative to the logit range."""

WRONG = 0.01
"""Minimum error of a model with a mistake: ten times the limit above."""


@contextmanager
def model_of(path: Path, capacity: int, **changes: Any) -> Iterator[SmolLM3]:
    """Load the model in a file, with `changes` to the file's configuration."""
    with GGUFFile.open(path) as file:
        config = SmolLM3Config.from_metadata(file.metadata)
        weights = SmolLM3Weights.from_tensors(file.tensors, config)
        changed = replace(config, **changes)
        yield SmolLM3(changed, weights, KVCache(CPU(), changed, capacity))


def read(model: SmolLM3, ids: list[int], start: int = 0, sampled: list[int] | None = None) -> Floats:
    """Return the logits (sampled, V) of ids at positions from `start`; of all ids by default."""
    rows = list(range(len(ids))) if sampled is None else sampled
    step = InputBatch(model.backend, model.config, len(ids), len(rows))
    step.fill(ids, range(start, start + len(ids)), [0] * len(ids), rows)
    model.forward(step)
    return step.logits


@pytest.fixture(scope="module")
def kept() -> Golden:
    return Golden.load("random_f32")


@pytest.fixture
def error(random_file: Path, kept: Golden) -> Callable[..., float]:
    """Return a function that computes the largest error for a changed configuration, relative to the logit range, on
    the longest golden prompt."""
    number = int(np.argmax(kept.lengths))
    start, length = kept.starts[number], int(kept.lengths[number])
    ids, top = kept.lists[number], kept.top_ids[start : start + length].astype(int)

    def measure(**changes: Any) -> float:
        with model_of(random_file, length, **changes) as model:
            ours = np.take_along_axis(read(model, ids), top, 1)
        return float(np.abs(ours - kept.top_logits[start : start + length]).max() / kept.logit_range)

    return measure


def test_unchanged_model_matches_transformers(error: Callable[..., float]) -> None:
    assert error() < RIGHT


@pytest.mark.parametrize("layer", range(RANDOM.layers))
def test_rope_in_a_wrong_layer_is_detected(error: Callable[..., float], layer: int) -> None:
    """Layers 3 and 7 have no RoPE; it is added there or removed from any other layer."""
    right = [1, 1, 1, 0, 1, 1, 1, 0]
    right[layer] = 1 - right[layer]
    assert error(no_rope_layers=tuple(right)) > WRONG


def test_inverted_no_rope_layers_are_detected(error: Callable[..., float]) -> None:
    assert error(no_rope_layers=(0, 0, 0, 1, 0, 0, 0, 1)) > WRONG


def test_rope_on_halves_instead_of_pairs_is_detected(
    error: Callable[..., float], monkeypatch: pytest.MonkeyPatch
) -> None:
    rope = ops.rope

    def halves(*arguments: Any, adjacent: bool) -> None:
        assert adjacent, "the model must request adjacent pairs"
        rope(*arguments, adjacent=False)

    monkeypatch.setattr(CPU, "rope", staticmethod(halves))
    assert error() > WRONG


def test_rope_on_queries_only_is_detected(error: Callable[..., float], monkeypatch: pytest.MonkeyPatch) -> None:
    rope = ops.rope

    def queries_only(x: Floats, *arguments: Any, adjacent: bool) -> None:
        if x.shape[1] == RANDOM.heads:
            rope(x, *arguments, adjacent=adjacent)

    monkeypatch.setattr(CPU, "rope", staticmethod(queries_only))
    assert error() > WRONG


@pytest.mark.parametrize(
    "changes",
    [{"rope_theta": 2e6}, {"rope_theta": 10_000.0}, {"rms_norm_eps": 1e-6}, {"rms_norm_eps": 1e-2}],
    ids=["theta of the class", "theta of llama", "eps of the 3B", "large eps"],
)
def test_wrong_config_constant_is_detected(error: Callable[..., float], changes: dict[str, float]) -> None:
    assert error(**changes) > 3 * RIGHT


def test_scores_are_scaled_by_the_head_dimension(random_file: Path, kept: Golden) -> None:
    ids, top = kept.lists[0], kept.top_ids[: len(kept.lists[0])].astype(int)
    with model_of(random_file, len(ids)) as model:
        assert model.scale == RANDOM.head_dim**-0.5
        model.scale = (RANDOM.hidden / RANDOM.heads) ** -0.5
        ours = np.take_along_axis(read(model, ids), top, 1)
    assert np.abs(ours - kept.top_logits[: len(ids)]).max() / kept.logit_range > WRONG


def test_recorded_step_matches_eager_step(random_file: Path) -> None:
    """Steps across a tile boundary of the cache."""
    ids = RANDOM.prompts(20, 140)[-1]
    with model_of(random_file, 140) as model:
        read(model, ids[:120], sampled=[])
        eager = [read(model, [token], 120 + at) for at, token in enumerate(ids[120:])]
    with model_of(random_file, 140) as model:
        step = InputBatch(model.backend, model.config, rows=1, sampled=1)
        program = ops.Program()
        with program.record():
            model.forward(step)
        read(model, ids[:120], sampled=[])
        for at, token in enumerate(ids[120:]):
            step.fill([token], [120 + at], [0], [0])
            program.run()
            np.testing.assert_array_equal(step.logits, eager[at])


def test_recording_computes_nothing(random_file: Path) -> None:
    with model_of(random_file, 8) as model:
        step = InputBatch(model.backend, model.config, rows=1, sampled=1)
        step.logits[:] = 123.0
        program = ops.Program()
        with program.record():
            model.forward(step)
        assert (step.logits == 123.0).all()
        assert not any(pool.data.any() for pool in model.cache.pools)
        assert len(program) > 5 * RANDOM.layers


def test_logits_are_computed_only_for_sampled_rows(random_file: Path) -> None:
    ids = RANDOM.prompts(20, 30)[-1]
    with model_of(random_file, 30) as model:
        everything = read(model, ids)
        some = read(model, ids, sampled=[29, 3, 3])
        np.testing.assert_array_equal(some, everything[[29, 3, 3]])
        assert read(model, ids, sampled=[]).shape == (0, RANDOM.vocab)
        np.testing.assert_array_equal(read(model, ids[-1:], 29), everything[-1:])


@pytest.mark.parametrize("sampled", [[], [4], [1, 2, 4]])
def test_last_layer_ffn_runs_only_for_sampled_rows(
    random_file: Path, monkeypatch: pytest.MonkeyPatch, sampled: list[int]
) -> None:
    rows, gated = list[int](), ops.matmul_gated

    def counted(x: Floats, *operands: Any, **options: Any) -> None:
        rows.append(len(x))
        gated(x, *operands, **options)

    ids = RANDOM.prompts(20, 6)[-1]
    with model_of(random_file, 8) as model:
        whole = read(model, ids[:5])
        after = read(model, ids[5:6], 5)
    monkeypatch.setattr(CPU, "matmul_gated", staticmethod(counted))
    with model_of(random_file, 8) as model:
        np.testing.assert_array_equal(read(model, ids[:5], sampled=sampled), whole[sampled])
        assert rows == [5] * (RANDOM.layers - 1) + [len(sampled)] * bool(sampled)
        np.testing.assert_array_equal(read(model, ids[5:6], 5), after)  # keys and values were stored


def test_later_tokens_do_not_change_earlier_logits(random_file: Path) -> None:
    ids = RANDOM.prompts(20, 40)[-1]
    other = [*ids[:25], *((token + 1) % RANDOM.vocab for token in ids[25:])]
    with model_of(random_file, 40) as model:
        first, second = read(model, ids), read(model, other)
    np.testing.assert_array_equal(first[:25], second[:25])
    assert (first[25:] != second[25:]).any(1).all()


def test_first_token_affects_the_last_logits(random_file: Path) -> None:
    """Every layer has full attention, so no window excludes the beginning."""
    ids = RANDOM.prompts(20, 300)[-1]
    with model_of(random_file, 300) as model:
        first = read(model, ids)[-1]
        second = read(model, [(ids[0] + 1) % RANDOM.vocab, *ids[1:]])[-1]
    assert (first != second).any()


def test_logits_use_output_weight_or_tied_embedding(tmp_path: Path) -> None:
    """With output.weight, logits come from it; otherwise, from the embedding."""
    small = replace(RANDOM, layers=1, hidden=64, ffn=64, heads=2, kv_heads=1, head_dim=32, vocab=300)
    tied, own = small.write(tmp_path / "tied.gguf"), replace(small, tied=False).write(tmp_path / "own.gguf")
    ids = small.prompts(2, 20)[-1]
    with model_of(tied, 20) as model:
        assert model.weights.lm_head is model.weights.embed_tokens
        tied_logits = read(model, ids)
    with model_of(own, 20) as model:
        own_logits = read(model, ids)
        table = model.weights.embed_tokens.as_float32().astype(float)
        head = model.weights.lm_head.as_float32().astype(float)
    hidden = np.linalg.lstsq(table, tied_logits.T.astype(float), rcond=None)[0]  # the hidden states of both models
    np.testing.assert_allclose(own_logits, (head @ hidden).T, atol=1e-4)
    assert np.abs(own_logits - tied_logits).max() > 0.1
