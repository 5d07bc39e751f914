"""Index the words of a text, to find the bytes that can continue a quotation.

A quotation starts at the beginning of a word, and ends at the end of a word or a punctuation mark. The positions where
a quotation can start, called places, are sorted by the text that follows them. Places with the same beginning form an
interval, and each further token of a quotation narrows the interval by binary search. If the same QUOTE_BYTES bytes
follow several places, only one of these is listed.
"""

from __future__ import annotations

import copy
import json
import unicodedata
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

QUOTE_BYTES = 1024
"""Maximum length of a quotation, and of the text by which places are sorted, in bytes."""
MAX_WORD = 64
"""Maximum number of characters of a word. Longer words are split, so that a text without spaces has places, too."""
BLOCK_BYTES = 64
SAMPLED = 64
"""A search over all places starts with a sample, which contains every SAMPLED-th place."""
SAMPLES = 512
"""A search over a smaller interval starts with a sample of SAMPLES places, so that few steps remain."""
CLOSE = b"]]"
"""The end of a quotation is marked by these bytes, so a quotation cannot contain them."""

Ints: TypeAlias = npt.NDArray[np.int32]
Shorts: TypeAlias = npt.NDArray[np.uint16]
Flags: TypeAlias = npt.NDArray[np.bool_]
Keys: TypeAlias = npt.NDArray[np.uint64]

_OTHER, _SPACE, _LETTER, _DIGIT, _JOINER, _MID_LETTER, _MID_DIGIT, _MID_BOTH, _EXTEND, _ALONE = range(10)
# Scripts that are written without spaces: Thai, Lao, Myanmar, Khmer, Kana, Bopomofo, Yi and Chinese characters.
_WITHOUT_SPACES = (
    *((0x0E00, 0x0EFF), (0x1000, 0x109F), (0x1780, 0x17FF), (0x19E0, 0x19FF), (0x3005, 0x3007), (0x3021, 0x3029)),
    *((0x3031, 0x312F), (0x31A0, 0x31FF), (0x3400, 0x4DBF), (0x4E00, 0x9FFF), (0xA000, 0xA4CF), (0xA9E0, 0xA9FF)),
    *((0xAA60, 0xAA7F), (0xF900, 0xFAFF), (0xFF66, 0xFF9F), (0x1B000, 0x1B16F), (0x20000, 0x3FFFF)),
)
_MIDDLES = {
    **dict.fromkeys(":\u00b7\u0387\u055f\u05f4\u2027\ufe13\ufe55\uff1a", _MID_LETTER),
    **dict.fromkeys(",;\u037e\u0589\u060c\u060d\u066c\u07f8\u2044\ufe10\ufe14\ufe50\ufe54\uff0c\uff1b", _MID_DIGIT),
    **dict.fromkeys("'.\u2018\u2019\u2024\ufe52\uff07\uff0e", _MID_BOTH),
}


@dataclass(frozen=True, slots=True)
class QuoteLimits:
    """Limits on the length of a quotation, in words, or in characters of scripts without spaces.

    In mixed text, shares are added: half of `least_words` plus half of `least_characters` reaches the minimum.
    """

    least_words: int = 4
    most_words: int = 60
    least_characters: int = 8
    most_characters: int = 200
    most_length: int = 0  # in characters of any script; 0: unlimited


PROSE = QuoteLimits()


@dataclass(frozen=True, slots=True)
class Interval:
    """Places [low, high) of an index, which agree in the first `depth` bytes of their text."""

    low: int
    high: int
    depth: int = 0


class Places(NamedTuple):
    """Byte offsets where quotations can start and end, and their minimum and maximum lengths in bytes."""

    starts: Ints  # sorted by the text that follows
    shortest: Shorts  # length of the shortest quotation from each start
    longest: Shorts  # length of the longest quotation from each start
    ends: Ints  # ascending


