"""Every route is called by every kind of caller with the ids of another owner in path, query, form and body. The cases
follow the table of routes, so a route without an entry fails. No caller may read or change another owner's data, except
that members of a project may read it."""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import iter_route_contexts
from long_tests import is_long
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event, Progress, ToolCall
from notso.web import app
from notso.web.edge.access import COOKIE, Caller, _digest, _Session, include_marked
from notso.web.sign_in.issued_keys import KeyManager
from notso.web.store.sqlite.access import SQLiteAccessStore
from notso.web.turns.turns import Turns
from notso.web.values.ids import new_id
from notso.web.values.sign_in import SignInSettings

WORD, SECRET = "heliotrope", "tropaeolum"
"""WORD is the search query. SECRET stands in the same texts, and only their owner may see it in the results."""
ENGINE_KEY = "a key for front ends only"
OUTSIDERS = ("anonymous", "wrong", "revoked", "expired")
OTHERS = ("B", "member", "operator")
"""`member` may read a project that belongs to A."""


@dataclass(frozen=True)
class Entry:
    """The request for a route; `{names}` are replaced from a Things object.

    `own`, `others`, `member`: expected statuses for the owner, for other known callers, and for a project member where
    that differs. `ids`: path parameters whose names differ from the names in Things.
    """

    kind: str = "owned"
    ids: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    form: Mapping[str, str] | None = None
    json: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    others: frozenset[int] = frozenset({404})
    own: frozenset[int] = frozenset({200, 204, 303})
    member: frozenset[int] | None = None


ANSWERED = {"role": "assistant", "content": "y"}
FOUND = frozenset({200, 204, 303})
DENIED = frozenset({403})
FRAGMENT = {"HX-Request": "true"}
PUBLIC, OPEN, OPERATOR, FRONT_END = Entry("public"), Entry("open"), Entry("operator"), Entry("front end")
OWNED = Entry()
TO_ANYBODY = Entry(others=FOUND)
"""The route shows only the caller's own data, whatever ids the request names."""


def _form(**fields: str) -> Entry:
    return Entry(form=fields)


