"""Find the quotations in an answer, and locate the quoted words in the documents.

A quotation is marked as `[[2: words]]`, where 2 means the second document. Line breaks in a document count as spaces.
"""

from __future__ import annotations

import hashlib
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

MAX_QUOTE_CHARACTERS = 2_000
MAX_MARK_CHARACTERS = len("[[100: ]]")
MAX_CLAIMS = 64
LEAST_CLAIMED_WORDS = 5
LEAST_CLAIMED_CHARACTERS = 12  # in scripts without spaces
PIECE_CHARACTERS = 1 << 18
"""Characters searched at a time, so that other threads do not wait long for the interpreter lock."""

QUOTE_FIRST = "First quote what answers this as [[n: words]] from document n, or write [[none]]; then answer."
"""Last line of prompts with documents."""

_MARK = re.compile(r"\[\[(?:(\d{1,3}): |none\]\])")
_OPENING = re.compile(r"\[(?:\[(?:\d{1,3}(?::(?: .*)?)?|n(?:o(?:ne?)?)?)?)?\]?\Z", re.DOTALL)
_CODE = re.compile(r"```.*?(?:```|\Z)|`[^`\n]*`", re.DOTALL)
_CLAIM = re.compile(
    r"“([^“”]{8,1000})”|„([^“”„]{8,1000})[“”]|«([^«»]{8,1000})»|「([^「」]{8,1000})」|(?<!\w)\"([^\"\n]{8,1000})\""
)
_BLANKS = re.compile(r"\s+")
_HYPHENS = "-\u00ad\u2010\u2011\u2012\u2013\u2014\u2015"
_QUOTES = "'\u2018\u2019\"\u201c\u201d\u201e\u00ab\u00bb"
_FOLDED = {**dict.fromkeys(map(ord, _HYPHENS)), **dict.fromkeys(map(ord, _QUOTES), "'")}
# Documents may contain superscripts, as in m² and 10⁶, where an answer has m2 and 10^6.
_FOLDED |= str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁼⁽⁾ⁿⁱ", "0123456789+=()ni", "^⁻")
_WIDE = re.compile("[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff]")


@dataclass(frozen=True, slots=True)
class QuotedSpan:
    """A quotation in an answer, from `start` to `end`. `number`: its document's number; 0 for [[none]] and claims."""

    start: int
    end: int
    number: int
    words: str


def revision_of(text: str) -> str:
    """Return a hash of a document's text."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def format_for_prompt(name: str, text: str) -> str:
    return f"--- {name} ---\n{text}\n--- end of {name} ---"


def replace_newlines(text: str) -> str:
    """Replace each newline with a space. The length stays the same."""
    return text.replace("\n", " ")


def find_marked_quotes(answer: str) -> Iterator[QuotedSpan]:
    at, close = 0, -1
    while (found := _MARK.search(answer, at)) is not None:
        at = found.end()
        if found[1] is None:
            yield QuotedSpan(found.start(), at, 0, "")
            continue
        if close <= at:  # otherwise, the `]]` found for an earlier mark also ends this one
            close = answer.find("]]", at + 1)
        if close < 0:
            return
        if close - at <= MAX_QUOTE_CHARACTERS:
            yield QuotedSpan(found.start(), close + 2, int(found[1]), answer[at:close])
            at = close + 2


def find_claims(answer: str) -> Iterator[QuotedSpan]:
    """Yield claims: long texts in ordinary quotation marks, outside code and marked quotations."""
    # Long: at least five words, or twelve characters in scripts without spaces.
    blanked = _CODE.sub(lambda found: " " * len(found[0]), answer)
    parts, at = list[str](), 0
    for mark in find_marked_quotes(blanked):
        parts += [blanked[at : mark.start], " " * (mark.end - mark.start)]
        at = mark.end
    blanked = "".join([*parts, blanked[at:]])
    for count, found in enumerate(_CLAIM.finditer(blanked)):
        words = next(filter(None, found.groups()))
        if count < MAX_CLAIMS and (
            len(words.split()) >= LEAST_CLAIMED_WORDS or len(_WIDE.findall(words)) >= LEAST_CLAIMED_CHARACTERS
        ):
            yield QuotedSpan(found.start(), found.end(), 0, words)


def fold_text(text: str) -> str:
    """Return `text` in lower case, without hyphens or whitespace, and with uniform quotation marks."""
    return _BLANKS.sub("", text.translate(_FOLDED)).casefold()


def matches_when_folded(text: str, start: int, end: int, words: str) -> bool:
    """Return whether characters `start` to `end` of `text` equal `words` after folding."""
    return 0 <= start < end <= len(text) and fold_text(text[start:end]) == fold_text(words) != ""


def locate_quote(text: str, words: str) -> tuple[int, int] | None:
    """Return the start and end of `words` in `text`, or None. Slow for long texts."""
    # Searches for the exact words first, then for the folded ones.
    words = words.strip()
    if not fold_text(words) or len(words) > MAX_QUOTE_CHARACTERS:
        return None
    at = replace_newlines(text).find(replace_newlines(words))
    if at >= 0:
        return at, at + len(words)
    sought, overlap = fold_text(words), 4 * len(words) + 100
    for start in range(0, len(text), PIECE_CHARACTERS):
        piece = text[start : start + PIECE_CHARACTERS + overlap]
        at = fold_text(piece).find(sought)
        if at < 0:
            continue
        first = _unfolded_length(piece, at + 1) - 1
        last = first + _unfolded_length(piece[first:], len(sought))
        if matches_when_folded(text, start + first, start + last, words):
            return start + first, start + last
    return None


def find_missing_claims(texts: Iterable[str], claims: Iterable[QuotedSpan]) -> list[QuotedSpan]:
    """Return the claims that appear in none of the texts. Slow for long texts."""
    sought = {each: fold_text(each.words) for each in claims}
    for text in texts:
        for start in range(0, len(text), PIECE_CHARACTERS):
            piece = fold_text(text[start : start + PIECE_CHARACTERS + 4 * MAX_QUOTE_CHARACTERS])
            sought = {each: words for each, words in sought.items() if words not in piece}
    return list(sought)


def _unfolded_length(text: str, size: int) -> int:
    return bisect_left(range(len(text) + 1), size, key=lambda length: len(fold_text(text[:length])))


class MarkedQuoteParser:
    """Separate marked quotations from the text of an answer while it is generated."""

    def __init__(self) -> None:
        self._pending = ""

    def feed(self, text: str) -> Iterator[str | QuotedSpan]:
        """Yield text and complete quotations; an incomplete mark is held back."""
        self._pending += text
        at = 0
        for found in find_marked_quotes(self._pending):
            if found.start > at:
                yield self._pending[at : found.start]
            yield found
            at = found.end
        rest = self._pending[at:]
        opening = _OPENING.search(rest, max(0, len(rest) - MAX_QUOTE_CHARACTERS - MAX_MARK_CHARACTERS))
        cut = opening.start() if opening is not None else len(rest)
        if rest[:cut]:
            yield rest[:cut]
        self._pending = rest[cut:]

    def end(self) -> str:
        """Return the text that was held back."""
        rest, self._pending = self._pending, ""
        return rest
