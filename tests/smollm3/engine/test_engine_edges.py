"""Rare combinations: closing during requests, running out of memory, and several ends in one step."""

from __future__ import annotations

import gc
import random
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from golden.random_models import RANDOM

from notso.qtensor import CPU
from notso.qtensor.gguf import GGUFFile
from notso.smollm3 import Engine, EngineError, Event, InvalidRequestError, Message, RequestOptions, SamplingParams
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.engine import engine_core
from notso.smollm3.engine.memory_plan import STEP_WINDOW_BLOCKS, WINDOW_BLOCKS
from notso.smollm3.kv import offload
from notso.smollm3.kv.disk_store import DiskStore
from notso.smollm3.kv.kv_cache import KVCache
from notso.smollm3.output.generation import Generation
from notso.smollm3.scheduling.block_pool import BlockPool
from notso.smollm3.scheduling.scheduler import Scheduler
from notso.smollm3.scheduling.sequence import Sequence

SMALL = replace(RANDOM, layers=2, hidden=64, ffn=96, heads=2, kv_heads=1, head_dim=32, vocab=400, context=2048)
GREEDY = SamplingParams(max_tokens=5, temperature=0)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SMALL.write(tmp_path_factory.mktemp("edges") / "small.gguf")


def load(path: Path, **options: Any) -> Engine:
    settings: dict[str, Any] = {"context_tokens": 400, "threads": 1, "weights": "mmap"}
    return Engine.load(path, **settings | options)


def reason(generation: Generation) -> str | None:
    assert generation.wait(1 << 30, timeout_s=60), "the generation did not end"
    return generation.read()[-1].finish_reason


# ---------------------------------------------------------------- closing


