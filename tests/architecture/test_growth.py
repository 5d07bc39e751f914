"""Processing time grows roughly in proportion to the length of a client's text: at most sixfold for four times the
text.

Measured is CPU time of this thread. The minimum of several runs is used, so that other load on the machine matters
little.
"""

from __future__ import annotations

import ast
import gc
import itertools
import pkgutil
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from architecture.syntax import nodes

import notso
from notso.documents import tables

_parser: Any = pkgutil.resolve_name("re._parser")

SMALL_SIZES = (16, 24, 32, 40, 48, 64)
"""Small steps, because if two alternatives double the time with each repetition, a larger step would never end."""
SIZES = (*SMALL_SIZES, 256, 1024, 4096, 16_384)
MOST_GROWTH = 6.0  # factor, for four times the text
MEASURABLE_SECONDS = 0.02
FLOOR_SECONDS = 0.004  # shorter runs are not compared, because their timing is too inaccurate
RUNS = 5
ROUNDS = 8  # number of repeated measurements before a difference is believed, because other load may have caused it
UNBOUNDED = 64  # a repetition with a higher maximum counts as unlimited
MOST_PUMPS = 32
SAMPLES = 4  # number of matching texts for each node of a pattern

METHODS = ("match", "fullmatch", "search", "sub", "subn", "split", "findall", "finditer")
OPTIONAL = {"llguidance", "ray", "psycopg", "redis", "valkey", "peft", "torch", "transformers", "cuda"}

OLD_VOLATILE_LINE = r"x-anthropic-billing-header:(?:[ \t]*[a-z_]+=[\w.\-]*;?)+[ \t]*(?:\n|\Z)"
OLD_PIECE = r"\\u\{[^}]*\}|\\[\s\S]|\[(?:\\[\s\S]|[^\]\\])*\]|[\s\S]"
OLD_LITERAL = r'"(?:\\.|[^"\\\n])*"|/(?:\\.|[^/\\\n])+/|//[^\n]*|#[^\n]*'
OLD_ERROR = r"""value-type=["']error["'][^<>]*>"""
OLD_DECORATION = r"""^(?:title|name)\s*:\s*|[\s\"'*_`#“”.]+$|^[\s\"'*_`#“”]+"""


Clock = Callable[[], float]


class GrowthError(AssertionError):
    """The time grew too much for four times the text."""


def least_cost(work: Callable[[str], object], text: str, enough: float, clock: Clock) -> float:
    """Return the minimum CPU seconds of several runs of `work`. Stop early once a run takes no more than `enough`."""
    least = float("inf")
    for _ in range(RUNS):
        gc.disable()  # because a garbage collection's time depends on the whole process
        began = clock()
        work(text)
        least = min(least, clock() - began)
        gc.enable()
        if least <= enough:
            break
    return least


def check_growth(
    work: Callable[[str], object],
    made: Callable[[int], str],
    sizes: Iterable[int],
    *,
    budget_s: float = 0.0,
    clock: Clock = time.thread_time,
    rounds: int = ROUNDS,
) -> None:
    """Raise GrowthError at the first size whose cost is out of proportion, without trying larger ones.

    Sizes after the first that takes `MEASURABLE_SECONDS` are skipped. budget_s: seconds after which `work` stops
    itself.
    clock: returns the CPU seconds of the thread or process that does the work.
    """
    before, shorter = float("inf"), ""  # the first size has nothing to be compared with, so it has no limit
    for size in sizes:
        text = made(size)
        cost = least_cost(work, text, max(FLOOR_SECONDS, MOST_GROWTH * before, budget_s), clock)
        for left in range(rounds, -1, -1):
            if cost <= (enough := max(FLOOR_SECONDS, MOST_GROWTH * before, budget_s)):
                break
            if left == 0:
                shown = f"{text[:60]!r}...{text[-12:]!r}"
                raise GrowthError(
                    f"{len(text)} characters like {shown} took {cost:.4f} s, {len(shorter)} {before:.4f} s"
                )
            before = max(before, least_cost(work, shorter, 0.0, clock))
            cost = least_cost(work, text, enough, clock)
        if shorter and MEASURABLE_SECONDS < cost <= MOST_GROWTH * before:  # measurable, not excused by the budget
            return
        before, shorter = cost, text


