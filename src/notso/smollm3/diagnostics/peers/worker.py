"""Run a peer in a worker process, which `process.py` starts.

This script imports only notso.system from this project, so it runs under any Python interpreter in which the peer
(`llama_cpp` or `openvino_genai`) is installed. Usage:

    python worker.py llama.cpp MODEL.gguf CONTEXT THREADS
    python worker.py openvino FOLDER CONTEXT THREADS

It reads tasks from standard input and writes results to standard output, as JSON lines. The first result contains
version, load_s and the names of the configurations. Each task except "memory" also has a "configuration", an index into
these names.

    {"task": "prefill", "tokens": n, "depth": d}       -> {"seconds": [one per step]}
    {"task": "decode", "tokens": n, "depth": d}        -> {"seconds": [one per step]}
    {"task": "batch", "sequences": s, "tokens": n}     -> {"seconds": [one per step]}
    {"task": "clear"}                                  -> {}; frees the configuration's memory
    {"task": "memory"}                                 -> {"rss_mb": x}

If a task fails, the result is {"error": text}. The process exits when standard input ends, even during a step.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import json
import os
import queue
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

BATCH_TOKENS = 512  # tokens per prefill chunk, for both peers

SHORT_TOKENS = 8  # length of a prompt with negligible cost

LARGEST_BATCH = 16
SEQUENCE_ROOM = 128  # positions reserved for each sequence of a batch


class Peer(Protocol):
    """A peer's operations; measurements return the seconds of each step."""

    version: str
    configurations: list[str]

    def prefill(self, configuration: int, tokens: int, depth: int) -> list[float]: ...

    def decode(self, configuration: int, tokens: int, depth: int) -> list[float]: ...

    def batch(self, configuration: int, sequences: int, tokens: int) -> list[float]: ...

    def clear(self, configuration: int) -> None: ...


