"""A store in a plugin's process: every method goes there and back, and a stuck one is an error of the store."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from plugins.installed_plugins import install

from notso.plugins.process import PluginProcess
from notso.smollm3 import Message, ToolCall
from notso.web.store import plugin_store as plugin_store_module
from notso.web.store.plugin_store import plugin_store
from notso.web.store.protocol import (
    Attachment,
    Chat,
    ChatStore,
    NewTurn,
    SavedPrompt,
    StoredMessage,
    StoredResponse,
    ToolUse,
    TurnAccepted,
    TurnRefused,
)
from notso.web.store.wire_values import PROPERTIES, types_of, unpacked_error
from notso.web.testing.scripted_engine import ScriptedEngine
from notso.web.values.errors import StorageDamagedError, StorageError

CHAT = Chat("c1", "Title", True, date(2026, 11, 23), 1, 2, settings={"temperature": 1.0, "top_k": 1, "on": True})
USER = StoredMessage("m1", "c1", "user", "Héllo \U0001f600", "", "done", 3, attachments=(Attachment("a.txt", "text"),))
ASSISTANT = StoredMessage("m2", "c1", "assistant", "", "", "queued", 4, generation_id="g1", parent_id="m1")


def with_store(name: str, tmp_path: Path, work: Callable[[ChatStore], Awaitable[None]]) -> None:
    async def run() -> None:
        process = PluginProcess(name)
        store = plugin_store(process, tmp_path / "data")
        try:
            await store.open()
            await work(store)
            await store.close()
        finally:
            await asyncio.to_thread(process.close)

    asyncio.run(run())


def test_what_is_kept_comes_back_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)

    async def work(store: ChatStore) -> None:
        assert (store.damage, store.read_only) == ("", False)
        accepted = await store.add_turn("local", NewTurn(USER, ASSISTANT, "k1"), CHAT)
        assert isinstance(accepted, TurnAccepted) and accepted.user_message.attachments == USER.attachments
        refused = await store.add_turn("local", NewTurn(replace(USER, id="m3"), replace(ASSISTANT, id="m4"), "k2"))
        assert isinstance(refused, TurnRefused) and refused.running is not None and refused.running.id == "m2"
        done = replace(
            accepted.assistant_message,
            content="Yes",
            state="done",
            tool_uses=(ToolUse("t1", "clock", "{}", "done", result="noon", duration_ms=1.5),),
        )
        await store.save_message(done)
        whole = await store.whole_chat("local", "c1")
        assert whole is not None and whole.messages[-1] == done
        kept = whole.chat.settings
        assert kept == CHAT.settings and {name: type(kept[name]) for name in kept} == {
            "temperature": float,
            "top_k": int,
            "on": bool,
        }
        assert await store.chats("other") == [] and await store.chat("local", "none") is None
        assert [hit.chat_id for hit in await store.search("local", "Yes", limit=5)] == ["c1"]
        conversation = (Message("user", "Hi"), Message("assistant", "", tool_calls=(ToolCall("clock", "{}", "1"),)))
        response = StoredResponse("r1", None, {"a": [1, 2.5, None]}, conversation, 9, ({"type": "message"},))
        await store.save_response("local", response)
        assert await store.response("local", "r1") == response
        await store.save_prompt("local", SavedPrompt("p", "message", "text"))
        assert await store.prompts("local") == [SavedPrompt("p", "message", "text")]
        trash = await store.trash_chat("local", "c1")
        assert trash is not None and await store.chats("local") == [] and await store.restore("local", trash) == "c1"
        for running in ({"g1"}, ("g1",), []):
            await store.heartbeat(running)
        await store.backup(tmp_path / "copy.db")
        assert (tmp_path / "copy.db").stat().st_size > 0
        with pytest.raises(StorageError, match="no method no_such_method"):
            store.no_such_method  # type: ignore[attr-defined]  # noqa: B018

    with_store("keeper", tmp_path, work)


def test_a_method_that_is_new_in_the_protocol_needs_nothing_here() -> None:
    methods = [name for name, each in inspect.getmembers(ChatStore, inspect.iscoroutinefunction) if name[0] != "_"]
    assert len(methods) > 30 and all(types_of(name) for name in methods)
    properties = {name for name, each in inspect.getmembers(ChatStore) if isinstance(each, property)}
    assert properties == set(PROPERTIES)
    for name in ("__init__", "nothing", "damage"):
        with pytest.raises(StorageError):
            types_of(name)


def test_an_error_keeps_its_kind_and_only_a_stores() -> None:
    assert type(unpacked_error({"kind": "StorageDamagedError", "message": "x"})) is StorageDamagedError
    for kind in ("ToolError", "annotations", "SystemExit", None):
        assert type(unpacked_error({"kind": kind, "message": "x"})) is StorageError


def test_a_stuck_one_is_an_error_of_the_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)

    async def work(store: ChatStore) -> None:
        monkeypatch.setattr(plugin_store_module, "STORE_SECONDS", 0.3)
        with pytest.raises(StorageError, match="the store took longer"):
            await store.chats("local")
        with pytest.raises(StorageError, match="switched off"):
            await store.chat("local", "c1")

    with_store("stuck", tmp_path, work)


def test_one_that_keeps_nothing_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch)

    async def work(store: ChatStore) -> None:
        pytest.fail("it opened")

    with pytest.raises(StorageError, match="keeps no conversations"):
        with_store("kind", tmp_path, work)


def test_a_server_whose_store_is_stuck_still_answers(
    start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from notso.plugins.plugin_set import Plugins

    install(tmp_path, monkeypatch)
    plugins = Plugins(("stuck",))
    server = start(ScriptedEngine(), plugins=plugins, store_plugin="stuck").ready()
    monkeypatch.setattr(plugin_store_module, "STORE_SECONDS", 0.3)
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    assert server.client.get("/").status_code == 503
    assert server.client.post("/v1/chat/completions", json=body).status_code == 200
    plugins.close()
