"""Up to eight hostile MCP servers beside an ordinary visitor: pages respond, memory stays bounded, and all processes
end."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from chaos.ledger import LONG, Ledger
from chaos.victim import ANSWERED, Victim, Witness
from web.tools.test_hostile_mcp import until_gone

SERVER = str(Path(__file__).parents[1] / "web" / "hostile_mcp_server.py")
GROUPS = {
    "floods": ["endless start", "endless line", "gigabyte", "notifications", "progress", "rubbish", "requests", "loud"],
    "lists": [
        "many tools",
        "same name",
        "odd names",
        "deep schema",
        "schema of 150",
        "endless pages",
        "dense",
        "thick",
    ],
    "manners": ["mute", "stubborn", "forks", "crash", "crash at once", "stderr", "trickle", "deaf"],
    "answers": ["error", "no result", "wrong ids", "silent", "costly pattern", "crooked schema"],
}
"""At most eight servers can be configured at once."""

SECONDS = 30.0 if LONG else 1.0  # length of the attack after every MCP server has had time to start
MORE = """
from notso.smollm3 import Event, ToolCall
from notso.web.tools import mcp_servers
mcp_servers.START_SECONDS = mcp_servers.CALL_SECONDS = settings.pop("patience")
settings["mcp_config"] = Path(settings["mcp_config"])

def script(messages, thinking):
    asked = messages[-1]
    if asked.role == "tool" or not asked.content.startswith("poke "):
        yield from say(f"It said: {asked.content[:100]}", piece=4096)
    else:
        name = asked.content.split()[1]
        yield Event("tool_call", tool_call=ToolCall("call_" + name, name, "{}"))
"""
EXIT_SECONDS = 15.0


def names_of(cases: list[str]) -> dict[str, str]:
    return {case.replace(" ", "-"): case for case in cases}


def poke(server: Victim, tool: str) -> None:
    """Start a chat whose answer calls the tool, and wait for its end."""
    chat = server.ask(f"poke {tool}")
    deadline = time.monotonic() + 120
    while True:
        page = server.client.get(chat).text
        if ANSWERED in page:
            return
        if asking := re.search(r"/generations/(\w+)/permission", page):
            url = f"/generations/{asking[1]}/permission"
            if call := re.search(r'name="call" value="([^"]+)"', server.client.get(url).text):
                server.client.post(url, data={"call": call[1], "answer": "once"})
        assert time.monotonic() < deadline, page[-3000:]
        time.sleep(0.05)


@pytest.mark.parametrize("group", GROUPS)
def test_server_survives_hostile_mcp_servers(
    victim: Callable[..., Victim], ledger: Ledger, tmp_path: Path, group: str
) -> None:
    cases, mark = names_of(GROUPS[group]), str(tmp_path)
    entries = {name: {"command": sys.executable, "args": [SERVER, case, str(tmp_path)]} for name, case in cases.items()}
    (tmp_path / "mcp.json").write_text(json.dumps({"mcpServers": entries}))
    server = victim(MORE, mcp_config=str(tmp_path / "mcp.json"), patience=5.0 if LONG else 1.0)
    with Witness(server) as witness:
        page = server.client.get("/tools").text  # waits until each server has started or failed
        tools = re.findall(r'name="tool-([\w-]+__[\w-]+)"', page)
        server.client.post("/tools", data={f"tool-{name}": "on" for name in tools})
        poked = list({name.partition("__")[0]: name for name in tools}.values())
        over = time.monotonic() + SECONDS
        while poked:
            for name in poked:
                poke(server, name)
            if time.monotonic() > over:
                break
        while time.monotonic() < over:
            time.sleep(0.1)
    began = time.monotonic()
    server.process.send_signal(signal.SIGTERM)
    failed = int(server.process.wait(60) != 0)
    exit_seconds = time.monotonic() - began
    until_gone(mark)
    failed += LONG and exit_seconds > EXIT_SECONDS
    ledger.note(
        "clients",
        f"hostile MCP servers: {', '.join(GROUPS[group])}",
        f"{len(cases)} at once, {len(poked)} of them called repeatedly for {SECONDS:g} s",
        failed,
        witness.figures | {"exit s": exit_seconds},
    )
