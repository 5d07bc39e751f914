"""Documents in requests: files read in child processes, and what answers may quote of them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from fastapi import Request

from notso.documents.citations import QUOTE_FIRST, framed, quotable
from notso.documents.reading import DocumentReader
from notso.documents.values import Document, UnreadableError
from notso.smollm3 import QUOTE_OF, Message, QuoteSource, RequestOptions
from notso.web.api.request_fields.fields import invalid
from notso.web.api.shared.api_request import ApiRequest
from notso.web.api.shared.services import api_services
from notso.web.api.shared.serving import T, read_body
from notso.web.edge.api_error import ApiError
from notso.web.values.child_work import child_work
from notso.web.values.visible_text import visible_line

R = TypeVar("R", bound=ApiRequest)

MAX_FILES = 32
MAX_NAME_CHARACTERS = 200

_DATA_URL = re.compile(r"\Adata:[\w.+/;=-]{0,200}?;base64,")

Files = Mapping[str, Document]
"""Documents by the digest of their base64 text."""
NO_FILES: Files = {}


@dataclass(frozen=True, slots=True)
class GivenFile:
    """A file in a request: base64 text, a name whose ending says what it is, and its field."""

    data: str
    name: str
    param: str


@dataclass(frozen=True, slots=True)
class GivenDocument:
    """A document of a prompt, with the name it has there.

    `starts` are the offsets of its pages or blocks; `facts` belong to one API.
    """

    name: str
    text: str
    is_quoted: bool
    starts: tuple[int, ...] = (0,)
    facts: Mapping[str, Any] = field(default_factory=dict)


class GivenDocuments:
    """The documents of a prompt, numbered from 1 in its order."""

    def __init__(self) -> None:
        self._documents: list[GivenDocument] = []

    def __bool__(self) -> bool:
        return bool(self._documents)

    @property
    def are_quoted(self) -> bool:
        return any(each.is_quoted for each in self._documents)

    def add(self, document: GivenDocument, context: str = "") -> str:
        """Number a document, and name it by that if it has no name; return it as the prompt contains it."""
        name = visible_line(document.name, MAX_NAME_CHARACTERS) or f"document {len(self._documents) + 1}"
        self._documents.append(replace(document, name=name))
        return framed(name, f"{context}\n\n{document.text}" if context else document.text)

    def numbers(self, kind: str) -> list[int]:
        """Return the numbers of the documents of one kind, in order."""
        return [number for number, each in enumerate(self._documents, start=1) if each.facts.get("type") == kind]

    def found(self, number: int, words: str) -> tuple[GivenDocument, int, int] | None:
        """Return a quotation's document and place, or None."""
        if not 0 < number <= len(self._documents) or not self._documents[number - 1].is_quoted:
            return None
        document = self._documents[number - 1]
        start = quotable(document.text).find(words)  # as the engine holds it to the text
        return None if start < 0 else (document, start, start + len(words))

    def asking(self, messages: Sequence[Message]) -> tuple[Message, ...]:
        """Return messages whose last question asks for quotations, if there is something to quote."""
        at = max((at for at, each in enumerate(messages) if each.role == "user"), default=-1)
        if at < 0 or not self.are_quoted:
            return tuple(messages)
        asked = replace(messages[at], content=f"{messages[at].content}\n\n{QUOTE_FIRST}")
        return (*messages[:at], asked, *messages[at + 1 :])

    def options(self, options: RequestOptions) -> RequestOptions:
        """Return options that hold quotations, or the quoting fields of a schema, to the documents."""
        if has_quoting_fields(options):
            return replace(options, sources=tuple(QuoteSource(each.text, each.name) for each in self._documents))
        if not self.are_quoted:
            return options
        sources = (QuoteSource(quotable(each.text) if each.is_quoted else "") for each in self._documents)
        return replace(options, sources=tuple(sources))


