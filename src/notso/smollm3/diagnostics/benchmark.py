"""Measure token rates, and compare them with hardware ceilings.

Decoding reads every weight and the whole cache once per token, so no engine can decode more than `read bandwidth /
bytes read` tokens per second. Decode rates are also reported as a share of this ceiling. Rates and ceilings are
measured within minutes of each other, because the speed of a shared machine varies.
"""

from __future__ import annotations

import itertools
import math
import platform
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from notso.qtensor import GGUFFile, ceilings, kernel_choice, process_memory, zeroed
from notso.smollm3.diagnostics.inspection import weight_bytes_per_token
from notso.smollm3.diagnostics.peers.process import PeerProcess, Task
from notso.smollm3.diagnostics.verification import model_fingerprint
from notso.smollm3.engine.engine import Engine
from notso.smollm3.engine.memory_plan import kv_bytes_per_token
from notso.smollm3.errors import EngineError, InvalidRequestError
from notso.smollm3.model.weights import SmolLM3Weights
from notso.smollm3.output.generation import Generation
from notso.smollm3.sampling.sampler import Sampler
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS, OutOfBlocksError, block_hash
from notso.smollm3.scheduling.sequence import BlockCopy
from notso.smollm3.values.engine_config import KVChoice, Placement
from notso.smollm3.values.events import Usage
from notso.smollm3.values.request_options import RequestOptions
from notso.smollm3.values.sampling_params import SamplingParams
from notso.system import processors
from notso.system.memory import huge_page_bytes, physical_memory

# Length in tokens of the prompt for depth 0 (an empty context); its cost is negligible.
SHORT_TOKENS = 8

# Number of new (uncached) prompt tokens in time-to-first-token measurements.
NEW_TURN_TOKENS = 16

# Maximum number of tokens that each sequence of a batch generates in addition to the timed ones, so that the first
# sequences are still running when the last one starts.
LATE_TOKENS = 256

POLL_S = 0.005

SAMPLINGS = 20

# Generated tokens are restricted to the first WORDS words among the first AMONG_TOKENS ordinary tokens.
AMONG_TOKENS, WORDS, WORD_BIAS = 4096, 512, 100.0

_NO_TIME = 1e-9


