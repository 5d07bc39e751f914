"""Trace requests, turns and engine work with OpenTelemetry (extra `otel`).

FastAPI creates request spans and exports all spans as configured by the OTEL_* variables. This module is imported only
if one of these variables sets an endpoint. Spans contain no user text, user names or chat URLs.
"""

from __future__ import annotations

import logging
import os
import time
from typing import Any

import opentelemetry.exporter.otlp.proto.http.trace_exporter  # noqa: F401 -- without the exporter, FastAPI only logs a warning
from fastapi.telemetry import TelemetryConfig
from opentelemetry import context, trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Span, SpanProcessor, TracerProvider

from notso.smollm3 import FinishReason, Usage
from notso.web.engine.running import RunningRequests
from notso.web.turns.turn import Turn
from notso.web.turns.turns import Turns

NAME = "notso"
PRIVATE = ("url.path", "url.query")
"""Attributes to redact, because they contain chat ids and search terms. Spans still name the route."""
REDACTED = "REDACTED"


class Tracing:
    def __init__(self, provider: TracerProvider | None = None) -> None:
        # A provider supplied by a test is already configured. Otherwise, FastAPI adds an exporter to the new provider,
        # as configured by the OTEL_* variables.
        self._is_configured = provider is not None
        self._provider = provider or TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(_Redactor())
        self._tracer = self._provider.get_tracer(NAME)

    def instrument(self, requests: RunningRequests, turns: Turns) -> None:
        requests.at_end.append(self.on_generation_end)
        turns.at_start.append(self.on_turn_start)
        turns.at_end.append(self.on_turn_end)

    @property
    def config(self) -> TelemetryConfig:
        return {
            "tracer_provider": self._provider,
            "auto_configure": not self._is_configured,
            "operation_spans": False,
            "metrics": False,
            "logs": False,
        }

    def on_turn_start(self, turn: Turn) -> None:
        # Spans that are later started in this context become children of the turn's span.
        span = self._tracer.start_span("turn")
        context.attach(trace.set_span_in_context(span))

    def on_turn_end(self, turn: Turn, usage: Usage | None, finish_reason: FinishReason | None) -> None:
        span = trace.get_current_span()
        span.set_attributes({"notso.turn.state": turn.message.state, **_usage_attributes(usage)})
        if finish_reason is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [finish_reason])
        if turn.message.state == "failed":
            span.set_status(trace.StatusCode.ERROR)
        span.end()

    def on_generation_end(self, usage: Usage | None, finish_reason: FinishReason | None) -> None:
        # The engine reports only durations, so start times are computed backward from the end.
        end = time.time_ns()
        durations = {"queue": 0.0, "prefill": 0.0, "decode": 0.0}
        if usage is not None:
            durations = {"queue": usage.queue_ms, "prefill": usage.prompt_ms, "decode": usage.completion_ms}
        at = end - sum(map(_ns, durations.values()))
        span = self._tracer.start_span("engine", start_time=at, attributes=_usage_attributes(usage))
        parent = trace.set_span_in_context(span)
        if usage is None:
            span.set_status(trace.StatusCode.ERROR)
        else:
            for name, milliseconds in durations.items():
                part = self._tracer.start_span(f"engine.{name}", parent, start_time=at)
                at += _ns(milliseconds)
                part.end(at)
        span.end(end)


class _Redactor(SpanProcessor):
    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        for name in PRIVATE:
            if span.attributes is not None and name in span.attributes:
                span.set_attribute(name, REDACTED)


def add_trace_ids_to_logs() -> None:
    """Add `trace_id` and `span_id` to log records within a span."""
    make = logging.getLogRecordFactory()

    def make_with_ids(*arguments: Any, **keywords: Any) -> logging.LogRecord:
        record = make(*arguments, **keywords)
        span = trace.get_current_span().get_span_context()
        if span.is_valid:
            record.trace_id, record.span_id = f"{span.trace_id:032x}", f"{span.span_id:016x}"
        return record

    logging.setLogRecordFactory(make_with_ids)


def _resource() -> Resource:
    is_named = os.environ.get("OTEL_SERVICE_NAME") or "service.name=" in os.environ.get("OTEL_RESOURCE_ATTRIBUTES", "")
    return Resource.create({} if is_named else {"service.name": NAME})


def _usage_attributes(usage: Usage | None) -> dict[str, int]:
    if usage is None:
        return {}
    return {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "notso.usage.cached_tokens": usage.cached_tokens,
        "notso.usage.reasoning_tokens": usage.reasoning_tokens,
    }


def _ns(milliseconds: float) -> int:
    return int(milliseconds * 1e6)
