"""Split a document's text into passages, the units that searches return and answers quote."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

PASSAGE_TOKENS = 220
# Estimated UTF-8 bytes per token. One number suits all scripts: in scripts with fewer characters per token, a character
# takes more bytes (Latin 1, Cyrillic 2, Chinese 3).
BYTES_PER_TOKEN = 4

# A sentence or a line. A period within a word or number, as in 3.14, does not end a sentence. The quantifiers are
# possessive, so that a run of periods takes linear time.
_CLOSING = r"[\"'”’»)\]」』）]*+"
_UNIT = re.compile(
    rf"(?:[^\n.!?。！？]++|[.!?]++(?!{_CLOSING}(?:\s|\Z)|[。！？]))*+(?:[.!?。！？]++{_CLOSING}|\n++)?\s*+"
)
_LONG_UNIT_CHARACTERS = 200


@dataclass(frozen=True, slots=True)
class Passage:
    """Characters `start` to `end` of the text, on page `page` (the first page is 1)."""

    page: int
    start: int
    end: int


def estimated_tokens(text: str) -> int:
    return -(-len(text.encode("utf-8", "replace")) // BYTES_PER_TOKEN)


def page_at(pages: Sequence[int], place: int) -> int:
    return max(1, bisect_right(pages, place))


def split_into_passages(text: str, pages: Sequence[int]) -> Iterator[Passage]:
    """Split each page of `text` into passages of up to about PASSAGE_TOKENS tokens, at ends of sentences or lines."""
    # The passages of a page have similar lengths, because BM25 would rank a short remainder above longer passages.
    for number, (start, end) in enumerate(zip(pages, (*pages[1:], len(text)), strict=True), start=1):
        units = [(first, estimated_tokens(text[first:last])) for first, last in _split_units(text, start, end)]
        rest = sum(tokens for _, tokens in units)
        remaining = -(-rest // PASSAGE_TOKENS)
        passage_start, total = start, 0
        for first, tokens in units:
            if total and remaining > 1 and total + tokens / 2 > rest / remaining:
                if passage := _trimmed_passage(text, number, passage_start, first):
                    yield passage
                rest, remaining = rest - total, remaining - 1
                passage_start, total = first, 0
            total += tokens
        if passage := _trimmed_passage(text, number, passage_start, end):
            yield passage


def _split_units(text: str, start: int, end: int) -> Iterator[tuple[int, int]]:
    # Yields sentences and lines; long ones are split, after a space if possible.
    at = start
    while at < end:
        found = _UNIT.match(text, at, end)
        last = max(at + 1, found.end() if found else end)
        while last - at > _LONG_UNIT_CHARACTERS:
            limit = at + _LONG_UNIT_CHARACTERS
            blank = text.rfind(" ", at + 1, limit)
            cut = blank + 1 if blank > at else limit
            yield at, cut
            at = cut
        yield at, last
        at = last


def _trimmed_passage(text: str, page: int, start: int, end: int) -> Passage | None:
    part = text[start:end]
    inner = part.strip()
    if not inner:
        return None
    start += len(part) - len(part.lstrip())
    return Passage(page, start, start + len(inner))


def group_passages(text: str, passages: Sequence[Passage], max_tokens: int) -> Iterator[tuple[Passage, int]]:
    """Join adjacent passages into volumes of up to about `max_tokens` tokens; yield (volume, last page number)."""
    # A page larger than `max_tokens` is divided between volumes. All other pages are kept whole.
    sizes = [estimated_tokens(text[each.start : each.end]) for each in passages]
    page_sizes: dict[int, int] = {}
    for passage, size in zip(passages, sizes, strict=True):
        page_sizes[passage.page] = page_sizes.get(passage.page, 0) + size
    first, total = 0, 0
    for at, (passage, size) in enumerate(zip(passages, sizes, strict=True)):
        begins_page = at == 0 or passages[at - 1].page != passage.page
        upcoming = page_sizes[passage.page] if begins_page else size
        if total and total + min(upcoming, max_tokens) > max_tokens:
            yield Passage(passages[first].page, passages[first].start, passages[at - 1].end), passages[at - 1].page
            first, total = at, 0
        total += size
    if total:
        yield Passage(passages[first].page, passages[first].start, passages[-1].end), passages[-1].page
