"""Peers that hang instead of failing: each is stopped by SIGSTOP. Pages respond, possibly with 503, and SIGTERM still
ends the server."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from chaos.ledger import LONG, Ledger
from chaos.victim import ANSWERED, Victim
from plugins.installed_plugins import install
from valkey_server import MISSING, PROGRAM, ValkeyServer
from web.store.postgres_server import postgres_server
from web.tools.test_mcp import LITTLE

from notso.web.values.ids import new_id

DRAIN_SECONDS = 2.0 if LONG else 0.0
EXIT_SECONDS = DRAIN_SECONDS + 5.0
PAGE_SECONDS = 3.0
PAGES = ("/", "/prompts", "/tools", "/settings", "/chats", "/status")
ENGINE_KEY = "a key for front ends only"
PLUGIN = """
from functools import partial
from notso.plugins.process import Plugins
serve = partial(serve, plugins=Plugins(("kind",)))
"""
TOOLS = 'settings["mcp_config"] = Path(settings["mcp_config"])'
Made = tuple[Victim, Callable[[], list[int]]]


def below(process: int) -> list[int]:
    """Return the process and all its descendants."""
    children = Path(f"/proc/{process}/task").glob("*/children")
    return [process, *(each for path in children for child in path.read_text().split() for each in below(int(child)))]


def with_postgres(parts: ExitStack, folder: Path, start: Callable[..., Victim], patch: pytest.MonkeyPatch) -> Made:
    postgres = parts.enter_context(postgres_server())
    assert postgres._process is not None
    server = start(database_url=postgres.new_database())
    return server, lambda: below(postgres._process.pid)


def with_valkey(parts: ExitStack, folder: Path, start: Callable[..., Victim], patch: pytest.MonkeyPatch) -> Made:
    if PROGRAM is None:
        pytest.skip(MISSING)
    valkey = ValkeyServer(folder)
    parts.callback(valkey.stop)
    assert valkey._process is not None
    return start(valkey_url=valkey.url), lambda: below(valkey._process.pid)


def with_engine(parts: ExitStack, folder: Path, start: Callable[..., Victim], patch: pytest.MonkeyPatch) -> Made:
    engine = Victim(folder / "engine", engine_api=True, engine_key=ENGINE_KEY)
    parts.callback(engine.close)
    return start(engine_url=engine.url.rstrip("/"), engine_key=ENGINE_KEY), lambda: below(engine.pid)


def with_plugin(parts: ExitStack, folder: Path, start: Callable[..., Victim], patch: pytest.MonkeyPatch) -> Made:
    install(folder, patch)
    server = start(PLUGIN)
    while server.client.get("/plugins/kind/pages/").status_code != 200:
        time.sleep(0.02)
    return server, lambda: below(server.pid)[1:]


def with_mcp_server(parts: ExitStack, folder: Path, start: Callable[..., Victim], patch: pytest.MonkeyPatch) -> Made:
    config = folder / "mcp.json"
    config.write_text(json.dumps({"mcpServers": {"little": {"command": sys.executable, "args": [LITTLE]}}}))
    server = start(TOOLS, mcp_config=str(config))
    assert "little__add" in server.client.get("/tools").text
    return server, lambda: below(server.pid)[1:]


SLOW = with_postgres, with_mcp_server
"""Waiting for these peers takes seconds, so they are tested only at full length."""
MADE = (with_valkey, with_engine, with_plugin, *(SLOW if LONG else ()))
PEERS = {each.__name__.removeprefix("with_"): each for each in MADE}


@pytest.mark.parametrize("peer", PEERS)
def test_suspended_peers_do_not_block_pages_or_shutdown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ledger: Ledger, peer: str
) -> None:
    with ExitStack() as parts:

        def start(more: str = "", **settings: Any) -> Victim:
            server = Victim(tmp_path / "data", more, drain_seconds=DRAIN_SECONDS, **settings)
            parts.callback(server.close)
            return server

        server, processes = PEERS[peer](parts, tmp_path, start, monkeypatch)
        while server.client.get("/health").status_code != 200:
            time.sleep(0.02)
        chat = server.ask("asked before")
        server.wait_for(ANSWERED, chat)
        stopped = processes()
        assert stopped
        for process in stopped:
            os.kill(process, signal.SIGSTOP)
        parts.callback(go_on, stopped)
        statuses: dict[str, int] = {}
        slowest = 0.0
        for _ in range(5 if LONG else 1):
            for path in (*PAGES, chat, "/livez") if LONG else (chat, "/prompts", "/livez"):
                began = time.monotonic()
                statuses[path] = server.client.get(path).status_code
                slowest = max(slowest, time.monotonic() - began)
        asked = server.client.post("/chats", data={"text": "asked meanwhile", "key": new_id()}).status_code
        began = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        server.process.wait(120)
        seconds = time.monotonic() - began
    print(peer, len(stopped), statuses, asked, slowest, seconds)
    failed = sum(status >= 400 and status != 503 for status in statuses.values()) + (asked not in (303, 503))
    failed += statuses["/livez"] != 200
    failed += LONG and (slowest > PAGE_SECONDS or seconds > EXIT_SECONDS)
    ledger.note(
        "holes",
        f"SIGSTOP on {peer.replace('_', ' ')}: page that hangs or fails, server that does not exit",
        f"{len(statuses)} pages, a question, and SIGTERM {DRAIN_SECONDS:g} s before running answers are aborted",
        failed,
        {"slowest page s": slowest, "exit s": seconds},
    )


def go_on(processes: list[int]) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
