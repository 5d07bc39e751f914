"""Sampling, stopping and grammar fields, as spelled by OpenAI, llama.cpp and vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from notso.smollm3 import MAX_BREAKERS, MAX_LOGIT_BIAS, MAX_STOP_STRINGS, MAX_STOP_TOKENS, Grammar, SamplingParams
from notso.web.api.request_fields.fields import (
    TELLS,
    Fields,
    Hint,
    Name,
    Notes,
    Text,
    hint,
    inert,
    invalid,
    refused,
    schema_grammar,
    works,
)
from notso.web.edge.api_error import api_error_of
from notso.web.values.strict_fields import at_most


def whole(given: Any) -> Any:
    """Convert integral floats to int; reject booleans."""
    if isinstance(given, bool):
        raise ValueError("it should be a number")
    return int(given) if isinstance(given, float) and given.is_integer() else given


Off = Annotated[Literal[0, -1], BeforeValidator(whole)]
OffBelow0 = Annotated[Literal[-1], BeforeValidator(whole)]
Off0 = Annotated[Literal[0], BeforeValidator(whole)]
Off1 = Annotated[Literal[1], BeforeValidator(whole)]
Whole = Annotated[int, BeforeValidator(whole)]
Number = int | float


class AbsentSamplerFields(Fields):
    """Samplers and options not implemented, with their neutral value."""

    tfs_z: Off1 | None = None
    top_a: Off0 | None = None
    dynatemp_range: Off0 | None = None
    dynatemp_exponent: Annotated[Number | None, Hint(done=(1,))] = None
    mirostat_tau: Annotated[Number | None, Hint()] = None
    mirostat_eta: Annotated[Number | None, Hint()] = None
    smoothing_factor: Off0 | None = None
    guidance_scale: Off1 | None = None
    length_penalty: Off1 | None = None
    no_repeat_ngram_size: Off0 | None = None
    top_n_sigma: Off | None = None
    adaptive_target: OffBelow0 | None = None
    adaptive_decay: Annotated[Number | None, Hint()] = None
    min_keep: Off0 | None = None
    n_indent: Off0 | None = None
    t_max_predict_ms: Off | None = None
    id_slot: Annotated[int | None, Hint(done=(-1,))] = None
    n_keep: Annotated[int | None, Hint(done=(0,))] = None
    n_discard: Annotated[int | None, Hint(done=(0,))] = None
    n_cache_reuse: Annotated[int | None, Hint(done=(0,))] = None
    sse_ping_interval: Annotated[Number | None, Hint()] = None
    backend_sampling: Annotated[bool | None, Hint(done=(False,))] = None
    samplers: Annotated[Any, Hint()] = None
    sampler_order: Annotated[Any, Hint()] = None
    sampler_priority: Annotated[Any, Hint()] = None
    temperature_last: Annotated[bool | None, Hint(done=(False,))] = None
    smoothing_curve: Annotated[Number | None, Hint()] = None
    skew: Off0 | None = None
    typical: Off1 | None = None
    epsilon_cutoff: Off0 | None = None
    eta_cutoff: Off0 | None = None
    penalty_alpha: Off0 | None = None
    encoder_repetition_penalty: Off1 | None = None
    num_beams: Off1 | None = None
    use_beam_search: Literal[False] | None = None
    early_stopping: Annotated[bool | None, Hint(done=(False,))] = None
    best_of: Off1 | None = None
    skip_special_tokens: Literal[True] | None = None
    spaces_between_special_tokens: Annotated[bool | None, Hint(done=(True,))] = None
    include_stop_str_in_output: Literal[False] | None = None
    add_bos_token: Annotated[bool | None, Hint()] = None
    ban_eos_token: Literal[False] | None = None
    truncation_length: Annotated[int | None, Hint()] = None
    truncate_prompt_tokens: Annotated[int | None, Hint()] = None


_ORDER = "the order is penalties, temperature, top_k, typical_p, top_p, min_p, xtc"

ABSENT_NOTES: Notes = {
    "tfs_z": inert("1: off", "use top_p, top_k or min_p"),
    "top_a": inert("0: off", "use min_p"),
    "dynatemp_range": inert("0: off", "use temperature"),
    "dynatemp_exponent": hint("the range is 0", "1"),
    "mirostat_tau": hint("mirostat is off"),
    "mirostat_eta": hint("mirostat is off"),
    "smoothing_factor": inert("0: off", "use temperature or min_p"),
    "guidance_scale": inert("1: off", "ask for it in the messages"),
    "length_penalty": inert("1: off", "use max_tokens"),
    "no_repeat_ngram_size": inert("0: off", "use repeat_penalty or dry_multiplier"),
    "top_n_sigma": inert("0 or -1: off", "use top_k, top_p or min_p"),
    "adaptive_target": inert("-1: off", "use temperature, top_p or min_p"),
    "adaptive_decay": hint("its sampler is off"),
    "min_keep": inert("0: off", "leave it out"),
    "n_indent": inert("0: off", "leave it out"),
    "t_max_predict_ms": inert("0 or -1: off", "responses must not depend on the machine's speed; use max_tokens"),
    "id_slot": hint("the cache is shared by all slots", "-1"),
    "n_keep": hint("prompts are never truncated", "0"),
    "n_discard": hint("prompts are never truncated", "0"),
    "n_cache_reuse": hint("the cache is automatic", "0"),
    "sse_ping_interval": hint("a comment is sent every 15 s"),
    "backend_sampling": hint("there is only one sampler", "false"),
    "samplers": hint(_ORDER),
    "sampler_order": hint(_ORDER),
    "sampler_priority": hint(_ORDER),
    "temperature_last": hint(_ORDER, "false"),
    "smoothing_curve": hint("its sampler is off"),
    "skew": inert("0: off", "use top_p or min_p"),
    "typical": inert("1: off", "use typical_p"),
    "epsilon_cutoff": inert("0: off", "use min_p"),
    "eta_cutoff": inert("0: off", "use min_p"),
    "penalty_alpha": inert("0: off", "use temperature, top_p or min_p"),
    "encoder_repetition_penalty": inert("1: off", "use repeat_penalty"),
    "num_beams": inert("1: off", "beam search is not available; use n"),
    "use_beam_search": inert("false", "beam search is not available; use n"),
    "early_stopping": hint("beam search is not available", "false"),
    "best_of": inert("1", "use n"),
    "skip_special_tokens": inert("true", "control tokens are never returned"),
    "spaces_between_special_tokens": hint("control tokens are never returned", "true"),
    "include_stop_str_in_output": inert("false", "the event or field `stop` reports the stop string"),
    "add_bos_token": hint("the model has no begin-of-text token"),
    "ban_eos_token": inert("false", "use ignore_eos"),
    "truncation_length": hint("the context is the server's (`--context`)"),
    "truncate_prompt_tokens": hint("a prompt that is too long is refused"),
}


MIROSTAT_ADVICE = (
    "it makes tokens depend on the probabilities of earlier ones, which would break reproducibility; use min_p, "
    "typical_p or top_p"
)


def _as_list(given: Any) -> Any:
    # text-generation-webui and its clients send the list as JSON text.
    if not isinstance(given, str):
        return given
    try:
        return json.loads(given if given.lstrip().startswith("[") else f"[{given}]")
    except (ValueError, RecursionError):
        raise ValueError("it should be a list of texts") from None


class RarerSamplingFields(Fields):
    """Less common sampling fields; the engine checks their ranges."""

    typical_p: float | None = None
    xtc_probability: float | None = None
    xtc_threshold: float | None = None
    dry_multiplier: float | None = None
    dry_base: float | None = None
    dry_allowed_length: int | None = None
    dry_penalty_last_n: int | None = None
    dry_sequence_breakers: (
        Annotated[list[Text], Field(max_length=MAX_BREAKERS, fail_fast=True), BeforeValidator(_as_list)] | None
    ) = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    repeat_last_n: Annotated[int, Field(ge=-1)] | None = None
    mirostat: Literal[0] | None = None


RARER_NOTES: Notes = {
    "typical_p": works("above 0 to 1; 1 is off; after `top_k`, before `top_p`"),
    "xtc_probability": works(
        "0 to 1, 0 is off: the probability of removing all but the least likely of the tokens above `xtc_threshold`, "
        "after the other filters"
    ),
    "xtc_threshold": works("0 to 1; default 0.1; above 0.5 nothing is removed"),
    "dry_multiplier": works("0 to 100, 0 is off: penalizes tokens that extend a repetition, as in llama.cpp"),
    "dry_base": works("1 to 100; default 1.75"),
    "dry_allowed_length": works("repetitions up to this length are not penalized; default 2"),
    "dry_penalty_last_n": works("tokens searched for repetitions; default -1: all; 0 is off"),
    "dry_sequence_breakers": works(
        f'up to {MAX_BREAKERS} texts that end a repetition; default: newline, `:`, `"` and `*`'
    ),
    "min_tokens": works("minimum tokens, including reasoning, before the response may end; not with a grammar"),
    "ignore_eos": works("true: continue past the end of the response, as in llama.cpp; not with a grammar"),
    "stop_token_ids": works(f"up to {MAX_STOP_TOKENS} token ids that end the response; not returned"),
    "repeat_last_n": works("tokens considered by the penalties; default 256; -1: all; 0: none"),
    "mirostat": inert("0: off", MIROSTAT_ADVICE),
}

_SAME = tuple(name for name in RARER_NOTES if name not in ("repeat_last_n", "mirostat"))
NAMES = {"penalty_window": "repeat_last_n"}
"""Engine parameter -> API field."""
_PENALTIES = ("repetition_penalty", "frequency_penalty", "presence_penalty")


def with_rarer(fields: RarerSamplingFields, chosen: dict[str, Any]) -> dict[str, Any]:
    """Add the less common parameters."""
    rarer = {name: getattr(fields, name) for name in _SAME}
    for name in ("dry_sequence_breakers", "stop_token_ids"):
        rarer[name] = None if rarer[name] is None else tuple(rarer[name])
    # A penalty over no token is none.
    if fields.repeat_last_n == 0:
        return chosen | rarer | dict.fromkeys(_PENALTIES)
    return chosen | rarer | {"penalty_window": 0 if fields.repeat_last_n == -1 else fields.repeat_last_n}


MAX_CHOICES = 64
MAX_PROCESSORS = 8
MAX_WORK = 4_000_000
"""Limit of n x max_tokens x log probabilities per token: the response size that a small request may cause."""
ANY_LENGTH = -1
"""`max_tokens` for as many as fit, as in llama.cpp and LM Studio."""
MOST_TOKENS = 131_072
"""Longest possible answer: the longest context of the model."""

TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class StreamOptions(Fields):
    """Additional content of a stream."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, Hint(done=(False,))] = None


