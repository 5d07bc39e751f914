"""What was accepted and asks for nothing that is done: named to who sent it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import quote

from notso.smollm3 import RequestOptions, ToolName, ignored_keywords
from notso.web.api.shared.api_request import ApiRequest

IGNORED = "x-notso-ignored"
MAX_NAMES = 32
MAX_NAME_CHARACTERS = 64


def ignored_headers(asked: ApiRequest) -> dict[str, str]:
    """The header, where there is something to name: names between commas, what is not ASCII as in addresses.

    The question was accepted: its schemas can be held.
    """
    keywords = (name for source in _held_schemas(asked.options) for name in ignored_keywords(source))
    names = dict.fromkeys((*asked.ignored, *(hint.name for hint in asked.hints), *keywords))
    value = ", ".join(quote(name[:MAX_NAME_CHARACTERS], safe=" :$@/") for name in [*names][:MAX_NAMES])
    return {IGNORED: value} if value else {}


def _held_schemas(options: RequestOptions) -> Iterator[str]:
    if options.grammar is not None and options.grammar.kind == "json_schema":
        yield options.grammar.source
    holds_all = options.tool_choice == "required" or isinstance(options.tool_choice, ToolName)
    for tool in options.tools or ():
        function = tool["function"]
        if function.get("parameters") is not None and (holds_all or function["name"] in options.strict_tools):
            yield json.dumps(function["parameters"])
