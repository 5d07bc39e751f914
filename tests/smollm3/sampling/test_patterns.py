"""Patterns in schemas have ECMA-262's meaning: Node checks generated patterns, texts and generated answers."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
from collections import Counter
from functools import cache

import llguidance
import pytest

from notso.smollm3.sampling.grammar import JSON_STYLE, MAX_GRAMMAR_SIZE, MAX_LEXER_STATES, MAX_ROW_ITEMS
from notso.smollm3.sampling.schemas import patterns
from notso.smollm3.sampling.schemas.json_schema import enforced_schema
from notso.smollm3.sampling.schemas.negation import pattern_excluding
from notso.smollm3.sampling.schemas.patterns import PatternError, library_pattern, matches

NODE = shutil.which("node")
PATTERNS, TEXTS, ANSWERS, SEED = 600, 8, 4, 36
VOCABULARY = llguidance.LLTokenizer("byte")
LETTERS = [*"abAz09_-[]^&|.\\/{}u4ck\"' \t\n\r", "\u0085", "\u00a0", "\ufeff", "\u2028", "é", "ß", "١", "K", "😀", "中"]
JUDGE = """
const rows = JSON.parse(require("fs").readFileSync(0, "utf8"));
console.log(JSON.stringify(rows.map(([pattern, texts]) => {
  let read = null;
  try { read = new RegExp(pattern, "u"); } catch { try { read = new RegExp(pattern); } catch { return null; } }
  return texts.map((text) => read.test(text));
})));
"""
NOT_SUPPORTED = (
    *("together with a Unicode property", "a lookbehind", "a backreference", "control characters"),
    *("lone surrogate", "nothing satisfies it", "matches no text", "more lookarounds"),
)
"""Parts of error messages for valid patterns that may be rejected."""


class Writer:
    """Generates patterns, most of them valid."""

    def __init__(self, seed: int, looks: float = 0.0) -> None:
        """looks: fraction of groups that are lookaheads or word boundaries."""
        self.random = random.Random(seed)
        self.looks = looks
        self.groups = 0

    def pattern(self) -> str:
        inner = self.options(2)
        before, after = self.random.choice(
            [
                ("", ""),
                ("", ""),
                ("^", "$"),
                ("^(?:", ")$"),
                ("^", ""),
                ("", "$"),
                ("(^|,)", "(,|$)"),
                ("a^", ""),
                ("^^", "$$"),
            ]
        )
        return before + inner + after

    def options(self, depth: int) -> str:
        return "|".join(self.sequence(depth) for _ in range(self.random.choice([1, 1, 1, 2, 3])))

    def sequence(self, depth: int) -> str:
        return "".join(self.term(depth) for _ in range(self.random.choice([0, 1, 1, 2, 2, 3])))

    def term(self, depth: int) -> str:
        repeats = ["*", "+", "?", "{2}", "{1,3}", "{0}", "{2,}", "*?", "{1,2}?", "{,3}", "{a}", "{3,1}", "**"]
        return self.atom(depth) + (self.random.choice(repeats) if self.random.random() < 0.3 else "")

    def atom(self, depth: int) -> str:
        kind, choose = self.random.random(), self.random.choice
        if kind < 0.3:
            return choose([*"abAz019_-/,:;<>=!@#~%'\" é中]}{", "😀", "."])
        if kind < 0.42:
            return choose([r"\d", r"\D", r"\w", r"\W", r"\s", r"\S", r"\t", r"\n", r"\f", r"\p{L}", r"\P{N}", r"\p{L"])
        if kind < 0.52:
            escapes = [
                r"\.",
                r"\[",
                r"\-",
                r"\/",
                r"\_",
                r"\a",
                r"\x41",
                r"\u0041",
                r"\u{41}",
                r"\u{1F600}",
                r"\ud83d\ude00",
            ]
            return choose(
                [*escapes, r"\cJ", r"\cI", r"\c", r"\x4", r"\u00", r"\0", r"\101", r"\8", r"\^", r"\{", r"\k", r"\cA"]
            )
        if kind < 0.74:
            return self.characters()
        if kind < 0.94 and depth:
            if self.random.random() < self.looks:
                return choose(["(?=", "(?!", "(?!", r"\b(?:", r"\B(?:"]) + self.options(depth - 1) + ")"
            self.groups += 1
            return choose(["(?:", "(", f"(?<g{self.groups}>"]) + self.options(depth - 1) + ")"
        return choose([r"\1", "(?=a)", "(?!b)", r"\b", r"\B", "(?<=a)", "(?<!a)", r"\k<g1>", "a", "b", "(", ")"])

    def characters(self) -> str:
        members = [
            *"abz0-[^|.{}()$+*?/,_&",
            "&&",
            "~~",
            "--",
            "[:alpha:",
            "a-z",
            "0-9",
            "à-ü",
            "中-丰",
            "😀",
            "é",
            "z-a",
        ]
        members += [
            r"\]",
            r"\d",
            r"\w",
            r"\s",
            r"\S",
            r"\D",
            r"\W",
            r"\b",
            r"\-",
            r"\n",
            r"\x41",
            r"\u{41}",
            r"\cI",
            r"\c",
        ]
        members += [r"\0", r"\p{L}", r"\\", r"a-\d", r"\d-z", r"\cA", r"\c0", '"', r"[\\"]
        inner = "".join(self.random.choice(members) for _ in range(self.random.randint(0, 4)))
        return f"[{self.random.choice(['', '', '^'])}{inner}]"

    def text(self) -> str:
        return "".join(self.random.choice(LETTERS) for _ in range(self.random.choice([0, 1, 1, 2, 2, 3])))


def matcher_of(pattern: str) -> llguidance.LLMatcher:
    schema = {"type": "string", "pattern": pattern, "x-guidance": JSON_STYLE}
    limits = llguidance.LLParserLimits(
        max_lexer_states=MAX_LEXER_STATES,
        max_grammar_size=MAX_GRAMMAR_SIZE,
        max_items_in_row=MAX_ROW_ITEMS,
        verbose_errors=False,
    )
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    return llguidance.LLMatcher(VOCABULARY, grammar, log_level=0, limits=limits)


def is_held(pattern: str, text: str) -> bool:
    """Return whether an answer may be this text."""
    matcher, written = matcher_of(pattern), list(json.dumps(text, ensure_ascii=False).encode())
    return bool(matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting())


def answer(pattern: str, drawn: random.Random) -> str | None:
    """Return a text that the pattern allows, drawn byte by byte, or None if it does not end soon."""
    matcher, written = matcher_of(pattern), b""
    while len(written) < 80:
        bits = matcher.compute_bitmask()
        mask = int.from_bytes(bits[:32], "little")
        allowed = [byte for byte in range(256) if mask >> byte & 1]
        likely = [byte for byte in allowed if byte in b'abAz019_-[]^&|./{}uck"\\']
        ends = written and 34 in allowed and drawn.random() < 0.4
        byte = 34 if ends else drawn.choice(likely if likely and drawn.random() < 0.6 else allowed)
        matcher.consume_token(byte)
        written += bytes([byte])
        if matcher.is_accepting() and len(written) > 1:
            return str(json.loads(written))
    return None


converted = cache(library_pattern)  # takes most of the time of this file


def refusal_of(pattern: str) -> str | None:
    try:
        library = converted(pattern)
    except PatternError as error:
        return str(error)
    matcher = matcher_of(library)
    if not matcher.is_error():
        return None
    error = matcher.get_error()
    if "Regex is empty" in error:
        return "nothing satisfies it"
    return "^ or $ in the middle" if "lookarounds not supported" in error else error


def is_writable(text: str) -> bool:
    return all(letter >= " " or letter in "\b\t\n\f\r" for letter in text) and "\x7f" not in text


@pytest.mark.skipif(NODE is None, reason="node is not installed (Debian: apt-get install nodejs)")
@pytest.mark.parametrize(
    ("seed", "looks"), [pytest.param(SEED, 0.0, marks=pytest.mark.long("engine")), (SEED + 1, 0.8)]
)
def test_node_agrees_on_generated_patterns(seed: int, looks: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "library_patterns", cache(patterns.library_patterns))  # also called by `converted`
    writer, rows = Writer(seed, looks), []
    for _ in range(PATTERNS):
        pattern = writer.pattern()
        texts, refusal = [writer.text() for _ in range(TEXTS)], refusal_of(pattern)
        answers = []
        if refusal is None:
            library = converted(pattern)
            answers = [text for _ in range(ANSWERS) if (text := answer(library, writer.random)) is not None]
        rows.append((pattern, refusal, texts, answers))
    judged = subprocess.run(
        [str(NODE), "-e", JUDGE],
        input=json.dumps([(pattern, texts + answers) for pattern, _, texts, answers in rows]),
        capture_output=True,
        text=True,
        check=True,
    )
    faults, counted = [], Counter[str]()
    for (pattern, refusal, texts, answers), said in zip(rows, json.loads(judged.stdout), strict=True):
        if said is None:
            counted["invalid"] += 1
            faults += [f"{pattern!r} is invalid, and taken"] if refusal is None else []
        elif refusal is not None:
            counted["not supported"] += 1
            known = any(name in refusal for name in NOT_SUPPORTED)
            faults += [] if known else [f"{pattern!r} is valid, and refused: {refusal}"]
        else:
            counted["valid"] += 1
            counted["answers"] += len(answers)
            library = patterns.library_patterns(pattern)
            for text, matches in zip(texts + answers, said, strict=True):
                is_read_by_units = any(letter > "\uffff" for letter in text)  # without the flag `u`, we may reject it
                held = text in answers or all(is_held(each, text) for each in library)
                if held > matches or (held < matches and is_writable(text) and not is_read_by_units):
                    faults.append(f"{pattern!r} {'takes' if held else 'refuses'} {text!r}: {library!r}")
    assert not faults, "\n".join(faults[:20])
    assert counted["valid"] >= 280 and counted["answers"] >= 800 and counted["invalid"] >= 20, counted


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("^[^[]$", ["a", "]"], ["["]),
        ("^[a&&b]$", ["a", "&", "b"], ["c"]),
        ("^[[:alpha:]]$", [":]", "a]"], ["a", "b]"]),
        (r"^\s$", ["\ufeff", "\u2028", " "], ["\u0085", "\u200b"]),
        (r"^[\d\w]$", ["1", "_"], ["١", "é"]),
        (r"^.$", ["a", "😀", "\u0085"], ["\n", "\u2028", "\r"]),
        (r"^\cI\u{41}\x41\/$", ["\tAA/"], ["tAA/"]),
        (r"^\-\u{2}$", ["-uu"], ["-\x02"]),  # without the flag u, \- is valid
        (r"^[]$|^[^]$", ["a", "\n"], ["", "ab"]),
        ('^[^"]$', ["a", "\\"], ['"']),
        (r"^[^\\]$", ["a", '"'], ["\\"]),
        (r"^(?<year>\d{4})-\d\d$", ["2026-11"], ["26-11"]),
    ],
)
def test_patterns_have_ecmascript_semantics(pattern: str, texts: list[str], others: list[str]) -> None:
    library = library_pattern(pattern)
    assert [text for text in texts + others if is_held(library, text)] == texts


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        (r"\p{L}(?=b)", "a lookahead together with a Unicode property"),
        (r"^(?=a)b", "matches no text"),
        ("(?<!a)b", "a lookbehind"),
        (r"\b\p{L}", "a word boundary together with a Unicode property"),
        ("(?!a{9000})(?:a{9000}|b)*(?=a{90}b)", "more lookarounds than are supported"),
        (r"(a)\1", "a backreference"),
        (r"(?<n>a)\k<n>", "a backreference"),
        ("a{1000000}", "repetitions"),
        ("(" * 65 + ")" * 65, "nested more than 64 levels deep"),
        ("[b-a]", "a range is out of order, at character 4"),
        ("a(b", "unclosed group"),
        *(
            (text, "control characters")
            for text in (r"\x00", r"a\x1F", r"\u0007", r"[\x00]", "\x01", r"\cA", r"\0", "[\x02]")
        ),
    ],
)
def test_unsupported_patterns_are_refused_by_name(pattern: str, reason: str) -> None:
    with pytest.raises(PatternError, match=reason):
        library_pattern(pattern)
    assert library_pattern(r"[\x00-\x7f]") and pattern_excluding(["a\x00"]) is None


@pytest.mark.parametrize("excluded", ['"', "\\", "\n", "a", "]"])
def test_excluded_constant_is_not_accepted(excluded: str) -> None:
    """If a class contains all control characters, the library allows every escape sequence."""
    schema = enforced_schema({"type": "string", "not": {"const": excluded}}, "tools").schema
    schema |= {"x-guidance": JSON_STYLE}
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    for text in ('"', "\\", "\n", "a", "]", excluded * 2):
        matcher = llguidance.LLMatcher(VOCABULARY, grammar, log_level=0)
        written = list(json.dumps(text).encode())
        is_taken = matcher.try_consume_tokens(written) == len(written) and matcher.is_accepting()
        assert is_taken == (text != excluded), text


@pytest.mark.parametrize(
    ("pattern", "texts", "others"),
    [
        ("^a{0,10}$", ["", "a" * 10], ["a" * 11, "a" * 20]),
        ("^x{1,30}-", ["x" * 30 + "-"], ["x" * 31 + "-"]),
        ("^.*$", ['a"b', "a\\b", "a\tb", "\u200b"], ["a\nb"]),
        (r"\bcat\b", ["a cat", "cat"], ["cats", "concat"]),
    ],
)
def test_matches_tells_whether_a_name_has_a_pattern(pattern: str, texts: list[str], others: list[str]) -> None:
    for text in (*texts, *others):
        assert matches(library_pattern(pattern), text) == (text in texts), text
