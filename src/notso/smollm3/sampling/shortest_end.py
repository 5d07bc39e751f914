"""Search for a short ending, which is a sequence of tokens that completes an answer according to its grammar."""

from __future__ import annotations

import heapq
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np

from notso.smollm3.text.tokenizer import Tokenizer

MAX_PIECE_BYTES = 32
"""Longer tokens are ignored, because they are rarely needed, and every length is tried at every position."""

FEW_OTHERS = 3
"""Where a value can end, the search also tries up to this many ways to continue it."""

USUAL_NUMBER = 16
"""Usual maximum length in bytes of a number or literal outside strings. Each further byte counts as a detour, which is
a step that rarely leads to a short ending. Continuations with few detours are examined first."""

LAST_BYTES = 2
"""A text is not continued if an earlier text with the same state (`key` in `_successors`) costs no more. Right after
punctuation, the state includes this many of the last bytes, because a token may span these bytes and later ones."""

MAX_RESTS, NEAR = 8, 32
"""Maximum number of suffixes of a known ending that are tried, and number of initial search steps that try them."""

DEPTH_WEIGHT, MEMBER_WEIGHT = 40.0, 12.0
"""Weights of open containers and of members in `_estimate`. With these weights, completing an unfinished value takes
precedence over searching for a shorter one."""

_UNREACHABLE = 1 << 30
_TAG = 0xFF
"""Byte that marks a control token in the texts of a search. It is invalid in UTF-8."""
_QUOTE, _BACKSLASH, _COMMA, _COLON = b'"\\,:'
_NAME_BEGINS = re.compile(rb'(?<=[{,])(?=")')
_STRUCTURE = re.compile(rb'[",\]}]')
_OPENING, _CLOSING = frozenset(b"[{"), frozenset(b"]}")


class MatcherProtocol(Protocol):
    """A grammar's matcher after it has read a text, such as `llguidance.LLMatcher`."""

    def deep_copy(self) -> MatcherProtocol: ...

    def is_accepting(self) -> bool: ...

    def is_error(self) -> bool: ...

    def compute_bitmask(self) -> bytes: ...

    def compute_ff_bytes(self) -> bytes: ...

    def consume_token(self, sampled_token: int) -> bool:
        """Consume a token; return False if it is not allowed."""

    def try_consume_tokens(self, tokens: list[int]) -> int:
        """Consume tokens until one is not allowed; return the number of consumed tokens."""


class Place(NamedTuple):
    """Position in a JSON text, relative to the start of the search; approximate for other grammars."""

    in_string: bool = False
    escaped: bool = False
    string_start: int = 0
    closed: int = 0  # number of containers that were opened before the search and are now closed
    open: tuple[tuple[int, bytes], ...] = ((0, b""),)  # per open container: number of commas so far, last name
    members: int = 0  # number of commas in all containers
    run: int = 0  # number of bytes since the last quotation mark, bracket or separator

    def after(self, text: bytes, start: int) -> Place:
        in_string, escaped, string_start, closed, opened, all_members, run = self
        for at in range(start, len(text)):
            byte = text[at]
            run += 1
            if in_string:
                if escaped:
                    escaped = False
                elif byte == _BACKSLASH:
                    escaped = True
                elif byte == _QUOTE:
                    in_string, run = False, 0
            elif byte == _QUOTE:
                in_string, string_start, run = True, at, 0
            elif byte in _OPENING:
                opened, run = (*opened, (0, b"")), 0
            elif byte in _CLOSING:
                closed, opened, run = (closed, opened[:-1], 0) if opened[1:] else (closed + 1, ((0, b""),), 0)
            elif byte in (_COMMA, _COLON):
                members, name = opened[-1]
                entry = (members + 1, name) if byte == _COMMA else (members, text[string_start:at])
                opened, run = (*opened[:-1], entry), 0
                all_members += byte == _COMMA
        return Place(in_string, escaped, string_start, closed, opened, all_members, run)


