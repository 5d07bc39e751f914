"""Request fields of Ollama's endpoints, and their conversion to messages and parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from notso.smollm3 import MAX_TOP_LOGPROBS, Grammar, Message, RequestOptions, SamplingParams, Tool, ToolCall
from notso.web.api.request_fields.fields import (
    EFFORT_BUDGETS,
    MAX_MESSAGES,
    Arguments,
    Description,
    Fields,
    Id,
    Label,
    Name,
    Notes,
    RequestHint,
    Text,
    Tools,
    accepting,
    check_functions,
    find_hints,
    hint,
    inert,
    invalid_field,
    notes_in,
    parse_object,
    read_fields,
    refused,
    schema_grammar,
    to_arguments_text,
    works,
)
from notso.web.api.request_fields.sampling_fields import (
    MIROSTAT_ADVICE,
    Whole,
    create_sampling_params,
    read_parameters,
    sampling_names,
    sampling_notes,
    with_sampling,
)
from notso.web.api.shared.api_request import ApiRequest, Prompt
from notso.web.api.shared.embedding import EMBEDDING_OPTIONS, MAX_INPUTS, ONE_TOKEN, EmbeddingRequest
from notso.web.edge.errors import ApiError
from notso.web.values.durations import parse_duration

MAX_OPTION_TEXT = 256
MAX_CONTEXT = 1 << 18
CONTEXT_MARK = 0x6E6F7401
"""First number of every `context` from this server. Contexts from Ollama, which are lists of token ids, lack it."""


Ignored = bool | int | float | Annotated[str, Field(max_length=MAX_OPTION_TEXT)] | None
_SET_UP = hint("fixed when the server starts")
_NO_MIROSTAT = hint("no effect, because mirostat is not available")
_OFF = "remove this field; use top_p, top_k or min_p"


@with_sampling("ollama")
@accepting(
    "num_batch num_gpu main_gpu num_thread use_mmap use_mlock low_vram f16_kv logits_all vocab_only embedding_only "
    "numa draft_num_predict",
    Annotated[Ignored, _SET_UP],
)
class OptionFields(Fields):
    """Sampling and runtime options; the engine checks sampler ranges."""

    stop: Text | Annotated[list[Text], Field(fail_fast=True)] | None = None
    # These three fields accept only values that have no effect, because other values are not implemented.
    tfs_z: Annotated[float | None, inert("1: off", _OFF)] = None
    mirostat: Annotated[Literal[0] | None, inert("0: off", MIROSTAT_ADVICE)] = None
    penalize_newline: Annotated[
        Literal[True] | None, inert("true: a newline is penalized like any other token", "remove this field")
    ] = None
    num_ctx: Annotated[Ignored, hint("the server sets the context length (`--context`)")] = None
    num_keep: Annotated[Ignored, hint("prompts are never truncated")] = None
    mirostat_tau: Annotated[Ignored, _NO_MIROSTAT] = None
    mirostat_eta: Annotated[Ignored, _NO_MIROSTAT] = None


OPTION_NOTES: Notes = sampling_notes("ollama") | notes_in(OptionFields)
PARAMS = sampling_names("ollama", within="options.")
"""Engine parameter -> Ollama's field."""


def to_sampling_params(options: OptionFields, thinking_budget: int | None) -> SamplingParams:
    """Convert options to engine parameters. Raises ApiError (400) naming the option."""
    if options.tfs_z not in (None, 1.0):
        raise invalid_field("options.tfs_z", f"this value of options.tfs_z is not supported: {_OFF}")
    values = read_parameters(options, "ollama") | {"thinking_budget": thinking_budget}
    if (values["max_tokens"] or 0) <= 0:
        values["max_tokens"] = None
    if values["top_k"] is not None:
        values["top_k"] = max(0, values["top_k"])
    return create_sampling_params(PARAMS, values)


EmptyList = Annotated[list[Any], Field(max_length=0)]
KeepAlive = int | float | Annotated[str, Field(max_length=64)]
Think = bool | Literal["low", "medium", "high", "max"]


def _check_format(value: object) -> object:
    if value is None or isinstance(value, dict) or value in ("", "json"):
        return value
    # Pydantic's error would name only one of the alternatives.
    raise ValueError('it should be "json" or a JSON schema')


Format = Annotated[Literal["", "json"] | dict[str, Any], BeforeValidator(_check_format)]
Role = Annotated[
    Literal["system", "user", "assistant", "tool"],
    BeforeValidator(lambda role: role.lower() if isinstance(role, str) else role),
]


class PastFunction(Fields):
    """The function of a past call."""

    name: Name
    arguments: Arguments | None = None
    index: Any = None
    description: Description | None = None


