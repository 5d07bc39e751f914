"""Blocks on disk: written blocks are found again, also after a restart, and damaged ones never are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from smollm3.kv.block_folder import SIZE, TOKENS, Open, content, key, stored

from notso.smollm3.kv.block_file import file_bytes


def test_block_is_found_immediately_and_after_restart(opened: Open) -> None:
    files = opened()
    assert not files.has(key(1)) and files.get(key(1), TOKENS) is None
    assert files.put(key(1), TOKENS, content(1))
    assert files.has(key(1)) and files.get(key(1), TOKENS) == content(1)
    assert files.flush(60)
    assert files.get(key(1), TOKENS) == content(1)
    files.close()

    again = opened()
    assert again.has(key(1)) and not again.has(key(2))
    assert again.get(key(1), TOKENS) == content(1)


@pytest.mark.parametrize("at_once", [5, SIZE])
def test_read_into_fills_the_given_buffers(opened: Open, monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    readv = os.readv
    if at_once < SIZE:  # the system may read fewer bytes than requested
        monkeypatch.setattr(os, "readv", lambda file, parts: readv(file, [parts[0][:at_once]]))
    files = opened()
    files.put(key(1), TOKENS, content(1))
    for _ in range(2):  # first from the write queue, then from disk
        memory = bytearray(3 * SIZE)
        view = memoryview(memory)
        parts = [view[SIZE : SIZE + 1], view[: SIZE - 8], view[-7:]]
        assert files.read_into(parts, key(1), TOKENS)
        assert b"".join(parts) == content(1)
        assert not any(memory[SIZE + 1 : -7]) and not any(memory[SIZE - 8 : SIZE])
        files.flush(60)


def test_different_tokens_with_the_same_key_are_a_miss(opened: Open) -> None:
    files = opened()
    files.put(key(1), TOKENS, content(1))
    for _ in range(2):
        assert files.get(key(1), [*TOKENS[:-1], 8]) is None and files.get(key(1), TOKENS[:-1]) is None
        assert files.get(key(1), TOKENS) == content(1)
        files.flush(60)


def test_newer_partial_block_replaces_the_older_one(opened: Open) -> None:
    files = opened()
    files.put(key(1), TOKENS, content(1))
    assert files.partial(key(1)) == []
    for seed, tokens in ((2, [1, 2, 3]), (3, [1, 2, 3, 4, 5])):
        assert files.put(key(1), tokens, content(seed), is_partial=True)
        assert files.partial(key(1)) == tokens
        files.flush(60)
        assert files.partial(key(1)) == tokens
        assert files.get(key(1), tokens, is_partial=True) == content(seed)
    assert files.get(key(1), TOKENS) == content(1)
    files.close()

    again = opened()
    assert again.partial(key(1)) == again.partial(key(1)) == [1, 2, 3, 4, 5] and again.partial(key(2)) == []
    assert again.used_bytes == file_bytes(4, SIZE) + file_bytes(5, SIZE)


def test_existing_block_is_not_written_again(opened: Open, tmp_path: Path) -> None:
    path = stored(opened, tmp_path)
    before = path.stat().st_ino
    files = opened()
    assert files.put(key(1), TOKENS, content(1))
    files.close()
    assert path.stat().st_ino == before


def test_close_writes_queued_blocks(opened: Open) -> None:
    files = opened(budget=1 << 22, size=4096)
    assert all(files.put(key(i), TOKENS, content(i, 4096)) for i in range(200))
    files.close()
    assert not files.put(key(999), TOKENS, content(999, 4096))

    again = opened(budget=1 << 22, size=4096)
    assert all(again.get(key(i), TOKENS) == content(i, 4096) for i in range(200))
