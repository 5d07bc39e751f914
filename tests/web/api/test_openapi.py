"""Each response schema of the OpenAPI document is checked against a real response."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import jsonschema
import pytest

from notso.smollm3 import Engine
from notso.web.api.server.openapi import COMPONENTS, OTHER_TYPES, REFUSED, STREAMED

HELLO = [{"role": "user", "content": "What is 27 + 48?"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": HELLO, "max_tokens": 2}}
OPTIONS = {"stream": False, "options": {"num_predict": 5}}
OF_OTHER_TESTS = {
    "DELETE /v1/stream",
    "POST /v1/chat/completions/control",
    "POST /v1/load_lora_adapter",
    "POST /v1/unload_lora_adapter",
    "POST /v1/responses/{response_id}/cancel",
    "GET /v1/stream",
}
"""Operations that need a running answer or files that do not exist here; other tests cover them."""


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with the demo model."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("openapi"))
    server = type(shared)(lambda: Engine.load(threads=1, context_tokens=512), settings)
    yield server.ready()
    server.close()


@pytest.fixture(scope="module")
def document(served: Any) -> dict[str, Any]:
    found: dict[str, Any] = served.client.get("/openapi.json").json()
    return found


def operations(document: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    for path, methods in document["paths"].items():
        for method, operation in methods.items():
            yield f"{method.upper()} {path}", operation


def closed(schema: Any) -> Any:
    """Return a copy of the schema whose objects allow only the properties that it names."""
    if isinstance(schema, list):
        return [closed(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: closed(each) for name, each in schema.items()}
    return made | ({"additionalProperties": False} if "properties" in made else {})


def test_every_supported_operation_has_success_schema(document: dict[str, Any]) -> None:
    found = dict(operations(document))
    assert found.keys() >= REFUSED | STREAMED.keys() | OTHER_TYPES.keys()
    for name, operation in found.items():
        good = {status for status in operation["responses"] if status.startswith("2")}
        assert bool(good) != (name in REFUSED), name
        for status in good if not name.startswith("HEAD") else ():
            assert all("schema" in each for each in operation["responses"][status]["content"].values()), name


def test_request_schemas_do_not_reuse_response_component_names(document: dict[str, Any]) -> None:
    names = set()
    for _, operation in operations(document):
        body = operation.get("requestBody", {}).get("content", {}).get("application/json", {}).get("schema", {})
        names.add(body.get("$ref", "").rpartition("/")[2])
    assert len(names) > 20 and names.isdisjoint(COMPONENTS)


def test_responses_match_documented_schemas(served: Any, document: dict[str, Any]) -> None:
    components = {"components": {"schemas": closed(document["components"]["schemas"])}}
    told, seen = dict(operations(document)), set[str]()

    def ask(operation: str, *values: str, **sent: Any) -> Any:
        method, path = operation.split(" ")
        parts = iter(values)
        address = re.sub(r"\{\w+\}", lambda _: next(parts), path)
        answer = served.client.request(method, address, **sent)
        assert answer.status_code == 200, (operation, answer.text)
        kind = answer.headers["content-type"].partition(";")[0]
        schema = told[operation]["responses"]["200"]["content"][kind]["schema"]
        seen.add(operation)
        value = answer.json() if kind == "application/json" else answer.text
        jsonschema.Draft202012Validator(closed(schema) | components).validate(value)
        return value

    for path in ("/health", "/v1/health", "/ping", "/livez", "/version", "/load", "/props", "/slots", "/v1/models"):
        ask(f"GET {path}")
    for path in ("/tokenizer_info", "/openapi.json", "/metrics", "/docs", "/api/version", "/api/tags", "/api/ps"):
        ask(f"GET {path}")
    ask("POST /ping")
    ask("GET /v1/models/{name}", ask("GET /v1/models")["data"][0]["id"])
    for prefix in ("", "/v1"):
        ask(f"POST {prefix}/chat/completions", json={"messages": HELLO, "max_tokens": 9, "logprobs": True})
        ask(f"POST {prefix}/chat/completions/input_tokens", json={"messages": HELLO})
        ask(f"POST {prefix}/embeddings", json={"input": "a"})
    ask(
        "POST /v1/chat/completions",
        json={"messages": HELLO, "max_tokens": 90, "tools": [TOOL], "tool_choice": "required"},
    )
    ask("POST /v1/chat/completions", json={"messages": HELLO, "max_tokens": 2, "stream": True})
    ask("POST /v1/completions", json={"prompt": "a", "logprobs": 1, "max_tokens": 3})
    for path in ("/completion", "/completions"):
        ask(f"POST {path}", json={"prompt": "a", "n_predict": 3, "n_probs": 1})
    ask("POST /embedding", json={"content": "a"})
    ask("POST /v1/messages", json={"messages": HELLO, "max_tokens": 30})
    ask("POST /v1/messages/count_tokens", json={"messages": HELLO})
    for prefix in ("", "/v1"):
        stored = ask(f"POST {prefix}/responses", json={"input": "hi", "max_output_tokens": 20})["id"]
    ask("POST /v1/responses/input_tokens", json={"input": "hi"})
    ask("GET /v1/responses/{response_id}", stored)
    ask("GET /v1/responses/{response_id}/input_items", stored)
    ask("DELETE /v1/responses/{response_id}", stored)
    file = ask("POST /v1/files", files={"file": ("a.jsonl", json.dumps(LINE))}, data={"purpose": "batch"})["id"]
    asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = ask("POST /v1/batches", json=asked)["id"]
    ask("GET /v1/batches")
    ask("GET /v1/batches/{batch_id}", batch)
    ask("POST /v1/batches/{batch_id}/cancel", batch)
    ask("GET /v1/files")
    ask("GET /v1/files/{file_id}", file)
    ask("GET /v1/files/{file_id}/content", file)
    store = ask("POST /v1/vector_stores", json={"name": "Birds"})["id"]
    text = {"files": {"file": ("a.txt", "Storks nest.")}, "data": {"purpose": "assistants"}}
    storks = ask("POST /v1/files", **text)["id"]
    ask("POST /v1/vector_stores/{store_id}/files", store, json={"file_id": storks})
    while ask("GET /v1/vector_stores/{store_id}/files/{file_id}", store, storks)["status"] == "in_progress":
        pass
    ask("GET /v1/vector_stores")
    ask("GET /v1/vector_stores/{store_id}", store)
    ask("POST /v1/vector_stores/{store_id}", store, json={"name": "Fowl"})
    assert ask("POST /v1/vector_stores/{store_id}/search", store, json={"query": "storks"})["data"]
    ask("GET /v1/vector_stores/{store_id}/files", store)
    ask("GET /v1/vector_stores/{store_id}/files/{file_id}/content", store, storks)
    ask("DELETE /v1/vector_stores/{store_id}/files/{file_id}", store, storks)
    ask("DELETE /v1/vector_stores/{store_id}", store)
    ask("DELETE /v1/files/{file_id}", file)
    ask("POST /tokenize", json={"content": "a", "with_pieces": True})
    ask("POST /tokenize", json={"prompt": "a", "return_token_strs": True})
    ask("POST /detokenize", json={"tokens": [300]})
    ask("POST /apply-template", json={"messages": HELLO})
    ask("POST /api/chat", json={"messages": HELLO, "logprobs": True, **OPTIONS})
    ask("POST /api/generate", json={"prompt": "a", **OPTIONS})
    ask("POST /api/chat", json={"messages": HELLO, "options": {"num_predict": 2}})
    ask("POST /api/embed", json={"input": "a"})
    ask("POST /api/embeddings", json={"prompt": "a"})
    ask("POST /api/show", json={"model": "smollm3"})
    ask("POST /api/pull", json={"model": "smollm3", "stream": False})
    heads = {name for name in told if name.startswith("HEAD")}
    assert told.keys() - REFUSED - seen - heads == OF_OTHER_TESTS


def test_api_reference_page_has_no_scripts(served: Any, document: dict[str, Any]) -> None:
    answer = served.client.get("/docs")
    assert answer.headers["content-security-policy"].startswith("default-src 'none'")
    assert not re.search(r"<script|src=|href=\"(?!openapi\.json)|url\(", answer.text)
    for path in document["paths"]:
        assert path in answer.text
    assert "thinking_budget" in answer.text and "prompt_tokens_details" not in answer.text.split("<h1>")[0]


def test_api_reference_requires_configured_key(start: Callable[..., Any]) -> None:
    server = start(Engine.load, api_key="a key of twenty letters")
    assert server.client.get("/docs").status_code in (401, 303)
