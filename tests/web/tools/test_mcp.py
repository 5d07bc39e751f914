"""MCP tools on a small real server: naming, calls, limits, and failures that never end the chat."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import re
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event, Message, ToolCall
from notso.web.tools import mcp_offers, mcp_servers
from notso.web.tools.chat_tool import ToolContext
from notso.web.tools.elicitation import Ask
from notso.web.tools.mcp_config import McpServerConfig
from notso.web.tools.mcp_servers import McpServer, McpServers
from notso.web.tools.toolbox import Toolbox, ToolResult, use
from notso.web.values.errors import SettingsError, ToolError
from notso.web.values.settings import Settings

Start = Callable[..., Any]
FRAGMENT = {"HX-Request": "true"}
ODD_SERVER = str(Path(__file__).with_name("odd_mcp_server.py"))
LITTLE = str(Path(__file__).with_name("mcp_server.py"))
NOWHERE = ToolContext("local", "", None)  # type: ignore[arg-type]
FIT = json.dumps([{"name": "fit", "inputSchema": {"type": "object"}}])
"""Tools of the odd server, which starts in a tenth of the time of the small real one."""
Use = Callable[..., Awaitable[ToolResult]]


def with_servers(work: Callable[[McpServers, Use], Awaitable[None]], *entries: McpServerConfig) -> None:
    """Run `work` with running servers and stop them afterwards."""

    async def run() -> None:
        servers = McpServers(entries or [McpServerConfig("little", sys.executable, (LITTLE,), {"SECRET": "s3"})])
        servers.start()
        try:
            await servers.ready()
            box = Toolbox(servers)

            async def called(name: str, /, asking: Ask | None = None, **arguments: Any) -> ToolResult:
                (tool,) = box.chosen([name])
                return await use(tool, json.dumps(arguments), replace(NOWHERE, ask=asking))

            await work(servers, called)
        finally:
            await servers.close()

    asyncio.run(run())


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"


def test_tools_are_prefixed_by_server_name_and_callable() -> None:
    pids: list[int] = []

    async def work(servers: McpServers, called: Use) -> None:
        assert servers.failures() == {}
        names = [tool.name for tool in servers.tools()]
        assert names[0] == "little__add" and len(names) == 9
        definition = servers.tools()[0].definition["function"]
        assert definition["description"] == "Add two numbers." and definition["parameters"]["required"] == ["a", "b"]
        done = await called("little__add", a=2, b=40)
        assert (done.state, done.text) == ("done", "42")
        assert (await called("little__paint")).text == "Look:\n[image left out]"
        assert (await called("little__environment", name="SECRET")).text == "s3"
        assert (await called("little__environment", name="NOTSO_API_KEY")).text == "not there"
        pids.append(int((await called("little__pid")).text))
        assert is_alive(pids[0])

    os.environ["NOTSO_API_KEY"] = "must not be handed on"
    try:
        with_servers(work)
    finally:
        del os.environ["NOTSO_API_KEY"]
    assert not is_alive(pids[0]), "the process ends with the server"


def test_failing_or_hanging_tool_reports_error_and_long_output_is_cut() -> None:
    async def work(servers: McpServers, called: Use) -> None:
        failed = await called("little__fail")
        assert failed.state == "failed" and failed.text.startswith("error: ")
        wrong = await called("little__add", a="x")
        assert wrong.state == "failed" and "error" in wrong.text
        long = await called("little__babble")
        assert long.state == "done" and len(long.text) < 8_100 and "[cut:" in long.text
        hanging = next(tool for tool in servers.tools() if tool.name == "little__hang")
        object.__setattr__(hanging, "seconds", 0.3)
        assert "did not respond within 0.3 s" in (await called("little__hang")).text

    with_servers(work)


def test_prompts_and_text_resources_become_commands() -> None:
    async def work(servers: McpServers, called: Use) -> None:
        offers = {each.command: each for each in servers.offers()}
        kinds = {name: (each.kind, each.usage, each.name) for name, each in offers.items()}
        assert kinds == {
            "little:review": ("prompt", "code=... [tone=...]", ""),
            "little:stand-up": ("prompt", "", ""),
            "little:today-s-notes": ("resource", "", "Today's notes"),
            "little:large": ("resource", "", "large"),
        }
        review = offers["little:review"]
        assert review.description == "Review a piece of code."
        for typed, text in {
            "x = 1": "Review in a kind tone:\nx = 1",
            'x = "a b" tone=dry': 'Review in a dry tone:\nx = "a b"',
            "tone='very dry' code=y": "Review in a very dry tone:\ny",
        }.items():
            assert await review.fetch(typed) == text
        for name, typed, said in (
            ("review", "tone=dry", "missing: code"),
            ("review", "code=a tone=b c", "this prompt takes code=... [tone=...]"),
            ("stand-up", "now", "this prompt takes no arguments"),
        ):
            with pytest.raises(ToolError, match=re.escape(said)):
                await offers[f"little:{name}"].fetch(typed)

    with_servers(work)


def test_server_without_tools_offers_prompts() -> None:
    entry = McpServerConfig("odd", sys.executable, (ODD_SERVER, "[]", "prompts"))

    async def work(servers: McpServers, called: Use) -> None:
        assert servers.failures() == {} and servers.tools() == ()
        assert [each.command for each in servers.offers()] == [f"odd:p-{at}" for at in range(mcp_offers.MAX_OFFERS)]
        assert await servers.offers()[0].fetch("") == "p 0"

    with_servers(work, entry)


def test_restarted_server_without_tools_reports_faults_once() -> None:
    async def work(servers: McpServers, called: Use) -> None:
        [server] = servers._servers
        for _ in range(2):
            assert [each.name for each in server.left_out] == ["prompts and resources"]
            await server.stop()
            assert await server.start()

    with_servers(work, McpServerConfig("odd", sys.executable, (ODD_SERVER, "[]", "only broken")))


@pytest.mark.parametrize("list_of", ["broken", "endless"])
def test_invalid_prompt_list_keeps_tools_usable(list_of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = [{"name": "fit", "inputSchema": {"type": "object"}}]

    async def work(servers: McpServers, called: Use) -> None:
        assert servers.failures() == {} and [each.name for each in servers.tools()] == ["odd__fit"]
        assert (await called("odd__fit")).text == "fit"
        if list_of == "broken":
            left = [(each.name, each.reason) for each in servers.left_out()]
            assert left == [("odd: prompts and resources", mcp_servers.NO_MCP)]
        else:
            assert len(servers.offers()) == mcp_offers.MAX_PAGES

    with_servers(work, McpServerConfig("odd", sys.executable, (ODD_SERVER, json.dumps(tool), list_of)))


ODD: list[dict[str, Any]] = [
    {"name": "fit", "inputSchema": {"type": "object"}, "annotations": 3, "title": 4, "icons": "x"},
    {"name": "bare"},
    {"name": "null", "inputSchema": None},
    {"name": "text", "inputSchema": "object"},
    {"name": "list", "inputSchema": {"type": "array"}},
    {"name": "both", "inputSchema": {"type": ["object", "null"]}},
    {"name": "no type", "inputSchema": {}, "description": None},
    {"name": "null type", "inputSchema": {"type": None, "properties": None, "required": None}},
    {"name": "properties", "inputSchema": {"type": "object", "properties": []}},
    {"name": 7, "inputSchema": {"type": "object"}},
    {"inputSchema": {"type": "object"}},
    "no tool",
    {"name": "a.b", "inputSchema": {"type": "object"}},
    {"name": "a/b", "inputSchema": {"type": "object"}},
    {"name": "L" * 90, "inputSchema": {"type": "object"}},
    {"name": "L" * 91, "inputSchema": {"type": "object"}},
    {"name": "large", "inputSchema": {"type": "object", "description": "x" * 6_000}},
    {"name": "write_all", "inputSchema": {"type": "object"}},
]


def test_unusable_tools_are_reported_and_others_work() -> None:
    entry = McpServerConfig(
        "odd", sys.executable, (ODD_SERVER, json.dumps(ODD)), label="An odd one", denied=frozenset({"write_*"})
    )

    async def work(servers: McpServers, called: Use) -> None:
        long = f"odd__{'L' * 59}"
        fit = ["odd__fit", "odd__no_type", "odd__null_type", "odd__a_b", "odd__a_b_2", long, f"{long[:-2]}_2"]
        assert servers.failures() == {} and [tool.name for tool in servers.tools()] == fit
        assert (await called("odd__a_b_2")).text == "a/b" and (await called(fit[-1])).text == "L" * 91
        reasons = {each.name.removeprefix("An odd one: "): each.reason for each in servers.left_out()}
        assert reasons == {
            "bare": "it has no inputSchema",
            "null": "it has no inputSchema",
            "text": "its inputSchema is not an object",
            "list": "its inputSchema is not of type object",
            "both": "its inputSchema is not of type object",
            "properties": "the properties of its inputSchema are not an object",
            "tool 10": "it has no name",
            "tool 11": "it has no name",
            "tool 12": "it has no name",
            "large": "its schema has more than 6,000 characters or more than 32 levels",
            "write_all": "the configuration excludes it",
        }

    with_servers(work, entry)


def test_tools_beyond_limit_are_reported() -> None:
    offered = [{"name": f"t{at}", "inputSchema": {"type": "object"}} for at in range(20)]
    entries = [McpServerConfig(name, sys.executable, (ODD_SERVER, json.dumps(offered))) for name in ("one", "two")]

    async def work(servers: McpServers, called: Use) -> None:
        assert len(servers.tools()) == mcp_servers.MAX_TOOLS
        assert [each.name for each in servers.left_out()] == [f"two: t{at}" for at in range(4, 20)]

    with_servers(work, *entries)


def test_crashed_server_is_restarted_on_next_call() -> None:
    async def work(servers: McpServers, called: Use) -> None:
        first = (await called("little__pid")).text
        died = await called("little__die")
        assert died.state == "failed" and "exited during the call" in died.text
        assert servers.failures() and servers.tools()[0].name == "little__add", "the tool stays listed"
        again = await called("little__pid")
        assert again.state == "done" and again.text != first and servers.failures() == {}

    with_servers(work)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extend the timeouts: importing the MCP library takes seconds, and longer on a busy machine."""
    monkeypatch.setattr(mcp_servers, "START_SECONDS", 120.0)
    monkeypatch.setattr(mcp_servers, "OFFERS_SECONDS", 120.0)
    monkeypatch.setattr(mcp_servers, "RESTART_SECONDS", 0.0)


