"""Timing of prefill, decode and batches through the engine's public calls."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from functools import partial

import numpy as np

from notso.qtensor import ceilings
from notso.smollm3.diagnostics.peers.process import Task
from notso.smollm3.engine.engine import Engine
from notso.smollm3.errors import EngineError
from notso.smollm3.output.generation import Generation
from notso.smollm3.sampling.sampler import Sampler
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS, OutOfBlocksError, block_hash
from notso.smollm3.scheduling.step_plan import BlockCopy
from notso.smollm3.values.events import Usage
from notso.smollm3.values.request_options import RequestOptions
from notso.smollm3.values.sampling_params import SamplingParams

# Prompt of negligible cost, used for "depth 0".
SHORT_TOKENS = 8

# New tokens of a prompt in time-to-first-token measurements.
NEW_TURN_TOKENS = 16

# Allowance for tokens that earlier sequences of a batch generate before the last one starts.
LATE_TOKENS = 256

POLL_S = 0.005

SAMPLINGS = 20

# Generation is restricted to the first WORDS words among the first AMONG_TOKENS tokens.
AMONG_TOKENS, WORDS, WORD_BIAS = 4096, 512, 100.0

_NO_TIME = 1e-9


class EngineMeter:
    """Times an engine on random prompts."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._random = np.random.default_rng(seed)
        tokenizer = engine.tokenizer
        special = tokenizer.control_ids | tokenizer.user_defined_ids
        self._ids = np.array([i for i in range(tokenizer.vocab_size) if i not in special])
        texts = {i: tokenizer.token_text(i) for i in self._ids[:AMONG_TOKENS].tolist()}
        words = [i for i, text in texts.items() if text.isascii() and text.isalpha()]
        # With whole words only, every token yields an event at once; partial characters would be held back.
        self._only_words = dict.fromkeys(words[:WORDS], WORD_BIAS)
        self._laid: dict[int, list[int]] = {}

    def measure(self, task: Task) -> list[float]:
        """Return the seconds per step. Raises EngineError."""
        kind, tokens, last = task
        if kind == "prefill":
            return [self._prefill(tokens, last)]
        return self._decode(tokens, last) if kind == "decode" else self._batch(last, tokens)

    def first_token_s(self, depth: int) -> float:
        """Return the seconds to the first token, with `depth` cached and 16 new tokens."""
        prompt = self.prompt(depth, NEW_TURN_TOKENS)  # may itself prefill
        asked = time.perf_counter()
        return self.watched(prompt, 1).times[0] - asked

    def sampling_s(self, params: SamplingParams) -> float:
        """Return the median seconds to sample a token."""
        logits = self._engine.logits(self.random_ids(SHORT_TOKENS))[-1]
        sampler = Sampler(params, 1, len(logits))
        seconds = []
        for position in range(SAMPLINGS):
            started = time.perf_counter()
            sampler.sample(logits, [0], position)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def read_bandwidth(self) -> float | None:
        """Return the output head's read bandwidth in bytes per second, or None if too small or not on the CPU."""
        if self._engine.info.device != "cpu":
            return None
        # Runs between two steps, so that nothing else computes meanwhile.
        head = self._engine._core.call(lambda: self._engine._runner.weights.lm_head)
        data = getattr(head, "data", None)
        if not isinstance(data, np.ndarray) or data.size < ceilings.WINDOW_BYTES:
            return None
        return max(
            self._engine._core.call(partial(ceilings.read_bandwidth, data, places)) for places in ceilings.PLACES
        )

    def _prefill(self, tokens: int, depth: int) -> float:
        usage = self.watched(self.prompt(depth, tokens), 1).usage
        # Any uncached part of `depth` was prefilled as well.
        return usage.prompt_ms / 1000 * tokens / max(1, usage.prompt_tokens - usage.cached_tokens)

    def _decode(self, tokens: int, depth: int) -> list[float]:
        prompt = self.prompt(depth, 1) if depth else self.random_ids(SHORT_TOKENS)
        return self.watched(prompt, tokens + 1).steps[:tokens]

    def _batch(self, sequences: int, tokens: int) -> list[float]:
        # Timed are the steps of the last sequence to start, while all others run.
        prompts = [self.random_ids(SHORT_TOKENS) for _ in range(sequences)]
        params = self.params(tokens + LATE_TOKENS)
        # Submitted between two steps: one by one, the first might finish before the last starts.
        watches = self._engine._core.call(
            lambda: [GenerationWatch(self._engine.submit(prompt, params)) for prompt in prompts]
        )
        # Wait for one token more than is timed: sequences notified first would otherwise seem to end before the others.
        while min(len(watch.times) for watch in watches) <= tokens + 1 and not any(w.finished for w in watches):
            time.sleep(POLL_S)
        for watch in watches:
            watch.stop()
        last = max(watches, key=lambda watch: watch.times[0] if watch.times else math.inf)
        if len(last.times) <= tokens or any(watch.times[-1] < last.times[tokens] for watch in watches):
            raise EngineError(f"{sequences} answers were not generated concurrently: increase max_num_seqs")
        return last.steps[:tokens]

    def watched(self, prompt: list[int], tokens: int) -> GenerationWatch:
        """Generate exactly `tokens` tokens."""
        watch = GenerationWatch(self._engine.submit(prompt, self.params(tokens)))
        watch.finish()
        if len(watch.times) != tokens:
            raise EngineError(f"{tokens} tokens were requested, but {len(watch.times)} were received one by one")
        return watch

    def params(self, tokens: int) -> SamplingParams:
        return SamplingParams(max_tokens=tokens, temperature=0.0, logit_bias=self._only_words)

    def random_ids(self, tokens: int) -> list[int]:
        return [int(i) for i in self._random.choice(self._ids, tokens)]

    def prompt(self, depth: int, new_tokens: int) -> list[int]:
        """Return `depth` cached and then new tokens."""
        if depth and depth not in self._laid:
            self._laid[depth] = self.random_ids(depth)
        if depth:
            self._lay(self._laid[depth])
        return self._laid.get(depth, []) + self.random_ids(new_tokens)

    def _lay(self, ids: list[int]) -> None:
        # A step's time depends on how much the cache holds, not on its content. The first block is never copied: some
        # cache formats store it separately.
        # Two blocks are prefilled, and the second is copied.
        engine, whole = self._engine, len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
        if whole <= 2 * BLOCK_TOKENS:
            return
        self.watched([*ids[: 2 * BLOCK_TOKENS], *self.random_ids(1)], 1)

        def copy() -> None:
            pool, parent = engine._pool, engine._salt(RequestOptions()).root
            known: list[int] = []
            for start in range(0, whole, BLOCK_TOKENS):
                tokens = ids[start : start + BLOCK_TOKENS]
                block = pool.find(parent, tokens)
                if block is None:
                    block = pool.allocate()
                    engine._runner.cache.copy_block(BlockCopy(known[1], block))
                    pool.register(block, parent, tokens)
                    pool.free(block)
                known.append(block)
                parent = block_hash(parent, tokens)

        try:
            engine._core.call(copy)
        except OutOfBlocksError:
            raise EngineError(f"the cache has no room for {len(ids):,} tokens") from None


class GenerationWatch:
    """Arrival times of one generation's tokens."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._seen = 0
        self._lock = threading.Lock()  # the first call may come from the subscribing thread
        self.times: list[float] = []
        generation.subscribe(self._note)

    def _note(self) -> None:
        now = time.perf_counter()
        with self._lock:
            for event in self._generation.read(self._seen):
                self._seen += 1
                if event.kind in ("text", "reasoning"):
                    self.times += [now] * (event.tokens - len(self.times))

    def finish(self) -> None:
        """Wait for the end. Raises the engine's error."""
        for event in self._generation.events():
            if event.error is not None:
                raise event.error

    @property
    def finished(self) -> bool:
        return self._generation.finished

    def stop(self) -> None:
        self._generation.stop()
        self.finish()

    @property
    def usage(self) -> Usage:
        usage = next((event.usage for event in self._generation.read() if event.usage is not None), None)
        if usage is None:
            raise EngineError("the engine reported no usage")
        return usage

    @property
    def steps(self) -> list[float]:
        return [max(later - earlier, _NO_TIME) for earlier, later in itertools.pairwise(self.times)]
