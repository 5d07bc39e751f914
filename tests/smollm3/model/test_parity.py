"""Results equal those of other implementations in golden files: transformers for float weights, llama.cpp for blocks.

`tests/parity` runs both live. `tests/golden/make_goldens.py` regenerates the files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from golden.adapters import CONVERTED, converted_pairs, golden_pairs, write_gguf, write_peft
from golden.compare import (
    CLEAR_LEAD,
    FLOAT_TOLERANCE,
    check_floats,
    check_half_cache,
    check_random_blocks,
    check_rounding,
    check_trained_blocks,
    continuations,
)
from golden.random_models import RANDOM, YARN_CONTEXT, shapes_3b_lists, write_shapes_3b
from golden.store import REMAKE, Golden, sha256, weights_sha256

from notso.smollm3 import Engine, SamplingParams
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.output.output_processor import OutputProcessor
from notso.smollm3.values.engine_config import AdapterSource


def golden(name: str, model: Path) -> Golden:
    """Load a golden file, if it belongs to this model."""
    kept = Golden.load(name)
    found = sha256(model) if model == demo_path() else weights_sha256(model)
    if kept.model_sha256 != found:
        pytest.fail(f"tests/golden/{name}.npz belongs to another {model.name}; regenerate it: {REMAKE} {name}")
    return kept


def test_golden_of_another_model_fails_with_the_remake_command(random_file: Path) -> None:
    with pytest.raises(pytest.fail.Exception, match=r"python tests/golden/make_goldens\.py demo_f32"):
        golden("demo_f32", random_file)


def has_twenty_long_answers(kept: Golden) -> bool:
    return [len(answer) for answer in continuations(kept)] == [64] * 20


def test_random_weights_match_transformers(random_engine: Engine, random_file: Path) -> None:
    """The 64 greedy tokens after each of 20 prompts are equal, too."""
    kept = golden("random_f32", random_file)
    assert has_twenty_long_answers(kept)
    check_floats(random_engine, kept)


def test_half_precision_cache_matches_golden_logits(random_engine: Engine, random_file: Path) -> None:
    check_half_cache(random_engine, golden("random_half_cache", random_file))


def test_yarn_beyond_trained_context_matches_transformers(tmp_path: Path) -> None:
    path = RANDOM.write(tmp_path / "yarn.gguf", context=YARN_CONTEXT)
    kept = golden("random_yarn", path)
    assert len(kept.lists[0]) == 2 * YARN_CONTEXT
    with Engine.load(path, context_tokens=2 * YARN_CONTEXT, kv="f16") as engine:
        check_floats(engine, kept)


def test_yarn_is_off_within_trained_context(tmp_path: Path) -> None:
    path = RANDOM.write(tmp_path / "yarn.gguf", context=YARN_CONTEXT)
    kept = golden("random_yarn", path)
    with Engine.load(path, context_tokens=YARN_CONTEXT, kv="f16") as engine:
        ours = engine.logits(kept.lists[0][:YARN_CONTEXT])
    near = np.take_along_axis(ours, kept.top_ids[:YARN_CONTEXT].astype(int), 1) - kept.top_logits[:YARN_CONTEXT]
    assert np.abs(near).max() / kept.logit_range > 20 * FLOAT_TOLERANCE


@pytest.mark.parametrize("form", ["gguf", "peft"])
def test_adapter_logits_match_peft(tmp_path: Path, random_file: Path, form: str) -> None:
    """The 64 greedy tokens after each of 20 prompts are equal, too, with either file format."""
    kept, pairs = golden("random_adapter", random_file), golden_pairs(random_file)
    assert has_twenty_long_answers(kept)
    file = (
        write_gguf(tmp_path / "adapter.gguf", pairs)
        if form == "gguf"
        else write_peft(tmp_path / "adapter", pairs, RANDOM.head_dim)
    )
    with Engine.load(random_file, kv="f16", adapters=[f"a={file}"]) as engine:
        check_floats(engine, kept, "a")


def test_adapter_converted_by_llama_cpp_matches_llama_cpp(tmp_path: Path) -> None:
    """The converted file on the shipped demo model agrees with llama.cpp, and gives the bits of the original folder."""
    kept = golden("converted_adapter", demo_path())
    with Engine.load(kv="f16", adapters=[f"file={CONVERTED}"]) as engine:
        check_trained_blocks(engine, kept, "file")
        pairs = converted_pairs(engine.config)
        folder = write_peft(tmp_path / "folder", pairs, engine.config.head_dim)
        engine.adapters.add(AdapterSource("folder", str(folder)))
        ids = kept.lists[0]
        assert engine.logits(ids, adapter="file").tobytes() == engine.logits(ids, adapter="folder").tobytes()
        assert np.abs(engine.logits(ids, adapter="file") - engine.logits(ids)).max() / kept.logit_range > CLEAR_LEAD


def test_trained_weights_match_transformers(demo_f32_engine: Engine) -> None:
    """The shipped weights, dequantized; the 64 greedy tokens after each of 20 chats are equal, too."""
    kept = golden("demo_f32", demo_path())
    assert has_twenty_long_answers(kept)
    check_floats(demo_f32_engine, kept)


def test_float_tolerance_detects_quantized_arithmetic(demo_engine: Engine) -> None:
    """Quantized arithmetic exceeds the tolerance for float arithmetic."""
    kept = golden("demo_f32", demo_path())
    ids, top = kept.lists[0], kept.top_ids[: kept.lengths[0]].astype(int)
    error = np.take_along_axis(demo_engine.logits(ids), top, 1) - kept.top_logits[: kept.lengths[0]]
    assert np.abs(error).max() / kept.logit_range > 3 * FLOAT_TOLERANCE


def test_greedy_answers_match_transformers(demo_f32_engine: Engine) -> None:
    """Every third chat, token by token with `generate`, up to the end of the answer."""
    kept = golden("demo_f32", demo_path())
    for ids, prompt_length in list(zip(kept.lists, kept.prompt_lengths.tolist(), strict=True))[::3]:
        prompt = ids[:prompt_length]
        events = list(demo_f32_engine.generate(prompt, SamplingParams(max_tokens=64, temperature=0)))
        expected = OutputProcessor(demo_f32_engine.tokenizer, prompt, (), find_tool_calls=False)
        said = []
        for token in ids[prompt_length:]:
            said += expected.push(token)
            if expected.finish_reason is not None:
                break
        said += expected.finish("length")
        assert [(event.kind, event.text) for event in events[:-2] if event.kind != "progress"] == [
            (event.kind, event.text) for event in said
        ]
        assert events[-2].usage is not None
        assert events[-2].usage.completion_tokens == expected.tokens
        assert events[-1].finish_reason == expected.finish_reason


def test_quantized_trained_weights_agree_with_llama_cpp(demo_f16_engine: Engine) -> None:
    check_trained_blocks(demo_f16_engine, golden("demo_q4_k_m", demo_path()))


def test_rounding_error_is_close_to_llama_cpp(demo_f16_engine: Engine) -> None:
    check_rounding(demo_f16_engine, golden("demo_f32", demo_path()), golden("demo_q4_k_m", demo_path()))


def test_blocks_in_3b_shapes_agree_with_llama_cpp(tmp_path: Path) -> None:
    path = write_shapes_3b(tmp_path / "shapes.gguf")
    kept = golden("shapes_3b", path)
    assert kept.lists == shapes_3b_lists()
    with Engine.load(path, context_tokens=256, kv="f16") as engine:
        check_random_blocks(engine, kept)
