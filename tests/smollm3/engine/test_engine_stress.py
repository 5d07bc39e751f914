"""Answers are started and abandoned in all possible ways, and nothing is lost, mixed up or leaked.

100 answers with two caches by default; 500 with four if the engine has changed, 10,000 with `make fuzz`. A failure
prints its seed. `FUZZ_SEED=<n>` starts with the same requests, although the order of threads varies.

Many threads concurrently submit, read, stop, disconnect, abandon and resume, with fewer blocks than they need, so that
answers wait, are preempted and share prefixes. Each answer is compared with the answer to the same request alone; a
stopped answer must be a beginning of it.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import SystemRandom
from typing import Any

import pytest
from golden.random_models import RandomModel
from long_tests import is_long

from notso.smollm3 import Engine, Event, RequestOptions, SamplingParams
from notso.smollm3.engine import memory_plan
from notso.smollm3.kv.kv_cache import KVFormat
from notso.smollm3.output.generation import Generation

SMALL = RandomModel(seed=5, layers=2, hidden=64, ffn=96, heads=2, kv_heads=1, head_dim=32, vocab=400)
ANSWERS = 10_000 if "FUZZ_SECONDS" in os.environ else 500 if is_long("engine") else 100
CROWDS = itertools.product(("k8v8", "k4v3"), (False, True)) if ANSWERS > 100 else (("k8v8", False), ("k4v3", True))
"""Cache formats, with and without files for evicted blocks."""
CLIENTS = 12
SEED = int(os.environ.get("FUZZ_SEED", SystemRandom().getrandbits(32)))


@dataclass(frozen=True)
class Case:
    """A request, and its answer without other requests."""

    prompt: list[int]
    params: SamplingParams
    text: str = ""
    tokens: int = 0


def cases(source: random.Random) -> Iterator[Case]:
    """Yield prompts with long, short and no common prefixes, within a block and beyond; greedy and seeded."""
    stem = [source.randrange(300) for _ in range(300)]
    for number in range(32):
        shared = source.choice((0, 3, 127, 128, 129, 200, 256, 300))
        rest = [source.randrange(300) for _ in range(source.choice((1, 2, 40)))]
        length = source.choice((1, 2, 5, 10, 20, 60))
        params = SamplingParams(max_tokens=length, temperature=number % 3 / 2, seed=number)
        yield Case(stem[:shared] + rest, params)


def said(events: list[Event]) -> str:
    return "".join(event.text for event in events if event.kind in ("text", "reasoning"))


def check(case: Case, events: list[Event], *, whole: bool) -> None:
    """Assert that one usage and one end are the last events, and that the text is, or begins, that of `case`."""
    kinds = [event.kind for event in events]
    assert kinds[-2:] == ["usage", "end"] and kinds.count("usage") == kinds.count("end") == 1, kinds
    usage = events[-2].usage
    assert usage is not None and usage.prompt_tokens == len(case.prompt)
    assert usage.completion_tokens <= case.tokens and usage.accepted_tokens <= usage.drafted_tokens
    counts = [event.tokens for event in events if event.kind in ("text", "reasoning")]
    assert counts == sorted(counts)
    if whole:
        assert (said(events), usage.completion_tokens) == (case.text, case.tokens)
    else:
        assert case.text.startswith(said(events).rstrip("\N{REPLACEMENT CHARACTER}"))


class Client:
    """Performs actions with an engine, one after another, in its own thread."""

    def __init__(self, engine: Engine, known: list[Case], seed: int) -> None:
        self.engine = engine
        self.known = known
        self.source = random.Random(seed)
        self.begun: list[tuple[Case, Generation, bool]] = []  # the flag is false for generations that were stopped

    def work(self, answers: int) -> None:
        ways: list[Callable[[Case], None]] = [
            self.read_it, self.read_it, self.stop_at_once, self.stop_later, self.disconnect, self.clear, self.watch,
            self.come_and_go,
        ]  # fmt: skip
        for _ in range(answers):
            self.source.choice(ways)(self.source.choice(self.known))
            if len(self.begun) > 8:
                self.wait_for_placement()
        self.wait_for_placement()

    def wait_for_placement(self) -> None:
        """Wait for all submitted generations and check their results."""
        for case, generation, whole in self.begun:
            assert generation.wait(1 << 30, timeout_s=120), "an answer did not end"
            reason = generation.read()[-1].finish_reason
            check(case, generation.read(), whole=whole or reason != "cancelled")
        self.begun.clear()

    def submit(self, case: Case, *, whole: bool) -> Generation:
        generation = self.engine.submit(
            case.prompt,
            case.params,
            RequestOptions(
                priority=self.source.choice(("interactive", "api", "background")),
                owner=self.source.choice(("", "ann", "bob")),
            ),
        )
        self.begun.append((case, generation, whole))
        return generation

    def read_it(self, case: Case) -> None:
        check(case, list(self.submit(case, whole=True).events()), whole=True)

    def stop_at_once(self, case: Case) -> None:
        self.submit(case, whole=False).stop()

    def stop_later(self, case: Case) -> None:
        generation = self.submit(case, whole=False)
        generation.wait(self.source.randrange(12), timeout_s=self.source.random() / 50)
        for _ in range(self.source.choice((1, 3))):
            generation.stop()

    def disconnect(self, case: Case) -> None:
        """Close a stream before its end, as a disconnecting reader does."""
        stream = self.engine.generate(case.prompt, case.params)
        for _ in zip(range(self.source.randrange(8)), stream, strict=False):
            pass
        stream.close()  # type: ignore[attr-defined]

    def clear(self, case: Case) -> None:
        """Submit without reading, in half of the cases without keeping a reference."""
        self.submit(case, whole=True)
        if self.source.random() < 0.5:
            self.begun.pop()

    def watch(self, case: Case) -> None:
        """Read when notified."""
        seen: list[int] = []
        generation = self.submit(case, whole=True)
        generation.subscribe(lambda: seen.append(len(generation.read())))
        generation.wait(1 << 30, timeout_s=120)
        assert generation.finished and seen == sorted(seen)

    def come_and_go(self, case: Case) -> None:
        """Readers that start at any event see the same remaining events."""
        generation = self.submit(case, whole=True)
        after = self.source.randrange(6)
        late = list(generation.events(after))
        assert late == generation.read(after) == list(generation.events())[after:]


@pytest.fixture(params=CROWDS, ids=str)
def crowded(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_drafts: None
) -> Iterator[Engine]:
    """Load an engine with six slots and blocks for little more than two long answers, with and without a disk cache."""
    kv: KVFormat
    kv, on_disk = request.param
    monkeypatch.setattr(memory_plan, "SHARED_TOKENS", 1024)
    path, folder = SMALL.write(tmp_path / "small.gguf"), tmp_path / "kv" if on_disk else None
    with Engine.load(
        path, context_tokens=400, max_num_seqs=6, kv=kv, threads=1, weights="mmap", cache_dir=folder
    ) as engine:
        yield engine


def held(folder: Path) -> tuple[list[str], list[str]]:
    """Return our threads, and the open files below `folder`; other tests' fixtures may have other open files."""
    gc.collect()
    threads = sorted(thread.name for thread in threading.enumerate() if thread.name.startswith("notso"))
    files = []
    for number in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the descriptor of the listing itself, which is closed
            files.append(str(number.readlink()))
    return threads, sorted(file for file in files if file.startswith(str(folder)))


