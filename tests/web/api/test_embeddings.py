"""Embeddings of the demo model in the formats of OpenAI, Ollama and llama-server."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from scripted_engine import ScriptedEngine

from notso.smollm3 import ContextLengthError, Engine

Start = Callable[..., Any]
TEXTS = ["What is 27 + 48?", "A river in the mountains", "1"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with the demo model."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("embeddings"))
    server = type(shared)(lambda: Engine.load(threads=1, context_tokens=512, max_num_seqs=2), settings)
    yield server.ready()
    server.close()


@pytest.fixture(scope="module")
def expected(served: Any) -> list[list[float]]:
    """Return the embedding of each text, requested separately from llama-server's endpoint."""
    return [post(served, "/embedding", content=text)[0]["embedding"][0] for text in TEXTS]


def post(server: Any, path: str, **body: Any) -> Any:
    answer = server.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_embeddings_have_unit_length(expected: list[list[float]]) -> None:
    for vector in expected:
        assert math.hypot(*vector) == pytest.approx(1, abs=1e-6)
    assert expected[0] != expected[1] != expected[2]


@pytest.mark.parametrize(
    ("path", "fields", "names"),
    [
        ("/v1/embeddings", {"input": ["a", "b", "c", "x " * 600, "d"]}, "input.3"),
        ("/embedding", {"content": ["x " * 600, "a"]}, "content.0"),
        ("/v1/embeddings", {"input": "x " * 600}, "input"),
    ],
)
def test_input_that_does_not_fit_is_named(served: Any, path: str, fields: dict[str, Any], names: str) -> None:
    answer = served.client.post(path, json=fields)
    error = answer.json()["error"]
    assert (answer.status_code, error["code"], error["param"]) == (400, "context_length_exceeded", names)
    assert error["message"].startswith("prompt is too long") and error["message"].endswith(f"({names})") == (
        "." in names
    )


def test_input_that_does_not_fit_is_named_by_ollama_and_by_its_limit(served: Any) -> None:
    texts = ["a", "x " * 600]
    answer = served.client.post("/api/embed", json={"model": "notso-demo", "input": texts, "truncate": False})
    assert answer.status_code == 400 and answer.json()["error"].endswith("(input.1)")
    answer = served.client.post("/v1/embeddings", json={"input": ["a", "b c d e"], "truncate_prompt_tokens": 1})
    assert answer.json()["error"]["message"].startswith("input.1 has ")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/embeddings"])
def test_embeddings_follow_openai_format(served: Any, expected: list[list[float]], path: str) -> None:
    answer = post(served, path, model="notso-demo", input=TEXTS, user="someone")
    assert [each["embedding"] for each in answer["data"]] == expected
    assert [each["index"] for each in answer["data"]] == [0, 1, 2]  # more texts than the engine runs at once
    counts = [len(post(served, "/tokenize", content=text)["tokens"]) for text in TEXTS]
    assert answer["usage"] == {"prompt_tokens": sum(counts), "total_tokens": sum(counts)}
    assert answer["model"] == "notso-demo" and answer["object"] == "list"


def test_embeddings_accept_token_ids_and_return_base64(served: Any, expected: list[list[float]]) -> None:
    ids = [post(served, "/tokenize", content=text)["tokens"] for text in TEXTS]
    for given, vectors in ((ids, expected), (ids[0], expected[:1]), (TEXTS[0], expected[:1])):
        data = post(served, "/v1/embeddings", input=given, encoding_format="base64")["data"]
        found = [np.frombuffer(base64.b64decode(each["embedding"]), "<f4") for each in data]
        assert (np.array(found) == np.array(vectors, np.float32)).all()


def test_embeddings_follow_ollama_formats(served: Any, expected: list[list[float]]) -> None:
    many = post(served, "/api/embed", model="notso-demo:latest", input=TEXTS, truncate=True, options={"num_ctx": 2048})
    assert many["embeddings"] == expected and many["model"] == "notso-demo:latest"
    assert many["prompt_eval_count"] > 0 and many["total_duration"] > 0
    assert post(served, "/api/embed", model="notso-demo")["embeddings"] == []
    assert post(served, "/api/embeddings", model="notso-demo", prompt=TEXTS[1], keep_alive="5m") == {
        "embedding": expected[1]
    }
    assert post(served, "/api/embeddings", model="notso-demo", prompt="") == {"embedding": []}


def test_batch_of_a_thousand_texts_is_accepted(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    monkeypatch.setattr(engine, "submit", lambda *_: (_ for _ in ()).throw(ContextLengthError(9, 8)))
    tokens = [[20_000 + number] * 300 for number in range(1000)]  # as many as OpenAI allows
    for texts in ([f"{number} " * 400 for number in range(1000)], tokens):
        answer = server.client.post("/v1/embeddings", json={"input": texts})
        assert answer.json()["error"]["code"] == "context_length_exceeded", answer.text  # from the engine


def test_only_ollama_truncates_long_input(served: Any) -> None:
    long = "one two three " * 400
    cut = post(served, "/api/embed", input=[long, TEXTS[0]])
    tokens = post(served, "/tokenize", content=long)["tokens"]
    assert cut["embeddings"][0] == post(served, "/v1/embeddings", input=tokens[:512])["data"][0]["embedding"]
    for path, body in (
        ("/v1/embeddings", {"input": [TEXTS[0], long]}),
        ("/api/embed", {"input": long, "truncate": False}),
        ("/embedding", {"content": long}),
    ):
        answer = served.client.post(path, json=body)
        assert answer.status_code == 400 and "512" in answer.text


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": ["a", ""]}, "input"),
        ({"input": [1 << 30]}, "input"),
        ({"input": [[1], []]}, "input"),
        ({"input": "a", "content": "b"}, "content"),
        ({"input": "a", "dimensions": 3}, "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format"),
        ({"input": "a", "embd_normalize": 0}, "embd_normalize"),
        ({"input": "a", "model": "no-such-model"}, "model"),
        ({"input": ["a"] * 2049}, "input"),
    ],
)
def test_invalid_embeddings_request_names_field(served: Any, body: dict[str, Any], param: str) -> None:
    answer = served.client.post("/v1/embeddings", json=body)
    assert answer.status_code in (400, 404), answer.text
    assert answer.json()["error"]["param"].split(".")[0] == param


@pytest.mark.parametrize(
    ("value", "param"), [([1, "a"], "input.1"), ([[1], "a"], "input.1"), ([[1], ["a"]], "input.1.0")]
)
def test_invalid_item_of_a_list_is_named(served: Any, value: Any, param: str) -> None:
    answer = served.client.post("/v1/embeddings", json={"input": value})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text


def test_embeddings_end_on_disconnect_and_use_api_priority(start: Start) -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    server = start(engine).ready()
    with pytest.raises(Exception, match="timed out"):
        server.client.post("/v1/embeddings", json={"input": ["a", "b"]}, timeout=0.5)
    server.wait(lambda: not server.shared.requests.waiting and not engine.stats().running)
    engine.gate.set()
    assert len(post(server, "/v1/embeddings", input=["a", "b"])["data"]) == 2
    assert {each.options.priority for each in engine.requests} == {"api"}
