"""Embeddings are the mean of the last hidden states, compared with the NumPy model."""

from __future__ import annotations

import numpy as np
import pytest
from golden.numpy_model import QUANTIZED, Floats, NumpyModel, byte_attention
from smollm3.held_engine import close_at_submit

from notso.smollm3 import ContextLengthError, Engine, EngineError, InvalidRequestError, RequestOptions, SamplingParams
from notso.smollm3.engine import memory_plan
from notso.smollm3.hub.registry import demo_path

TEXTS = ["What is 27 + 48?", "1", "The sum of twelve and thirty is forty-two. " * 6]
ROUNDING = 0.005
"""Activations are rounded to bytes, so another order of a sum may change a rounded value."""


@pytest.fixture(scope="module")
def expected() -> Floats:
    model, vectors = NumpyModel(demo_path()), []
    with Engine.load(context_tokens=512) as engine:
        for text in TEXTS:
            states = model.hidden_states(engine.tokenize(text), QUANTIZED, byte_attention).astype(np.float64)
            mean = states.mean(axis=0)
            vectors.append(mean / np.linalg.norm(mean))
    model.close()
    return np.array(vectors, np.float32)


def test_embeddings_are_normalized_mean_of_last_hidden_states(demo_engine: Engine, expected: Floats) -> None:
    assert len(demo_engine.tokenize(TEXTS[2])) > 64  # more than one step
    found = demo_engine.embed(TEXTS)
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < ROUNDING
    assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(3), abs=1e-6)
    assert abs(float(expected[0] @ expected[1])) < 0.999  # the texts differ


def test_embeddings_are_independent_of_concurrency_and_cache(demo_engine: Engine) -> None:
    alone = demo_engine.embed(TEXTS[2])
    company = [demo_engine.submit(TEXTS[2], SamplingParams(max_tokens=30, seed=seed)) for seed in range(3)]
    beside = demo_engine.embed([*TEXTS, *TEXTS])
    for each in company:
        each.stop()
    assert (beside[[2, 5]] == alone).all()
    assert (beside[:3] == beside[3:]).all()


def test_preempted_text_gives_the_same_embedding(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are blocks for little more than two of the texts."""
    monkeypatch.setattr(memory_plan, "SHARED_TOKENS", 1024)
    ids = [[500 + number, *(300 + i * i % 500 for i in range(440))] for number in range(4)]
    options = RequestOptions(prompt_only=True, embedding=True)
    with Engine.load(context_tokens=512, max_num_seqs=4) as engine:
        answers = [engine.submit([7, *each[:290]], SamplingParams(max_tokens=200, ignore_eos=True)) for each in ids]
        together = [engine.submit(each, None, options) for each in ids]
        found = [_vector(each) for each in together]
        for each in answers:
            each.stop()
        assert found == [_vector(engine.submit(each, None, options)) for each in ids]


def _vector(generation: object) -> tuple[float, ...]:
    return next(event.embedding for event in generation.events() if event.kind == "embedding")  # type: ignore[attr-defined]


def test_embed_rejects_empty_and_too_long_texts(demo_engine: Engine) -> None:
    assert demo_engine.embed([]).shape == (0, demo_engine.config.hidden_size)
    with pytest.raises(InvalidRequestError):
        demo_engine.embed(["fine", ""])
    with pytest.raises(ContextLengthError):
        demo_engine.embed("word " * 5000)
    for texts in (5, None, [5], b"text"):
        with pytest.raises(InvalidRequestError):
            demo_engine.embed(texts)  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="embedding must be combined with prompt_only"):
        RequestOptions(embedding=True)


def test_closing_the_engine_during_an_embedding_raises_an_engine_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A StopIteration would never be raised to a caller that awaits a thread."""
    with Engine.load() as engine:
        close_at_submit(engine, monkeypatch)
        with pytest.raises(EngineError, match="closed"):
            engine.embed("text")