ENTRIES: dict[str, Entry] = {
    **dict.fromkeys(("GET /health", "HEAD /health", "GET /v1/health", "GET /livez", "HEAD /livez"), PUBLIC),
    **dict.fromkeys(("GET /ping", "POST /ping"), PUBLIC),
    **dict.fromkeys(("GET /static/{path:path}", "GET /login", "POST /login"), PUBLIC),
    **dict.fromkeys(("GET /login/oidc", "GET /login/oidc/callback"), PUBLIC),
    **dict.fromkeys(("GET /backup", "GET /metrics", "GET /operator", "POST /plugins/{name}/start"), OPERATOR),
    **dict.fromkeys(("POST /models/switch", "POST /models/download", "POST /models/download/stop"), OPERATOR),
    **dict.fromkeys(("POST /operator/keys", "POST /operator/keys/revoke", "POST /operator/users/remove"), OPERATOR),
    **dict.fromkeys(("POST /models/adapters/load", "POST /models/adapters/unload"), OPERATOR),
    **dict.fromkeys(("POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"), OPERATOR),
    **{f"POST /engine/v1/{name}": FRONT_END for name in ("events", "submit", "prepare", "steer", "call")},
    **{
        f"POST {prefix}{path}": OPEN
        for prefix in ("", "/v1")
        for path in ("/chat/completions", "/chat/completions/input_tokens", "/completions")
    },
    **{
        f"POST {prefix}/{path}": OPEN
        for prefix in ("", "/v1")
        for path in ("embeddings", "infill", "rerank", "reranking")
    },
    **{f"POST /api/{name}": OPEN for name in ("chat", "generate", "show", "embed", "embeddings")},
    **{f"POST /api/{name}": OPEN for name in ("pull", "push", "create", "copy")},
    **{f"{verb} /api/{name}": OPEN for verb in ("GET", "HEAD") for name in ("version", "tags")},
    **dict.fromkeys(("DELETE /api/delete", "GET /api/ps", "HEAD /"), OPEN),
    **dict.fromkeys(("GET /v1/models", "GET /v1/models/{name:path}", "GET /models", "GET /models/download"), OPEN),
    **dict.fromkeys(
        ("POST /completion", "POST /embedding", "POST /tokenize", "POST /detokenize", "POST /apply-template"), OPEN
    ),
    **dict.fromkeys(
        (
            "GET /tokenizer_info",
            "GET /props",
            "GET /openapi.json",
            "GET /docs",
            "GET /slots",
            "GET /version",
            "GET /load",
        ),
        OPEN,
    ),
    "GET /load": OPEN,
    **dict.fromkeys(("POST /v1/messages", "POST /v1/messages/count_tokens", "POST /v1/responses/input_tokens"), OPEN),
    **dict.fromkeys(("POST /plugins/{name}/commands/{command}", "POST /plugins/{name}/pages/{path:path}"), OPEN),
    **dict.fromkeys(("GET /plugins/{name}/pages/{path:path}", "POST /preview", "POST /language"), OPEN),
    **dict.fromkeys(("POST /attachments", "POST /tools/offers/{command}"), OPEN),
    "POST /documents": OPEN,
    "GET /documents": Entry(query={"q": WORD}, others=FOUND),
    "GET /documents/{document_id}": OWNED,
    "GET /documents/{document_id}/state": OWNED,
    "GET /documents/{document_id}/file": OWNED,
    "GET /documents/{document_id}/pages/{page}/image": Entry(own=frozenset({404})),  # the document is not a PDF
    "POST /documents/{document_id}/retry": Entry(form={}, own=frozenset({404})),
    "POST /documents/{document_id}/delete": Entry(ids={"document_id": "other_document"}, form={}),
    "GET /projects": OPEN,
    "POST /projects": Entry(form={"name": "{new_key}"}, others=FOUND),
    "GET /projects/{project_id}": Entry(member=FOUND),
    "POST /projects/{project_id}": Entry(form={"instructions": "Obey."}, member=DENIED),
    "POST /projects/{project_id}/delete": Entry(form={}, member=DENIED),
    "GET /projects/{project_id}/settings": Entry(member=DENIED),
    "POST /projects/{project_id}/settings": Entry(form={"temperature": "0.5"}, member=DENIED),
    "POST /projects/{project_id}/members": Entry(form={"name": "B", "rights": "add"}, member=DENIED),
    "POST /projects/{project_id}/members/remove": Entry(form={"member": "none"}, own=frozenset({404}), member=DENIED),
    "POST /chats/{chat_id}/project": _form(project="{project_id}"),
    "GET /memory": TO_ANYBODY,
    "POST /memory": _form(id="{memory_id}", text="Forget it."),
    "POST /memory/{memory_id}/delete": _form(),
    **dict.fromkeys(("POST /logout", "POST /estimate"), Entry("open", form={})),
    **dict.fromkeys(
        ("GET /", "GET /archive", "GET /export", "GET /prompts", "GET /settings", "GET /tools"), TO_ANYBODY
    ),
    **dict.fromkeys(("POST /settings", "POST /tools"), Entry(form={"temperature": "0.5"}, others=FOUND)),
    "POST /import": Entry(json=[{"role": "user", "content": "x"}, ANSWERED], others=FOUND),
    "POST /prompts": Entry(form={"name": "{prompt}", "text": "another"}, others=FOUND, own=frozenset({400})),
    "POST /prompts/{name}/delete": Entry(ids={"name": "prompt"}, form={}, others=frozenset({303, 404})),
    "POST /chats": Entry(form={"text": "x", "key": "{key}"}, others=FOUND, own=frozenset({303, 409})),
    "GET /chats": Entry(query={"current": "{chat_id}"}, headers=FRAGMENT, others=FOUND),
    "GET /search": Entry(query={"q": WORD}, others=FOUND),
    "GET /feed": Entry(query={"chat": "{chat_id}"}, others=FOUND),
    "GET /status": Entry(query={"chat": "{busy_chat}"}, others=FOUND),
    "GET /status/details": Entry(query={"chat": "{busy_chat}"}, others=FOUND),
    "POST /archive": Entry(
        form={"action": "delete", "chat-{busy_chat}": "on", "chat-{asking_chat}": "on"}, others=FOUND
    ),
    "POST /archive/undo/{trash_id}": _form(),
    "POST /undo/{trash_id}": _form(),
    "GET /chats/{chat_id}": OWNED,
    "GET /chats/{chat_id}/turns": OWNED,
    "GET /chats/{chat_id}/earlier": Entry(query={"before": "{message_id}"}),
    "GET /chats/{chat_id}/suggestions": Entry(others=frozenset({204})),
    "GET /chats/{chat_id}/settings": OWNED,
    "GET /chats/{chat_id}/tools": OWNED,
    "GET /chats/{chat_id}/export/{kind}": OWNED,
    "GET /chats/{chat_id}/share": OWNED,
    "POST /chats/{chat_id}/share": _form(days="1"),
    "POST /chats/{chat_id}/share/{share_id}/delete": Entry(ids={"share_id": "key"}, form={}, own=frozenset({404})),
    "GET /diagram": PUBLIC,
    "GET /shared/{secret}": Entry("public", ids={"secret": "key"}),
    "POST /chats/{chat_id}/messages": _form(text="more", key="{new_key}"),
    "POST /chats/{chat_id}/thinking": _form(),
    "POST /chats/{chat_id}/title": _form(title="Renamed"),
    "POST /chats/{chat_id}/pin": _form(pinned="on"),
    "POST /chats/{chat_id}/keep": _form(),
    "POST /chats/{chat_id}/archive": _form(),
    "POST /chats/{chat_id}/delete": Entry(ids={"chat_id": "busy_chat"}, form={"current": "{chat_id}"}),
    "POST /chats/{chat_id}/clear": Entry(ids={"chat_id": "busy_chat"}, form={}),
    "POST /chats/{chat_id}/reset": Entry(ids={"chat_id": "busy_chat"}, form={}),
    "POST /chats/{chat_id}/summarize": _form(key="{new_key}"),
    "POST /chats/{chat_id}/settings": _form(temperature="0.5"),
    "POST /chats/{chat_id}/tools": _form(),
    "POST /chats/{chat_id}/estimate": _form(text="more"),
    "GET /chats/{chat_id}/messages/{message_id}": OWNED,
    "GET /chats/{chat_id}/messages/{message_id}/text": OWNED,
    "GET /chats/{chat_id}/messages/{message_id}/edit": OWNED,
    "POST /chats/{chat_id}/messages/{message_id}/edit": _form(text="changed", key="{new_key}"),
    "POST /chats/{chat_id}/messages/{message_id}/regenerate": _form(key="{new_key}"),
    "POST /chats/{chat_id}/messages/{message_id}/continue": _form(),
    "POST /chats/{chat_id}/messages/{message_id}/choose": _form(),
    "POST /chats/{chat_id}/messages/{message_id}/branch": _form(),
    "GET /chats/{chat_id}/messages/{message_id}/again": OWNED,
    "GET /chats/{chat_id}/messages/{message_id}/tokens": Entry(own=frozenset({409})),
    "POST /chats/{chat_id}/messages/{message_id}/fork": Entry(
        form={"at": "0", "token": "1", "key": "{new_key}"}, own=frozenset({409})
    ),
    "GET /chats/{chat_id}/messages/{message_id}/receipt": Entry(own=frozenset({409})),
    "POST /chats/{chat_id}/messages/{message_id}/rate": _form(mode="up"),
    "POST /chats/{chat_id}/messages/{message_id}/delete": Entry(
        ids={"chat_id": "busy_chat"}, form={}, own=frozenset({404})
    ),
    "POST /chats/{chat_id}/messages/{message_id}/unsummarize": Entry(form={}, own=frozenset({409})),
    "POST /generations/{generation_id}/stop": Entry(ids={"generation_id": "busy_generation"}, form={}),
    "POST /generations/{generation_id}/answer-now": Entry(ids={"generation_id": "busy_generation"}, form={}),
    "GET /generations/{generation_id}/events": Entry(ids={"generation_id": "busy_generation"}),
    "GET /generations/{generation_id}/permission": Entry(ids={"generation_id": "asking_generation"}),
    "POST /generations/{generation_id}/permission": Entry(
        ids={"generation_id": "asking_generation"}, form={"call": "c1", "answer": "deny"}
    ),
    "POST /generations/{generation_id}/question": Entry(
        ids={"generation_id": "asking_generation"}, form={"question": "q", "answer": "decline"}, own=frozenset({409})
    ),
    "POST /v1/chat/completions/control": Entry(json={"id": "{running_id}", "action": "reasoning_end"}),
    "GET /v1/stream": Entry(query={"conv_id": "{conversation}"}),
    "DELETE /v1/stream": Entry(query={"conv_id": "{conversation}"}),
    "POST /v1/responses": Entry(json={"input": "more", "previous_response_id": "{response_id}"}),
    "POST /responses": Entry(json={"input": "more", "previous_response_id": "{response_id}"}),
    "GET /v1/responses/{response_id}": OWNED,
    "GET /v1/responses/{response_id}/input_items": OWNED,
    "POST /v1/responses/{response_id}/cancel": Entry(ids={"response_id": "background_id"}),
    "DELETE /v1/responses/{response_id}": Entry(ids={"response_id": "background_id"}),
    "POST /v1/files": Entry("open"),
    "GET /v1/files": TO_ANYBODY,
    "GET /v1/files/{file_id}": OWNED,
    "GET /v1/files/{file_id}/content": OWNED,
    "DELETE /v1/files/{file_id}": Entry(ids={"file_id": "other_file"}),
    "POST /v1/vector_stores": Entry(json={"name": "{new_key}"}, others=FOUND),
    "GET /v1/vector_stores": TO_ANYBODY,
    "GET /v1/vector_stores/{store_id}": Entry(member=FOUND),
    "POST /v1/vector_stores/{store_id}": Entry(json={"name": "{new_key}"}, member=DENIED),
    "DELETE /v1/vector_stores/{store_id}": Entry(ids={"store_id": "other_store"}),
    "POST /v1/vector_stores/{store_id}/search": Entry(json={"query": WORD}, member=FOUND),
    "POST /v1/vector_stores/{store_id}/files": Entry(
        json={"file_id": "{other_file}"},
        own=frozenset({400}),  # the file has the purpose "batch"
        member=DENIED,
    ),
    "GET /v1/vector_stores/{store_id}/files": Entry(member=FOUND),
    **dict.fromkeys(
        (
            "GET /v1/vector_stores/{store_id}/files/{file_id}",
            "GET /v1/vector_stores/{store_id}/files/{file_id}/content",
        ),
        Entry(ids={"file_id": "store_file"}, member=FOUND),
    ),
    "DELETE /v1/vector_stores/{store_id}/files/{file_id}": Entry(ids={"file_id": "store_file"}, member=DENIED),
    "POST /v1/batches": Entry(
        json={"input_file_id": "{file_id}", "endpoint": "/v1/completions", "completion_window": "24h"}
    ),
    "GET /v1/batches": TO_ANYBODY,
    "GET /v1/batches/{batch_id}": OWNED,
    "POST /v1/batches/{batch_id}/cancel": OWNED,
}