class _Sample(NamedTuple):
    # Keys of the places `low`, `low + every`, ... of an interval. All places of the interval agree in their first
    # `depth` bytes of text; the key of a place is the next 8 bytes.

    low: int
    every: int
    keys: Keys


_NONE, _NO_LENGTHS = np.zeros(0, np.int32), np.zeros(0, np.uint16)
NO_PLACES = Places(_NONE, _NO_LENGTHS, _NO_LENGTHS, _NONE)


class TokenTexts:
    """Texts of tokens in one buffer. `sizes`: in bytes; -1: no text. `words[n]`: the 8 bytes at offset n."""

    def __init__(self, texts: Sequence[bytes]) -> None:
        sizes = np.array([len(each) for each in texts], np.int32)
        self.at = np.cumsum(sizes, dtype=np.int32) - sizes
        self.sizes = np.where(sizes > 0, sizes, -1).astype(np.int32)
        self._buffer = b"".join(texts) + bytes(16)
        self.words = np.ndarray((len(self._buffer) - 8,), ">u8", self._buffer, 0, (1,))

    def without_lead(self, lead: bytes) -> TokenTexts:
        """Return the texts that begin with byte `lead`, without that byte."""
        rest = copy.copy(self)
        begins = (self.words[self.at] >> np.uint64(56) == lead[0]) & (self.sizes > 0)
        rest.at, rest.sizes = self.at + 1, np.where(begins, self.sizes - 1, -1).astype(np.int32)
        return rest


