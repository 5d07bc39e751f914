"""Documents and search results of Anthropic's API, and citations of them in its form."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from notso.documents.citations import Mark, quotable
from notso.web.api.messages.fields import (
    ContentSource,
    DocumentBlock,
    FileSource,
    PdfSource,
    SearchResultBlock,
    TextBlock,
)
from notso.web.api.request_fields.fields import invalid
from notso.web.api.shared.given_documents import Files, GivenDocument, GivenDocuments, GivenFile, digest_of

BETWEEN_BLOCKS = "\n"
PLACES = {"document": "document_index", "search_result": "search_result_index"}


def files_in(body: Mapping[str, Any]) -> Iterator[GivenFile]:
    """Yield the PDF files of a request that may be invalid."""
    turns = body.get("messages")
    for at, turn in enumerate(turns if isinstance(turns, list) else ()):
        content = turn.get("content") if isinstance(turn, dict) else None
        yield from _files(content, f"messages.{at}.content")


def _files(content: Any, param: str) -> Iterator[GivenFile]:
    for at, block in enumerate(content if isinstance(content, list) else ()):
        if not isinstance(block, dict):
            continue
        source, place = block.get("source"), f"{param}.{at}"
        if block.get("type") == "tool_result":
            yield from _files(block.get("content"), f"{place}.content")
        elif block.get("type") == "document" and isinstance(source, dict):
            data, kind = source.get("data"), (source.get("type"), source.get("media_type"))
            if isinstance(data, str) and kind == ("base64", "application/pdf"):
                yield GivenFile(data, "document.pdf", f"{place}.source.data")
            elif source.get("type") == "file" and isinstance(source.get("file_id"), str):
                yield GivenFile("", "", f"{place}.source.file_id", source["file_id"])


def add_document(given: GivenDocuments, block: DocumentBlock | SearchResultBlock, files: Files) -> str:
    """Number a document or search result; return its text in the prompt. Raises ApiError (400)."""
    is_quoted = bool(block.citations and block.citations.enabled)
    kind = "search_result" if isinstance(block, SearchResultBlock) else "document"
    facts: dict[str, Any] = {"type": kind, "title": block.title}
    if isinstance(block, SearchResultBlock):
        text, starts = _joined(block.content)
        facts |= {"location": "search_result_location", "source": block.source}
        return given.add(GivenDocument(block.title, text, is_quoted, starts, facts))
    source = block.source
    if isinstance(source, PdfSource | FileSource):
        document = files.get(source.file_id if isinstance(source, FileSource) else digest_of(source.data))
        if document is None:
            raise invalid("messages", "PDF documents can be sent to /v1/messages only")
        text, starts = document.text, document.pages
        has_pages = document.kind == "PDF"
        facts |= {"location": "page_location" if has_pages else "char_location"}
        if isinstance(source, FileSource):
            facts |= {"file_id": source.file_id, "title": block.title or document.title}
    elif isinstance(source, ContentSource):
        blocks = [TextBlock(type="text", text=source.content)] if isinstance(source.content, str) else source.content
        text, starts = _joined(blocks)
        facts["location"] = "content_block_location"
    else:
        text, starts = source.data, (0,)
        facts["location"] = "char_location"
    return given.add(GivenDocument(facts["title"] or "", text, is_quoted, starts, facts), block.context or "")


def _joined(blocks: Sequence[TextBlock]) -> tuple[str, tuple[int, ...]]:
    texts = [block.text for block in blocks]
    sizes = (len(text) + len(BETWEEN_BLOCKS) for text in texts[:-1])
    return BETWEEN_BLOCKS.join(texts), tuple(accumulate(sizes, initial=0))


def citation_of(given: GivenDocuments, mark: Mark) -> dict[str, Any] | None:
    """Return a quotation in the API's form, or None where it is in no document."""
    found = given.found(mark.number, mark.words)
    if found is None:
        return None
    document, start, end = found
    facts = document.facts
    index = given.numbers(facts["type"]).index(mark.number)
    first, last = bisect_right(document.starts, start), bisect_right(document.starts, end - 1)
    cited: dict[str, Any] = {"type": facts["location"], "cited_text": document.text[start:end]}
    cited[PLACES[facts["type"]]] = index
    match facts["location"]:
        case "char_location":
            place = {"start_char_index": start, "end_char_index": end}
        case "page_location":
            place = {"start_page_number": first, "end_page_number": last + 1}
        case _:
            place = {"start_block_index": first - 1, "end_block_index": last}
    if facts["type"] == "search_result":
        return cited | {"source": facts["source"], "title": facts["title"]} | place
    return cited | {"document_title": facts["title"], "file_id": facts.get("file_id")} | place


def cited_text(given: GivenDocuments, block: TextBlock) -> str:
    """Return an earlier text block as it was generated: behind its quotations."""
    marks = []
    for each in block.citations or ():
        for kind, name in PLACES.items():
            index, numbers = each.get(name), given.numbers(kind)
            if isinstance(index, int) and 0 <= index < len(numbers) and isinstance(each.get("cited_text"), str):
                marks.append(f"[[{numbers[index]}: {quotable(each['cited_text'])}]]")
    return " ".join([*marks, block.text])
