"""The same numbers as other people's code, from golden files: transformers for float weights, llama.cpp for blocks.

`tests/parity` asks both live. `tests/golden/make_goldens.py` makes the files anew.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
from golden.random_models import RANDOM, YARN_CONTEXT, shapes_3b_lists, write_shapes_3b
from golden.store import REMAKE, TOP, Floats, Golden, sha256, shared, top_tokens, weights_sha256

from notso.qtensor.gguf import GGUFFile
from notso.smollm3 import Engine, SamplingParams
from notso.smollm3.answer import Answer
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.hub import demo_path

FLOAT_TOLERANCE = 1e-3
"""Largest error of a float model's logits, as a part of their range. Keys and values are kept in half precision, which
transformers does not do; all else is float32 in both."""

ROUNDING_TOLERANCE = 1e-6
"""The same where half precision is taken out of the comparison: what float32 itself leaves after eight layers."""

LEAST_TOP1 = 0.99
"""Part of the positions at which the likeliest token must be llama.cpp's. Both multiply blocks by 8-bit activations;
where two tokens are about equally likely, a rounding decides."""

LEAST_TOP5 = 0.98
"""Part of llama.cpp's five likeliest tokens that must be among our five."""


def golden(name: str, model: Path) -> Golden:
    """A golden file, if it belongs to this model."""
    kept = Golden.load(name)
    found = sha256(model) if model == demo_path() else weights_sha256(model)
    if kept.model_sha256 != found:
        pytest.fail(f"tests/golden/{name}.npz belongs to another {model.name}; make it anew: {REMAKE} {name}")
    return kept


def logits_of(engine: Engine, kept: Golden) -> Floats:
    """(P, V): ours, list after list."""
    return np.concatenate([engine.logits(ids) for ids in kept.lists])


def error_of(ours: Floats, kept: Golden) -> float:
    """The largest difference, at the positions kept whole and at the likeliest tokens of all, relative to the range."""
    whole = np.abs(ours[kept.rows] - kept.logits).max(initial=0)
    likeliest = np.abs(np.take_along_axis(ours, kept.top_ids.astype(int), 1) - kept.top_logits).max()
    return float(max(whole, likeliest) / kept.logit_range)


def greedy_of(ours: Floats, kept: Golden) -> list[list[int]]:
    """What each list goes on with behind its prompt if the likeliest token is taken at every step."""
    best = ours.argmax(1)
    ends = itertools.pairwise([*kept.starts, len(kept.ids)])
    return [
        best[start + prompt - 1 : end - 1].tolist()
        for (start, end), prompt in zip(ends, kept.prompt_lengths.tolist(), strict=True)
    ]


def continuations(kept: Golden) -> list[list[int]]:
    return [ids[prompt:] for ids, prompt in zip(kept.lists, kept.prompt_lengths.tolist(), strict=True)]


def test_random_weights_give_the_logits_of_transformers(random_engine: Engine, random_file: Path) -> None:
    kept = golden("random_f32", random_file)
    ours = logits_of(random_engine, kept)
    assert error_of(ours, kept) < FLOAT_TOLERANCE
    assert len(kept.lists) == 20
    assert {len(answer) for answer in continuations(kept)} == {64}
    assert greedy_of(ours, kept) == continuations(kept)


def test_nothing_but_the_half_precision_of_the_cache_differs(random_engine: Engine, random_file: Path) -> None:
    """Against transformers with the same cache, first positions agree to float32's own rounding, but for those where a
    key or value lay so near the middle of two halves that it was rounded to the other one."""
    kept = golden("random_half_cache", random_file)
    ours = logits_of(random_engine, kept)
    errors = np.abs(ours[kept.rows] - kept.logits).max(1) / kept.logit_range
    assert (errors < ROUNDING_TOLERANCE).sum() >= 3
    assert errors.max() < FLOAT_TOLERANCE / 2


def test_beyond_the_trained_context_yarn_is_that_of_transformers(tmp_path: Path) -> None:
    kept = golden("random_yarn", RANDOM.write(tmp_path / "yarn.gguf", context=YARN_CONTEXT))
    with Engine.load(tmp_path / "yarn.gguf", context_tokens=2 * YARN_CONTEXT) as engine:
        assert error_of(logits_of(engine, kept), kept) < FLOAT_TOLERANCE
    with GGUFFile.open(tmp_path / "yarn.gguf") as file:
        config = SmolLM3Config.from_metadata(file.metadata)
    assert config.rope_frequencies(2 * YARN_CONTEXT) != config.rope_frequencies(YARN_CONTEXT)


