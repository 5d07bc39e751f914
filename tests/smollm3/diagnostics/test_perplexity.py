"""Perplexity and divergence are compared with straightforward code, and invalid inputs are rejected."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from golden.dequantized import write_dequantized

from notso import Engine
from notso.smollm3.diagnostics.perplexity import divergence, perplexity
from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.hub.registry import demo_path

WINDOW = 64
TEXT = "The sky is blue because light of short waves is scattered more. Two and two are four, and 27 + 48 = 75.\n" * 8


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Engine]]:
    """Load the demo model, and its weights without quantized arithmetic."""
    exact = write_dequantized(demo_path(), tmp_path_factory.mktemp("demo") / "f32.gguf")
    with (
        Engine.load(demo_path(), context_tokens=WINDOW, kv="f16") as demo,
        Engine.load(exact, context_tokens=WINDOW, kv="f16") as base,
    ):
        yield demo, base


def probabilities(engine: Engine, ids: list[int]) -> np.ndarray:
    logits = engine.logits(ids).astype(np.float64)
    return np.exp(logits - np.log(np.exp(logits).sum(axis=1, keepdims=True)))


class Certain:
    """Model that is certain of token 0."""

    info = SimpleNamespace(context_tokens=WINDOW)

    def tokenize(self, text: str) -> list[int]:
        return list(text.encode())

    def logits(self, ids: list[int]) -> np.ndarray:
        return np.eye(1, 256, dtype=np.float32).repeat(len(ids), 0) * np.float32(800)


def test_perplexity_beyond_the_largest_number_is_infinite() -> None:
    found = perplexity(Certain(), TEXT, window=WINDOW)  # type: ignore[arg-type]
    assert found.perplexity.value == math.inf


def test_perplexity_and_divergence_match_plain_sums(engines: tuple[Engine, Engine]) -> None:
    engine, base = engines
    ids, told = engine.tokenize(TEXT), []
    found = divergence(engine, base, TEXT, window=WINDOW, progress=lambda done, total: told.append((done, total)))
    windows = len(ids) // WINDOW
    assert told == [(number, windows) for number in range(1, windows + 1)]
    nats, kl, same = [], [], []
    for number in range(windows):
        window = ids[number * WINDOW : (number + 1) * WINDOW]
        p, q = probabilities(engine, window), probabilities(base, window)
        for at in range(WINDOW // 2, WINDOW - 1):
            nats.append(-math.log(p[at, window[at + 1]]))
            kl.append(float((q[at] * np.log(q[at] / p[at])).sum()))
            same.append(p[at].argmax() == q[at].argmax())
    assert found.model.tokens == found.base.tokens == windows * (WINDOW // 2 - 1)
    assert found.model.perplexity.value == pytest.approx(math.exp(np.mean(nats)))
    error = np.std(nats, ddof=1) / math.sqrt(len(nats))
    assert found.model.perplexity.error == pytest.approx(math.exp(np.mean(nats)) * error)
    assert found.kl.value == pytest.approx(np.mean(kl), abs=1e-9) and found.largest_kl == pytest.approx(max(kl))
    assert found.median_kl <= found.kl_99 <= found.largest_kl and 0 < found.kl.value < 0.1
    assert found.same_top.value == np.mean(same) > 0.9 and 0 < found.rms_change < 0.1
    assert perplexity(engine, TEXT, window=WINDOW) == found.model


def test_divergence_of_a_model_from_itself_is_zero(engines: tuple[Engine, Engine]) -> None:
    found = divergence(engines[0], engines[0], TEXT, window=WINDOW)
    assert found.kl.value == found.largest_kl == found.rms_change == 0 and found.same_top.value == 1


def test_short_text_and_invalid_window_are_refused(engines: tuple[Engine, Engine], tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match="at least two windows of 64"):
        perplexity(engines[0], "too short", window=WINDOW)
    with pytest.raises(InvalidRequestError, match="not 65"):
        perplexity(engines[0], TEXT, window=65)
