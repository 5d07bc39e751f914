"""llama.cpp's grammars and lists of choices: which texts are of them, and where they are wrong."""

from __future__ import annotations

import json
from typing import Any

import pytest

from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.sampling.gbnf import MAX_NESTED
from notso.smollm3.sampling.grammar import Grammars, answer_part
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
def grammars(small_tokenizer: Tokenizer) -> Grammars:
    return Grammars(small_tokenizer)


def is_of(grammars: Grammars, tokenizer: Tokenizer, kind: Any, source: str, text: str) -> bool:
    matcher = grammars.matcher([answer_part(Grammar(kind, source))], "grammar")
    return matcher.takes_all(tokenizer.encode(text)) and matcher.may_end


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
    ],
)
def test_which_texts_are_of_a_grammar(
    grammars: Grammars, small_tokenizer: Tokenizer, source: str, texts: list[str], others: list[str]
) -> None:
    for text in texts:
        assert is_of(grammars, small_tokenizer, "gbnf", source, text), text
    for text in others:
        assert not is_of(grammars, small_tokenizer, "gbnf", source, text), text


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("", "no rule root"),
        ("root ::= nothing", "no rule nothing"),
        ('root ::= "a"\nroot ::= "b"', "line 2: root is there twice"),
        ("root = 1", "line 1: '=' cannot stand here"),
        ('root "a"', "::= is missing"),
        ('root ::= ("a"', r"\) is missing"),
        ('root ::= "a")', r"'\)' cannot stand here"),
        ("root ::= *", "repeats nothing"),
        ('root ::= "a', "cannot stand here"),
        ('root ::= "a\\q"', "is no escape"),
        ('root ::= "\\ud800"', "is no character"),
        ("root ::= [^]", "the set is empty"),
        ("root ::= <[5]>", "cannot stand here"),
        ('root ::= root "a"', "no text follows it"),
        ("root ::= " + "(" * (MAX_NESTED + 1) + '"a"' + ")" * (MAX_NESTED + 1), "nested deeper"),
        ('root ::= ("a"{1000}){1000}', "refused|cannot follow"),
    ],
)
def test_what_is_wrong_with_a_grammar_is_told(grammars: Grammars, source: str, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        matcher = grammars.matcher([answer_part(Grammar("gbnf", source))], "grammar")
        for _ in range(20):
            matcher.take(int(matcher.allowed().argmax()))
    assert caught.value.param == "grammar" and len(str(caught.value)) < 300


def test_one_of_several_texts(grammars: Grammars, small_tokenizer: Tokenizer) -> None:
    choices = ["yes", "yes, but", 'no\n"\\', "ü", "yes"]
    for text in choices:
        assert is_of(grammars, small_tokenizer, "choice", json.dumps(choices), text)
    assert not is_of(grammars, small_tokenizer, "choice", json.dumps(choices), "yes,")
    for wrong in ("[]", '["a", 1]', '{"a": 1}', "yes", '[""]'):
        with pytest.raises(InvalidRequestError, match="list of texts"):
            answer_part(Grammar("choice", wrong))
