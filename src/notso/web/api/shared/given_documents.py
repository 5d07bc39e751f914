"""Parse files in API requests (in child processes), and limit quotations in answers to the text of documents."""

from __future__ import annotations

import asyncio
import base64
import binascii
import copy
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import Request

from notso.documents.citations import QUOTE_FIRST, format_for_prompt, replace_newlines
from notso.documents.reading import DocumentReader
from notso.documents.values import MAX_FILE_BYTES, MIB, Document, UnreadableError
from notso.smollm3 import QUOTE_OF, Message, QuoteSource, RequestOptions
from notso.web.api.request_fields.fields import invalid_field, unsupported_field
from notso.web.api.shared.api_request import ApiRequest, last_user_message
from notso.web.api.shared.services import ApiServices, api_services
from notso.web.api.shared.serving import T, read_body
from notso.web.edge.access import owner_of
from notso.web.edge.errors import ApiError
from notso.web.store.records import StoredFile
from notso.web.values.child_work import child_work
from notso.web.values.durations import current_ms
from notso.web.values.visible_text import sanitize_line

R = TypeVar("R", bound=ApiRequest)

DOCUMENT_PURPOSES = ("user_data", "assistants")
MAX_FILES = 32
MAX_NAME_CHARACTERS = 200

_FILE_FIELDS = ("file_data", "file_id")
_INLINED_FIELDS = (*_FILE_FIELDS, "filename")
_NO_URL = "send file_data with a filename, or file_id; URLs are not fetched"
_DATA_URL = re.compile(r"data:[\w.+/;=-]{0,200}?;base64,")

Files = Mapping[str, Document]
"""Parsed documents by `RequestFile.key`: a stored file's id, or the digest of the base64 text and the file's name."""
NO_FILES: Files = {}


@dataclass(frozen=True, slots=True)
class RequestFile:
    """A file in the field `param`, given as base64 text or as a stored file's id."""

    data: str
    name: str
    param: str
    file_id: str = ""
    key: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "key", self.file_id or file_key(self.data, self.name))


@dataclass(frozen=True, slots=True)
class RequestDocument:
    name: str  # shown in the prompt
    text: str
    is_quoted: bool  # whether the answer may quote this document
    starts: tuple[int, ...] = (0,)  # character offsets of its pages or blocks
    facts: Mapping[str, Any] = field(default_factory=dict)  # API-specific values for citations


