"""The models page: its contents, and switching models."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say
from web.chat.models_page import named, page, text_of, two_files

from notso.smollm3 import EngineStats, MemoryBudget, ModelFileError, ModelInfo, ProcessMemory
from notso.smollm3.hub import registry
from notso.web.chat.routes import models as models_routes
from notso.web.chat.templates import human_duration
from notso.web.engine.model_names import ModelFacts
from notso.web.engine.models import ModelRegistry
from notso.web.values.wording import words

Start = Callable[..., Any]


@pytest.fixture
def folder(own_home: Path, tmp_path: Path) -> Path:
    return two_files(tmp_path / "models")


def test_switching_models_keeps_chats_and_closes_the_old_model_first(start: Start, folder: Path) -> None:
    order: list[str] = []

    def load(path: Path | None) -> ScriptedEngine:
        order.append(f"load {path.name if path else 'demo'}")
        engine = named(path.stem if path else "demo", path or registry.demo_path())
        engine.close = lambda: order.append(f"close {engine.info.name}")  # type: ignore[method-assign]
        return engine

    first = folder / "one-Q4_K_M.gguf"
    server = start(lambda: load(first), model_registry=ModelRegistry(load, folder)).ready()
    asked = server.ask("Hello")
    server.finished(asked)
    shown = page(server)
    assert re.search(r"one-Q4_K_M Q4_K_M, 19 bytes \S*one-Q4_K_M.gguf In use", text_of(shown))
    assert shown.count('action="/models/switch"') == 2, "one button for the other file and one for the demo model"
    key = re.search(r'value="([0-9a-f]{16})">\s*<button[^>]*aria-label="Load two-Q8_0"', shown)
    assert key is not None

    answer = server.client.post("/models/switch", data={"model": key[1]})
    assert answer.headers["location"] == "/models"
    server.ready()

    assert order == ["load one-Q4_K_M.gguf", "close one-Q4_K_M", "load two-Q8_0.gguf"], "never two models in memory"
    assert re.search(r"two-Q8_0.gguf In use", text_of(page(server)))
    assert "Hello" in server.client.get(f"/chats/{asked.chat_id}").text
    again = server.ask("More", asked.chat_id)
    assert server.finished(again).state == "done"


def test_model_load_failure_is_shown_and_demo_model_is_offered(start: Start, folder: Path) -> None:
    def load(path: Path | None) -> ScriptedEngine:
        if path is not None:
            raise ModelFileError("blk.3.attn_q.weight is missing")
        return named("demo", "")

    server = start(lambda: load(folder / "one-Q4_K_M.gguf"), model_registry=ModelRegistry(load, folder))
    server.wait(lambda: server.client.get("/livez").status_code == 200 and server.shared.engine.state == "failed")
    assert server.client.get("/health").status_code == 503
    assert server.client.get("/health").json()["status"] == "failed"
    home = page(server, "/")
    assert "blk.3.attn_q.weight is missing" in home and words["models_use_demo"] in home
    assert "blk.3.attn_q.weight is missing" in page(server) and "Your chats are safe" in page(server)

    answer = server.client.post("/models/switch", data={"model": "demo", "chat": ""})

    assert answer.headers["location"] == "/"
    server.ready()
    assert "is missing" not in page(server, "/")


def test_only_listed_models_can_be_selected(start: Start, folder: Path) -> None:
    loaded: list[Path | None] = []

    def load(path: Path | None) -> ScriptedEngine:
        loaded.append(path)
        return named("x", path or "")

    server = start(
        lambda: named("first", folder / "one-Q4_K_M.gguf"), model_registry=ModelRegistry(load, folder)
    ).ready()
    for key in ("", "../../etc/passwd", str(folder / "two-Q8_0.gguf"), "0" * 16, "demo "):
        assert server.client.post("/models/switch", data={"model": key}).status_code == 404
    assert loaded == []
    back = server.client.post("/models/switch", data={"model": "demo", "chat": "//evil.example"})
    assert back.headers["location"] == "/"


def test_switching_without_model_registry_returns_404(start: Start, own_home: Path) -> None:
    server = start(ScriptedEngine()).ready()
    assert "/models/switch" not in page(server)
    assert server.client.post("/models/switch", data={"model": "demo"}).status_code == 404


def test_running_answer_finishes_before_models_are_switched(start: Start, own_home: Path) -> None:
    engine = ScriptedEngine(lambda messages, thinking: say("word " * 3))
    engine.gate.clear()
    server = start(engine, model_registry=ModelRegistry(lambda path: named("demo"))).ready()
    asked = server.ask("Hello")
    server.wait(lambda: engine.stats().running == 1)
    assert "Switching waits for running responses (1)" in text_of(page(server))
    server.client.post("/models/switch", data={"model": "demo"})
    later = server.ask("And now?")
    engine.gate.set()
    assert server.finished(asked).state == "done" and server.stored(asked).content.split() == ["word"] * 3
    assert server.finished(later).state == "done" and len(engine.requests) == 1, "the new model answers it"


def test_model_with_unsupported_architecture_is_rejected(start: Start, folder: Path) -> None:
    def check(path: Path | None) -> None:
        raise ModelFileError("it is a 'llama', not a smollm3")

    server = start(ScriptedEngine(), model_registry=ModelRegistry(lambda path: named("x"), folder, check=check)).ready()
    key = re.search(r'value="([0-9a-f]{16})">\s*<button[^>]*aria-label="Load two-Q8_0"', page(server))
    assert key is not None
    answer = server.client.post("/models/switch", data={"model": key[1]}, headers={"HX-Request": "true"})
    assert answer.status_code == 400 and "Cannot use two-Q8_0: it is a 'llama', not a smollm3" in unescape(answer.text)
    assert server.finished(server.ask("Hello")).state == "done", "the previous model stays in use"


def test_pages_and_health_report_that_the_model_is_loading(start: Start, own_home: Path) -> None:
    gate = threading.Event()

    def slow() -> ScriptedEngine:
        gate.wait(60)
        return ScriptedEngine()

    server = start(slow)
    assert "Loading" in text_of(page(server)) and 'id="models-poll"' in page(server)
    answer = server.client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (503, "loading") and answer.headers["retry-after"] == "5"
    assert server.client.get("/livez").status_code == 200
    chat, name = server.client.get("/").text, "<span>Scripted</span>"
    assert 'hx-get="/status"' in chat and name not in chat
    gate.set()
    server.ready()
    assert 'id="models-poll"' not in page(server)
    told = server.client.get("/status", headers={"HX-Request": "true"}).text
    assert name in told and 'hx-post="/estimate"' in told, "the header shows the new model and uses it to count tokens"


def test_model_loaded_during_page_rendering_needs_no_polling(
    start: Start, own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, inventory = threading.Event(), models_routes.scan_models

    def slow() -> ScriptedEngine:
        gate.wait(60)
        return ScriptedEngine()

    def meanwhile(*given: Any) -> Any:
        gate.set()
        server.wait(lambda: server.shared.engine.state == "ready")
        return inventory(*given)

    server = start(slow)
    monkeypatch.setattr(models_routes, "scan_models", meanwhile)
    shown = page(server)
    assert "Loading" not in text_of(shown) and 'id="models-poll"' not in shown


# The description of the model


def facts(layers: int = 36, nope: tuple[int, ...] = ()) -> ModelFacts:
    info = ModelInfo("x", "", False, 1, 1, 1, num_hidden_layers=layers, layers_without_rope=nope)
    return ModelFacts(info, EngineStats(kv_blocks=10, kv_blocks_used=2, kv_blocks_cached=3), ProcessMemory(2, 1))


def test_layers_without_rope_are_summarized() -> None:
    assert facts(36, tuple(range(3, 36, 4))).layers_without_rope == "every 4th (9 of 36)"
    assert facts(8, (3, 7)).layers_without_rope == "every 4th (2 of 8)"
    assert facts(8, (0, 5)).layers_without_rope == "1, 6 (2 of 8)"
    assert facts(8, (2,)).layers_without_rope == "3 (1 of 8)"
    assert facts().layers_without_rope == "" and facts().cache_percent == 50


def test_details_of_the_loaded_model_are_shown(start: Start, own_home: Path) -> None:
    engine = ScriptedEngine()
    engine.info = dataclasses.replace(
        engine.info,
        kv_format="k8v8",
        kv_bytes=1 << 30,
        max_num_seqs=16,
        num_hidden_layers=36,
        layers_without_rope=tuple(range(3, 36, 4)),
        memory=MemoryBudget(1_900_000_000, 1 << 30, 10_000_000, 200_000_000, 8_000_000_000, "the control group"),
    )
    server = start(engine).ready()
    for path in ("/models", "/"):
        assert 'id="composer-problem"' in page(server, path), "a place for errors of the list of chats"
        shown = text_of(page(server, path))
        assert "48 Q4_K, 9 Q6_K, 17 F32" in shown and "every 4th (9 of 36)" in shown
        assert "4,096 tokens, 16 parallel requests" in shown and "k8v8, 1.07 GB" in shown
        assert "planned 3.18 GB of 8 GB" in shown and "control group" not in shown, "names of limits are not translated"
        assert re.search(r"[\d.]+ [MG]B in use \([\d.]+ [MG]B including mapped weights\)", shown)


def test_path_can_be_copied_without_invisible_characters(start: Start) -> None:
    server = start(named("one", "/models/one.gguf")).ready()
    shown = server.client.get("/models", headers={"Accept-Language": "ar"}).text
    assert '<bdi dir="ltr">/models/one.gguf</bdi>' in shown


def test_human_duration_formats_seconds_minutes_and_hours() -> None:
    assert [human_duration(seconds) for seconds in (0, 45.4, 75, 7500)] == ["1 s", "45 s", "1 min 15 s", "2 h 5 min"]


def test_files_whose_names_are_not_utf8_are_not_listed(start: Start, folder: Path) -> None:
    (folder / "two\udce9.gguf").write_bytes(b"GGUF")
    adapters = folder / "adapters"
    adapters.mkdir()
    (adapters / "three\udce9.gguf").write_bytes(b"GGUF")
    first = folder / "one-Q4_K_M.gguf"
    models = ModelRegistry(lambda path: named("other"), folder)
    server = start(lambda: named("one", first), model_registry=models, adapter_dir=adapters).ready()

    assert page(server).count('action="/models/switch"') == 2
    assert server.client.get("/v1/models").status_code == 200
