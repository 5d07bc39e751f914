"""Constrain quotations in an answer to match their source verbatim.

`[[2: ` starts a quotation from the second source. Until `]]`, only tokens that continue a passage of this source are
allowed. A place is a position in a source where a quotation can start (see quote_index).
"""

from __future__ import annotations

import contextlib
import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from notso.smollm3.sampling.quote_index import (
    CLOSE,
    PROSE,
    QUOTE_BYTES,
    Interval,
    Keys,
    Places,
    QuoteIndex,
    QuoteLimits,
    TokenTexts,
)
from notso.smollm3.sampling.quote_index_child import compute_places
from notso.smollm3.sampling.quote_index_files import QuoteIndexFiles
from notso.smollm3.sampling.sampler import Floats
from notso.smollm3.sampling.structured_output import StructuredOutput, mask_except
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.request_options import QuoteSource
from notso.system.confinement import ConfinedWorkError

OPEN = re.compile(rb"\[\[(\d{1,3}):\Z")
OPEN_WITHIN = re.compile(rb"\[\[(\d{1,3}): ")
MARK_BYTES = 8
NARROW = 256
"""If the text of a quotation so far occurs at no more than this many places, all of its continuations are allowed.
Otherwise, to limit the time for a mask, only continuations among the LIKELIEST most likely tokens are allowed. If none
of these tokens continues the quotation, the continuations at the first FIRST_PLACES places are allowed."""
LIKELIEST = 512
FIRST_PLACES = 64
ROW = 32
LOOKUPS = 512
"""Approximate maximum number of lookups of tokens with 8 bytes or more, per mask. After these lookups, only shorter
tokens are allowed."""
MIN_REMAINING = 48
"""A quotation can start only if at least this many tokens remain."""
LAST_TOKENS = 8
"""If fewer tokens remain, a quotation ends as soon as it can."""
CHARACTERS_INDEXED_HERE = 1_000_000
"""Maximum length of a text that this process indexes; longer texts are indexed in a child process."""
CHARACTERS_FILED = 50_000
"""The index of a text of at least this length is stored in a file if the text is part of a pinned reading (a named
prompt prefix, see block_pool)."""
CACHED_BYTES = 8_000_000
"""Maximum total size of the indexed texts kept in memory for later requests. The latest text is always kept."""

Ids = npt.NDArray[np.intp]
Ints = npt.NDArray[np.int32]