class LlamaCpp:
    """llama.cpp through llama-cpp-python's C interface."""

    def __init__(self, path: str, context: int, threads: int) -> None:
        import llama_cpp as c

        self._c = c
        self.version = str(c.__version__)
        self._silence = c.llama_log_callback(lambda _level, _text, _data: None)
        c.llama_log_set(self._silence, ctypes.c_void_p(0))
        c.llama_backend_init()
        self._path = path.encode()
        self._context_tokens = max(context, LARGEST_BATCH * SEQUENCE_ROOM) + BATCH_TOKENS
        best = {"repacked": True, "kv": "f16", "flash": False, "threads": threads, "ubatch": BATCH_TOKENS}
        self._settings: list[dict[str, Any]] = [
            best,
            {**best, "flash": True},
            {**best, "flash": True, "kv": "q8_0"},
            {**best, "repacked": False},
            {**best, "ubatch": BATCH_TOKENS // 4},
        ]
        if threads > 1:
            self._settings.append({**best, "threads": threads // 2})
        self.configurations = [
            f"{s['kv']} cache, flash attention {'on' if s['flash'] else 'off'}, "
            f"{'' if s['repacked'] else 'not '}repacked, {s['threads']} threads, ubatch {s['ubatch']}"
            for s in self._settings
        ]
        self._models: dict[bool, Any] = {}
        self._contexts: dict[int, Any] = {}
        self._saved: dict[int, Any] = {}
        self._batch = c.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model(True)))

    def prefill(self, configuration: int, tokens: int, depth: int) -> list[float]:
        context = self._filled_context(configuration, depth)
        chunks = range(0, tokens, BATCH_TOKENS)
        return [self._read(context, depth + at, min(BATCH_TOKENS, tokens - at)) for at in chunks]

    def decode(self, configuration: int, tokens: int, depth: int) -> list[float]:
        depth = max(depth, SHORT_TOKENS)
        context = self._filled_context(configuration, depth)
        return [self._read(context, depth + i, 1) for i in range(tokens)]

    def batch(self, configuration: int, sequences: int, tokens: int) -> list[float]:
        context = self._context(configuration)
        self._c.llama_memory_clear(self._c.llama_get_memory(context), True)
        for sequence in range(sequences):
            self._fill([(self._sample(), at, sequence, at == SHORT_TOKENS - 1) for at in range(SHORT_TOKENS)])
            self._run(context)
        seconds = []
        for step in range(tokens):
            self._fill([(self._sample(), SHORT_TOKENS + step, sequence, True) for sequence in range(sequences)])
            seconds.append(self._run(context))
        return seconds

    def clear(self, configuration: int) -> None:
        context = self._contexts.pop(configuration, None)
        self._saved.pop(configuration, None)
        if context is not None:
            self._c.llama_free(context)
        unused = set(self._models) - {self._settings[i]["repacked"] for i in self._contexts} - {True}
        for repacked in unused:
            self._c.llama_model_free(self._models.pop(repacked))

    def _model(self, repacked: bool) -> Any:
        if repacked not in self._models:
            params = self._c.llama_model_default_params()
            params.use_extra_bufts = repacked
            self._models[repacked] = self._c.llama_model_load_from_file(self._path, params)
            if not self._models[repacked]:
                raise RuntimeError("llama.cpp cannot load this file")
        return self._models[repacked]

    def _context(self, configuration: int) -> Any:
        if configuration not in self._contexts:
            c, settings = self._c, self._settings[configuration]
            params = c.llama_context_default_params()
            params.n_ctx, params.n_seq_max, params.kv_unified = self._context_tokens, LARGEST_BATCH, True
            params.n_batch, params.n_ubatch = BATCH_TOKENS, settings["ubatch"]
            params.n_threads = params.n_threads_batch = settings["threads"]
            params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_ENABLED if settings["flash"] else 0
            if settings["kv"] == "q8_0":
                params.type_k = params.type_v = c.GGML_TYPE_Q8_0
            context = c.llama_init_from_model(self._model(settings["repacked"]), params)
            if not context:
                raise RuntimeError("llama.cpp does not support this configuration")
            self._contexts[configuration] = context
            self._read(context, 0, SHORT_TOKENS)  # warm up
        return self._contexts[configuration]

    def _filled_context(self, configuration: int, depth: int) -> Any:
        c, context = self._c, self._context(configuration)
        memory = c.llama_get_memory(context)
        c.llama_memory_clear(memory, True)
        if depth < 2 * BATCH_TOKENS:
            for at in range(0, depth, BATCH_TOKENS):
                self._read(context, at, min(BATCH_TOKENS, depth - at))
            return context
        # Fill the context cheaply: 512 positions are computed once, saved, and restored repeatedly at later positions.
        # This is sufficient because a step's time depends on the number of cached positions, not on their content.
        if configuration not in self._saved:
            self._read(context, 0, BATCH_TOKENS)
            saved = (ctypes.c_uint8 * c.llama_state_seq_get_size(context, 0))()
            c.llama_state_seq_get_data(context, saved, len(saved), 0)
            self._saved[configuration] = saved
            c.llama_memory_clear(memory, True)
        saved, last = self._saved[configuration], depth - SHORT_TOKENS
        for at in range(0, last, BATCH_TOKENS):
            if not c.llama_state_seq_set_data(context, saved, len(saved), 1):
                raise RuntimeError("llama.cpp's context is too small for this depth")
            c.llama_memory_seq_add(memory, 1, -1, -1, at)
            c.llama_memory_seq_cp(memory, 1, 0, -1, -1)
            c.llama_memory_seq_rm(memory, 1, -1, -1)
        c.llama_memory_seq_rm(memory, 0, last, -1)
        self._read(context, last, SHORT_TOKENS)  # also applies the position shifts of llama_memory_seq_add
        return context

    def _read(self, context: Any, start: int, tokens: int) -> float:
        self._fill([(self._sample(), start + i, 0, i == tokens - 1) for i in range(tokens)])
        return self._run(context)

    def _sample(self) -> int:
        return random.randrange(self._vocabulary - 512)

    def _fill(self, rows: list[tuple[int, int, int, bool]]) -> None:
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, sampled) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, sampled
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence

    def _run(self, context: Any) -> float:
        started = time.perf_counter()
        if self._c.llama_decode(context, self._batch) != 0:
            raise RuntimeError("llama.cpp failed on a step")
        self._c.llama_synchronize(context)
        return time.perf_counter() - started


