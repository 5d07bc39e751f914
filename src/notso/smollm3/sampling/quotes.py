"""Quotations in an answer, held to the text of their source while they are written.

`[[2: ` begins a quotation of the second source. Until `]]`, only tokens that continue a part of its text are allowed.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt

from notso.smollm3.sampling.quote_index import CLOSE, PROSE, Interval, QuoteIndex, QuoteLimits
from notso.smollm3.sampling.sampler import Floats
from notso.smollm3.sampling.structured_output import StructuredOutput
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.request_options import QuoteSource

OPEN = re.compile(rb"\[\[(\d{1,3}):\Z")
OPEN_WITHIN = re.compile(rb"\[\[(\d{1,3}): ")
MARK_BYTES = 8
NARROW = 512
"""Places up to which every continuation is allowed. Of more, those among the LIKELIEST tokens are, which bounds the
time of a mask; if there is none, those at the first places."""
LIKELIEST = 512
LEAST_LEFT = 48
"""Tokens that must be left where a quotation begins."""
LAST_TOKENS = 8
"""With fewer tokens left, a quotation ends as soon as it may."""
KEPT_CHARACTERS = 8_000_000
"""Of the indexed texts that are kept for later requests."""

Ids = npt.NDArray[np.intp]


class QuoteVocabulary:
    """The bytes of ordinary tokens, by which continuations of a text are found."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        barred = tokenizer.special_ids | tokenizer.unused_ids
        self.size = tokenizer.vocab_size
        self.texts = [b"" if each in barred else tokenizer.token_bytes(each) for each in range(self.size)]
        self.ids = {text: each for each, text in enumerate(self.texts) if text and b"\xff" not in text}
        sizes: dict[bytes, set[int]] = {}
        for text in self.ids:
            sizes.setdefault(text[:2], set()).add(len(text))
        self._sizes = {head: sorted(each) for head, each in sizes.items()}
        self.longest = max(map(len, self.ids))
        closers = [each for text, each in self.ids.items() if text.startswith(CLOSE)]
        self.closers = np.array(closers or [self.ids[CLOSE[:1]]], np.intp)
        self.spaced = np.array([each for text, each in self.ids.items() if text[:1] == b" "], np.intp)
        self.marking = [each for text, each in self.ids.items() if b": " in text]
        self.keys = np.frombuffer(b"".join(text[:8].ljust(8, b"\0") for text in self.texts), ">u8").astype(np.uint64)
        self.lengths = np.array([len(text) if text in self.ids else 0 for text in self.texts], np.int32)
        self.control_texts = [
            tokenizer.token_bytes(each) for each in tokenizer.special_ids if len(tokenizer.token_bytes(each)) > 1
        ]

    @cached_property
    def spaced_keys(self) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
        """The first 8 bytes and the length of each token behind its first byte."""
        keys = np.frombuffer(b"".join(text[1:9].ljust(8, b"\0") for text in self.texts), ">u8").astype(np.uint64)
        return keys, np.maximum(self.lengths - 1, 0)

    def beginnings(self, text: bytes) -> list[int]:
        """Return the tokens that a text begins with."""
        found = [self.ids.get(text[:1], -1)]
        found += [self.ids.get(text[:size], -1) for size in self._sizes.get(text[:2], ()) if size > 1]
        return [each for each in found if each >= 0]


