"""Sampling, stopping and grammar fields, under the names that OpenAI, llama.cpp and vLLM use."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field

from notso.smollm3 import (
    MAX_BREAKERS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKENS,
    PARAMETERS,
    Api,
    Grammar,
    Parameter,
    SamplingParams,
)
from notso.web.api.request_fields.fields import (
    DESCRIBES_CALLER,
    B,
    Fields,
    Label,
    Name,
    Notes,
    Text,
    hint,
    inert,
    invalid_field,
    notes_in,
    refused,
    schema_grammar,
    unsupported_field,
    wire_name,
    with_fields,
    works,
)
from notso.web.edge.errors import api_error_of
from notso.web.values.strict_fields import limit_entries


def to_integer(value: Any) -> Any:
    """Convert integral floats to int. Raises ValueError for booleans."""
    if isinstance(value, bool):
        raise ValueError("it should be a valid integer")
    return int(value) if isinstance(value, float) and value.is_integer() else value


Off = Annotated[Literal[0, -1], BeforeValidator(to_integer)]
OffBelow0 = Annotated[Literal[-1], BeforeValidator(to_integer)]
Off0 = Annotated[Literal[0], BeforeValidator(to_integer)]
Off1 = Annotated[Literal[1], BeforeValidator(to_integer)]
Whole = Annotated[int, BeforeValidator(to_integer)]
Number = int | float


def to_prompt_limit(truncate_prompt_tokens: int | None) -> int | None:
    # Prompts that exceed the limit are refused, not cut. A negative value sets no limit, because prompts that do not
    # fit the context are refused anyway.
    return None if truncate_prompt_tokens is None or truncate_prompt_tokens < 0 else truncate_prompt_tokens


_ORDER = "the order is fixed: penalties, temperature, top_k, typical_p, top_p, min_p, xtc"
_STOP_OUTPUT = inert("false", "append the stop string in the client; /completion reports it as `stopping_word`")
MIROSTAT_ADVICE = (
    "it would break reproducibility, because tokens would depend on the probabilities of earlier ones; use min_p, "
    "typical_p or top_p"
)


class UnsupportedSamplerFields(Fields):
    """Samplers and options that are not implemented. Neutral values are accepted; hints are ignored."""

    tfs_z: Annotated[Off1 | None, inert("1: off", "use top_p, top_k or min_p")] = None
    top_a: Annotated[Off0 | None, inert("0: off", "use min_p")] = None
    dynatemp_range: Annotated[Off0 | None, inert("0: off", "use temperature")] = None
    dynatemp_exponent: Annotated[Number | None, hint("no effect, because dynatemp_range must be 0", "1", done=(1,))] = (
        None
    )
    mirostat_tau: Annotated[Number | None, hint("no effect, because mirostat is not available")] = None
    mirostat_eta: Annotated[Number | None, hint("no effect, because mirostat is not available")] = None
    smoothing_factor: Annotated[Off0 | None, inert("0: off", "use temperature or min_p")] = None
    guidance_scale: Annotated[Off1 | None, inert("1: off", "describe in the messages what to avoid")] = None
    length_penalty: Annotated[Off1 | None, inert("1: off", "use max_tokens")] = None
    no_repeat_ngram_size: Annotated[Off0 | None, inert("0: off", "use repeat_penalty or dry_multiplier")] = None
    top_n_sigma: Annotated[Off | None, inert("0 or -1: off", "use top_k, top_p or min_p")] = None
    adaptive_target: Annotated[OffBelow0 | None, inert("-1: off", "use temperature, top_p or min_p")] = None
    adaptive_decay: Annotated[Number | None, hint("no effect, because adaptive_target must be -1")] = None
    min_keep: Annotated[Off0 | None, inert("0: off", "remove this field")] = None
    n_indent: Annotated[Off0 | None, inert("0: off", "remove this field")] = None
    t_max_predict_ms: Annotated[
        Off | None, inert("0 or -1: off", "responses must not depend on the machine's speed; use max_tokens")
    ] = None
    id_slot: Annotated[
        int | None, hint("requests are not assigned to slots; they share one cache", "-1", done=(-1,))
    ] = None
    n_keep: Annotated[int | None, hint("prompts are never truncated", "0", done=(0,))] = None
    n_discard: Annotated[int | None, hint("prompts are never truncated", "0", done=(0,))] = None
    n_cache_reuse: Annotated[int | None, hint("cached tokens are reused automatically", "0", done=(0,))] = None
    sse_ping_interval: Annotated[Number | None, hint("a comment is sent after 15 s without output")] = None
    backend_sampling: Annotated[bool | None, hint("there is only one sampler", "false", done=(False,))] = None
    samplers: Annotated[Any, hint(_ORDER)] = None
    sampler_order: Annotated[Any, hint(_ORDER)] = None
    sampler_priority: Annotated[Any, hint(_ORDER)] = None
    temperature_last: Annotated[bool | None, hint(_ORDER, "false", done=(False,))] = None
    smoothing_curve: Annotated[Number | None, hint("no effect, because smoothing_factor must be 0")] = None
    skew: Annotated[Off0 | None, inert("0: off", "use top_p or min_p")] = None
    typical: Annotated[Off1 | None, inert("1: off", "use typical_p")] = None
    epsilon_cutoff: Annotated[Off0 | None, inert("0: off", "use min_p")] = None
    eta_cutoff: Annotated[Off0 | None, inert("0: off", "use min_p")] = None
    penalty_alpha: Annotated[Off0 | None, inert("0: off", "use temperature, top_p or min_p")] = None
    encoder_repetition_penalty: Annotated[Off1 | None, inert("1: off", "use repeat_penalty")] = None
    num_beams: Annotated[Off1 | None, inert("1: off", "beam search is not available; use n")] = None
    use_beam_search: Annotated[Literal[False] | None, inert("false", "beam search is not available; use n")] = None
    early_stopping: Annotated[bool | None, hint("beam search is not available", "false", done=(False,))] = None
    best_of: Annotated[Whole | None, inert("1, or the value of `n`", "use n")] = None
    skip_special_tokens: Annotated[Literal[True] | None, inert("true", "control tokens are never returned")] = None
    spaces_between_special_tokens: Annotated[
        bool | None, hint("control tokens are never returned", "true", done=(True,))
    ] = None
    include_stop_str_in_output: Annotated[Literal[False] | None, _STOP_OUTPUT] = None
    add_bos_token: Annotated[bool | None, hint("the model has no begin-of-text token")] = None
    ban_eos_token: Annotated[Literal[False] | None, inert("false", "use ignore_eos")] = None
    truncation_length: Annotated[int | None, hint("the server sets the context length (`--context`)")] = None
    truncate_prompt_tokens: Annotated[
        int | None, works("prompts with more tokens are refused, never cut; -1: only the context limits them")
    ] = None
    mirostat: Annotated[Literal[0] | None, inert("0: off", MIROSTAT_ADVICE)] = None
    mirostat_mode: Annotated[Literal[0] | None, inert("0: off", MIROSTAT_ADVICE)] = None
    tfs: Annotated[Off1 | None, inert("1: off", "use top_p, top_k or min_p")] = None
    dynamic_temperature: Annotated[Literal[False] | None, inert("false", "use temperature")] = None
    no_stop_trim: Annotated[Literal[False] | None, _STOP_OUTPUT] = None


def _parse_list(value: Any) -> Any:
    # text-generation-webui and its clients send the list as JSON text, with or without brackets.
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value if value.lstrip().startswith("[") else f"[{value}]")
    except (ValueError, RecursionError):
        raise ValueError("it should be a list of strings") from None


def with_sampling(api: Api) -> Callable[[type[B]], type[B]]:
    """Return a decorator that adds the API's sampling parameters that a body does not declare."""

    def extended(body: type[B]) -> type[B]:
        fields = {
            name: _kind(parameter) | None
            for parameter in PARAMETERS.values()
            for name in parameter.names(api)
            if name not in body.model_fields
        }
        return with_fields(body, fields)

    return extended


