"""Blocks on disk: what was written is found again, also after a restart; what is damaged never is."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from notso.smollm3 import block_files
from notso.smollm3.block_file import HEADER_BYTES, BlockName, file_bytes
from notso.smollm3.block_files import BlockFiles

SIZE = 96  # bytes of a block
MODEL = b"one model, one format"
TOKENS = [5, 0, 128_255, 7]
Open = Callable[..., BlockFiles]


def key(number: int) -> bytes:
    return number.to_bytes(16, "little")


def content(seed: int, size: int = SIZE) -> bytes:
    return random.Random(seed).randbytes(size)


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Open]:
    """Opens the same folder as often as one likes; what is still open is closed at the end."""
    with contextlib.ExitStack() as stack:

        def open_files(fingerprint: bytes = MODEL, budget: int = 1 << 20, size: int = SIZE, **how: int) -> BlockFiles:
            files = BlockFiles(tmp_path / "kv", fingerprint, size, budget, **({"free_bytes": 0} | how))
            stack.callback(files.close)
            return files

        yield open_files


def stored(opened: Open, tmp_path: Path) -> Path:
    """The file of a block known by key(1)."""
    files = opened()
    assert files.put(key(1), TOKENS, content(1))
    files.close()
    return tmp_path / "kv" / str(BlockName.of(MODEL, key(1), b"", is_tail=False))


def test_a_block_is_found_at_once_and_after_a_restart(opened: Open) -> None:
    files = opened()
    assert not files.has(key(1)) and files.get(key(1), TOKENS) is None
    assert files.put(key(1), TOKENS, content(1))
    assert files.has(key(1)) and files.get(key(1), TOKENS) == content(1)
    assert files.flush(10)
    assert files.get(key(1), TOKENS) == content(1)
    files.close()

    again = opened()
    assert again.has(key(1)) and not again.has(key(2))
    assert again.get(key(1), TOKENS) == content(1)


def test_it_is_read_into_memory_that_is_there(opened: Open) -> None:
    files = opened()
    files.put(key(1), TOKENS, content(1))
    for _ in range(2):  # from the queue, from the disk
        memory = bytearray(3 * SIZE)
        assert files.read_into(memoryview(memory)[SIZE : 2 * SIZE], key(1), TOKENS)
        assert memory == bytes(SIZE) + content(1) + bytes(SIZE)
        files.flush(10)


def test_other_tokens_under_the_same_key_are_a_miss(opened: Open) -> None:
    files = opened()
    files.put(key(1), TOKENS, content(1))
    for _ in range(2):
        assert files.get(key(1), [*TOKENS[:-1], 8]) is None and files.get(key(1), TOKENS[:-1]) is None
        assert files.get(key(1), TOKENS) == content(1)
        files.flush(10)


def test_a_tail_tells_its_tokens_and_the_later_one_takes_its_place(opened: Open) -> None:
    files = opened()
    files.put(key(1), TOKENS, content(1))
    assert files.tail(key(1)) == []
    for seed, tokens in ((2, [1, 2, 3]), (3, [1, 2, 3, 4, 5])):
        assert files.put(key(1), tokens, content(seed), is_tail=True)
        assert files.tail(key(1)) == tokens
        files.flush(10)
        assert files.tail(key(1)) == tokens
        assert files.get(key(1), tokens, is_tail=True) == content(seed)
    assert files.get(key(1), TOKENS) == content(1)
    files.close()

    again = opened()
    assert again.tail(key(1)) == again.tail(key(1)) == [1, 2, 3, 4, 5] and again.tail(key(2)) == []
    assert again.used_bytes == file_bytes(4, SIZE) + file_bytes(5, SIZE)


def test_what_is_there_already_is_not_written_again(opened: Open, tmp_path: Path) -> None:
    path = stored(opened, tmp_path)
    before = path.stat().st_ino
    files = opened()
    assert files.put(key(1), TOKENS, content(1))
    files.close()
    assert path.stat().st_ino == before


def test_closing_writes_what_waits(opened: Open) -> None:
    files = opened(budget=1 << 22, size=4096)
    assert all(files.put(key(i), TOKENS, content(i, 4096)) for i in range(200))
    files.close()
    assert not files.put(key(999), TOKENS, content(999, 4096))

    again = opened(budget=1 << 22, size=4096)
    assert all(again.get(key(i), TOKENS) == content(i, 4096) for i in range(200))


# ---------------------------------------------------------------- damage


def is_found(opened: Open, path: Path) -> bool:
    """Whether the block of `path` is still believed; if it is not, its file must be gone."""
    files = opened()
    found = files.get(key(1), TOKENS)
    files.close()
    assert found in (None, content(1)), "a damaged block was believed"
    assert path.exists() == (found is not None)
    return found is not None


def test_every_flipped_bit_is_found(opened: Open, tmp_path: Path) -> None:
    path = stored(opened, tmp_path)
    whole = path.read_bytes()
    assert len(whole) == file_bytes(len(TOKENS), SIZE) and is_found(opened, path)
    files = opened()
    for at in range(len(whole)):
        for bit in range(8):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
            files._scan(sweep=True)
            assert files.has(key(1)) and files.get(key(1), TOKENS) is None, (at, bit)
            assert not files.has(key(1)) and not path.exists()


def test_every_shorter_or_longer_file_is_found(opened: Open, tmp_path: Path) -> None:
    path = stored(opened, tmp_path)
    whole = path.read_bytes()
    files = opened()
    for length in [*range(len(whole)), len(whole) + 1, 2 * len(whole)]:
        path.write_bytes((whole + whole)[:length])
        files._scan(sweep=True)
        assert files.get(key(1), TOKENS) is None and not path.exists(), length


def test_thousands_of_accidents_are_found(opened: Open, tmp_path: Path) -> None:
    """Runs of noise or zeros, pieces moved, pieces lost and gained."""
    path = stored(opened, tmp_path)
    whole = path.read_bytes()
    files, source = opened(), random.Random(7)
    for _ in range(10_000):
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
        files._scan(sweep=True)
        assert files.get(key(1), TOKENS) is None and not path.exists()


def test_damage_is_told_once(opened: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = stored(opened, tmp_path)
    for i in range(2, 9):
        path.with_name(str(BlockName.of(MODEL, key(i), b"", is_tail=False))).write_bytes(path.read_bytes())
    files = opened()
    assert not any(files.get(key(i), TOKENS) for i in range(2, 9))
    assert [record.levelname for record in caplog.records if record.levelno > logging.DEBUG] == ["WARNING"]


def test_a_damaged_tail_is_not_offered_or_not_believed(opened: Open, tmp_path: Path) -> None:
    files = opened()
    files.put(key(1), TOKENS, content(1), is_tail=True)
    files.flush(10)
    (path,) = (tmp_path / "kv").glob("*-t.kv*")
    whole = path.read_bytes()
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :])
        files._scan(sweep=True)
        tokens = files.tail(key(1))
        assert at < HEADER_BYTES + 4 * len(TOKENS) or tokens == TOKENS
        assert files.get(key(1), tokens, is_tail=True) is None
        assert not path.exists() and files.tail(key(1)) == []


@pytest.mark.parametrize("fingerprint", [b"another model", MODEL + b"\0", b""])
def test_blocks_of_another_model_are_not_found_but_kept(opened: Open, tmp_path: Path, fingerprint: bytes) -> None:
    path = stored(opened, tmp_path)
    other = opened(fingerprint)
    assert not other.has(key(1)) and other.get(key(1), TOKENS) is None
    other.close()
    assert is_found(opened, path)


def test_a_file_under_a_name_that_is_not_its_own_is_not_believed(opened: Open, tmp_path: Path) -> None:
    """Of another model, another key, another owner, another kind."""
    for name in (
        BlockName.of(b"another model", key(1), b"", is_tail=False),
        BlockName.of(MODEL, key(2), b"", is_tail=False),
        BlockName.of(MODEL, key(1), b"ann", is_tail=False),
        BlockName.of(MODEL, key(1), b"", is_tail=True),
    ):
        path = stored(opened, tmp_path)
        path.rename(path.with_name(str(name)))
        for fingerprint in (MODEL, b"another model"):
            files = opened(fingerprint)
            assert files.get(name.key, TOKENS, is_tail=name.is_tail) is None
            files.close()
        assert not path.with_name(str(name)).exists()


def test_a_link_is_not_followed(opened: Open, tmp_path: Path) -> None:
    path = stored(opened, tmp_path)
    secret = path.rename(tmp_path / "elsewhere")
    path.symlink_to(secret)
    assert opened().get(key(1), TOKENS) is None
    assert secret.exists() and not path.is_symlink()


def test_leftovers_are_swept_and_what_is_not_ours_is_left_alone(opened: Open, tmp_path: Path) -> None:
    path = stored(opened, tmp_path)
    leftovers = [path.with_suffix(".tmp"), path.with_suffix(".kv0"), path.with_suffix(".kv27")]
    others = [path.parent / name for name in ("notes.txt", "x.tmp", path.name + "~", path.stem)]
    for file in (*leftovers, *others):
        file.write_bytes(b"?")
    assert is_found(opened, path)
    assert not any(file.exists() for file in leftovers) and all(file.exists() for file in others)


# ---------------------------------------------------------------- budget and disk


def test_over_the_budget_the_least_recently_read_goes_first(opened: Open) -> None:
    one = file_bytes(len(TOKENS), SIZE)
    files = opened(budget=3 * one)
    for i in range(3):
        files.put(key(i), TOKENS, content(i))
    files.flush(10)
    assert files.get(key(0), TOKENS)
    files.put(key(3), TOKENS, content(3))
    files.flush(10)
    assert [files.has(key(i)) for i in range(4)] == [True, False, True, True]
    time.sleep(0.02)  # the time stamps of files are coarse
    assert files.get(key(2), TOKENS)  # and so it is after a restart
    files.close()

    again = opened(budget=3 * one)
    again.put(key(4), TOKENS, content(4))
    again.put(key(5), TOKENS, content(5))
    again.flush(10)
    assert [again.has(key(i)) for i in range(6)] == [False, False, True, False, True, True]


def test_the_budget_holds_for_all_models_together(opened: Open) -> None:
    one = file_bytes(len(TOKENS), SIZE)
    for model in (b"a", b"b", b"c"):
        files = opened(model, budget=2 * one)
        files.put(key(1), TOKENS, content(1))
        files.close()
    assert not opened(b"a", budget=2 * one).has(key(1))


def test_never_over_budget_whatever_comes(opened: Open, tmp_path: Path) -> None:
    source, budget = random.Random(3), 20 * file_bytes(100, SIZE)
    files = opened(budget=budget)
    for _ in range(300):
        number, tokens = source.randrange(60), list(range(source.randrange(128)))
        files.put(key(number), tokens, content(number), is_tail=source.random() < 0.5, tag=bytes([number % 5]))
        files.get(key(source.randrange(60)), tokens)
        if source.random() < 0.02:
            files.remove(bytes([source.randrange(5)]))
        if source.random() < 0.1:
            files.flush(10)
            on_disk = sum(file.stat().st_size for file in (tmp_path / "kv").glob("*.kv1"))
            assert on_disk == files.used_bytes <= budget


def test_what_can_never_fit_is_refused(opened: Open) -> None:
    files = opened(budget=SIZE)
    assert not files.put(key(1), TOKENS, content(1)) and not files.has(key(1))


def test_what_waits_is_bounded_and_refused_beyond(opened: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, flush = threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        go_on.wait(10)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    files = opened(queue_bytes=3 * SIZE)
    taken = [files.put(key(i), TOKENS, content(i)) for i in range(6)]
    assert taken == [True, True, True, False, False, False]
    assert files.get(key(1), TOKENS) == content(1) and not files.has(key(4))
    go_on.set()
    assert files.flush(10) and files.put(key(4), TOKENS, content(4))


def test_a_full_disk_turns_writing_off_with_one_warning(
    opened: Open, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    files = opened()
    files.put(key(1), TOKENS, content(1))
    files.flush(10)

    def full(descriptor: int, data: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(block_files.os, "write", full)
        for i in range(2, 6):
            files.put(key(i), TOKENS, content(i))
        assert files.flush(10)
    assert not files.is_writing and not files.put(key(9), TOKENS, content(9))
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "No space left" in caplog.text
    assert files.get(key(1), TOKENS) == content(1) and not files.has(key(2))
    assert not list((tmp_path / "kv").glob("*.tmp"))


def test_some_of_the_disk_is_left_free(opened: Open, caplog: pytest.LogCaptureFixture) -> None:
    files = opened(free_bytes=1 << 60)
    files.put(key(1), TOKENS, content(1))
    assert files.flush(10) and not files.is_writing and not files.has(key(1))
    assert len(caplog.records) == 1 and "MiB left" in caplog.text


def test_a_folder_that_cannot_be_used_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    files = BlockFiles(tmp_path / "file" / "kv", MODEL, SIZE, 1 << 20)
    assert not files.put(key(1), TOKENS, content(1)) and files.get(key(1), TOKENS) is None and files.flush(1)
    files.remove(b"")
    files.close()
    assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_a_block_of_the_wrong_size_is_a_mistake(opened: Open) -> None:
    for bad in (content(1)[:-1], content(1) + b"x"):
        with pytest.raises(ValueError, match="a block has 96 bytes"):
            opened().put(key(1), TOKENS, bad)
    with pytest.raises(ValueError, match="a key has 16 bytes and a tag up to 8"):
        opened().put(b"short", TOKENS, content(1))


# ---------------------------------------------------------------- privacy, removal, other processes


def test_nobody_else_may_look(opened: Open, tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir(mode=0o755)
    path = stored(opened, tmp_path)
    assert (tmp_path / "kv").stat().st_mode & 0o777 == 0o700
    assert path.stat().st_mode & 0o777 == (tmp_path / "kv" / "lock").stat().st_mode & 0o777 == 0o600


def test_what_was_written_under_a_tag_can_be_removed(opened: Open, tmp_path: Path) -> None:
    files = opened()
    for i in range(6):
        files.put(key(i), TOKENS, content(i), tag=b"ann" if i % 2 else b"bob", is_tail=i == 5)
        if i == 3:
            files.flush(10)
    files.remove(b"ann")
    assert [files.has(key(i)) for i in range(5)] == [True, False, True, False, True] and not files.tail(key(5))
    files.close()
    assert len(list((tmp_path / "kv").glob("*.kv1"))) == 3
    again = opened()
    again.remove(b"bob")
    assert again.used_bytes == 0 and not list((tmp_path / "kv").glob("*.kv1"))


def test_what_is_being_written_is_removed_as_well(
    opened: Open, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    writing, go_on, flush = threading.Event(), threading.Event(), os.fsync

    def slow(descriptor: int) -> None:
        writing.set()
        go_on.wait(10)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    files = opened()
    files.put(key(1), TOKENS, content(1), tag=b"ann")
    assert writing.wait(10)
    files.remove(b"ann")
    assert not files.has(key(1))
    go_on.set()
    assert files.flush(10) and not files.has(key(1)) and files.get(key(1), TOKENS) is None
    assert not list((tmp_path / "kv").glob("*.kv1"))


def test_a_second_process_reads_and_does_not_write(opened: Open, tmp_path: Path) -> None:
    path = stored(opened, tmp_path)
    first = opened()
    second = opened()
    assert second.get(key(1), TOKENS) == content(1)
    assert not second.is_writing and not second.put(key(2), TOKENS, content(2))
    whole = path.read_bytes()
    path.write_bytes(whole[:-1])
    assert second.get(key(1), TOKENS) is None and path.exists()  # the other's to remove
    assert first.get(key(1), TOKENS) is None and not path.exists()
    first.close()
    assert opened().is_writing


def test_a_kill_leaves_nothing_but_whole_blocks(opened: Open, tmp_path: Path) -> None:
    code = (
        "import sys, random\nfrom pathlib import Path\nfrom notso.smollm3.block_files import BlockFiles\n"
        "files = BlockFiles(Path(sys.argv[1]), b'one model, one format', 60000, 1 << 30, free_bytes=0)\n"
        "print('on', flush=True)\n"
        "for i in range(100000):\n"
        "    while not files.put(i.to_bytes(16, 'little'), [i], random.Random(i).randbytes(60000)): files.flush(1)\n"
    )
    for delay in (0.0, 0.02, 0.1, 0.3):
        child = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "kv")], stdout=subprocess.PIPE)
        assert child.stdout is not None and child.stdout.readline()
        time.sleep(delay)
        child.send_signal(signal.SIGKILL)
        child.wait()
        child.stdout.close()
        files = opened(size=60_000)
        assert not list((tmp_path / "kv").glob("*.tmp"))
        kept = [int.from_bytes(key, "little") for key, _ in files._known]
        assert all(files.get(key(i), [i]) == content(i, 60_000) for i in kept)
        files.close()
    assert kept


def test_many_threads_at_once(opened: Open) -> None:
    files, wrong = opened(budget=40 * file_bytes(1, SIZE)), list[str]()
    until = time.monotonic() + 1.0

    def work(seed: int) -> None:
        source = random.Random(seed)
        while time.monotonic() < until:
            number = source.randrange(80)
            what = source.randrange(12)
            if what < 4:
                files.put(key(number), [number], content(number), is_tail=bool(what & 1), tag=bytes([number % 7]))
            elif what < 11:
                found = files.get(key(number), [number], is_tail=bool(what & 1))
                if found not in (None, content(number)):
                    wrong.append(f"{number} held something else")
            else:
                files.remove(bytes([source.randrange(7)]))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and files.is_writing and files.flush(10)
    assert files.used_bytes == sum(file.stat().st_size for file in files.folder.glob("*.kv1"))
