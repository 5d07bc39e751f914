"""What the model's chat template leaves out of a request is named, or refused where the operator wants that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from notso.smollm3.values.model_info import LATER_SYSTEM, OVERRIDDEN_TOOLS
from notso.web.api.shared.ignored import IGNORED
from notso.web.testing.scripted_engine import ScriptedEngine

Start = Callable[..., Any]
LATER = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "c"},
]
OVERRIDE = [{"role": "system", "content": "/system_override x"}, {"role": "user", "content": "a"}]
FUNCTION = {"name": "f", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]


def dropping() -> ScriptedEngine:
    """An engine whose template leaves out what the official one does."""
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
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_what_the_template_leaves_out_is_named_or_refused(
    start: Start, strict: bool, path: str, body: dict[str, Any], named: list[str]
) -> None:
    server = start(dropping(), strict_fields=strict).ready()
    answer = server.client.post(path, json={"model": "smollm3", **body})
    if strict and named:
        assert answer.status_code == 400 and f"would leave out {named[0]}" in answer.text
    else:
        assert answer.status_code == 200, answer.text
        assert answer.headers.get(IGNORED, "") == ", ".join(named)
