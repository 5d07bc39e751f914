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
    return {int.from_bytes(known, "little") for known, _ in files._folder.known}


@pytest.mark.parametrize("restarts", [False, True])
def test_what_one_conversation_alone_has_is_forgotten(opened: Open, tmp_path: Path, restarts: bool) -> None:
    files = opened()
    put(files, 1, ANN)
    put(files, 2, ANN, BOB)
    put(files, 3, BOB)
    put(files, 4, ANN, is_partial=True)
    put(files, 5, ANN)
    files.belongs_to(key(5), BOB)
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


def test_what_waits_to_be_written_is_forgotten_too(opened: Open, tmp_path: Path) -> None:
    files = opened()
    for number in range(50):
        assert files.put(key(number), TOKENS, content(number), conversations=(ANN if number % 2 else BOB,))
    files.evict(ANN)
    assert files.flush(60)
    assert held(files) == set(range(0, 50, 2))
    assert len(list((tmp_path / "kv").glob("*.kv*"))) == 25


def test_the_end_of_an_answer_belongs_to_who_wrote_it_last(opened: Open) -> None:
    files = opened()
    put(files, 1, ANN, is_partial=True)
    put(files, 1, BOB, is_partial=True)
    files.evict(ANN)
    assert held(files) == {1}
    files.close()
    files = opened()
    files.evict(BOB)
    assert held(files) == set()


def test_the_conversations_of_other_models_are_forgotten_as_well(opened: Open, tmp_path: Path) -> None:
    files = opened(b"another model")
    put(files, 1, ANN)
    files.close()
    files = opened(MODEL)
    files.evict(ANN)
    assert not list((tmp_path / "kv").glob("*.kv*"))


def test_whatever_happens_to_the_list_no_file_is_without_a_conversation(opened: Open, tmp_path: Path) -> None:
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


def test_a_file_that_no_conversation_has_is_removed(opened: Open, tmp_path: Path) -> None:
    files = opened()
    put(files, 1, ANN)
    files.close()
    (tmp_path / "kv" / "conversations").unlink()
    assert held(opened()) == set() and not list((tmp_path / "kv").glob("*.kv*"))


def test_the_list_does_not_grow_without_end(opened: Open, tmp_path: Path) -> None:
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
def test_the_order_of_use_is_kept(opened: Open, restarts: bool) -> None:
    files = opened()
    put(files, 1, ANN)
    put(files, 2, BOB)
    put(files, 3, CID)
    files.use(ANN)
    files.use(b"unknown.")
    if restarts:
        assert files.flush(60)
        files.close()
        files = opened()
    assert files.by_use() == [BOB, CID, ANN]
    files.evict(CID)
    assert files.flush(60)  # rewrites the log
    files.close()
    assert opened().by_use() == [BOB, ANN]


def test_uses_do_not_let_the_log_grow(opened: Open, tmp_path: Path) -> None:
    files = opened()
    put(files, 1, ANN)
    put(files, 2, BOB)
    for _ in range(MOST_WASTE):
        files.use(ANN)
        files.use(BOB)
    assert files.flush(60)
    assert (tmp_path / "kv" / "conversations").stat().st_size < (MOST_WASTE + 10) * RECORD_BYTES
    assert files.by_use() == [ANN, BOB]


@pytest.mark.parametrize("is_written", [False, True])
def test_a_reading_outlives_its_conversations_and_takes_its_blocks_along(opened: Open, is_written: bool) -> None:
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


def test_a_store_that_does_not_evict_refuses(opened: Open, tmp_path: Path) -> None:
    files = opened(budget=3 * file_bytes(len(TOKENS), SIZE), evicts=False)
    for number in range(6):
        put(files, number, ANN)
    assert held(files) == {0, 1, 2} and len(list((tmp_path / "kv").glob("*.kv*"))) == 3
    assert files.is_writing and len(files.sizes(ANN)) == 3
    files.evict(ANN)
    put(files, 7, BOB)
    assert held(files) == {7}
