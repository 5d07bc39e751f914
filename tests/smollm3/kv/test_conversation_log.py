"""The list of conversations that each file belongs to. Forgetting one deletes its files, except those shared with
others; damage to the list only costs recomputation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from long_tests import is_long
from smollm3.kv.block_folder import MODEL, SIZE, TOKENS, Open, content, key

from notso.smollm3.kv.block_file import file_bytes
from notso.smollm3.kv.block_folder import MAGIC, MOST_WASTE, RECORD_BYTES
from notso.smollm3.kv.disk_store import DiskStore
from notso.smollm3.scheduling.block_pool import reading_digest

ANN, BOB, CID = b"ann's...", b"bob's...", b"cid's..."


def put(files: DiskStore, number: int, *conversations: bytes, is_partial: bool = False) -> None:
    assert files.put(key(number), TOKENS, content(number), is_partial=is_partial, conversations=conversations)
    assert files.flush(60)


def held(files: DiskStore) -> set[int]:
    return {int.from_bytes(known, "little") for known, _ in files._folder.usable}


@pytest.mark.parametrize("restarts", [False, True])
def test_evict_deletes_only_unshared_blocks_of_a_conversation(opened: Open, tmp_path: Path, restarts: bool) -> None:
    files = opened()
    put(files, 1, ANN)
    put(files, 2, ANN, BOB)
    put(files, 3, BOB)
    put(files, 4, ANN, is_partial=True)
    put(files, 5, ANN)
    files.record_owner(key(5), BOB)
    if restarts:
        files.close()
        files = opened()
    assert held(files) == {1, 2, 3, 4, 5}
    files.evict(ANN)
    assert held(files) == {2, 3, 5} and len(list((tmp_path / "kv").glob("*.kv*"))) == 3
    assert files.flush(60)
    assert ANN not in (tmp_path / "kv" / "conversations").read_bytes()
    files.evict(ANN)
    files.evict(BOB)
    assert held(files) == set() and not list((tmp_path / "kv").glob("*.kv*"))


def test_evict_removes_blocks_waiting_to_be_written(opened: Open, tmp_path: Path) -> None:
    files = opened()
    for number in range(50):
        assert files.put(key(number), TOKENS, content(number), conversations=(ANN if number % 2 else BOB,))
    files.evict(ANN)
    assert files.flush(60)
    assert held(files) == set(range(0, 50, 2))
    assert len(list((tmp_path / "kv").glob("*.kv*"))) == 25


def test_partial_block_belongs_to_the_last_writer(opened: Open) -> None:
    files = opened()
    put(files, 1, ANN, is_partial=True)
    put(files, 1, BOB, is_partial=True)
    files.evict(ANN)
    assert held(files) == {1}
    files.close()
    files = opened()
    files.evict(BOB)
    assert held(files) == set()


def test_evict_removes_blocks_of_other_models(opened: Open, tmp_path: Path) -> None:
    files = opened(b"another model")
    put(files, 1, ANN)
    files.close()
    files = opened(MODEL)
    files.evict(ANN)
    assert not list((tmp_path / "kv").glob("*.kv*"))


def test_damaged_log_leaves_no_file_without_conversation(opened: Open, tmp_path: Path) -> None:
    """The list is truncated anywhere, or a bit flips. Files may be lost, but all remaining ones can be forgotten."""
    path, source = tmp_path / "kv" / "conversations", random.Random(1)
    for _ in range(60 if is_long("engine") else 15):
        files = opened()
        for number in range(8):
            put(files, number, *source.sample((ANN, BOB, CID), 2))
        files.close()
        whole = path.read_bytes()
        at = source.randrange(len(whole))
        broken = whole[:at] if source.random() < 0.5 else whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]
        path.write_bytes(broken)
        files = opened()
        put(files, 9, ANN)
        files.close()
        files = opened()
        assert 9 in held(files)
        for conversation in (ANN, BOB, CID):
            files.evict(conversation)
        assert held(files) == set() and not list((tmp_path / "kv").glob("*.kv*"))
        files.close()


def test_file_without_a_log_record_is_removed(opened: Open, tmp_path: Path) -> None:
    files = opened()
    put(files, 1, ANN)
    files.close()
    (tmp_path / "kv" / "conversations").unlink()
    assert held(opened()) == set() and not list((tmp_path / "kv").glob("*.kv*"))


def test_log_with_duplicate_records_is_compacted(opened: Open, tmp_path: Path) -> None:
    path = tmp_path / "kv" / "conversations"
    files = opened()
    put(files, 1, ANN)
    files.close()
    record = path.read_bytes()[len(MAGIC) :]
    path.write_bytes(MAGIC + record * (2 * MOST_WASTE))
    files = opened()
    assert files.flush(60)
    assert held(files) == {1} and len(path.read_bytes()) == len(MAGIC) + RECORD_BYTES


@pytest.mark.parametrize("restarts", [False, True])
def test_order_of_use_survives_restart_and_log_rewrite(opened: Open, restarts: bool) -> None:
    files = opened()
    put(files, 1, ANN)
    put(files, 2, BOB)
    put(files, 3, CID)
    files.mark_used(ANN)
    files.mark_used(b"unknown.")
    if restarts:
        assert files.flush(60)
        files.close()
        files = opened()
    assert files.by_use() == [BOB, CID, ANN]
    files.evict(CID)
    assert files.flush(60)  # rewrites the log
    files.close()
    assert opened().by_use() == [BOB, ANN]


def test_repeated_uses_keep_the_log_bounded(opened: Open, tmp_path: Path) -> None:
    files = opened()
    put(files, 1, ANN)
    put(files, 2, BOB)
    for _ in range(MOST_WASTE):
        files.mark_used(ANN)
        files.mark_used(BOB)
    assert files.flush(60)
    assert (tmp_path / "kv" / "conversations").stat().st_size < (MOST_WASTE + 10) * RECORD_BYTES
    assert files.by_use() == [ANN, BOB]


@pytest.mark.parametrize("is_written", [False, True])
def test_reading_keeps_blocks_until_evicted(opened: Open, is_written: bool) -> None:
    one, other = (reading_digest("", "library", name) for name in ("one", "other"))
    files = opened()
    for number, kept_by in enumerate(((ANN, one), (ANN, one, other), (BOB,))):
        assert files.put(key(number), TOKENS, content(number), conversations=kept_by)
    if is_written:
        assert files.flush(60)
    files.evict(ANN)
    assert all(files.has(key(number)) for number in range(3))
    files.evict(one)
    assert files.flush(60)
    assert held(files) == {1, 2}
    files.evict(other)
    assert held(files) == {2}


def test_store_without_eviction_rejects_blocks_over_budget(opened: Open, tmp_path: Path) -> None:
    files = opened(budget=3 * file_bytes(len(TOKENS), SIZE), evicts=False)
    for number in range(6):
        put(files, number, ANN)
    assert held(files) == {0, 1, 2} and len(list((tmp_path / "kv").glob("*.kv*"))) == 3
    assert files.is_writing and len(files.sizes(ANN)) == 3
    files.evict(ANN)
    put(files, 7, BOB)
    assert held(files) == {7}