class EngineMeter:
    """Measures an engine on random prompts."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._random = np.random.default_rng(seed)
        tokenizer = engine.tokenizer
        special = tokenizer.control_ids | tokenizer.user_defined_ids
        self._ids = np.array([i for i in range(tokenizer.vocab_size) if i not in special])
        texts = {i: tokenizer.token_text(i) for i in self._ids[:AMONG_TOKENS].tolist()}
        words = [i for i, text in texts.items() if text.isascii() and text.isalpha()]
        # If all tokens are whole words, each one yields an event immediately; incomplete characters would be held back.
        only_words = dict.fromkeys(words[:WORDS], WORD_BIAS)
        self.params = partial(SamplingParams, temperature=0.0, logit_bias=only_words)
        self._contexts: dict[int, list[int]] = {}

    def measure(self, task: Task) -> list[float]:
        """Return each step's duration in seconds (prefill: the total). Raises EngineError."""
        kind, tokens, last = task
        if kind == "prefill":
            return [self._prefill(tokens, last)]
        return self._decode(tokens, last) if kind == "decode" else self._batch(last, tokens)

    def first_token_s(self, depth: int) -> float:
        """Return the seconds to the first generated token after `depth` tokens of context and 16 new prompt tokens."""
        prompt = self.prompt(depth, NEW_TURN_TOKENS)  # fills the cache if necessary
        started = time.perf_counter()
        return self.run_watched(prompt, 1).times[0] - started

    def sampling_s(self, params: SamplingParams) -> float:
        logits = self._engine.logits(self.random_ids(SHORT_TOKENS))[-1]
        sampler = Sampler(params, 1, len(logits))
        seconds = []
        for position in range(SAMPLINGS):
            started = time.perf_counter()
            sampler.sample(logits, [0], position)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def read_bandwidth(self) -> float | None:
        """Return the output head's read bandwidth in bytes per second; None if the head is small or on a GPU."""
        if self._engine.info.device != "cpu":
            return None
        # `call` runs a function between two steps, so that no computation disturbs the measurement.
        head = self._engine._core.call(lambda: self._engine._runner.weights.lm_head)
        data = getattr(head, "data", None)
        if not isinstance(data, np.ndarray) or data.size < ceilings.WINDOW_BYTES:
            return None
        return max(
            self._engine._core.call(partial(ceilings.read_bandwidth, data, places)) for places in ceilings.PLACES
        )

    def _prefill(self, tokens: int, depth: int) -> float:
        usage = self.run_watched(self.prompt(depth, tokens), 1).usage
        # If part of the context was not cached, it was prefilled too, so the time is scaled down to `tokens` tokens.
        return usage.prompt_ms / 1000 * tokens / max(1, usage.prompt_tokens - usage.cached_tokens)

    def _decode(self, tokens: int, depth: int) -> list[float]:
        prompt = self.prompt(depth, 1) if depth else self.random_ids(SHORT_TOKENS)
        return self.run_watched(prompt, tokens + 1).steps[:tokens]

    def _batch(self, sequences: int, tokens: int) -> list[float]:
        # Only the steps of the last sequence to start (`latest`) are timed, because all other sequences run during
        # these steps.
        prompts = [self.random_ids(SHORT_TOKENS) for _ in range(sequences)]
        params = self.params(max_tokens=tokens + LATE_TOKENS)
        # All prompts are submitted between two steps. Otherwise, the first sequence might end before the last starts.
        watches = self._engine._core.call(
            lambda: [GenerationWatch(self._engine.submit(prompt, params)) for prompt in prompts]
        )
        # Wait for one more token than is timed, because sequences receive the tokens of a step one after another.
        # Otherwise, the check below could wrongly conclude that a sequence had ended early.
        while min(len(watch.times) for watch in watches) <= tokens + 1 and not any(w.finished for w in watches):
            time.sleep(POLL_S)
        for watch in watches:
            watch.stop()
        latest = max(watches, key=lambda watch: watch.times[0] if watch.times else math.inf)
        if len(latest.times) <= tokens or any(watch.times[-1] < latest.times[tokens] for watch in watches):
            raise EngineError(f"{sequences} sequences did not run concurrently: choose a smaller --batch")
        return latest.steps[:tokens]

    def run_watched(self, prompt: list[int], tokens: int) -> GenerationWatch:
        watch = GenerationWatch(self._engine.submit(prompt, self.params(max_tokens=tokens)))
        watch.finish()
        if len(watch.times) != tokens:
            raise EngineError(f"{tokens} tokens were requested, but {len(watch.times)} were received")
        return watch

    def random_ids(self, tokens: int) -> list[int]:
        return [int(i) for i in self._random.choice(self._ids, tokens)]

    def prompt(self, depth: int, new_tokens: int) -> list[int]:
        if depth and depth not in self._contexts:
            self._contexts[depth] = self.random_ids(depth)
        if depth:
            self._fill_cache(self._contexts[depth])
        return self._contexts.get(depth, []) + self.random_ids(new_tokens)

    def _fill_cache(self, ids: list[int]) -> None:
        # Only two blocks are prefilled. All later ones are copies of the second, because a step's time depends on the
        # number of cached tokens, not on their content. The first is not copied, because low-bit cache formats also
        # store it with higher precision.
        engine, whole = self._engine, len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
        if whole <= 2 * BLOCK_TOKENS:
            return
        self.run_watched([*ids[: 2 * BLOCK_TOKENS], *self.random_ids(1)], 1)

        def copy() -> None:
            pool, parent = engine._pool, engine._salt(RequestOptions()).root
            blocks: list[int] = []
            for start in range(0, whole, BLOCK_TOKENS):
                tokens = ids[start : start + BLOCK_TOKENS]
                block = pool.find(parent, tokens)
                if block is None:
                    block = pool.allocate()
                    engine._runner.cache.copy_block(BlockCopy(blocks[1], block))
                    pool.register(block, parent, tokens)
                    pool.free(block)
                blocks.append(block)
                parent = block_hash(parent, tokens)

        try:
            engine._core.call(copy)
        except OutOfBlocksError:
            raise EngineError(f"the cache is too small for {len(ids):,} tokens") from None


