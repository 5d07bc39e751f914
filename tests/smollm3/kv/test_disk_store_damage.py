"""Damaged, truncated, renamed and linked files are never used, and count as cache misses."""

from __future__ import annotations

import errno
import logging
import os
import random
from pathlib import Path

import pytest
from smollm3.kv.block_folder import MODEL, SIZE, TOKENS, Open, content, key, stored

from notso.smollm3.kv import block_file
from notso.smollm3.kv.block_file import HEADER_BYTES, BlockName, file_bytes


def is_found(opened: Open, path: Path) -> bool:
    """Return whether the block of `path` is found; otherwise, its file must have been deleted."""
    files = opened()
    found = files.get(key(1), TOKENS)
    files.close()
    assert found in (None, content(1)), "a damaged block was used"
    assert path.exists() == (found is not None)
    return found is not None


def test_every_flipped_bit_is_detected(opened: Open, tmp_path: Path) -> None:
    path = stored(opened, tmp_path)
    whole = path.read_bytes()
    assert len(whole) == file_bytes(len(TOKENS), SIZE) and is_found(opened, path)
    files = opened()
    for at in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            files._folder._scan(sweep=True)
            assert files.has(key(1)) and files.get(key(1), TOKENS) is None, (at, bit)
            assert not files.has(key(1)) and not path.exists()


def test_every_wrong_file_length_is_detected(opened: Open, tmp_path: Path) -> None:
    path = stored(opened, tmp_path)
    whole = path.read_bytes()
    files = opened()
    for length in [*range(len(whole)), len(whole) + 1, 2 * len(whole)]:
        path.write_bytes((whole + whole)[:length])
        files._folder._scan(sweep=True)
        assert files.get(key(1), TOKENS) is None and not path.exists(), length


@pytest.mark.parametrize("count", [300, 10_000])
def test_random_damage_is_detected(opened: Open, tmp_path: Path, count: int) -> None:
    """Noise or zeros in ranges, and moved, removed and inserted pieces."""
    path = stored(opened, tmp_path)
    whole = path.read_bytes()
    files, source = opened(), random.Random(7)
    for _ in range(count):
        a, b = sorted(source.sample(range(len(whole) + 1), 2))
        c = source.randrange(len(whole))
        harmed = source.choice(
            (
                whole[:a] + source.randbytes(b - a) + whole[b:],
                whole[:a] + bytes(b - a) + whole[b:],
                whole[:a] + whole[a:b][::-1] + whole[b:],
                whole[:a] + whole[b:],
                whole[:b] + whole[a:],
                whole[:c] + whole[a:b] + whole[c:],
            )
        )
        if harmed == whole:
            continue
        path.write_bytes(harmed)
        files._folder._scan(sweep=True)
        assert files.get(key(1), TOKENS) is None and not path.exists()


def test_damage_is_logged_once(opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, files = stored(opened, tmp_path), opened()
    for i in range(2, 9):
        path.with_name(str(BlockName.of(MODEL, key(i), b"", is_partial=False))).write_bytes(path.read_bytes())
    files._folder._scan(sweep=False)
    assert not any(files.get(key(i), TOKENS) for i in range(2, 9))
    assert [record.levelname for record in caplog.records if record.levelno > logging.DEBUG] == ["WARNING"]


def test_damaged_partial_block_is_never_restored(opened: Open, tmp_path: Path) -> None:
    files = opened()
    files.put(key(1), TOKENS, content(1), is_partial=True)
    files.flush(10)
    (path,) = (tmp_path / "kv").glob("*-t.kv*")
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        files._folder._scan(sweep=True)
        tokens = files.partial(key(1))
        assert at < HEADER_BYTES + 4 * len(TOKENS) or tokens == TOKENS
        assert files.get(key(1), tokens, is_partial=True) is None
        assert not path.exists() and files.partial(key(1)) == []


@pytest.mark.parametrize("cache_version", [b"another model", MODEL + b"\0", b""])
def test_blocks_of_another_model_are_not_found_but_kept(opened: Open, tmp_path: Path, cache_version: bytes) -> None:
    path = stored(opened, tmp_path)
    other = opened(cache_version)
    assert not other.has(key(1)) and other.get(key(1), TOKENS) is None
    other.close()
    assert is_found(opened, path)


def test_renamed_block_file_is_rejected(opened: Open, tmp_path: Path) -> None:
    """The file belongs to another model, key, owner or kind."""
    for name in (
        BlockName.of(b"another model", key(1), b"", is_partial=False),
        BlockName.of(MODEL, key(2), b"", is_partial=False),
        BlockName.of(MODEL, key(1), b"ann", is_partial=False),
        BlockName.of(MODEL, key(1), b"", is_partial=True),
    ):
        path = stored(opened, tmp_path)
        path.rename(path.with_name(str(name)))
        for cache_version in (MODEL, b"another model"):
            files = opened(cache_version)
            assert files.get(name.hash, TOKENS, is_partial=name.is_partial) is None
            files.close()
        assert not path.with_name(str(name)).exists()


def test_symlink_is_not_followed(opened: Open, tmp_path: Path) -> None:
    path = stored(opened, tmp_path)
    secret = path.rename(tmp_path / "elsewhere")
    path.symlink_to(secret)
    assert opened().get(key(1), TOKENS) is None
    assert secret.exists() and not path.is_symlink()


def test_named_pipe_does_not_block_reading(opened: Open, tmp_path: Path) -> None:
    path = stored(opened, tmp_path)
    path.unlink()
    os.mkfifo(path)
    assert opened().get(key(1), TOKENS) is None
    assert not path.exists()


def test_leftover_files_are_removed_and_foreign_files_kept(opened: Open, tmp_path: Path) -> None:
    path = stored(opened, tmp_path)
    leftovers = [path.with_suffix(".tmp"), path.with_suffix(".kv0"), path.with_suffix(".kv27")]
    others = [path.parent / name for name in ("notes.txt", "x.tmp", path.name + "~", path.stem)]
    for file in (*leftovers, *others):
        file.write_bytes(b"?")
    assert is_found(opened, path)
    assert not any(file.exists() for file in leftovers) and all(file.exists() for file in others)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ENOMEM, errno.EACCES])
@pytest.mark.parametrize("is_partial", [False, True])
def test_temporarily_unreadable_block_is_kept(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, is_partial: bool
) -> None:
    files = opened()
    files.put(key(1), TOKENS, content(1), is_partial=is_partial)
    assert files.flush(10)

    def failing(*_: object) -> int:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(block_file.os, "open", failing)
        assert files.get(key(1), TOKENS, is_partial=is_partial) is None
        assert not files.partial(key(1))
    assert files.get(key(1), TOKENS, is_partial=is_partial) == content(1)
    assert len(list((tmp_path / "kv").glob("*.kv2"))) == 1


def test_expecting_a_missing_block_is_harmless(opened: Open, tmp_path: Path) -> None:
    path = stored(opened, tmp_path)
    files = opened()
    files.prefetch(key(7))
    files.prefetch(key(1))
    assert files.get(key(1), TOKENS) == content(1)
    path.unlink()
    files.prefetch(key(1))
    assert files.get(key(1), TOKENS) is None