class QuoteVocabulary:
    """The bytes of ordinary tokens, arranged for finding the tokens that continue a text."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        barred = tokenizer.special_ids | tokenizer.unused_ids
        self.size = tokenizer.vocab_size
        self.texts = [b"" if each in barred else text for each, text in enumerate(tokenizer.all_bytes)]
        self.ids = {text: each for each, text in enumerate(self.texts) if text and b"\xff" not in text}
        closers = [each for text, each in self.ids.items() if text.startswith(CLOSE)]
        self.closers = np.array(closers or [self.ids[CLOSE[:1]]], np.intp)
        self.spaced = np.array([each for text, each in self.ids.items() if text[:1] == b" "], np.intp)
        self.marking = [each for text, each in self.ids.items() if b": " in text]
        ordinary = [text if text in self.ids else b"" for text in self.texts]
        self.tokens = TokenTexts(ordinary)
        short = sorted((_key(text), each) for text, each in self.ids.items() if len(text) < 8)
        self._short = np.array([key for key, _ in short], np.uint64)
        self._short_ids = np.array([each for _, each in short], np.intp)
        long: dict[bytes, set[int]] = {}
        for text in self.ids:
            if len(text) >= 8:
                long.setdefault(text[:8], set()).add(len(text))
        # Sizes are stored as tuples, because the garbage collector does not traverse tuples of integers.
        self._long = {head: tuple(sizes) for head, sizes in long.items()}
        self.control_texts = [
            tokenizer.token_bytes(each) for each in tokenizer.special_ids if len(tokenizer.token_bytes(each)) > 1
        ]

    @cached_property
    def spaced_tokens(self) -> TokenTexts:
        """Texts of the tokens that begin with a space, without that space."""
        return self.tokens.without_lead(b" ")

    def matching_prefixes(self, index: QuoteIndex, interval: Interval, lead: bytes) -> Ids:
        """Return the tokens that can come next at the places of an interval, possibly with duplicates.

        lead: up to one byte that must come first.
        """
        keys, at, max_lengths = index.continuations(interval)
        if not len(keys):
            return np.zeros(0, np.intp)
        max_lengths = max_lengths + len(lead)
        if lead:
            keys = keys >> np.uint64(8) | np.uint64(lead[0] << 56)
        first = np.flatnonzero(np.append(True, keys[1:] != keys[:-1]))  # places are sorted by the text after them
        distinct, max_length = keys[first], np.maximum.reduceat(max_lengths, first)
        sizes = np.arange(1, 8, dtype=np.uint64)
        unread = np.uint64(64) - sizes * np.uint64(8)
        cut = (distinct[:, None] >> unread << unread | sizes)[max_length[:, None] >= sizes.astype(np.int32)]
        place = np.minimum(np.searchsorted(self._short, cut), len(self._short) - 1)
        ids = self._short_ids[place[self._short[place] == cut]]
        longer = np.array(self._long_prefixes(index, distinct, first, at, max_lengths, lead), np.intp)
        return np.append(ids, longer)

    def _long_prefixes(
        self, index: QuoteIndex, distinct: Keys, first: Ids, at: Ints, max_lengths: Ints, lead: bytes
    ) -> list[int]:
        ids, left = list[int](), LOOKUPS
        for head, begin, end in zip(distinct.tolist(), first.tolist(), [*first[1:].tolist(), len(at)], strict=True):
            sizes = self._long.get(head.to_bytes(8, "big"))
            if sizes is None or left <= 0:
                continue
            most = max(sizes)
            places = zip(at[begin:end].tolist(), max_lengths[begin:end].tolist(), strict=True)
            texts = {lead + index.content[place : place + min(length, most) - len(lead)] for place, length in places}
            for text in sorted(texts)[: max(1, left // len(sizes))]:
                left -= len(sizes)
                ids += [self.ids[text[:size]] for size in sizes if size <= len(text) and text[:size] in self.ids]
        return ids


class Quotation:
    """An unfinished quotation."""

    # lead: up to one byte that must come before the quotation.
    def __init__(self, index: QuoteIndex, vocabulary: QuoteVocabulary, lead: bytes = b"") -> None:
        self._index = index
        self._vocabulary = vocabulary
        self._lead = lead
        self._interval = index.whole

    @property
    def may_end(self) -> bool:
        return not self._lead and self._interval.depth > 0 and self._index.may_end(self._interval)

    def allowed_tokens(self, logits: Floats) -> Ids:
        """Return tokens (n,) that continue the quotation. With more than NARROW places, some tokens may be missing."""
        vocabulary, interval = self._vocabulary, self._interval
        if interval.high - interval.low > NARROW:
            among = _top_tokens(logits[: vocabulary.size], LIKELIEST)
            texts = vocabulary.spaced_tokens if self._lead else vocabulary.tokens
            continuing = among[self._index.matching_tokens(interval, texts, among)]
            if len(continuing):
                return continuing
            interval = Interval(interval.low, interval.low + FIRST_PLACES, interval.depth)
        return vocabulary.matching_prefixes(self._index, interval, self._lead)

    def consume(self, text: bytes) -> None:
        if text and self._lead:
            text, self._lead = text[1:], b""
        if text:
            self._interval = self._index.narrow_interval(self._interval, text)


class QuotedOutput(StructuredOutput):
    """Constrains quotations. Outside them, `inner` applies."""

    # started: the part of the answer that the prompt already contains.
    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary: QuoteVocabulary,
        indices: Sequence[QuoteIndex],
        inner: StructuredOutput | None,
        started: str = "",
    ) -> None:
        super().__init__(tokenizer)
        self._vocabulary = vocabulary
        self._indices = indices
        self._inner = inner
        self.constrains_tool_calls = inner is not None and inner.constrains_tool_calls
        self._open: Quotation | None = None
        self._is_half_closed = False  # the last token was the first byte of CLOSE, but may be part of the quotation
        self._tail = b""
        self._left = 1 << 31
        self._resume(started.encode())

    def _resume(self, started: bytes) -> None:
        if self._in_call:
            return
        found = next(reversed([*OPEN_WITHIN.finditer(started)]), None)
        words = b"" if found is None else started[found.end() :]
        if found is None or CLOSE in words or len(words) > QUOTE_BYTES:
            self._track_marks(started)
            return
        self._track_marks(found[0])
        for byte in words:
            self._quote(bytes((byte,)))
        if self._open is None or not len(self._allowed(self._open, np.zeros(self._vocabulary.size, np.float32))):
            self._open, self._is_half_closed, self._tail = None, False, started[-MARK_BYTES:]  # not inside a quotation

    def restrict(self, logits: Floats, in_reasoning: bool) -> Floats:
        if self._open is not None and not in_reasoning:
            return mask_except(logits, self._allowed(self._open, logits))
        restricted = logits if self._inner is None else self._inner.restrict(logits, in_reasoning)
        if in_reasoning or self._in_call:
            return restricted
        if OPEN.search(self._tail):
            index = self._openable_source(self._tail)
            allowed = (
                np.zeros(0, np.intp)
                if index is None
                else Quotation(index, self._vocabulary, b" ").allowed_tokens(restricted)
            )
            allowed_logits = restricted[allowed]
            restricted = restricted.copy()
            restricted[self._vocabulary.spaced] = -np.inf
            restricted[allowed] = allowed_logits
        elif masked := self._mark_completing_tokens():
            restricted = restricted.copy()
            restricted[masked] = -np.inf
        return restricted

    def permits(self, token: int, in_reasoning: bool, left: int) -> bool:
        return self._inner is None or self._open is not None or self._inner.permits(token, in_reasoning, left)

    def narrow(self, logits: Floats, token: int, left: int) -> Floats:
        return logits if self._inner is None else self._inner.narrow(logits, token, left)

    def consume(self, token: int, in_reasoning: bool, left: int | None = None) -> bool:
        self._left = self._left if left is None else left
        text = b"" if in_reasoning else self._vocabulary.texts[token]
        if self._open is not None and not in_reasoning:
            self._quote(text)
            return False
        starts = self._inner is not None and self._inner.consume(token, in_reasoning, left)
        if self._in_call:
            self._tail = b""
        else:
            self._track_marks(text)
        return starts

    def _quote(self, text: bytes) -> None:
        closer = CLOSE[1:] if self._is_half_closed else CLOSE
        if self._open is None:
            return
        if text.startswith(closer):
            self._open, self._tail = None, text[len(closer) :][-MARK_BYTES:]
            self._is_half_closed = False
        else:
            self._is_half_closed = text == CLOSE[:1] and self._open.may_end
            self._open.consume(text)

    def _allowed(self, quotation: Quotation, logits: Floats) -> Ids:
        closers = self._vocabulary.closers if quotation.may_end else np.zeros(0, np.intp)
        if self._is_half_closed:
            closers = np.array([self._vocabulary.ids[CLOSE[1:]]], np.intp)
        if len(closers) and self._left < LAST_TOKENS:
            return closers
        return np.concatenate((quotation.allowed_tokens(logits), closers))

    @property
    def _in_call(self) -> bool:
        return self._inner is not None and self._inner.in_call

    def _track_marks(self, text: bytes) -> None:
        if OPEN.search(self._tail) and text.startswith(b" "):
            if (index := self._openable_source(self._tail)) is not None:
                self._open = Quotation(index, self._vocabulary, b" ")
                self._open.consume(text)
            self._tail = b""
            return
        self._tail = (self._tail + text)[-MARK_BYTES:]
        if self._tail.endswith(b" ") and (index := self._openable_source(self._tail[:-1])) is not None:
            self._open, self._tail = Quotation(index, self._vocabulary), b""

    def _openable_source(self, tail: bytes) -> QuoteIndex | None:
        # Returns the index of the source that could be quoted after `tail` and a space, or None.
        found = OPEN.search(tail)
        number = int(found[1]) if found else 0
        if not 0 < number <= len(self._indices) or self._left < MIN_REMAINING:
            return None
        index = self._indices[number - 1]
        return index if index.whole.high else None

    def _mark_completing_tokens(self) -> list[int]:
        # Returns tokens that would complete `[[N: ` but not start a quotation. These are tokens with further text after
        # the mark and, if source N cannot be opened, all tokens that complete the mark.
        return [
            each
            for each in (self._vocabulary.marking if b"[" in self._tail else ())
            if (found := OPEN_WITHIN.search(written := self._tail + self._vocabulary.texts[each]))
            and found.end() > len(self._tail)
            and not (found.end() == len(written) and self._openable_source(written[:-1]) is not None)
        ]


@dataclass(frozen=True, slots=True)
class PinnedReading:
    """A pinned reading and its text. Index files of sources in this text are removed with the reading."""

    reading: bytes
    text: str

    def has(self, source: str) -> bool:
        return _on_one_line(source) in _on_one_line(self.text)


class QuoteManager:
    """Creates QuotedOutputs, and caches the indexes of recent texts. Thread-safe."""

    # folder: for index files of long texts in pinned readings.
    def __init__(self, tokenizer: Tokenizer, folder: Path | None = None) -> None:
        self._tokenizer = tokenizer
        self._files = None if folder is None else QuoteIndexFiles(folder)
        self._lock = threading.Lock()
        self._indexes: OrderedDict[tuple[bytes, QuoteLimits, bool], QuoteIndex] = OrderedDict()

    @cached_property
    def vocabulary(self) -> QuoteVocabulary:
        return QuoteVocabulary(self._tokenizer)

    def output(
        self,
        sources: Sequence[QuoteSource],
        inner: StructuredOutput | None,
        started: str,
        pinned: PinnedReading | None = None,
    ) -> StructuredOutput | None:
        """Return the constraint on an answer that may quote `sources`."""
        if not sources or (inner is not None and inner.has_grammar):
            return inner
        indices = [self.index(each.text, pinned=pinned) for each in sources]
        return QuotedOutput(self._tokenizer, self.vocabulary, indices, inner, started)

    def index(
        self, text: str, limits: QuoteLimits = PROSE, *, escaped: bool = False, pinned: PinnedReading | None = None
    ) -> QuoteIndex:
        """Return the index of a text; it is also stored in a file if the text is long and part of `pinned`."""
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), limits, escaped
        with self._lock:
            cached = self._indexes.get(key)
            if cached is not None:
                self._indexes.move_to_end(key)
                return cached
        barred = self.vocabulary.control_texts

        def places() -> Places:
            if len(text) > CHARACTERS_INDEXED_HERE:
                with contextlib.suppress(ConfinedWorkError):  # falls back to indexing in this process
                    return compute_places(text, limits, barred, escaped=escaped)
            return QuoteIndex(text, limits, barred, escaped=escaped).places

        if self._files is None or pinned is None or len(text) < CHARACTERS_FILED or not pinned.has(text):
            found = places()
        else:
            inputs = repr((key[0], astuple(limits), escaped, sorted(barred)))
            found = self._files.places(pinned.reading, hashlib.sha256(inputs.encode()).digest(), len(text), places)
        index = QuoteIndex(text, limits, barred, escaped=escaped, places=found)
        with self._lock:
            self._indexes[key] = index
            total = sum(len(each.content) for each in self._indexes.values())
            while total > CACHED_BYTES and len(self._indexes) > 1:
                total -= len(self._indexes.popitem(last=False)[1].content)
        return index

    def forget(self, reading: bytes) -> None:
        if self._files is not None:
            self._files.forget(reading)


def _on_one_line(text: str) -> str:
    return text.replace("\n", " ")


def _top_tokens(logits: Floats, count: int) -> Ids:
    # Returns the tokens with the `count` largest logits. The logits are divided into rows of ROW. At least `count`
    # logits reach the `count`-th largest row maximum, so smaller logits need not be sorted.
    rows = len(logits) // ROW
    if rows <= count:
        among = np.arange(len(logits))
    else:
        maxima = logits[: rows * ROW].reshape(rows, ROW).max(axis=1)
        among = np.flatnonzero(logits >= np.partition(maxima, -count)[-count])
    return among if len(among) <= count else among[np.argpartition(logits[among], -count)[-count:]]


def _key(text: bytes) -> int:
    return int.from_bytes(text.ljust(7, b"\0"), "big") << 8 | len(text)
