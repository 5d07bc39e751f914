"""Times what an engine does, through the same calls that a chat makes: a prompt read, tokens written, many at once."""

from __future__ import annotations

import itertools
import math
import statistics
import threading
import time
from functools import partial

import numpy as np

from notso.qtensor import QTensor, ceilings
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

SHORT_TOKENS = 8
"""A prompt that costs nothing to read: what "depth 0" stands on."""

NEW_TURN_TOKENS = 16
"""What is new of a prompt whose time to the first token is taken."""

LATE_TOKENS = 256
"""What the answers of a batch may have written before the last of them begins."""

POLL_S = 0.005

SAMPLINGS = 20

AMONG_TOKENS, WORDS, WORD_BIAS = 4096, 512, 100.0
"""Answers are made of the first so many words among the first so many tokens."""

_NO_TIME = 1e-9


class EngineMeter:
    """Measures an engine with random prompts. Answers are greedy and made of words alone, so that every token is an
    event at once; its time is taken in the engine's thread."""

    def __init__(self, engine: Engine, seed: int) -> None:
        self._engine = engine
        self._random = np.random.default_rng(seed)
        tokenizer = engine.tokenizer
        special = tokenizer.control_ids | tokenizer.user_defined_ids
        self._ids = np.array([i for i in range(tokenizer.vocab_size) if i not in special])
        texts = {i: tokenizer.token_text(i) for i in self._ids[:AMONG_TOKENS].tolist()}
        words = [i for i, text in texts.items() if text.isascii() and text.isalpha()]
        self._only_words = dict.fromkeys(words[:WORDS], WORD_BIAS)
        self._laid: dict[int, list[int]] = {}

    def measure(self, task: Task) -> list[float]:
        """Seconds of each step of a `peer_engines.process.Task`. Raises EngineError where nothing could be timed."""
        kind, tokens, last = task
        if kind == "prefill":
            return [self._prefill(tokens, last)]
        return self._decode(tokens, last) if kind == "decode" else self._batch(last, tokens)

    def first_token_s(self, depth: int) -> float:
        """Seconds from asking to the first token of an answer, with `depth` tokens cached and 16 new ones."""
        prompt = self.prompt(depth, NEW_TURN_TOKENS)  # may itself have the engine read something
        asked = time.perf_counter()
        return self.watched(prompt, 1).times[0] - asked

    def sampling_s(self, params: SamplingParams) -> float:
        """Median seconds to choose one token with these parameters from the logits of a random prompt."""
        logits = self._engine.logits(self.random_ids(SHORT_TOKENS))[-1]
        sampler = Sampler(params, 1, len(logits))
        seconds = []
        for position in range(SAMPLINGS):
            started = time.perf_counter()
            sampler.sample(logits, [0], position)
            seconds.append(time.perf_counter() - started)
        return statistics.median(seconds)

    def read_bandwidth(self) -> float | None:
        """Bytes per second at which the output head can be read where it lies, the best of all ways; None where it is
        too small to tell, or lies on another device. Between two steps: nothing else is computed meanwhile."""
        if self._engine.info.device != "cpu":
            return None
        head = self._engine._core.call(lambda: self._engine._runner.weights.lm_head)
        data = head.data if isinstance(head, QTensor) else None
        if data is None or data.size < ceilings.WINDOW_BYTES:
            return None
        return max(
            self._engine._core.call(partial(ceilings.read_bandwidth, data, places)) for places in ceilings.PLACES
        )

    def _prefill(self, tokens: int, depth: int) -> float:
        usage = self.watched(self.prompt(depth, tokens), 1).usage
        # What was not cached of `depth` was read as well.
        return usage.prompt_ms / 1000 * tokens / max(1, usage.prompt_tokens - usage.cached_tokens)

    def _decode(self, tokens: int, depth: int) -> list[float]:
        prompt = self.prompt(depth, 1) if depth else self.random_ids(SHORT_TOKENS)
        return self.watched(prompt, tokens + 1).steps[:tokens]

    def _batch(self, sequences: int, tokens: int) -> list[float]:
        """Steps of the sequence that began last, while all the others went on."""
        prompts = [self.random_ids(SHORT_TOKENS) for _ in range(sequences)]
        params = self.params(tokens + LATE_TOKENS)
        # Between two steps: begun one by one, the first might be at their end before the last are asked for.
        watches = self._engine._core.call(
            lambda: [GenerationWatch(self._engine.submit(prompt, params)) for prompt in prompts]
        )
        # One more than is timed: stopped after their last, those told first would seem to have ended before the others.
        while min(len(watch.times) for watch in watches) <= tokens + 1 and not any(w.finished for w in watches):
            time.sleep(POLL_S)
        for watch in watches:
            watch.stop()
        last = max(watches, key=lambda watch: watch.times[0] if watch.times else math.inf)
        if len(last.times) <= tokens or any(watch.times[-1] < last.times[tokens] for watch in watches):
            raise EngineError(f"{sequences} answers were not written at the same time: load with more max_num_seqs")
        return last.steps[:tokens]

    def watched(self, prompt: list[int], tokens: int) -> GenerationWatch:
        """An answer of so many tokens, written to its end and timed."""
        watch = GenerationWatch(self._engine.submit(prompt, self.params(tokens)))
        watch.finish()
        if len(watch.times) != tokens:
            raise EngineError(f"{tokens} tokens were asked for, {len(watch.times)} came one by one")
        return watch

    def params(self, tokens: int) -> SamplingParams:
        """How such answers are drawn."""
        return SamplingParams(max_tokens=tokens, temperature=0.0, logit_bias=self._only_words)

    # Prompts

    def random_ids(self, tokens: int) -> list[int]:
        """A fresh prompt each time: nothing of it can be remembered from the round before."""
        return [int(i) for i in self._random.choice(self._ids, tokens)]

    def prompt(self, depth: int, new_tokens: int) -> list[int]:
        """`depth` tokens that the engine knows, the same each time, and new ones behind them."""
        if depth and depth not in self._laid:
            self._laid[depth] = self.random_ids(depth)
        if depth:
            self._lay(self._laid[depth])
        return self._laid.get(depth, []) + self.random_ids(new_tokens)

    def _lay(self, ids: list[int]) -> None:
        """Have the engine know `ids` without reading them all: two blocks are read, the others are copies of the second
        (the first is kept apart in some formats of the cache).

        A step takes the time it takes whatever the cache holds; only how much of it there is matters.
        """
        engine, whole = self._engine, len(ids) // BLOCK_TOKENS * BLOCK_TOKENS
        if whole <= 2 * BLOCK_TOKENS:
            return
        self.watched([*ids[: 2 * BLOCK_TOKENS], *self.random_ids(1)], 1)

        def copy() -> None:
            pool, parent = engine._pool, engine._salt(RequestOptions())
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
    """One answer, and when each of its tokens came."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._seen = 0
        self._lock = threading.Lock()  # the first note may come from our own thread
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
        """Wait for the end. Raises what the engine raised."""
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
        """Seconds between one token and the next."""
        return [max(later - earlier, _NO_TIME) for earlier, later in itertools.pairwise(self.times)]
