"""Index files for quotations are created once, read only if intact, and deleted with their prefix."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notso.smollm3.sampling import quote_index_files
from notso.smollm3.sampling.quote_index import Places, QuoteIndex
from notso.smollm3.sampling.quote_index_files import QuoteIndexFiles

READING, OTHER, DIGEST = b"reading1", b"reading2", bytes(32)
RNG = random.Random(1)
TEXT = " ".join(RNG.choices(["heron", "reeds", "stands", "in", "the"], k=2000)) + "."
PLACES = QuoteIndex(TEXT).places


class Made:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> Places:
        self.count += 1
        return PLACES


def same(places: Places) -> bool:
    return all(np.array_equal(ours, theirs) for ours, theirs in zip(PLACES, places, strict=True))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_index_is_built_once_and_reused_read_only(tmp_path: Path) -> None:
    made = Made()
    assert QuoteIndexFiles(tmp_path / "new").places(READING, DIGEST, len(TEXT), made) is PLACES
    again = QuoteIndexFiles(tmp_path / "new").places(READING, DIGEST, len(TEXT), made)
    assert same(again) and made.count == 1 and not any(each.flags.writeable for each in again)
    assert (tmp_path / "new").stat().st_mode & 0o777 == 0o700
    (path,) = (tmp_path / "new").iterdir()
    assert path.stat().st_mode & 0o777 == 0o600
    assert b"heron" not in path.read_bytes()


@pytest.mark.parametrize("damage", ["a bit", "cut", "longer", "empty", "another", "a folder"])
def test_damaged_index_file_is_rebuilt(tmp_path: Path, damage: str) -> None:
    files, made = QuoteIndexFiles(tmp_path), Made()
    files.places(READING, DIGEST, len(TEXT), made)
    (path,) = tmp_path.iterdir()
    intact = path.read_bytes()
    for at in range(0, len(intact), 101):
        data = bytearray(intact)
        data[at] ^= 1 << at % 8
        path.unlink()
        if damage == "a folder":
            path.mkdir()
            assert same(files.places(READING, DIGEST, len(TEXT), made))
            path.rmdir()
            return
        path.write_bytes(
            {"a bit": bytes(data), "cut": intact[:at], "longer": intact + b"x", "empty": b"", "another": data[::-1]}[
                damage
            ]
        )
        assert same(files.places(READING, DIGEST, len(TEXT), made))
        assert made.count == at // 101 + 2 and path.read_bytes() == intact
        assert names(tmp_path) == [path.name]


def test_forget_removes_index_files_even_during_a_build(tmp_path: Path) -> None:
    files = QuoteIndexFiles(tmp_path)
    files.places(READING, DIGEST, len(TEXT), Made())
    files.places(OTHER, DIGEST, len(TEXT), Made())
    QuoteIndexFiles(tmp_path).forget(READING)
    assert names(tmp_path) == [f"{OTHER.hex()}-{DIGEST.hex()[:32]}"]

    def make() -> Places:
        assert len(names(tmp_path)) == 2
        QuoteIndexFiles(tmp_path).forget(READING)  # another process may do this, too
        return PLACES

    assert files.places(READING, DIGEST, len(TEXT), make) is PLACES
    files.forget(OTHER)
    assert names(tmp_path) == []
    QuoteIndexFiles(tmp_path / "none").forget(READING)


def test_least_recently_used_files_are_evicted(tmp_path: Path) -> None:
    QuoteIndexFiles(tmp_path).places(READING, DIGEST, len(TEXT), Made())
    (path,) = tmp_path.iterdir()
    files = QuoteIndexFiles(tmp_path, budget_bytes=3 * path.stat().st_size)
    digests = [bytes([number]) * 32 for number in range(5)]
    for number, digest in enumerate(digests):
        files.places(OTHER, digest, len(TEXT), Made())
        os.utime(tmp_path / f"{OTHER.hex()}-{digest.hex()[:32]}", (number, number))
        made = Made()
        files.places(OTHER, digests[0], len(TEXT), made)  # used, so now the most recent
        assert not made.count
        assert len(names(tmp_path)) <= 3
    small = QuoteIndexFiles(tmp_path / "small", budget_bytes=100)
    assert small.places(READING, DIGEST, len(TEXT), Made()) is PLACES
    assert names(tmp_path / "small") == []


def test_stale_temporary_files_are_removed(tmp_path: Path) -> None:
    left, made = tmp_path / f"{READING.hex()}-0.abc.tmp", tmp_path / f"{OTHER.hex()}-0.def.tmp"
    for path in (left, made):
        path.touch()
    os.utime(left, (1, 1))
    QuoteIndexFiles(tmp_path).places(OTHER, DIGEST, len(TEXT), Made())
    assert not left.exists() and made.exists()


@pytest.mark.parametrize("trouble", ["full", "nearly full", "no folder"])
def test_disk_errors_do_not_fail_the_lookup(tmp_path: Path, trouble: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "quotes"
    if trouble == "no folder":
        folder.write_text("a file")
    elif trouble == "full":
        monkeypatch.setattr(quote_index_files, "serialize_places", _fail)
    else:
        monkeypatch.setattr(quote_index_files, "FREE_BYTES", 1 << 62)
    made = Made()
    for _ in range(2):
        assert QuoteIndexFiles(folder).places(READING, DIGEST, len(TEXT), made) is PLACES
    assert made.count == 2 and (trouble == "no folder" or names(folder) == [])


def _fail(*_: Any) -> Any:
    raise OSError(28, "No space left on device")


def test_build_error_is_raised_and_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="No space"):
        QuoteIndexFiles(tmp_path).places(READING, DIGEST, len(TEXT), _fail)
    assert names(tmp_path) == []


def test_concurrent_builds_of_one_index_store_one_file(tmp_path: Path) -> None:
    together, found = threading.Barrier(4), list[Places]()

    def make() -> Places:
        together.wait()
        return PLACES

    def work() -> None:
        found.append(QuoteIndexFiles(tmp_path).places(READING, DIGEST, len(TEXT), make))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert len(found) == 4 and len(names(tmp_path)) == 1
    assert same(QuoteIndexFiles(tmp_path).places(READING, DIGEST, len(TEXT), _fail))
