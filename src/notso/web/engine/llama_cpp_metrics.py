"""The numbers that llama.cpp's server tells too, under its names, for dashboards that were made for it."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from notso.web.engine.host import EngineHost


class LlamaCppMetrics(Collector):
    """Asked anew each time somebody reads the metrics. Nothing while no model is loaded."""

    def __init__(self, engine: EngineHost) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats()
        if stats is None:
            return
        read = stats.prompt_tokens_total - stats.cached_tokens_total
        yield _counter("prompt_tokens", "Tokens of prompts that were read.", read)
        yield _counter("prompt_tokens_cached", "Tokens of prompts found in the cache.", stats.cached_tokens_total)
        yield _counter("tokens_predicted", "Generated tokens.", stats.generated_tokens_total)
        yield _counter("spec_decode_num_draft_tokens", "Draft tokens.", stats.drafted_tokens_total)
        yield _counter(
            "spec_decode_num_accepted_tokens", "Draft tokens that were accepted.", stats.accepted_tokens_total
        )
        yield _gauge("prompt_tokens_seconds", "Tokens of prompts read in a second.", stats.prefill_tokens_per_s)
        yield _gauge("predicted_tokens_seconds", "Tokens generated in a second.", stats.decode_tokens_per_s)
        yield _gauge("requests_processing", "Requests in prefill or decode.", stats.running)
        yield _gauge("requests_deferred", "Requests that wait.", stats.waiting)


def _gauge(name: str, help: str, value: float) -> Metric:
    return GaugeMetricFamily(f"llamacpp:{name}", help, value=value)


def _counter(name: str, help: str, value: float) -> Metric:
    return CounterMetricFamily(f"llamacpp:{name}", help, value=value)