class SamplingFields(RarerSamplingFields, AbsentSamplerFields):
    """Sampling fields; the engine checks their ranges."""

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
    "model": works("a name listed by `GET /v1/models`; optional"),
    "temperature": works("0 to 2; 0 is greedy; default 0.6"),
    "top_p": works("0 to 1; 0 is greedy; default 0.95"),
    "top_k": works("0 or -1 is off"),
    "min_p": works("0 to 1, relative to the most likely token; 0 is off"),
    "repeat_penalty": works("over the last 256 tokens; 1 is off"),
    "repetition_penalty": works("alias of `repeat_penalty`"),
    "frequency_penalty": works("-2 to 2, over the last 256 tokens"),
    "presence_penalty": works("-2 to 2, over the last 256 tokens"),
    "stop": works(f"a text, or up to {MAX_STOP_STRINGS}, of up to 256 characters each; not returned"),
    "seed": works("64 bits; the same seed and input give the same text"),
    "n": works("number of choices, at most the server's concurrent responses; with a seed, choice i has seed + i"),
    "logit_bias": works("token id to -100..100, up to 1,024"),
    "stream": works("events with chunks"),
    "stream_options": works("`include_usage` adds a final chunk with token counts"),
    "return_progress": works("chunks with `prompt_progress` during prefill"),
    "timings_per_token": works("chunks contain `timings` so far"),
    "cache_prompt": works("false processes the whole prompt again"),
    "logits_processors": works("up to 8 names of plugins' logits processors, applied in this order"),
    "user": hint("describes the caller"),
    **RARER_NOTES,
    **ABSENT_NOTES,
    "n_predict": works("llama.cpp's name of `max_tokens`"),
    "max_new_tokens": works("alias of `max_tokens`"),
    "do_sample": works("false is greedy"),
}

