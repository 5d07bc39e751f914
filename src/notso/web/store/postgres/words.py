"""Search words for PostgreSQL, split here because its parser depends on each database's locale.

A word is letters and digits without accents and case, as in SQLite's index.
"""

from __future__ import annotations

import re
import unicodedata
from collections import deque
from itertools import islice, zip_longest

from notso.web.store.protocol import HIT_BEGINS, HIT_ENDS

MAX_INDEXED_CHARACTERS = 262_144
MAX_WORD_CHARACTERS = 255  # PostgreSQL refuses words of 2 KiB
MAX_PLACES = 64  # of one word; PostgreSQL stores at most 255
LAST_PLACE = 16_383  # PostgreSQL's highest position
MAX_VECTOR_BYTES = 900_000  # PostgreSQL refuses vectors of 1 MiB
SNIPPET_WORDS = 14
BEFORE = 4  # words before the first match

_WORD = re.compile(r"[^\W_]+")


def vector_of(text: str) -> str:
    """Return a text as a `tsvector` literal; of very long texts only the first words are indexed."""
    places: dict[str, list[int]] = {}
    room = MAX_VECTOR_BYTES
    for place, word in enumerate(words_in(text[:MAX_INDEXED_CHARACTERS]), 1):
        known = places.get(word)
        if known is None:
            room -= len(word.encode()) + 8
            if room < 0:
                break
            known = places[word] = []
        if len(known) < MAX_PLACES and place <= LAST_PLACE:
            room -= 2
            known.append(place)
    return " ".join(f"'{word}'" + (":" + ",".join(map(str, at)) if at else "") for word, at in places.items())


def query_of(query: str) -> str:
    """Return a query as a `tsquery` literal; '' without words."""
    groups = [words for part in query.split() if (words := words_in(part))]
    quoted = [[f"'{word}'" for word in words] for words in groups]
    if quoted:
        # The last word may be a prefix. Words without a space between them must be adjacent.
        quoted[-1][-1] += ":*"
    return " & ".join(f"({' <-> '.join(words)})" for words in quoted)


def snippet_of(text: str, query: str) -> str:
    """Return SNIPPET_WORDS words around the first match, with all matches marked."""
    wanted = words_in(query)
    words = _WORD.finditer(text[:MAX_INDEXED_CHARACTERS])
    shown: deque[re.Match[str]] = deque(maxlen=BEFORE + 1)
    begins = True
    for word in words:
        begins = begins and len(shown) <= BEFORE
        shown.append(word)
        if _is_wanted(word[0], wanted):
            break
    line = [*shown, *islice(words, SNIPPET_WORDS - len(shown))]
    if not line:
        return ""
    ends = next(words, None) is None
    pieces = [text[: line[0].start()] if begins else "…"]
    for word, following in zip_longest(line, line[1:]):
        gap = text[word.end() : following.start()] if following is not None else ""
        pieces.append((HIT_BEGINS + word[0] + HIT_ENDS if _is_wanted(word[0], wanted) else word[0]) + gap)
    return "".join(pieces) + (text[line[-1].end() : MAX_INDEXED_CHARACTERS] if ends else "…")


def words_in(text: str) -> list[str]:
    """Return the folded words in order."""
    if text.isascii():
        return [word[:MAX_WORD_CHARACTERS] for word in _WORD.findall(text.lower())]
    return [word[:MAX_WORD_CHARACTERS] for each in _WORD.findall(text) for word in _WORD.findall(fold(each))]


def fold(text: str) -> str:
    """Remove accents and case."""
    if text.isascii():
        return text.lower()
    plain = unicodedata.normalize("NFKD", text)
    return "".join(each for each in plain if not unicodedata.combining(each)).casefold()


def _is_wanted(word: str, wanted: list[str]) -> bool:
    word = fold(word)
    return bool(wanted) and (word in wanted or word.startswith(wanted[-1]))