# Generate texts that a pattern matches from its parse tree.


def samples(node: Any) -> list[str]:
    """Return short texts that a part of a pattern matches. Lookarounds are ignored, so a text may not match."""
    return list(dict.fromkeys(itertools.islice(_samples(node), SAMPLES))) or [""]


def _samples(items: Any) -> Iterator[str]:
    options = [_item_samples(op, argument) for op, argument in items]
    width = max((len(each) for each in options), default=0)
    for turn in range(width):  # each alternative of each part occurs in at least one text
        yield "".join(each[turn % len(each)] for each in options)


def _item_samples(op: Any, argument: Any) -> list[str]:
    match str(op):
        case "LITERAL":
            return [chr(argument)]
        case "NOT_LITERAL":
            return ["x" if argument != ord("x") else "y"]
        case "ANY":
            return ["x", '"', "\\"]
        case "IN":
            return _members(argument)
        case "BRANCH":
            return [text for branch in argument[1] for text in samples(branch)[:2]]
        case "SUBPATTERN":
            return samples(argument[3])
        case "ATOMIC_GROUP":
            return samples(argument)
        case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
            least, most, body = argument
            texts = [text * max(int(least), 1) for text in samples(body)]
            texts += [text * 2 for text in texts[:1] if int(most) > 1]
            return texts + ([""] if least == 0 else [])
        case _:
            return [""]


def _members(argument: Any) -> list[str]:
    kinds = {"DIGIT": "7", "NOT_DIGIT": "x", "SPACE": " ", "NOT_SPACE": "x", "WORD": "a", "NOT_WORD": "-"}
    if argument and str(argument[0][0]) == "NEGATE":
        barred = re.compile(_class_of(argument[1:]))
        return [each for each in ("a", "[", '"', "\\", " ", "!", "(") if not barred.fullmatch(each)][:3] or ["\u4e2d"]
    found = []
    for op, value in argument:
        if str(op) == "LITERAL":
            found.append(chr(value))
        elif str(op) == "RANGE":
            found.append(chr(value[0]))
        elif str(op) == "CATEGORY":
            found.append(kinds[str(value).removeprefix("CATEGORY_")])
    return found[:4]


def _class_of(members: Any) -> str:
    kinds = {"DIGIT": r"\d", "NOT_DIGIT": r"\D", "SPACE": r"\s", "NOT_SPACE": r"\S", "WORD": r"\w", "NOT_WORD": r"\W"}
    parts = []
    for op, value in members:
        if str(op) == "LITERAL":
            parts.append(re.escape(chr(value)))
        elif str(op) == "RANGE":
            parts.append(f"{re.escape(chr(value[0]))}-{re.escape(chr(value[1]))}")
        else:
            parts.append(kinds[str(value).removeprefix("CATEGORY_")])
    return f"[{''.join(parts)}]"


def parts_of(items: Any, before: str = "") -> Iterator[tuple[str, Any, bool]]:
    """Yield each part of a pattern: a text that matches preceding parts, the part, and whether it repeats unlimited."""
    for op, argument in items:
        match str(op):
            case "BRANCH":
                for branch in argument[1]:
                    yield before, branch, False
                    yield from parts_of(branch, before)
            case "SUBPATTERN":
                yield from parts_of(argument[3], before)
            case "ATOMIC_GROUP":
                yield from parts_of(argument, before)
            case "MAX_REPEAT" | "MIN_REPEAT" | "POSSESSIVE_REPEAT":
                yield before, argument[2], argument[1] > UNBOUNDED
                yield from parts_of(argument[2], before)
        before += _item_samples(op, argument)[0]


