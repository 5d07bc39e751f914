"""Conversations continue after a restart: blocks are restored from disk with equal bits, or not at all."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

from notso.smollm3 import Engine, Event, RequestOptions, SamplingParams
from notso.smollm3.engine import engine as engine_module
from notso.smollm3.kv import kv_cache
from notso.smollm3.kv.disk_store import DiskStore
from notso.smollm3.kv.kv_cache import KV_FORMATS, KVFormat
from notso.smollm3.kv.offload import RETRY_S

SAMPLED = SamplingParams(max_tokens=20, temperature=1.5, top_p=1.0, seed=11)
_RNG = random.Random(5)
PROMPT = [_RNG.randrange(300, 900) for _ in range(700)]


def answer(engine: Engine, ids: list[int]) -> tuple[list[Event], int]:
    events = list(engine.generate(ids, SAMPLED))
    assert events[-2].usage is not None
    said = [event for event in events if event.kind in ("reasoning", "text", "end")]
    return said, events[-2].usage.cached_tokens


def load(folder: Path | None, kv: KVFormat = "k8v8") -> Engine:
    return Engine.load(context_tokens=1024, kv=kv, cache_dir=folder)


@pytest.mark.parametrize("kv", KV_FORMATS)
def test_conversation_is_restored_completely_after_restart(tmp_path: Path, kv: KVFormat) -> None:
    with load(None, kv) as engine:
        expected, cached = answer(engine, PROMPT)
        assert cached == 0
    with load(tmp_path, kv) as engine:
        assert answer(engine, PROMPT) == (expected, 0)
    with load(tmp_path, kv) as engine:
        again, cached = answer(engine, PROMPT)
        assert again == expected
        assert cached == len(PROMPT) - 1
    with load(tmp_path, kv) as engine:  # the prompt has another end, but the same blocks before it
        other, cached = answer(engine, [*PROMPT[:650], *PROMPT[:30]])
        assert 640 <= cached <= 650
    with load(None, kv) as engine:
        assert answer(engine, [*PROMPT[:650], *PROMPT[:30]])[0] == other


def test_kv_formats_do_not_share_cached_blocks(tmp_path: Path) -> None:
    with load(tmp_path, "k8v8") as engine:
        answer(engine, PROMPT)
    with load(tmp_path, "f16") as engine:
        assert answer(engine, PROMPT)[1] == 0


@pytest.mark.parametrize("seed", range(6))
def test_damaged_files_are_recomputed_with_identical_answers(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    with load(tmp_path) as engine:
        expected, _ = answer(engine, PROMPT)
    files = [path for path in tmp_path.rglob("*.kv*") if path.is_file()]
    assert len(files) >= 5
    for path in rng.sample(files, rng.randrange(1, len(files))):
        data = bytearray(path.read_bytes())
        match rng.randrange(3):
            case 0:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            case 1:
                del data[rng.randrange(len(data)) :]
            case _:
                data = bytearray()
        path.write_bytes(data)
    for _ in range(len(files) + 1):  # each damaged block that is found is written again
        with load(tmp_path) as engine:
            again, cached = answer(engine, PROMPT)
            assert again == expected
    assert cached == len(PROMPT) - 1


def test_repeated_prompt_writes_each_block_once(tmp_path: Path) -> None:
    with load(tmp_path) as engine:
        answer(engine, PROMPT)
        answer(engine, PROMPT)
    sizes = sorted(path.stat().st_size for path in tmp_path.rglob("*.kv*"))
    assert len(sizes) == 6  # five full blocks and a partial one


def test_owners_do_not_find_each_others_blocks_on_disk(tmp_path: Path) -> None:
    with load(tmp_path) as engine:
        list(engine.generate(PROMPT, SAMPLED, RequestOptions(owner="a")))
    with load(tmp_path) as engine:
        for owner, cached in (("b", 0), ("a", len(PROMPT) - 1)):
            usage = list(engine.generate(PROMPT, SAMPLED, RequestOptions(owner=owner)))[-2].usage
            assert usage is not None
            assert usage.cached_tokens == cached


@pytest.mark.parametrize("kv", ["k8v8", "k4v3"])
def test_clear_cache_removes_all_blocks_and_files(tmp_path: Path, kv: KVFormat) -> None:
    with load(tmp_path, kv) as engine:
        expected, _ = answer(engine, PROMPT)
    with load(tmp_path, kv) as engine:
        answer(engine, [*PROMPT, 7])
        engine.clear_cache()
        assert answer(engine, PROMPT) == (expected, 0)
        engine.clear_cache()
        assert engine.stats().kv_blocks_cached == 0
    assert not list(tmp_path.rglob("*.kv*"))


def test_window_files_of_a_former_format_are_counted_and_cleared(tmp_path: Path) -> None:
    with load(tmp_path, "k4v3") as engine:
        answer(engine, PROMPT)
    beside = sum(path.stat().st_size for path in (tmp_path / "windows").glob("*.kv*"))
    with Engine.load(context_tokens=1024, kv="k8v8", cache_dir=tmp_path, cache_bytes=1 << 20) as engine:
        assert beside and engine._offload is not None
        assert engine._offload._files.budget_bytes == (1 << 20) - beside
        engine.clear_cache()
    assert not list(tmp_path.rglob("*.kv*"))


def test_read_only_store_retries_missing_blocks_after_a_delay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with load(tmp_path) as engine:
        assert engine._identity is not None
        engine._identity.wait()  # a digest that becomes known later would clear the list of missing blocks
        answer(engine, PROMPT)
    with load(tmp_path), load(tmp_path) as second:  # the first engine holds the folder's lock
        monkeypatch.setattr(DiskStore, "read_into", lambda *_, **__: False)
        assert answer(second, PROMPT)[1] == 0
        monkeypatch.undo()
        second._core.call(second._pool.clear)
        assert second._offload is not None and second._offload._missing_until
        for missed in second._offload._missing_until:
            second._offload._missing_until[missed] -= RETRY_S  # as if that time had passed
        assert answer(second, PROMPT)[1] == len(PROMPT) - 1


def test_memory_for_blocks_on_disk_is_touched_after_load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "IDLE_BLOCKS", 0)
    monkeypatch.setattr(engine_module, "LARGE_CACHE_BYTES", 0)  # a cache this small has no memory touched in advance
    with load(tmp_path) as engine:
        assert engine._core._offload is not None and engine._core._offload.ready_blocks == 0
        answer(engine, PROMPT)
    with load(tmp_path) as engine:
        until = time.monotonic() + 60
        while not engine._core.background._memory_is_touched and time.monotonic() < until:
            time.sleep(0.01)
        assert engine._runner.cache._touched == 5  # blocks 0 to 5, one for each file
        assert answer(engine, PROMPT)[1] == len(PROMPT) - 1