def test_close_wakes_engine_thread_that_is_about_to_wait(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(threading.Condition):
        def __enter__(self) -> bool:
            if threading.current_thread().name == "notso-engine":
                time.sleep(0.2)
            return super().__enter__()

    monkeypatch.setattr(engine_core, "threading", SimpleNamespace(**vars(threading) | {"Condition": Slow}))
    engine = load(small)
    monkeypatch.undo()
    assert reason(engine.submit([1, 2], GREEDY)) == "length"
    started = time.monotonic()
    engine.close()
    assert time.monotonic() - started < 30, "the thread missed the notification and woke up by timeout"


def test_submit_and_call_after_close_are_rejected(small: Path) -> None:
    """A request that was validated before the engine was closed may arrive afterwards."""
    engine = load(small)
    request = engine._request([1], GREEDY, RequestOptions(priority="api"))
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine._core.submit(request)
    with pytest.raises(EngineError, match="closed"):
        engine._core.call(lambda: 1)


def test_closing_ends_all_concurrent_requests(small: Path) -> None:
    """Each is answered, cancelled or rejected; none waits forever."""
    for _ in range(10):
        engine, begun, ready = load(small), list[Generation](), threading.Barrier(5)

        def ask(engine: Engine = engine, begun: list[Generation] = begun, ready: threading.Barrier = ready) -> None:
            ready.wait()
            try:
                while True:
                    begun.append(engine.submit([1, 2, 3], GREEDY))
                    engine.logits([1])
            except (EngineError, InvalidRequestError):
                return

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        ready.wait()
        time.sleep(0.02)
        engine.close()
        for thread in threads:
            thread.join(60)
            assert not thread.is_alive()
        assert {reason(generation) for generation in begun} <= {"length", "stop", "cancelled"}


@pytest.mark.parametrize("kind", ["progress", "text", "end"])
def test_engine_can_be_closed_from_subscriber_callback(small: Path, kind: str) -> None:
    engine, others = load(small), list[Generation]()
    first = engine.submit(list(range(100, 300)), SamplingParams(max_tokens=30, temperature=0))

    def close() -> None:
        if any(event.kind in (kind, "reasoning" if kind == "text" else kind) for event in first.read()):
            engine.close()

    first.subscribe(close)
    with suppress(InvalidRequestError, EngineError):
        others += (engine.submit([1, number], SamplingParams(max_tokens=200)) for number in range(5))
    for generation in (first, *others):
        assert reason(generation) is not None
    engine._core._thread.join(60)
    assert not engine._core._thread.is_alive()


def test_engine_call_from_subscriber_callback_raises(small: Path) -> None:
    """The callback runs in the engine thread, which would have to execute the call."""
    errors: list[Exception] = []
    with load(small) as engine:

        def ask() -> None:
            try:
                engine.logits([1])
            except EngineError as error:
                errors.append(error)

        heard = engine.submit(list(range(200)), GREEDY)
        heard.subscribe(ask)
        assert reason(heard) == "length"
    assert errors


def test_failure_while_removing_a_sequence_ends_all_generations(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(small)
    remove = engine._scheduler.remove
    failures = iter([True, True, True])

    def fail(sequence: Sequence) -> None:
        remove(sequence)
        if next(failures, False):
            raise KeyError("a bug")

    monkeypatch.setattr(engine._scheduler, "remove", fail)
    begun = [engine.submit([1, 2, number], GREEDY) for number in range(8)]
    for generation in begun:
        assert generation.wait(1 << 30, timeout_s=60)
        assert generation.read()[-1].kind in ("end", "error")
    assert reason(engine.submit([7], GREEDY)) == "length"
    monkeypatch.setattr(engine._scheduler, "remove", lambda _: 1 / 0)
    last = [engine.submit([1, 2, number], SamplingParams(max_tokens=300)) for number in range(8)]
    engine.close()
    for generation in last:
        assert generation.wait(1 << 30, timeout_s=60)


def test_failed_block_copy_leaves_no_wrong_content_in_the_cache(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second prompt begins like the first one, so the start of the cached block is copied."""
    first, second = list(range(1, 101)), [*range(1, 61), *[200] * 20]
    with load(small) as engine:
        expected = engine.continue_text(second, params=GREEDY).text
        engine.clear_cache()
        engine.continue_text(first, params=GREEDY)
        monkeypatch.setattr(engine._runner.cache, "copy_block", lambda _: 1 / 0)
        with pytest.raises(EngineError):
            engine.continue_text(second, params=GREEDY)
        monkeypatch.undo()
        engine._core.call(lambda: engine._pool.evict_one(lambda _: True))  # the source of the copy
        assert engine.continue_text(second, params=GREEDY).text == expected


def test_finished_generation_does_not_keep_the_cache_alive(small: Path) -> None:
    """A chat keeps its answers, but the cache of a closed engine is freed."""
    engine = load(small)
    generation = engine.submit([1, 2], GREEDY)
    generation.subscribe(lambda: None)
    assert reason(generation) == "length"
    cache = weakref.ref(engine._runner.cache)
    engine.close()
    del engine
    gc.collect()
    assert cache() is None
    generation.stop()
    assert generation.read()[-1].kind == "end"


# ---------------------------------------------------------------- statistics


def test_tokens_restored_from_disk_are_counted_as_cached(small: Path, tmp_path: Path) -> None:
    """Blocks may be restored in several steps, because running answers must not wait."""
    ids = random.Random(1).choices(range(300), k=1900)
    for cached in (0, len(ids) - 1):
        with load(small, context_tokens=2048, cache_dir=tmp_path) as engine:
            usage = list(engine.generate(ids, GREEDY))[-2].usage
            assert usage is not None and usage.cached_tokens == cached
            assert engine.stats().cached_tokens_total == cached


def test_rates_are_means_of_some_seconds_of_work() -> None:
    rate = engine_core.TokenRate()
    assert rate.per_s == 0
    for _ in range(300):
        rate.observe(20, 0.2)
    assert rate.per_s == pytest.approx(100)
    rate.observe(16, 0.001)  # a short step is faster, for example because the model's weights are still in the cache
    assert 100 < rate.per_s < 105
    for _ in range(300):
        rate.observe(10, 0.2)
    assert 50 <= rate.per_s < 51


def test_decode_rate_counts_generated_tokens(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted draft tokens count, too. The first token is generated by the step that ends the prefill."""
    observed: dict[engine_core.TokenRate, int] = {}

    def observe(self: engine_core.TokenRate, tokens: int, seconds: float) -> None:
        assert seconds > 0
        observed[self] = observed.get(self, 0) + tokens

    monkeypatch.setattr(engine_core.TokenRate, "observe", observe)
    with load(small) as engine:
        list(engine.generate([7, 8, 9] * 20, replace(GREEDY, max_tokens=60)))
        stats = engine.stats()
    assert stats.accepted_tokens_total and list(observed.values()) == [60, stats.generated_tokens_total - 1]


@pytest.mark.parametrize("most", range(1, 16))
def test_forced_think_end_stays_within_max_tokens(demo_engine: Engine, most: int) -> None:
    params = SamplingParams(max_tokens=most, thinking_budget=8, temperature=0)
    events = list(demo_engine.generate([Message("user", "What is 345 + 678?")], params))
    usage = events[-2].usage
    assert usage is not None and usage.completion_tokens <= most


def test_forced_think_end_stays_within_the_context(demo_engine: Engine) -> None:
    """The remaining context may be sufficient only for the closing tags."""
    ids = demo_engine.encode_chat([Message("user", "What is 345 + 678?")])
    with Engine.load(context_tokens=len(ids) + 12) as engine:
        for budget in range(13):
            events = list(engine.generate(ids, SamplingParams(thinking_budget=budget, temperature=0)))
            usage = events[-2].usage
            assert events[-1].finish_reason == "length"
            assert usage is not None and usage.completion_tokens == 12


# ---------------------------------------------------------------- memory


class Places:
    """A scheduler with a k4v3 cache, and steps without the model."""

    def __init__(self, path: Path, sequences: int) -> None:
        windows = WINDOW_BLOCKS * sequences + STEP_WINDOW_BLOCKS
        self.pool = BlockPool(16 * sequences, windows)
        self.cache = KVCache(
            CPU(),
            SmolLM3Config.from_metadata(metadata(path)),
            2048,
            max_num_seqs=sequences,
            blocks=16 * sequences,
            kv_format="k4v3",
            window_blocks=windows,
            windows=self.pool.windows,
        )
        self.scheduler = Scheduler(self.pool, sequences)

    def add(self, sequence: Sequence) -> Sequence:
        self.scheduler.add(sequence)
        return sequence

    def step(self, prompt_tokens: int, rng: random.Random) -> list[Sequence]:
        """Run a step; return the sequences that have a new answer token."""
        plan = self.scheduler.schedule(prompt_tokens, 512)
        for chunk in plan.chunks:
            self.cache.place(chunk, chunk.sequence.batch_index or 0)
        for chunk in plan.chunks:
            right = rng.randrange(len(chunk.drafts) + 1)
            chunk.sequence.tokens += [1] * ((right + 1) * chunk.samples)
            self.scheduler.advance(chunk, right)
        return [chunk.sequence for chunk in plan.chunks if chunk.samples]


@pytest.mark.parametrize("sequences", [2, 3])
def test_preempting_prompts_do_not_run_out_of_kv_windows(small: Path, sequences: int) -> None:
    """Each is interrupted within a tile, after a step that touched the maximum number of tiles."""
    rng, places = random.Random(sequences), Places(small, sequences)
    for priority in (2, 1, 0)[-sequences:]:
        places.add(Sequence(rng.choices(range(50), k=2000), priority=priority))
        for tokens in (16, 512, 512):
            places.step(tokens, rng)


@pytest.mark.parametrize("sequences", [1, 2, 3, 5])
def test_random_schedules_do_not_run_out_of_kv_windows(small: Path, sequences: int) -> None:
    """No windows remain after the cache is cleared."""
    for seed in range(10):
        rng, places = random.Random(seed), Places(small, sequences)
        live: list[Sequence] = []
        to_come = 12
        while to_come or live:
            if to_come and rng.random() < 0.5:
                live.append(
                    places.add(Sequence(rng.choices(range(50), k=rng.randrange(1, 2000)), priority=to_come % 3))
                )
                to_come -= 1
            for sequence in places.scheduler.running:
                ahead = max(0, min(15, 2047 - len(sequence.tokens))) if sequence.pending == 1 else 0
                sequence.drafts = [1] * rng.randrange(ahead + 1)
            for sequence in places.step(rng.choice((16, 100, 512)), rng):
                if len(sequence.tokens) >= 2040 or rng.random() < 0.03:
                    places.scheduler.remove(sequence)
                    live.remove(sequence)
        assert places.pool.available == places.cache.blocks
        places.pool.clear()
        assert not places.pool.windows


def metadata(path: Path) -> dict[str, Any]:
    with GGUFFile.open(path) as file:
        return dict(file.metadata)


def test_prompts_that_preempt_each_other_are_all_answered(small: Path) -> None:
    """In a format with windows, each sequence uses as many as a step can touch."""
    rng = random.Random(3)
    prompts = [rng.choices(range(300), k=1900) for _ in range(2)]
    with load(small, context_tokens=2048, kv="k4v3", max_num_seqs=2) as engine:
        list(engine.generate([*prompts[0][:100]], GREEDY))
        list(engine.generate([*prompts[1][:100]], GREEDY))
        engine._core.call(lambda: time.sleep(0.2))
        low = engine.submit(prompts[0], GREEDY, RequestOptions(priority="background"))
        low.wait(1)
        high = engine.submit(prompts[1], GREEDY)
        for generation in (low, high):
            assert reason(generation) == "length"


def test_pending_offload_blocks_are_bounded(small: Path, tmp_path: Path) -> None:
    """More partial blocks arrive than can be written."""
    with load(small, cache_dir=tmp_path, kv="k8v8") as engine:
        offload = engine._core._offload
        assert offload is not None
        offload.work = lambda: False  # type: ignore[method-assign]
        for number in range(30):
            list(engine.generate([*range(150), *range(number, number + 150)], SamplingParams(max_tokens=2)))
        assert len(offload._offers) <= engine._pool.blocks


def test_cache_budget_below_one_block_writes_nothing(small: Path, tmp_path: Path) -> None:
    with load(small, cache_dir=tmp_path, cache_bytes=1000) as engine:
        list(engine.generate(list(range(300)), GREEDY))
        offload = engine._core._offload
        time.sleep(0.1)
        assert offload is not None and not offload.has_work
    assert not list(tmp_path.rglob("*.kv*"))


def test_unusable_cache_folder_is_only_a_warning(small: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "cache"
    folder.write_text("a file")
    with load(small, cache_dir=folder) as engine:
        assert reason(engine.submit([1, 2], GREEDY)) == "length"
    assert "the selected cache format cannot be stored" in caplog.text
    assert "no more blocks will be written to the disk cache" in caplog.text


def test_partial_block_that_changed_after_lookup_is_not_used(small: Path, tmp_path: Path) -> None:
    ids = random.Random(2).choices(range(300), k=200)
    with load(small, cache_dir=tmp_path) as engine:
        expected = said(engine.generate(ids, GREEDY))
    with load(small, cache_dir=tmp_path) as engine:
        offload = engine._core._offload
        assert offload is not None
        other = [*ids[:150], 7, *ids[150:]]
        partial, asked = offload._files.partial, list[bytes]()

        def first_another(parent_hash: bytes) -> list[int]:
            asked.append(parent_hash)
            return other[128:] if len(asked) == 1 else partial(parent_hash)

        offload._files.partial = first_another  # type: ignore[method-assign]
        begun = said(engine.generate(other, GREEDY))
        offload._files.partial = partial  # type: ignore[method-assign]
        assert said(engine.generate(ids, GREEDY)) == expected
    with load(small) as engine:
        assert said(engine.generate(other, GREEDY)) == begun


@pytest.mark.parametrize("kv", ["k8v8", "k4v3"])
def test_failed_block_restore_is_a_cache_miss(small: Path, tmp_path: Path, kv: str) -> None:
    ids = random.Random(2).choices(range(300), k=200)
    with load(small, cache_dir=tmp_path, kv=kv) as engine:
        expected = said(engine.generate(ids, GREEDY))
    with load(small, cache_dir=tmp_path, kv=kv) as engine:
        offload = engine._core._offload
        assert offload is not None

        def broken(*_: object) -> None:
            raise MemoryError

        offload._cache.load_block = broken  # type: ignore[method-assign, assignment]
        assert said(engine.generate(ids, GREEDY)) == expected
        assert said(engine.generate(ids, GREEDY)) == expected


def test_blocks_load_without_new_threads(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = random.Random(2).choices(range(300), k=350)
    with load(small, cache_dir=tmp_path, kv="k8v8") as engine:
        expected = said(engine.generate(ids, GREEDY))

    def no_thread(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    with load(small, cache_dir=tmp_path, kv="k8v8") as engine:
        monkeypatch.setattr(offload, "usable_processors", lambda: 4)
        monkeypatch.setattr(offload.ThreadPoolExecutor, "submit", no_thread)
        events = list(engine.generate(ids, GREEDY))
        usage = events[-2].usage
        assert said(iter(events)) == expected
        assert usage is not None and usage.cached_tokens > 256


@pytest.mark.parametrize("failing", ["offer", "read_block"])
def test_failure_of_the_disk_cache_does_not_fail_answers(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def fail(*_: object) -> None:
        raise MemoryError

    with load(small, cache_dir=tmp_path, kv="k8v8") as engine:
        kv_offload = engine._core._offload
        assert kv_offload is not None
        monkeypatch.setattr(kv_offload if failing == "offer" else engine._runner.cache, failing, fail)
        for number in range(3):
            assert (
                reason(engine.submit([*range(200), number], SamplingParams(max_tokens=20, ignore_eos=True))) == "length"
            )
        engine._core.call(lambda: None)
        assert engine.stats().kv_blocks_used == 0


def test_writer_of_blocks_starts_once_a_thread_is_available(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_thread(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", no_thread)
        files = DiskStore(tmp_path, b"version", 8, 1 << 20)
    assert not files.is_writing and not files.has(b"hash")
    assert files.is_writing
    files.close()


def said(events: Iterator[Event]) -> list[Event]:
    return [event for event in events if event.kind in ("reasoning", "text", "end")]


def test_prompts_exceeding_the_rows_of_a_step_are_answered(small: Path) -> None:
    """Beyond the trained context, a step has a quarter of the rows."""
    with load(small, context_tokens=4096, max_num_seqs=64) as engine:
        assert engine._runner.max_rows == 128
        ready = threading.Event()
        begun: list[Generation] = []
        waiting = threading.Thread(target=engine._core.call, args=(ready.wait,))
        waiting.start()
        begun += (engine.submit([number] * 8, GREEDY) for number in range(64))
        ready.set()
        assert {reason(generation) for generation in begun} <= {"length", "stop"}


def test_answers_that_fill_a_single_sequence_cache_repeat(small: Path) -> None:
    """Prompt and answer repeatedly fill the context to the last token, with and without cached blocks."""
    with load(small, context_tokens=256, max_num_seqs=1) as engine:
        assert engine._pool.blocks == 2
        ids = random.Random(4).choices(range(300), k=256)
        answers = []
        for length in (255, 250, 128, 127, 129, 255, 250, 128, 127, 129):
            events = list(engine.generate(ids[:length], SamplingParams(temperature=0)))
            answers.append(said(iter(events)))
            usage = events[-2].usage
            assert usage is not None and length + usage.completion_tokens <= 256
            assert engine.logits(ids).shape[0] == 256
        assert answers[:5] == answers[5:]
