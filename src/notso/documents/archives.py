"""Read untrusted ZIP archives and XML. Sizes are checked before inflating, and XML entities are rejected."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, Literal, NamedTuple, NoReturn, TypeVar
from xml.parsers import expat

from notso.documents.values import MIB, ZIP_ERRORS, UnreadableError

M = TypeVar("M", bound=Callable[..., None])

MAX_ENTRIES = 2_000
MAX_INFLATED_BYTES = 256 * MIB
MAX_RATIO = 200
RATIO_EXEMPT_BYTES = MIB  # the compression ratio of smaller members is not limited
MAX_DEPTH = 256
MAX_REPEATED = 1_000
"""Limit on the repetitions of a cell or space, and on the columns that a cell spans: even small files can declare huge
numbers."""

TRUE = ("1", "true", "on")
_STEPS = {"start": 1, "text": 0, "end": -1}  # change of the nesting depth
_PIECE = 1 << 16
_LOCAL_HEADER_BYTES = 30


def has_zip_signature(file: BinaryIO) -> bool:
    file.seek(0)
    return file.read(4) == b"PK\x03\x04"


class Archive:
    """A ZIP archive. Raises UnreadableError if it is damaged, encrypted or too large."""

    def __init__(self, file: BinaryIO) -> None:
        file.seek(0)
        try:
            self._zip = zipfile.ZipFile(file)
        except ZIP_ERRORS:
            raise UnreadableError("is damaged: it is not a complete archive", "document_damaged") from None
        members = self._zip.infolist()
        if len(members) > MAX_ENTRIES:
            raise UnreadableError(f"contains more than {MAX_ENTRIES:,} files")
        if any(each.flag_bits & 0x1 for each in members):
            raise UnreadableError("is encrypted", "document_encrypted")
        if sum(each.file_size for each in members) > MAX_INFLATED_BYTES:
            raise UnreadableError(f"inflates to more than {MAX_INFLATED_BYTES // MIB} MiB", "document_inflates")
        for each in members:
            if each.file_size > RATIO_EXEMPT_BYTES and each.file_size > MAX_RATIO * max(1, each.compress_size):
                raise UnreadableError(f"has a compression ratio above {MAX_RATIO}", "document_inflates")
        end = 0
        for each in sorted(members, key=lambda member: member.header_offset):
            if each.header_offset < end:
                raise UnreadableError("is damaged: its files overlap", "document_damaged")
            end = each.header_offset + _LOCAL_HEADER_BYTES + each.compress_size
        self._remaining = MAX_INFLATED_BYTES
        self.names = {each.filename for each in members}

    def pieces(self, name: str) -> Iterator[bytes]:
        """Yield a member's bytes. Raises UnreadableError."""
        try:
            with self._zip.open(name) as member:
                while piece := member.read(_PIECE):
                    self._remaining -= len(piece)
                    if self._remaining < 0:
                        raise UnreadableError(
                            f"inflates to more than {MAX_INFLATED_BYTES // MIB} MiB", "document_inflates"
                        )
                    yield piece
        except KeyError:
            raise UnreadableError("is damaged: a part is missing", "document_damaged") from None
        except ZIP_ERRORS:
            raise UnreadableError("is damaged: a part cannot be inflated", "document_damaged") from None

    def read(self, name: str) -> bytes:
        """Return a member's bytes. Raises UnreadableError."""
        return b"".join(self.pieces(name))


class XMLEvent(NamedTuple):
    """A start tag, an end tag, or text between two tags. `name`: the tag's name without its namespace, or the text."""

    kind: Literal["start", "end", "text"]
    name: str
    attributes: dict[str, str]

    @property
    def is_start(self) -> bool:
        return self.kind == "start"

    def get(self, attribute: str, default: str = "") -> str:
        return self.attributes.get(attribute, default)

    def number(self, attribute: str) -> int:
        value = self.get(attribute, "1")
        return int(value) if value.isascii() and value.isdecimal() and len(value) < 10 else MAX_REPEATED

    @property
    def is_on(self) -> bool:
        # Properties in Office Open XML are on if they have no value.
        return self.attributes.get("val", "1") in TRUE


