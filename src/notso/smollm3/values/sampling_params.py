"""What a request may ask of the sampler, checked once and frozen."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from notso.smollm3.errors import InvalidRequestError

MAX_STOP_STRINGS = 4
MAX_STOP_CHARACTERS = 256
MAX_LOGIT_BIAS = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. Defaults are SmolLM3's generation settings (temperature 0.6, top_p 0.95).

    max_tokens: most tokens of the answer, thinking included; None, or more than are left: what the context holds.
    thinking_budget: most tokens of thinking; then the thought is closed for the model and the answer begins. None: no
        limit but max_tokens.
    temperature: 0..2; 0 is greedy.
    top_p: 0 < p <= 1; top_k: 0 is off; min_p: 0..1, relative to the likeliest token.
    repetition_penalty: > 0, 1 is off; presence_penalty and frequency_penalty: -2..2. All three look at the last
        `penalty_window` tokens of prompt and answer (0 is the whole sequence).
    seed: 64-bit; None draws one. The same seed and input give the same text.
    logit_bias: token id -> -100..100, added to the logits.
    stop: up to 4 strings of up to 256 characters, which end the answer and are not part of it.

    Raises InvalidRequestError, whose `param` names the field.
    """

    max_tokens: int | None = None
    thinking_budget: int | None = None
    temperature: float = 0.6
    top_p: float = 0.95
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    penalty_window: int = 256
    seed: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, 1 << 31)
        if self.thinking_budget is not None:
            _integer("thinking_budget", self.thinking_budget, 0, 1 << 31)
        _number("temperature", self.temperature, 0.0, 2.0)
        _number("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidRequestError("top_p must be above 0 and at most 1", param="top_p")
        _integer("top_k", self.top_k, 0, 1 << 31)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.01, 10.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("penalty_window", self.penalty_window, 0, 1 << 31)
        if self.seed is not None:
            _integer("seed", self.seed, -(1 << 63), (1 << 64) - 1)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidRequestError("logit_bias must map token ids to numbers", param="logit_bias")
        if len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise InvalidRequestError(f"logit_bias holds at most {MAX_LOGIT_BIAS} entries", param="logit_bias")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 1 << 31)
            _number("logit_bias", bias, -100.0, 100.0)
        if isinstance(self.stop, str) or not isinstance(self.stop, Iterable):
            raise InvalidRequestError("stop must be a sequence of strings", param="stop")
        object.__setattr__(self, "stop", tuple(self.stop))
        if len(self.stop) > MAX_STOP_STRINGS:
            raise InvalidRequestError(f"stop holds at most {MAX_STOP_STRINGS} strings", param="stop")
        for text in self.stop:
            if not isinstance(text, str) or not 1 <= len(text) <= MAX_STOP_CHARACTERS:
                raise InvalidRequestError(
                    f"each stop string must have 1 to {MAX_STOP_CHARACTERS} characters", param="stop"
                )


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}", param=name)


def _number(name: str, value: object, low: float, high: float) -> None:
    # Written so that NaN, which compares false with everything, is refused too.
    if isinstance(value, bool) or not isinstance(value, int | float) or not (low <= value <= high):
        raise InvalidRequestError(f"{name} must be a number from {low:g} to {high:g}", param=name)
    if not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be finite", param=name)