def test_within_the_trained_context_yarn_is_off(tmp_path: Path) -> None:
    kept = golden("random_yarn", RANDOM.write(tmp_path / "yarn.gguf", context=YARN_CONTEXT))
    with Engine.load(tmp_path / "yarn.gguf", context_tokens=YARN_CONTEXT) as engine:
        ours = engine.logits(kept.lists[0][:YARN_CONTEXT])
    near = np.abs(np.take_along_axis(ours, kept.top_ids[:YARN_CONTEXT].astype(int), 1) - kept.top_logits[:YARN_CONTEXT])
    assert near.max() / kept.logit_range > 20 * FLOAT_TOLERANCE


def test_trained_weights_give_the_logits_of_transformers(demo_f32_engine: Engine) -> None:
    kept = golden("demo_f32", demo_path())
    ours = logits_of(demo_f32_engine, kept)
    assert error_of(ours, kept) < FLOAT_TOLERANCE
    assert len(kept.lists) == 20
    assert {len(answer) for answer in continuations(kept)} == {64}
    assert greedy_of(ours, kept) == continuations(kept)


def test_generating_greedily_says_what_transformers_says(demo_f32_engine: Engine) -> None:
    """Every third chat token by token through `generate`, up to the end of the answer."""
    kept = golden("demo_f32", demo_path())
    for ids, prompt_length in list(zip(kept.lists, kept.prompt_lengths.tolist(), strict=True))[::3]:
        prompt = ids[:prompt_length]
        events = list(demo_f32_engine.generate(prompt, SamplingParams(max_tokens=64, temperature=0)))
        expected = Answer(demo_f32_engine.tokenizer, prompt, (), find_tool_calls=False)
        said = []
        for token in ids[prompt_length:]:
            said += expected.push(token)
            if expected.finish_reason is not None:
                break
        said += expected.finish("length")
        assert events[:-2] == said
        assert events[-2].usage is not None
        assert events[-2].usage.completion_tokens == expected.tokens
        assert events[-1].finish_reason == expected.finish_reason


def test_quantised_trained_weights_agree_with_llama_cpp(demo_engine: Engine) -> None:
    kept = golden("demo_q4_k_m", demo_path())
    ours = top_tokens(logits_of(demo_engine, kept))
    fresh = kept.first_seen  # chats begin alike; count such positions once
    assert fresh.sum() > 1000
    assert (ours[:, 0] == kept.top_ids[:, 0])[fresh].mean() >= LEAST_TOP1
    both = shared(ours, kept.top_ids)[fresh]
    assert both.mean() / TOP >= LEAST_TOP5
    assert (both >= TOP - 1).mean() >= 0.995  # "nearly": where a fifth token changes places with the sixth


def test_blocks_in_the_shapes_of_the_3b_agree_with_llama_cpp(tmp_path: Path) -> None:
    """Random weights have no favourite: llama.cpp itself agrees at 95 % of these positions between a batch and one
    token at a time. So the likeliest token counts where it leads by more than that noise."""
    model = write_shapes_3b(tmp_path / "shapes.gguf")
    kept = golden("shapes_3b", model)
    assert kept.lists == shapes_3b_lists()
    with Engine.load(model, context_tokens=256) as engine:
        logits = logits_of(engine, kept)
    ours = top_tokens(logits)
    lead = (kept.top_logits[:, 0] - kept.top_logits[:, 1]) / kept.logit_range
    equal = ours[:, 0] == kept.top_ids[:, 0]
    clear = lead > 0.01
    assert clear.sum() > 80
    assert equal[clear].mean() >= LEAST_TOP1
    assert equal.mean() >= kept.noise_top1 - 0.02
    assert shared(ours, kept.top_ids).mean() / TOP >= kept.noise_top5 - 0.04
    errors = np.take_along_axis(logits, kept.top_ids.astype(int), 1) - kept.top_logits
    assert np.sqrt((errors**2).mean()) / kept.logit_range < 0.01