class Tags(dict[tuple[str, str], Callable[..., None]]):
    """A reader's methods by kind and name of the tags that they handle.

    The decorator `@reads("<p>", "</r>", "t")` marks the method for start tags of `p`, end tags of `r`, and both tags of
    `t`.
    """

    def __call__(self, *tags: str) -> Callable[[M], M]:
        def register(method: M) -> M:
            for tag in tags:
                kinds = ("end",) if tag.startswith("</") else ("start",) if tag.startswith("<") else ("start", "end")
                self.update({(kind, tag.strip("</>")): method for kind in kinds})
            return method

        return register


def xml_events(pieces: Iterator[bytes]) -> Iterator[XMLEvent]:
    """Parse XML. Raises UnreadableError if it is invalid, nested too deeply, or declares a document type."""
    # Without a document type, XML cannot declare entities, which could expand to any size or refer to other files.
    events: list[XMLEvent] = []
    depth = 0

    def on_start(name: str, attributes: dict[str, str]) -> None:
        nonlocal depth
        depth += 1
        if depth > MAX_DEPTH:
            raise UnreadableError(f"is nested more than {MAX_DEPTH} levels deep", "document_deep")
        # An attribute with a namespace takes precedence over one without a namespace: `r:id` over `id`.
        values = {_local_name(key): value for key, value in sorted(attributes.items(), key=lambda each: " " in each[0])}
        events.append(XMLEvent("start", _local_name(name), values))

    def on_end(name: str) -> None:
        nonlocal depth
        depth -= 1
        events.append(XMLEvent("end", _local_name(name), {}))

    def on_declaration(*_: object) -> NoReturn:
        raise UnreadableError("declares an XML document type, which is not supported")

    parser = expat.ParserCreate(namespace_separator=" ")
    parser.buffer_text = True
    parser.StartElementHandler, parser.EndElementHandler = on_start, on_end
    parser.CharacterDataHandler = lambda text: events.append(XMLEvent("text", text, {}))
    parser.StartDoctypeDeclHandler = parser.EntityDeclHandler = parser.ExternalEntityRefHandler = on_declaration
    try:
        for piece in pieces:
            parser.Parse(piece, False)
            yield from events
            events.clear()
        parser.Parse(b"", True)
    except (expat.ExpatError, ValueError, LookupError):  # LookupError: unknown encoding
        raise UnreadableError("is damaged: its XML is malformed", "document_damaged") from None
    yield from events


def check_xml(pieces: Iterator[bytes]) -> None:
    """Raise UnreadableError if XML is malformed. This is several times faster than `xml_events`."""
    parser = expat.ParserCreate()
    try:
        for piece in pieces:
            parser.Parse(piece, False)
        parser.Parse(b"", True)
    except (expat.ExpatError, ValueError, LookupError):
        raise UnreadableError("is damaged: its XML is malformed", "document_damaged") from None


def outside(events: Iterable[XMLEvent], is_omitted: Callable[[XMLEvent], bool]) -> Iterator[XMLEvent]:
    """Yield the events outside the elements whose start tags satisfy `is_omitted`."""
    depth = 0
    for event in events:
        step = _STEPS[event.kind]
        if depth or (step > 0 and is_omitted(event)):
            depth += step
        else:
            yield event


def paired(events: Iterable[XMLEvent], *, is_element: bool = False) -> Iterator[XMLEvent]:
    """Yield the events, except end tags without a start tag. `is_element`: stop at the first such tag."""
    depth = 0
    for event in events:
        if depth or event.kind != "end":
            depth += _STEPS[event.kind]
            yield event
        elif is_element:
            return


def _local_name(name: str) -> str:
    return name.rpartition(" ")[2]
