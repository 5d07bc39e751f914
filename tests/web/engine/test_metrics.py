"""Metrics: counters that advance, names that stay stable, and no content of conversations."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from scripted_engine import ScriptedEngine

from notso.smollm3 import AdapterSource, EngineStats, Usage
from notso.web.engine.host import EngineHost
from notso.web.engine.metrics import Metrics
from notso.web.engine.model_names import adapter_names

Start = Callable[..., Any]
DOCUMENT = Path(__file__).parents[3] / "docs" / "operations.md"


def samples(text: str) -> dict[str, float]:
    """Parse metrics into a mapping from name and labels to value."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}" if labels else sample.name] = sample.value
    return found


def scrape(server: Any) -> dict[str, float]:
    answer = server.client.get("/metrics")
    assert answer.status_code == 200 and answer.headers["content-type"].startswith("text/plain")
    return samples(answer.text)


def test_finished_answer_is_counted_without_content(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    before = scrape(server)
    assert before["notso_model_loaded"] == 1 and before["notso_num_requests_running"] == 0
    assert before["notso_request_success_total{finished_reason=stop}"] == 0
    server.finished(server.ask("secret words"))
    server.wait(lambda: scrape(server)["notso_request_success_total{finished_reason=stop}"] == 1)
    after = scrape(server)
    assert after["notso_e2e_request_latency_seconds_count"] == 1
    assert after["notso_time_to_first_token_seconds_count"] == 1
    assert after["notso_reasoning_tokens_total"] > 0
    text = server.client.get("/metrics").text
    assert "secret" not in text and "Hello" not in text


def test_stopped_answer_is_counted_as_cancelled(start: Start) -> None:
    engine = ScriptedEngine()
    engine.gate.clear()
    server = start(engine).ready()
    asked = server.ask("Hello")
    server.wait(lambda: len(engine.requests) == 1)
    server.client.post(f"/generations/{asked.generation_id}/stop")
    server.finished(asked)
    server.wait(lambda: scrape(server)["notso_request_cancelled_total"] == 1)
    assert scrape(server)["notso_request_success_total{finished_reason=stop}"] == 0


def test_disconnected_stream_is_counted_as_cancelled(start: Start) -> None:
    engine = ScriptedEngine()
    server = start(engine).ready()
    messages = [{"role": "user", "content": "Hello"}]
    engine.gate.clear()
    body = {"model": "scripted", "messages": messages, "stream": True}
    with server.client.stream("POST", "/v1/chat/completions", json=body) as answer:
        first = next(answer.iter_lines())
        assert first.startswith("data: ") and '"role"' in first, first
        server.wait(lambda: len(engine.requests) == 1)
    server.wait(lambda: scrape(server)["notso_request_cancelled_total"] == 1)
    assert scrape(server)["notso_request_success_total{finished_reason=stop}"] == 0


def test_http_requests_are_counted_by_route_template(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    for path in ("/chats/one", "/chats/two", "/nowhere", "/elsewhere"):
        server.client.get(path)
    server.client.request("FROB", "/livez")
    server.client.get("/livez", headers={"Host": "evil.example"})
    found = scrape(server)
    assert found["notso_http_requests_total{method=GET,route=/chats/{chat_id},status=404}"] == 2
    assert found["notso_http_requests_total{method=GET,route=none,status=404}"] == 2
    assert found["notso_http_requests_total{method=GET,route=none,status=421}"] == 1
    assert found["notso_http_request_duration_seconds_count{route=/chats/{chat_id}}"] == 2
    assert any(name.startswith("notso_http_requests_total{method=other") for name in found)
    assert not any("one" in name.replace("none", "") and "route" in name for name in found)


def test_metrics_require_api_key(start: Start) -> None:
    server = start(ScriptedEngine(), api_key="correct horse battery staple")
    server.wait(lambda: server.client.get("/health").status_code == 200)
    assert server.client.get("/metrics").status_code == 401
    shown = server.client.get("/metrics", headers={"Authorization": "Bearer correct horse battery staple"})
    assert shown.status_code == 200


def test_metrics_are_served_without_loaded_model(start: Start) -> None:
    def fails() -> ScriptedEngine:
        raise ZeroDivisionError

    server = start(fails)
    server.wait(lambda: server.shared.engine.state == "failed")
    found = scrape(server)
    assert found["notso_model_loaded"] == 0 and "notso_num_requests_running" not in found
    assert found["notso_process_resident_memory_bytes"] > 1_000_000


@pytest.fixture
def engine() -> EngineHost:
    scripted = ScriptedEngine()
    scripted.info = dataclasses.replace(scripted.info, kv_bytes=77)
    stats = EngineStats(
        running=3,
        waiting=4,
        kv_blocks=10,
        kv_blocks_used=5,
        prompt_tokens_total=100,
        cached_tokens_total=60,
        generated_tokens_total=50,
        drafted_tokens_total=20,
        accepted_tokens_total=15,
        preemptions_total=1,
    )
    scripted.stats = lambda: stats  # type: ignore[method-assign]
    host = EngineHost(lambda: scripted)
    host.default.mark_loaded(scripted)
    return host


def test_engine_statistics_are_exported(engine: EngineHost) -> None:
    metrics = Metrics(engine)
    metrics.observe(Usage(10, 5, 2, 3, 200.0, 400.0, 50.0), "length")
    metrics.observe(None, None)
    metrics.count_failure(None, None)
    metrics.count_failure(None, "cancelled")
    found = samples(metrics.text().decode())
    expected = {
        "num_requests_running": 3,
        "num_requests_waiting": 4,
        "kv_cache_usage_perc": 0.5,
        "kv_cache_bytes": 77,
        "prompt_tokens_total": 100,
        "prefix_cache_queries_total": 100,
        "prefix_cache_hits_total": 60,
        "generation_tokens_total": 50,
        "spec_decode_num_draft_tokens_total": 20,
        "spec_decode_num_accepted_tokens_total": 15,
        "num_preemptions_total": 1,
        "request_success_total{finished_reason=length}": 1,
        "request_failed_total": 1,
        "reasoning_tokens_total": 2,
        "request_queue_time_seconds_sum": 0.05,
        "request_prefill_time_seconds_sum": 0.2,
        "request_decode_time_seconds_sum": 0.4,
        "e2e_request_latency_seconds_sum": 0.65,
        "time_to_first_token_seconds_sum": 0.25,
        "inter_token_latency_seconds_sum": 0.1,
        "inter_token_latency_seconds_count": 1,
    }
    for name, value in expected.items():
        assert found[f"notso_{name}"] == pytest.approx(value), name


def test_adapters_are_exported_as_for_an_inference_gateway(engine: EngineHost) -> None:
    def labels() -> list[dict[str, str]]:
        families = text_string_to_metric_families(Metrics(engine).text().decode())
        return [
            each.labels for family in families if family.name == "notso_lora_requests_info" for each in family.samples
        ]

    assert labels() == [{"max_lora": "0", "running_lora_adapters": "", "waiting_lora_adapters": ""}]
    assert engine.engine is not None
    for name in ("One", "two"):
        engine.engine.adapters.add(AdapterSource(name, f"{name}.gguf"))
    names = "scripted:one,scripted:two"
    assert labels() == [{"max_lora": "2", "running_lora_adapters": names, "waiting_lora_adapters": ""}]


def test_adapters_are_listed_while_the_event_loop_unloads_the_model() -> None:
    engines = [ScriptedEngine()]

    class Unloading:
        adapters = (AdapterSource("one", "one.gguf"),)

        @property
        def engine(self) -> ScriptedEngine | None:
            return engines.pop() if engines else None

    served: Any = Unloading()
    assert adapter_names(served) == [] and adapter_names(served) == ["one"]


def test_every_metric_is_documented(engine: EngineHost) -> None:
    metrics = Metrics(engine)
    metrics.observe_request("GET", "/", 200, 0.1)
    names = {family.name for family in text_string_to_metric_families(metrics.text().decode())}
    listed = set(re.findall(r"^\| `((?:notso_|llamacpp:)\w+)` \|", DOCUMENT.read_text("utf-8"), re.MULTILINE))
    assert {re.sub(r"_(total|created)$", "", name) for name in names} == {
        re.sub(r"_total$", "", name) for name in listed
    } - {"notso_memory_planned_bytes"}
