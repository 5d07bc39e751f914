"""API-independent representation of a request, and reporting of ignored fields."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Self
from urllib.parse import quote

from notso.smollm3 import (
    QUOTE_OF,
    Message,
    ModelInfo,
    RequestOptions,
    SamplingParams,
    ToolName,
    dropped_parts,
    ignored_keywords,
)
from notso.web.api.request_fields.fields import MAX_HINTS, GivenHint
from notso.web.edge.errors import ApiError

Prompt = tuple[Message, ...] | tuple[int, ...] | str
"""A conversation, or text or token ids to continue."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A checked request: each prompt is answered with each of `params`."""

    model: str | None = None  # as given
    prompts: tuple[Prompt, ...]
    params: tuple[SamplingParams, ...]
    options: RequestOptions
    stream: bool = False
    fresh: bool = False  # do not use cached prompts
    keep: bool = False  # store the answer until deleted
    background: bool = False  # generate without a connection; the client polls by id
    keep_stream: bool = False  # store the stream until its end; takes effect with X-Conversation-Id
    keep_alive_s: float | None = None  # seconds that the model stays loaded afterwards; negative: unlimited
    names: Mapping[str, str] = field(default_factory=dict)  # field of a chat completion -> this API's field
    ignored: tuple[str, ...] = ()  # names of other ignored fields
    hints: tuple[GivenHint, ...] = ()  # ignored fields from `hints_of`

    def in_named_conversation(self) -> Self:
        """Return the request without the hint `store`, a field that takes effect with X-Conversation-Id."""
        return replace(self, hints=tuple(hint for hint in self.hints if not self.keep_stream or hint.name != "store"))

    @property
    def choices(self) -> Iterator[tuple[Prompt, SamplingParams]]:
        return ((prompt, params) for prompt in self.prompts for params in self.params)


IGNORED = "x-notso-ignored"
MAX_NAMES = 32
MAX_NAME_CHARACTERS = 64


def dropped_by_template(info: ModelInfo, asked: ApiRequest, *, strict: bool) -> list[str]:
    """Return the message parts that the chat template drops. If `strict`, raise ApiError (400) instead."""
    found: dict[str, None] = {}
    for prompt in asked.prompts:
        messages = [each for each in prompt if isinstance(each, Message)] if info.template_drops else []
        if messages:
            roles, has_tools = [each.role for each in messages], bool(asked.options.tools)
            found |= dict.fromkeys(dropped_parts(info.template_drops, roles, messages[0].content, has_tools))
    if found and strict:
        said = f"the model's chat template would omit {next(iter(found))}"
        said += ", which --strict-fields refuses"
        raise ApiError(400, "unsupported_value", said, param="messages")
    return list(found)


def ignored_headers(asked: ApiRequest, dropped: Iterable[str] = ()) -> dict[str, str]:
    """Return the header that lists ignored fields, with non-ASCII characters percent-encoded.

    The request must have been accepted, so that its schemas are valid.
    """
    keywords = (name for source in _held_schemas(asked.options) for name in ignored_keywords(source))
    # If there are sources to quote, QUOTE_OF is enforced.
    keywords = (name for name in keywords if name != QUOTE_OF or not asked.options.sources)
    return header_naming((*dropped, *asked.ignored, *(hint.name for hint in asked.hints), *keywords))


def header_naming(ignored: Iterable[str]) -> dict[str, str]:
    names = dict.fromkeys(ignored)
    value = ", ".join(quote(name[:MAX_NAME_CHARACTERS], safe=" :$@/") for name in [*names][:MAX_NAMES])
    least = "at least " if len(names) >= MAX_HINTS else ""  # `hints_of` stops there
    more = f", and {least}{len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return {IGNORED: value + more} if value else {}


def _held_schemas(options: RequestOptions) -> Iterator[str]:
    if options.grammar is not None and options.grammar.kind == "json_schema":
        yield options.grammar.source
    holds_all = options.tool_choice == "required" or isinstance(options.tool_choice, ToolName)
    for tool in options.tools or ():
        function = tool["function"]
        if function.get("parameters") is not None and (holds_all or function["name"] in options.strict_tools):
            yield json.dumps(function["parameters"])