@dataclass(frozen=True, slots=True)
class SearchMemory:
    """Results of searches in one grammar, by hash of the allowed tokens."""

    kinds: dict[int, tuple[int, ...]] = field(default_factory=dict)  # result of `_byte_classes`
    ends: dict[int, bytes | None] = field(default_factory=dict)  # a text that completes a string, if found


@dataclass(frozen=True, slots=True)
class EndingHints:
    """Properties of a grammar, and results of earlier searches."""

    tags: Sequence[int] = ()  # control tokens of the grammar
    names: Sequence[bytes] = ()  # `"NAME":` of required members
    orders: Sequence[dict[bytes, int]] = ()  # for each object, the positions of members by name
    texts: Sequence[bytes] = ()  # ends of strings, shortest first
    memory: SearchMemory = field(default_factory=SearchMemory)


@dataclass(frozen=True, slots=True)
class _Node:
    # A possible continuation of the answer.
    matcher: MatcherProtocol
    text: bytes
    costs: list[int]  # costs[n]: minimum number of tokens for the first n bytes of the text
    place: Place
    detours: int


class ShortestEndingSearch:
    """Searches for short endings, in one vocabulary. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        excluded = tokenizer.special_ids | tokenizer.unused_ids
        self._ids: dict[bytes, int] = {}
        for token, text in enumerate(tokenizer.all_bytes):
            if token not in excluded:
                self._ids.setdefault(text, token)
        self._ids.pop(b"", None)
        self._longest = min(max(map(len, self._ids), default=1), MAX_PIECE_BYTES)
        singles = ((byte, self._ids.get(bytes([byte]))) for byte in sorted(range(256), key=self._preference))
        single_bytes = [(byte, token) for byte, token in singles if token is not None]
        self._bytes = [byte for byte, _ in single_bytes]
        self._byte_ids = np.array([token for _, token in single_bytes], np.intp)
        self._single = dict(single_bytes)

    def _preference(self, byte: int) -> tuple[bool, int, int]:
        # Sort key: ASCII before other bytes, then bytes with more repetitions in a single token before those with
        # fewer.
        longest = next(size for size in range(self._longest, -1, -1) if not size or bytes([byte]) * size in self._ids)
        return byte >= 0x80, -longest, byte

    def tokens(
        self,
        matcher: MatcherProtocol,
        most: int,
        steps: int,
        hints: EndingHints,
        *,
        in_string: bool = False,
        escaped: bool = False,
        earlier_ending: bytes = b"",
    ) -> tuple[list[int] | None, int]:
        """Return up to `most` tokens that complete the text of `matcher` (or None), and the number of search steps."""
        # in_string, escaped: whether the text ends inside a JSON string, and whether it ends with an escaping
        # backslash.
        # earlier_ending: an ending whose suffixes are tried first.
        ticket = itertools.count()
        start = _Node(matcher.deep_copy(), b"", [0], Place(in_string, escaped), 0)
        queue: list[tuple[int, float, int, int, _Node]] = [(0, 0.0, 0, next(ticket), start)]
        seen: dict[tuple[object, ...], float] = {}
        suffixes = self._suffixes(earlier_ending)
        taken = 0
        while queue and taken < steps:
            taken += 1
            node = heapq.heappop(queue)[-1]
            if node.matcher.is_accepting():
                if node.costs[-1] <= most:
                    return self._tokens_for(node.text, node.costs), taken
                continue
            for suffix in suffixes if taken <= NEAR else ():
                if (end := self._try_suffix(node, suffix)) is not None and end.costs[-1] <= most:
                    return self._tokens_for(end.text, end.costs), taken
            for each in self._successors(node, hints, seen):
                if each.costs[-1] <= most + 2 or each.costs[-1] >= _UNREACHABLE:
                    heapq.heappush(queue, (_detours(each), _estimate(each), -len(each.text), next(ticket), each))
        return None, taken

    def _suffixes(self, ending: bytes) -> list[tuple[bytes, list[int]]]:
        suffixes = []
        for place in itertools.islice(_STRUCTURE.finditer(ending), MAX_RESTS):
            suffix = ending[place.start() :]
            tokens = [self._single.get(byte, -1) for byte in suffix]
            if -1 not in tokens:
                suffixes.append((suffix, tokens))
        return suffixes

    def _try_suffix(self, node: _Node, suffix: tuple[bytes, list[int]]) -> _Node | None:
        text, tokens = suffix
        matcher = node.matcher.deep_copy()
        if matcher.try_consume_tokens(tokens) != len(tokens) or not matcher.is_accepting():
            return None
        whole = node.text + text
        return _Node(matcher, whole, self._extend_costs(node.costs, whole), node.place, node.detours)

    def cost(self, text: bytes) -> int:
        """Return the minimum number of tokens for a text without control tokens."""
        return self._extend_costs([0], text)[-1]

    def spell(self, text: bytes) -> list[int]:
        return self._tokens_for(text, self._extend_costs([0], text))

    def _successors(self, node: _Node, hints: EndingHints, seen: dict[tuple[object, ...], float]) -> Iterator[_Node]:
        place, kinds = node.place, hints.memory.kinds
        is_name = not place.in_string and not place.run
        name_nodes = self._required_name_nodes(node, hints) if is_name else []
        forced = bytes(node.matcher.compute_ff_bytes()).partition(b"\xff")[0]
        if forced:
            next_node = self._node_after(node, _NAME_BEGINS.split(forced, maxsplit=1)[0])
            yield from name_nodes or ([] if next_node is None else [next_node])
            return
        bits = bytes(node.matcher.compute_bitmask())
        if node.matcher.is_error():
            return
        kind = hash(bits)
        last = node.text[-LAST_BYTES:] if place.run <= 1 else b""
        key = kind, place.in_string, place.closed, place.open, place.run, last
        cost = node.costs[-1] + node.detours
        if seen.get(key, math.inf) <= cost:
            return
        seen[key] = cost
        for tag in hints.tags:
            if bits[tag >> 3] >> (tag & 7) & 1:
                yield from self._child_nodes(node, b"\xff[%d]" % tag, [tag])
        allowed = (np.frombuffer(bits, np.uint8)[self._byte_ids >> 3] >> (self._byte_ids & 7)) & 1
        allowed_bytes = [self._bytes[index] for index in np.flatnonzero(allowed)]
        closing = (_QUOTE,) if place.in_string else _CLOSING
        ends = [byte for byte in allowed_bytes if byte in closing]
        if ends:
            others = [byte for byte in allowed_bytes if byte not in ends][:FEW_OTHERS]
        elif not place.in_string and place.run and _COMMA in allowed_bytes:
            ends, others = [_COMMA], [byte for byte in allowed_bytes if byte != _COMMA][:FEW_OTHERS]
        else:
            if place.in_string:
                name_nodes += self._finish_string(node, kind, hints)
            yield from name_nodes
            # Classes are reused only in strings, because numbers at which the same tokens are allowed may continue
            # differently.
            if kind not in kinds or not place.in_string:
                kinds[kind] = self._byte_classes(node, allowed_bytes)
            ends, others = list(kinds[kind]), []
            if name_nodes:
                ends, others = [], ends
        for byte in ends:
            yield from self._child_nodes(node, bytes([byte]), [self._single[byte]])
        for byte in others:
            yield from self._child_nodes(node, bytes([byte]), [self._single[byte]], detours=1)

    def _required_name_nodes(self, node: _Node, hints: EndingHints) -> list[_Node]:
        # Returns a node for each required name that can come next. If an object has all of these names, only its
        # last one is used: members must be in order, so if the last name can come next, the earlier ones are not
        # required here.
        nodes = {name: each for name in hints.names if (each := self._node_after(node, name)) is not None}
        if len(nodes) > 1:
            lasts = {max(nodes, key=order.__getitem__) for order in hints.orders if nodes.keys() <= order.keys()}
            if lasts:
                return [each for name, each in nodes.items() if name in lasts]
        return list(nodes.values())

    def _finish_string(self, node: _Node, kind: int, hints: EndingHints) -> list[_Node]:
        ends = hints.memory.ends
        stored = ends.get(kind, b"")
        if stored is None:
            return []
        for text in (stored, *hints.texts) if stored else hints.texts:
            if (next_node := self._node_after(node, text)) is not None:
                ends[kind] = text
                return [next_node]
        ends[kind] = None
        return []

    def _byte_classes(self, node: _Node, allowed_bytes: list[int]) -> tuple[int, ...]:
        # Returns one byte of each class. Bytes are in the same class if the same tokens are allowed after them. If any
        # ASCII byte is allowed, all other bytes are ignored.
        classes: dict[tuple[bool, int], int] = {}
        ascii_only = [byte for byte in allowed_bytes if byte < 0x80] or allowed_bytes
        for byte in ascii_only:
            matcher = node.matcher.deep_copy()
            if matcher.consume_token(self._single[byte]):
                classes.setdefault((matcher.is_accepting(), hash(bytes(matcher.compute_bitmask()))), byte)
        return tuple(classes.values())

    def _child_nodes(self, node: _Node, text: bytes, tokens: list[int], detours: int = 0) -> Iterator[_Node]:
        matcher = node.matcher.deep_copy()
        if matcher.try_consume_tokens(tokens) != len(tokens):
            return
        if text[0] == _TAG:
            costs = [*node.costs, *[_UNREACHABLE] * (len(text) - 1), node.costs[-1] + 1]
            yield _Node(matcher, node.text + text, costs, node.place, node.detours)
        else:
            yield self._make_node(node, matcher, text, node.detours + detours)

    def _node_after(self, node: _Node, text: bytes) -> _Node | None:
        matcher, tokens = node.matcher.deep_copy(), [self._single.get(byte, -1) for byte in text]
        if -1 in tokens or matcher.try_consume_tokens(tokens) != len(tokens):
            return None
        return self._make_node(node, matcher, text, node.detours)

    def _make_node(self, node: _Node, matcher: MatcherProtocol, text: bytes, detours: int) -> _Node:
        whole = node.text + text
        place = node.place.after(whole, len(node.text))
        return _Node(matcher, whole, self._extend_costs(node.costs, whole), place, detours)

    def _extend_costs(self, costs: list[int], text: bytes) -> list[int]:
        costs = list(costs)
        for end in range(len(costs), len(text) + 1):
            best = _UNREACHABLE
            for start in range(max(0, end - self._longest), end):
                if costs[start] + 1 < best and text[start:end] in self._ids:
                    best = costs[start] + 1
            costs.append(best)
        return costs

    def _tokens_for(self, text: bytes, costs: list[int]) -> list[int]:
        tokens: list[int] = []
        end = len(text)
        while end:
            if costs[end - 1] >= _UNREACHABLE and text[end - 1 : end] == b"]":
                start = text.rfind(b"\xff[", 0, end)
                tokens.append(int(text[start + 2 : end - 1]))
            else:
                start = next(
                    start
                    for start in range(max(0, end - self._longest), end)
                    if costs[start] + 1 == costs[end] and text[start:end] in self._ids
                )
                tokens.append(self._ids[text[start:end]])
            end = start
        return tokens[::-1]


def _detours(node: _Node) -> int:
    return node.detours + (0 if node.place.in_string else max(0, node.place.run - USUAL_NUMBER))


def _estimate(node: _Node) -> float:
    # The cost so far, increased for each open container and reduced for each completed member.
    place = node.place
    return node.costs[-1] + DEPTH_WEIGHT * (len(place.open) - 1 - place.closed) - MEMBER_WEIGHT * place.members
