"""Requests of other programs, turn by turn and exactly as they send them: each gets the response it asks for.

docs/programs.md is generated from the same corpus (programs.py); a program is listed there because its sessions
pass.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from datetime import date
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import jsonschema
import pytest
from clients.scripted_server import instance
from strangers.corpus import Said, Whole, at, filled, said, sessions, whole_answer
from strangers.programs import page

from notso.smollm3 import Engine
from notso.smollm3.engine import input_processor
from notso.smollm3.text import chat_template
from notso.web.app import create_app
from notso.web.server import ChatServer, listen, page_url
from notso.web.values.settings import Settings

SESSIONS = sessions()
SEED, DAY = 1, date(2026, 11, 26)
PROGRAMS = {each["program"] for each in SESSIONS}
TYPED = ("type", "role", "tool_choice", "format", "stream", "think")
"""Fields whose values determine the kind of a request."""


def _fields(value: Any, path: str, depth: int = 4) -> Iterator[str]:
    if isinstance(value, dict) and depth:
        for name, each in value.items():
            yield f"{path}/{name}"
            if name in TYPED and isinstance(each, str | bool):
                yield f"{path}/{name}={each}"
            if name not in ("tools", "functions", "properties", "schema", "arguments", "input_schema"):
                yield from _fields(each, f"{path}/{name}", depth - 1)
    elif isinstance(value, list):
        for each in value:
            yield from _fields(each, path, depth)


def _named(session: Mapping[str, Any]) -> Any:
    return f"{session['program']}: {session['session']}"


def _by_default() -> Iterator[Any]:
    """Yield all sessions. Those with no new address, field or kind of message run only if the APIs have changed."""
    seen = set[str]()
    for session in sorted(SESSIONS, key=lambda each: -len(each["turns"])):
        fields = set[str]()
        for turn in session["turns"]:
            path = f"{turn['method']} {turn['address']}"
            fields |= {path, *_fields(turn.get("body"), path), *(f"{path} {each}" for each in turn["expected"])}
        marks = [] if fields - seen else [pytest.mark.long("programs")]
        yield pytest.param(session, id=_named(session), marks=marks)
        seen |= fields


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mapping[str, str]]:
    """Serve the demo model on the server's own port and Ollama's; requests without a seed get a fixed one.

    The date, which is part of every prompt, is fixed as well: on some days, the model ends two answers after reasoning.
    """
    patch = pytest.MonkeyPatch()
    patch.setattr(input_processor, "secrets", SimpleNamespace(randbits=lambda bits: SEED))
    patch.setattr(chat_template, "_today", lambda: DAY)
    settings = Settings(port=0, ollama_port=0, data_dir=tmp_path_factory.mktemp("strangers"))
    sockets = [listen(settings), listen(settings, 0)]
    app = create_app(Engine.load, settings)
    app.state.ollama_port = sockets[1].getsockname()[1]
    ready = threading.Event()
    server = ChatServer(app, page_url(sockets[0], settings), lambda address: ready.set())
    thread = threading.Thread(target=server.run, kwargs={"sockets": sockets})
    thread.start()
    assert ready.wait(60)
    own, ollama = (f"http://127.0.0.1:{each.getsockname()[1]}" for each in sockets)
    while httpx.get(f"{own}/health", timeout=60).status_code == 503:  # the model is being loaded
        pass
    yield {"own": own, "ollama": ollama}
    server.should_exit = True
    thread.join()
    patch.undo()


def _schema(body: Mapping[str, Any]) -> Any:
    """Return the JSON schema for the answer, or None."""
    for pointer in (
        "/response_format/json_schema/schema",
        "/text/format/schema",
        "/output_config/format/schema",
        "/structured_outputs/json",
        "/format",
    ):
        if isinstance(schema := at(body, pointer), dict):
            return schema
    return None


def _parameters(body: Mapping[str, Any], name: str) -> Any:
    """Return the schema of a tool's arguments from a request of any API."""
    tools = [tool.get("function", tool) for tool in body["tools"]]
    tool = next(each for each in tools if each.get("name") == name)
    return tool.get("parameters") or tool.get("input_schema")


def check(turn: Mapping[str, Any], body: Mapping[str, Any], whole: Whole, answer: Said) -> None:
    """Check that an answer meets the expectations of its turn."""
    expected = dict(turn["expected"])
    expected.pop("ignored", None)
    for pointer in expected.pop("has", ()):
        assert at(whole, pointer) is not None, pointer
    if expected.pop("text", False):
        assert answer.text.strip()
    if name := expected.pop("call", None):
        assert [called for called, _ in answer.calls][:1] == [name], answer
    for called, arguments in answer.calls:  # also if the model chose to call a tool
        jsonschema.validate(arguments, _parameters(body, called))
    if expected.pop("json", False):
        value = json.loads(answer.text)
        schema = _schema(body)
        jsonschema.validate(value, schema if schema is not None else {"type": "object"})
    if stops := expected.pop("stop", ()):
        assert not any(stop in answer.text for stop in stops)
    if (most := expected.pop("tokens", None)) is not None:
        assert answer.tokens is not None and 0 < answer.tokens <= most
    if (thinking := expected.pop("thinking", None)) is not None:
        assert bool(answer.thought.strip()) == thinking
    assert not expected, f"nothing checks {sorted(expected)}"


@pytest.mark.parametrize("session", _by_default())
def test_each_turn_of_a_session_gets_the_expected_response(
    addresses: Mapping[str, str], session: dict[str, Any]
) -> None:
    answers: list[Whole] = []
    for turn in session["turns"]:
        body = filled(turn.get("body"), answers)
        content = None if body is None else json.dumps(body, ensure_ascii=False).encode()
        headers = session["headers"] | turn.get("headers", {})
        address = addresses[session.get("port", "own")] + turn["address"]
        reply = httpx.request(turn["method"], address, content=content, headers=headers, timeout=60)
        where = f"{turn['method']} {turn['address']}"
        assert reply.status_code == 200, f"{where}: {reply.text}"
        ignored = [name.strip() for name in reply.headers.get("x-notso-ignored", "").split(",") if name]
        assert ignored == turn["expected"].get("ignored", []), where
        whole = whole_answer(turn["address"], reply.headers["content-type"], reply.text)
        answers.append(whole)
        is_answer = turn["method"] == "POST" and "has" not in turn["expected"]
        check(turn, body, whole, said(turn["address"], whole) if is_answer else Said("", "", (), None))


def test_scripted_server_follows_schemas_with_lists_of_types() -> None:
    kinds = (["string", "null"], ["null", "string"], ["array", "null"], ["object", "null"], ["integer"])
    schema = {"type": ["object", "null"], "properties": {f"{kind}": {"type": kind} for kind in kinds}}
    jsonschema.validate(instance(schema, schema), schema)


def test_corpus_is_large_and_names_its_sources() -> None:
    """The corpus has enough programs, and enough of them send tools or a schema; each session names its source file."""
    assert len(PROGRAMS) >= 60
    bodies = [(each["program"], turn.get("body") or {}) for each in SESSIONS for turn in each["turns"]]
    assert len({name for name, body in bodies if body.get("tools") or _schema(body)}) >= 25
    assert all(each["source"] and each["version"] and each["turns"] for each in SESSIONS)
    names = [(each["program"], each["session"]) for each in SESSIONS]
    assert len(set(names)) == len(names)


def test_page_of_supported_programs_is_up_to_date() -> None:
    page_path = Path(__file__).parents[2] / "docs" / "programs.md"
    assert page_path.read_text("utf-8") == page(), "python tests/strangers/programs.py > docs/programs.md"