async def read_body_with_files(
    request: Request,
    files_in: Callable[[Mapping[str, Any]], Iterator[GivenFile]],
    parse: Callable[[Mapping[str, Any], Files], T],
) -> T:
    """Parse a body as `read_body` does, and the files in it, each in a child process.

    Raises ApiError (400) also for a file that cannot be read.
    """
    files: dict[str, Document] = {}
    body = await request.body()
    if b"base64" in body or b"file_data" in body:
        given = await read_body(request, lambda body: list(files_in(body)))
        if len(given) > MAX_FILES:
            raise invalid(given[-1].param, f"a request has at most {MAX_FILES} files")
        for each in given:
            if digest_of(each.data) not in files:
                files[digest_of(each.data)] = await _read(request, each)
    return await read_body(request, lambda body: parse(body, files))


def openai_files(body: Mapping[str, Any]) -> Iterator[GivenFile]:
    """Yield the files in messages of OpenAI's APIs, in a request that may be invalid."""
    for _, param, file in _file_parts(body):
        yield GivenFile(_payload(file), _name_of(file), param)


def with_texts(body: Mapping[str, Any], files: Files) -> Mapping[str, Any]:
    """Return a request to OpenAI's APIs with the text of its files in their place."""
    if not files:
        return body
    body = json.loads(json.dumps(body))  # changed below
    for part, _, file in _file_parts(body):
        text = framed(visible_line(_name_of(file), MAX_NAME_CHARACTERS), files[digest_of(_payload(file))].text)
        kind = "input_text" if part["type"] == "input_file" else "text"
        part.clear()
        part.update(type=kind, text=f"{text}\n")
    return body


def parsed_with_files(body: Mapping[str, Any], files: Files, parse: Callable[[Mapping[str, Any]], R]) -> R:
    """Parse a request to OpenAI's APIs with the text of its files in their place.

    Quoting fields of its schema name a file, or "prompt", which is the last message of the user.
    """
    asked = parse(with_texts(body, files))
    if not has_quoting_fields(asked.options):
        return asked
    sources = [QuoteSource(files[digest_of(_payload(file))].text, _name_of(file)) for _, _, file in _file_parts(body)]
    for each in reversed(asked.prompts[0]):
        if isinstance(each, Message) and each.role == "user":
            sources.append(QuoteSource(each.content, "prompt"))
            break
    return replace(asked, options=replace(asked.options, sources=tuple(sources)))


def has_quoting_fields(options: RequestOptions) -> bool:
    """Whether strings of a requested schema quote."""
    grammar = options.grammar
    return grammar is not None and grammar.kind == "json_schema" and QUOTE_OF in grammar.source


def _file_parts(body: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], str, dict[str, Any]]]:
    for name in ("messages", "input"):
        given = body.get(name)
        for at, message in enumerate(given if isinstance(given, list) else ()):
            for inner in ("content", "output"):
                parts = message.get(inner) if isinstance(message, dict) else None
                for index, part in enumerate(parts if isinstance(parts, list) else ()):
                    kind = part.get("type") if isinstance(part, dict) else None
                    file = part if kind == "input_file" else part.get("file") if kind == "file" else None
                    if isinstance(file, dict) and isinstance(file.get("file_data"), str):
                        yield part, f"{name}.{at}.{inner}.{index}", file


def _payload(file: Mapping[str, Any]) -> str:
    return _DATA_URL.sub("", file["file_data"], count=1)


def _name_of(file: Mapping[str, Any]) -> str:
    name, is_pdf = file.get("filename"), file["file_data"].startswith("data:application/pdf")
    return name if isinstance(name, str) and name else "document.pdf" if is_pdf else "document"


def digest_of(data: str) -> str:
    """Return the key of a file in Files."""
    return hashlib.sha256(data.encode("utf-8", "surrogatepass")).hexdigest()


async def _read(request: Request, file: GivenFile) -> Document:
    unconfined = api_services(request).shared.settings.unconfined_documents
    try:
        data = base64.b64decode(file.data, validate=True)
        return await child_work(lambda: DocumentReader(data, file.name, unconfined), DocumentReader.read)
    except (binascii.Error, ValueError):
        raise invalid(file.param, f"{file.param} is not base64") from None
    except UnreadableError as error:
        raise ApiError(400, "invalid_value", f"{file.param}: the file {error}", param=file.param) from None
