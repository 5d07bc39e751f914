"""Read each document in a child process, and check the frames that it sends, which are not trusted."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any

from notso.documents.values import (
    CPU_S_A_PAGE,
    LIMITS,
    MAX_CHARACTERS,
    MAX_FILE_BYTES,
    MAX_FRAME_BYTES,
    MAX_PAGES,
    MAX_WARNINGS,
    MIB,
    UNCONFINED,
    Document,
    UnreadableError,
    clean,
    one_line,
)
from notso.extras import install_line
from notso.system.confinement import ConfinedProcess, ConfinedWorkError

PROGRAM = "from notso.documents.child import main; main()"
PAGE_BREAK = "\n\n"
MAX_SENTENCE_CHARACTERS = 300
_EXTENSION = re.compile(r"[a-z0-9]{1,10}")


class DocumentReader:
    """Reads one document. `read()` blocks; `kill()` may be called from another thread."""

    def __init__(self, data: bytes, name: str, unconfined: bool = False, program: str = PROGRAM) -> None:
        """Start the child. Raises UnreadableError.

        unconfined: read PDF files and spreadsheets even if the system lacks Landlock or seccomp.
        """
        if not data:
            raise UnreadableError("is empty", "document_empty")
        if len(data) > MAX_FILE_BYTES:
            raise UnreadableError(
                f"is larger than {MAX_FILE_BYTES // MIB} MiB", "document_large", limit=MAX_FILE_BYTES // MIB
            )
        suffix = PurePath(name.replace("\\", "/")).suffix[1:].lower()
        arguments = ["-c", program, suffix if _EXTENSION.fullmatch(suffix) else "", UNCONFINED if unconfined else ""]
        try:
            self._child = ConfinedProcess(arguments, data, LIMITS)
        except ConfinedWorkError as error:
            raise _unread(error) from None

    def read(self) -> Document:
        """Return the document. Raises UnreadableError."""
        try:
            return assemble_document(parse_frames(self._child.pieces()), self._child.extend_limits)
        except ConfinedWorkError as error:
            raise _unread(error) from None
        finally:
            self.kill()

    def kill(self) -> None:
        self._child.kill()


def _unread(reason: object) -> UnreadableError:
    return UnreadableError(f"could not be read: {reason}", "document_unread")


def assemble_document(frames: Iterator[dict[str, Any]], extend_limits: Callable[[int], None]) -> Document:
    """Assemble the document from frames; `extend_limits` adds seconds to the child's limits. Raises UnreadableError."""
    texts: list[str] = []
    pages: list[int] = []
    at, granted_seconds, continued = 0, 0, False
    for frame in frames:
        match frame:
            case {"reading": int(count)}:
                allowed_seconds = int(CPU_S_A_PAGE * max(0, min(count, MAX_PAGES)))
                extend_limits(allowed_seconds - granted_seconds)
                granted_seconds = max(granted_seconds, allowed_seconds)
            case {"page": str(text), "more": bool(more)}:
                text = clean(text)
                if not continued:
                    if pages:
                        texts.append(PAGE_BREAK)
                        at += len(PAGE_BREAK)
                    pages.append(at)
                texts.append(text)
                at += len(text)
                continued = more
                if at > MAX_CHARACTERS + len(PAGE_BREAK) * MAX_PAGES or len(pages) > MAX_PAGES:
                    raise _unread("its parser exceeded the limits")
            case {"refused": str(sentence), "code": str(code), "values": dict(values)}:
                figures = {clean(name): each for name, each in values.items() if isinstance(each, int)}
                raise UnreadableError(one_line(sentence, MAX_SENTENCE_CHARACTERS), clean(code), **figures)
            case {"missing": str()}:
                raise UnreadableError(
                    f"requires libraries that are not installed: {install_line('documents')}", "document_extra"
                )
            case {"kind": str(kind), "title": str(title), "warnings": list(warnings)} if pages:
                warning_lines = tuple(one_line(str(each)) for each in warnings[:MAX_WARNINGS])
                return Document(one_line(kind, 20), one_line(title), "".join(texts), tuple(pages), warning_lines)
            case _:
                raise _unread("its parser sent an invalid result")
    raise _unread("its parser stopped before the end")


def parse_frames(pieces: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the object in each complete frame. Raises UnreadableError for invalid frames."""
    buffer = bytearray()
    for piece in pieces:
        buffer += piece
        while len(buffer) >= 4:
            length = int.from_bytes(buffer[:4], "big")
            if length > MAX_FRAME_BYTES:
                raise _unread("its parser sent an invalid result")
            if len(buffer) < 4 + length:
                break
            try:
                frame = json.loads(buffer[4 : 4 + length])
            except (ValueError, RecursionError):
                frame = None
            if not isinstance(frame, dict):
                raise _unread("its parser sent an invalid result")
            del buffer[: 4 + length]
            yield frame