class Quotation:
    """A quotation as far as it is written."""

    def __init__(self, index: QuoteIndex, vocabulary: QuoteVocabulary, lead: bytes = b"") -> None:
        """`lead`: what precedes the quotation, at most one byte."""
        self._index = index
        self._vocabulary = vocabulary
        self._lead = lead
        self._found = index.whole

    @property
    def may_end(self) -> bool:
        return not self._lead and self._found.depth > 0 and self._index.may_end(self._found)

    def continuing(self, logits: Floats) -> Ids:
        """Return the tokens that continue the quotation (n,): of more than NARROW places, those among the likeliest."""
        vocabulary, found = self._vocabulary, self._found
        if found.high - found.low > NARROW:
            count = min(LIKELIEST, len(logits))
            among = np.argpartition(logits, -count)[-count:]
            among = self._agreeing(among[among < vocabulary.size])
            if len(among):
                return among
            found = Interval(found.low, found.low + NARROW, found.depth)
        ids: set[int] = set()
        for text in self._index.continuations(found, vocabulary.longest):
            ids.update(vocabulary.beginnings(self._lead + text))
        return np.array(sorted(ids), np.intp)

    def take(self, text: bytes) -> None:
        """Record bytes that continue the quotation."""
        if text and self._lead:
            text, self._lead = text[1:], b""
        if text:
            self._found = self._index.narrowed(self._found, text)

    def _agreeing(self, among: Ids) -> Ids:
        vocabulary, index, found, lead = self._vocabulary, self._index, self._found, len(self._lead)
        keys, lengths = vocabulary.spaced_keys if lead else (vocabulary.keys, vocabulary.lengths)
        if lead:
            among = among[(vocabulary.keys[among] >> np.uint64(56)) == self._lead[0]]
        among = among[vocabulary.lengths[among] > 0]
        sizes = lengths[among]
        low, high = index.agreeing(found, keys[among], np.minimum(sizes, 8))
        first = np.minimum(low, found.high - 1)
        agrees = (low < high) & (index.longest[first] >= found.depth + sizes)
        for at in np.flatnonzero(agrees & (sizes > 8)).tolist():
            token = int(among[at])
            narrow = index.narrowed(found, vocabulary.texts[token][lead:])
            agrees[at] = narrow.low < narrow.high and index.longest[narrow.low] >= narrow.depth
        return among[agrees]


