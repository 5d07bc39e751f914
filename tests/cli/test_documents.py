"""`notso documents`: add, list, read, search and remove documents, and errors."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from documents.made import text_pdf

from notso.cli import exit_codes
from notso.documents.values import MAX_FILE_BYTES
from notso.system.confinement import lacking

Run = Callable[..., Any]


@pytest.fixture
def documents(notso: Run, tmp_path: Path) -> Run:
    def run(*arguments: str) -> Any:
        more = ["--unconfined-documents"] if arguments[:1] == ("add",) and lacking() else []
        return notso("documents", *arguments, *more, "--data-dir", str(tmp_path / "data"))

    return run


def test_documents_are_added_found_read_and_removed(documents: Run, tmp_path: Path) -> None:
    assert "No documents" in documents().out
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "birds.pdf").write_bytes(text_pdf(["Herons eat fish."], ["Storks nest on chimneys."]))
    (folder / "movie.mp4").write_bytes(b"x")
    (tmp_path / "notes.txt").write_text("Cranes dance.")
    added = documents("add", str(folder), str(tmp_path / "notes.txt"))
    assert added.code == exit_codes.DONE and "movie" not in added.out, added.err
    assert [line.split()[:3] for line in added.out.splitlines()[1:]] == [
        ["folder/birds.pdf", "ready", "2"],
        ["notes.txt", "ready", "1"],
    ]
    assert documents("list").out == added.out
    listed = json.loads(documents("list", "--json").out)
    assert [each["kind"] for each in listed] == ["PDF", "text"]
    assert documents("search", "storks").out == "folder/birds.pdf, page 2:\nStorks nest on chimneys.\n\n"
    assert documents("search", "walrus").out == "Nothing in 2 documents mentions these words.\n"
    assert documents("read", "folder/birds.pdf", "--page", "2").out == "Storks nest on chimneys.\n"
    assert documents("read", listed[1]["id"]).out == "Cranes dance.\n"
    assert documents("rm", "folder/birds.pdf").code == exit_codes.DONE
    assert "birds" not in documents("list").out and "notes.txt" in documents("list").out


def test_folders_that_cannot_be_read_are_named(documents: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "folder"
    locked = folder / "locked"
    locked.mkdir(parents=True)
    (folder / "a.txt").write_text("Herons.")
    (locked / "b.txt").write_text("Storks.")
    plain = os.scandir
    unreadable = [locked]

    def scandir(path: Any = ".") -> Any:
        if Path(path) in unreadable:  # permissions do not bind root
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return plain(path)

    monkeypatch.setattr(os, "scandir", scandir)
    added = documents("add", str(folder))
    assert added.code == exit_codes.DONE and "folder/a.txt" in added.out and "b.txt" not in added.out
    assert added.err == f"notso: {locked} is skipped: Permission denied\n"
    unreadable.append(folder)
    refused = documents("add", str(folder))
    assert refused.code != exit_codes.DONE and f"{folder}: Permission denied" in refused.err


def test_library_option_selects_a_library(documents: Run, tmp_path: Path) -> None:
    for name, text in (("a.txt", "Herons."), ("b.txt", "Storks.")):
        (tmp_path / name).write_text(text)
    assert documents("add", str(tmp_path / "a.txt")).code == exit_codes.DONE
    unknown = documents("list", "--library", "Birds")
    assert (
        unknown.code != exit_codes.DONE
        and "there is no library called Birds; existing libraries: Documents" in unknown.err
    )
    assert documents("add", str(tmp_path / "b.txt"), "--library", "Birds").code == exit_codes.DONE
    assert "b.txt" not in documents("list").out and "a.txt" not in documents("list", "--library", "Birds").out
    assert documents("search", "storks").out == "Nothing in 1 document mentions these words.\n"
    assert documents("search", "storks", "--library", "Birds").out == "b.txt:\nStorks.\n\n"
    assert documents("read", "b.txt", "--library", "Birds").out == "Storks.\n"
    assert documents("rm", "b.txt", "--library", "Birds").code == exit_codes.DONE
    assert "No documents" in documents("list", "--library", "Birds").out
    for name in ("", "x" * 101, "a\u202eb"):
        assert documents("list", "--library", name).code != exit_codes.DONE


def test_only_regular_files_of_limited_size_are_stored(documents: Run, tmp_path: Path) -> None:
    large = tmp_path / "large.txt"
    with large.open("wb") as file:
        file.truncate(MAX_FILE_BYTES + 1)
    for path, problem in ((large, "it is larger than 64 MiB"), (Path(os.devnull), "it is not a regular file")):
        refused = documents("add", str(path))
        assert refused.code == exit_codes.FAILED
        assert refused.err == f"notso: {path}: {problem}\n"
    assert "No documents" in documents().out


def test_document_errors_are_one_line(documents: Run, tmp_path: Path) -> None:
    (tmp_path / "scan.pdf").write_bytes(b"%PDF-1.7")
    os.mkfifo(tmp_path / "pipe")
    with (tmp_path / "huge.txt").open("wb") as huge:
        huge.truncate((64 << 20) + 1)
    failed = documents("add", str(tmp_path / "scan.pdf"))
    assert (
        failed.code != exit_codes.DONE and "1 of 1 documents cannot be read but are kept in the library" in failed.err
    )
    assert "failed: it is damaged" in failed.out
    (listed,) = json.loads(documents("list", "--json").out)
    assert listed["reason"].startswith("is damaged")
    for arguments, sentence in (
        (("read", "scan.pdf"), "scan.pdf cannot be read: it is damaged"),
        (("rm", "nothing.pdf"), "there is no document called nothing.pdf"),
        (("add", str(tmp_path / "nothing.pdf")), "nothing.pdf"),
        (("add", str(tmp_path / "pipe")), "pipe: it is not a regular file"),
        (("add", str(tmp_path / "huge.txt")), "huge.txt: it is larger than 64 MiB"),
        (("add",), "add needs at least one item"),
        (("list", "x"), "list takes no items"),
    ):
        found = documents(*arguments)
        assert found.code != exit_codes.DONE and sentence in found.err and len(found.err.splitlines()) == 1, arguments
        assert "notso doctor" not in found.err
    (tmp_path / "a.txt").write_text("a")
    documents("add", str(tmp_path / "a.txt"))
    assert "a.txt has 1 page" in documents("read", "a.txt", "--page", "2").err
