"""Program of the sandboxed child process, which reads a document from stdin and writes frames to stdout.

A frame is a length (4 bytes, big-endian) and a JSON object of at most 1 MiB:

- `{"reading": pages}`: number of pages, in total or so far; each page extends the time limits;
- `{"page": text, "more": bool}`: text of a page; if `more`, the next such frame continues the page;
- `{"kind": ..., "title": ..., "warnings": [...]}`: the last frame of a document;
- `{"refused": sentence, "code": ..., "values": ...}`: the last frame if the document cannot be read;
- `{"missing": module}`: the only frame if a required library is not installed.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

from notso.documents import kinds
from notso.documents.values import (
    LIMITS,
    MAX_CHARACTERS,
    MAX_WARNINGS,
    MIB,
    UNCONFINED,
    UnreadableError,
    check_pages,
    clean,
    one_line,
    too_many_characters,
)
from notso.system.confinement import Rights, confine, lacking

FRAME_CHARACTERS = 150_000
"""Characters of text per frame. A character takes at most 6 bytes in JSON, so frames stay below MAX_FRAME_BYTES."""

_LENGTH = struct.Struct(">I")


def main() -> None:
    """Read the document from stdin. Arguments: the file name's extension, and UNCONFINED or nothing."""
    missing_features = [] if UNCONFINED in sys.argv[2:] else lacking()
    write_document_frames(
        sys.stdin.buffer, sys.stdout.buffer, sys.argv[1], missing_features, lambda: confine(Rights.COMPUTE, LIMITS)
    )


def write_document_frames(
    file: BinaryIO, output: BinaryIO, extension: str, missing_features: list[str], enter_sandbox: Callable[[], None]
) -> None:
    # The sandbox prevents opening files. It is entered after all imports, which open files, but before the document is
    # parsed.
    try:
        try:
            container = kinds.detect_container(file.read(1024), extension)
            kinds.preload_modules(container)
        except ImportError as error:
            _write(output, {"missing": str(error.name)})
            return
        enter_sandbox()
        _write_pages(file, container, extension, output, missing_features)
    except UnreadableError as error:
        _write_error(output, error)
    except MemoryError:
        memory = LIMITS.memory_bytes // MIB
        _write_error(output, UnreadableError(f"needs more than {memory:,} MiB of memory to be read", "document_memory"))
    except RecursionError:
        _write_error(output, UnreadableError("is nested too deeply", "document_deep"))
    except Exception as error:  # on a damaged file, a library's parser may raise any exception
        sentence = f"is damaged, or of an unsupported variant ({type(error).__name__})"
        _write_error(output, UnreadableError(sentence, "document_damaged"))


def _write_error(output: BinaryIO, error: UnreadableError) -> None:
    _write(output, {"refused": str(error), "code": error.code, "values": error.values})


def _write_pages(
    file: BinaryIO, container: kinds.Container, extension: str, output: BinaryIO, missing: list[str]
) -> None:
    warnings: list[str] = []
    kind, title, pages = kinds.read(
        file, container, extension, warnings, lambda pages: _write(output, {"reading": pages})
    )
    if missing and kind in kinds.NATIVE:
        raise UnreadableError(
            f"is not read, because this system lacks {' and '.join(missing)} (see notso doctor)", "document_unconfined"
        )
    left, visible = MAX_CHARACTERS, False
    for count, page in enumerate(pages, start=1):
        check_pages(count)
        text = clean(page)
        left -= len(text)
        if left < 0:
            raise too_many_characters()
        visible = visible or (not text.isspace() and bool(text))
        _write(output, {"reading": count})
        for start in range(0, len(text) or 1, FRAME_CHARACTERS):
            end = start + FRAME_CHARACTERS
            _write(output, {"page": text[start:end], "more": end < len(text)})
    if not visible:
        raise UnreadableError("has no text", "document_no_text")
    _write(output, {"kind": kind, "title": one_line(title()), "warnings": warnings[:MAX_WARNINGS]})


def _write(output: BinaryIO, frame: dict[str, Any]) -> None:
    data = json.dumps(frame, ensure_ascii=False).encode("utf-8", "replace")
    output.write(_LENGTH.pack(len(data)) + data)
    output.flush()
