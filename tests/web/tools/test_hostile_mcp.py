"""Hostile MCP servers, one at a time: their reported state, the result of a call, and the cleanup of their
processes."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest
from web.tools.test_mcp import Use, with_servers

from notso.web.tools import mcp_process, mcp_servers
from notso.web.tools.mcp_config import McpServerConfig
from notso.web.tools.mcp_servers import McpServers

SERVER = str(Path(__file__).with_name("hostile_mcp_server.py"))


def entry(case: str, *more: str) -> McpServerConfig:
    return McpServerConfig("bad", sys.executable, (SERVER, case, *more))


def until_gone(mark: str) -> None:
    """Wait until no process has `mark` in its command line, because killed processes need a moment to end."""
    deadline = time.monotonic() + 60
    while any(mark in command_of(path) for path in Path("/proc").glob("[0-9]*")):
        assert time.monotonic() < deadline, "a process is left over"
        time.sleep(0.02)


def command_of(process: Path) -> str:
    """Return the command line of the process at `/proc/<number>`."""
    try:
        return (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return ""


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "START_SECONDS", 120.0)
    monkeypatch.setattr(mcp_servers, "RESTART_SECONDS", 0.0)
    monkeypatch.setattr(mcp_process, "LEAVE_SECONDS", 0.1)
    monkeypatch.setattr(mcp_process, "TERMINATE_SECONDS", 0.1)


@pytest.mark.parametrize(
    ("case", "reason"),
    [
        ("endless start", "it sent a message of more than 4 MiB"),
        ("gigabyte", "it sent a message of more than 4 MiB"),
        ("many tools", "it sent a message of more than 4 MiB"),
        ("crash at once", "it exited immediately"),
    ],
)
def test_oversized_message_or_immediate_exit_prevents_start(case: str, reason: str) -> None:
    async def work(servers: McpServers, called: Use) -> None:
        assert servers.failures() == {"bad": reason} and servers.tools() == ()

    with_servers(work, entry(case))


@pytest.mark.parametrize("case", ["mute", "wrong ids", "trickle", "deep schema"])
def test_unresponsive_server_fails_to_start(case: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(mcp_servers, "START_SECONDS", 0.5)

    async def work(servers: McpServers, called: Use) -> None:
        assert servers.failures() == {"bad": "it did not respond within 0.5 s"}

    with_servers(work, entry(case, str(tmp_path)))
    until_gone(str(tmp_path))


@pytest.mark.parametrize(
    ("case", "state", "text"),
    [
        ("stderr", "done", "poked"),
        ("stubborn", "done", "poked"),
        ("forks", "done", "poked"),
        ("costly pattern", "done", "poked"),
        ("crooked schema", "done", "poked"),
        ("same name", "done", "poked"),
        ("endless pages", "done", "poked"),
        ("no result", "failed", "error: the server bad returned no result: it violates the MCP protocol"),
        ("crash", "failed", "error: the server bad exited during the call: it has exited"),
        (
            "endless line",
            "failed",
            "error: the server bad exited during the call: it sent a message of more than 4 MiB",
        ),
        ("loud", "failed", "error: the server bad exited during the call: it sent a message of more than 4 MiB"),
        ("dense", "failed", "error: the server bad exited during the call: it sent a message of more than 4 MiB"),
        (
            "thick",
            "failed",
            "error: the server bad exited during the call: it sent a message of more than 50,000 parts",
        ),
    ],
)
def test_call_returns_result_or_failure_reason(case: str, state: str, text: str, tmp_path: Path) -> None:
    async def work(servers: McpServers, called: Use) -> None:
        assert servers.failures() == {}
        for _ in range(2):  # a server that has exited is restarted
            outcome = await called(servers.tools()[0].name)
            assert (outcome.state, outcome.text) == (state, text)

    with_servers(work, entry(case, str(tmp_path)))
    until_gone(str(tmp_path))


@pytest.mark.parametrize("case", ["notifications", "progress", "rubbish", "requests", "deaf", "silent"])
def test_flooding_or_silent_server_fails_only_single_calls(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_servers, "CALL_SECONDS", 0.3)
    monkeypatch.setattr(mcp_process, "WRITE_SECONDS", 0.5)

    async def work(servers: McpServers, called: Use) -> None:
        for _ in range(3):
            outcome = await called("bad__poke", words="x" * 100_000)  # more than a pipe can buffer
            said = outcome.text
            assert said == "poked" or "did not respond within" in said or "did not read its input for" in said

    with_servers(work, entry(case))


def test_tool_names_and_descriptions_are_sanitized() -> None:
    async def work(servers: McpServers, called: Use) -> None:
        tools = servers.tools()
        assert len({tool.name for tool in tools}) == len(tools) >= 5
        for tool in tools:
            assert tool.name.replace("_", "").replace("-", "").isalnum() and tool.name.isascii()
            assert len(tool.name) <= 64 and len(tool.description) <= 600
            assert tool.description.isprintable() and tool.description.endswith(("]0;x", "a" * 64))

    with_servers(work, entry("odd names"))


def test_tool_with_too_deep_schema_is_left_out() -> None:
    async def work(servers: McpServers, called: Use) -> None:
        assert servers.failures() == {} and servers.tools() == ()

    with_servers(work, entry("schema of 150"))


def test_tool_error_is_shortened_to_one_line() -> None:
    async def work(servers: McpServers, called: Use) -> None:
        outcome = await called("bad__poke")
        assert outcome.state == "failed" and len(outcome.text) <= 520 and outcome.text.isprintable()

    with_servers(work, entry("error"))


def test_failed_start_is_not_retried_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(servers: McpServers, called: Use) -> None:
        server = servers._servers[0]
        monkeypatch.setattr(mcp_servers, "RESTART_SECONDS", 1000.0)
        assert not await server.start()
        monkeypatch.setattr(mcp_process.McpStdioTransport, "__aenter__", None)
        assert not await server.start() and servers.failures() == {"bad": "it exited immediately"}

    with_servers(work, entry("crash at once"))
