"""Adapters over HTTP: selected by model name in every API, listed, and loaded only from the configured folder."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from golden.adapters import random_pairs, write_gguf, write_peft
from scripted_engine import ScriptedEngine

from notso.qtensor import GGUFFile
from notso.smollm3 import AdapterSource, Engine, InvalidRequestError
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.hub.registry import demo_path
from notso.web.values.ids import new_id

HELLO = [{"role": "user", "content": "Hello! What is your name?"}]
ASK = {"messages": HELLO, "max_tokens": 12, "temperature": 0, "seed": 1}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapters")
    with GGUFFile.open(demo_path()) as file:
        config = SmolLM3Config.from_metadata(file.metadata)
    write_gguf(folder / "one.gguf", random_pairs(config, 1, size=0.2))
    write_peft(folder / "two", random_pairs(config, 2, size=0.2), config.head_dim)
    (folder / "bad.gguf").write_bytes(b"GGUF and no more")
    (folder.parent / "outside.gguf").write_bytes((folder / "one.gguf").read_bytes())
    (folder / "link.gguf").symlink_to(folder.parent / "outside.gguf")
    return folder


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with the demo model and one adapter."""
    shared = request.getfixturevalue("shared")
    settings = type(shared.shared.settings)(port=0, data_dir=tmp_path_factory.mktemp("data"), adapter_dir=folder)
    server = type(shared)(lambda: Engine.load(threads=1, adapters=[f"One={folder / 'one.gguf'}"]), settings)
    yield server.ready()
    server.close()


def said(server: Any, model: str | None, **more: Any) -> tuple[str, str]:
    """Return the text of an answer and the model name in the response."""
    answer = server.client.post("/v1/chat/completions", json=ASK | ({"model": model} if model else {}) | more)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"], answer.json()["model"]


def test_request_selects_adapter_by_model_name(served: Any) -> None:
    base, base_name = said(served, None)
    with_it, name = said(served, "smollm3:one")
    assert with_it != base and name == f"{base_name}:one"
    assert said(served, "One") == said(served, f"{base_name}:ONE") == (with_it, name)
    assert said(served, base_name) == (base, base_name)


def test_messages_and_ollama_apis_select_adapter_by_model_name(served: Any) -> None:
    fields = {"max_tokens": 12, "temperature": 0, "messages": HELLO}
    base, message = (
        served.client.post("/v1/messages", json=fields | {"model": name}).json() for name in ("notso-demo", "one")
    )
    assert message["model"] == f"{base['model']}:one" and message["content"] != base["content"]
    counted = served.client.post("/v1/messages/count_tokens", json={"model": "one", "messages": HELLO})
    assert counted.status_code == 200
    body = {"messages": HELLO, "stream": False, "options": {"num_predict": 12, "temperature": 0, "seed": 1}}
    plain, ollama = (
        served.client.post("/api/chat", json=body | {"model": name}).json()["message"]
        for name in ("notso-demo", "one:latest")
    )
    assert plain != ollama


@pytest.mark.parametrize("name", ["two", "smollm3:two", "llama:one", "smollm3:", ":one", "one:two"])
def test_unloaded_adapter_name_returns_404(served: Any, name: str) -> None:
    answer = served.client.post("/v1/chat/completions", json=ASK | {"model": name})
    assert answer.status_code == 404 and ":one" in answer.json()["error"]["message"]


def test_model_list_includes_adapter_with_parent(served: Any) -> None:
    entries = served.client.get("/v1/models").json()["data"]
    assert [entry.get("parent") for entry in entries] == [None, entries[0]["id"]]
    assert served.client.get(f"/v1/models/{entries[1]['id']}").json() == entries[1]
    assert entries[1]["meta"]["rank"] == 8


def test_api_loads_and_unloads_adapter(served: Any) -> None:
    load = {"lora_name": "two", "lora_path": "two", "scale": 0.5}
    answer = served.client.post("/v1/load_lora_adapter", json=load)
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'two' added successfully.")
    assert said(served, "smollm3:two")[0] != said(served, "smollm3:one")[0]
    again = served.client.post("/v1/load_lora_adapter", json=load)
    assert again.status_code == 400 and again.json()["error"]["param"] == "lora_name"
    assert served.client.post("/v1/unload_lora_adapter", json={"lora_name": "two"}).status_code == 200
    gone = served.client.post("/v1/unload_lora_adapter", json={"lora_name": "two"})
    assert gone.status_code == 404 and gone.json()["error"]["param"] == "lora_name"