class Things:
    """The objects of one owner, each created when it is first accessed."""

    def __init__(self, world: World, key: str, owner: str) -> None:
        self._world, self._key, self.owner = world, key, owner
        self._made: dict[str, str] = {"kind": "json"}
        self._makers: dict[str, Callable[[], dict[str, str]]] = {
            **dict.fromkeys(("chat_id", "message_id", "key"), self._chat),
            **dict.fromkeys(("busy_chat", "busy_generation"), self._busy),
            **dict.fromkeys(("asking_chat", "asking_generation"), self._asking),
            **dict.fromkeys(("running_id", "conversation"), self._running),
            **{"trash_id": self._trash, "prompt": self._prompt, "response_id": self._response},
            "background_id": self._background,
            "file_id": lambda: {"file_id": self._file()},
            "other_file": lambda: {"other_file": self._file()},
            "batch_id": self._batch,
            **dict.fromkeys(("project_id", "store_id", "store_file"), self._project),
            "other_store": lambda: {"other_store": self._post("/v1/vector_stores", json={"name": SECRET}).json()["id"]},
            "memory_id": self._memory,
            "document_id": lambda: {"document_id": self._document()},
            "other_document": lambda: {"other_document": self._document()},
        }

    def everything(self) -> Things:
        """Create one object of each kind."""
        for name in self._makers:
            self[name]
        # the answer is saved; its stored state no longer changes
        self._world.server.wait(lambda: self._last(self["busy_chat"]).content == "held")
        return self

    def __getitem__(self, name: str) -> str:
        if name == "new_key":
            return new_id()
        if name in ("name", "path", "command"):
            return "none"
        if name == "page":
            return "1"
        if name not in self._made:
            self._made |= self._makers[name]()
        return self._made[name]

    def _post(self, path: str, **sent: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self._key}"} | sent.pop("headers", {})
        answer = self._world.server.client.post(path, headers=headers, **sent)
        assert answer.status_code < 400, (path, answer.text)
        return answer

    def _ask(self, text: str) -> tuple[str, str, Any]:
        key = new_id()
        location = self._post("/chats", data={"text": text, "key": key}).headers["location"]
        chat_id = location.removeprefix("/chats/")
        return key, chat_id, self._last(chat_id)

    def _last(self, chat_id: str) -> Any:
        server = self._world.server
        return server.on_loop(lambda: server.shared.store.messages(self.owner, chat_id))[-1]

    def _chat(self) -> dict[str, str]:
        key, chat_id, message = self._ask(f"{WORD} {SECRET}")
        self._world.server.wait(lambda: not self._last(chat_id).active)
        self._world.server.wait(lambda: not self._world.turn(message.generation_id))
        return {"chat_id": chat_id, "message_id": message.id, "key": key}

    def _busy(self) -> dict[str, str]:
        _, chat_id, message = self._ask(f"hold {SECRET}")
        return {"busy_chat": chat_id, "busy_generation": message.generation_id}

    def _asking(self) -> dict[str, str]:
        self._post("/tools", data={"tool-calculator": "on"})
        _, chat_id, message = self._ask(f"call {SECRET}")
        turns = self._world.server.chat.turns
        self._world.server.wait(
            lambda: self._world.server.on_loop(lambda: turns.asking(message.generation_id)) is not None
        )
        return {"asking_chat": chat_id, "asking_generation": message.generation_id}

    def _trash(self) -> dict[str, str]:
        _, chat_id, _ = self._ask(f"away {SECRET}")
        self._world.server.wait(lambda: not self._last(chat_id).active)
        return {"trash_id": self._post(f"/chats/{chat_id}/delete", data={}).headers["location"].rpartition("=")[2]}

    def _file(self) -> str:
        line = {"custom_id": SECRET, "method": "POST", "url": "/v1/completions", "body": {"prompt": SECRET}}
        files = {"file": (f"{SECRET}.jsonl", json.dumps(line))}
        return str(self._post("/v1/files", files=files, data={"purpose": "batch"}).json()["id"])

    def _project(self) -> dict[str, str]:
        """Create a project that contains a chat of A and that the member may read."""
        address = self._post("/projects", data={"name": f"Birds {new_id()}"}).headers["location"]
        project_id = address.removeprefix("/projects/")
        self._post(f"{address}/members", data={"name": "mia", "rights": "read"})
        document_id = self._document("shared", library=project_id)
        self._post("/chats", data={"text": f"{WORD} {SECRET}", "key": new_id(), "project": project_id})
        store_id = f"vs_{project_id.replace('-', '')}"
        return {"project_id": project_id, "store_id": store_id, "store_file": f"file-{document_id}"}

    def _memory(self) -> dict[str, str]:
        self._post("/memory", data={"text": SECRET})
        store = self._world.server.shared.store
        return {"memory_id": self._world.server.on_loop(lambda: store.memories(self.owner))[-1].id}

    def _document(self, secret: str = SECRET, library: str = "") -> str:
        name = f"{secret}-{new_id()}.txt"
        asked = {"params": {"name": name, "library": library}, "content": f"{WORD} {name}".encode()}
        document_id = str(self._post("/documents", **asked).json()["id"])
        documents = self._world.server.shared.store.documents

        def is_ready() -> bool:
            (found,) = self._world.server.on_loop(lambda: documents.some(self.owner, [document_id]))
            return bool(found.state == "ready")

        self._world.server.wait(is_ready)
        return document_id

    def _batch(self) -> dict[str, str]:
        asked = {"input_file_id": self["file_id"], "endpoint": "/v1/completions", "completion_window": "24h"}
        id = self._post("/v1/batches", json=asked | {"metadata": {"secret": SECRET}}).json()["id"]
        records = self._world.server.shared.store.records
        self._world.server.wait(lambda: not self._world.server.on_loop(lambda: records.batch(self.owner, id)).is_open)
        return {"batch_id": id}

    def _prompt(self) -> dict[str, str]:
        name = f"p{new_id()[-8:]}"
        self._post("/prompts", data={"name": name, "text": SECRET})
        return {"prompt": name}

    def _response(self) -> dict[str, str]:
        return {"response_id": self._post("/v1/responses", json={"input": SECRET}).json()["id"]}

    def _background(self) -> dict[str, str]:
        answer = self._post("/v1/responses", json={"input": f"hold {SECRET}", "background": True})
        return {"background_id": answer.json()["id"]}

    def _running(self) -> dict[str, str]:
        name, body = new_id(), {"messages": [{"role": "user", "content": f"hold {SECRET}"}], "stream": True}
        headers = {"Authorization": f"Bearer {self._key}", "X-Conversation-Id": name}
        with self._world.server.client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as answer:
            first = next(answer.iter_text())
        return {"conversation": name, "running_id": re.findall(r'"id": ?"([^"]+)"', first)[0]}