def attacks(pattern: re.Pattern[Any]) -> list[Callable[[int], str]]:
    """Return functions from a size to a text, which repeats one part of the pattern, alone or after matching text."""
    source = pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    tree = _parser.parse(source, pattern.flags & ~re.UNICODE if isinstance(pattern.pattern, bytes) else pattern.flags)
    pumps: dict[tuple[str, str], None] = {}
    for before, part, grows in parts_of(tree):
        for text in samples(part):
            pumps |= {(before, text): None, ("", before): None} if grows else {}  # a start without its end
            pumps[("", text)] = None
    for text in samples(tree):
        pumps[("", text)] = None
        for cut in range(1, min(len(text), 4)):  # prefixes that start a match again and again
            pumps[("", text[:cut])] = None
    chosen = [pump for pump in sorted(pumps, key=lambda pump: not pump[0]) if pump[1]][:MOST_PUMPS]
    return [
        lambda size, before=before, text=text, end=end: before + text * (size // len(text)) + end  # type: ignore[misc]
        for before, text in chosen
        for end in ("!\x00", "")
    ]


def uses(pattern: re.Pattern[Any], methods: set[str]) -> list[Callable[[str], object]]:
    """Return functions that apply the pattern with the methods used in the package."""
    is_bytes = isinstance(pattern.pattern, bytes)

    def call(method: str, text: str) -> object:
        given: Any = text.encode("latin-1", "replace") if is_bytes else text
        match method:
            case "match" | "fullmatch":
                return getattr(pattern, method)(given)
            case _:  # findall covers `search` and the other methods, because it continues after each match
                return pattern.findall(given)

    ways = {"match" if method == "match" else "fullmatch" if method == "fullmatch" else "findall" for method in methods}
    return [lambda text, way=way: call(way, text) for way in sorted(ways)]  # type: ignore[misc]


def check_pattern(pattern: re.Pattern[Any], methods: set[str], rounds: int = ROUNDS) -> None:
    for work in uses(pattern, methods):
        for made in attacks(pattern):
            check_growth(work, made, SIZES, rounds=rounds)


# Find all patterns of the package.


@cache
def _modules() -> dict[str, ModuleType]:
    found = {}
    for info in pkgutil.walk_packages(notso.__path__, "notso.", onerror=lambda name: None):
        if info.name.endswith("__main__"):
            continue
        try:
            __import__(info.name)
            found[info.name] = sys.modules[info.name]
        except ImportError as error:
            assert (error.name or "").split(".")[0] in OPTIONAL, f"{info.name}: {error}"
    return found


def _patterns_in(value: object) -> Iterator[re.Pattern[Any]]:
    if isinstance(value, re.Pattern):
        yield value
    elif isinstance(value, Mapping):
        for each in list(value.values()):
            yield from _patterns_in(each)
    elif isinstance(value, list | tuple | set | frozenset):
        for each in value:
            yield from _patterns_in(each)


def _sources() -> Iterator[tuple[ModuleType, tuple[ast.AST, ...]]]:
    for module in _modules().values():
        if module.__file__ and module.__file__.endswith(".py"):
            yield module, nodes(Path(module.__file__))


LOCAL = {  # source of a pattern built within a function -> an example of its value
    """_CELL % (types + rb\'\'\'|s=["'](?:%b)["']\'\'\' % styles if styles else types)""": tables._CELL
    % rb"""t=["'](?:e|inlineStr|s)["']|s=["'](?:1|2)["']""",
    'rf"(?<![\\\\{character}]){character}{{{len(mark)}}}(?!{character})"': r"(?<![\\\*])\*{2}(?!\*)",
    'rf"{re.escape(scheme)}://{hosts}{ports}"': r"https://[a-z0-9.-]+\.example\.org(?::[0-9]{1,5})?",
    """f"[{''.join(map(re.escape, lengths))}]\"""": "[<|]",
    '"|".join(map(re.escape, runs))': "日本語|手机",
    'b"|".join(re.escape(each) for each in (CLOSE, *barred))': rb"\]\]|<\|im_end\|>|<think>",
    "cls.PATTERN + re.escape(cls.SUFFIX)": r"[0-9a-f]{64}\.kv4",
    r'rf"(?i){re.escape(Path(known.filename).stem)}[\W\d_]*\.gguf[\W\d_]*"': r"(?i)SmolLM3\-Q8_0[\W\d_]*\.gguf[\W\d_]*",
}
EXAMPLES = {ast.dump(ast.parse(source, mode="eval").body): example for source, example in LOCAL.items()}


@cache
def collected() -> dict[str, tuple[re.Pattern[Any], set[str]]]:
    """Return pattern and methods called on it, by location in the source."""
    sources = list(_sources())
    called: dict[str, set[str]] = {}
    for _, inside in sources:
        for node in inside:
            if isinstance(node, ast.Attribute) and node.attr in METHODS:
                name = node.value.id if isinstance(node.value, ast.Name) else getattr(node.value, "attr", "")
                called.setdefault(name, set()).add(node.attr)
    found: dict[str, tuple[re.Pattern[Any], set[str]]] = {}
    for name, module in _modules().items():
        for attribute, value in vars(module).items():
            for number, pattern in enumerate(_patterns_in(value)):
                methods = called.get(attribute, {"match", "findall"})
                found.setdefault(f"{name}.{attribute}[{number}]", (pattern, methods))
    known = {pattern.pattern for pattern, _ in found.values()}
    for module, inside in sources:
        for node in inside:
            is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
            if not is_call or not isinstance(node.func.value, ast.Name) or node.func.value.id != "re":
                continue
            if node.func.attr not in (*METHODS, "compile"):
                continue
            source = _source_of(node.args[0], module)
            if source in known:
                continue
            methods = {node.func.attr} if node.func.attr != "compile" else {"match", "findall"}
            found[f"{module.__name__}:{node.lineno}"] = (re.compile(source), methods)
    return found


def _source_of(argument: ast.expr, module: ModuleType) -> Any:
    if (example := EXAMPLES.get(ast.dump(argument))) is not None:
        return example
    try:
        return eval(compile(ast.Expression(argument), "pattern", "eval"), vars(module))  # noqa: S307 - of our own source
    except NameError as error:
        raise AssertionError(
            f"{module.__name__}: give an example of {ast.unparse(argument)} in LOCAL: {error}"
        ) from None


def test_every_repetition_of_a_pattern_is_attacked() -> None:
    tree = _parser.parse(r"a(?:b(?:c+|d)*e)+f{2,99}g{1,3}")
    grows = [(before, samples(part)[0]) for before, part, grows in parts_of(tree) if grows]
    assert grows == [("a", "bce"), ("ab", "c"), ("ab", "c"), ("abce", "f")]
    assert any(attack(64).startswith("ab" + "c" * 32) for attack in attacks(re.compile(r"ab(?:c+)+d")))


def test_patterns_are_found_in_containers() -> None:
    one, two, three = (re.compile(each) for each in "abc")
    assert [*_patterns_in({"x": [one, {"y": two}], "z": (three, 1)})] == [one, two, three]


def test_patterns_of_the_package_are_collected() -> None:
    sources = {pattern.pattern for pattern, _ in collected().values()}
    assert len(sources) >= 60
    assert any("x-anthropic-billing-header" in str(source) for source in sources)


def test_pattern_time_grows_in_proportion_to_text_length() -> None:
    faults, seen = [], set()
    for where, (pattern, methods) in collected().items():
        key = pattern.pattern, pattern.flags, frozenset(methods)
        if key in seen:
            continue
        seen.add(key)
        try:
            check_pattern(pattern, methods)
        except GrowthError as error:
            faults.append(f"{where}: {error}")
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(
    ("source", "method"),
    [
        (OLD_VOLATILE_LINE, "match"),
        (OLD_PIECE, "findall"),
        (OLD_LITERAL, "sub"),
        (OLD_DECORATION, "sub"),
        (OLD_ERROR, "search"),
    ],
)
def test_ambiguous_or_quadratic_pattern_is_detected(source: str, method: str) -> None:
    with pytest.raises(GrowthError):
        check_pattern(re.compile(source), {method}, rounds=1)
