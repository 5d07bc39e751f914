"""The disk budget: the least recently read block is deleted first, and a full disk disables writing."""

from __future__ import annotations

import logging
import os
import random
import threading
import time
from pathlib import Path

import pytest
from smollm3.kv.block_folder import MODEL, SIZE, TOKENS, Open, content, key

from notso.smollm3.kv import disk_store
from notso.smollm3.kv.block_file import file_bytes
from notso.smollm3.kv.disk_store import DiskStore


def test_least_recently_read_block_is_evicted_first(opened: Open) -> None:
    one = file_bytes(len(TOKENS), SIZE)
    files = opened(budget=3 * one)
    for i in range(3):
        files.put(key(i), TOKENS, content(i))
    files.flush(60)
    assert files.get(key(0), TOKENS)
    files.put(key(3), TOKENS, content(3))
    files.flush(60)
    assert [files.has(key(i)) for i in range(4)] == [True, False, True, True]
    time.sleep(0.02)  # timestamps of files are coarse
    assert files.get(key(2), TOKENS)  # reading counts as use, also after a restart
    files.close()

    again = opened(budget=3 * one)
    again.put(key(4), TOKENS, content(4))
    again.put(key(5), TOKENS, content(5))
    again.flush(60)
    assert [again.has(key(i)) for i in range(6)] == [False, False, True, False, True, True]


def test_budget_is_shared_by_all_models(opened: Open) -> None:
    one = file_bytes(len(TOKENS), SIZE)
    for model in (b"a", b"b", b"c"):
        files = opened(model, budget=2 * one)
        files.put(key(1), TOKENS, content(1))
        files.close()
    assert [opened(model, budget=2 * one).has(key(1)) for model in (b"a", b"b", b"c")] == [False, True, True]


def test_random_operations_stay_within_the_budget(opened: Open, tmp_path: Path) -> None:
    source, budget = random.Random(3), 20 * file_bytes(100, SIZE)
    files = opened(budget=budget)
    for _ in range(300):
        number, tokens = source.randrange(60), list(range(source.randrange(128)))
        files.put(key(number), tokens, content(number), is_partial=source.random() < 0.5, tag=bytes([number % 5]))
        files.get(key(source.randrange(60)), tokens)
        if source.random() < 0.02:
            files.remove(bytes([source.randrange(5)]))
        if source.random() < 0.1:
            files.flush(60)
            on_disk = sum(file.stat().st_size for file in (tmp_path / "kv").glob("*.kv2"))
            assert on_disk == files.used_bytes <= budget


def test_block_larger_than_the_budget_is_rejected(opened: Open) -> None:
    files = opened(budget=SIZE)
    assert not files.put(key(1), TOKENS, content(1)) and not files.has(key(1))


def test_full_write_queue_rejects_further_blocks(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, flush = threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        go_on.wait(60)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    files = opened(queue_bytes=3 * SIZE)
    taken = [files.put(key(i), TOKENS, content(i)) for i in range(6)]
    assert taken == [True, True, True, False, False, False]
    assert files.get(key(1), TOKENS) == content(1) and not files.has(key(4))
    go_on.set()
    assert files.flush(60) and files.put(key(4), TOKENS, content(4))


def test_full_disk_disables_writing_with_one_warning(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    files = opened()
    files.put(key(1), TOKENS, content(1))
    files.flush(60)

    def full(descriptor: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(disk_store.os, "write", full)
        for i in range(2, 6):
            files.put(key(i), TOKENS, content(i))
        assert files.flush(60)
    assert not files.is_writing and not files.put(key(9), TOKENS, content(9))
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "No space left" in caplog.text
    assert files.get(key(1), TOKENS) == content(1) and not files.has(key(2))
    assert not list((tmp_path / "kv").glob("*.tmp"))


def test_too_little_free_disk_space_disables_writing(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    files = opened(free_bytes=1 << 60)
    files.put(key(1), TOKENS, content(1))
    assert files.flush(60) and not files.is_writing and not files.has(key(1))
    assert len(caplog.records) == 1 and "MiB left" in caplog.text
    assert "no more blocks will be written to the disk cache" in caplog.text


def test_unusable_folder_disables_the_store_with_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    files = DiskStore(tmp_path / "file" / "kv", MODEL, SIZE, 1 << 20)
    assert not files.put(key(1), TOKENS, content(1)) and files.get(key(1), TOKENS) is None and files.flush(1)
    files.remove(b"")
    files.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_put_rejects_wrong_block_and_key_sizes(opened: Open) -> None:
    for bad in (content(1)[:-1], content(1) + b"x"):
        with pytest.raises(ValueError, match="a block has 96 bytes"):
            opened().put(key(1), TOKENS, bad)
    with pytest.raises(ValueError, match="hash must have 16 bytes"):
        opened().put(b"short", TOKENS, content(1))