WITHIN_SAMPLING: Notes = {
    "include_obfuscation": hint("streams are not padded", "false"),
}
"""Notes on nested fields."""


def sampling_of(
    fields: SamplingFields, max_tokens: int | None, thinking_budget: int | None = None, top_logprobs: int | None = None
) -> tuple[SamplingParams, ...]:
    """Return the parameters of each choice, which differ in the seed. Raise ApiError (400) naming the field."""
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
    # Choices with the same seed would be identical. Seeds past the range wrap around.
    seeds = [None if fields.seed is None else _wrapped(fields.seed + index) for index in range(choices)]
    names = NAMES if fields.n_predict is None else NAMES | {"max_tokens": "n_predict"}
    return tuple(checked_params(names, seed=seed, **given) for seed in seeds)


def checked_params(names: Mapping[str, str], **given: Any) -> SamplingParams:
    """Create engine parameters. Raise ApiError (400) with the API's field name."""
    try:
        return SamplingParams(**given, given=tuple(given))
    except ValueError as error:  # InvalidRequestError with the parameter's name
        raise api_error_of(error).called(names) from None


def either(fields: Fields, *names: str) -> Any:
    """Return the value of a field with several spellings. Raise ApiError if they differ."""
    given = [(name, value) for name in names if (value := getattr(fields, name)) is not None]
    for name, value in given:
        if value != given[0][1]:
            raise invalid(name, f"{given[0][0]} and {name} are aliases: use only one")
    return given[0][1] if given else None


