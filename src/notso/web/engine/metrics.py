"""Export Prometheus metrics under vLLM's names (with the prefix `notso_`) and llama.cpp's names, so that existing
dashboards can be reused.

Apart from the names and the number of adapters, label values come from fixed sets. Labels contain no addresses, user
names or user text.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from notso.smollm3 import EngineStats, FinishReason, ModelInfo, Usage, process_memory
from notso.web.engine.host import EngineHost
from notso.web.engine.model_names import adapter_id, adapter_names

FIRST_ESTIMATE_SECONDS = 10.0  # assumed mean until the first answer has been measured
METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2)


class Metrics:
    """Counters and histograms of requests. Engine statistics are read when the metrics are collected."""

    def __init__(self, engine: EngineHost) -> None:
        self._generations = 0
        self._generation_seconds = 0.0
        self._registry = registry = CollectorRegistry()
        registry.register(_EngineCollector(engine))
        self.started = int(time.time())

        def seconds(name: str, help: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"notso_{name}_seconds", help, buckets=buckets, registry=registry)

        self._first_token = seconds("time_to_first_token", "Time from the request's arrival to the first token.")
        self._token = seconds(
            "inter_token_latency", "Mean time per token after the first token of a request.", _TOKEN_SECONDS
        )
        self._latency = seconds("e2e_request_latency", "Time from the request's arrival to its end.")
        self._queue = seconds("request_queue_time", "Time in the engine's queue.")
        self._prefill = seconds("request_prefill_time", "Prefill time.")
        self._decode = seconds("request_decode_time", "Decode time.")
        self._reasoning = Counter("notso_reasoning_tokens", "Reasoning tokens generated.", registry=registry)
        self._success = Counter(
            "notso_request_success",
            "Requests that finished without being canceled.",
            ["finished_reason"],
            registry=registry,
        )
        self._cancelled = Counter("notso_request_cancelled", "Requests that were canceled.", registry=registry)
        self._failed = Counter("notso_request_failed", "Generations that failed.", registry=registry)
        for reason in ("stop", "length", "tool_calls"):
            self._success.labels(reason)  # creates the series, so that it is exported as 0 before the first request
        self._http = Counter("notso_http_requests", "HTTP requests.", ["method", "route", "status"], registry=registry)
        self._http_seconds = Histogram(
            "notso_http_request_duration_seconds",
            "Duration of HTTP requests, up to the last byte.",
            ["route"],
            buckets=_SECONDS,
            registry=registry,
        )

    def observe(self, usage: Usage | None, finish_reason: FinishReason | None) -> None:
        """Record a finished answer. A failed one has no usage or finish reason, and is ignored."""
        if usage is None or finish_reason is None:
            return
        if finish_reason == "cancelled":
            self._cancelled.inc()
        else:
            self._success.labels(finish_reason).inc()
        self._reasoning.inc(usage.reasoning_tokens)
        self._queue.observe(usage.queue_ms / 1000)
        self._prefill.observe(usage.prompt_ms / 1000)
        self._decode.observe(usage.completion_ms / 1000)
        self._generations += 1
        self._generation_seconds += (usage.prompt_ms + usage.completion_ms) / 1000
        self._latency.observe((usage.queue_ms + usage.prompt_ms + usage.completion_ms) / 1000)
        if usage.completion_tokens:
            self._first_token.observe((usage.queue_ms + usage.prompt_ms) / 1000)
        if usage.completion_tokens > 1:
            self._token.observe(usage.completion_ms / 1000 / (usage.completion_tokens - 1))

    def count_failure(self, usage: Usage | None, finish_reason: FinishReason | None) -> None:
        if finish_reason is None:
            self._failed.inc()

    @property
    def mean_generation_seconds(self) -> float:
        """Mean seconds per answer, excluding queue time, or FIRST_ESTIMATE_SECONDS before the first answer."""
        return self._generation_seconds / self._generations if self._generations else FIRST_ESTIMATE_SECONDS

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        # `route` is the path template, because every actual path would create its own time series.
        self._http.labels(method if method in METHODS else "other", route, str(status)).inc()
        self._http_seconds.labels(route).observe(seconds)

    def text(self) -> bytes:
        """Return the metrics in Prometheus's text format. Blocks."""
        return generate_latest(self._registry)