class QuotedOutput(StructuredOutput):
    """Constrains quotations, and what `inner` constrains outside of them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocabulary: QuoteVocabulary,
        indices: Sequence[QuoteIndex],
        inner: StructuredOutput | None,
        started: str = "",
    ) -> None:
        """`started`: text of the answer that the prompt ends with."""
        super().__init__(tokenizer, None)
        self._vocabulary = vocabulary
        self._indices = indices
        self._inner = inner
        self._open: Quotation | None = None
        self._is_half_closed = False  # by the first byte of CLOSE, which may belong to the quotation, too
        self._tail = b""
        self._left = 1 << 31
        self._follow(started.encode())

    @property
    def holds_calls(self) -> bool:
        return self._inner is not None and self._inner.holds_calls

    @property
    def is_quoting(self) -> bool:
        """Whether a quotation is open."""
        return self._open is not None

    def restrict(self, logits: Floats, in_reasoning: bool) -> Floats:
        """See StructuredOutput."""
        if self._open is not None and not in_reasoning:
            return _only(logits, self._allowed(self._open, logits))
        restricted = logits if self._inner is None else self._inner.restrict(logits, in_reasoning)
        if in_reasoning or self._in_call:
            return restricted
        if OPEN.search(self._tail):
            allowed = self._beginning().continuing(restricted) if self._may_open(self._tail) else np.zeros(0, np.intp)
            kept = restricted[allowed]
            restricted = restricted.copy()
            restricted[self._vocabulary.spaced] = -np.inf
            restricted[allowed] = kept
        elif barred := self._marks_at_once():
            restricted = restricted.copy()
            restricted[barred] = -np.inf
        return restricted

    def permits(self, token: int, in_reasoning: bool, left: int) -> bool:
        """See StructuredOutput."""
        is_free = self._inner is None or self._open is not None
        return is_free or (self._inner is not None and self._inner.permits(token, in_reasoning, left))

    def narrow(self, logits: Floats, token: int, left: int) -> Floats:
        """See StructuredOutput."""
        return logits if self._inner is None else self._inner.narrow(logits, token, left)

    def take(self, token: int, in_reasoning: bool, left: int | None = None) -> bool:
        """See StructuredOutput."""
        self._left = self._left if left is None else left
        text = b"" if in_reasoning else self._vocabulary.texts[token]
        if self._open is not None and not in_reasoning:
            closed = CLOSE[1:] if self._is_half_closed else CLOSE
            if text.startswith(closed):
                self._open, self._tail = None, text[len(closed) :][-MARK_BYTES:]
                self._is_half_closed = False
            else:
                self._is_half_closed = text == CLOSE[:1] and self._open.may_end
                self._open.take(text)
            return False
        starts = self._inner is not None and self._inner.take(token, in_reasoning, left)
        if self._in_call:
            self._tail = b""
        else:
            self._follow(text)
        return starts

    def _allowed(self, quotation: Quotation, logits: Floats) -> Ids:
        """Return the tokens that continue or end an open quotation."""
        closers = self._vocabulary.closers if quotation.may_end else np.zeros(0, np.intp)
        if self._is_half_closed:
            closers = np.array([self._vocabulary.ids[CLOSE[1:]]], np.intp)
        if len(closers) and self._left < LAST_TOKENS:
            return closers
        return np.concatenate((quotation.continuing(logits), closers))

    @property
    def _in_call(self) -> bool:
        return self._inner is not None and self._inner.in_call

    def _follow(self, text: bytes) -> None:
        """Record text outside of quotations, which may begin one."""
        if OPEN.search(self._tail) and text.startswith(b" "):
            if self._may_open(self._tail):
                self._open = self._beginning()
                self._open.take(text)
            self._tail = b""
            return
        self._tail = (self._tail + text)[-MARK_BYTES:]
        if self._may_open(self._tail, b" ") and self._tail.endswith(b" "):
            self._open, self._tail = self._beginning(self._tail[:-1], b""), b""

    def _may_open(self, tail: bytes, behind: bytes = b"") -> bool:
        found = OPEN.search(tail.removesuffix(behind))
        number = int(found[1]) if found else 0
        return 0 < number <= len(self._indices) and bool(self._index(number).whole.high) and self._left >= LEAST_LEFT

    def _beginning(self, tail: bytes | None = None, lead: bytes = b" ") -> Quotation:
        found = OPEN.search(self._tail if tail is None else tail)
        index = self._index(int(found[1]) if found else 1)
        return Quotation(index, self._vocabulary, lead)

    def _index(self, number: int) -> QuoteIndex:
        return self._indices[number - 1]

    def _marks_at_once(self) -> list[int]:
        """Return the tokens that would complete a mark and continue behind it."""
        return [
            each
            for each in (self._vocabulary.marking if b"[" in self._tail else ())
            if (found := OPEN_WITHIN.search(written := self._tail + self._vocabulary.texts[each]))
            and found.end() > len(self._tail)
            and not (found.end() == len(written) and self._may_open(written, b" "))
        ]


class Quotes:
    """Builds the constraint of quotations, and keeps the indices of recent texts. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[bytes, QuoteLimits, bool], QuoteIndex] = OrderedDict()

    @cached_property
    def vocabulary(self) -> QuoteVocabulary:
        return QuoteVocabulary(self._tokenizer)

    def output(
        self, sources: Sequence[QuoteSource], inner: StructuredOutput | None, started: str
    ) -> StructuredOutput | None:
        """Return the constraint of an answer that may quote `sources`."""
        if not sources or (inner is not None and inner.has_grammar):
            return inner
        indices = [self.index(each.text) for each in sources]
        return QuotedOutput(self._tokenizer, self.vocabulary, indices, inner, started)

    def index(self, text: str, limits: QuoteLimits = PROSE, *, escaped: bool = False) -> QuoteIndex:
        """Return the index of a text."""
        key = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest(), limits, escaped
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        made = QuoteIndex(text, limits, self.vocabulary.control_texts, escaped=escaped)
        with self._lock:
            self._known[key] = made
            held = sum(len(each.content) for each in self._known.values())
            while held > KEPT_CHARACTERS and len(self._known) > 1:
                held -= len(self._known.popitem(last=False)[1].content)
        return made


def _only(logits: Floats, ids: Ids) -> Floats:
    restricted = np.full_like(logits, -np.inf)
    restricted[ids] = logits[ids]
    if not np.isfinite(restricted[ids]).any():  # masked elsewhere
        restricted[ids] = 0
    return restricted