class GenerationWatch:
    """Records when one generation's tokens arrive."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._seen = 0
        self._lock = threading.Lock()  # both the subscribing thread and the engine thread may call `_record_times`
        self.times: list[float] = []
        generation.subscribe(self._record_times)

    def _record_times(self) -> None:
        now = time.perf_counter()
        with self._lock:
            for event in self._generation.read(self._seen):
                self._seen += 1
                if event.kind in ("text", "reasoning"):
                    self.times += [now] * (event.tokens - len(self.times))

    def finish(self) -> None:
        """Wait for the generation to end. Raises its error, if any."""
        self._generation.result()

    @property
    def finished(self) -> bool:
        return self._generation.finished

    def stop(self) -> None:
        self._generation.stop()
        self.finish()

    @property
    def usage(self) -> Usage:
        return self._generation.result().usage

    @property
    def steps(self) -> list[float]:
        return [max(later - earlier, _NO_TIME) for earlier, later in itertools.pairwise(self.times)]


Bytes = npt.NDArray[np.uint8]


def describe_machine() -> dict[str, Any]:
    """Return the date, CPU, memory, system and versions."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "cpu": cpu_name(),
        "features": kernel_choice.cpu_features(),
        "cores": processors.usable_processors(),
        "memory_gb": round(physical_memory() / 1e9, 1),
        "system": processors.system_name(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


def cpu_name() -> str:
    """Return the processor's name, or else its architecture."""
    return processors.name() or platform.machine()


def probe_buffer(size_bytes: int) -> Bytes:
    """Return a uint8 buffer in resident memory."""
    buffer = zeroed(size_bytes)
    buffer[:] = 93
    return buffer


def resident_memory() -> dict[str, float]:
    """Return resident memory in MB (10^6 bytes): total, anonymous and mapped files."""
    memory = process_memory()
    if not memory.resident_bytes:
        return {}
    resident, anonymous = memory.resident_bytes, memory.held_bytes
    parts = {"rss_mb": resident, "anonymous_mb": anonymous, "file_mb": max(0, resident - anonymous)}
    return {name: round(size / 1e6, 1) for name, size in parts.items()}


class StolenTime:
    """CPU time that the hypervisor gave to other virtual machines since this object was created."""

    # Measurements are unreliable if this time exceeds a few percent.
    def __init__(self) -> None:
        self._before = processors.times()

    def percent(self) -> float:
        after = processors.times()
        if len(self._before) < 8 or len(after) < 8:
            return 0.0
        spent = [b - a for a, b in zip(self._before, after, strict=True)]
        return 100.0 * spent[7] / max(1, sum(spent))


PROBE_BYTES = 1 << 30
PROBE_READS = 3  # number of timed reads; the fastest one determines the ceiling
WAIT_SECONDS = 120.0

# Length of the pause after the memory of the bandwidth measurement is freed. A virtual machine may return freed memory
# to the host seconds later, which can delay a step or two by 0.1 s.
CALM_SECONDS = 3.0

METHOD = (
    "random prompts; greedy decoding, timed per token as received by a client; contexts filled with copies of one "
    "prefilled block; measurements interleaved; medians reported"
)

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class BenchmarkPlan:
    """Measurements to take in each of `repeats` rounds."""

    prefill: tuple[tuple[int, int], ...] = ((512, 0),)  # (new tokens, cached tokens before them)
    depths: tuple[int, ...] = (0,)  # cached tokens before decoding starts
    batches: tuple[int, ...] = (16,)  # numbers of concurrent sequences
    decode_tokens: int = 32
    repeats: int = 3
    context_tokens: int | None = None  # None: as many as the plan needs
    threads: int | None = None
    device: str = "auto"
    kv: KVChoice = "auto"
    probe_bytes: int = PROBE_BYTES
    seed: int = 1
    weights: Placement = "auto"
    compare: str | None = None  # name of another engine to compare with (see `peers`)

    @property
    def tasks(self) -> list[Task]:
        return [
            *(("prefill", tokens, depth) for tokens, depth in self.prefill),
            *(("decode", self.decode_tokens, depth) for depth in self.depths),
            *(("batch", self.decode_tokens, sequences) for sequences in self.batches),
        ]

    @property
    def longest_tokens(self) -> int:
        batch = SHORT_TOKENS + LATE_TOKENS if self.batches else 0
        prompts = [tokens + depth for tokens, depth in self.prefill]
        return max([*self.depths, *prompts, batch]) + NEW_TURN_TOKENS + self.decode_tokens


@dataclass(slots=True)
class Samples:
    """Repeated measurements of one quantity."""

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
    """Benchmark a model file (None: the demo) and return the results by key. Rates are in tokens per second.

    Raises the same errors as Engine.load and Engine.submit, and EngineError if a measurement yields no time.
    """
    # Each rate has `tok_s` (median), `tok_s_min` and `tok_s_max`. Less obvious keys:
    #   roofline         decode rate as a share of the limit set by the highest read bandwidth of the run; CPU only
    #   roofline_beside  like roofline, but with the read bandwidth of the output head, measured right before and after
    #                    decoding; CPU only, and absent if the head is small
    #   byte_tops        peak rate of the kernels' byte products, in 10^12 operations per second
    #   first_load_s     time of the first load
    #   load_s           time of the second load, when the file is already in the page cache
    #   fingerprint      hash of the model's output; depends on the file and the cache format, not on the machine
    report = progress or (lambda _what, _done, _total: None)
    stolen = StolenTime()
    engine, first_load_s = _load(path, plan)
    engine.close()
    engine, load_s = _load(path, plan)
    peer: PeerProcess | None = None
    try:
        if plan.compare is not None:
            report("loading the other engine", 0, 1)
            info = engine.info
            peer = PeerProcess(plan.compare, Path(info.path), info.context_tokens, info.threads)
            report("trying the other engine's configurations", 0, 1)
            peer.tune(plan.tasks)
        report("waiting until the weights are copied to memory", 0, 1)
        engine.wait_for_placement(WAIT_SECONDS)
        rounds = _BenchmarkRun(engine, plan, report, peer)
        rounds.run()
        result: dict[str, Any] = {
            "machine": describe_machine(),
            "model": _describe_model(engine),
            "fingerprint": model_fingerprint(engine),
            **rounds.bandwidth.summary("bandwidth_gb_s"),
            **rounds.in_order.summary("bandwidth_in_order_gb_s"),
            **rounds.products.summary("byte_tops"),
            "load_s": _rounded(load_s),
            "first_load_s": _rounded(first_load_s),
            **rounds.rows(rounds.ours),
            "first_token": rounds.first_token_rows(),
            "sampling_ms": rounds.sampling_ms,
            "memory": rounds.memory,
            "weights": engine.weight_placement,
            "huge_pages_mb": _rounded(huge_page_bytes() / 1e6),
            "repeats": plan.repeats,
            "method": METHOD,
        }
        if peer is not None:
            result |= rounds.comparison(peer)
    finally:
        if peer is not None:
            peer.close()
        engine.close()
    result["machine"]["stolen_percent"] = _rounded(stolen.percent())
    return result


class _BenchmarkRun:
    def __init__(self, engine: Engine, plan: BenchmarkPlan, report: Progress, peer: PeerProcess | None) -> None:
        self._engine = engine
        self._plan = plan
        self._report = report
        self._peer = peer
        self._meter = EngineMeter(engine, plan.seed)
        self._weight_bytes = _weight_bytes(engine)
        self.bandwidth = Samples()
        self.in_order = Samples()
        self.products = Samples()
        self.ours: dict[Task, Samples] = {task: Samples() for task in plan.tasks}
        self.theirs: dict[Task, Samples] = {task: Samples() for task in plan.tasks}
        self.first_token: dict[int, Samples] = {depth: Samples() for depth in plan.depths}
        self.sampling_ms: dict[str, float] = {}
        self.memory: dict[str, float] = {}  # maxima over all measurements
        self._steps: dict[Task, list[float]] = {task: [] for task in plan.tasks}
        self._head_bandwidths: dict[Task, list[float]] = {task: [] for task in plan.tasks}  # output head, bytes/s

    def run(self) -> None:
        # Tasks are interleaved, so that a minute in which the machine is slow affects all of them.
        measurements: list[tuple[str, Callable[[], None]]] = [("ceilings", self._measure_ceilings)]
        for task in self.ours:
            measurements.append((_name(task), partial(self._measure, task)))
            if self._peer is not None:
                measurements.append(
                    (f"{self._peer.name}: {_name(task)}", partial(self._measure_peer, self._peer, task))
                )
        measurements += [
            (f"first token at {depth:,}", partial(self._measure_first_token, depth)) for depth in self.first_token
        ]
        total = self._plan.repeats * len(measurements)
        for turn in range(total):
            name, measure = measurements[turn % len(measurements)]
            self._report(name, turn, total)
            measure()
        for name, params in {"greedy": SamplingParams(temperature=0.0), "default": SamplingParams()}.items():
            self.sampling_ms[name] = _rounded(1000 * self._meter.sampling_s(params))
        self._report("done", total, total)

    def rows(self, measured: dict[Task, Samples]) -> dict[str, list[dict[str, Any]]]:
        found: dict[str, list[dict[str, Any]]] = {"prefill": [], "decode": [], "batch": []}
        for task, samples in measured.items():
            row = {**_labels(task), **samples.summary("tok_s")}
            if task[0] == "decode" and measured is self.ours:
                row |= self._ceiling_shares(task, samples)
            found[task[0]].append(row)
        return found

    def first_token_rows(self) -> list[dict[str, Any]]:
        # `cached` is the length of the context, which the decode task of the same depth has already cached.
        return [{"tokens": NEW_TURN_TOKENS, "cached": d, **s.summary("ms")} for d, s in self.first_token.items()]

    def comparison(self, peer: PeerProcess) -> dict[str, Any]:
        rows, ratio = self.rows(self.theirs), self.rows({})
        for kind in rows:
            for row, task in zip(rows[kind], (task for task in self.theirs if task[0] == kind), strict=True):
                row["configuration"] = peer.configuration(task)
                quotient = self.ours[task].median / self.theirs[task].median
                ratio[kind].append({**_labels(task), "ratio": _rounded(quotient)})
        about = {"name": peer.name, "version": peer.version, "load_s": _rounded(peer.load_s)}
        return {"peer": {**about, **rows, "memory": {"rss_mb": _rounded(peer.resident_mb())}}, "ratio": ratio}

    def _ceiling_shares(self, task: Task, samples: Samples) -> dict[str, float]:
        depth = max(task[2], SHORT_TOKENS) + self._plan.decode_tokens // 2
        kv_bytes = depth * kv_bytes_per_token(self._engine.config, self._engine.info.kv_format)  # type: ignore[arg-type]
        token_bytes = self._weight_bytes + kv_bytes
        steps = sorted(self._steps[task])
        share = {}
        if self._engine.info.device == "cpu":  # the bandwidth of GPU memory is not measured
            head_bandwidths = self._head_bandwidths[task]
            ceiling = max(max(self.bandwidth.values) * 1e9, *head_bandwidths, 0.0) / token_bytes
            share = {"roofline": _rounded(samples.median / ceiling), "roofline_tok_s": _rounded(ceiling)}
            if head_bandwidths:
                share_of_head = statistics.median(
                    rate * token_bytes / best for rate, best in zip(samples.values, head_bandwidths, strict=True)
                )
                share["roofline_beside"] = _rounded(share_of_head)
        return {
            **share,
            "step_ms_p50": _rounded(1000 * statistics.median(steps)),
            "step_ms_p99": _rounded(1000 * steps[int(0.99 * (len(steps) - 1))]),
        }

    def _measure_ceilings(self) -> None:
        # The buffer is freed after each measurement, so that it is not counted as the engine's memory.
        buffer = probe_buffer(self._plan.probe_bytes)
        best = {
            places: max(ceilings.read_bandwidth(buffer, places) for _ in range(PROBE_READS)) / 1e9
            for places in ceilings.PLACES
        }
        self.in_order.values.append(best[1])
        self.bandwidth.values.append(max(best.values()))
        self.products.values.append(2 * ceilings.byte_product_rate() / 1e12)
        del buffer
        time.sleep(CALM_SECONDS)

    def _measure(self, task: Task) -> None:
        before = self._meter.read_bandwidth() if task[0] == "decode" else None
        seconds = self._meter.measure(task)
        if before is not None and (after := self._meter.read_bandwidth()) is not None:
            self._head_bandwidths[task].append(max(before, after))
        self._steps[task] += seconds
        self.ours[task].values.append(_rate(task, seconds))
        for name, megabytes in resident_memory().items():
            self.memory[name] = max(self.memory.get(name, 0.0), megabytes)

    def _measure_peer(self, peer: PeerProcess, task: Task) -> None:
        self.theirs[task].values.append(_rate(task, peer.measure(task)))

    def _measure_first_token(self, depth: int) -> None:
        self.first_token[depth].values.append(1000 * self._meter.first_token_s(depth))


def _rate(task: Task, seconds: list[float]) -> float:
    kind, tokens, last = task
    if sum(seconds) <= 0:
        raise EngineError(f"measuring {_name(task)} yielded no times")
    return tokens * (last if kind == "batch" else 1) / sum(seconds)


def _name(task: Task) -> str:
    kind, tokens, last = task
    if kind == "batch":
        return f"{last:,} sequences"
    if kind == "decode":
        return f"decode at {last:,}"
    return f"prefill {tokens:,}" + (f" at {last:,}" if last else "")


def _labels(task: Task) -> dict[str, Any]:
    kind, tokens, last = task
    if kind == "batch":
        return {"sequences": last}
    return {"depth": last} if kind == "decode" else {"tokens": tokens, "depth": last}


def _load(path: Path | None, plan: BenchmarkPlan) -> tuple[Engine, float]:
    # Returns the engine, and how many seconds loading took.
    started = time.perf_counter()
    engine = Engine.load(
        path,
        context_tokens=plan.context_tokens or -(-plan.longest_tokens // 1024) * 1024,
        threads=plan.threads,
        device=plan.device,
        weights=plan.weights,
        kv=plan.kv,
        max_num_seqs=max([*plan.batches, 1]),
        # Speculation is off, because benchmark models often have random weights (`notso synth`): their output is so
        # repetitive that speculation would be more effective than with ordinary text.
        speculation=False,
    )
    seconds = time.perf_counter() - started
    if (longest := engine.info.context_tokens) < plan.longest_tokens:
        engine.close()
        message = f"the measurements need {plan.longest_tokens:,} tokens, but the context is {longest:,}"
        raise InvalidRequestError(message)
    return engine, seconds


def _weight_bytes(engine: Engine) -> int:
    with GGUFFile.open(Path(engine.info.path)) as file:
        return weight_bytes_per_token(file.tensors, SmolLM3Weights.from_tensors(file.tensors, engine.config))


def _describe_model(engine: Engine) -> dict[str, Any]:
    info = engine.info
    return {
        "name": info.name,
        "demo": info.is_demo,
        "size_bytes": info.size_bytes,
        "parameters": info.parameter_count,
        "tensors": dict(info.quantization),
        "context_tokens": info.context_tokens,
        "device": info.device,
        "kernels": info.kernels,
        "threads": info.threads,
        "kv_format": info.kv_format,
        "kv_bytes": info.kv_bytes,
        "max_num_seqs": info.max_num_seqs,
    }


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")
