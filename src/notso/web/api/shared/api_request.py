"""A request to the engine, independent of the API it came from, and the names of the fields it ignores."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from urllib.parse import quote

from notso.smollm3 import (
    Message,
    ModelInfo,
    Priority,
    RequestOptions,
    SamplingParams,
    ToolName,
    dropped_parts,
    ignored_keywords,
)
from notso.web.api.request_fields.fields import MAX_HINTS, GivenHint
from notso.web.edge.api_error import ApiError

Prompt = tuple[Message, ...] | tuple[int, ...] | str
"""A conversation, or text to be written on, which token ids may spell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiRequest:
    """A request, checked. Every prompt is answered with every one of `params`, by the same `options`.

    `fresh`: nothing cached may be used. `keep`: the answer is stored until it is deleted. `background`: it is
    written without anybody who reads it, and asked for by its id. `model`: the name that was given; `keep_alive_s`:
    how many seconds it stays loaded afterwards, negative: for ever. `names`: what this API calls a field, where a chat
    completion has another word for it. `ignored`: fields that were given and ask for nothing that is done; `hints` are
    those that the table of fields knows as such.
    """

    model: str | None = None
    prompts: tuple[Prompt, ...]
    params: tuple[SamplingParams, ...]
    options: RequestOptions
    stream: bool = False
    fresh: bool = False
    keep: bool = False
    background: bool = False
    keep_alive_s: float | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    hints: tuple[GivenHint, ...] = ()

    @property
    def choices(self) -> Iterator[tuple[Prompt, SamplingParams]]:
        """One for each answer, those to the same prompt beside each other."""
        return ((prompt, params) for prompt in self.prompts for params in self.params)

    def options_for(self, owner: str, priority: Priority = "api", *, conversation: str | None = None) -> RequestOptions:
        """The options, with who asks."""
        return replace(self.options, owner=owner, priority=priority, conversation=conversation)


IGNORED = "x-notso-ignored"
MAX_NAMES = 32
MAX_NAME_CHARACTERS = 64


def dropped_by_template(info: ModelInfo, asked: ApiRequest, *, strict: bool) -> list[str]:
    """Return what the model's chat template leaves out of a request's conversations, each once. Raises ApiError (400)
    that names it where `strict`."""
    found: dict[str, None] = {}
    for prompt in asked.prompts:
        messages = [each for each in prompt if isinstance(each, Message)] if info.template_drops else []
        if messages:
            roles, has_tools = [each.role for each in messages], bool(asked.options.tools)
            found |= dict.fromkeys(dropped_parts(info.template_drops, roles, messages[0].content, has_tools))
    if found and strict:
        said = f"the model's chat template would leave out {next(iter(found))}"
        said += ", and this server refuses what it would ignore"
        raise ApiError(400, "unsupported_value", said, param="messages")
    return list(found)


def ignored_headers(asked: ApiRequest, dropped: Iterable[str] = ()) -> dict[str, str]:
    """The header, where there is something to name: names between commas, what is not ASCII as in addresses.

    The question was accepted: its schemas can be held.
    """
    keywords = (name for source in _held_schemas(asked.options) for name in ignored_keywords(source))
    names = dict.fromkeys((*dropped, *asked.ignored, *(hint.name for hint in asked.hints), *keywords))
    value = ", ".join(quote(name[:MAX_NAME_CHARACTERS], safe=" :$@/") for name in [*names][:MAX_NAMES])
    least = "at least " if len(names) >= MAX_HINTS else ""  # no more are collected
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
