"""8-bit activations, a compact cache and our kernels together hardly change predictions for the model's own text. The
reference is the NumPy model; the text is the greedy one of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import numpy as np
import numpy.typing as npt
import pytest
from golden.numpy_model import DEQUANTIZED, QUANTIZED, NumpyModel, byte_attention, float_attention
from golden.store import Golden

from notso.smollm3 import Engine
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.kv.kv_cache import KVFormat
from notso.smollm3.sampling.sampler import log_probabilities

LEAST_TOP1 = 0.995
"""Minimum share of positions with the reference's most likely token, in the whole text including the user's words."""

MOST_KL = 1e-3
"""Maximum mean Kullback-Leibler divergence, in nats."""

LEAST_TOP1_OF_ALL, MOST_KL_OF_ALL = 0.985, 2.5e-3
"""The same limits compared with activations that are not rounded to bytes; answers alone must satisfy the limits above.
The model cannot predict users' words, so small differences change the most likely token there: even the reference with
activations in bytes agrees with floats at only 0.991 of the whole text."""

pytestmark = pytest.mark.long("engine")

Floats = npt.NDArray[np.float32]
JUDGES = {
    "reference-f16": (QUANTIZED, float_attention),
    "reference-k8v8": (QUANTIZED, byte_attention),
    "floats": (DEQUANTIZED, float_attention),
}


class Text:
    """Ten chats with their answers, and the reference logits of every position."""

    def __init__(self, kept: Golden, ends: frozenset[int]) -> None:
        taken = np.concatenate([np.full(len(ids), number % 2 == 0) for number, ids in enumerate(kept.lists)])
        self.lists = kept.lists[::2]  # only half of them, because NumPy is slow
        self.first_seen = kept.first_seen[taken]
        prompts = kept.prompt_lengths.tolist()[::2]
        self.answers = np.concatenate(
            [_answer(ids, prompt, ends) for ids, prompt in zip(self.lists, prompts, strict=True)]
        )
        model = NumpyModel(demo_path())
        self.logits = {
            name: np.concatenate([model.logits(ids, *operations) for ids in self.lists])
            for name, operations in JUDGES.items()
        }
        model.close()


def _answer(ids: list[int], prompt: int, ends: frozenset[int]) -> npt.NDArray[np.bool_]:
    """Return a mask of positions whose next token belongs to the answer, including its end."""
    stop = next((at for at in range(prompt, len(ids)) if ids[at] in ends), len(ids) - 1)
    return (np.arange(len(ids)) >= prompt - 1) & (np.arange(len(ids)) < stop)


@pytest.fixture(scope="module")
def text(demo_engine: Engine) -> Iterator[Text]:
    yield Text(Golden.load("demo_f32"), demo_engine.tokenizer.end_ids)


def top1(theirs: Floats, ours: Floats) -> float:
    return float((theirs.argmax(-1) == ours.argmax(-1)).mean())


def divergence(theirs: Floats, ours: Floats) -> float:
    """Return the mean over positions of sum p (log p - log q), where p is theirs."""
    p, q = log_probabilities(theirs).astype(np.float64), log_probabilities(ours).astype(np.float64)
    return float((np.exp(p) * (p - q)).sum(-1).mean())


@pytest.fixture(scope="module", params=["f16", "k8v8"])
def kv(request: pytest.FixtureRequest) -> KVFormat:
    return cast("KVFormat", request.param)


@pytest.fixture(scope="module")
def ours(kv: KVFormat, text: Text) -> Floats:
    with Engine.load(kv=kv) as engine:
        assert engine.info.kv_format == kv
        return np.concatenate([engine.logits(ids) for ids in text.lists])


def test_the_engine_agrees_with_the_reference(kv: KVFormat, ours: Floats, text: Text) -> None:
    theirs, every = text.logits[f"reference-{kv}"][text.first_seen], ours[text.first_seen]
    assert len(every) > 750
    assert top1(theirs, every) >= LEAST_TOP1
    assert divergence(theirs, every) <= MOST_KL


def test_engine_agrees_with_unrounded_activations(ours: Floats, text: Text) -> None:
    theirs, answers, every = text.logits["floats"], text.answers & text.first_seen, text.first_seen
    assert answers.sum() > 250
    assert top1(theirs[answers], ours[answers]) >= LEAST_TOP1
    assert divergence(theirs[answers], ours[answers]) <= MOST_KL
    assert top1(theirs[every], ours[every]) >= LEAST_TOP1_OF_ALL
    assert divergence(theirs[every], ours[every]) <= MOST_KL_OF_ALL


def test_accuracy_limits_detect_noise_and_shifted_tokens(text: Text) -> None:
    """Noise of six thousandths in the logits exceeds the limit, and so does a shift by one token."""
    theirs = text.logits["reference-k8v8"][text.answers]
    noise = np.random.default_rng(1).standard_normal(theirs.shape).astype(np.float32)
    noisy = theirs + 0.006 * np.ptp(theirs) * noise
    assert divergence(theirs, noisy) > MOST_KL
    assert top1(theirs, np.roll(theirs, 1, axis=0)) < LEAST_TOP1