def no_more(folder: Path, before: tuple[list[str], list[str]]) -> bool:
    return all(len(now) <= len(then) for now, then in zip(held(folder), before, strict=True))


def idle(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.running == stats.waiting == stats.kv_blocks_used == engine._core.requests == 0


@pytest.mark.timeout(700)
def test_random_concurrent_requests_are_correct_and_leak_nothing(crowded: Engine, tmp_path: Path) -> None:
    print(f"FUZZ_SEED={SEED}")
    source = random.Random(SEED)
    known = []
    for case in cases(source):
        events = list(crowded.generate(case.prompt, case.params))
        usage = events[-2].usage
        assert usage is not None and events[-1].kind == "end"
        known.append(Case(case.prompt, case.params, said(events), usage.completion_tokens))
    assert idle(crowded) and sum(case.tokens for case in known) > 200
    gc.collect()  # remaining objects of earlier tests
    before = held(tmp_path)

    clients = [Client(crowded, known, source.getrandbits(32)) for _ in range(CLIENTS)]
    with ThreadPoolExecutor(CLIENTS) as pool:
        for done in [pool.submit(client.work, ANSWERS // CLIENTS + 1) for client in clients]:
            done.result(timeout=600)

    until, at_rest = time.monotonic() + 90, False
    while not at_rest and time.monotonic() < until:  # a block may still be written to disk
        time.sleep(0.2)
        at_rest = idle(crowded) and no_more(tmp_path, before)
    stats = crowded.stats()
    assert at_rest, (stats, before, held(tmp_path))
    assert stats.accepted_tokens_total > 0 and stats.cached_tokens_total > 0
    check_books(crowded)
    check(known[0], list(crowded.generate(known[0].prompt, known[0].params)), whole=True)


def check_books(engine: Engine) -> None:
    """Assert that every block is blank or cached, every slot is free, and windows belong to blocks with contents."""
    scheduler, blocks = engine._scheduler, engine._pool
    assert not scheduler.running and not scheduler.waiting and sorted(scheduler._free_indices) == list(range(6))
    assert blocks.available == blocks.blocks and not any(blocks.references(block) for block in range(blocks.blocks))
    blank = set(blocks._blank)
    assert len(blank) == len(blocks._blank) and blank.isdisjoint(blocks._unreferenced)
    held = set(blocks.windows.values())
    assert len(held) == len(blocks.windows) and held.isdisjoint(blocks._free_windows)
    assert not blank & set(blocks.windows), "a blank block must not have a window"


def test_close_during_generation_ends_every_answer(tmp_path: Path) -> None:
    path = SMALL.write(tmp_path / "small.gguf")
    source = random.Random(SEED)
    before, _ = held(tmp_path)
    for round_number in range(12):
        engine = Engine.load(path, context_tokens=400, max_num_seqs=3, threads=1, weights="mmap")
        begun = [(case, engine.submit(case.prompt, case.params)) for case in cases(source)]
        begun[0][1].wait(round_number * 5, timeout_s=5)
        engine.close()
        for _, generation in begun:
            assert generation.wait(1 << 30, timeout_s=60) and generation.read()[-1].kind == "end"
        with pytest.raises(Exception, match="closed"):
            engine.submit([1], SamplingParams(max_tokens=1))
    after, _ = held(tmp_path)  # threads of other tests may end meanwhile
    assert len(after) <= len(before), (before, after)


@pytest.mark.parametrize("kv", ["k8v8", "k4v3"])
def test_failures_at_random_places_cost_only_the_running_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kv: KVFormat
) -> None:
    """Each round fails somewhere in a step. The blocks that it leaves in the cache must not change later answers."""
    monkeypatch.setattr(memory_plan, "SHARED_TOKENS", 1024)
    source, failed = random.Random(7), 0
    path = SMALL.write(tmp_path / "small.gguf")
    with Engine.load(
        path, context_tokens=400, max_num_seqs=6, kv=kv, threads=1, weights="mmap", cache_dir=tmp_path / "kv"
    ) as engine:
        known = []
        for case in itertools.islice(cases(source), 16):
            engine.clear_cache()
            events = list(engine.generate(case.prompt, case.params))
            usage = events[-2].usage
            assert usage is not None
            known.append(Case(case.prompt, case.params, said(events), usage.completion_tokens))
        core, cache = engine._core, engine._runner.cache
        places: list[tuple[Any, str]] = [(cache, "copy_block"), (core._mover, "move"), (core._offload, "offer")]
        places += [(engine._runner, "run"), (engine._scheduler, "schedule"), (engine._scheduler, "advance")]
        for number in range(24):
            owner, name = places[number % len(places)]
            left = source.randrange(3)
            with monkeypatch.context() as patch:
                original = getattr(owner, name)

                def fail(*arguments: Any, original: Any = original, **options: Any) -> Any:
                    nonlocal left
                    left -= 1
                    if left == -1:
                        raise RuntimeError("can't start new thread")
                    return original(*arguments, **options)

                patch.setattr(owner, name, fail)
                begun = [(case, engine.submit(case.prompt, case.params)) for case in source.choices(known, k=3)]
                for case, generation in begun:
                    assert generation.wait(1 << 30, timeout_s=120), "an answer did not end"
                    events = generation.read()
                    failed += events[-1].kind == "error"
                    if events[-1].kind == "end":
                        check(case, events, whole=True)
                engine._core.call(lambda: None)
            for case in source.choices(known, k=2):
                check(case, list(engine.generate(case.prompt, case.params)), whole=True)
            core.call(lambda: check_books(engine))
    assert failed > 8
