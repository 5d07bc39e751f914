"""Index the passages of documents, and rank them by BM25."""

# The inverted index is an ordinary table rather than FTS5 (SQLite) or tsvector (PostgreSQL), for three reasons: both
# databases then rank passages in the same order; word frequencies are counted in the searched documents only; and
# deleted words are erased immediately, which FTS5 supports only since SQLite 3.42.

from __future__ import annotations

import math
import struct
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice

from notso.documents.passages import Passage
from notso.web.store.sql.search_words import split_words

# The usual value of B, 0.75, would rank short passages too high. Most passages are about equally long, and a short one
# is not more relevant: it is usually just the end of a page.
K1, B = 1.2, 0.3
MAX_QUERY_WORDS = 64
_POSTING = struct.Struct("<3H")
MAX_POSTINGS = 300_000  # can be ranked in about a second; if there are more, the most frequent words are ignored
MOST = 0xFFFF  # maximum of each field of a posting; passages with a higher number are not searchable


@dataclass(frozen=True, slots=True)
class TextIndex:
    """Passages of a text, their total number of words, and the packed postings of each word."""

    passages: tuple[Passage, ...]
    words: int
    postings: dict[str, bytes]


@dataclass(frozen=True, slots=True)
class Posting:
    """The number of occurrences of a word in a passage of `length` words."""

    passage: int
    count: int
    length: int


@dataclass(frozen=True, slots=True)
class WordPostings:
    """The postings of a word in a document. `order` breaks ties between equal scores."""

    word: str
    document: str
    order: str
    places: bytes


def index_text(text: str, passages: tuple[Passage, ...]) -> TextIndex:
    """Index the passages of a text, in linear time."""
    places: dict[str, list[int]] = {}
    total = 0
    for number, passage in enumerate(passages[: MOST + 1]):
        counts = Counter(index_words(text[passage.start : passage.end]))
        length = counts.total()
        total += length
        for word, count in counts.items():
            places.setdefault(word, []).extend((number, min(count, MOST), min(length, MOST)))
    return TextIndex(passages, total, {word: struct.pack(f"<{len(each)}H", *each) for word, each in places.items()})


def query_words(query: str) -> list[str]:
    """Return up to MAX_QUERY_WORDS distinct words of a query, sorted."""
    return sorted(dict.fromkeys(islice(index_words(query), 4 * MAX_QUERY_WORDS)))[:MAX_QUERY_WORDS]


def index_words(text: str) -> Iterator[str]:
    """Yield the words of a text, without the plural s."""
    for word in split_words(text):
        yield word[:-1] if len(word) > 3 and word[-1] == "s" and word[-2] != "s" and word.isascii() else word


def rank_passages(rows: Iterable[WordPostings], passages: int, words: int) -> list[tuple[str, int, float]]:
    """Return (document, passage, score) of passages in `rows`, best first.

    `passages` and `words` are the totals of the searched documents.
    """
    average = max(1.0, words / max(1, passages))
    scores: dict[tuple[str, str, int], float] = {}
    of_words: dict[str, list[WordPostings]] = {}
    for row in rows:
        of_words.setdefault(row.word, []).append(row)
    for word in sorted(_rarest_words(of_words)):  # sorted, because a sum of floats depends on the order
        found = [(row, posting) for row in of_words[word] for posting in postings(row.places)]
        rarity = math.log(1 + (passages - len(found) + 0.5) / (len(found) + 0.5))
        for row, posting in found:
            weight = posting.count * (K1 + 1) / (posting.count + K1 * (1 - B + B * posting.length / average))
            key = (row.order, row.document, posting.passage)
            scores[key] = scores.get(key, 0.0) + rarity * weight
    best = sorted(scores.items(), key=lambda each: (-each[1], each[0][0], each[0][2]))
    return [(document, number, score) for (_, document, number), score in best]


def _rarest_words(of_words: Mapping[str, Sequence[WordPostings]]) -> Iterator[str]:
    # The rarest word is always included, regardless of its number of postings.
    sizes = {word: sum(len(row.places) for row in rows) // _POSTING.size for word, rows in of_words.items()}
    used = 0
    for word in sorted(sizes, key=lambda each: (sizes[each], each)):
        used += sizes[word]
        if used > MAX_POSTINGS and used > sizes[word]:
            return
        yield word


def postings(places: bytes) -> Iterator[Posting]:
    """Yield the postings in a stored row."""
    for each in _POSTING.iter_unpack(places):
        yield Posting(*each)
