"""The fields that say how tokens are chosen, which chats and plain completions share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from notso.smollm3 import MAX_LOGIT_BIAS, MAX_STOP_STRINGS, SamplingParams
from notso.web.api.request_fields.absent_samplers import ABSENT_NOTES, AbsentSamplerFields, Whole
from notso.web.api.request_fields.field_reader import invalid
from notso.web.api.request_fields.fields import Fields, Name, Notes, Text, hint, works
from notso.web.api.request_fields.hints import TELLS, Hint
from notso.web.api.request_fields.rarer_sampling import NAMES, RARER_NOTES, RarerSamplingFields, with_rarer
from notso.web.edge.api_error import api_error_of
from notso.web.values.strict_fields import at_most

MAX_CHOICES = 64
MAX_PROCESSORS = 8
MAX_WORK = 4_000_000
"""n times max_tokens times all log probabilities of a token: what one request may make of a few bytes."""
ANY_LENGTH = -1
"""Of max_tokens, as llama.cpp and LM Studio have it: what fits."""
MOST_TOKENS = 131_072
"""No answer is longer, whatever max_tokens says: the longest context that the model was made for."""

TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class StreamOptions(Fields):
    """What a stream holds beside the answer."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, Hint(done=(False,))] = None


class SamplingFields(RarerSamplingFields, AbsentSamplerFields):
    """Ranges of the sampler's numbers are the engine's to check."""

    model: Name | None = None
    max_tokens: Whole | None = None
    max_new_tokens: Whole | None = None
    n_predict: Whole | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Whole | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    stop: Text | Annotated[list[Text], Field(fail_fast=True)] | None = None
    seed: Whole | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    do_sample: bool | None = None
    logit_bias: Annotated[dict[TokenId, float], at_most(MAX_LOGIT_BIAS)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    cache_prompt: bool | None = None
    logits_processors: Annotated[list[Name], Field(max_length=MAX_PROCESSORS, fail_fast=True)] | None = None
    user: Annotated[Name | None, TELLS] = None


SAMPLING_NOTES: Notes = {
    "model": works("one of the names that `GET /v1/models` tells; may be left out"),
    "temperature": works("0 to 2; 0 takes the likeliest token; 0.6 if left out"),
    "top_p": works("0 to 1; 0 takes the likeliest token; 0.95 if left out"),
    "top_k": works("0 or -1 is off"),
    "min_p": works("0 to 1, relative to the likeliest token; 0 is off"),
    "repeat_penalty": works("over the last 256 tokens; 1 is off"),
    "repetition_penalty": works("another name of `repeat_penalty`"),
    "frequency_penalty": works("-2 to 2, over the last 256 tokens"),
    "presence_penalty": works("-2 to 2, over the last 256 tokens"),
    "stop": works(f"a text, or up to {MAX_STOP_STRINGS}, of up to 256 characters each; not part of the answer"),
    "seed": works("64 bits; the same seed and input give the same text"),
    "n": works("choices, up to as many as the server writes at a time; with a seed, choice i has seed + i"),
    "logit_bias": works("token id to -100..100, up to 1,024"),
    "stream": works("events with chunks"),
    "stream_options": works("`include_usage` sends a last chunk with the counts"),
    "return_progress": works("chunks with `prompt_progress` while the prompt is read"),
    "timings_per_token": works("chunks carry `timings` of what was written so far"),
    "cache_prompt": works("false reads the whole prompt anew"),
    "logits_processors": works("up to 8 names of what plugins give, which change the logits in this order"),
    "user": hint("tells of the caller"),
    **RARER_NOTES,
    **ABSENT_NOTES,
    "n_predict": works("llama.cpp's name of `max_tokens`"),
    "max_new_tokens": works("another name of `max_tokens`"),
    "do_sample": works("false takes the likeliest token"),
}

WITHIN_SAMPLING: Notes = {
    "include_obfuscation": hint("streams are not padded", "false"),
}
"""Of what lies within those."""


def sampling_of(
    fields: SamplingFields, max_tokens: int | None, thinking_budget: int | None = None, top_logprobs: int | None = None
) -> tuple[SamplingParams, ...]:
    """One for each of the choices (`n`), which differ in their seed. Raises ApiError (400) that names the field."""
    max_tokens = None if max_tokens == ANY_LENGTH else max_tokens
    chosen: dict[str, Any] = {
        "max_tokens": max_tokens,
        "thinking_budget": thinking_budget,
        "temperature": 0.0 if fields.do_sample is False else fields.temperature,
        "top_p": fields.top_p or None,
        "top_k": 1 if fields.top_p == 0 else 0 if fields.top_k == -1 else fields.top_k,
        "min_p": fields.min_p,
        "repetition_penalty": either(fields, "repeat_penalty", "repetition_penalty"),
        "frequency_penalty": fields.frequency_penalty,
        "presence_penalty": fields.presence_penalty,
        "stop": (fields.stop,) if isinstance(fields.stop, str) else fields.stop and tuple(fields.stop),
        "logit_bias": fields.logit_bias and {int(token): bias for token, bias in fields.logit_bias.items()},
    }
    given = {name: value for name, value in with_rarer(fields, chosen).items() if value is not None}
    choices = fields.n or 1
    work = choices * min(max_tokens or 1, MOST_TOKENS) * (1 + (top_logprobs or 0))
    if work > MAX_WORK:
        raise invalid("max_tokens", f"n x max_tokens x (1 + top_logprobs) is {work:,}, at most {MAX_WORK:,}")
    # Choices that shared a seed would be the same text. The last ones of the range wrap round, into the same range.
    seeds = [None if fields.seed is None else _wrapped(fields.seed + index) for index in range(choices)]
    names = NAMES if fields.n_predict is None else NAMES | {"max_tokens": "n_predict"}
    return tuple(checked_params(names, seed=seed, **given) for seed in seeds)


def checked_params(names: Mapping[str, str], **given: Any) -> SamplingParams:
    """The engine's parameters. Raises ApiError (400) that names the field, by one of `names` where there is one."""
    try:
        return SamplingParams(**given, given=tuple(given))
    except ValueError as error:  # InvalidRequestError, which names the field
        raise api_error_of(error).called(names) from None


def either(fields: Fields, *names: str) -> Any:
    """The spellings of one field. Raises ApiError if two are given and differ."""
    given = [(name, value) for name in names if (value := getattr(fields, name)) is not None]
    for name, value in given:
        if value != given[0][1]:
            raise invalid(name, f"{given[0][0]} and {name} mean the same: give one of them")
    return given[0][1] if given else None


def check_stream_options(fields: SamplingFields) -> None:
    """Raises ApiError where there is no stream for the options."""
    if not fields.stream and fields.stream_options is not None:
        raise invalid("stream_options", "stream_options needs stream: true")


def _wrapped(seed: int) -> int:
    return seed if seed < 1 << 64 else seed - (1 << 64)


MAX_MESSAGES = 2048


MAX_TOOLS = 128


MAX_PROMPTS = 64


MAX_PROMPT_IDS = 1 << 18