class RequestDocuments:
    """The documents of a prompt, numbered from 1."""

    def __init__(self) -> None:
        self._documents: list[RequestDocument] = []
        self._numbers: dict[str, list[int]] = {}  # type -> numbers; avoids searching thousands of documents

    def __bool__(self) -> bool:
        return bool(self._documents)

    @property
    def has_quotable(self) -> bool:
        return any(each.is_quoted for each in self._documents)

    def add(self, document: RequestDocument, context: str = "") -> str:
        """Add a document; return its text for the prompt, preceded by `context`."""
        name = sanitize_line(document.name, MAX_NAME_CHARACTERS) or f"document {len(self._documents) + 1}"
        self._documents.append(replace(document, name=name))
        self._numbers.setdefault(str(document.facts.get("type")), []).append(len(self._documents))
        return format_for_prompt(name, f"{context}\n\n{document.text}" if context else document.text)

    def numbers(self, kind: str) -> Sequence[int]:
        return self._numbers.get(kind, ())

    def find_quotation(self, number: int, words: str) -> tuple[RequestDocument, int, int] | None:
        if not 0 < number <= len(self._documents) or not self._documents[number - 1].is_quoted:
            return None
        document = self._documents[number - 1]
        start = replace_newlines(document.text).find(words)  # the engine takes quotations from the same normalized text
        return None if start < 0 else (document, start, start + len(words))

    def with_quotation_request(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """If a document may be quoted, append a request for quotations to the last user message."""
        at = last_user_message(messages)
        if at < 0 or not self.has_quotable:
            return tuple(messages)
        message = replace(messages[at], content=f"{messages[at].content}\n\n{QUOTE_FIRST}")
        return (*messages[:at], message, *messages[at + 1 :])

    def options(self, options: RequestOptions) -> RequestOptions:
        """Return options that limit quotations to the text of the documents."""
        if has_quoting_fields(options):
            return replace(options, sources=tuple(QuoteSource(each.text, each.name) for each in self._documents))
        if not self.has_quotable:
            return options
        sources = (QuoteSource(replace_newlines(each.text) if each.is_quoted else "") for each in self._documents)
        return replace(options, sources=tuple(sources))


async def read_body_with_files(
    request: Request,
    find_files: Callable[[Mapping[str, Any]], Iterator[RequestFile]],
    parse: Callable[[Mapping[str, Any], Files], T],
) -> T:
    """Parse a body like `read_body`, and its files. Also raises ApiError: 404 (unknown file), 400 (unreadable file)."""

    def find_or_parse(body: Mapping[str, Any]) -> T | list[RequestFile]:
        return list(find_files(body)) or parse(body, NO_FILES)

    found = await read_body(request, find_or_parse)
    if not isinstance(found, list):
        return found
    if len(found) > MAX_FILES:
        raise invalid_field(found[-1].param, f"a request can contain at most {MAX_FILES} files")
    files: dict[str, Document] = {}
    for each in found:
        if each.key not in files:
            files[each.key] = await _read(request, each)
    return await read_body(request, lambda body: parse(body, files))


async def read_openai_request(request: Request, parse: Callable[[Mapping[str, Any]], R]) -> R:
    """Parse an OpenAI request with its files replaced by their text."""
    return await read_body_with_files(
        request, find_openai_files, lambda body, files: parse_with_files(body, files, parse)
    )


def find_openai_files(body: Mapping[str, Any]) -> Iterator[RequestFile]:
    """Return the files in an unvalidated OpenAI request."""
    return (each for _, _, each in _file_parts(body))


def inline_files(body: Mapping[str, Any], files: Files) -> Mapping[str, Any]:
    """Replace the files in an OpenAI request with their text."""
    if not files:
        return body
    body = copy.deepcopy(dict(body))
    for part, file, request_file in _file_parts(body):
        document = files[request_file.key]
        text = format_for_prompt(_shown_name(file, document), document.text)
        kind = "input_text" if part["type"] == "input_file" else "text"
        for name in [name for name, value in file.items() if name in _INLINED_FIELDS or value in (None, "")]:
            del file[name]
        if not part.get("file"):  # the file's other fields are kept, so that the response lists them as ignored
            part.pop("file", None)
        part.update(type=kind, text=f"{text}\n")
    return body


def parse_with_files(body: Mapping[str, Any], files: Files, parse: Callable[[Mapping[str, Any]], R]) -> R:
    """Parse an OpenAI request, replacing its files with their text.

    The sources of quoting fields (see `has_quoting_fields`) are the files and the last user message, which is named
    "prompt".
    """
    api_request = parse(inline_files(body, files))
    if not has_quoting_fields(api_request.options):
        return api_request
    named_files = ((file, files[each.key]) for _, file, each in _file_parts(body))
    sources = [QuoteSource(document.text, _shown_name(file, document)) for file, document in named_files]
    messages = api_request.messages
    if (at := last_user_message(messages)) >= 0:
        sources.append(QuoteSource(messages[at].content, "prompt"))
    return replace(api_request, options=replace(api_request.options, sources=tuple(sources)))


def has_quoting_fields(options: RequestOptions) -> bool:
    # A quoting field is a string property of the requested JSON schema. Its value must be a quotation from the source
    # that the schema names with the keyword QUOTE_OF.
    grammar = options.grammar
    return grammar is not None and grammar.kind == "json_schema" and QUOTE_OF in grammar.source


def _file_parts(body: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any], RequestFile]]:
    # For each part that contains a file, yields the part, the object with the file's fields, and the RequestFile.
    for name in ("messages", "input"):
        items = body.get(name)
        for at, message in enumerate(items if isinstance(items, list) else ()):
            for inner in ("content", "output"):
                parts = message.get(inner) if isinstance(message, dict) else None
                for index, part in enumerate(parts if isinstance(parts, list) else ()):
                    kind = part.get("type") if isinstance(part, dict) else None
                    file = part if kind == "input_file" else part.get("file") if kind == "file" else None
                    place = f"{name}.{at}.{inner}.{index}"
                    if isinstance(file, dict) and isinstance(url := file.get("file_url"), str) and url:
                        param = f"{place}.file_url" if file is part else f"{place}.file.file_url"
                        raise unsupported_field(param, f"{param} is not supported: {_NO_URL}")
                    if isinstance(file, dict) and any(isinstance(file.get(each), str) for each in _FILE_FIELDS):
                        yield part, file, _to_request_file(file, place)