class OpenVino:
    """OpenVINO GenAI with continuous batching and a prefix cache."""

    def __init__(self, folder: str, context: int, threads: int) -> None:
        import numpy
        import openvino
        import openvino_genai

        self._numpy, self._openvino, self._genai = numpy, openvino, openvino_genai
        self.version = importlib.metadata.version("openvino-genai")
        self._folder, self._threads = folder, threads
        self._cache_gb = 1 + int((context + LARGEST_BATCH * SEQUENCE_ROOM) * 80e3 / 1e9)
        self._settings: list[dict[str, Any]] = [{}, {"KV_CACHE_PRECISION": "f16"}]
        self.configurations = ["u8 cache", "f16 cache"]
        self._pipelines: dict[int, Any] = {}
        self._prefixes: dict[int, list[int]] = {}
        self._vocabulary = int(json.loads((Path(folder) / "config.json").read_text())["vocab_size"])
        self._requests = 0
        self._pipeline(0)

    def prefill(self, configuration: int, tokens: int, depth: int) -> list[float]:
        self._fill_prefix(configuration, depth)
        return list(self._steps(configuration, [self._prefix(depth) + self._sample(tokens)], 1))

    def decode(self, configuration: int, tokens: int, depth: int) -> list[float]:
        self._fill_prefix(configuration, depth)
        prompt = self._prefix(depth) + self._sample(SHORT_TOKENS)
        return list(self._steps(configuration, [prompt], tokens + 1))[-tokens:]

    def batch(self, configuration: int, sequences: int, tokens: int) -> list[float]:
        prompts = [self._sample(SHORT_TOKENS) for _ in range(sequences)]
        return list(self._steps(configuration, prompts, tokens + 1))[-tokens:]

    def clear(self, configuration: int) -> None:
        self._pipelines.pop(configuration, None)

    def _pipeline(self, configuration: int) -> Any:
        if configuration not in self._pipelines:
            scheduler = self._genai.SchedulerConfig()
            scheduler.cache_size = self._cache_gb
            scheduler.max_num_batched_tokens = BATCH_TOKENS
            scheduler.enable_prefix_caching = True
            properties = {"INFERENCE_NUM_THREADS": self._threads, **self._settings[configuration]}
            pipeline = self._genai.ContinuousBatchingPipeline(self._folder, scheduler, "CPU", properties)
            self._pipelines[configuration] = pipeline
            for _ in range(2):  # warm up, because the first prompts compile kernels
                list(self._steps(configuration, [self._sample(BATCH_TOKENS)], 4))
        return self._pipelines[configuration]

    def _fill_prefix(self, configuration: int, depth: int) -> None:
        if depth:
            list(self._steps(configuration, [self._prefix(depth) + self._sample(1)], 1))

    def _prefix(self, depth: int) -> list[int]:
        if depth not in self._prefixes:
            self._prefixes[depth] = self._sample(depth)
        return self._prefixes[depth]

    def _sample(self, tokens: int) -> list[int]:
        return [random.randrange(self._vocabulary - 512) for _ in range(tokens)]

    def _steps(self, configuration: int, prompts: list[list[int]], new_tokens: int) -> Iterator[float]:
        pipeline = self._pipeline(configuration)
        generation = self._genai.GenerationConfig()
        generation.max_new_tokens, generation.ignore_eos, generation.do_sample = new_tokens, True, False
        handles = []
        for prompt in prompts:
            ids = self._openvino.Tensor(self._numpy.array([prompt], self._numpy.int64))
            handles.append(pipeline.add_request(self._requests, ids, generation))
            self._requests += 1
        while pipeline.has_non_finished_requests():
            started = time.perf_counter()
            pipeline.step()
            yield time.perf_counter() - started


PEERS: dict[str, Callable[[str, int, int], Peer]] = {"llama.cpp": LlamaCpp, "openvino": OpenVino}


def run_task(peer: Peer, task: dict[str, Any]) -> dict[str, Any]:
    """Run a task and return its result."""
    from notso.system.memory import process_memory

    if task["task"] == "memory":
        return {"rss_mb": process_memory().resident_bytes / 1e6}
    configuration = int(task["configuration"])
    if task["task"] == "clear":
        peer.clear(configuration)
        return {}
    if task["task"] == "batch":
        return {"seconds": peer.batch(configuration, task["sequences"], task["tokens"])}
    measure = peer.prefill if task["task"] == "prefill" else peer.decode
    return {"seconds": measure(configuration, task["tokens"], task["depth"])}


def _listen(tasks: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        tasks.put(line)
    os._exit(0)  # the parent has exited


def main() -> None:
    """Load the peer and run tasks until stdin ends."""
    from notso.system.processes import die_with_parent

    die_with_parent()  # Linux only; elsewhere, `_listen` ends the process, unless a library holds the interpreter lock
    tasks: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()
    name, model, context, threads = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    results = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # libraries' output must not mix with the results

    def write_result(value: dict[str, Any]) -> None:
        results.write(json.dumps(value) + "\n")
        results.flush()

    started = time.perf_counter()
    try:
        peer = PEERS[name](model, context, threads)
    except Exception as error:
        write_result({"error": f"{type(error).__name__}: {error}"})
        return
    load_s = time.perf_counter() - started
    write_result({"version": peer.version, "load_s": load_s, "configurations": peer.configurations})
    while True:
        task = json.loads(tasks.get())
        try:
            write_result(run_task(peer, task))
        except Exception as error:
            write_result({"error": f"{type(error).__name__}: {error}"})


if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[4]))
    main()