@pytest.mark.parametrize(("is_path", "said"), [(False, "no such program"), (True, "Permission denied")])
def test_permission_error_is_reported_only_for_explicit_path(
    is_path: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain user gets EACCES if no other folder has the program; root can read every folder, so the test simulates
    it."""

    async def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(asyncio, "create_subprocess_exec", denied)
    program = tmp_path / "program"
    program.touch()

    async def work(servers: McpServers, called: Use) -> None:
        assert servers.failures() == {"a": said}

    with_servers(work, McpServerConfig("a", str(program) if is_path else "no-such-program-anywhere"))


def test_connection_that_ends_late_keeps_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "STOP_SECONDS", 0.01)

    async def run() -> None:
        server = McpServer(McpServerConfig("little", sys.executable, (LITTLE,)))
        may_end, clients = asyncio.Event(), list[object]()

        async def connect(transport: object, started: asyncio.Future[None], stop_requested: asyncio.Event) -> None:
            clients.append(client := object())
            server._client = client  # type: ignore[assignment]
            started.set_result(None)
            await stop_requested.wait()
            while len(clients) == 1 or not may_end.is_set():  # the cleanup ignores cancellation
                with contextlib.suppress(asyncio.CancelledError):
                    await may_end.wait()
            raise RuntimeError("the cleanup failed")

        monkeypatch.setattr(server, "_connect", connect)
        assert await server.start()
        first = server._task
        assert first is not None
        await server.stop()
        assert await server.start()
        may_end.set()
        await asyncio.wait([first])
        assert server._client is clients[1] and server.failure == ""
        await server.stop()

    asyncio.run(run())


def test_request_that_failed_on_an_old_connection_does_not_mark_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        server = McpServer(McpServerConfig("little", sys.executable, (LITTLE,)))
        began, fail = asyncio.Event(), asyncio.Event()

        async def connect(transport: object, started: asyncio.Future[None], stop_requested: asyncio.Event) -> None:
            server._client = object()  # type: ignore[assignment]
            started.set_result(None)
            await stop_requested.wait()

        async def send(client: object) -> str:
            began.set()
            await fail.wait()
            raise mcp_servers.MCPError(mcp_servers.CONNECTION_CLOSED, "closed")

        monkeypatch.setattr(server, "_connect", connect)
        assert await server.start()
        request = asyncio.create_task(server._request("call", send))
        await began.wait()
        await server.stop()
        assert await server.start()
        fail.set()
        with pytest.raises(ToolError, match="exited during the call: it has exited"):
            await request
        assert server.failure == ""
        await server.stop()

    asyncio.run(run())


def test_failed_server_start_reports_reason() -> None:
    entries = [
        McpServerConfig("missing", "no-such-program-anywhere"),
        McpServerConfig("over", sys.executable, ("-c", "pass")),
        McpServerConfig("odd", sys.executable, (ODD_SERVER, FIT)),
    ]

    async def work(servers: McpServers, called: Use) -> None:
        failures = servers.failures()
        assert failures["missing"] == "no such program" and failures["over"] == "it exited immediately"
        assert "odd" not in failures and (await called("odd__fit")).text == "fit"

    with_servers(work, *entries)


def test_mute_server_does_not_delay_other_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "START_SECONDS", 0.5)
    entries = [
        McpServerConfig("mute", sys.executable, ("-c", "import sys; sys.stdin.read()")),
        McpServerConfig("odd", sys.executable, (ODD_SERVER, FIT)),
    ]

    async def work(servers: McpServers, called: Use) -> None:
        assert servers.failures()["mute"] == "it did not respond within 0.5 s"
        monkeypatch.setattr(mcp_servers, "START_SECONDS", 120.0)
        assert await servers._servers[1].start()
        assert servers.failures().keys() == {"mute"} and (await called("odd__fit")).text == "fit"

    with_servers(work, *entries)


def test_missing_mcp_library_error_names_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from notso.web.app import create_app

    (tmp_path / "mcp.json").write_text('{"mcpServers": {}}')
    monkeypatch.setitem(sys.modules, "notso.web.tools.mcp_servers", None)
    with pytest.raises(SettingsError, match=r"\[mcp\]"):
        create_app(ScriptedEngine, Settings(data_dir=tmp_path, mcp_config=tmp_path / "mcp.json"))


def test_chat_uses_mcp_tools_and_survives_server_exit(start: Start, tmp_path: Path) -> None:
    entries = {
        "little": {"command": sys.executable, "args": [LITTLE]},
        "broken": {"command": "no-such-program-anywhere"},
    }
    entries["socket"] = {"type": "ws", "url": "ws://x"}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": entries}))
    wanted = iter([("little__add", '{"a": 2, "b": 40}'), ("little__die", "{}")])

    def script(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        if messages[-1].role == "tool":
            yield from say(f"It said: {messages[-1].content}")
        else:
            name, arguments = next(wanted)
            yield Event("tool_call", tool_call=ToolCall(f"call_{name}", name, arguments))

    server = start(ScriptedEngine(script), mcp_config=tmp_path / "mcp.json").ready()
    page = server.client.get("/tools", headers=FRAGMENT).text
    assert "little__add" in page and "from little" in page and " checked" not in page
    assert "broken is not running: no such program." in page
    assert "Left out (1)" in page and "type &#34;ws&#34; is not supported" in page
    server.client.post("/tools", data={"tool-little__add": "on", "tool-little__die": "on"})
    chat_id = None
    for result in ("It said: 42", "It said: error: the server little exited during the call: it has exited"):
        turn = server.ask("Go", chat_id)
        chat_id = turn.chat_id
        server.wait(lambda turn=turn: server.chat.turns.asking(turn.generation_id) is not None)
        asking = server.chat.turns.asking(turn.generation_id)
        fields = {"call": asking.id, "answer": "once"}
        server.client.post(f"/generations/{turn.generation_id}/permission", data=fields)
        answer = server.finished(turn)
        assert (answer.state, answer.content) == ("done", result)


def test_page_fetches_prompts_and_resources(start: Start, tmp_path: Path) -> None:
    entries = {"little": {"command": sys.executable, "args": [LITTLE]}}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": entries}))
    server = start(ScriptedEngine(lambda messages, thinking: say("Yes.")), mcp_config=tmp_path / "mcp.json").ready()
    server.client.get("/tools")  # waits until the servers have started
    page = server.client.get("/").text
    assert 'id="command-little:review"' in page and "Review a piece of code." in page

    def fetched(command: str, argument: str = "") -> tuple[int, dict[str, str]]:
        reply = server.client.post(f"/tools/offers/{command}", data={"argument": argument})
        return reply.status_code, reply.json()

    assert fetched("little:review", "x = 1") == (200, {"name": "", "text": "Review in a kind tone:\nx = 1"})
    assert fetched("little:today-s-notes") == (200, {"name": "Today's notes", "text": "# Today\n\nBuy   milk."})
    assert fetched("little:review") == (502, {"problem": "/little:review: missing: code."})
    status, refused = fetched("little:large")
    assert status == 422 and "200,001 characters" in refused["problem"]
    assert fetched("little:picture")[0] == 404 and fetched("nothing")[0] == 404
