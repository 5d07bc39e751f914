"""Validated sampling parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

from notso.smollm3.errors import InvalidRequestError

MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 256
MAX_LOGIT_BIAS = 1024
MAX_STOP_TOKENS = 64
MAX_BREAKERS = 32
MAX_BREAKER_CHARACTERS = 40
DEFAULT_BREAKERS = ("\n", ":", '"', "*")  # llama.cpp's defaults for DRY


def _option(help: str, metavar: str, short: str = "") -> dict[str, str]:
    # For the command line, which offers no option for a field without these.
    return {"help": help, "metavar": metavar, "short": short}


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters. Defaults are SmolLM3's generation settings (temperature 0.6, top_p 0.95).

    max_tokens: limit including reasoning; None: the rest of the context.
    thinking_budget: limit on reasoning, which is then closed; None: only max_tokens.
    temperature: 0..2; 0 is greedy. top_p: 0 < p <= 1; top_k: 0 is off; min_p: 0..1, relative to the likeliest token.
    repetition_penalty: > 0, 1 is off; presence_penalty, frequency_penalty: -2..2; all over the last
        `penalty_window` tokens of prompt and answer (0: all).
    seed: 64-bit; None: random. The same seed and input give the same text.
    logit_bias: token id -> -100..100, added to its logit.
    stop: up to 64 strings of up to 256 characters, excluded from the answer.
    stop_token_ids: up to 64 additional end tokens, excluded from the answer.
    min_tokens: tokens before the answer may end. ignore_eos: mask the model's own end tokens.
    typical_p: 0 < p <= 1, 1 is off; locally typical sampling.
    xtc_probability: chance of removing all but the least likely token above `xtc_threshold` (0 is off; above 0.5 the
        threshold never matches two).
    dry_multiplier: 0 is off. A token that extends a repetition of at least `dry_allowed_length` tokens loses
        dry_multiplier * dry_base ** (length - dry_allowed_length), within the last `dry_penalty_last_n` tokens (-1:
        all, 0: none), and not across `dry_sequence_breakers`.
    given: names of fields that were set although they have the default's value. Other fields with their default's value
        take that of the model file, if it has one (see `with_defaults`).

    Raises InvalidRequestError with the field as `param`.
    """

    max_tokens: int | None = field(
        default=None, metadata=_option("Maximum tokens to generate, including thinking. Default: what fits.", "N", "-n")
    )
    thinking_budget: int | None = field(
        default=None,
        metadata=_option("Maximum tokens of thinking, which then ends. Default: no limit of its own.", "N"),
    )
    temperature: float = field(default=0.6, metadata=_option("Temperature; 0 is greedy.", "0..2", "-t"))
    top_p: float = field(default=0.95, metadata=_option("Nucleus sampling (top-p).", "0..1"))
    top_k: int = field(default=0, metadata=_option("Choose among the N most likely tokens; 0 is off.", "N"))
    min_p: float = field(
        default=0.0,
        metadata=_option("Drop tokens less likely than this share of the most likely one.", "0..1"),
    )
    repetition_penalty: float = field(default=1.0, metadata=_option("Penalty on repeated tokens; 1 is off.", "NUMBER"))
    presence_penalty: float = field(default=0.0, metadata=_option("Penalty on tokens that occurred.", "-2..2"))
    frequency_penalty: float = field(
        default=0.0, metadata=_option("Penalty on tokens by how often they occurred.", "-2..2")
    )
    penalty_window: int = field(default=256, metadata=_option("Tokens that the penalties look back; 0: all.", "N"))
    seed: int | None = field(default=None, metadata=_option("Random seed; the same seed gives the same answer.", "N"))
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = field(default=(), metadata=_option("Stop at this text; repeatable (64 at most).", "TEXT"))
    stop_token_ids: tuple[int, ...] = field(
        default=(), metadata=_option("Stop at this token; repeatable (64 at most).", "ID")
    )
    min_tokens: int = field(default=0, metadata=_option("Minimum tokens before the answer may end.", "N"))
    ignore_eos: bool = field(default=False, metadata=_option("Continue past the model's own end of the answer.", ""))
    typical_p: float = field(default=1.0, metadata=_option("Locally typical sampling; 1 is off.", "0..1"))
    xtc_probability: float = field(
        default=0.0,
        metadata=_option("Chance of dropping all but the least likely token above the XTC threshold.", "0..1"),
    )
    xtc_threshold: float = field(default=0.1, metadata=_option("XTC threshold.", "0..1"))
    dry_multiplier: float = field(
        default=0.0, metadata=_option("DRY penalty on repeated sequences; 0 is off.", "0..100")
    )
    dry_base: float = field(
        default=1.75, metadata=_option("Growth of the DRY penalty with each repeated token.", "1..100")
    )
    dry_allowed_length: int = field(
        default=2, metadata=_option("Length up to which repeated sequences have no DRY penalty.", "N")
    )
    dry_penalty_last_n: int = field(default=-1, metadata=_option("Tokens that DRY looks back; -1: all.", "N"))
    dry_sequence_breakers: tuple[str, ...] = field(
        default=DEFAULT_BREAKERS,
        metadata=_option("Text that ends a sequence for DRY; repeatable (32 at most).", "TEXT"),
    )
    given: tuple[str, ...] = field(default=(), compare=False)

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
            raise InvalidRequestError(f"logit_bias is limited to {MAX_LOGIT_BIAS} entries", param="logit_bias")
        for token, bias in self.logit_bias.items():
            _integer("logit_bias", token, 0, 1 << 31)
            _number("logit_bias", bias, -100.0, 100.0)
        self._texts("stop", MAX_STOP_STRINGS, MAX_STOP_CHARACTERS)
        self._check_end()
        self._check_rarer()

    def with_defaults(self, defaults: Mapping[str, float]) -> SamplingParams:
        """Return a copy in which fields that were not chosen take the values of `defaults`."""
        unset = {
            name: value
            for name, value in defaults.items()
            if name not in self.given and getattr(self, name) == _DEFAULTS[name]
        }
        return replace(self, **unset) if unset else self  # type: ignore[arg-type]

    @property
    def repeats_are_dried(self) -> bool:
        return self.dry_multiplier > 0.0 and self.dry_penalty_last_n != 0

    def _check_end(self) -> None:
        object.__setattr__(self, "stop_token_ids", _listed("stop_token_ids", self.stop_token_ids, "token ids"))
        if len(self.stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequestError(f"stop_token_ids is limited to {MAX_STOP_TOKENS} ids", param="stop_token_ids")
        for token in self.stop_token_ids:
            _integer("stop_token_ids", token, 0, 1 << 31)
        _integer("min_tokens", self.min_tokens, 0, 1 << 31)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens must not be above max_tokens", param="min_tokens")
        if not isinstance(self.ignore_eos, bool):
            raise InvalidRequestError("ignore_eos must be true or false", param="ignore_eos")

    def _check_rarer(self) -> None:
        _number("typical_p", self.typical_p, 0.0, 1.0)
        if self.typical_p == 0.0:
            raise InvalidRequestError("typical_p must be above 0 and at most 1", param="typical_p")
        _number("xtc_probability", self.xtc_probability, 0.0, 1.0)
        _number("xtc_threshold", self.xtc_threshold, 0.0, 1.0)
        _number("dry_multiplier", self.dry_multiplier, 0.0, 100.0)
        _number("dry_base", self.dry_base, 1.0, 100.0)
        _integer("dry_allowed_length", self.dry_allowed_length, 0, 1 << 31)
        _integer("dry_penalty_last_n", self.dry_penalty_last_n, -1, 1 << 31)
        self._texts("dry_sequence_breakers", MAX_BREAKERS, MAX_BREAKER_CHARACTERS)

    def _texts(self, name: str, most: int, most_characters: int) -> None:
        texts = _listed(name, getattr(self, name), "strings")
        object.__setattr__(self, name, texts)
        if len(texts) > most:
            raise InvalidRequestError(f"{name} is limited to {most} strings", param=name)
        for text in texts:
            if not isinstance(text, str) or not 1 <= len(text) <= most_characters:
                raise InvalidRequestError(
                    f"each {name.replace('_', ' ')} string must have 1 to {most_characters} characters", param=name
                )


_DEFAULTS = {each.name: each.default for each in fields(SamplingParams)}


def _listed(name: str, value: object, what: str) -> tuple[Any, ...]:
    if isinstance(value, str) or not isinstance(value, Iterable):
        raise InvalidRequestError(f"{name} must be a sequence of {what}", param=name)
    return tuple(value)


def _integer(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer from {low} to {high}", param=name)


def _number(name: str, value: object, low: float, high: float) -> None:
    # Written to refuse NaN, which compares false with everything.
    if isinstance(value, bool) or not isinstance(value, int | float) or not (low <= value <= high):
        raise InvalidRequestError(f"{name} must be a number from {low:g} to {high:g}", param=name)
    if not math.isfinite(value):
        raise InvalidRequestError(f"{name} must be finite", param=name)
