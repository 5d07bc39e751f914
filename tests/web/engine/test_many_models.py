"""Several models behind one server: selected by requests, switched under load, and unloaded when idle, without loss."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say

from notso.qtensor import GGUFWriter
from notso.smollm3 import Engine, ModelFileError, OutOfMemoryError
from notso.smollm3.diagnostics.synth import write_synthetic
from notso.smollm3.hub.registry import demo_path
from notso.web.api.shared import listing
from notso.web.engine.host import FOR_EVER, EngineHost
from notso.web.engine.models import ModelRegistry

Start = Callable[..., Any]
HELLO = [{"role": "user", "content": "Hello"}]
CHATS = 8


@pytest.fixture
def folder(own_home: Path, tmp_path: Path) -> Path:
    """A folder with two SmolLM3 model files and one of another architecture."""
    folder = tmp_path / "models"
    folder.mkdir()
    for name, architecture in (("One-Q4_K_M", "smollm3"), ("Two-Q8_0", "smollm3"), ("Three", "llama")):
        with GGUFWriter(folder / f"{name}.gguf", durable=False) as writer:
            writer.add("general.architecture", architecture, "string")
    return folder


class Shelf:
    """Scripted engines for model files, and the order in which they are loaded and closed. `memory`: how many fit at
    once."""

    def __init__(self, folder: Path, memory: int) -> None:
        self.folder, self.memory = folder, memory
        self.engines: dict[str, ScriptedEngine] = {}
        self.order: list[str] = []
        self.loading = threading.Event()
        self.loading.set()

    @property
    def registry(self) -> ModelRegistry:
        return ModelRegistry(self.load, self.folder, self.beside, self.check)

    def load(self, path: Path | None) -> ScriptedEngine:
        name = path.stem if path is not None else "demo"
        assert self.loading.wait(60)
        self.order.append(f"load {name}")
        engine = self.engines[name] = ScriptedEngine(lambda *_: say(f"by {name}"), name=name, slots=CHATS)
        file = path if path is not None else demo_path()
        engine.info = dataclasses.replace(engine.info, path=str(file), is_demo=path is None)
        close = engine.close

        def closed() -> None:
            self.order.append(f"close {name}")
            close()

        engine.close = closed  # type: ignore[method-assign]
        return engine

    def beside(self, path: Path | None, occupied: int) -> ScriptedEngine:
        assert occupied > 0
        if sum(not engine.closed for engine in self.engines.values()) >= self.memory:
            raise OutOfMemoryError("it does not fit", needed_bytes=2, available_bytes=1)
        return self.load(path)

    @staticmethod
    def check(path: Path | None) -> None:
        if path is not None and path.stem == "Three":
            raise ModelFileError("this is a 'llama' and no smollm3")

    def serve(self, start: Start, **settings: Any) -> Any:
        first = self.folder / "One-Q4_K_M.gguf"
        return start(lambda: self.load(first), model_registry=self.registry, **settings).ready()


def ask(server: Any, model: str | None = None, **more: Any) -> str:
    body = {"messages": HELLO} | ({"model": model} if model else {}) | more
    answer = server.client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


@pytest.mark.parametrize("ns", [-(10**19), 10**24])
def test_models_with_dates_beyond_calendar_are_listed(
    start: Start, folder: Path, monkeypatch: pytest.MonkeyPatch, ns: int
) -> None:
    # Most file systems of test machines cannot store such dates.
    dated = SimpleNamespace(stat=lambda: SimpleNamespace(st_mtime_ns=ns))
    monkeypatch.setattr(listing, "Path", lambda path: dated)
    server = Shelf(folder, memory=2).serve(start)
    listed = server.client.get("/v1/models", headers={"anthropic-version": "2023-06-01"}).json()["data"]
    tags = server.client.get("/api/tags").json()["models"]
    day = "1970-01-01" if ns < 0 else "9999-12-31"
    assert {each["created_at"][:10] for each in listed} == {each["modified_at"][:10] for each in tags} == {day}


def test_request_loads_named_model_beside_default(start: Start, folder: Path) -> None:
    shelf = Shelf(folder, memory=2)
    server = shelf.serve(start)
    listed = server.client.get("/v1/models").json()["data"]
    assert [(each["id"], each["meta"]["loaded"]) for each in listed] == [
        ("one-q4_k_m", True),
        ("demo", False),
        ("two-q8_0", False),
    ], "the default model is first, each file is listed once, and other architectures are left out"
    assert ask(server, "two-q8_0") == ask(server, "Two-Q8_0") == "by Two-Q8_0"
    assert ask(server) == ask(server, "one-q4_k_m") == "by One-Q4_K_M"
    assert shelf.order == ["load One-Q4_K_M", "load Two-Q8_0"]
    answer = server.client.post("/v1/chat/completions", json={"messages": HELLO, "model": "two-q8_0"}).json()
    assert answer["model"] == "two-q8_0"
    names = [each["name"] for each in server.client.get("/api/ps").json()["models"]]
    assert names == ["one-q4_k_m:latest", "two-q8_0:latest"]
    tags = [each["name"] for each in server.client.get("/api/tags").json()["models"]]
    assert tags == ["one-q4_k_m:latest", "demo:latest", "two-q8_0:latest"]
    assert server.client.post("/api/show", json={"model": "demo"}).status_code == 200
    assert server.client.get("/v1/models/two-q8_0").json()["meta"]["loaded"] is True
    assert server.client.post("/v1/chat/completions", json={"messages": HELLO, "model": "four"}).status_code == 404


def test_unsupported_architecture_returns_400(start: Start, folder: Path) -> None:
    shelf = Shelf(folder, memory=2)
    server = shelf.serve(start)
    answer = server.client.post("/v1/chat/completions", json={"messages": HELLO, "model": "three"})
    assert answer.status_code == 400 and answer.json()["error"] == {
        "message": "this is a 'llama' and no smollm3",
        "type": "invalid_request_error",
        "param": "model",
        "code": "model_not_supported",
    }
    assert shelf.order == ["load One-Q4_K_M"], "no model was closed to make room"


def test_models_are_swapped_when_memory_fits_only_one(start: Start, folder: Path) -> None:
    shelf = Shelf(folder, memory=1)
    server = shelf.serve(start)
    one = shelf.engines["One-Q4_K_M"]
    one.gate.clear()
    with ThreadPoolExecutor(3) as pool:
        running = pool.submit(ask, server)
        server.wait(lambda: one.stats().running == 1)
        other = pool.submit(ask, server, "two-q8_0")
        server.wait(lambda: server.on_loop(lambda: server.shared.engine.default.leaving))
        late = pool.submit(ask, server)
        server.wait(lambda: server.on_loop(lambda: server.shared.requests.waiting) == 2)
        assert shelf.order == ["load One-Q4_K_M"] and not (other.done() or late.done())
        one.gate.set()
        assert running.result() == late.result() == "by One-Q4_K_M" and other.result() == "by Two-Q8_0"
    assert shelf.order[:5] == [
        "load One-Q4_K_M",
        "close One-Q4_K_M",
        "load Two-Q8_0",
        "close Two-Q8_0",
        "load One-Q4_K_M",
    ]
    assert len(one.requests) == 1, "a later request for the old model must not delay the switch"


def test_another_model_is_loaded_when_the_engine_it_waits_for_is_lost(start: Start, folder: Path) -> None:
    shelf = Shelf(folder, memory=1)
    server = shelf.serve(start)
    host, one = server.shared.engine, shelf.engines["One-Q4_K_M"]
    one.gate.clear()
    with ThreadPoolExecutor(1) as pool:
        server.ask("Hello")
        server.wait(lambda: one.stats().running == 1)
        other = pool.submit(ask, server, "two-q8_0")
        server.wait(lambda: server.on_loop(lambda: host.default.leaving))
        one.lose()
        assert other.result() == "by Two-Q8_0"
        one.gate.set()
    server.wait(lambda: shelf.order[-1] == "load One-Q4_K_M")


@pytest.mark.parametrize("memory", [1, 2])
def test_model_switch_under_load_loses_no_chat(start: Start, folder: Path, memory: int) -> None:
    shelf = Shelf(folder, memory)
    server = shelf.serve(start)
    one = shelf.engines["One-Q4_K_M"]
    one.gate.clear()
    before = [server.ask(f"before {number}") for number in range(CHATS)]
    server.wait(lambda: one.stats().running == CHATS)
    shelf.loading.clear()
    switched = server.client.post("/models/switch", data={"model": "two", "command": ""})
    assert switched.status_code == 303
    after = [server.ask(f"after {number}") for number in range(CHATS)]
    seen = server.stream(after[0], until=lambda event: "Loading" in event.data)
    assert "Loading" in seen[-1].data and server.on_loop(lambda: server.shared.requests.waiting) == CHATS
    one.gate.set()
    shelf.loading.set()
    assert {(server.finished(each).state, server.stored(each).content) for each in before} == {
        ("done", "by One-Q4_K_M")
    }
    assert {(server.finished(each).state, server.stored(each).content) for each in after} == {("done", "by Two-Q8_0")}
    assert server.client.get("/health").json()["model"] == "Two-Q8_0"
    assert ("close One-Q4_K_M" in shelf.order) == (memory == 1)


def test_idle_model_is_unloaded_and_reloaded_on_request(start: Start, folder: Path) -> None:
    shelf = Shelf(folder, memory=2)
    server = shelf.serve(start, keep_alive_seconds=0)
    server.wait(lambda: shelf.order == ["load One-Q4_K_M", "close One-Q4_K_M"])
    assert server.client.get("/health").status_code == 200 and server.client.get("/props").json()["is_sleeping"]
    assert "The model was unloaded" in server.client.get("/models").text
    assert server.client.get("/v1/models").json()["data"][0]["meta"]["loaded"] is False
    assert ask(server) == "by One-Q4_K_M"
    server.wait(lambda: shelf.order[2:] == ["load One-Q4_K_M", "close One-Q4_K_M"])
    assert server.finished(server.ask("Hello")).content == "by One-Q4_K_M"
    server.wait(lambda: server.client.get("/api/ps").json()["models"] == [])


def test_keep_alive_sets_model_expiration(start: Start, folder: Path) -> None:
    shelf = Shelf(folder, memory=2)
    server = shelf.serve(start)

    def until(**body: Any) -> list[str]:
        answer = server.client.post("/api/chat", json={"messages": HELLO, "stream": False} | body)
        assert answer.status_code == 200, answer.text
        listed = [each["expires_at"] for each in server.client.get("/api/ps").json()["models"]]
        for each in listed:  # programs show the time in their own time zone
            datetime.fromisoformat(each).astimezone(timezone(timedelta(hours=14)))
        return [each[:4] for each in listed]

    assert until(model="two-q8_0", keep_alive=-1) == ["2200", "2200"]
    assert until(model="two-q8_0", keep_alive=2**63 - 1) == ["2200", "2200"]
    assert until(model="two-q8_0", keep_alive=7972 * 366 * 86_400) == ["2200", "2200"]
    assert until(model="two-q8_0", keep_alive="1h30m")[1] != "2200"
    assert until(keep_alive="5m")[0] != "2200"
    gone = server.client.post("/api/generate", json={"model": "two-q8_0", "keep_alive": 0}).json()
    assert gone["done_reason"] == "unload"
    server.wait(lambda: shelf.order[-1] == "close Two-Q8_0")
    assert server.client.post("/api/chat", json={"model": "two-q8_0", "keep_alive": 60}).json()["done_reason"] == "load"
    assert shelf.order[-1] == "load Two-Q8_0"
    assert until(model="two-q8_0", keep_alive=-1)[1] == "2200"
    for changes in ({"keep_alive": 60}, {}):
        too_long = {"model": "two-q8_0", "messages": [{"role": "user", "content": "word " * 5000}], **changes}
        assert server.client.post("/api/chat", json=too_long).status_code == 400
        models = server.client.get("/api/ps").json()["models"]
        assert models[1]["expires_at"][:4] == "2200", "a refused request does not change the timer"
    refused = server.client.post("/api/chat", json={"messages": HELLO, "keep_alive": "soon"})
    assert refused.status_code == 400 and "keep_alive" in refused.json()["error"]


def test_request_to_unload_an_unloaded_model_does_not_affect_its_next_load() -> None:
    host = EngineHost(ScriptedEngine)
    host.keep(host.default, 0)
    host.default.mark_loaded(ScriptedEngine())
    assert host.idle_timeout_s(host.default) == FOR_EVER


def test_failed_model_load_affects_only_requests_for_that_model(start: Start, folder: Path) -> None:
    shelf = Shelf(folder, memory=2)
    server = shelf.serve(start)
    beside = shelf.beside

    def broken(path: Path | None, occupied: int) -> ScriptedEngine:
        raise ModelFileError("blk.3.attn_q.weight is missing")

    server.on_loop(lambda: setattr(server.shared, "model_registry", ModelRegistry(shelf.load, folder, broken)))
    answer = server.client.post("/v1/chat/completions", json={"messages": HELLO, "model": "two-q8_0"})
    assert answer.status_code == 503 and "blk.3.attn_q.weight" in answer.json()["error"]["message"]
    assert ask(server) == "by One-Q4_K_M" and server.client.get("/health").status_code == 200
    two = server.shared.engine.model(str(folder / "Two-Q8_0.gguf"))
    two.load_beside = lambda occupied: beside(folder / "Two-Q8_0.gguf", occupied)
    assert ask(server, "two-q8_0") == "by Two-Q8_0", "the next request for the model tries to load it again"


def test_chat_uses_its_selected_model(start: Start, folder: Path) -> None:
    shelf = Shelf(folder, memory=2)
    server = shelf.serve(start)
    asked = server.ask("Hello")
    assert server.finished(asked).content == "by One-Q4_K_M"
    url = f"/chats/{asked.chat_id}"
    sheet = server.client.get(f"{url}/settings", headers={"HX-Request": "true"}).text
    assert '<option value="two-q8_0"' in sheet and '<option value="demo"' in sheet
    server.client.post(f"{url}/settings", data={"model": "two-q8_0"})
    assert server.finished(server.ask("Again", asked.chat_id)).content == "by Two-Q8_0"
    assert server.finished(server.ask("In another chat")).content == "by One-Q4_K_M"
    assert "<span>two-q8_0</span>" in server.client.get(url).text
    (folder / "Two-Q8_0.gguf").unlink()
    server.client.post(f"{url}/settings", data={"model": "gone"})
    fields = {"text": "And now?", "key": "k" * 22}
    answer = server.client.post(f"{url}/messages", data=fields, headers={"HX-Request": "true"})
    assert answer.status_code == 400


def test_answer_is_continued_by_its_model_or_names_the_other_one(start: Start, folder: Path) -> None:
    shelf = Shelf(folder, memory=2)
    server = shelf.serve(start)
    asked = server.ask("Hello")
    first = server.finished(asked).model
    server.client.post(f"/chats/{asked.chat_id}/settings", data={"model": "two-q8_0"})

    def go_on() -> tuple[str, str]:
        server.client.post(f"/chats/{asked.chat_id}/messages/{asked.message_id}/continue")
        server.wait(lambda: server.chat.turns.unfinished == 0)
        answer = server.stored(asked)
        return answer.content, answer.model

    assert go_on() == ("by One-Q4_K_Mby One-Q4_K_M", first)
    store = server.shared.store
    rename = "UPDATE messages SET model = 'gone' WHERE id = ?"
    server.on_loop(lambda: store.write(lambda db: db.execute(rename, (asked.message_id,)).rowcount))
    content, model = go_on()
    assert content == "by One-Q4_K_Mby One-Q4_K_Mby Two-Q8_0" and model == "two-q8_0"
    assert server.finished(server.ask("Again", asked.chat_id)).model == "two-q8_0"
    server.client.post(f"/chats/{asked.chat_id}/settings", data={"model": ""})
    assert go_on() == (f"{content}by Two-Q8_0", "two-q8_0"), "the model of the answer continues it, by its name"


def test_adapter_is_reloaded_with_its_base_model(start: Start, folder: Path) -> None:
    shelf = Shelf(folder, memory=2)
    adapters = folder / "adapters"
    adapters.mkdir()
    (adapters / "mine.gguf").write_bytes(b"GGUF")
    server = shelf.serve(start, adapter_dir=adapters)
    body = {"lora_name": "Mine", "lora_path": "mine.gguf", "base_model_name": "two-q8_0"}
    assert server.client.post("/v1/load_lora_adapter", json=body).status_code == 200
    ids = [each["id"] for each in server.client.get("/v1/models").json()["data"]]
    assert "two-q8_0:mine" in ids and "one-q4_k_m:mine" not in ids, "the adapter is listed with its base model only"
    server.client.post("/api/chat", json={"model": "two-q8_0", "keep_alive": 0})
    server.wait(lambda: shelf.order[-1] == "close Two-Q8_0")
    answer = server.client.post("/v1/chat/completions", json={"messages": HELLO, "model": "two-q8_0:MINE"})
    assert answer.status_code == 200 and answer.json()["model"] == "two-q8_0:mine"
    assert shelf.engines["Two-Q8_0"].requests[-1].options.adapter == "Mine"
    assert server.client.post("/v1/chat/completions", json={"messages": HELLO, "model": "mine"}).status_code == 404
    assert shelf.order[-1] != "close Two-Q8_0", "keep_alive of one request must not apply to the next one"
    assert server.client.post("/v1/unload_lora_adapter", json={"lora_name": "MINE"}).status_code == 200
    gone = server.client.post("/v1/chat/completions", json={"messages": HELLO, "model": "two-q8_0:mine"})
    assert gone.status_code == 404


# Real engines


@pytest.fixture(scope="module")
def two_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    (folder / "first.gguf").write_bytes(demo_path().read_bytes())
    write_synthetic(folder / "second.gguf", layers=2, hidden=256, ffn=256, heads=4, kv_heads=2, vocab=4096)
    return folder


@pytest.fixture
def real(start: Start, own_home: Path, two_files: Path, request: pytest.FixtureRequest) -> Any:
    fits = bool(request.param)

    def load(path: Path | None, beside: int | None = None) -> Engine:
        if beside is not None and not fits:
            beside = 1 << 60
        return Engine.load(path, context_tokens=512, threads=1, max_num_seqs=4, beside_bytes=beside)

    registry = ModelRegistry(load, two_files, load)
    return start(lambda: load(two_files / "first.gguf"), model_registry=registry).ready()


@pytest.mark.parametrize("real", [True, False], ids=["beside", "after"], indirect=True)
def test_concurrent_answers_of_two_models_match_sequential_ones(real: Any) -> None:
    def said(number: int) -> tuple[str | None, str]:
        model = "second" if number % 2 else None
        body = {"prompt": f"Tell me {number // 2}", "max_tokens": 8, "temperature": 0, "seed": 1}
        answer = real.client.post("/v1/completions", json=body | ({"model": model} if model else {}))
        assert answer.status_code == 200, answer.text
        return model, answer.json()["choices"][0]["text"]

    alone = [said(number) for number in range(CHATS)]
    with ThreadPoolExecutor(CHATS) as pool:
        together = list(pool.map(said, range(CHATS)))
    assert together == alone
    assert {text for model, text in alone if model} & {text for model, text in alone if not model} == set()
