"""What was accepted and asks for nothing that is done: named to who sent it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from urllib.parse import quote

from notso.smollm3 import ToolName, ignored_keywords
from notso.web.api.shared.question import Question

MAX_NAMES = 32
MAX_NAME_CHARACTERS = 64


def ignored_names(asked: Question) -> str:
    """The value of the header: names between commas, what is not ASCII as in addresses; empty where there are none.

    The question was accepted: its schemas can be held.
    """
    names = dict.fromkeys(name for source in _held_schemas(asked) for name in ignored_keywords(source))
    return ", ".join(quote(name[:MAX_NAME_CHARACTERS], safe=" :$@/") for name in [*names][:MAX_NAMES])


def _held_schemas(asked: Question) -> Iterator[str]:
    if asked.grammar is not None and asked.grammar.kind == "json_schema":
        yield asked.grammar.source
    holds_all = asked.tool_choice == "required" or isinstance(asked.tool_choice, ToolName)
    for tool in asked.tools or ():
        function = tool["function"]
        if function.get("parameters") is not None and (holds_all or function["name"] in asked.strict_tools):
            yield json.dumps(function["parameters"])
