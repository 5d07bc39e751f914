"""The fields of Ollama's bodies: strict types, every length bounded. What would change the answer and is not done has
no field here, or none but the value that asks for nothing; a hint is taken and named in the answer's header."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from notso.smollm3 import MAX_TOP_LOGPROBS
from notso.web.api.ollama.options import OPTION_NOTES, OptionFields
from notso.web.api.request_fields.fields import Fields, Name, Notes, Text, hint, inert, refused, works
from notso.web.api.request_fields.hints import Hint
from notso.web.api.request_fields.sampling_fields import MAX_MESSAGES, MAX_TOOLS

Nothing = Annotated[list[Any], Field(max_length=0)]
KeepAlive = int | float | Annotated[str, Field(max_length=64)]
Think = bool | Literal["low", "medium", "high", "max"]
Format = Literal["", "json"] | dict[str, Any]
Role = Annotated[
    Literal["system", "user", "assistant", "tool"],
    BeforeValidator(lambda given: given.lower() if isinstance(given, str) else given),
]


class PastFunction(Fields):
    """A past call: its arguments are an object."""

    name: Name
    arguments: dict[str, Any] = Field(default_factory=dict)
    index: Annotated[int, Field(ge=0, le=MAX_TOOLS)] | None = None
    description: Annotated[str, Field(max_length=65_536)] | None = None


class PastCall(Fields):
    """A past tool call, as an answer had it."""

    id: Annotated[str, Field(max_length=256)] | None = None
    type: Literal["function"] | None = None
    function: PastFunction


class OllamaMessage(Fields):
    """One turn. Which fields belong to which role is not checked, as Ollama does not."""

    role: Role
    content: Text | None = None
    thinking: Text | None = None
    tool_calls: Annotated[list[PastCall], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_name: Annotated[str, Field(max_length=256)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    images: Nothing | None = None


class OllamaFunction(Fields):
    """A function the model may call; `parameters` is a JSON schema, shown to the model as it is."""

    name: Name
    description: Annotated[str, Field(max_length=65_536)] | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(Fields):
    """One tool. Only functions exist."""

    type: Literal["function"] = "function"
    function: OllamaFunction


class AnswerFields(Fields):
    """What both ways of asking have in common."""

    model: Name | None = None
    stream: bool | None = None
    think: Think | None = None
    format: Format | None = None
    options: OptionFields | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    keep_alive: KeepAlive | None = None
    truncate: Annotated[bool | None, Hint()] = None
    shift: Annotated[bool | None, Hint()] = None


class OllamaChatFields(AnswerFields):
    """The body of POST /api/chat."""

    messages: Annotated[list[OllamaMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[OllamaTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None


class GenerateFields(AnswerFields):
    """The body of POST /api/generate."""

    prompt: Text | None = None
    system: Text | None = None
    raw: bool | None = None
    images: Nothing | None = None
    suffix: Literal[""] | None = None
    template: Literal[""] | None = None
    context: Nothing | None = None


class ShowFields(Fields):
    """The body of POST /api/show."""

    model: Name | None = None
    name: Name | None = None
    verbose: bool | None = None


_NO_PICTURES = inert("an empty list", "the model reads text only")

ANSWER_NOTES: Notes = {
    "model": works("a name that `GET /api/tags` or `GET /v1/models` tells, with or without `:latest`; may be left out"),
    "stream": works("true if left out: lines of JSON"),
    "think": works(
        "true if left out; `low`, `medium`, `high` think for at most 256, 1,024, 4,096 tokens, `max` without a limit",
        "use true, false, low, medium, high or max",
    ),
    "format": works('`"json"` or a JSON schema; the answer after the thoughts is held to it'),
    "options": works("see below"),
    "logprobs": works("log probabilities of the tokens, by the model alone, before any filter"),
    "top_logprobs": works("0 to 20 likeliest tokens with each; needs `logprobs`"),
    "keep_alive": works(
        "how long the model stays loaded after this answer, where an operator asks (from others it is ignored): "
        "seconds, or `5m`, `1h30m`; 0: it goes when nobody uses it, which a request without messages or prompt may say "
        "alone; negative: never; left out: as the server has it (`--keep-alive`)",
    ),
    "truncate": hint("a prompt that does not fit is refused"),
    "shift": hint("an answer ends where the context does"),
}

CHAT_NOTES: Notes = ANSWER_NOTES | {
    "messages": works(
        "up to 2,048, roles system, user, assistant, tool; none loads the model. An assistant's "
        "message at the end is continued"
    ),
    "tools": works("functions, up to 128, their schemas up to 32 levels deep"),
}

GENERATE_NOTES: Notes = ANSWER_NOTES | {
    "prompt": works("what a person says; none loads the model"),
    "system": works("what the model is told beforehand; not with `raw`"),
    "raw": works("true: the prompt is written on as it is; nothing in it is a control token"),
    "images": _NO_PICTURES,
    "suffix": inert("an empty text", "the model has no tokens for filling gaps; ask it in a chat"),
    "template": inert("an empty text", "the model file's own template is used"),
    "context": inert("an empty list", "send the conversation to /api/chat"),
}

SHOW_NOTES: Notes = {
    "model": works("one of its names"),
    "name": works("the older name of `model`"),
    "verbose": inert("there is nothing to add"),
}

WITHIN_ANSWER: Notes = OPTION_NOTES
"""Of what lies within the fields of both."""

WITHIN_CHAT: Notes = OPTION_NOTES | {
    "thinking": works("of a message: accepted, and left out of the prompt"),
    "tool_name": inert("of a tool's message: its call says the same"),
    "images": refused("the model reads text only"),
}
