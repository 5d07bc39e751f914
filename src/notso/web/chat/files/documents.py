"""Read the JSON documents of an imported file: JSON or JSON Lines, plain, gzipped or in a zip archive.

This module imports no third-party packages, so that the child process that parses files starts quickly.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, BinaryIO, NamedTuple, NoReturn

from notso.documents.values import ZIP_ERRORS
from notso.text_file import NotTextError, decode_text, utf8_stream

codecs.lookup("cp437")  # zipfile needs it for names; loaded now, because a confined child process cannot load it

MAX_UNPACKED_BYTES = 256 << 20
MAX_ENTRIES = 100_000  # per archive
MAX_OBJECTS = 1_000_000  # per document; the longest known chats have a fifth as many
CHUNK = 1 << 20

PICTURES = frozenset({"png", "jpg", "jpeg", "gif", "webp", "svg", "bmp", "heic", "avif", "tif", "tiff"})
_BLANK = re.compile(r"[ \t\r\n]*")
_GENERATED = frozenset({"chat.html"})  # in ChatGPT's archives, a rendering of the same conversations


class ImportFormatError(Exception):
    """A file, or a chat in it, cannot be read. `key` names a message in `words`; `params` fill its placeholders.

    detail: suffix of the key of the message that replaces `{detail}`, or "".
    """

    def __init__(self, key: str, detail: str = "", **params: str | int) -> None:
        super().__init__(key, detail, params)
        self.key = key
        self.detail = detail
        self.params = params


class JsonDocument(NamedTuple):
    """A JSON value. `listed`: whether it is an entry of a top-level list."""

    value: Any
    listed: bool


END_OF_FILE = JsonDocument(None, listed=False)
"""Marker that follows the documents of each file in an archive."""


def omitted_kind(name: str) -> str:
    """Return the kind of an omitted file: "pictures" or "files"."""
    return "pictures" if name.rpartition(".")[2].lower() in PICTURES else "files"


def documents(body: bytes, left_out: Counter[str]) -> Iterator[JsonDocument]:
    """Yield the documents of a file. `left_out` counts an archive's damaged entries and its files other than JSON.

    Raises ImportFormatError, but for damaged entries only if no entry can be read.
    """
    if body.startswith((b"PK\x03\x04", b"PK\x05\x06")):
        yield from _read_archive(body, left_out)
    elif body.startswith(b"\x1f\x8b"):
        yield from _Decompressor().documents(gzip.GzipFile(fileobj=io.BytesIO(body)))
    else:
        try:
            text = decode_text(body)
        except NotTextError:
            raise ImportFormatError("import_broken", "text") from None
        yield from _parse_values(io.StringIO(text).read)


def _read_archive(body: bytes, left_out: Counter[str]) -> Iterator[JsonDocument]:
    decompressor = _Decompressor()
    problem: ImportFormatError | None = None
    readable = False
    try:
        archive = zipfile.ZipFile(io.BytesIO(body))
    except ZIP_ERRORS:
        raise ImportFormatError("import_archive") from None
    entries = archive.infolist()
    if len(entries) > MAX_ENTRIES:
        raise ImportFormatError("import_too_much", "entries", limit=MAX_ENTRIES)
    for entry in entries:
        name = entry.filename.rpartition("/")[2]
        if not name or name in _GENERATED or entry.filename.startswith("__MACOSX/"):
            continue
        if not name.lower().endswith((".json", ".jsonl", ".ndjson")):
            left_out[omitted_kind(name)] += 1
            continue
        try:
            try:
                file = archive.open(entry)
            except ZIP_ERRORS:
                raise ImportFormatError("import_archive") from None
            with file:
                for document in decompressor.documents(file):
                    readable = True
                    yield document
            yield END_OF_FILE
        except ImportFormatError as error:
            if error.key == "import_too_much":
                raise
            problem = problem or error
            left_out["damaged"] += 1
    if problem is not None and not readable:
        raise problem


class _Decompressor:
    def __init__(self) -> None:
        self._remaining_bytes = MAX_UNPACKED_BYTES

    def documents(self, file: Any) -> Iterator[JsonDocument]:
        try:
            decode = codecs.getincrementaldecoder("utf-8")()
            stream: BinaryIO = utf8_stream(file)
        except ZIP_ERRORS:
            raise ImportFormatError("import_archive") from None

        def read(size: int) -> str:
            text = ""
            while not text:  # a chunk may end within a character
                try:
                    data = stream.read(size)
                    text = decode.decode(data, final=not data)
                except (NotTextError, UnicodeDecodeError):
                    raise ImportFormatError("import_broken", "text") from None
                except ZIP_ERRORS:
                    raise ImportFormatError("import_archive") from None
                self._remaining_bytes -= len(data)
                if self._remaining_bytes < 0:
                    raise ImportFormatError("import_too_much", "unpacked", limit=MAX_UNPACKED_BYTES)
                if not data:
                    break
            return text

        yield from _parse_values(read)


def _parse_values(read: Callable[[int], str]) -> Iterator[JsonDocument]:
    # Yields one value at a time to save memory. The entries of a top-level list are yielded separately.
    text = _JsonText(read)
    while first := text.peek():
        if first != "[":
            yield JsonDocument(text.value(), listed=False)
            continue
        text.skip()
        if text.peek() == "]":
            text.skip()
            continue
        while True:
            yield JsonDocument(text.value(), listed=True)
            mark = text.peek()
            if mark not in (",", "]"):
                raise text.syntax_error()
            text.skip()
            if mark == "]":
                break


class _JsonText:
    def __init__(self, read: Callable[[int], str]) -> None:
        self._read = read
        self._decoder = json.JSONDecoder(object_pairs_hook=_unique_object, parse_constant=refuse_constant)
        self._text = ""
        self._at = self._before = 0
        self._ended = False

    def peek(self) -> str:
        """Return the next non-blank character, or '' at the end."""
        while True:
            blank = _BLANK.match(self._text, self._at)
            self._at = blank.end() if blank else self._at
            if self._at < len(self._text):
                return self._text[self._at]
            if self._ended:
                return ""
            self._read_more()

    def skip(self) -> None:
        self._at += 1

    def value(self) -> Any:
        self.peek()
        while True:
            try:
                value, end = self._decoder.raw_decode(self._text, self._at)
            except json.JSONDecodeError as error:
                if self._ended:
                    raise self.syntax_error(error.pos) from None
            except RecursionError:
                raise ImportFormatError("import_broken", "depth") from None
            except ValueError:
                raise ImportFormatError("import_broken", "value") from None
            else:
                # A number at the end of a chunk may continue in the next chunk.
                if end < len(self._text) or self._ended:
                    self._at = end
                    return value
            self._read_more()

    def syntax_error(self, at: int | None = None) -> ImportFormatError:
        place = self._before + (self._at if at is None else at)
        return ImportFormatError("import_broken", "syntax", place=place)

    def _read_more(self) -> None:
        # Double the buffered text each time. A value that spans chunks is parsed again after each chunk, which would
        # take quadratic time if the chunks were of equal size.
        piece = self._read(max(CHUNK, len(self._text) - self._at))
        self._before += self._at
        self._text = self._text[self._at :] + piece
        self._at = 0
        self._ended = not piece
        if self._text.count("{") > MAX_OBJECTS:
            raise ImportFormatError("import_too_much", "objects", limit=MAX_OBJECTS)


def _unique_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a duplicate key")
    return found


def refuse_constant(name: str) -> NoReturn:
    """Reject NaN and Infinity (`parse_constant` hook of JSON decoders)."""
    raise ValueError(f"{name} is not JSON")
