"""llama.cpp's grammars and lists of choices: which texts match, and where errors are reported."""

from __future__ import annotations

import json
import random
from typing import Any

import llguidance
import pytest

from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.sampling.gbnf import MAX_NESTED, gbnf_to_lark
from notso.smollm3.sampling.grammar import MAX_ROW_ITEMS, GrammarCompiler, grammar_part
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.request_options import Grammar

JSON = r"""
# as people write it for llama.cpp
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws

object ::=
  "{" ws (
            string ":" ws value
    ("," ws string ":" ws value)*
  )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws
string ::=
  "\"" (
    [^"\\\x7F\x00-\x1F] |
    "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4})
  )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""
SUMS = (
    'root  ::= (expr "=" ws term "\\n")+\nexpr ::= term ([-+*/] term)*\r\nterm ::= name |\n num | "(" ws expr ")" ws\n'
    + ("name ::= [a-z] [a-z0-9_]* ws\nnum-1 ::= [0-9]\nnum ::= num-1+ ws\nws ::= [ \\t\\n]*")
)


@pytest.fixture(scope="module")
def grammars(small_tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(small_tokenizer)


def is_of(grammars: GrammarCompiler, tokenizer: Tokenizer, kind: Any, source: str, text: str) -> bool:
    matcher = grammars.matcher([grammar_part(Grammar(kind, source))], "grammar")
    return matcher.try_consume_all(tokenizer.encode(text)) and matcher.may_end


@pytest.mark.parametrize(
    ("source", "texts", "others"),
    [
        (JSON, ['{"a": [1, 2.5e-1, "x\\n\\u00e9 \\" ü", null]}', "{}"], ['{"a": 1,}', "[1]", '{"a": "\x01"}']),
        (SUMS, ["a+1=2\n", "(x_1 *3)-2= y\nb=c\n"], ["a+1=2", "=2\n", "A=1\n"]),
        ('root ::= "abc" | [a-z]+', ["abc", "abd", "ab"], ["", "aB"]),
        ('root ::= [^a] "é" [あ-ん] "\\u3042\\U0001F99C"', ["béいあ🦜"], ["aéいあ🦜", "béカあ🦜"]),
        ("root ::= .{2}", ["\nx", "üü"], ["x", "xyz"]),
        ("root ::= [-a] [a-] [\\]^] [\\^x]", ["--]^", "aa^x"], ["b-]^", "a^]x"]),
        ('root ::= "a"{2,3} "b"{ 1, } ("c" | )', ["aab", "aaabbbc"], ["ab", "aaaab", "aabcc"]),
        ('root ::= ""', [""], ["a"]),
        ("root ::= [+--/] [a-c-e] [--]", ["+a-", ",--", "/e-"], [".a-", "+d-", "-b+"]),
        ('root ::= "a"{0} "b"{ 0 , 0 } "c"', ["c"], ["ac", "bc"]),
    ],
)
def test_gbnf_grammar_accepts_only_matching_texts(
    grammars: GrammarCompiler, small_tokenizer: Tokenizer, source: str, texts: list[str], others: list[str]
) -> None:
    for text in texts:
        assert is_of(grammars, small_tokenizer, "gbnf", source, text), text
    for text in others:
        assert not is_of(grammars, small_tokenizer, "gbnf", source, text), text


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("", "rule root is not defined"),
        ("root ::= nothing", "rule nothing is not defined"),
        ('root ::= "a"\nroot ::= "b"', "line 2: rule root is defined twice"),
        ("root = 1", "line 1: '=' is not allowed here"),
        ('root "a"', "::= is missing"),
        ('root ::= ("a"', r"\) is missing"),
        ('root ::= "a")', r"'\)' is not allowed here"),
        ("root ::= *", "has nothing to repeat"),
        ('root ::= "a', "is not allowed here"),
        ('root ::= "a\\q"', "is not an escape"),
        ('root ::= "\\ud800"', "is not a character"),
        ("root ::= [^]", "the set is empty"),
        ("root ::= <[5]>", "is not allowed here"),
        ('root ::= root "a"', "matches no text"),
        ("root ::= " + "(" * (MAX_NESTED + 1) + '"a"' + ")" * (MAX_NESTED + 1), "nested more than"),
        ('root ::= ("a"{1000}){1000}', "refused|can no longer follow"),
        ("root ::= " + "(" * 20 + '"a"' + (")" + "?" * 60) * 20, "nested"),  # deeper than Python's recursion limit
    ],
)
def test_invalid_gbnf_grammar_error_names_the_cause(grammars: GrammarCompiler, source: str, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        matcher = grammars.matcher([grammar_part(Grammar("gbnf", source))], "grammar")
        for _ in range(20):
            matcher.consume(int(matcher.allowed().argmax()))
    assert caught.value.param == "grammar" and len(str(caught.value)) < 300


def test_rules_that_never_end_are_removed_or_refused(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    """The library would follow such a rule during an answer until it reaches its item limit."""
    source = (
        'root ::= "x" | "a" bad | other bad? | (bad "c")* "d"\nbad ::= "b" bad | worse\nworse ::= bad\nother ::= "o"'
    )
    for text in ("x", "o", "d"):
        assert is_of(grammars, small_tokenizer, "gbnf", source, text)
    matcher = grammars.matcher([grammar_part(Grammar("gbnf", source))], "grammar")
    assert not matcher.try_consume_all(small_tokenizer.encode("a"))
    for never in ('root ::= "b" root', "root ::= a\na ::= root", 'root ::= "a" root{1,3}'):
        with pytest.raises(InvalidRequestError, match="root never ends"):
            grammar_part(Grammar("gbnf", never))


def _grammar(drawn: random.Random) -> str:
    names = ["root", *(f"r{number}" for number in range(drawn.randint(0, 3)))]

    def part(depth: int) -> str:
        kind = drawn.random()
        if kind < 0.45 or not depth:
            return drawn.choice(['"a"', '"ab"', '""', "[a-c]", "[^a]", '", "'])
        return drawn.choice(names) if kind < 0.85 else f"({options(depth - 1)})"

    def sequence(depth: int) -> str:
        repeats = ["", "", "", "*", "+", "?", "{2}", "{1,3}", "{0,2}"]
        return " ".join(part(depth) + drawn.choice(repeats) for _ in range(drawn.randint(0, 3)))

    def options(depth: int) -> str:
        return " | ".join(sequence(depth) for _ in range(drawn.choice([1, 2, 2, 3])))

    return "\n".join(f"{name} ::= {options(2)}" for name in names)


def test_random_grammars_do_not_fail_mid_answer() -> None:
    drawn, vocabulary, followed = random.Random(21), llguidance.LLTokenizer("byte"), 0
    for _ in range(240):
        source = _grammar(drawn)
        try:
            lark = gbnf_to_lark(source)
        except InvalidRequestError:
            continue
        limits = llguidance.LLParserLimits(max_items_in_row=MAX_ROW_ITEMS, verbose_errors=False)
        grammar = json.dumps({"grammars": [{"lark_grammar": lark}]})
        matcher = llguidance.LLMatcher(vocabulary, grammar, log_level=0, limits=limits)
        followed += not matcher.is_error()
        for _ in range(40):
            if matcher.is_error() or matcher.is_stopped():
                break
            bits = matcher.compute_bitmask()
            allowed = [byte for byte in range(256) if bits[byte // 8] >> byte % 8 & 1]
            if not matcher.is_error() and allowed:
                matcher.consume_token(drawn.choice([byte for byte in allowed if byte in b"abc, "] or allowed))
        # The number of parses of a text is limited, and each of these grammars is highly ambiguous.
        assert not matcher.is_error() or "row has" in matcher.get_error(), f"{source}: {matcher.get_error()}"
    assert followed >= 120


def test_choice_grammar_accepts_only_listed_texts(grammars: GrammarCompiler, small_tokenizer: Tokenizer) -> None:
    choices = ["yes", "yes, but", 'no\n"\\', "ü", "yes"]
    for text in choices:
        assert is_of(grammars, small_tokenizer, "choice", json.dumps(choices), text)
    assert not is_of(grammars, small_tokenizer, "choice", json.dumps(choices), "yes,")
    for wrong in ("[]", '["a", 1]', '{"a": 1}', "yes", '[""]'):
        with pytest.raises(InvalidRequestError, match="list of nonempty texts"):
            grammar_part(Grammar("choice", wrong))