def _kind(parameter: Parameter) -> Any:
    if parameter.is_list:
        item: Any = Text if parameter.kind is str else parameter.kind
        return Annotated[list[item], Field(fail_fast=True)]
    return Whole if parameter.kind is int else parameter.kind


def sampling_notes(api: Api) -> Notes:
    return {name: works(text) for each in PARAMETERS.values() for name, text in each.names(api).items()}


def sampling_names(api: Api, within: str = "") -> dict[str, str]:
    return {name: within + next(iter(names)) for name, each in PARAMETERS.items() if (names := each.names(api))}


def read_parameters(fields: BaseModel, api: Api) -> dict[str, Any]:
    """Return a body's values, keyed by engine parameter. Raises ApiError (400) for contradictory aliases."""
    values = {name: get_by_alias(fields, *names) for name, each in PARAMETERS.items() if (names := each.names(api))}
    for name, value in values.items():
        if PARAMETERS[name].is_list and value is not None:
            values[name] = (value,) if isinstance(value, str) else tuple(value)
    if values["top_k"] == -1:  # -1 turns top_k off, as in vLLM
        values["top_k"] = 0
    if values["top_p"] == 0:  # keep only the most likely token (greedy decoding)
        values |= {"top_p": None, "top_k": 1}
    if values.get("penalty_window") == 0:  # a window of no tokens turns penalties off
        values |= dict.fromkeys(("penalty_window", "repetition_penalty", "frequency_penalty", "presence_penalty"))
    elif values.get("penalty_window") == -1:  # in requests, -1 means all tokens; in the engine, 0 does
        values["penalty_window"] = 0
    if values.get("seed") == RANDOM_SEED:
        values["seed"] = None
    return values


