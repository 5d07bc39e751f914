"""Batch input and output files. A crash neither loses nor repeats a finished answer.

Each output line is written whole and synced before the next. A line cut short by a crash is removed at the next
start; all others are recognized by their id, a hash of the request's line.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import typer

from notso.system.files import lock, sync
from notso.text_file import NotTextError, utf8_stream

MAX_LINE_BYTES = 1 << 20
MAX_ANSWER_BYTES = 64 << 20
_ID_DIGITS = 24


@dataclass(frozen=True, slots=True)
class RequestLine:
    """A line of the input."""

    number: int
    id: str
    content: bytes | None  # None: longer than MAX_LINE_BYTES
    custom_id: str | None
    repeats: bool  # an earlier line has the same custom_id


class BatchInput:
    """Requests of a batch, read once to index and once to answer them."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ids = {line.id for line in self.lines()}

    def lines(self) -> Iterator[RequestLine]:
        """Yield every non-blank line in order."""
        seen: set[bytes] = set()
        with self.path.open("rb") as file:
            for number, content in enumerate(self._contents(file), start=1):
                if content is not None:
                    content = content.strip()
                    if not content:
                        continue
                custom_id = _custom_id(content)
                name = hashlib.sha256((custom_id or "").encode("utf-8", "surrogatepass")).digest()
                repeats = custom_id is not None and name in seen
                seen.add(name)
                # without a custom_id, the line number identifies a request
                place = b"line %d\0" % number if custom_id is None or repeats else b""
                key = hashlib.sha256(place + (content or b"")).hexdigest()[:_ID_DIGITS]
                yield RequestLine(number, f"batch_req_{key}", content, custom_id, repeats)

    def _contents(self, file: BinaryIO) -> Iterator[bytes | None]:
        try:
            yield from _whole_lines(file)
        except NotTextError as error:
            raise _refusal(f"{self.path} {error}") from None


class BatchOutput:
    """Output file, opened for appending and locked against other processes."""

    def __init__(self, path: Path, wanted: set[str]) -> None:
        """Open or create the file. Raises typer.BadParameter."""
        if path.exists() and not stat.S_ISREG(path.stat().st_mode):
            raise _refusal(f"{path} must be a regular file: existing answers are read to resume a batch")
        self.path = path
        self.failed = 0  # answers in the file that are errors
        self._file: BinaryIO = path.open("a+b")
        try:
            lock(self._file.fileno())
            # Ids already answered. A file with other lines is not an output of this batch and is left unchanged.
            self.done = self._take_stock(wanted)
        except BlockingIOError:
            self._file.close()
            raise _refusal(f"another process is writing {path}") from None
        except BaseException:
            self._file.close()
            raise

    def write(self, answer: dict[str, Any]) -> None:
        """Append one answer and sync it to disk."""
        line = json.dumps(answer, ensure_ascii=False).encode() + b"\n"
        self._file.write(line)
        self._file.flush()
        sync(self._file.fileno())
        self.done.add(answer["id"])
        self.failed += answer.get("error") is not None

    def __enter__(self) -> BatchOutput:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def _take_stock(self, wanted: set[str]) -> set[str]:
        self._file.seek(0)
        done: set[str] = set()
        end = 0
        for number, line in enumerate(iter(lambda: self._file.readline(MAX_ANSWER_BYTES), b""), start=1):
            if not line.endswith(b"\n") and _begins_an_answer(line, wanted):  # a crash cut this line short
                break
            answer = _answer_in(line)
            found = str(answer.get("id", ""))
            if found not in wanted:
                raise _refusal(
                    f"line {number} of {self.path} does not match a request of this batch, or the request has changed; "
                    "use another output file"
                )
            done.add(found)
            self.failed += answer.get("error") is not None
            end += len(line)
        if end < self._file.seek(0, os.SEEK_END):
            self._file.truncate(end)
        return done


def _whole_lines(file: BinaryIO) -> Iterator[bytes | None]:
    file = utf8_stream(file)  # some editors write UTF-16, or a byte order mark
    # Longer lines yield None, and are never held in memory.
    while piece := file.readline(MAX_LINE_BYTES + 1):
        if len(piece) <= MAX_LINE_BYTES or piece.endswith(b"\n"):
            yield piece.rstrip(b"\r\n")
            continue
        while piece and not piece.endswith(b"\n"):
            piece = file.readline(MAX_LINE_BYTES)
        yield None


def _custom_id(content: bytes | None) -> str | None:
    with contextlib.suppress(ValueError, RecursionError):
        line = json.loads(content or b"")
        if isinstance(line, dict) and isinstance(custom_id := line.get("custom_id"), str) and custom_id:
            return custom_id
    return None


def _answer_in(line: bytes) -> dict[str, Any]:
    with contextlib.suppress(ValueError, RecursionError):
        answer = json.loads(line)
        if isinstance(answer, dict) and isinstance(answer.get("id"), str):
            return answer
    return {}


def _begins_an_answer(line: bytes, wanted: set[str]) -> bool:
    # `write` puts the id first, so a line that was cut short begins with one or is the beginning of one.
    beginnings = (json.dumps({"id": id}).encode()[:-1] for id in wanted)
    return any(line.startswith(beginning) or beginning.startswith(line) for beginning in beginnings)


_refusal = partial(typer.BadParameter, param_hint="OUT")
