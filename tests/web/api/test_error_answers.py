"""Every API route responds to every kind of error in its own format, without breaking the connection."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPConnection
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import pytest
from scripted_engine import ScriptedEngine, say

from notso.smollm3 import InvalidRequestError
from notso.web.edge.errors import api_error_of, is_api_path
from notso.web.engine.port import ChatEngine
from notso.web.values.errors import EngineUnavailableError

ASK = {"role": "user", "content": "Hello"}
CHAT: dict[str, Any] = {"messages": [ASK]}
PROMPT: dict[str, Any] = {"prompt": [65, 66]}
INPUT: dict[str, Any] = {"input": "Hello"}
NOTHING: dict[str, Any] = {}
PATHS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(("/chat/completions", "/v1/chat/completions", "/apply-template"), CHAT),
    **dict.fromkeys(("/chat/completions/input_tokens", "/v1/chat/completions/input_tokens"), CHAT),
    **dict.fromkeys(("/v1/completions", "/completion", "/completions"), PROMPT),
    **dict.fromkeys(("/v1/responses", "/responses"), INPUT),
    **dict.fromkeys(("/v1/embeddings", "/embeddings", "/embedding"), INPUT),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/reranking", "/v1/reranking", "/infill", "/v1/infill"), NOTHING),
    **dict.fromkeys(("/api/push", "/api/create", "/api/copy", "/ping"), NOTHING),
    "/v1/messages": CHAT | {"max_tokens": 9},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses/input_tokens": INPUT,
    "/v1/chat/completions/control": {"id": "chatcmpl-0"},
    "/tokenize": CHAT,
    "/detokenize": {"tokens": [65]},
    "/api/chat": CHAT | {"stream": False},
    "/api/generate": {"prompt": "Hello", "stream": False},
    "/api/embed": {"input": "Hello" * 1000},
    "/api/embeddings": {"prompt": "Hello"},
    "/api/show": {"model": "scripted"},
    "/api/pull": {"model": "scripted"},
    "/v1/load_lora_adapter": {"lora_name": "new", "lora_path": "new.gguf"},
    "/v1/unload_lora_adapter": {"lora_name": "old"},
    "/v1/files": {},
    "/v1/batches": {"input_file_id": "file-0", "endpoint": "/v1/responses", "completion_window": "24h"},
    "/v1/batches/{batch_id}/cancel": {},
    "/v1/responses/{response_id}/cancel": {},
    "/v1/vector_stores": {"name": "a store"},
    "/v1/vector_stores/{store_id}": {"name": "a store"},
    "/v1/vector_stores/{store_id}/search": {"query": "Hello"},
    "/v1/vector_stores/{store_id}/files": {"file_id": "file-0"},
}
"""Body of a valid request to each path that accepts POST."""
MESSAGES = ("/v1/messages", "/v1/messages/count_tokens")
EXTRA = [("/v1/completions", {"prompt": [65], "echo": True}), ("/tokenize", {"content": "a", "with_pieces": True})]
"""Further requests, which call other methods of the engine."""

BAD = {"type": "object", "properties": {"a": {"pattern": "("}}}
FUNCTION = {"name": "f", "parameters": BAD}
SCHEMAS: list[dict[str, Any]] = [
    {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": BAD}}},
    {"json_schema": BAD},
    {"structured_outputs": {"json": BAD}},
    {"format": BAD},
    {"format": BAD, "messages": []},
    {"text": {"format": {"type": "json_schema", "name": "n", "schema": BAD}}},
    {"output_config": {"format": {"type": "json_schema", "schema": BAD}}},
    {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    {"tools": [{"type": "function", "function": FUNCTION | {"strict": True}}]},
    {"tools": [{"type": "function", **FUNCTION}], "tool_choice": "required"},
    {"tools": [{"type": "function", **FUNCTION, "strict": True}]},
    {"tools": [{"name": "f", "input_schema": BAD}], "tool_choice": {"type": "any"}},
    {"tools": [{"name": "f", "input_schema": BAD, "strict": True}]},
]
"""An invalid schema wherever an API accepts one."""
WRONG: list[Any] = [-1, "x", [[]], {"type": {}}]
REFUSALS = (400, 403, 404, 405, 415)
"""Statuses of routes that are not available, or that need more than PATHS gives them."""
ERRORS: list[tuple[Exception, str]] = [
    (EngineUnavailableError("the engine does not respond"), "engine_unavailable"),
    (InvalidRequestError("nothing is right", param="seed"), "invalid_value"),
    (ZeroDivisionError("a path or a prompt"), "internal_error"),
]
NOT_CALLED = ("info", "adapters", "stats", "when_lost", "close")
OF_PAGES = ("speculative_prefill", "estimate", "forget_reading", "receipt")
RETRIED = ("clear_cache",)
CALLS = [
    *(name for name in vars(ChatEngine) if not name.startswith("_") and name not in NOT_CALLED + OF_PAGES + RETRIED),
    *("adapters.add", "adapters.remove"),
]


class FailingEngine(ScriptedEngine):
    """Raises `error` in each call of `failing`, and adds the names of other calls to `called`."""

    def __init__(self) -> None:
        super().__init__(lambda *_: iter(say("Hi")))
        self.failing, self.error, self.called = "", Exception(), set[str]()
        for name in CALLS:
            owner, method = (self.adapters, name.removeprefix("adapters.")) if "." in name else (self, name)
            setattr(owner, method, partial(self._call, name, getattr(owner, method)))

    def _call(self, name: str, work: Callable[..., Any], *args: Any, **options: Any) -> Any:
        if name == self.failing:
            raise self.error
        self.called.add(name)
        return work(*args, **options)


class Answer(NamedTuple):
    status_code: int
    text: str

    def json(self) -> Any:
        return json.loads(self.text)


class Client:
    """Sends requests to all routes over one connection, and checks the format of errors. httpx would take a third of
    the time of these tests."""

    def __init__(self, server: Any) -> None:
        self._connection = HTTPConnection(urlsplit(server.address).netloc, timeout=60)
        self._connection.connect()
        self._connection.auto_open = 0
        routes = {(method, each.path) for each in server.app.router.routes for method in each.methods}
        self.routes = sorted(route for route in routes if is_api_path(route[1]))

    def address(self, path: str) -> str:
        """Return an address of the route. The response or adapter that the request needs is created."""
        if "{response_id}" in path:
            path = path.replace("{response_id}", self.send("POST", "/v1/responses", INPUT).json()["id"])
        if path == "/v1/unload_lora_adapter":
            self.send("POST", "/v1/load_lora_adapter", {"lora_name": "old", "lora_path": "new.gguf"})
        return path.replace("{name:path}", "scripted").replace("{", "").replace("}", "")

    def send(self, method: str, path: str, body: dict[str, Any] | None) -> Answer:
        headers = {"Content-Type": "application/json"} if body is not None else {}
        self._connection.request(method, path, json.dumps(body) if body is not None else None, headers)
        response = self._connection.getresponse()
        answer = Answer(response.status, response.read().decode())
        assert not response.will_close, f"the connection ends after {method} {path}"
        if answer.status_code >= 400 and method != "HEAD":
            found = answer.json()
            match path.split("/"):
                case ["", "api", *_]:
                    assert found == {"error": str(found["error"])}, (path, found)
                case ["", "v1", "messages", *_]:
                    assert found["type"] == "error" and found["error"]["message"], (path, found)
                case _:
                    assert found["error"].keys() == {"message", "type", "param", "code"}, (path, found)
        return answer

    def requests(self) -> Iterator[tuple[str, str, dict[str, Any] | None]]:
        for method, path in self.routes:
            yield method, path, PATHS[path] if method == "POST" else None
        for path, body in EXTRA:
            yield "POST", path, body


@pytest.fixture
def engine() -> FailingEngine:
    return FailingEngine()


@pytest.fixture
def client(start: Callable[..., Any], tmp_path: Any, engine: FailingEngine) -> Client:
    (tmp_path / "new.gguf").touch()
    return Client(start(engine, adapter_dir=tmp_path).ready())


def test_invalid_schema_is_rejected_by_every_route(client: Client) -> None:
    named: dict[str, set[str]] = {}
    for path, fields in itertools.product(PATHS, SCHEMAS):
        answer = client.send("POST", path, PATHS[path] | fields)
        assert answer.status_code < 500, (path, fields, answer.text)
        if "ECMA-262" in answer.text and not path.startswith("/api/"):
            named.setdefault(path, set()).add(answer.json()["error"]["param"])
    text = {"json_schema", "structured_outputs.json"}
    chat = text | {"response_format", "tools"}
    assert named == {
        **{path: chat for path, body in PATHS.items() if body is CHAT and path not in ("/tokenize", *MESSAGES)},
        **{path: {"output_config.format.schema", "tools"} for path in MESSAGES},
        **{path: {"text.format.schema", "tools"} for path, body in PATHS.items() if "/responses" in path and body},
        **{path: text for path, body in PATHS.items() if body is PROMPT},
    }


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_no_value_of_a_field_causes_an_internal_error(client: Client, wrong: Any) -> None:
    document = client.send("GET", "/openapi.json", None).json()
    tried = 0
    for path in PATHS:
        content = document["paths"][path]["post"].get("requestBody", {}).get("content", {})
        schema = content.get("application/json", {}).get("schema", {})
        schema = document["components"]["schemas"].get(schema.get("$ref", "").rpartition("/")[2], schema)
        for field in schema.get("properties", {}):
            answer = client.send("POST", path, PATHS[path] | {field: wrong})
            assert answer.status_code < 500, (path, field, answer.text)
            tried += 1
    assert tried > 400


@pytest.mark.parametrize(("error", "code"), ERRORS)
def test_error_of_any_engine_call_is_reported_in_the_format_of_the_api(
    client: Client, engine: FailingEngine, error: Exception, code: str
) -> None:
    engine.error = error
    expected = api_error_of(error)
    assert expected.code == code
    found = set()
    for method, path, body in client.requests():
        address = client.address(path)
        engine.called.clear()
        client.send(method, address, body)
        for call in sorted(engine.called):
            address = client.address(path)
            engine.failing = call
            answer = client.send(method, address, body)
            engine.failing = ""
            if answer.status_code == expected.status and expected.message in answer.text:
                found.add(call)
            else:
                assert answer.status_code in (*range(200, 300), *REFUSALS), (call, path, answer.text)
    assert found == {*CALLS}