MAX_CHOICES = 64
MAX_PROCESSORS = 8
ANY_LENGTH = -1
"""Value of `max_tokens` that allows as many tokens as fit the context, as in llama.cpp and LM Studio."""
RANDOM_SEED = -1
"""Value of `seed` that requests a random seed, as in llama.cpp, vLLM and Ollama."""

TokenId = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]


class StreamOptions(Fields):
    """Options for additional content in a stream."""

    include_usage: bool | None = None
    include_obfuscation: Annotated[bool | None, hint("streams are not padded", "false", done=(False,))] = None


class UsageOptions(Fields):
    """OpenRouter's form of `stream_options.include_usage`."""

    include: bool | None = None


@with_sampling("openai")
class SamplingFields(UnsupportedSamplerFields):
    """Sampling fields; the engine checks most ranges."""

    model: Label | None = None
    max_tokens: Whole | None = None
    max_new_tokens: Whole | None = None
    n_predict: Whole | None = None
    stop: Text | Annotated[list[Text], Field(fail_fast=True)] | None = None
    stopping_strings: Text | Annotated[list[Text], Field(fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[int], Field(max_length=MAX_STOP_TOKENS, fail_fast=True)] | None = None
    seed: Whole | None = None
    n: Annotated[Whole, Field(ge=1, le=MAX_CHOICES)] | None = None
    do_sample: bool | None = None
    logit_bias: Annotated[dict[TokenId, float], limit_entries(MAX_LOGIT_BIAS)] | None = None
    repeat_last_n: Annotated[Whole, Field(ge=-1)] | None = None
    dry_sequence_breakers: (
        Annotated[list[Text], Field(max_length=MAX_BREAKERS, fail_fast=True), BeforeValidator(_parse_list)] | None
    ) = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    usage: UsageOptions | None = None
    return_progress: bool | None = None
    timings_per_token: bool | None = None
    cache_prompt: bool | None = None
    logits_processors: Annotated[list[Name], Field(max_length=MAX_PROCESSORS, fail_fast=True)] | None = None
    user: Annotated[Label | None, DESCRIBES_CALLER] = None

    @property
    def common(self) -> dict[str, Any]:
        """Return the ApiRequest fields that depend only on these fields."""
        return {
            "model": self.model,
            "stream": bool(self.stream),
            "fresh": self.cache_prompt is False,
            "prompt_limit": to_prompt_limit(self.truncate_prompt_tokens),
            "include_usage": any(
                (self.stream_options and self.stream_options.include_usage, self.usage and self.usage.include)
            ),
            "return_progress": bool(self.return_progress),
            "timings_per_token": bool(self.timings_per_token),
        }


SAMPLING_NOTES: Notes = {
    "model": works("a name listed by `GET /v1/models`; optional"),
    **sampling_notes("openai"),
    "n": works(
        "number of choices, at most the server's limit of concurrent responses; with a seed, choice i (from 0) uses "
        "seed + i"
    ),
    "stream": works("true: stream the response in chunks"),
    "stream_options": works("`include_usage` adds a final chunk with token counts"),
    "usage": works("OpenRouter's form of `stream_options`: an object with `include`"),
    "return_progress": works("true: stream chunks with `prompt_progress` while the prompt is processed"),
    "timings_per_token": works("true: each chunk contains the `timings` so far"),
    "cache_prompt": works("false: process the whole prompt, even if it is cached"),
    "logits_processors": works("names of up to 8 logits processors of plugins, applied in this order"),
    "user": DESCRIBES_CALLER,
    **notes_in(SamplingFields),
    "n_predict": works("llama.cpp's name for `max_tokens`"),
    "max_new_tokens": works("alias of `max_tokens`"),
    "stopping_strings": works("text-generation-webui's name for `stop`"),
    "do_sample": works("false: greedy decoding"),
    "allowed_token_ids": refused("use a grammar, or logit_bias"),
    "bad_words": refused("use logit_bias"),
    "custom_token_bans": refused("use logit_bias"),
    "custom_logit_processor": refused("use logits_processors, which plugins provide"),
    "lora_path": refused("send the adapter's name as model"),
}

WITHIN_SAMPLING: Notes = notes_in(StreamOptions)
"""Notes on nested fields."""


def to_sampling_params(
    fields: SamplingFields, max_tokens: int | None, thinking_budget: int | None = None
) -> tuple[SamplingParams, ...]:
    """Return the parameters for each choice, which differ only in the seed. Raises ApiError (400)."""
    max_tokens = None if max_tokens == ANY_LENGTH else max_tokens
    values = read_parameters(fields, "openai") | {"max_tokens": max_tokens, "thinking_budget": thinking_budget}
    if stops := get_by_alias(fields, "stop", "stopping_strings"):
        values["stop"] = (stops,) if isinstance(stops, str) else tuple(stops)
    if fields.do_sample is False:
        values["temperature"] = 0.0
    if values["logit_bias"]:
        values["logit_bias"] = {int(token): bias for token, bias in values["logit_bias"].items()}
    choices = fields.n or 1
    if fields.best_of not in (None, 1, choices):
        raise unsupported_field("best_of", "this value of best_of is not supported: use n")
    # Each choice has its own seed, because equal seeds would produce equal choices. Seeds beyond 64 bits wrap around.
    seed = values["seed"]
    seeds = [None if seed is None else _wrap_seed(seed + index) for index in range(choices)]
    names = sampling_names("openai") | ({} if fields.n_predict is None else {"max_tokens": "n_predict"})
    return tuple(create_sampling_params(names, values | {"seed": seed}) for seed in seeds)


def create_sampling_params(names: Mapping[str, str], values: Mapping[str, Any]) -> SamplingParams:
    """Create engine parameters from the values that are not None. Raises ApiError (400) with the API's field name."""
    # Empty stop strings are ignored, as in llama.cpp. Programs send them for empty input fields.
    values = {**values, "stop": tuple(filter(None, values.get("stop") or ())) or None}
    chosen = {name: value for name, value in values.items() if value is not None}
    try:
        return SamplingParams(**chosen, given=tuple(chosen))
    except ValueError as error:  # an InvalidRequestError, which contains the parameter's name
        raise api_error_of(error).called(names) from None


def get_by_alias(fields: BaseModel, *names: str) -> Any:
    """Return the value given under any of `names`. Raises ApiError (400) for contradictory values."""
    return find_value({name: getattr(fields, name) for name in names})[1]


def find_value(values: Mapping[str, Any], fault: str = "are aliases: use only one") -> tuple[str, Any]:
    """Return the first set field's name and value. Raises ApiError (400) if another field's value differs."""
    given = [(name, value) for name, value in values.items() if value is not None]
    for other, value in given[1:]:
        if value != given[0][1]:
            raise invalid_field(other, f"{given[0][0]} and {other} {fault}")
    return given[0] if given else ("", None)


def _wrap_seed(seed: int) -> int:
    return seed if seed < 1 << 64 else seed - (1 << 64)


MAX_PROMPTS = 64
MAX_PROMPT_IDS = 1 << 18
MAX_GRAMMAR_CHOICES = 1_000

TokenIds = Annotated[
    list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(min_length=1, max_length=MAX_PROMPT_IDS, fail_fast=True)
]
Choices = Annotated[list[Text], Field(min_length=1, max_length=MAX_GRAMMAR_CHOICES, fail_fast=True)]
Schema = dict[str, Any] | Text
"""A JSON schema, as an object or as text."""

GRAMMAR_FIELDS = (
    *("grammar", "json_schema", "regex", "choice", "guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    *("ebnf", "grammar_string"),
)
_GBNF_RULE = re.compile(r"^[ \t]*[\w-]+[ \t]*::=", re.MULTILINE)


class StructuredOutputs(Fields):
    """vLLM's structured outputs. At most one field may be set."""

    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Choices | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Literal["", False] | None = None


class TextFormat(Fields):
    """Any text."""

    type: Literal["text"]


TEXT_FORMAT = '`{"type": "text"}`, the default'


class GrammarFields(SamplingFields):
    """Grammar fields. At most one may be given. A `grammar` with `::=` rules is GBNF, otherwise Lark."""

    grammar: Text | None = None
    json_schema: Schema | None = None
    regex: Text | None = None
    choice: Choices | None = None
    guided_json: Schema | None = None
    guided_regex: Text | None = None
    guided_choice: Choices | None = None
    guided_grammar: Text | None = None
    ebnf: Text | None = None
    grammar_string: Text | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_decoding_backend: Annotated[Label | None, hint("there is only one backend")] = None


GRAMMAR_NOTES: Notes = SAMPLING_NOTES | {
    "grammar": works("GBNF (llama.cpp's notation), or Lark if no rule contains `::=`"),
    "json_schema": works("a JSON schema, as in llama.cpp; see structured-output.md"),
    "regex": works("a regular expression that must match the whole answer"),
    "choice": works(f"a list of up to {MAX_GRAMMAR_CHOICES:,} strings, one of which is the answer"),
    "guided_json": works("vLLM's name for `json_schema`"),
    "guided_regex": works("vLLM's name for `regex`"),
    "guided_choice": works("vLLM's name for `choice`"),
    "guided_grammar": works("vLLM's name for `grammar`"),
    "ebnf": works("SGLang's name for `grammar`"),
    "grammar_string": works("text-generation-webui's name for `grammar`"),
    "structured_outputs": works(
        "as in vLLM: an object with one of `json`, `regex`, `choice`, `grammar` or `json_object`"
    ),
    "grammar_lazy": refused("remove it: a grammar applies from the first token of the answer"),
    "grammar_triggers": refused("remove it: a grammar applies from the first token of the answer"),
    "structural_tag": refused("use tools with strict: true"),
    **notes_in(GrammarFields),
}


def read_grammar(fields: GrammarFields, format_grammar: Grammar | None = None) -> tuple[Grammar | None, str]:
    """Return the answer's grammar, if any, and the name of its field.

    Raises ApiError (400) for several grammars, or a schema that is nested too deeply.
    """
    outputs = fields.structured_outputs
    values = {name: getattr(fields, name) for name in GRAMMAR_FIELDS}
    if outputs is not None:
        for name, field in StructuredOutputs.model_fields.items():
            values[f"structured_outputs.{wire_name(name, field)}"] = getattr(outputs, name)
    grammars = {"response_format": format_grammar} | {name: _grammar(name, each) for name, each in values.items()}
    found = [(grammar, name) for name, grammar in grammars.items() if grammar is not None]
    if len(found) > 1:
        raise invalid_field(found[1][1], f"{found[0][1]} and {found[1][1]} both constrain the answer: use only one")
    return found[0] if found else (None, "response_format")


def _grammar(name: str, value: Any) -> Grammar | None:
    if value is None or value is False or value == "":  # llama.cpp's clients send '' if they use no grammar
        return None
    match name.rpartition(".")[2].removeprefix("guided_"):
        case "json" | "json_schema":
            return Grammar("json_schema", value) if isinstance(value, str) else schema_grammar(name, value)
        case "regex":
            return Grammar("regex", value)
        case "choice":
            return Grammar("choice", json.dumps(value))
        case "json_object":
            return Grammar("json_object")
    return Grammar("gbnf" if _GBNF_RULE.search(value) else "lark", value)
