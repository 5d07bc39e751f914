"""Plugins on the server: their features work, and a hostile plugin leaves everything else unaffected."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from plugins.installed_plugins import install
from scripted_engine import ScriptedEngine

from notso.plugins.process import Plugins
from notso.web.tools.chat_tool import ToolContext
from notso.web.tools.toolbox import ToolResult, use

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true"}
HOSTILE = ("raises", "hangs", "spins", "prints", "floods", "leaves", "unloadable", "no-plugin")


@pytest.fixture
def serving(start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Return a function that starts a server with plugins and waits until each has loaded or failed."""
    install(tmp_path, monkeypatch)
    begun = []

    def begin(*names: str, **settings: Any) -> Any:
        plugins = Plugins(names)
        begun.append(plugins)
        server = start(ScriptedEngine(), plugins=plugins, **settings).ready()
        plugins.wait()
        return server

    yield begin
    for plugins in begun:
        plugins.close()


def state(server: Any, name: str) -> tuple[str, str]:
    process = server.shared.plugins.find(name)
    return process.state, process.failure


def used(server: Any, name: str, **arguments: str) -> ToolResult:
    (tool,) = server.chat.toolbox.chosen([name])
    outcome: ToolResult = server.on_loop(
        lambda: use(tool, json.dumps(arguments), ToolContext("local", "c", server.shared.store))
    )
    return outcome


def answers(server: Any) -> bool:
    """Return whether pages, chats and the API respond."""
    chat = server.finished(server.ask("Hello"))
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    return (
        chat.state == "done"
        and server.client.get("/").status_code == server.client.get("/settings").status_code == 200
        and server.client.post("/v1/chat/completions", json=body).status_code == 200
    )


def test_server_keeps_responding_despite_hostile_plugins(serving: Callable[..., Any]) -> None:
    """Use plugins that raise, hang, loop, print without end, exit, or fail to load."""
    server = serving(*HOSTILE)
    assert answers(server)
    for name in ("raises", "hangs", "spins", "floods", "leaves"):
        outcome = used(server, name)
        assert outcome.state == "failed" and f"the plugin {name}" in outcome.text, outcome
        assert answers(server)
    assert used(server, "prints").text == "printed"
    assert {name: state(server, name)[0] for name in HOSTILE} == {**dict.fromkeys(HOSTILE, "off"), "prints": "on"}
    assert [tool.name for tool in server.chat.toolbox.chosen(["hangs", "calculator"])] == ["calculator"]
    page = server.client.get("/settings").text
    for name in set(HOSTILE) - {"prints"}:
        assert state(server, name)[1] and name in page
    assert "tool hangs took longer than 0.3 s" in page and "tool raises raised ZeroDivisionError" in page
    assert "no import for you" in page and "calculator, clock" in page
    assert server.client.post("/plugins/raises/start").status_code == 303 and state(server, "raises") == ("on", "")


def test_plugin_tool_is_offered_and_can_be_called(serving: Callable[..., Any]) -> None:
    server = serving("kind")
    assert "Say it back." in server.client.get("/tools").text
    assert used(server, "echo", text="hello").text == "hello|local|[]"
    assert used(server, "refuse").text == "error: not today nor tomorrow"
    assert state(server, "kind") == ("on", "")


def test_form_of_many_tools_is_saved(serving: Callable[..., Any]) -> None:
    server = serving("kind")
    form = {"was": "", "tool-echo": "on"} | {f"tool-other{number}": "on" for number in range(60)}
    assert server.client.post("/tools", data=form).status_code == 303
    assert re.search(r'name="tool-echo" checked', server.client.get("/tools").text)


def test_plugin_page_has_restrictive_content_security_policy(serving: Callable[..., Any]) -> None:
    server = serving("kind")
    page = server.client.get("/plugins/kind/pages/", params={"q": "asked"})
    assert page.status_code == 200 and page.text == "<p>GET asked  local</p>"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "script" not in policy and "unsafe" not in policy
    posted = server.client.post("/plugins/kind/pages/", data={"f": "field"})
    assert posted.text == "<p>POST  field local</p>"
    assert server.client.get("/plugins/kind/pages/raw").status_code == 502
    assert server.client.get("/plugins/kind/pages/none").status_code == 404
    assert server.client.get("/plugins/nobody/pages/").status_code == 404
    foreign = {"Sec-Fetch-Site": "cross-site"}
    assert server.client.post("/plugins/kind/pages/", data={"f": "x"}, headers=foreign).status_code == 403


def test_hanging_plugin_page_returns_502(serving: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notso.web.chat.routes.tools.PAGE_SECONDS", 0.3)
    server = serving("hangs")
    page = server.client.get("/plugins/hangs/pages/")
    assert page.status_code == 502 and "page / took longer than 0.3 s" in page.text
    assert answers(server)


def test_a_command_of_a_plugin_is_in_the_palette_and_runs(serving: Callable[..., Any]) -> None:
    server = serving("kind", "raises")
    page = server.client.get("/").text
    assert 'id="command-shout"' in page and 'hx-post="/plugins/kind/commands/shout"' in page
    # a plugin cannot replace a built-in command
    assert page.count('id="command-help"') == 1 and "/plugins/kind/commands/help" not in page
    said = server.client.post("/plugins/kind/commands/shout", data={"argument": "<b>é"}, headers=FRAGMENT)
    assert said.status_code == 200 and "&lt;B&gt;É" in said.text and "toast" in said.text
    failed = server.client.post("/plugins/raises/commands/explode", headers=FRAGMENT)
    assert failed.status_code == 502 and "command explode" in failed.text
    assert server.client.post("/plugins/kind/commands/none", headers=FRAGMENT).status_code == 404
    assert 'id="command-explode"' not in server.client.get("/").text and answers(server)


def test_request_selects_logits_processors_by_name(serving: Callable[..., Any]) -> None:
    server = serving("kind")
    server.shared.engine.engine.requests.clear()
    body = {"messages": [{"role": "user", "content": "Hi"}], "logits_processors": ["ban_1000", "only_by_length"]}
    assert server.client.post("/v1/chat/completions", json=body).status_code == 200
    assert server.shared.engine.engine.requests[-1].options.logits_processors == ("ban_1000", "only_by_length")
    refused = server.client.post("/v1/chat/completions", json=body | {"logits_processors": ["a"] * 9})
    assert refused.status_code == 400 and "logits_processors" in refused.text
