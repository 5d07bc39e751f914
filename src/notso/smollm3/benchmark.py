"""How fast this machine runs a model, beside how fast it reads memory: both measured in turns, in one run.

Decoding reads every weight once for each token, so `read bandwidth / bytes of weights` is the most tokens per second
that any engine can reach; a rate is worth something only as a share of that ceiling, measured in the same minutes.
"""

from __future__ import annotations

import mmap
import os
import platform
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from notso.smollm3.engine import Engine
from notso.smollm3.errors import EngineError, InvalidRequestError
from notso.smollm3.messages import Usage
from notso.smollm3.peers import PEERS, LlamaCpp
from notso.smollm3.residency import Residency
from notso.smollm3.sampling_params import SamplingParams

Words = npt.NDArray[np.uint64]

PROBE_BYTES = 1 << 30
PROBE_READS = 3  # the first also brings the pages in; the best of them is the ceiling
SETTLE_SECONDS = 120.0
SHORT_PROMPT_TOKENS = 8  # what "depth 0" stands on: a prompt that costs nothing to read

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """What to measure. prefill_tokens and depths in tokens; each repeat measures everything once, in turns."""

    prefill_tokens: tuple[int, ...] = (512,)
    depths: tuple[int, ...] = (0,)
    decode_tokens: int = 32
    repeats: int = 3
    context_tokens: int | None = None
    threads: int | None = None
    probe_bytes: int = PROBE_BYTES
    seed: int = 1
    weights: Residency = "auto"
    compare: str | None = None  # a peer of notso.smollm3.peers


@dataclass(slots=True)
class Samples:
    """Repeated measurements of one thing."""

    values: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    def summary(self, name: str) -> dict[str, float]:
        return {
            name: _rounded(self.median),
            f"{name}_min": _rounded(min(self.values)),
            f"{name}_max": _rounded(max(self.values)),
        }


def run_benchmark(path: Path | None, plan: BenchmarkPlan, progress: Progress | None = None) -> dict[str, Any]:
    """Measure a model file (None: the demo) and give the result under stable keys, rates in tokens per second.

    `prefill` and `decode` carry `tok_s` (median) with `tok_s_min` and `tok_s_max`; `roofline` is decode's share of what
    the read bandwidth of this run allows. `load_s` is a load from a warm page cache, `first_load_s` the one before it.

    Raises what Engine.load and Engine.generate raise, and EngineError where a measurement gave no time.
    """
    report = progress or (lambda _what, _done, _total: None)
    stolen_before = _cpu_times()
    first_load_s = _load_seconds(path, plan)
    started = time.perf_counter()
    engine = Engine.load(path, context_tokens=plan.context_tokens, threads=plan.threads, weights=plan.weights)
    load_s = time.perf_counter() - started
    peer: LlamaCpp | None = None
    try:
        if plan.compare is not None:
            report("loading the peer", 0, 1)
            peer = _peer(plan, engine)
        report("waiting for the weights' pages", 0, 1)
        engine.settle(SETTLE_SECONDS)
        rounds = _Rounds(engine, plan, report, peer)
        rounds.run()
        result: dict[str, Any] = {
            "machine": describe_machine(),
            "model": _describe_model(engine),
            "bandwidth_gb_s": _rounded(rounds.bandwidth.median),
            "bandwidth_gb_s_min": _rounded(min(rounds.bandwidth.values)),
            "bandwidth_gb_s_max": _rounded(max(rounds.bandwidth.values)),
            "load_s": _rounded(load_s),
            "first_load_s": _rounded(first_load_s),
            "prefill": rounds.prefill_rows(),
            "decode": rounds.decode_rows(weight_bytes(engine)),
            "batch": [],
            "memory": rounds.memory,
            "weights": engine.weights_residency,
            "repeats": plan.repeats,
        }
        if peer is not None:
            result |= rounds.comparison(peer)
    finally:
        if peer is not None:
            peer.close()
        engine.close()
    result["machine"]["stolen_percent"] = _rounded(_stolen_percent(stolen_before, _cpu_times()))
    return result


def read_bandwidth_gb_s(buffer: Words, threads: int) -> float:
    """Gigabytes (10^9) per second at which `threads` threads read `buffer` (uint64, 1-D) once, each its own part."""
    parts = np.array_split(buffer, threads)
    workers = [threading.Thread(target=np.bitwise_xor.reduce, args=(part,)) for part in parts]
    started = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return buffer.nbytes / (time.perf_counter() - started) / 1e9