class QuoteIndex:
    """The places of a text. Indexing takes about a second per 3 million characters.

    barred: texts that quotations cannot contain, besides CLOSE. escaped: quotations are written with JSON escapes.
    """

    def __init__(
        self,
        text: str,
        limits: QuoteLimits = PROSE,
        barred: Iterable[bytes] = (),
        *,
        escaped: bool = False,
        places: Places | None = None,
    ) -> None:
        written = json.dumps(text, ensure_ascii=False)[1:-1] if escaped else text
        # Text that cannot be quoted is replaced by 0xFF, which UTF-8 never contains, so no quotation crosses it.
        content = bytearray(written.encode("utf-8", "replace"))
        if escaped:  # the JSON grammar does not allow numeric escapes
            _mask_bytes(content, b"\\u00", 6)
        for bar in (CLOSE, *barred):
            _mask_bytes(content, bar, len(bar))
        self.content = bytes(content) + b"\xff" * (QUOTE_BYTES + 2 * BLOCK_BYTES)
        self._bytes = np.frombuffer(self.content, np.uint8)
        self._words = np.ndarray((len(self.content) - 8,), ">u8", self.content, 0, (1,))
        self._blocks = np.ndarray((len(self.content) - BLOCK_BYTES,), f"V{BLOCK_BYTES}", self.content, 0, (1,))
        if places is None:
            places = self._find_places(text, len(content), limits, escaped=escaped) if text else NO_PLACES
        self.places = places
        self.starts, self.shortest, self.longest, self.ends = places
        self._sampled = self._words[self.starts[::SAMPLED]].astype(np.uint64)

    @property
    def whole(self) -> Interval:
        return Interval(0, len(self.starts))

    def narrow_interval(self, interval: Interval, text: bytes) -> Interval:
        """Return the places of an interval at which the quotation continues with `text`."""

        def following(start: np.int32) -> bytes:
            at = int(start) + interval.depth
            return self.content[at : at + len(text)]

        low = bisect_left(self.starts, text, interval.low, interval.high, key=following)
        high = bisect_right(self.starts, text, low, interval.high, key=following)
        return Interval(low, high, interval.depth + len(text))

    def matching_tokens(self, interval: Interval, texts: TokenTexts, among: npt.NDArray[np.intp]) -> Flags:
        """Return, as a mask (n,), which of the tokens `among` can continue a quotation at `interval`."""
        # Binary search for all texts at once, 8 bytes at a time.
        at, sizes = texts.at[among], texts.sizes[among]
        agrees: Flags = np.logical_and(sizes == 0, interval.low < interval.high)
        rest, level = np.flatnonzero(sizes > 0), 0
        low = np.full(len(rest), interval.low, np.int32)
        high = np.full(len(rest), interval.high, np.int32)
        while len(rest):
            unread = np.minimum(sizes[rest] - level, 8)
            filled = np.uint64(0xFFFF_FFFF_FFFF_FFFF) >> (unread * 8 - 1).astype(np.uint64) >> np.uint64(1)
            last = texts.words[at[rest] + level].astype(np.uint64) | filled
            first = last ^ filled
            sample = self._sample(interval) if level == 0 else None
            low = self._bound(low, high, interval.depth + level, first, sample, is_upper=False)
            place = np.minimum(low, len(self.starts) - 1)
            words = self._words[self.starts[place] + (interval.depth + level)].astype(np.uint64)
            continues = (low < high) & (words <= last)
            ends = sizes[rest] <= level + 8
            agrees[rest] = continues & ends & (self.longest[place] >= interval.depth + sizes[rest])
            more = np.flatnonzero(continues & ~ends)
            rest, low, high, last = rest[more], low[more], high[more], last[more]
            if len(rest):
                high = self._bound(low, high, interval.depth + level, last, sample, is_upper=True)
            level += 8
        return agrees

    def _sample(self, interval: Interval) -> _Sample:
        if interval == self.whole:
            return _Sample(0, SAMPLED, self._sampled)
        every = max(1, (interval.high - interval.low) // SAMPLES)
        places = self.starts[interval.low : interval.high : every] + interval.depth
        return _Sample(interval.low, every, self._words[places].astype(np.uint64))

    def _bound(self, low: Ints, high: Ints, depth: int, keys: Keys, sample: _Sample | None, *, is_upper: bool) -> Ints:
        # Searches the interval [low, high) of each key. A place is compared with a key by the 8 bytes at offset `depth`
        # after the place. Returns the first place at or above the key (is_upper: above the key), or `high` if there is
        # none.
        if sample is not None:
            block = np.searchsorted(sample.keys, keys, "right" if is_upper else "left").astype(np.int32)
            low = np.maximum(low, sample.low + (block - 1) * sample.every)
            high = np.minimum(high, sample.low + block * sample.every)
        for _ in range(int((high - low).max()).bit_length()):
            middle = (low + high) >> 1
            words = self._words[self.starts[np.minimum(middle, len(self.starts) - 1)] + depth]
            goes_up = (words <= keys if is_upper else words < keys) & (low < high)
            low = np.where(goes_up, middle + 1, low)
            high = np.where(goes_up, high, middle)
        return low

    def may_end(self, interval: Interval, most: int = 512) -> bool:
        """Return whether a quotation at `interval` can end; only the first `most` places are checked."""
        last = min(interval.high, interval.low + most)
        places = self.starts[interval.low : last][self.shortest[interval.low : last] <= interval.depth] + interval.depth
        at = np.minimum(np.searchsorted(self.ends, places), len(self.ends) - 1)
        return bool((self.ends[at] == places).any()) if len(self.ends) else False

    def continuations(self, interval: Interval) -> tuple[Keys, Ints, Ints]:
        """Return, for each place (n,), the next 8 bytes, their offset, and the maximum length of a continuation."""
        max_lengths = self.longest[interval.low : interval.high].astype(np.int32) - interval.depth
        at = self.starts[interval.low : interval.high] + interval.depth
        return self._words[at].astype(np.uint64), at, max_lengths

    def _find_places(self, text: str, size: int, limits: QuoteLimits, *, escaped: bool) -> Places:
        points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
        classes = _classes(points)
        begins = _word_starts(classes)
        offsets = _byte_offsets(points, escaped=escaped)
        segments = np.flatnonzero(begins).astype(np.int32)
        after = np.append(segments[1:], len(points)).astype(np.int32)
        lettered = np.add.reduceat(((classes == _LETTER) | (classes == _DIGIT)).astype(np.int32), segments) > 0
        alone = classes[segments] == _ALONE
        # A word is 1 / least_words of the minimum length, and a character of a script without spaces is
        # 1 / least_characters of it. To add such fractions as integers, all are multiplied by least_words *
        # least_characters. The maximum is handled in the same way.
        least, most = limits.least_words * limits.least_characters, limits.most_words * limits.most_characters
        least_shares = np.where(alone, limits.least_words, np.where(lettered, limits.least_characters, 0))
        least_after = np.cumsum(least_shares)
        least_before = least_after - least_shares
        most_shares = np.where(alone, limits.most_words, np.where(lettered, limits.most_characters, 0))
        most_after = np.cumsum(most_shares)
        most_before = most_after - most_shares
        from_byte, to_byte = offsets[segments], offsets[after]
        last_class, last_byte = classes[after - 1], self._bytes[np.maximum(to_byte - 1, 0)]
        # A quotation cannot end next to a bracket, which would be read as part of CLOSE.
        brackets = (last_byte == ord("]")) | (self._bytes[to_byte] == ord("]"))
        closable = (last_class != _SPACE) & ~brackets & (last_byte != 0xFF)
        barred = np.flatnonzero(self._bytes[:size] == 0xFF).astype(np.int32)
        ends = np.flatnonzero(closable)
        at_ends = to_byte[ends]
        chosen = np.flatnonzero((lettered | alone) & (self._bytes[from_byte] != 0xFF))
        if not len(ends) or not len(chosen):
            return NO_PLACES
        begin = from_byte[chosen]
        limit = np.append(barred, size).astype(np.int32)[np.searchsorted(barred, begin)]
        limit = np.minimum(limit, begin + QUOTE_BYTES)
        last = np.minimum(
            np.searchsorted(at_ends, limit, "right"),
            np.searchsorted(most_after[ends], most_before[chosen] + most, "right"),
        )
        if limits.most_length:
            longest = segments[chosen] + limits.most_length
            last = np.minimum(last, np.searchsorted(after[ends], longest, "right"))
        first = np.searchsorted(least_after[ends], least_before[chosen] + least)
        fits = (first < last) & (last > 0)
        begin, first, last = begin[fits], first[fits], last[fits]
        order = self._sorted(begin)
        starts = begin[order]
        shortest = (at_ends[first[order]] - starts).astype(np.uint16)
        return Places(starts, shortest, (at_ends[last[order] - 1] - starts).astype(np.uint16), at_ends)

    def _sorted(self, begin: Ints) -> npt.NDArray[np.intp]:
        key = self._words[begin].astype(np.uint64)
        order = np.argsort(key, kind="stable")
        key = key[order]
        tied = np.zeros(len(order), np.bool_)  # equal to the previous place in all bytes compared so far
        tied[1:] = key[1:] == key[:-1]
        # Most remaining ties come from repeated text, so whole blocks are compared first.
        for depth in range(8, QUOTE_BYTES, BLOCK_BYTES):
            active, group = _tied_groups(tied)
            blocks = self._blocks[begin[order[active]] + depth]
            differs = np.append(False, (blocks[1:] != blocks[:-1]) & (group[1:] == group[:-1]))
            active = active[(np.bincount(group, differs) > 0)[group]]
            undecided = np.zeros(len(order), np.bool_)
            undecided[active] = tied[active]
            for within in range(depth, depth + BLOCK_BYTES, 8):
                active, group = _tied_groups(undecided)
                if not len(active):
                    break
                part = order[active]
                key = self._words[begin[part] + within].astype(np.uint64)
                if not ((key[1:] >= key[:-1]) | (group[1:] != group[:-1])).all():
                    by_key = np.lexsort((key, group))
                    part, key = part[by_key], key[by_key]
                    order[active] = part
                still = (key[1:] == key[:-1]) & (group[1:] == group[:-1])
                undecided[active[1:]] = tied[active[1:]] = still
        return order[~tied]


def _mask_bytes(content: bytearray, text: bytes, size: int) -> None:
    # Replaces `size` bytes at each occurrence of `text`. A regular expression would block other threads for longer.
    at = content.find(text)
    while at >= 0:
        content[at : at + size] = b"\xff" * size
        at = content.find(text, at + size)


def _tied_groups(tied: Flags) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
    # Returns the tied places and, for each of them, the number of its group.
    inside = tied.copy()
    inside[:-1] |= tied[1:]
    active = np.flatnonzero(inside)
    return active, np.cumsum(~tied[active])


def _classes(points: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint8]:
    # Classifies characters for word boundaries (UAX 29).
    table = np.zeros(0x110000, np.uint8)
    present = np.flatnonzero(np.bincount(points)).tolist()
    for point in present:
        character = chr(point)
        category = unicodedata.category(character)
        if any(low <= point <= high for low, high in _WITHOUT_SPACES) and category[0] in "LN":
            table[point] = _ALONE
        elif category[0] == "L" or category == "Nl":
            table[point] = _LETTER
        elif category == "Nd":
            table[point] = _DIGIT
        elif category == "Pc":
            table[point] = _JOINER
        elif category[0] == "M" or category == "Cf":
            table[point] = _EXTEND
        elif character.isspace():
            table[point] = _SPACE
        else:
            table[point] = _MIDDLES.get(character, _OTHER)
    classes = table[points]
    if ord('"') not in present or not any(0x05D0 <= each <= 0x05F2 or 0xFB1D <= each <= 0xFB4F for each in present):
        return classes
    bases = np.flatnonzero(classes != _EXTEND)
    base = points[bases]
    is_hebrew = ((base >= 0x05D0) & (base <= 0x05F2)) | ((base >= 0xFB1D) & (base <= 0xFB4F))
    is_inside = (base[1:-1] == ord('"')) & is_hebrew[:-2] & is_hebrew[2:]  # a quotation mark in an abbreviation
    classes[bases[1:-1][is_inside]] = _MID_LETTER
    return classes


def _word_starts(classes: npt.NDArray[np.uint8]) -> Flags:
    bases = np.flatnonzero(classes != _EXTEND)
    base_classes = classes[bases]
    word = (base_classes == _LETTER) | (base_classes == _DIGIT) | (base_classes == _JOINER)
    joined = np.zeros(len(base_classes), np.bool_)
    joined[1:] = (word[1:] & word[:-1]) | ((base_classes[1:] == _SPACE) & (base_classes[:-1] == _SPACE))
    for kind, middles in ((_LETTER, (_MID_LETTER, _MID_BOTH)), (_DIGIT, (_MID_DIGIT, _MID_BOTH))):
        sides = base_classes == kind
        middle = np.isin(base_classes[1:-1], middles) & sides[:-2] & sides[2:]
        joined[1:-1] |= middle
        joined[2:] |= middle
    begins = np.zeros(len(classes), np.bool_)
    begins[:1] = True
    starts = np.flatnonzero(~joined)
    length = np.arange(len(base_classes)) - np.repeat(starts, np.diff(np.append(starts, len(base_classes))))
    begins[bases[length % MAX_WORD == 0]] = True
    return begins


def _byte_offsets(points: npt.NDArray[np.uint32], *, escaped: bool) -> Ints:
    # Returns the offset of each character, and of the end.
    sizes = 1 + (points >= 0x80).astype(np.int32) + (points >= 0x800) + (points >= 0x10000)
    sizes[(points >= 0xD800) & (points < 0xE000)] = 1  # lone surrogates are encoded as "?"
    if escaped:
        short = np.isin(points, [ord(each) for each in '"\\\b\f\n\r\t'])
        sizes[short] = 2
        sizes[(points < 0x20) & ~short] = 6
    offsets = np.zeros(len(points) + 1, np.int32)
    np.cumsum(sizes, out=offsets[1:])
    return offsets
