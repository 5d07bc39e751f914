"""A request's answer is the same alone or concurrently, with any split of the work, and with any cached, drafted or
restored tokens.

16 answers in each cache format by default, 48 if the engine has changed, 1,000 with `make fuzz`, drawn at random from
all combinations. A failure prints its seed: `FUZZ_SEED=<n>` draws the same ones.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from random import SystemRandom

import pytest
from long_tests import is_long

from notso.qtensor.backends.cpu import kernel_choice
from notso.smollm3 import Engine, Message, RequestOptions, SamplingParams
from notso.smollm3.kv.kv_cache import KVFormat
from notso.smollm3.output.generation import Generation
from notso.smollm3.scheduling.block_pool import cache_salt

ANSWERS = 1_000 if "FUZZ_SECONDS" in os.environ else 48 if is_long("engine") else 16
SEED = int(os.environ.get("FUZZ_SEED", SystemRandom().getrandbits(32)))
CHUNKS = (1, 7, 64, 130, 512)
CONTEXT = 1024

Answer = tuple[tuple[int, ...], str]


class Asked:
    """A request whose answer must always be the same: a repetitive chat that is long enough for three tiles."""

    def __init__(self, engine: Engine, params: SamplingParams, *, words: int) -> None:
        source = random.Random(words)
        numbers = ", ".join(f"{source.randrange(100)} + {source.randrange(100)}" for _ in range(words))
        self.prompt = engine.encode_chat([Message("user", f"Say again: {numbers}. What is 27 + 48?")])
        self.params = params
        self.answers: set[Answer] = set()

    def begin(self, engine: Engine, owner: str = "") -> tuple[Generation, list[int]]:
        """Submit the request; return the generation, and its sequence's tokens, which grow with the answer."""
        request = engine._request(self.prompt, self.params, RequestOptions(priority="api", owner=owner))
        engine._core.submit(request)
        return request.generation, request.sequence.tokens

    def finish(self, begun: tuple[Generation, list[int]]) -> None:
        """Record the answer's tokens and text."""
        generation, tokens = begun
        events = list(generation.events())
        assert events[-1].kind == "end", events[-1]
        text = "".join(f"{event.kind}: {event.text}\n" for event in events if event.text)
        self.answers.add((tuple(tokens[len(self.prompt) :]), text))


def greedy(most: int) -> SamplingParams:
    return SamplingParams(max_tokens=most, temperature=0)


def seeded(most: int) -> SamplingParams:
    return SamplingParams(max_tokens=most, temperature=1.2, top_p=0.95, seed=77, repetition_penalty=1.05)


@pytest.fixture(params=["k8v8", "k4v3"])
def kv(request: pytest.FixtureRequest, own_kernels: None, free_drafts: None) -> Iterator[KVFormat]:
    yield request.param


def load(kv: KVFormat, folder: Path, *, speculation: bool) -> Engine:
    return Engine.load(context_tokens=CONTEXT, kv=kv, speculation=speculation, cache_dir=folder, max_num_seqs=16)


def company(engine: Engine, source: random.Random, asked: list[Asked]) -> list[Generation]:
    """Submit up to 15 other requests, some of which share a prefix with ours, are truncated or wait."""
    others = []
    for _ in range(source.choice((0, 0, 1, 15))):
        alike = source.choice(asked).prompt
        prompt = alike[: source.randrange(1, len(alike))] if source.random() < 0.5 else []
        prompt = prompt + [source.randrange(300, 900) for _ in range(source.randrange(1, 60))]
        params = SamplingParams(max_tokens=source.randrange(1, 20), temperature=source.choice((0.0, 1.0)))
        others.append(
            engine.submit(prompt, params, RequestOptions(priority=source.choice(("interactive", "api", "background"))))
        )
    return others


def forget(engine: Engine, source: random.Random) -> None:
    """Clear all or some blocks in memory; blocks on disk remain."""
    blocks = engine._pool
    if source.random() < 0.5:
        engine._core.call(blocks.clear)
    else:
        engine._core.call(lambda: blocks.evict_one(lambda block: block % 2 == 0))


@pytest.mark.timeout(0 if ANSWERS > 100 else 900)
def test_answers_are_identical_under_random_conditions(kv: KVFormat, tmp_path: Path) -> None:
    print(f"FUZZ_SEED={SEED}")
    source, asked, count, guessed, cached = random.Random(SEED), list[Asked](), 0, 0, 0
    while count < ANSWERS:
        # Each engine finds the blocks that earlier ones wrote to disk.
        with load(kv, tmp_path, speculation=count % 24 < 8) as engine:
            if not asked:
                asked = [Asked(engine, greedy(24), words=60), Asked(engine, seeded(24), words=30)]
                asked += [Asked(engine, seeded(20), words=3), Asked(engine, greedy(40), words=14)]
            full, order = engine._runner.max_rows, list[Asked]()
            for _ in range(4):
                order = order or source.sample(asked, len(asked))  # two rounds draw all requests
                kernel_choice.set_threads(source.choice((1, 2)))
                engine._runner.max_rows = min(source.choice(CHUNKS), full)
                if source.random() < 0.4:
                    forget(engine, source)
                others = company(engine, source, asked)
                # A new owner finds no cached blocks.
                owner = source.choice(("", f"owner {source.random()}"))
                begun = [(one, one.begin(engine, owner)) for one in (order.pop(), order.pop())]
                for one, generation in begun:
                    one.finish(generation)
                    count += 1
                for other in others:
                    if source.random() < 0.5:
                        other.stop()
                    assert other.wait(1 << 30, timeout_s=60)
            stats = engine.stats()
            guessed += stats.accepted_tokens_total
            cached += stats.cached_tokens_total
    assert guessed and cached, "drafts must be accepted, and blocks must be found"
    assert [len(one.answers) for one in asked] == [1] * len(asked)


def test_answers_are_identical_for_each_cache_and_chunk_setup(kv: KVFormat, tmp_path: Path) -> None:
    """Empty cache, cached and restored; every chunk size above 1; one and two threads; with and without speculation."""
    asked: list[Asked] = []
    for speculation in (True, False):
        with load(kv, tmp_path, speculation=speculation) as engine:
            asked = asked or [Asked(engine, greedy(16), words=40), Asked(engine, seeded(16), words=40)]
            full = engine._runner.max_rows
            for number, rows in enumerate(CHUNKS[1:]):
                engine._runner.max_rows = min(rows, full)
                kernel_choice.set_threads(1 + number % 2)
                for one in asked:
                    one.finish(one.begin(engine, owner=f"{number}"))  # no cached blocks
                    one.finish(one.begin(engine, owner=f"{number}"))  # cached blocks
            engine._core.call(engine._pool.clear)
        with load(kv, tmp_path, speculation=speculation) as engine:
            salt = cache_salt(b"", "1").root
            offload = engine._core._offload
            assert offload is not None and engine._pool.find(salt, asked[0].prompt[:128]) is None
            for one in asked:
                begun = one.begin(engine, owner="1")
                one.finish(begun)
                usage = begun[0].read()[-2].usage
                assert usage is not None and usage.cached_tokens > 128  # restored from disk
    assert [len(one.answers) for one in asked] == [1, 1]
