"""Parts of a request that the chat template drops are named in the response, or refused if the operator prefers
that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine

from notso.smollm3.values.model_info import LATER_SYSTEM, OVERRIDDEN_TOOLS
from notso.web.api.shared.api_request import IGNORED

Start = Callable[..., Any]
LATER = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "c"},
]
OVERRIDE = [{"role": "system", "content": "/system_override x"}, {"role": "user", "content": "a"}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
WITH_TOOLS = {"messages": OVERRIDE[1:], "tools": [{"name": "f", "input_schema": FUNCTION["parameters"]}]}
TOOLS = [{"type": "function", "function": FUNCTION}]


FRAGMENT = {"HX-Request": "true", "HX-Request-Type": "partial"}


def dropping() -> ScriptedEngine:
    """An engine whose chat template drops the same parts as the official one."""
    engine = ScriptedEngine()
    engine.info = replace(engine.info, template_drops=(LATER_SYSTEM, OVERRIDDEN_TOOLS))
    return engine


@pytest.mark.parametrize(
    ("path", "body", "named"),
    [
        ("/v1/chat/completions", {"messages": LATER}, [LATER_SYSTEM]),
        ("/v1/chat/completions", {"messages": OVERRIDE, "tools": TOOLS}, [OVERRIDDEN_TOOLS]),
        ("/v1/chat/completions", {"messages": OVERRIDE}, []),
        ("/v1/chat/completions", {"messages": LATER[:2] + LATER[3:], "tools": TOOLS}, []),
        ("/v1/responses", {"input": LATER, "store": False}, [LATER_SYSTEM]),
        ("/api/chat", {"messages": LATER, "stream": False}, [LATER_SYSTEM]),
        ("/v1/chat/completions/input_tokens", {"messages": LATER}, [LATER_SYSTEM]),
        ("/apply-template", {"messages": OVERRIDE, "tools": TOOLS}, [OVERRIDDEN_TOOLS]),
        ("/v1/responses/input_tokens", {"input": LATER}, [LATER_SYSTEM]),
        ("/v1/messages/count_tokens", {"system": "/system_override x", **WITH_TOOLS}, [OVERRIDDEN_TOOLS]),
        ("/v1/messages", {"system": "/system_override x", "max_tokens": 5, **WITH_TOOLS}, [OVERRIDDEN_TOOLS]),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_content_dropped_by_template_is_reported_or_rejected(
    start: Start, strict: bool, path: str, body: dict[str, Any], named: list[str]
) -> None:
    server = start(dropping(), strict_fields=strict).ready()
    answer = server.client.post(path, json={"model": "smollm3", **body})
    if strict and named:
        assert answer.status_code == 400 and f"would omit {named[0]}" in answer.text
    else:
        assert answer.status_code == 200, answer.text
        assert answer.headers.get(IGNORED, "") == ", ".join(named)


def test_context_details_name_dropped_tools(start: Start) -> None:
    server = start(dropping()).ready()
    server.client.post("/tools", data={"was": "", "tool-clock": "on"})
    fields = {"text": "a", "thinking": "on"}
    assert OVERRIDDEN_TOOLS not in server.client.post("/estimate", data=fields, headers=FRAGMENT).text
    server.client.post("/settings", data={"system_prompt": "/system_override x"})
    assert OVERRIDDEN_TOOLS in server.client.post("/estimate", data=fields, headers=FRAGMENT).text
