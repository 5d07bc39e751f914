"""Keep an answer's end within its token limit: near the limit, a token may come only if an end is in reach behind it.

Far from the limit nothing is computed: how many tokens one token can add to the way to the end is estimated from the
grammar, and the distance is looked for again when so many could have been added. Within reach of the limit the last
way that was found is tried first; mostly it still leads to the end.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from notso.smollm3.sampling.extent import GrammarExtent
from notso.smollm3.sampling.shortest_end import Follower, SearchMemory, ShortestEnd
from notso.smollm3.text.tokenizer import Tokenizer

FIRST_STEPS, STEPS = 3_000, 400
"""Texts that a search looks at: for where an answer begins to be held back, and for each token tried behind that."""

MAX_STEPS = 20_000
"""For one answer. What takes more is no longer kept from being cut."""

TRIES = 4
"""Tokens that are drawn before only those of the known way are left to choose from."""

HOPELESS, MARGIN = 1.5, 20
"""If the first end that is found takes so many times the tokens left, and the margin, no other is looked for."""


MAX_STRING_ENDS = 500

RETRIES = 1
"""Where a search was too short to find an end or to exclude one, the next is when half of the tokens left are spent."""


class Pieces(NamedTuple):
    """What is known of a vocabulary. ends: its ending tokens; texts: of each token; digits: by `number_digits`."""

    ends: npt.NDArray[np.intp]
    texts: list[bytes]
    digits: npt.NDArray[np.uint16]


class _Way(NamedTuple):
    """Tokens to the end, and their text."""

    tokens: tuple[int, ...]
    text: bytes


class TokenLimit:
    """For one answer in its grammar. Asked about every token that was drawn, and told of each that is taken."""

    def __init__(self, ends: ShortestEnd, extent: GrammarExtent, tags: Sequence[int], pieces: Pieces) -> None:
        self._ends = ends
        self._extent = extent
        self._tags = tuple(tags)
        self._texts = pieces.texts
        self._end_ids = pieces.ends
        self._memory = SearchMemory()
        self._check_at: int | None = None
        self._way: _Way | None = None
        self._before: _Way | None = None  # the last that was known
        self._next: tuple[int, _Way | None] | None = None
        self._turned_down: set[int] = set()
        self._spent = 0
        self._retries = RETRIES
        self._may_be_missed = False

    @property
    def least_estimate(self) -> float:
        """More tokens than a short answer takes, mostly."""
        return self._extent.extent.least

    def distance(self, matcher: Follower, most: int, state: JsonState) -> int | None:
        """Return the fewest tokens to the end that are found; None if none is found within `most`."""
        way = self._first_way(matcher, most, state)
        return None if way is None else len(way.tokens)

    def permits(self, matcher: Follower, token: int, left: int, state: JsonState) -> bool:
        """Whether an end is in reach if `token` comes, which the grammar allows, and `left` tokens behind it.

        If so, `take` must be called with it before the next token is asked about.
        """
        if self._check_at is None:
            self._check_at = self._extent.next_check(left + 1, self._extent.extent.least)
        if left + 1 > self._check_at:
            return True
        if self._way is None or len(self._way.tokens) > left + 1:
            self._way = self._first_way(matcher, left + 1, state)
            if self._way is None:
                self._check_at = left // 2 if self._may_be_missed and self._retries else -1
                self._retries -= 1
                return True
        way = self._behind(matcher, self._way, token, left, state)
        if way is None:
            self._turned_down.add(token)
            return False
        self._next = token, way
        return True

    def left_to_choose(self, token: int, left: int) -> npt.NDArray[np.intp] | None:
        """Return the tokens to choose from when `token` was turned down; None for all others."""
        if self._way is None or (len(self._turned_down) < TRIES and len(self._way.tokens) <= left):
            return None
        if not self._way.tokens:
            return self._end_ids
        text = b"" if self._has_tags(self._way) else self._way.text
        found = {self._way.tokens[0]}
        for size in range(1, len(text)):
            ids = self._ends.spell(text[:size]) if size <= 1 or not text[:size].isspace() else []
            if len(ids) == 1 and self._ends.cost(text[size:]) <= left:
                found.add(ids[0])
            if size >= len(self._texts[self._way.tokens[0]]):
                break
        return np.array(sorted(found - self._turned_down) or [self._way.tokens[0]], np.intp)

    def take(self, token: int, left: int) -> None:
        """The token came, and `left` tokens may follow."""
        known, self._next = self._next, None
        self._turned_down.clear()
        self._before = self._way or self._before
        self._way = known[1] if known is not None and known[0] == token else None
        if self._way is not None:
            self._check_at = self._extent.next_check(left, len(self._way.tokens))

    def _behind(self, matcher: Follower, known: _Way, token: int, left: int, state: JsonState) -> _Way | None:
        """A way to the end behind `token`, of at most `left` tokens."""
        if known.tokens[:1] == (token,):
            rest = known.tokens[1:]
            return self._way_of(rest) if len(rest) <= left else None
        text = self._texts[token]
        after = matcher.deep_copy()
        if not after.consume_token(token):
            return None
        if len(known.tokens) <= left and self._leads_to_end(after, known.tokens):
            return known
        if text and known.text.startswith(text) and not self._has_tags(known):
            rest = tuple(self._ends.spell(known.text[len(text) :]))
            if len(rest) <= left and self._leads_to_end(after, rest):
                return self._way_of(rest)
        return self._search(after, left, STEPS, state.behind(text))

    def _has_tags(self, way: _Way) -> bool:
        return any(tag in way.tokens for tag in self._tags)

    def _leads_to_end(self, matcher: Follower, tokens: Sequence[int]) -> bool:
        after = matcher.deep_copy()
        return bool(after.try_consume_tokens(list(tokens)) == len(tokens) and after.is_accepting())

    def _first_way(self, matcher: Follower, most: int, state: JsonState) -> _Way | None:
        """A way of at most `most` tokens: one that is found fast, or else one that is looked for."""
        far = int(HOPELESS * most) + MARGIN
        way = self._search(matcher, far, FIRST_STEPS, state)
        if way is None or len(way.tokens) <= most:
            return way
        way = self._search(matcher, most, FIRST_STEPS, state)
        self._may_be_missed = False
        return way

    def _search(self, matcher: Follower, most: int, steps: int, state: JsonState) -> _Way | None:
        steps = min(steps, MAX_STEPS - self._spent)
        if most < 0 or steps <= 0:
            return None
        before = self._way or self._before
        tokens, spent = self._ends.tokens(
            matcher,
            most,
            steps,
            in_string=state.in_string,
            escaped=state.escaped,
            tags=self._tags,
            names=self._extent.names,
            orders=self._extent.orders,
            texts=self._string_ends,
            memory=self._memory,
            known=b"" if before is None or self._has_tags(before) else before.text,
        )
        self._spent += spent
        self._may_be_missed = spent >= steps
        return None if tokens is None else self._way_of(tokens)

    @cached_property
    def _string_ends(self) -> list[bytes]:
        """What may finish a string that is not free: the ends of short texts, the shortest first."""
        texts = (json.dumps(text, ensure_ascii=False)[1:] for text in self._extent.texts())
        ends = {text[at:].encode() for text in texts for at in range(len(text))}
        return sorted(ends, key=lambda end: (len(end), end))[:MAX_STRING_ENDS]

    def _way_of(self, tokens: Sequence[int]) -> _Way:
        return _Way(tuple(tokens), b"".join(self._texts[token] for token in tokens))


MAX_DIGITS = 16
"""Of a number: what a double holds, and what keeps a model from writing digits for ever."""

_NUMBER = frozenset(b"0123456789.eE+-")
_DIGITS = frozenset(b"0123456789")
_NUMBER_GOES_ON = re.compile(rb"[0-9.eE+-]+")


class JsonState(NamedTuple):
    """Position in a JSON text. digits: of the number that it may go on with."""

    in_string: bool = False
    escaped: bool = False
    digits: int = 0

    def behind(self, text: bytes) -> JsonState:
        """The state behind `text`."""
        in_string, escaped, digits = self
        for byte in text:
            if escaped:
                escaped = False
            elif byte == 0x22:
                in_string, digits = not in_string, 0
            elif in_string:
                escaped = byte == 0x5C
            elif byte in _DIGITS:
                digits += 1
            elif byte not in _NUMBER:
                digits = 0
        return JsonState(in_string, escaped, digits)


def number_digits(tokenizer: Tokenizer) -> npt.NDArray[np.uint16]:
    """For each token: how many digits a number has at least that goes on with it (V,)."""
    found = np.zeros(tokenizer.vocab_size, np.uint16)
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token)
        if text and text[0] in _NUMBER and (number := _NUMBER_GOES_ON.match(text)):
            digits = sum(byte in _DIGITS for byte in number[0])
            found[token] = digits + (number[0][-1] not in _DIGITS)
    return found