def probe_buffer(size_bytes: int) -> Words:
    """Memory to read, uint64, on huge pages where the kernel gives them, every page written so that it exists."""
    memory = mmap.mmap(-1, size_bytes)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    buffer = np.frombuffer(memory, dtype=np.uint64)
    buffer[:] = 0x5DEECE66D
    return buffer


def describe_machine() -> dict[str, Any]:
    """CPU, cores, memory, kernel and versions: what a figure is worthless without."""
    return {
        "cpu": cpu_name(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gb": _rounded(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def cpu_name() -> str:
    """The processor's name as the kernel tells it, or its architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, "") or platform.machine()


def _peer(plan: BenchmarkPlan, engine: Engine) -> LlamaCpp:
    if plan.compare not in PEERS:
        raise InvalidRequestError(f"peers to compare with: {', '.join(PEERS)}", param="compare")
    return LlamaCpp(Path(engine.info.path), engine.info.context_tokens, engine.info.threads)


def weight_bytes(engine: Engine) -> int:
    """Bytes of weights that one decoded token reads: all of them, as the tied embedding is also the output head."""
    from notso.qtensor.gguf import GGUFFile

    with GGUFFile.open(Path(engine.info.path)) as file:
        return sum(tensor.nbytes for tensor in file.tensors.values())


class _Rounds:
    """One round measures the bandwidth, then every prefill, then every decode; rounds repeat, so that a slow minute of
    the machine strikes all of them and not one."""

    def __init__(self, engine: Engine, plan: BenchmarkPlan, report: Progress, peer: LlamaCpp | None = None) -> None:
        self._peer = peer
        self.peer_prefill: dict[int, Samples] = {tokens: Samples() for tokens in plan.prefill_tokens}
        self.peer_decode: dict[int, Samples] = {depth: Samples() for depth in plan.depths}
        self._engine = engine
        self._plan = plan
        self._report = report
        self._random = np.random.default_rng(plan.seed)
        self._threads = engine.info.threads
        self._forbidden = dict.fromkeys(sorted(engine.tokenizer.end_ids), -100.0)
        control = engine.tokenizer.control_ids | engine.tokenizer.user_defined_ids
        self._ids = np.array([i for i in range(engine.tokenizer.vocab_size) if i not in control])
        self.bandwidth = Samples()
        self.memory: dict[str, float] = {}  # the largest seen after any generation
        self.prefill: dict[int, Samples] = {tokens: Samples() for tokens in plan.prefill_tokens}
        self.decode: dict[int, Samples] = {depth: Samples() for depth in plan.depths}

    def run(self) -> None:
        jobs = [("read bandwidth", self.bandwidth, self._bandwidth)]
        for tokens in self.prefill:
            jobs.append((f"prefill {tokens:,}", self.prefill[tokens], partial(self._prefill_rate, tokens)))
            if self._peer is not None:
                rate = partial(self._peer_prefill_rate, self._peer, tokens)
                jobs.append((f"{self._peer.name}: prefill {tokens:,}", self.peer_prefill[tokens], rate))
        for depth in self.decode:
            jobs.append((f"decode at {depth:,}", self.decode[depth], partial(self._decode_rate, depth)))
            if self._peer is not None:
                rate = partial(self._peer_decode_rate, self._peer, depth)
                jobs.append((f"{self._peer.name}: decode at {depth:,}", self.peer_decode[depth], rate))
        steps = self._plan.repeats * len(jobs)
        for turn in range(steps):
            name, samples, measure = jobs[turn % len(jobs)]
            self._report(name, turn, steps)
            samples.values.append(measure())
        self._report("done", steps, steps)

    def comparison(self, peer: LlamaCpp) -> dict[str, Any]:
        """`peer`: its figures under our keys; `ratio`: ours over the peer's, of the medians."""
        prefill = [{"tokens": n, "depth": 0, **s.summary("tok_s")} for n, s in self.peer_prefill.items()]
        decode = [{"depth": depth, **s.summary("tok_s")} for depth, s in self.peer_decode.items()]
        ratio = {
            "prefill": [
                {"tokens": n, "ratio": _rounded(self.prefill[n].median / s.median)}
                for n, s in self.peer_prefill.items()
            ],
            "decode": [
                {"depth": depth, "ratio": _rounded(self.decode[depth].median / s.median)}
                for depth, s in self.peer_decode.items()
            ],
        }
        about = {"name": peer.name, "version": peer.version}
        return {"peer": {**about, "prefill": prefill, "decode": decode}, "ratio": ratio}

    def prefill_rows(self) -> list[dict[str, Any]]:
        return [{"tokens": tokens, "depth": 0, **s.summary("tok_s")} for tokens, s in self.prefill.items()]

    def decode_rows(self, bytes_per_token: int) -> list[dict[str, Any]]:
        ceiling = self.bandwidth.median * 1e9 / bytes_per_token
        return [
            {
                "depth": depth,
                **samples.summary("tok_s"),
                "roofline": _rounded(samples.median / ceiling),
                "roofline_tok_s": _rounded(ceiling),
            }
            for depth, samples in self.decode.items()
        ]

    def _bandwidth(self) -> float:
        # The buffer is made anew each time, so that the memory measured between is the engine's alone.
        buffer = probe_buffer(self._plan.probe_bytes)
        return max(read_bandwidth_gb_s(buffer, self._threads) for _ in range(PROBE_READS))

    def _prefill_rate(self, tokens: int) -> float:
        usage = self._generate(tokens, 1)
        return _rate(usage.prompt_tokens - usage.cached_tokens, usage.prompt_ms)

    def _decode_rate(self, depth: int) -> float:
        usage = self._generate(max(depth, SHORT_PROMPT_TOKENS), self._plan.decode_tokens)
        # The first token falls out of reading the prompt; the time is that of the others.
        return _rate(usage.completion_tokens - 1, usage.completion_ms)

    def _peer_prefill_rate(self, peer: LlamaCpp, tokens: int) -> float:
        return _rate(tokens, 1000 * peer.prefill_seconds(tokens))

    def _peer_decode_rate(self, peer: LlamaCpp, depth: int) -> float:
        count = self._plan.decode_tokens - 1
        return _rate(count, 1000 * peer.decode_seconds(count, depth))

    def _generate(self, prompt_tokens: int, max_tokens: int) -> Usage:
        # A fresh prompt each time: nothing of it can be remembered from the round before.
        ids: Sequence[int] = [int(i) for i in self._random.choice(self._ids, prompt_tokens)]
        params = SamplingParams(max_tokens=max_tokens, temperature=0.0, logit_bias=self._forbidden)
        # Taken to the end at once: an answer left half way would hold the engine's lock against its closing.
        events = list(self._engine.generate(ids, params))
        usage = next((event.usage for event in events if event.usage is not None), None)
        for name, megabytes in _memory().items():
            self.memory[name] = max(self.memory.get(name, 0.0), megabytes)
        if usage is None:
            raise EngineError("the engine reported no usage")
        return usage


def _rate(tokens: int, milliseconds: float) -> float:
    if tokens <= 0 or milliseconds <= 0:
        raise EngineError(f"nothing was measured: {tokens} tokens in {milliseconds} ms")
    return tokens * 1000 / milliseconds


def _load_seconds(path: Path | None, plan: BenchmarkPlan) -> float:
    started = time.perf_counter()
    Engine.load(path, context_tokens=plan.context_tokens, threads=plan.threads).close()
    return time.perf_counter() - started


def _describe_model(engine: Engine) -> dict[str, Any]:
    info = engine.info
    return {
        "name": info.name,
        "demo": info.is_demo,
        "size_bytes": info.size_bytes,
        "parameters": info.parameter_count,
        "tensors": dict(info.quantisation),
        "context_tokens": info.context_tokens,
        "kernels": info.kernels,
        "threads": info.threads,
    }


def _memory() -> dict[str, float]:
    """Resident memory of this process in MB (10^6 bytes); the mapped file counts as far as it is resident."""
    wanted = {"VmRSS:": "rss_mb", "RssAnon:": "anonymous_mb", "RssFile:": "file_mb"}
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {wanted[words[0]]: _rounded(int(words[1]) * 1024 / 1e6) for words in fields if words and words[0] in wanted}


def _cpu_times() -> list[int]:
    try:
        return [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    except OSError:
        return []


def _stolen_percent(before: list[int], after: list[int]) -> float:
    """Share of CPU time the hypervisor took while we measured: above a few percent the figures say little."""
    if len(before) < 8 or len(after) < 8:
        return 0.0
    spent = [b - a for a, b in zip(before, after, strict=True)]
    return 100.0 * spent[7] / max(1, sum(spent))


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
