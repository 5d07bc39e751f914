"""Blocks of several owners, processes and threads: access, removal, and state after a killed process."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from smollm3.kv.block_folder import SIZE, TOKENS, Open, content, key, stored

from notso.smollm3.kv import block_folder
from notso.smollm3.kv.block_file import file_bytes


def test_folder_and_files_have_private_permissions(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o755)
    path = stored(opened, tmp_path)
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == (tmp_path / "kv" / "lock").stat().st_mode & 0o777 == 0o600


def test_folder_with_other_files_keeps_its_permissions(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o755)
    (tmp_path / "kv" / "mine.txt").touch()
    path = stored(opened, tmp_path)
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o755
    assert path.stat().st_mode & 0o777 == 0o600


def test_remove_deletes_all_blocks_of_a_tag(opened: Open, tmp_path: Path) -> None:
    files = opened()
    for i in range(6):
        files.put(key(i), TOKENS, content(i), tag=b"ann" if i % 2 else b"bob", is_partial=i == 5)
        if i == 3:
            files.flush(60)
    files.remove(b"ann")
    assert [files.has(key(i)) for i in range(5)] == [True, False, True, False, True] and not files.partial(key(5))
    files.close()
    assert len(list((tmp_path / "kv").glob("*.kv2"))) == 3
    again = opened()
    again.remove(b"bob")
    assert again.used_bytes == 0 and not list((tmp_path / "kv").glob("*.kv2"))


def test_remove_deletes_a_block_being_written(opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    writing, go_on, flush = threading.Event(), threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        writing.set()
        go_on.wait(60)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    files = opened()
    files.put(key(1), TOKENS, content(1), tag=b"ann")
    assert writing.wait(60)
    files.remove(b"ann")
    assert not files.has(key(1))
    go_on.set()
    assert files.flush(60) and not files.has(key(1)) and files.get(key(1), TOKENS) is None
    assert not list((tmp_path / "kv").glob("*.kv2"))


def test_second_store_reads_but_does_not_write(opened: Open, tmp_path: Path) -> None:
    path = stored(opened, tmp_path)
    first = opened()
    second = opened()
    assert second.get(key(1), TOKENS) == content(1)
    assert not second.is_writing and not second.put(key(2), TOKENS, content(2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert second.get(key(1), TOKENS) is None and path.exists()  # only the other store may delete it
    assert first.get(key(1), TOKENS) is None and not path.exists()
    first.close()
    assert opened().is_writing


def test_second_store_writes_after_the_first_is_closed(
    opened: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_folder, "RESCAN_S", 0.0)
    first, second = opened(), opened()
    assert not second.has(key(1)) and not second.is_writing
    assert first.put(key(1), TOKENS, content(1)) and first.flush(60)
    first.close()
    assert second.has(key(1)) and second.is_writing and second.get(key(1), TOKENS) == content(1)
    assert second.put(key(2), TOKENS, content(2)) and second.flush(60) and not opened().is_writing
    assert len(list((tmp_path / "kv").glob("*.kv2"))) == 2


def test_second_attempt_to_lock_keeps_the_lock(tmp_path: Path) -> None:
    """A leaked descriptor would keep the folder locked until the process ends."""
    held, other = (block_folder.FolderLock(tmp_path / "lock") for _ in range(2))
    assert held.acquire() and not held.acquire() and held.is_held
    assert not other.acquire()
    held.release()
    assert other.acquire()
    other.release()


def test_closed_store_does_not_stay_locked_by_a_forked_child(tmp_path: Path) -> None:
    released, next_lock = (block_folder.FolderLock(tmp_path / "lock") for _ in range(2))
    assert released.acquire() and released._descriptor is not None
    inherited = os.dup(released._descriptor)  # as a fork does
    try:
        assert not next_lock.acquire()
        released.release()
        assert next_lock.acquire()
        next_lock.release()
    finally:
        os.close(inherited)


def test_killed_process_leaves_only_complete_blocks(opened: Open, tmp_path: Path) -> None:
    code = (
        "import sys, random\nfrom pathlib import Path\nfrom notso.smollm3.kv.disk_store import DiskStore\n"
        "files = DiskStore(Path(sys.argv[1]), b'one model, one format', 60000, 1 << 30, free_bytes=0)\n"
        "print('on', flush=True)\n"
        "for i in range(100000):\n"
        "    while not files.put(i.to_bytes(16, 'little'), [i], random.Random(i).randbytes(60000)): files.flush(1)\n"
    )
    for delay in (0.0, 0.02, 0.1, 0.3):
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "kv")], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline()
        time.sleep(delay)
        while delay == 0.3 and not list((tmp_path / "kv").glob("*.kv2")):  # the disk may be busy
            time.sleep(0.01)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        files = opened(size=60_000)
        assert files.flush(60)  # the log may have to be rewritten first, under another name
        assert not list((tmp_path / "kv").glob("*.tmp"))
        kept = [int.from_bytes(key, "little") for key, _ in files._folder.usable]
        assert all(files.get(key(i), [i]) == content(i, 60_000) for i in kept)
        files.close()
    assert kept


def test_concurrent_threads_read_consistent_blocks(opened: Open) -> None:
    files, wrong = opened(budget=40 * file_bytes(1, SIZE)), list[str]()
    until = time.monotonic() + 1.0

    def work(seed: int) -> None:
        source = random.Random(seed)
        while time.monotonic() < until:
            number = source.randrange(80)
            what = source.randrange(12)
            if what < 4:
                files.put(key(number), [number], content(number), is_partial=bool(what & 1), tag=bytes([number % 7]))
            elif what < 11:
                found = files.get(key(number), [number], is_partial=bool(what & 1))
                if found not in (None, content(number)):
                    wrong.append(f"{number} held something else")
            else:
                files.remove(bytes([source.randrange(7)]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and files.is_writing and files.flush(60)
    assert files.used_bytes == sum(file.stat().st_size for file in files.folder.glob("*.kv2"))


def test_second_store_finds_blocks_written_later(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_folder, "RESCAN_S", 0.0)
    first, second = opened(), opened()
    assert not second.has(key(1)) and not second.partial(key(2))
    first.put(key(1), TOKENS, content(1))
    first.put(key(2), TOKENS, content(2), is_partial=True)
    assert first.flush(60)
    assert second.has(key(1)) and second.get(key(1), TOKENS) == content(1)
    assert second.partial(key(2)) == TOKENS
    first.remove(b"")
    assert not second.has(key(1)) and second.used_bytes == 0


def test_block_written_within_one_mtime_tick_is_found(
    opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(block_folder, "RESCAN_S", 0.0)
    first, second = opened(), opened()
    first.put(key(1), TOKENS, content(1))
    assert first.flush(60) and second.has(key(1))
    seen = (tmp_path / "kv").stat()
    first.put(key(2), TOKENS, content(2))
    assert first.flush(60)
    os.utime(tmp_path / "kv", ns=(seen.st_atime_ns, seen.st_mtime_ns))  # as with a clock of low resolution
    assert second.has(key(2))


def test_second_store_can_remove_blocks_of_the_first(opened: Open, tmp_path: Path) -> None:
    first, second = opened(), opened()
    for i in range(3):
        first.put(key(i), TOKENS, content(i), tag=b"ann" if i else b"bob")
    assert first.flush(60)
    second.remove(b"ann")
    assert len(list((tmp_path / "kv").glob("*.kv2"))) == 1
    assert [first.get(key(i), TOKENS) for i in range(3)] == [content(0), None, None]
    assert first.put(key(1), TOKENS, content(1)) and first.flush(60) and first.get(key(1), TOKENS) == content(1)
