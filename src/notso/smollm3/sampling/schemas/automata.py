"""Convert regular expressions with lookarounds to equivalent expressions without lookarounds.

A pattern is a tree of nodes. After a text has been read, a boolean formula over positions in the tree describes what
can follow. A lookahead adds a conjunct to this formula, and a negative lookahead adds a negated conjunct. Formulas are
normalized, so that most equivalent formulas are identical and usually only a few occur. They serve as the states of a
finite automaton. Eliminating these states one by one yields the new expression.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

MAX_STATES, MAX_STEPS = 400, 40_000
"""Maximum numbers of states of an automaton that is converted to an expression, and of steps to build the automaton."""

MAX_SEARCHED, MAX_SEARCH_STEPS = 3_000, 40_000
"""The same limits for an automaton that is only searched for a shortest text."""

MAX_WRITTEN = 40_000
"""Maximum length of the resulting expression."""

MAX_WORK = 50
"""Maximum total length of the intermediate expressions, in multiples of MAX_WRITTEN."""

MAX_DEPTH = 150  # maximum nesting depth of positions and formulas; each level takes two or three interpreter frames

MAX_NODES = 4_000
"""Maximum number of nodes in a pattern."""

Ranges: TypeAlias = tuple[tuple[int, int], ...]
LAST = 0x10FFFF
WORD: Ranges = ((0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A))


class TooLargeError(Exception):
    """The automaton or its expression exceeds a limit."""


@dataclass(frozen=True, slots=True)
class Chars:
    """Any one character from `ranges`."""

    ranges: Ranges


@dataclass(frozen=True, slots=True)
class Sequence:
    """Concatenation."""

    parts: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """Alternatives."""

    options: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class Repeat:
    """Repetition. `most` is None if unlimited."""

    body: Node
    least: int
    most: int | None


@dataclass(frozen=True, slots=True)
class LookaheadNode:
    """Lookahead."""

    body: Node
    is_negated: bool


@dataclass(frozen=True, slots=True)
class Assertion:
    """Start (`^`), end (`$`), word boundary (`b`) or no word boundary (`B`)."""

    kind: str


Node: TypeAlias = Chars | Sequence | Choice | Repeat | LookaheadNode | Assertion

ANYTHING = Repeat(Chars(((0, LAST),)), 0, None)


def walk(node: Node) -> Iterator[Node]:
    """Yield a node and all nodes within it."""
    pending = [node]
    while pending:
        yield (each := pending.pop())
        match each:
            case Sequence(parts) | Choice(parts):
                pending += parts
            case Repeat(body) | LookaheadNode(body):
                pending.append(body)


def plain_pattern(node: Node, write: Callable[[Ranges], str]) -> str | None:
    """Return a pattern for texts that begin with a match of `node`, or None if `node` has classes that `write` cannot
    express, or assertions other than a final `$`."""
    text = _plain_text(node, write)
    return None if text is None else f"^(?:{text})"


def _plain_text(node: Node, write: Callable[[Ranges], str], *, may_end: bool = True) -> str | None:
    # may_end: whether `$` is allowed at the end of `node`.
    match node:
        case Chars(ranges):
            return write(ranges) or None
        case Assertion("$") if may_end:
            return "$"
        case Sequence(parts):
            texts = [_plain_text(part, write, may_end=may_end and part is parts[-1]) for part in parts]
            return None if None in texts else "".join(_parenthesize(text) for text in texts if text)
        case Choice(options):
            texts = [_plain_text(option, write, may_end=False) for option in options]
            return None if None in texts else "|".join(text or "" for text in texts)
        case Repeat(body, least, most):
            text = _plain_text(body, write, may_end=False)
            return None if text is None else f"(?:{text}){{{least},{'' if most is None else most}}}"
    return None


# Formulas. A position is a linked list of the nodes that remain to be matched: (node, rest), or None at the end.
# Formulas are interned, so that equal formulas have the same id.

_FALSE, _TRUE = 0, 1
_START, _AFTER_OTHER, _AFTER_WORD = range(3)


class _Automaton:
    # Computes the states of a pattern that must match the whole text.

    def __init__(self, root: Node, steps: int) -> None:
        self._max_steps = steps
        self._formulas: list[tuple[object, ...]] = [("false",), ("true",)]
        self._ids: dict[tuple[object, ...], int] = {("false",): _FALSE, ("true",): _TRUE}
        self._steps = self._depth = 0
        self._derived: dict[tuple[int, int], int] = {}
        self._expanded: dict[tuple[int, int], int] = {}
        self.start = self._position_formula(root, None)

    def _count_steps(self) -> None:
        self._steps += 1
        if self._steps > self._max_steps:
            raise TooLargeError

    def _id(self, formula: tuple[object, ...]) -> int:
        found = self._ids.get(formula)
        if found is None:
            self._count_steps()
            found = self._ids[formula] = len(self._formulas)
            self._formulas.append(formula)
        return found

    def _position_formula(self, node: Node, rest: int | None) -> int:
        return self._id(("place", node, rest))

    def _combine(self, kind: str, parts: Iterable[int]) -> int:
        other, neutral, absorbing = ("or", _TRUE, _FALSE) if kind == "and" else ("and", _FALSE, _TRUE)
        flat: set[int] = set()
        for part in parts:
            formula = self._formulas[part]
            if part == absorbing:
                return absorbing
            if formula[0] == kind:
                flat.update(formula[1])  # type: ignore[arg-type]
            elif part != neutral:
                flat.add(part)
        if any(self._ids.get(("not", part)) in flat for part in flat):
            return absorbing
        terms = [part for part in flat if not (self._formulas[part][0] == other and flat & self._formulas[part][1])]  # type: ignore[operator]
        if not terms:
            return neutral
        return terms[0] if len(terms) == 1 else self._id((kind, frozenset(terms)))

    def _negate(self, part: int) -> int:
        if part <= _TRUE:
            return _TRUE - part
        formula = self._formulas[part]
        return formula[1] if formula[0] == "not" else self._id(("not", part))  # type: ignore[return-value]

    def expand(self, formula: int, previous: int) -> int:
        # Rewrites a formula so that its only leaves are next characters ("chars", ranges, rest) and the end ("end",).
        # previous: kind of the previous character.
        key = formula, previous
        if key not in self._expanded:
            self._expanded[key] = self._map_leaves(
                formula, lambda place: self._expand_place(place, previous, frozenset())
            )
        return self._expanded[key]

    def _descend(self) -> None:
        # The caller must decrease the depth again. A context manager would take a third of the time of `_map_leaves`.
        if self._depth >= MAX_DEPTH:
            raise TooLargeError
        self._depth += 1

    def _map_leaves(self, formula: int, change: Callable[[int], int]) -> int:
        self._count_steps()
        content = self._formulas[formula]
        kind = content[0]
        self._descend()
        try:
            if kind in ("and", "or"):
                return self._combine(kind, [self._map_leaves(each, change) for each in content[1]])  # type: ignore[attr-defined]
            if kind == "not":
                return self._negate(self._map_leaves(content[1], change))  # type: ignore[arg-type]
            return change(formula)
        finally:
            self._depth -= 1

    def _expand_place(self, place: int, previous: int, entered: frozenset[int]) -> int:
        self._count_steps()
        formula = self._formulas[place]
        if formula[0] != "place":
            return place
        if place in entered:
            return _FALSE  # an iteration that matches only the empty text adds nothing
        node, rest = formula[1], formula[2]

        def then(following: int | None, seen: frozenset[int] = entered) -> int:
            if following is None:
                return self._id(("end",))
            self._descend()
            try:
                return self._expand_place(following, previous, seen)
            finally:
                self._depth -= 1

        match node:
            case Chars(ranges):
                return self._id(("chars", ranges, rest)) if ranges else _FALSE
            case Sequence(parts):
                for part in reversed(parts):
                    rest = self._position_formula(part, rest)  # type: ignore[arg-type]
                return then(rest)  # type: ignore[arg-type]
            case Choice(options):
                return self._combine("or", [then(self._position_formula(option, rest)) for option in options])  # type: ignore[arg-type]
            case Repeat(body, least, most):
                if most == 0:
                    return then(rest)  # type: ignore[arg-type]
                again = Repeat(body, max(least - 1, 0), None if most is None else most - 1)
                once = then(self._position_formula(body, self._position_formula(again, rest)), entered | {place})  # type: ignore[arg-type]
                return once if least else self._combine("or", [once, then(rest)])  # type: ignore[arg-type]
            case LookaheadNode(body, is_negated):
                found = then(self._position_formula(body, self._position_formula(ANYTHING, None)))
                return self._combine("and", [self._negate(found) if is_negated else found, then(rest)])  # type: ignore[arg-type]
            case Assertion(kind):
                return self._combine("and", [self._expand_assertion(kind, previous), then(rest)])  # type: ignore[arg-type]
        raise AssertionError(node)

    def _expand_assertion(self, kind: str, previous: int) -> int:
        if kind == "^":
            return _TRUE if previous == _START else _FALSE
        if kind == "$":
            return self._id(("end",))
        word_follows = self._id(("chars", WORD, self._position_formula(ANYTHING, None)))
        is_edge = self._negate(word_follows) if previous == _AFTER_WORD else word_follows
        return is_edge if kind == "b" else self._negate(is_edge)

    def ends(self, expanded: int) -> bool:
        return self._map_leaves(expanded, lambda leaf: _TRUE if self._formulas[leaf][0] == "end" else _FALSE) == _TRUE

    def state_after(self, expanded: int, point: int) -> int:
        key = expanded, point
        if key not in self._derived:
            self._derived[key] = self._map_leaves(expanded, lambda leaf: self._derive_leaf(leaf, point))
        return self._derived[key]

    def _derive_leaf(self, leaf: int, point: int) -> int:
        formula = self._formulas[leaf]
        if formula[0] != "chars" or not any(first <= point <= last for first, last in formula[1]):  # type: ignore[attr-defined]
            return _FALSE
        return self._id(("end",)) if formula[2] is None else formula[2]  # type: ignore[return-value]

    def boundaries(self, expanded: int) -> set[int]:
        found = {0}
        pending = [expanded]
        while pending:
            self._count_steps()
            formula = self._formulas[pending.pop()]
            if formula[0] == "chars":
                for first, last in formula[1]:  # type: ignore[attr-defined]
                    found |= {first, last + 1}
            elif formula[0] in ("and", "or"):
                pending += formula[1]  # type: ignore[arg-type]
            elif formula[0] == "not":
                pending.append(formula[1])  # type: ignore[arg-type]
        return found


def pattern_without_lookaheads(root: Node, write: Callable[[Ranges], str]) -> str | None:
    """Return an expression for the texts that a pattern matches completely, or None if there are none.

    write: converts a character class to the target dialect, or to "" if none of its characters can be generated.

    Raises TooLargeError.
    """
    moves, accepting = _states(root)
    live = _live_states(moves, accepting)
    return _expression(moves, accepting, _equivalent_states(moves, accepting, live), write) if 0 in live else None


def shortest_text(root: Node) -> str | None:
    """Return a shortest text that a pattern matches completely, or None if none is found.

    The text has only printable characters that JSON does not escape. Raises TooLargeError.
    """
    automaton = _Automaton(root, MAX_SEARCH_STEPS)
    start = automaton.start, _START
    texts = {start: ""}
    pending = deque([start])
    while pending:
        state = pending.popleft()
        if len(texts) > MAX_SEARCHED:
            raise TooLargeError
        expanded = automaton.expand(*state)
        if automaton.ends(expanded):
            return texts[state]
        borders = sorted(
            edge for edge in automaton.boundaries(expanded) | {0x30, 0x3A, 0x41, 0x5B, 0x61, 0x7B} if edge <= LAST
        )
        ranges = zip(borders, [*borders[1:], LAST + 1], strict=True)
        found = (next((p for p in range(first, min(end, first + 40)) if _is_plain(p)), None) for first, end in ranges)
        for point in sorted((each for each in found if each is not None), key=_preference):
            target = automaton.state_after(expanded, point), _kind_of(point)
            if target[0] != _FALSE and target not in texts:
                texts[target] = texts[state] + chr(point)
                pending.append(target)
    return None


def is_whole_match(root: Node, text: str) -> bool:
    """Return whether a pattern matches the whole text. Raises TooLargeError."""
    automaton = _Automaton(root, MAX_SEARCH_STEPS)
    expanded = automaton.expand(automaton.start, _START)
    for point in map(ord, text):
        expanded = automaton.expand(automaton.state_after(expanded, point), _kind_of(point))
    return automaton.ends(expanded)


def _kind_of(point: int) -> int:
    return _AFTER_WORD if any(first <= point <= last for first, last in WORD) else _AFTER_OTHER


def _preference(point: int) -> tuple[bool, bool, int]:
    return not chr(point).isalnum(), not chr(point).islower(), point


def _is_plain(point: int) -> bool:
    return chr(point).isprintable() and chr(point) not in '"\\'


_Moves: TypeAlias = list[dict[int, list[tuple[int, int]]]]
"""For each state: the states that can follow, and the characters that lead to them. State 0 is the start."""


def _states(root: Node) -> tuple[_Moves, set[int]]:
    automaton = _Automaton(root, MAX_STEPS)
    has_edges = _has_edges(root)
    states = [(automaton.start, _START)]
    numbers = {states[0]: 0}
    moves: _Moves = []
    accepting: set[int] = set()
    for number, state in enumerate(states):  # grows during the loop
        if number >= MAX_STATES:
            raise TooLargeError
        expanded = automaton.expand(*state)
        if automaton.ends(expanded):
            accepting.add(number)
        boundaries = automaton.boundaries(expanded)
        if has_edges:
            boundaries |= {edge for first, last in WORD for edge in (first, last + 1)}
        borders = sorted(edge for edge in boundaries if edge <= LAST)
        out: dict[int, list[tuple[int, int]]] = {}
        for first, following in zip(borders, [*borders[1:], LAST + 1], strict=True):
            formula = automaton.state_after(expanded, first)
            if formula == _FALSE:
                continue
            target = formula, _kind_of(first) if has_edges else _AFTER_OTHER
            if target not in numbers:
                numbers[target] = len(states)
                states.append(target)
            out.setdefault(numbers[target], []).append((first, following - 1))
        moves.append(out)
    return moves, accepting


def _has_edges(node: Node) -> bool:
    for count, each in enumerate(walk(node)):
        if count >= MAX_NODES:
            raise TooLargeError
        if isinstance(each, Assertion) and each.kind in "bB":
            return True
    return False


def _live_states(moves: _Moves, accepting: set[int]) -> set[int]:
    sources: dict[int, set[int]] = {}
    for state, out in enumerate(moves):
        for target in out:
            sources.setdefault(target, set()).add(state)
    live, pending = set(accepting), list(accepting)
    while pending:
        for source in sources.get(pending.pop(), ()):
            if source not in live:
                live.add(source)
                pending.append(source)
    return live


def _equivalent_states(moves: _Moves, accepting: set[int], live: set[int]) -> dict[int, int]:
    # Maps each live state to the first state that is equivalent to it.
    group = {state: int(state in accepting) for state in sorted(live)}
    while True:
        kinds: dict[tuple[object, ...], int] = {}
        refined = {}
        for state in group:
            key = group[state], frozenset(_moves_to_groups(moves[state], group).items())
            refined[state] = kinds.setdefault(key, len(kinds))
        if len(kinds) == len(set(group.values())):
            firsts: dict[int, int] = {}
            return {state: firsts.setdefault(kind, state) for state, kind in refined.items()}
        group = refined


def _moves_to_groups(moves: dict[int, list[tuple[int, int]]], group: dict[int, int]) -> dict[int, Ranges]:
    # Maps each group to the characters that lead to it; states without a group are left out.
    reached: dict[int, list[tuple[int, int]]] = {}
    for target, ranges in moves.items():
        if target in group:
            reached.setdefault(group[target], []).extend(ranges)
    return {target: _merge_ranges(ranges) for target, ranges in reached.items()}


def _merge_ranges(ranges: Iterable[tuple[int, int]]) -> Ranges:
    found: list[tuple[int, int]] = []
    for first, last in sorted(ranges):
        if found and first <= found[-1][1] + 1:
            found[-1] = found[-1][0], max(found[-1][1], last)
        else:
            found.append((first, last))
    return tuple(found)


def _expression(
    moves: _Moves, accepting: set[int], classes: dict[int, int], write: Callable[[Ranges], str]
) -> str | None:
    start, end = -1, -2
    paths: dict[int, dict[int, str]] = {start: {classes[0]: ""}, end: {}}
    for state in sorted(set(classes.values())):
        written = {target: write(ranges) for target, ranges in _moves_to_groups(moves[state], classes).items()}
        paths[state] = {target: text for target, text in written.items() if text}
        if state in accepting:
            paths[state][end] = ""
    into: dict[int, set[int]] = {}
    for source, out in paths.items():
        for target in out:
            into.setdefault(target, set()).add(source)
    inner = set(paths) - {start, end}
    total_length = 0
    while inner:
        state = min(inner, key=lambda each: (_cost(paths, into, each), each))
        inner.discard(state)
        out = paths.pop(state)
        loop = out.pop(state, None)
        again = "" if loop is None else f"(?:{loop})*"
        sources = into.pop(state, set()) - {state}
        for source in sources:
            before = _parenthesize(paths[source].pop(state))
            for target, after in out.items():
                path = before + again + _parenthesize(after)
                existing = paths[source].get(target)
                paths[source][target] = path if existing is None else _alternative(existing, path)
                total_length += len(paths[source][target])
                if len(paths[source][target]) > MAX_WRITTEN or total_length > MAX_WORK * MAX_WRITTEN:
                    raise TooLargeError
                into.setdefault(target, set()).add(source)
        for target in out:
            into.get(target, set()).discard(state)
    return paths[start].get(end)


def _cost(paths: dict[int, dict[int, str]], into: dict[int, set[int]], state: int) -> int:
    sources = into.get(state, set()) - {state}
    out = {target: text for target, text in paths[state].items() if target != state}
    loop = len(paths[state].get(state, ""))
    size_in = sum(len(paths[source][state]) for source in sources)
    size_out = sum(map(len, out.values()))
    return size_in * max(len(out) - 1, 0) + size_out * max(len(sources) - 1, 0) + loop * (len(sources) * len(out) - 1)


def _alternative(one: str, other: str) -> str:
    if not one or not other:
        return f"(?:{one or other})?"
    return f"{one}|{other}"


def _parenthesize(text: str) -> str:
    return f"(?:{text})" if _has_choice(text) else text


def _has_choice(text: str) -> bool:
    depth, in_class, at = 0, False, 0
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 1
        elif in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
        elif character == "(":
            depth += 1
        elif character == ")":
            depth -= 1
        elif character == "|" and not depth:
            return True
        at += 1
    return False
