"""What was accepted and asks for nothing that is done: named to who sent it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from urllib.parse import quote

from notso.smollm3 import Message, ModelInfo, RequestOptions, ToolName, dropped_parts, ignored_keywords
from notso.web.api.request_fields.hints import MAX_HINTS
from notso.web.api.shared.api_request import ApiRequest
from notso.web.edge.api_error import ApiError

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
