"""Traces: the spans of requests, turns and engine work, and the content that they never include."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from scripted_engine import ScriptedEngine

from notso.web import app
from notso.web.app import configure_tracing
from notso.web.tracing import REDACTED, Tracing

Start = Callable[..., Any]
WORD = "heliotrope"
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
BODY = {"messages": [{"role": "user", "content": WORD}]}


class Spans:
    """Spans that have ended."""

    def __init__(self, exporter: InMemorySpanExporter) -> None:
        self._exporter = exporter

    @property
    def all(self) -> tuple[ReadableSpan, ...]:
        return self._exporter.get_finished_spans()

    def named(self, name: str) -> ReadableSpan:
        (found,) = [span for span in self.all if span.name == name]
        return found

    def under(self, parent: ReadableSpan) -> list[str]:
        assert parent.context is not None
        children = [span for span in self.all if span.parent and span.parent.span_id == parent.context.span_id]
        return [span.name for span in sorted(children, key=lambda span: (span.start_time or 0, span.end_time or 0))]


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> Spans:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(app, "configure_tracing", lambda: Tracing(provider))
    return Spans(exporter)


def test_api_request_span_contains_engine_spans(start: Start, spans: Spans) -> None:
    server = start(ScriptedEngine()).ready()
    headers = {"traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
    assert server.client.post("/v1/chat/completions", json=BODY, headers=headers).status_code == 200
    server.wait(lambda: any(span.name == "POST /v1/chat/completions" for span in spans.all))
    request, engine = spans.named("POST /v1/chat/completions"), spans.named("engine")
    assert request.context is not None and f"{request.context.trace_id:032x}" == TRACE
    assert request.attributes is not None and request.attributes["http.response.status_code"] == 200
    assert spans.under(request) == ["engine"]
    assert spans.under(engine) == ["engine.queue", "engine.prefill", "engine.decode"]
    parts = [spans.named(f"engine.{name}") for name in ("queue", "prefill", "decode")]
    times = [time for part in parts for time in (part.start_time, part.end_time)]
    assert [engine.start_time, *times[1::2]] == [*times[0::2], times[-1]], "each part begins where the last one ends"
    assert engine.attributes is not None and engine.attributes["gen_ai.usage.input_tokens"] > 0


def test_turn_span_is_child_of_request_and_omits_content(start: Start, spans: Spans) -> None:
    server = start(ScriptedEngine()).ready()
    asked = server.ask(WORD)
    server.finished(asked)
    server.wait(lambda: {"POST /chats", "turn"} <= {span.name for span in spans.all})
    turn = spans.named("turn")
    assert spans.under(spans.named("POST /chats")) == ["turn"] and spans.under(turn)[:1] == ["engine"]
    assert turn.attributes is not None and turn.attributes["notso.turn.state"] == "done"
    server.client.get(f"/chats/{asked.chat_id}")
    server.client.get("/search", params={"q": WORD})
    server.wait(lambda: any(span.name == "GET /search" for span in spans.all))
    told = " ".join(span.to_json() for span in spans.all)
    assert WORD not in told and asked.chat_id not in told and asked.generation_id not in told and REDACTED in told


class _Collector(BaseHTTPRequestHandler):
    """An HTTP server that receives spans as a collector does."""

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.taken.append((self.path, body))  # type: ignore[attr-defined]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: Any) -> None:
        """Print no log lines."""


@pytest.fixture
def collector() -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer(("127.0.0.1", 0), _Collector) as server:
        server.taken = []  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_spans_are_exported_to_configured_otlp_endpoint(
    start: Start, collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{collector.server_port}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "none")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
    monkeypatch.setattr("notso.web.tracing.add_trace_ids_to_logs", lambda: None)
    server = start(ScriptedEngine()).ready()
    assert server.client.post("/v1/chat/completions", json=BODY).status_code == 200

    def came() -> set[tuple[str, str]]:
        found = set()
        for path, body in list(collector.taken):
            assert path == "/v1/traces"
            for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                (name,) = [
                    each.value.string_value for each in resource.resource.attributes if each.key == "service.name"
                ]
                found |= {(name, span.name) for scope in resource.scope_spans for span in scope.spans}
        return found

    server.wait(lambda: {("notso", "engine.decode"), ("notso", "POST /v1/chat/completions")} <= came())


def test_tracing_is_off_without_endpoint_or_library(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    there = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    for environment in ({}, there | {"OTEL_SDK_DISABLED": "true"}, there | {"OTEL_TRACES_EXPORTER": "none"}):
        assert configure_tracing(environment) is None
    assert not caplog.records
    monkeypatch.setitem(sys.modules, "notso.web.tracing", None)
    assert configure_tracing(there) is None and "[otel]" in caplog.text