def check_stream_options(fields: SamplingFields) -> None:
    """Raise ApiError for stream options without a stream."""
    if not fields.stream and fields.stream_options is not None:
        raise invalid("stream_options", "stream_options needs stream: true")


def _wrapped(seed: int) -> int:
    return seed if seed < 1 << 64 else seed - (1 << 64)


MAX_MESSAGES = 2048


MAX_TOOLS = 128


MAX_PROMPTS = 64


MAX_PROMPT_IDS = 1 << 18


MAX_GRAMMAR_CHOICES = 1_000

Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_GRAMMAR_CHOICES, fail_fast=True)]
Schema = dict[str, Any] | Text
"""A JSON schema as object or text."""

_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


class StructuredOutputs(Fields):
    """vLLM's structured outputs, of which one may be given."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None


class GrammarFields(SamplingFields):
    """Grammar fields, of which one may be given. A `grammar` with `::=` rules is GBNF, otherwise Lark."""

    grammar: Text | None = None
    json_schema: Schema | None = None
    regex: Text | None = None
    choice: Choices | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    structured_outputs: StructuredOutputs | None = None


GRAMMAR_NOTES: Notes = SAMPLING_NOTES | {
    "grammar": works("GBNF (llama.cpp's notation), or Lark's if no rule contains `::=`"),
    "json_schema": works("llama.cpp's: a JSON schema, see structured-output.md"),
    "regex": works("a regular expression that must match the whole answer"),
    "choice": works(f"a list of up to {MAX_GRAMMAR_CHOICES:,} texts, one of which is the answer"),
    "guided_json": works("vLLM's name of `json_schema`"),
    "guided_regex": works("vLLM's name of `regex`"),
    "guided_choice": works("vLLM's name of `choice`"),
    "guided_grammar": works("vLLM's name of `grammar`"),
    "structured_outputs": works("vLLM's: one of `json`, `regex`, `choice`, `grammar`, `json_object`"),
    "guided_decoding_backend": refused("remove it: there is only one"),
    "grammar_lazy": refused("remove it: a grammar applies from the first token of the answer"),
    "grammar_triggers": refused("remove it: a grammar applies from the first token of the answer"),
    "structural_tag": refused("use tools with strict: true"),
}
"""Includes the sampling notes."""


def grammar_of(fields: GrammarFields, format_grammar: Grammar | None = None) -> tuple[Grammar | None, str]:
    """Return the grammar of the answer and the field it came from. Raise ApiError (400) if invalid or ambiguous."""
    asked = fields.structured_outputs
    given: dict[str, Grammar | None] = {
        "response_format": format_grammar,
        "grammar": _written(fields.grammar),
        "json_schema": _schema("json_schema", fields.json_schema),
        "regex": _expression(fields.regex),
        "choice": _one_of(fields.choice),
        "guided_json": _schema("guided_json", fields.guided_json),
        "guided_regex": _expression(fields.guided_regex),
        "guided_choice": _one_of(fields.guided_choice),
        "guided_grammar": _written(fields.guided_grammar),
    }
    if asked is not None:
        given |= {
            "structured_outputs.json": _schema("structured_outputs.json", asked.json_),
            "structured_outputs.regex": _expression(asked.regex),
            "structured_outputs.choice": _one_of(asked.choice),
            "structured_outputs.grammar": _written(asked.grammar),
            "structured_outputs.json_object": Grammar("json_object") if asked.json_object else None,
        }
    found = [(grammar, name) for name, grammar in given.items() if grammar is not None]
    if len(found) > 1:
        raise invalid(found[1][1], f"{found[0][1]} and {found[1][1]} both constrain the answer: use only one")
    return found[0] if found else (None, "response_format")


def _written(source: str | None) -> Grammar | None:
    if not source:  # llama.cpp's clients send an empty string for none
        return None
    return Grammar("gbnf" if _GBNF_RULE.search(source) else "lark", source)


def _schema(param: str, schema: Schema | None) -> Grammar | None:
    if schema is None or isinstance(schema, str):
        return Grammar("json_schema", schema) if schema else None
    return schema_grammar(param, schema)


def _expression(expression: str | None) -> Grammar | None:
    return Grammar("regex", expression) if expression else None


def _one_of(choices: list[str] | None) -> Grammar | None:
    return None if choices is None else Grammar("choice", json.dumps(choices))