class World:
    """A server, its callers and the objects of A. Setting `release` ends the answers that are held."""

    def __init__(self, start: Callable[..., Any], folder: Path) -> None:
        self.release = threading.Event()
        book = KeyManager(lambda: SQLiteAccessStore(folder))
        (self._a, key), (b, _), (revoked, _) = book.add("A"), book.add("B"), book.add("gone")
        operator, _ = book.add("olga", is_operator=True)
        member, _ = book.add("mia")
        book.revoke("gone")
        self.owner = f"key:{key.id}"
        engine = ScriptedEngine(self._script, slots=256)
        self.server = start(
            *(engine,),
            **{"sign_in": SignInSettings(require_key=True), "engine_api": True, "engine_key": ENGINE_KEY},
            max_waiting_turns=256,
        ).ready()
        keys = {
            "B": b,
            "operator": operator,
            "member": member,
            "A": self._a,
            "wrong": "notso-wrong",
            "revoked": revoked,
        }
        self._headers = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
        self._headers |= {
            "anonymous": {},
            "expired": {"Cookie": f"{COOKIE}_{self.server.address.rpartition(':')[2]}=old"},
        }
        self._headers["front end"] = {"Authorization": f"Bearer {ENGINE_KEY}"}
        self._folder = folder
        self.requests: Counter[str] = Counter()

    def things(self) -> Things:
        """Return a Things object of A in which nothing exists yet."""
        return Things(self, self._a, self.owner)

    def turn(self, generation_id: str) -> Any:
        return self.server.on_loop(lambda: self.server.chat.turns.stats(generation_id))

    def state(self) -> Any:
        """Return everything stored for A and everything running for A."""
        return self.server.on_loop(self._state)

    def _state(self) -> Any:
        rows = []
        with sqlite3.connect(f"file:{self._folder}/notso.db?mode=ro", uri=True) as db:
            for (table,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall():
                columns = [name for _, name, *_ in db.execute(f"PRAGMA table_info({table})")]
                if "library_id" in columns:
                    own = f"SELECT * FROM {table} WHERE library_id IN (SELECT id FROM libraries WHERE owner = ?)"
                    rows.append((table, db.execute(own, (self.owner,)).fetchall()))
                if "owner" in columns:
                    rows.append((table, db.execute(f"SELECT * FROM {table} WHERE owner = ?", (self.owner,)).fetchall()))
        running = [(each.name, each._stopped) for each in self.server.shared.requests._open if each.owner == self.owner]
        turns = self.server.chat.turns
        done = [
            (name, each.turn.cancelled, each.running._answer_now_requested, turns.asking(name) is not None)
            for name, each in turns._consumers.items()
            if each.turn.request.options.owner == self.owner
        ]
        return rows, running, done, self.server.shared.engine.default.state

    def ask(self, who: str, route: str, entry: Entry, things: Things) -> tuple[int, str]:
        """Return the status and text of the response. The text is empty for an event stream, which is not read."""
        if who == "expired":
            ring = self.server.app.state.key_ring
            old = _Session(0.0, 0.0, 0.0, Caller(self.owner, "A"))
            self.server.on_loop(lambda: ring._add(_digest("old"), old))
        self.requests[who] += 1
        method, path = route.split()
        named = re.sub(r"\{(\w+)(?::\w+)?\}", lambda at: things[entry.ids.get(at[1], at[1])], path)
        body = {"data": _filled(entry.form, things)} if entry.form is not None else {}
        body |= {"json": _filled(entry.json, things)} if entry.json is not None else {}
        headers = {**self._headers[who], **entry.headers}
        client, query = self.server.client, _filled(entry.query, things)
        with client.stream(method, named, params=query, headers=headers, **body) as answer:
            is_events = answer.headers.get("content-type", "").startswith("text/event-stream")
            return answer.status_code, "" if is_events else answer.read().decode("utf-8", "replace")

    def _script(self, messages: Any, thinking: bool) -> Iterator[Event]:
        text = messages[-1].content
        if text.startswith("hold"):
            yield from say("held")
            # each event gives the server a chance to save the answer and to notice a stop
            while not self.release.wait(0.05):
                yield Event("progress", progress=Progress(1, 1, 0))
        elif text.startswith("call"):
            yield Event("tool_call", tool_call=ToolCall("c1", "calculator", '{"expression": "1+1"}'))
        else:
            yield from say("Said.")


def _filled(value: Any, things: Things) -> Any:
    """Replace `{names}` in strings, including the keys of mappings."""
    if isinstance(value, str):
        return re.sub(r"\{(\w+)\}", lambda at: things[at[1]], value)
    if isinstance(value, Mapping):
        return {_filled(key, things): _filled(each, things) for key, each in value.items()}
    return [_filled(each, things) for each in value] if isinstance(value, list) else value


def routes_of(app: Any) -> list[str]:
    """List the routes in the form `GET /chats/{chat_id}`."""
    return [
        f"{method} {context.path}"
        for context in iter_route_contexts(app.routes)
        for method in sorted(context.original_route.methods)
    ]


def faults(world: World, routes: Sequence[str]) -> Iterator[str]:
    """Yield one sentence for each fault of the given routes."""
    theirs = world.things().everything()
    known = [(route, ENTRIES[route]) for route in routes if route in ENTRIES]
    yield from (f"{route} has no entry" for route in routes if route not in ENTRIES)
    before = world.state()
    for route, entry in known:
        for who in (*OUTSIDERS, *OTHERS):
            status, text = world.ask(who, route, entry, theirs)
            if not _is_right(entry, who, status):
                yield f"{route} answered {status} to {who}"
            if SECRET in text and (route, who) != ("GET /backup", "operator"):
                yield f"{route} shows data of A to {who}"
            if (after := world.state()) != before:
                yield f"{route} by {who} changed data of A"
                before = after
    for route, entry in known:
        status, _ = world.ask("A", route, entry, world.things())
        if not _is_right(entry, "A", status):
            yield f"{route} answered {status} to A"
        if entry.kind == "front end" and world.ask("front end", route, entry, theirs)[0] in (401, 403):
            yield f"{route} refused a front end"


def _is_right(entry: Entry, who: str, status: int) -> bool:
    match entry.kind:
        case "public":
            return status != 401 and status < 500
        case "front end":
            return status == 401
    if who in OUTSIDERS:
        return status == 401
    if entry.kind == "operator" and who != "operator":
        return status == 403
    if entry.kind == "owned":
        others = entry.member if who == "member" and entry.member is not None else entry.others
        return status in (entry.own if who == "A" else others)
    return status not in (401, 403) and status < 503


@pytest.fixture
def world(start: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    monkeypatch.setattr(app, "UNDO_SECONDS", 3600.0)
    made = World(start, tmp_path / "data")
    yield made
    made.release.set()


def test_routes_do_not_expose_data_of_other_owners(world: World) -> None:
    all_routes = routes_of(world.server.app)
    assert sorted(set(ENTRIES) ^ set(all_routes)) == []
    routes = all_routes if is_long("server") else all_routes[::3]
    found = list(faults(world, routes))
    assert not found, "\n".join(found)
    kinds = Counter(ENTRIES[route].kind for route in routes)
    print(f"{len(routes)} routes {dict(kinds)}, {sum(world.requests.values())} requests {dict(world.requests)}")
    assert sum(kinds.values()) == len(routes) and min(world.requests[who] for who in (*OUTSIDERS, *OTHERS)) == len(
        routes
    )


def test_authorization_check_reports_unlisted_and_unguarded_routes(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def planted() -> dict[str, str]:
        return {"said": SECRET}

    world.server.app.get("/planted")(planted)
    assert routes_of(world.server.app)[-1] == "GET /planted"
    assert list(faults(world, ["GET /planted"])) == ["GET /planted has no entry"]
    monkeypatch.setitem(ENTRIES, "GET /planted", OPEN)
    found = list(faults(world, ["GET /planted"]))
    assert "GET /planted answered 200 to anonymous" in found and "GET /planted shows data of A to revoked" in found


def test_authorization_check_detects_stop_without_owner_check(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(self: Turns, owner: str, chat_id: str) -> None:
        for name, each in list(self._consumers.items()):
            if each.turn.message.chat_id == chat_id:
                self.stop(name)

    monkeypatch.setattr(Turns, "stop_chat", stop)
    found = list(faults(world, ["POST /archive"]))
    assert "POST /archive by B changed data of A" in found


def test_route_without_access_mark_is_rejected() -> None:
    router = APIRouter()
    router.add_api_route("/open", lambda: None)
    with pytest.raises(TypeError, match="/open has no access mark"):
        include_marked(FastAPI(), router)