def _to_request_file(file: Mapping[str, Any], param: str) -> RequestFile:
    name, data, file_id = file.get("filename"), file.get("file_data"), file.get("file_id")
    name, data, file_id = (each if isinstance(each, str) else "" for each in (name, data, file_id))
    if data and file_id:
        raise invalid_field(param, f"{param}: file_data and file_id contradict each other; send one of them")
    if file_id:
        return RequestFile("", name, param, file_id)
    default_name = "document.pdf" if data.startswith("data:application/pdf") else "document"
    url = _DATA_URL.match(data)
    return RequestFile(data[url.end() :] if url else data, name or default_name, param)


def _shown_name(file: Mapping[str, Any], document: Document) -> str:
    name = file.get("filename")
    return sanitize_line(name if isinstance(name, str) else "", MAX_NAME_CHARACTERS) or document.title or "document"


def file_key(data: str, name: str) -> str:
    # The name is part of the key, because it determines the file's format and title.
    return f"{hashlib.sha256(data.encode('utf-8', 'surrogatepass')).hexdigest()} {name}"


async def get_stored_file(services: ApiServices, owner: str, file_id: str, param: str = "file_id") -> StoredFile:
    """Return a stored file. Raises ApiError (404, naming `param`) if unknown or expired."""
    file = await services.shared.store.records.file(owner, file_id)
    if file is None or is_expired(file):
        raise ApiError(404, "not_found", "no file with that id is stored", param=param)
    return file


def is_expired(file: StoredFile) -> bool:
    return 0 < file.expires_ms <= current_ms()


async def _read(request: Request, file: RequestFile) -> Document:
    services, owner, name = api_services(request), owner_of(request), file.name
    try:
        if file.file_id:
            stored = await get_stored_file(services, owner, file.file_id, file.param)
            name = stored.name
            if stored.size > MAX_FILE_BYTES:
                raise UnreadableError(f"is larger than {MAX_FILE_BYTES // MIB} MiB")
        unconfined = services.shared.settings.unconfined_documents
        # Load or decode the file only during the owner's turn, so that waiting requests do not hold files in memory.
        async with services.shared.documents.turn(owner):
            if file.file_id:
                data = b"".join([part async for part in services.shared.store.records.content(owner, file.file_id)])
            else:
                data = await asyncio.to_thread(_decode_base64, file.data)
            document = await child_work(lambda: DocumentReader(data, name, unconfined), DocumentReader.read)
        return replace(document, title=sanitize_line(name, MAX_NAME_CHARACTERS))
    except (binascii.Error, ValueError):
        raise invalid_field(file.param, f"{file.param} is not base64") from None
    except UnreadableError as error:
        raise invalid_field(file.param, f"{file.param}: the file {error}") from None


def _decode_base64(text: str) -> bytes:
    # Some encoders, such as the base64 command, wrap lines; others omit the padding.
    encoded = text.encode("ascii").translate(None, b" \t\r\n\f\v")
    return base64.b64decode(encoded + b"=" * (-len(encoded) % 4), validate=True)
