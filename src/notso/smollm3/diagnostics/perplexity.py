"""Measure a model's perplexity on a text, and its divergence from another model, as llama.cpp's perplexity tool does.

The tokens are split into windows of equal length; an incomplete last window is ignored. Each window is evaluated
separately; only the tokens of its second half are scored.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from notso.smollm3.engine.engine import Engine
from notso.smollm3.errors import InvalidRequestError

WINDOW_TOKENS = 512  # llama.cpp's default

LEAST_WINDOW = 16
ROWS_AT_ONCE = 32  # rows converted to double precision at a time

Floats: TypeAlias = npt.NDArray[np.float32]
Doubles: TypeAlias = npt.NDArray[np.float64]
Progress: TypeAlias = Callable[[int, int], None]  # windows done, total windows


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean and its standard error."""

    value: float
    error: float

    @classmethod
    def of(cls, samples: Doubles) -> Estimate:
        spread = float(samples.std(ddof=1)) if len(samples) > 1 else math.nan
        return cls(float(samples.mean()), spread / math.sqrt(len(samples)))


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Exponential of the mean negative log probability."""

    tokens: int
    perplexity: Estimate


@dataclass(frozen=True, slots=True)
class Divergence:
    """Difference between a model's probabilities and a base model's."""

    base: Perplexity
    model: Perplexity
    kl: Estimate  # mean of KL(base | model), in nats
    largest_kl: float
    kl_99: float
    median_kl: float
    same_top: Estimate  # share of positions at which both models have the same most likely token
    rms_change: float  # root mean square difference between the probabilities of the text's tokens


def perplexity(
    engine: Engine, text: str, *, window: int = WINDOW_TOKENS, progress: Progress | None = None
) -> Perplexity:
    """Measure perplexity. Raises InvalidRequestError for an invalid window, or a text shorter than two windows."""
    windows = _windows(engine, text, window)
    scored = []
    for number, ids in enumerate(windows):
        scored.append(_log_probabilities(_second_half(engine, ids), ids))
        if progress is not None:
            progress(number + 1, len(windows))
    return _perplexity(np.concatenate(scored))


def divergence(
    engine: Engine, base: Engine, text: str, *, window: int = WINDOW_TOKENS, progress: Progress | None = None
) -> Divergence:
    """Compare two models. Raises InvalidRequestError as `perplexity` does, and if the tokenizations differ."""
    windows = _windows(engine, text, window)
    if windows != _windows(base, text, window):
        raise InvalidRequestError("the two models tokenize the text differently")
    model_logs, base_logs, kl, same = [], [], [], []
    for number, ids in enumerate(windows):
        logits, base_logits = _second_half(engine, ids), _second_half(base, ids)
        model_logs.append(_log_probabilities(logits, ids))
        base_logs.append(_log_probabilities(base_logits, ids))
        kl.append(_divergences(logits, base_logits))
        same.append(logits.argmax(axis=1) == base_logits.argmax(axis=1))
        if progress is not None:
            progress(number + 1, len(windows))
    model, reference, distances = np.concatenate(model_logs), np.concatenate(base_logs), np.concatenate(kl)
    return Divergence(
        base=_perplexity(reference),
        model=_perplexity(model),
        kl=Estimate.of(distances),
        largest_kl=float(distances.max()),
        kl_99=float(np.quantile(distances, 0.99)),
        median_kl=float(np.median(distances)),
        same_top=Estimate.of(np.concatenate(same).astype(np.float64)),
        rms_change=float(np.sqrt(np.mean(np.square(np.exp(model) - np.exp(reference))))),
    )


def _windows(engine: Engine, text: str, window: int) -> list[list[int]]:
    most = engine.info.context_tokens
    if not LEAST_WINDOW <= window <= most:
        raise InvalidRequestError(
            f"the window must have {LEAST_WINDOW} to {most:,} tokens (the context length), not {window}"
        )
    ids = engine.tokenize(text)
    if len(ids) < 2 * window:
        raise InvalidRequestError(f"the text has {len(ids):,} tokens; at least two windows of {window} are required")
    return [ids[at : at + window] for at in range(0, len(ids) - window + 1, window)]


def _second_half(engine: Engine, ids: Sequence[int]) -> Floats:
    # Returns the logits that predict the scored tokens; shape (len(ids) - len(ids) // 2 - 1, vocabulary size).
    return engine.logits(ids)[len(ids) // 2 : -1]


def _log_probabilities(logits: Floats, ids: Sequence[int]) -> Doubles:
    targets = np.array(ids[len(ids) // 2 + 1 :])
    return np.concatenate(
        [_log_softmax(logits[at])[np.arange(len(targets[at])), targets[at]] for at in _row_slices(len(logits))]
    )


def _divergences(logits: Floats, base_logits: Floats) -> Doubles:
    # Returns KL(base | model) at each position.
    rows = []
    for at in _row_slices(len(logits)):
        model_logs, base_logs = _log_softmax(logits[at]), _log_softmax(base_logits[at])
        rows.append((np.exp(base_logs) * (base_logs - model_logs)).sum(axis=1))
    return np.concatenate(rows)


def _row_slices(rows: int) -> list[slice]:
    return [slice(at, at + ROWS_AT_ONCE) for at in range(0, rows, ROWS_AT_ONCE)]


def _log_softmax(logits: Floats) -> Doubles:
    shifted = logits.astype(np.float64) - logits.max(axis=1, keepdims=True)
    logs: Doubles = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return logs


def _perplexity(log_probabilities: Doubles) -> Perplexity:
    mean = Estimate.of(-log_probabilities)
    try:
        value = math.exp(mean.value)
    except OverflowError:  # the mean exceeds 709 nats per token
        value = math.inf
    return Perplexity(len(log_probabilities), Estimate(value, value * mean.error))