@pytest.mark.parametrize(
    "path", ["../outside.gguf", "link.gguf", "/etc/passwd", "absent.gguf", "bad.gguf", "a\0b", "", "x" * 5000]
)
def test_load_rejects_invalid_adapter_path(served: Any, path: str) -> None:
    answer = served.client.post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": path})
    assert answer.status_code == 400, answer.text
    assert "root:" not in answer.text and len(served.client.get("/v1/models").json()["data"]) == 2


def test_adapter_endpoints_return_403_without_adapter_dir(start: Callable[..., Any]) -> None:
    server = start(ScriptedEngine())
    for path, body in (("load", {"lora_name": "a", "lora_path": "a.gguf"}), ("unload", {"lora_name": "a"})):
        answer = server.client.post(f"/v1/{path}_lora_adapter", json=body)
        assert answer.status_code == 403 and "--adapter-dir" in answer.json()["error"]["message"]


def test_missing_adapter_file_is_named_in_error(served: Any) -> None:
    answer = served.client.post("/v1/load_lora_adapter", json={"lora_name": "new", "lora_path": "absent.gguf"})
    assert "absent.gguf: no such file" in answer.json()["error"]["message"]


def test_unload_ignores_case_of_adapter_name(served: Any) -> None:
    assert served.client.post("/v1/load_lora_adapter", json={"lora_name": "Two", "lora_path": "two"}).status_code == 200
    answer = served.client.post("/v1/unload_lora_adapter", json={"lora_name": "tWO"})
    assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'Two' removed successfully.")


def test_models_page_lists_loads_and_unloads_adapters(served: Any) -> None:
    page = served.client.get("/models").text
    assert "rank 8" in page and 'aria-label="Load two"' in page and 'aria-label="Load one.gguf"' not in page
    loaded = served.client.post("/models/adapters/load", data={"file": "two", "name": "two"})
    assert loaded.headers["location"] == "/models"
    page = served.client.get("/models").text
    assert 'aria-label="Unload two"' in page and 'aria-label="Load two"' not in page
    asked = served.ask("Hello!", thinking=False)
    plain = served.finished(asked).content
    url = f"/chats/{asked.chat_id}"
    sheet = served.client.get(f"{url}/settings", headers={"HX-Request": "true"}).text
    assert '<option value="notso-demo:two"' in sheet
    served.client.post(f"{url}/settings", data={"model": "notso-demo:two", "temperature": "0", "max_tokens": "12"})
    other = served.ask("Hello!", asked.chat_id, thinking=False)
    assert served.finished(other).state == "done" and served.finished(other).content != plain
    assert served.client.post("/models/adapters/unload", data={"name": "two"}).status_code == 303
    refused = served.client.post(f"{url}/messages", data={"text": "Hello!", "key": new_id()})
    assert refused.status_code == 400 and "notso-demo:two is no longer available" in refused.text


@pytest.mark.parametrize("file", ["../outside.gguf", "link.gguf", "/etc/passwd", "", "a\0b"])
def test_models_page_rejects_invalid_adapter_file(served: Any, file: str) -> None:
    answer = served.client.post("/models/adapters/load", data={"file": file, "name": "new"})
    assert answer.status_code in (400, 404)
    for file, words in (("bad.gguf", "bad.gguf"), ("absent.gguf", "absent.gguf: no such file")):
        refused = served.client.post("/models/adapters/load", data={"file": file, "name": "new"})
        assert refused.status_code == 400 and words in refused.text


@pytest.mark.parametrize(("in_between", "status"), [(True, 404), (False, 400)])
@pytest.mark.parametrize(
    ("path", "sent"),
    [
        ("/models/adapters/unload", {"data": {"name": "one"}}),
        ("/v1/unload_lora_adapter", {"json": {"lora_name": "one"}}),
    ],
)
def test_failed_adapter_removal_returns_client_error(
    start: Callable[..., Any], tmp_path: Path, path: str, sent: dict[str, Any], in_between: bool, status: int
) -> None:
    engine = ScriptedEngine()
    engine.adapters.add(AdapterSource("one", "one.gguf"))
    server = start(engine, adapter_dir=tmp_path).ready()

    def refuse(name: str) -> None:
        if in_between:
            del engine.adapters.infos[name]
        raise InvalidRequestError("it is not removed", param="adapter")

    engine.adapters.remove = refuse  # type: ignore[method-assign]
    assert server.client.post(path, **sent).status_code == status
