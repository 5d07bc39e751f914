"""End answers within their token limit: near it, a token is allowed only if an end remains within reach.

Far from the limit nothing is computed: the grammar gives an estimate of how many tokens one token can add to the
distance to the end, and the distance is searched again only after that many. Near the limit the last known ending is
tried first; usually it still works.
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
"""Texts per search: for the first one of an answer, and for each later token."""

MAX_STEPS = 20_000
"""Search steps per answer. An answer that needs more may be cut."""

TRIES = 4
"""Rejected tokens after which only the known ending is allowed."""

HOPELESS, MARGIN = 1.5, 20
"""The search for another end is skipped if the first takes HOPELESS times the remaining tokens plus MARGIN."""


MAX_STRING_ENDS = 500

RETRIES = 1
"""After an inconclusive search, the next one follows when half of the remaining tokens are used."""


class Pieces(NamedTuple):
    """Facts about a vocabulary. ends: end tokens; texts: by token; digits: from `number_digits`."""

    ends: npt.NDArray[np.intp]
    texts: list[bytes]
    digits: npt.NDArray[np.uint16]


class _Way(NamedTuple):
    """An ending: its tokens and their text."""

    tokens: tuple[int, ...]
    text: bytes


class TokenLimit:
    """Limit of one answer in its grammar. `permits` is called for each drawn token, `take` for each accepted one."""

    def __init__(self, ends: ShortestEnd, extent: GrammarExtent, tags: Sequence[int], pieces: Pieces) -> None:
        self._ends = ends
        self._extent = extent
        self._tags = tuple(tags)
        self._texts = pieces.texts
        self._end_ids = pieces.ends
        self._memory = SearchMemory()
        self._check_at: int | None = None
        self._way: _Way | None = None
        self._before: _Way | None = None  # the last known one
        self._next: tuple[int, _Way | None] | None = None
        self._turned_down: set[int] = set()
        self._spent = 0
        self._retries = RETRIES
        self._may_be_missed = False

    @property
    def least_estimate(self) -> float:
        """Estimated tokens of a short answer, rather too many."""
        return self._extent.extent.least

    def distance(self, matcher: Follower, most: int, state: JsonState) -> int | None:
        """Return the fewest tokens to the end, as far as found; None if there is no end within `most`."""
        way = self._first_way(matcher, most, state)
        return None if way is None else len(way.tokens)

    def permits(self, matcher: Follower, token: int, left: int, state: JsonState) -> bool:
        """Whether an end is within `left` tokens after `token`, which the grammar allows.

        If so, `take` must be called with it before the next call.
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
        """Return the tokens to choose from after `token` was rejected; None for all others."""
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
        """Record a token, after which `left` may follow."""
        known, self._next = self._next, None
        self._turned_down.clear()
        self._before = self._way or self._before
        self._way = known[1] if known is not None and known[0] == token else None
        if self._way is not None:
            self._check_at = self._extent.next_check(left, len(self._way.tokens))

    def _behind(self, matcher: Follower, known: _Way, token: int, left: int, state: JsonState) -> _Way | None:
        """Return an ending of at most `left` tokens after `token`."""
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
        """Return an ending of at most `most` tokens: a quick one, or else by search."""
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
        """Return ends of short texts for a constrained string, shortest first."""
        texts = (json.dumps(text, ensure_ascii=False)[1:] for text in self._extent.texts())
        ends = {text[at:].encode() for text in texts for at in range(len(text))}
        return sorted(ends, key=lambda end: (len(end), end))[:MAX_STRING_ENDS]

    def _way_of(self, tokens: Sequence[int]) -> _Way:
        return _Way(tuple(tokens), b"".join(self._texts[token] for token in tokens))


MAX_DIGITS = 16
"""Maximum digits of a number: the precision of a double, and an end to repeated digits."""

_NUMBER = frozenset(b"0123456789.eE+-")
_DIGITS = frozenset(b"0123456789")
_NUMBER_GOES_ON = re.compile(rb"[0-9.eE+-]+")


class JsonState(NamedTuple):
    """Position in a JSON text. digits: of the current number."""

    in_string: bool = False
    escaped: bool = False
    digits: int = 0

    def behind(self, text: bytes) -> JsonState:
        """Return the state after `text`."""
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
    """Return, for each token (V,), the digits with which it continues a number."""
    found = np.zeros(tokenizer.vocab_size, np.uint16)
    for token in range(tokenizer.vocab_size):
        text = tokenizer.token_bytes(token)
        if text and text[0] in _NUMBER and (number := _NUMBER_GOES_ON.match(text)):
            digits = sum(byte in _DIGITS for byte in number[0])
            found[token] = digits + (number[0][-1] not in _DIGITS)
    return found