class RequestMetrics:
    """ASGI middleware that counts requests, including those that inner middleware rejects."""

    def __init__(self, app: ASGIApp, metrics: Metrics) -> None:
        self._app = app
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began = time.monotonic()
        status = 500  # recorded if no response starts

        async def send_noted(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, send_noted)
        finally:
            route = getattr(scope.get("route"), "path", "none")
            self._metrics.observe_request(scope["method"], route, status, time.monotonic() - began)


class _EngineCollector(Collector):
    def __init__(self, engine: EngineHost) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        info, stats, memory = self._engine.info, self._engine.stats(), process_memory()
        yield _gauge("model_loaded", "1 if the default model is loaded, else 0.", int(self._engine.state == "ready"))
        yield _gauge(
            "process_resident_memory_bytes",
            "Resident memory, including pages of mapped files.",
            memory.resident_bytes,
        )
        yield _gauge(
            "process_held_memory_bytes",
            "Memory in RAM or swap, excluding pages of mapped files.",
            memory.held_bytes,
        )
        if info is None or stats is None:
            return
        device = GaugeMetricFamily("notso_device", "1 for the device in use (cpu or a GPU).", labels=["device"])
        device.add_metric([info.device.partition(" ")[0]], 1)
        yield device
        if info.memory is not None:
            yield _gauge("memory_planned_bytes", "Memory planned for the model.", info.memory.needed_bytes)
        yield _gauge("num_requests_running", "Requests in prefill or decode.", stats.running)
        yield _gauge("num_requests_waiting", "Requests waiting in the queue.", stats.waiting)
        yield _gauge("kv_cache_bytes", "Memory reserved for keys and values.", info.kv_bytes)
        used = stats.kv_blocks_used / stats.kv_blocks if stats.kv_blocks else 0
        yield _gauge("kv_cache_usage_perc", "Fraction of the KV cache held by running requests (1: all).", used)
        prompt_tokens = stats.prompt_tokens_total
        yield _counter("prompt_tokens", "Prompt tokens, including cached ones.", prompt_tokens)
        yield _counter("generation_tokens", "Generated tokens.", stats.generated_tokens_total)
        yield _counter("prefix_cache_queries", "Prompt tokens looked up in the cache.", prompt_tokens)
        yield _counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_tokens_total)
        yield _counter("spec_decode_num_draft_tokens", "Draft tokens proposed.", stats.drafted_tokens_total)
        yield _counter(
            "spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", stats.accepted_tokens_total
        )
        yield _counter("num_preemptions", "Requests preempted for lack of KV cache blocks.", stats.preemptions_total)
        yield self._adapters(info)
        yield from _llama_cpp_metrics(stats)

    def _adapters(self, info: ModelInfo) -> Metric:
        # Defined by the model server protocol of Kubernetes' Gateway API Inference Extension. Naming an adapter
        # in a request does not load it, so no adapter is ever waiting, and `max_lora` is the number of loaded adapters.
        names = [adapter_id(info, name) for name in adapter_names(self._engine.default)]
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        help = "LoRA adapters that requests can use; the value is the current Unix time."
        family = GaugeMetricFamily("notso_lora_requests_info", help, labels=labels)
        family.add_metric([str(len(names)), ",".join(names), ""], time.time())
        return family


def _llama_cpp_metrics(stats: EngineStats) -> Iterator[Metric]:
    # Yield engine statistics under llama.cpp's names.
    counters = (
        ("prompt_tokens", "Prompt tokens processed.", stats.prompt_tokens_total - stats.cached_tokens_total),
        ("prompt_tokens_cached", "Prompt tokens found in the cache.", stats.cached_tokens_total),
        ("tokens_predicted", "Generated tokens.", stats.generated_tokens_total),
        ("spec_decode_num_draft_tokens", "Draft tokens proposed.", stats.drafted_tokens_total),
        ("spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", stats.accepted_tokens_total),
    )
    gauges = (
        ("prompt_tokens_seconds", "Prompt tokens processed per second.", stats.prefill_tokens_per_s),
        ("predicted_tokens_seconds", "Tokens generated per second.", stats.decode_tokens_per_s),
        ("requests_processing", "Requests in prefill or decode.", stats.running),
        ("requests_deferred", "Requests waiting in the queue.", stats.waiting),
    )
    for kind, rows in ((CounterMetricFamily, counters), (GaugeMetricFamily, gauges)):
        for name, help, value in rows:
            yield kind(f"llamacpp:{name}", help, value=value)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"notso_{name}", help, value=value)


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"notso_{name}", help, value=value)
