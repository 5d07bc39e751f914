"""Split text into words for full-text search, for both databases, so that they find the same texts.

A word consists of letters and digits, in lower case and without accents, and may end in + or # (`c++`, `c#`). In
Chinese, Japanese and Korean text, where spaces do not reliably separate words, each pair of adjacent characters is a
word, and so is the last character of each uninterrupted run.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from notso.web.store.protocol import HIT_BEGINS, HIT_ENDS

MAX_INDEXED_CHARACTERS = 262_144
MAX_WORD_CHARACTERS = 255  # PostgreSQL rejects words of 2 KiB or more
MAX_PLACES = 64  # positions stored per word; PostgreSQL stores at most 256
LAST_PLACE = 16_383  # PostgreSQL's maximum position
MAX_VECTOR_BYTES = 900_000  # PostgreSQL rejects vectors of 1 MiB or more
MAX_QUERY_WORDS = 64
SNIPPET_CHARACTERS, BEFORE_CHARACTERS = 120, 30
LEAST_SIMILAR = 0.4  # minimum similarity of two words: number of shared trigrams divided by the number of all trigrams
SHORTEST_SIMILAR = 4  # shorter words are not replaced by similar ones
MOST_SIMILAR = 5  # maximum number of words that replace a word of the query

_RANGES = (
    "\u1100-\u11ff\u3005-\u3007\u3040-\u30ff\u3100-\u318f\u31a0-\u31bf\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff"
    "\ua960-\ua97f\uac00-\ud7ff\uf900-\ufaff\uff66-\uffdc\U00020000-\U0003ffff"
)
_CJK = rf"(?:(?![\W_])[{_RANGES}])"
_PART = re.compile(rf"(?P<cjk>{_CJK}+)|(?:(?![{_RANGES}])[^\W_])+(?:[+#]{{1,3}}(?![^\W_]))?")
_RUN = re.compile(rf"{_CJK}+")


@dataclass(frozen=True, slots=True)
class Term:
    """Query condition: adjacent words (the last may be incomplete if `is_prefix`), or any of them if `is_choice`."""

    words: tuple[str, ...]
    is_prefix: bool = False
    is_choice: bool = False


def split_words(text: str) -> Iterator[str]:
    """Yield the normalized words of a text in order."""
    for part in _PART.finditer(text):
        if part["cjk"]:
            yield from _bigrams(_fold_cjk(part[0]))
        elif part[0].isascii():
            yield part[0].lower()[:MAX_WORD_CHARACTERS]
        else:
            yield from (word[:MAX_WORD_CHARACTERS] for word in _fold_words(part[0]))


def _fold_words(text: str) -> list[str]:
    # Normalization may split a word: `½` becomes `1` and `2`.
    return [word[0] for word in _PART.finditer(fold(text))]


def _fold_cjk(text: str) -> str:
    return unicodedata.normalize("NFKC", text).casefold()


def _bigrams(run: str) -> Iterator[str]:
    yield from (run[at : at + 2] for at in range(len(run) - 1))
    yield run[-1]


def fold(text: str) -> str:
    if text.isascii():
        return text.lower()
    plain = unicodedata.normalize("NFKD", text)
    return "".join(each for each in plain if not unicodedata.combining(each)).casefold()


def indexed_text(text: str) -> str:
    return " ".join(split_words(text[:MAX_INDEXED_CHARACTERS]))


def parse_query(query: str) -> list[Term]:
    """Return the conditions of a query, all of which a match must satisfy."""
    terms: list[Term] = []
    for group in query.split():
        adjacent: list[str] = []
        for part in _PART.finditer(group):
            if not part["cjk"]:
                adjacent += split_words(part[0])
                continue
            if adjacent:
                terms.append(Term(tuple(adjacent)))
                adjacent = []
            run = _fold_cjk(part[0])
            pairs = [run[at : at + 2] for at in range(len(run) - 1)]
            terms += [Term((pair,)) for pair in dict.fromkeys(pairs)] or [Term((run,), is_prefix=True)]
        if adjacent:
            terms.append(Term(tuple(adjacent)))
    if terms and not _RUN.match(terms[-1].words[-1]):
        terms[-1] = Term(terms[-1].words, is_prefix=True)  # the last word may be incomplete
    return terms[:MAX_QUERY_WORDS]


def fts5_query(terms: Sequence[Term]) -> str:
    return " AND ".join(
        "(" + " OR ".join(f'"{word}"' for word in term.words) + ")"
        if term.is_choice
        else f'"{" ".join(term.words)}"' + ("*" if term.is_prefix else "")
        for term in terms
    )


def tsquery(terms: Sequence[Term]) -> str:
    return " & ".join(
        "("
        + (" | " if term.is_choice else " <-> ").join(f"'{word}'" for word in term.words)
        + (":*" if term.is_prefix else "")
        + ")"
        for term in terms
    )


def to_tsvector(text: str) -> str:
    """Convert text to a `tsvector` literal. Only the first words of very long text are included."""
    places: dict[str, list[int]] = {}
    remaining_bytes = MAX_VECTOR_BYTES
    for place, word in enumerate(split_words(text[:MAX_INDEXED_CHARACTERS]), 1):
        positions = places.get(word)
        if positions is None:
            remaining_bytes -= len(word.encode()) + 8
            if remaining_bytes < 0:
                break
            positions = places[word] = []
        if len(positions) < MAX_PLACES and place <= LAST_PLACE:
            remaining_bytes -= 2
            positions.append(place)
    return " ".join(f"'{word}'" + (":" + ",".join(map(str, at)) if at else "") for word, at in places.items())


def similar_terms(terms: Iterable[Term], vocabulary: Iterable[str]) -> list[Term] | None:
    """Replace words of 4 to 40 characters with similar words from the vocabulary, in time linear in its size.

    Returns None if there are no such words, or if one has no similar word.
    """
    trigrams = {word: _trigrams(word) for term in terms for word in term.words if _may_be_misspelled(word)}
    if not trigrams:
        return None
    found: dict[str, list[tuple[float, str]]] = {word: [] for word in trigrams}
    for candidate in vocabulary:
        candidate_trigrams: frozenset[str] | None = None
        for word, word_trigrams in trigrams.items():
            if abs(len(candidate) - len(word)) > 3:
                continue
            candidate_trigrams = candidate_trigrams if candidate_trigrams is not None else _trigrams(candidate)
            share = len(word_trigrams & candidate_trigrams) / len(word_trigrams | candidate_trigrams)
            if share >= LEAST_SIMILAR:
                found[word].append((-share, candidate))
    result: list[Term] = []
    for term in terms:
        for word in term.words:
            if word not in trigrams:
                result.append(Term((word,), is_prefix=term.is_prefix and word == term.words[-1]))
            elif found[word]:
                result.append(Term(tuple(each for _, each in sorted(found[word])[:MOST_SIMILAR]), is_choice=True))
            else:
                return None
    return result


def _may_be_misspelled(word: str) -> bool:
    return SHORTEST_SIMILAR <= len(word) <= 40 and not _RUN.match(word)


def _trigrams(word: str) -> frozenset[str]:
    padded = f"  {word} "
    return frozenset(padded[at : at + 3] for at in range(len(padded) - 2))


def extract_snippet(text: str, query: str, terms: Sequence[Term]) -> str:
    """Return the part of a text around its first match, with all matches marked."""
    text = text[:MAX_INDEXED_CHARACTERS]
    spans = list(_matches(text, query, terms))
    start = max(0, spans[0][0] - BEFORE_CHARACTERS) if spans and len(text) > SNIPPET_CHARACTERS else 0
    while 0 < start < len(text) and text[start - 1].isalnum() and text[start].isalnum() and not _RUN.match(text[start]):
        start -= 1
    end = min(len(text), start + SNIPPET_CHARACTERS)
    while end < len(text) and text[end - 1].isalnum() and text[end].isalnum() and not _RUN.match(text[end]):
        end += 1
        if end - start > 2 * SNIPPET_CHARACTERS:
            break
    pieces, at = ["…" if start else ""], start
    for begins, ends in spans:
        if begins < at or begins >= end:
            continue
        ends = min(ends, end)
        pieces += [text[at:begins], HIT_BEGINS, text[begins:ends], HIT_ENDS]
        at = ends
    return "".join(pieces) + text[at:end] + ("…" if end < len(text) else "")


def _matches(text: str, query: str, terms: Sequence[Term]) -> Iterator[tuple[int, int]]:
    exact = {word for term in terms for word in term.words}
    prefixes = tuple(term.words[-1] for term in terms if term.is_prefix)
    runs = sorted({_fold_cjk(run[0]) for run in _RUN.finditer(query)}, key=len, reverse=True)
    cjk_pattern = re.compile("|".join(map(re.escape, runs))) if runs else None
    last = len(text)
    for part in _PART.finditer(text):
        if part.start() > last:
            return
        if not part["cjk"]:
            words = [part[0].lower()] if part[0].isascii() else _fold_words(part[0])
            if any(word in exact or word.startswith(prefixes) for word in words if prefixes or exact):
                last = min(last, part.start() + SNIPPET_CHARACTERS)
                yield part.span()
        elif cjk_pattern is not None and len(_fold_cjk(part[0])) == len(part[0]):
            for run in cjk_pattern.finditer(_fold_cjk(part[0])):
                last = min(last, part.start() + run.start() + SNIPPET_CHARACTERS)
                yield part.start() + run.start(), part.start() + run.end()