class PastCall(Fields):
    """A past tool call."""

    id: Id | None = None
    type: Literal["function"] | None = None
    function: PastFunction


class OllamaMessage(Fields):
    """One message; as in Ollama, its fields are not checked against the role."""

    role: Role
    content: Text | None = None
    thinking: Text | None = None
    tool_calls: Tools[PastCall] | None = None
    tool_name: Annotated[str, Field(max_length=256)] | None = None
    tool_call_id: Id | None = None
    images: EmptyList | None = None


class OllamaFunction(Fields):
    """A function the model may call; `parameters` is a JSON schema."""

    name: Name
    description: Description | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Fields):
    """A tool; only functions are supported."""

    type: Literal["function"] | None = None
    function: OllamaFunction


class AnswerFields(Fields):
    """Fields shared by /api/chat and /api/generate."""

    model: Label | None = None
    stream: bool | None = None
    think: Think | None = None
    format: Format | None = None
    options: OptionFields | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[Whole, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    keep_alive: KeepAlive | None = None
    truncate: Annotated[bool | None, hint("prompts that do not fit are refused")] = None
    shift: Annotated[bool | None, hint("a response ends when the context is full")] = None


class OllamaChatFields(AnswerFields):
    """The body of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Tools[OllamaTool] | None = None


class GenerateFields(AnswerFields):
    """The body of POST /api/generate."""

    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = None
    images: EmptyList | None = None
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    context: Annotated[list[int], Field(max_length=MAX_CONTEXT, fail_fast=True)] | None = None


_SHOWN_UNCHANGED = hint("the model is shown unchanged", "an empty string", done=("",))
_SERVER_KEEP_ALIVE = hint("the server's `--keep-alive` applies")


class ShowFields(Fields):
    """The body of POST /api/show."""

    model: Label | None = None
    name: Label | None = None
    verbose: bool | None = None
    system: Annotated[Text | None, _SHOWN_UNCHANGED] = None
    template: Annotated[Text | None, _SHOWN_UNCHANGED] = None


class PullFields(Fields):
    """The body of POST /api/pull."""

    model: Label | None = None
    name: Label | None = None
    stream: bool | None = None
    insecure: Annotated[bool | None, hint("nothing is downloaded", "false", done=(False,))] = None


class EmbedFields(Fields):
    """The body of POST /api/embed."""

    model: Label | None = None
    input: Text | Annotated[list[Text], Field(max_length=MAX_INPUTS, fail_fast=True)] | None = None
    truncate: bool | None = None
    dimensions: Annotated[Whole, Field(ge=1)] | None = None
    options: OptionFields | None = None
    keep_alive: Annotated[KeepAlive | None, _SERVER_KEEP_ALIVE] = None


class EmbeddingFields(Fields):
    """The body of POST /api/embeddings."""

    model: Label | None = None
    prompt: Text | None = None
    options: OptionFields | None = None
    keep_alive: Annotated[KeepAlive | None, _SERVER_KEEP_ALIVE] = None


ANSWER_NOTES: Notes = {
    "model": works("a name listed by `GET /api/tags` or `GET /v1/models`, with or without `:latest`; optional"),
    "stream": works("true (default): stream the response as JSON lines"),
    "think": works(
        "true (default), false, or an effort: `low`, `medium`, `high` limit the reasoning to 256, 1,024, 4,096 tokens; "
        "`max`: no limit",
        "use true, false, low, medium, high or max",
    ),
    "format": works('`"json"` or a JSON schema; enforced after the reasoning'),
    "options": works("see below"),
    "logprobs": works("true: return the log probabilities of the generated tokens, before temperature and filters"),
    "top_logprobs": works("number of most likely tokens to return at each position, 0 to 20; requires `logprobs`"),
    "keep_alive": works(
        "how long the model stays loaded after this response: seconds, or a duration such as `5m` or `1h30m`; default: "
        "the server's `--keep-alive`. 0: unload the model when idle; a request without messages or a prompt then only "
        "unloads it. Negative: never unload the model. For operators only: for other callers, the value is ignored, "
        "and a request that only unloads the model is refused"
    ),
} | notes_in(AnswerFields)

CHAT_NOTES: Notes = ANSWER_NOTES | {
    "messages": works(
        "up to 2,048 messages with the roles system, user, assistant and tool; a request without messages only loads "
        "the model. A final assistant message is continued"
    ),
    "tools": works("up to 128 functions with schemas of up to 32 levels"),
}

GENERATE_NOTES: Notes = ANSWER_NOTES | {
    "prompt": works("the user's message; a request without it only loads the model"),
    "system": works("system prompt; cannot be combined with `raw`"),
    "raw": works(
        "true: continue the prompt as it is, without the template; control tokens in it are not recognized, and "
        "`think` has no effect"
    ),
    "images": inert("an empty list", "the model reads text only"),
    "suffix": inert("an empty string", "the model was not trained to fill in the middle; use a chat"),
    "template": inert("an empty string", "the model file's own template is used"),
    "context": works(
        "the `context` of an earlier response, which contains the conversation so far; cannot be combined with `raw`",
        "it must come from a response",
    ),
}

EMBEDDING_NOTES: Notes = {
    "model": ANSWER_NOTES["model"],
    "prompt": works("the text; its end is cut off if it does not fit the context"),
    "options": works("accepted; options do not affect embeddings"),
} | notes_in(EmbeddingFields)

EMBED_NOTES: Notes = {
    "input": works(f"a string, or a list of up to {MAX_INPUTS:,} strings; a request without it only loads the model"),
    "truncate": works(
        "true (default): the end of a text that does not fit the context is cut off; false: the text is refused"
    ),
    "dimensions": works("the model's own number of dimensions", "the model was not trained for other dimensions"),
} | {name: note for name, note in EMBEDDING_NOTES.items() if name != "prompt"}

SHOW_NOTES: Notes = {
    "model": works("any name of the model"),
    "name": works("older name for `model`"),
    "verbose": inert("no effect"),
} | notes_in(ShowFields)

PULL_NOTES: Notes = {
    "model": works("any name of an installed model; other models are not downloaded"),
    "name": works("older name for `model`"),
    "stream": works("true (default): respond with JSON lines"),
} | notes_in(PullFields)

WITHIN_CHAT: Notes = OPTION_NOTES | {
    "thinking": works("in messages: earlier reasoning, which is left out of the prompt"),
    "tool_name": inert("in tool messages: no effect, because the tool call contains the name"),
    "images": refused("the model reads text only"),
}
"""Notes on nested fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OllamaRequest(ApiRequest):
    only_loads: bool = False  # load or unload the model without answering
    returns_context: bool = False  # return the conversation as `context`
    is_chat: bool = True  # answer as /api/chat does, not as /api/generate does


def parse_embed(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Validate an /api/embed request. Raises ApiError (400) naming the field."""
    fields = read_fields(EmbedFields, body, EMBED_NOTES, OPTION_NOTES)
    texts = [fields.input] if isinstance(fields.input, str) else fields.input or []
    api_request = _embedding(fields, body, [text for text in texts if text or len(texts) > 1])
    return replace(api_request, dimensions=fields.dimensions, truncate=fields.truncate is not False)


def parse_embedding(body: Mapping[str, Any]) -> EmbeddingRequest:
    """Validate an /api/embeddings request. Raises ApiError (400) naming the field."""
    fields = read_fields(EmbeddingFields, body, EMBEDDING_NOTES, OPTION_NOTES)
    return _embedding(fields, body, [fields.prompt] if fields.prompt else [])


def _embedding(fields: EmbedFields | EmbeddingFields, body: Mapping[str, Any], texts: list[str]) -> EmbeddingRequest:
    if not all(texts):
        raise invalid_field("input", "input contains an empty string", "empty_prompt")
    return EmbeddingRequest(
        model=fields.model,
        prompts=tuple(texts),
        params=ONE_TOKEN,
        options=EMBEDDING_OPTIONS,
        names={"messages": "input", "prompt": "input"},
        hints=find_hints(fields, body),
        truncate=True,
    )


def parse_chat(body: Mapping[str, Any]) -> OllamaRequest:
    """Validate an /api/chat request. Raises ApiError (400) naming the field."""
    fields = read_fields(OllamaChatFields, body, CHAT_NOTES, WITHIN_CHAT)
    messages = tuple(map(_message, fields.messages or ()))
    is_continued = bool(messages) and messages[-1].role == "assistant"
    return _request(fields, body, messages, tools=_tools(fields), continue_last=is_continued)


def parse_generate(body: Mapping[str, Any]) -> OllamaRequest:
    """Validate an /api/generate request. Raises ApiError (400) naming the field."""
    fields = read_fields(GenerateFields, body, GENERATE_NOTES, OPTION_NOTES)
    prompt = fields.prompt or ""
    if not prompt:
        return _request(fields, body, ())
    if fields.raw:
        for name in ("system", "context"):
            if getattr(fields, name):
                raise invalid_field(name, f"{name} cannot be combined with raw")
        # As in Ollama, `think` is ignored: it selects a form of the template, and raw prompts do not use the template.
        ignored = (RequestHint("think", "think", False),) if fields.think else ()
        request = _request(fields.model_copy(update={"think": None}), body, prompt)
        return replace(request, hints=(*request.hints, *ignored))
    earlier = decode_context(fields.context or ())
    if fields.system:
        earlier = (Message("system", fields.system), *(each for each in earlier if each.role != "system"))
    return replace(_request(fields, body, (*earlier, Message("user", prompt))), returns_context=True)


def encode_context(messages: Sequence[Message]) -> list[int]:
    """Encode a conversation as numbers, which clients send with the next prompt."""
    # Each number consists of a leading byte of 1 and up to three bytes of JSON.
    entries = [[each.role, each.content] for each in messages]
    data = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    return [CONTEXT_MARK, *(int.from_bytes(b"\1" + data[at : at + 3], "big") for at in range(0, len(data), 3))]


def decode_context(context: Sequence[int]) -> tuple[Message, ...]:
    """Reverse `encode_context`. Raises ApiError (400) for invalid numbers."""
    if not context:
        return ()
    try:
        if context[0] != CONTEXT_MARK or not all(1 << 8 <= each < 1 << 25 for each in context[1:]):
            raise ValueError
        pieces = [each.to_bytes((each.bit_length() + 7) // 8, "big") for each in context[1:]]
        if any(piece[0] != 1 for piece in pieces):
            raise ValueError
        data = b"".join(piece[1:] for piece in pieces)
        entries = parse_object(b'{"messages":' + data + b"}")["messages"]
        is_valid = all(
            isinstance(each, list)
            and len(each) == 2
            and each[0] in ("system", "user", "assistant")
            and isinstance(each[1], str)
            for each in entries
        )
        if not isinstance(entries, list) or not is_valid or len(entries) > MAX_MESSAGES:
            raise ValueError
    except (ValueError, TypeError, ApiError):
        raise invalid_field("context", "context must come from an earlier response of this server") from None
    return tuple(Message(role, content) for role, content in entries)


def _request(
    fields: AnswerFields,
    body: Mapping[str, Any],
    prompt: Prompt,
    *,
    tools: tuple[Tool, ...] | None = None,
    continue_last: bool = False,
) -> OllamaRequest:
    options = fields.options or OptionFields()
    is_raw = isinstance(prompt, str)
    budget = EFFORT_BUDGETS.get(fields.think) if isinstance(fields.think, str) else None
    if fields.top_logprobs and not fields.logprobs:
        raise invalid_field("top_logprobs", "top_logprobs requires logprobs: true")
    return OllamaRequest(
        model=fields.model,
        prompts=(prompt,),
        params=(to_sampling_params(options, budget),),
        names=PARAMS | {"response_format": "format"} | ({"messages": "prompt"} if is_raw else {}),
        options=RequestOptions(
            thinking=fields.think is not False and not is_raw,
            tools=tools,
            grammar=_grammar(fields),
            top_logprobs=(fields.top_logprobs or 0) if fields.logprobs else None,
            continue_last=continue_last,
        ),
        stream=fields.stream is not False,
        only_loads=not prompt,
        is_chat=isinstance(fields, OllamaChatFields),
        keep_alive_s=_seconds(fields.keep_alive),
        hints=find_hints(fields, body),
    )


def _grammar(fields: AnswerFields) -> Grammar | None:
    if isinstance(fields.format, dict):
        return schema_grammar("format", fields.format)
    return Grammar("json_object") if fields.format else None


def _tools(fields: OllamaChatFields) -> tuple[Tool, ...] | None:
    tools = fields.tools or ()
    check_functions(
        (f"tools.{index}.function", tool.function.name, {"parameters": tool.function.parameters})
        for index, tool in enumerate(tools)
    )
    return tuple({"type": "function"} | tool.model_dump(exclude_none=True) for tool in tools) or None


def _message(message: OllamaMessage) -> Message:
    content = message.content or ""
    match message.role:
        case "assistant":
            calls = tuple(
                ToolCall(
                    call.id or f"call_{index}",
                    call.function.name,
                    to_arguments_text(call.function.arguments or {}),
                )
                for index, call in enumerate(message.tool_calls or ())
            )
            return Message("assistant", content, message.thinking, calls)
        case "tool":
            return Message("tool", content, tool_call_id=message.tool_call_id)
    return Message(message.role, content)


def _seconds(value: KeepAlive | None) -> float | None:
    if value is None:
        return None
    seconds = parse_duration(value) if isinstance(value, str) else float(value)
    if seconds is None:
        raise invalid_field(
            "keep_alive", "keep_alive must be a number of seconds, or a duration such as 30s, 5m or 1h30m"
        )
    if not math.isfinite(seconds):
        raise invalid_field("keep_alive", "keep_alive must be finite")
    return seconds
