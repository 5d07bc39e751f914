"""Loading the engine: sources, reported information, errors, and effects of its parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scripted_tokens import END, GREEDY, PROMPT, SMALL, run, told

from notso.qtensor.backends.cpu import kernel_choice
from notso.qtensor.errors import GGUFError, KernelChoiceError
from notso.smollm3 import Engine, InvalidRequestError, Message, ModelFileError, RequestOptions, SamplingParams


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """Load a small random model with a context of 40 tokens."""
    path = SMALL.write(tmp_path_factory.mktemp("engine") / "small.gguf")
    with Engine.load(path, context_tokens=40, threads=2) as loaded:
        yield loaded


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize("ids", [[], [-1], [300], [1 << 40], [1, 2, 300]], ids=repr)
def test_token_ids_outside_the_vocabulary_are_rejected(engine: Engine, ids: list[int]) -> None:
    for call in (engine.logits, engine.generate):
        with pytest.raises(InvalidRequestError):
            call(ids)


@pytest.mark.parametrize("ids", ["", ["a"], [1.5], [None], [[1]], [1, "x"], [Message("user", "a"), 5]], ids=repr)
def test_generate_rejects_invalid_prompt_types(engine: Engine, ids: Any) -> None:
    with pytest.raises((InvalidRequestError, ModelFileError)):
        engine.generate(ids)


def test_ids_may_be_a_tuple_or_an_array(engine: Engine) -> None:
    expected = engine.logits([1, 2, 3])
    np.testing.assert_array_equal(engine.logits((1, 2, 3)), expected)
    np.testing.assert_array_equal(engine.logits(np.array([1, 2, 3], np.uint16)), expected)


def test_logit_bias_on_unknown_token_is_rejected(engine: Engine) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        engine.generate(PROMPT, SamplingParams(logit_bias={300: 1.0}))
    assert caught.value.param == "logit_bias"


def test_model_without_chat_template_rejects_messages(engine: Engine) -> None:
    for call in (engine.generate, engine.render, engine.encode_chat):
        with pytest.raises(ModelFileError, match="no chat template"):
            call([Message("user", "hello")])


@pytest.mark.parametrize("context", [0, -1])
def test_nonpositive_context_tokens_is_rejected(engine: Engine, context: int) -> None:
    with pytest.raises(InvalidRequestError, match="positive whole number") as caught:
        Engine.load(engine.info.path, context_tokens=context)
    assert caught.value.param == "context_tokens"


@pytest.mark.parametrize("context", [1025, 1 << 40])
def test_context_tokens_is_clamped_to_model_maximum(engine: Engine, context: int) -> None:
    with Engine.load(engine.info.path, context_tokens=context) as loaded:
        assert loaded.info.context_tokens == 1024


def test_invalid_or_missing_model_file_raises_gguf_error(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    for path in (tmp_path / "text.gguf", tmp_path / "nothing.gguf", tmp_path, str(tmp_path / "text.gguf")):
        with pytest.raises(GGUFError):
            Engine.load(path)


def test_kernels_variable_is_validated_at_load(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, own_kernels: None
) -> None:
    monkeypatch.setenv(kernel_choice.KERNELS_VARIABLE, "abacus")
    with pytest.raises(KernelChoiceError, match="generic"):
        Engine.load(engine.info.path, context_tokens=16)
    monkeypatch.setenv(kernel_choice.KERNELS_VARIABLE, "generic")
    with Engine.load(engine.info.path, context_tokens=16, threads=3) as slow:
        assert (slow.info.kernels, slow.info.threads) == ("generic", 3)


# ---------------------------------------------------------------- sampling


def answer(engine: Engine, **params: Any) -> str:
    return told(list(engine.generate(PROMPT, SamplingParams(**({"max_tokens": 12} | params)))), "text")


def test_seed_determines_the_answer(engine: Engine) -> None:
    warm = {"temperature": 2.0, "top_p": 1.0}
    answers = {seed: answer(engine, seed=seed, **warm) for seed in range(5)}
    assert len(set(answers.values())) == 5
    assert {seed: answer(engine, seed=seed, **warm) for seed in reversed(range(5))} == answers


def test_unseeded_answers_vary(engine: Engine) -> None:
    assert len({answer(engine, temperature=2.0, top_p=1.0) for _ in range(4)}) > 1


def test_greedy_sampling_takes_the_argmax_of_the_logits(engine: Engine) -> None:
    ids = list(PROMPT)
    for _ in range(12):
        ids.append(int(engine.logits(ids)[-1].argmax()))
    assert END not in ids
    events = run(engine, params=GREEDY)
    everything = told(events, "reasoning") + told(events, "text")
    assert everything == engine.tokenizer.decode(ids[len(PROMPT) :], skip_control=True)
    assert everything == answer(engine, temperature=0, seed=5) + told(events, "reasoning")


def test_logit_bias_forces_or_excludes_a_token(engine: Engine) -> None:
    assert answer(engine, temperature=0, logit_bias={ord("x"): 100.0}) == "x" * 12
    first = int(engine.logits(PROMPT)[-1].argmax())
    masked = run(engine, params=SamplingParams(max_tokens=1, temperature=0, logit_bias={first: -100.0}))
    assert told(masked, "text") != told(run(engine, params=replace(GREEDY, max_tokens=1)), "text")


# ---------------------------------------------------------------- information about a model


def test_engine_info_describes_the_model_file(engine: Engine) -> None:
    info = engine.info
    assert (info.name, info.is_demo, info.context_tokens, info.threads) == ("random weights", False, 40, 2)
    assert info.size_bytes == Path(info.path).stat().st_size
    assert info.parameter_count == sum(int(np.prod(shape)) for shape, _ in SMALL.tensors().values())
    assert info.quantization == {"F32": 2 + 9 * 4}
    assert info.kernels in kernel_choice.available_kernels()


def test_context_tokens_defaults_to_trained_context(engine: Engine) -> None:
    with Engine.load(engine.info.path) as one:
        assert one.info.context_tokens == SMALL.context
    with Engine.load(engine.info.path, context_tokens=2 * SMALL.context) as two:
        assert two.info.context_tokens == 2 * SMALL.context


# ---------------------------------------------------------------- the demo model


def test_load_without_arguments_loads_the_demo_model(demo_engine: Engine) -> None:
    assert demo_engine.info.is_demo
    assert set(demo_engine.info.quantization) == {"Q4_K", "Q6_K", "F32"}
    assert demo_engine.info.context_tokens == demo_engine.config.max_position_embeddings


@pytest.mark.parametrize("thinking", [True, False])
def test_demo_model_reasons_only_if_thinking_is_enabled(demo_engine: Engine, thinking: bool) -> None:
    params = SamplingParams(max_tokens=200, temperature=0)
    events = list(demo_engine.generate([Message("user", "hello")], params, RequestOptions(thinking=thinking)))
    assert bool(told(events, "reasoning")) is thinking
    assert told(events, "text").strip()
    assert not any(tag in event.text for event in events for tag in ("<think>", "</think>", "<|im_end|>"))
    assert events[-1].finish_reason == "stop"


def test_encode_chat_matches_the_rendered_text(demo_engine: Engine) -> None:
    messages = [Message("system", "Be brief."), Message("user", "hello")]
    text = demo_engine.render(messages, RequestOptions(thinking=False))
    assert demo_engine.encode_chat(messages, RequestOptions(thinking=False)) == demo_engine.tokenizer.encode(
        text, control=True
    )
    assert demo_engine.tokenizer.decode(demo_engine.encode_chat(messages), skip_control=False) == demo_engine.render(
        messages
    )
