"""Processing time of client texts grows roughly in proportion to their length, up to the maximum: see test_growth.py.

Each entry point gets texts that could make its parser backtrack or rescan: unclosed, escaped, repeated and deeply
nested parts of its own syntax.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path

import pytest
from architecture.test_growth import SMALL_SIZES, Clock, check_growth

from notso.qtensor import GGUFFile
from notso.smollm3.diagnostics.synth import write_synthetic
from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.output.lookahead import StopStrings
from notso.smollm3.output.tool_parser import ToolCallParser
from notso.smollm3.sampling.grammar import grammar_part
from notso.smollm3.sampling.schemas.json_schema import MAX_CHARACTERS, enforced_schema
from notso.smollm3.text.chat_template import ChatTemplate
from notso.smollm3.text.tokenizer import SpecialTexts, Tokenizer
from notso.smollm3.values.messages import Message
from notso.smollm3.values.request_options import Grammar
from notso.text_file import NotTextError, decode_text
from notso.web.api.chat_completions.fields import parse_chat_request
from notso.web.api.completions.fields import parse_text_request
from notso.web.api.llama_cpp.request import parse_native_request
from notso.web.api.messages.request import parse_message_request, strip_volatile_lines
from notso.web.api.request_fields.fields import parse_object
from notso.web.api.responses.request import parse_response_request
from notso.web.chat.files.imports import read_chats
from notso.web.chat.suggestions import parse_questions
from notso.web.chat.titles import parse_title
from notso.web.edge.errors import ApiError
from notso.web.edge.forms import parse_form
from notso.web.rendering.budget import MESSAGE_SECONDS
from notso.web.rendering.markdown import render_markdown
from notso.web.rendering.streaming import complete
from notso.web.store.sql.search_words import extract_snippet, fts5_query, parse_query, to_tsvector
from notso.web.tools.calculator import calculate
from notso.web.tools.mcp_config import read_commented_json, read_mcp_config
from notso.web.values.durations import parse_duration
from notso.web.values.errors import Problem, SettingsError, ToolError
from notso.web.values.visible_text import sanitize_line

ROOT = Path(__file__).parents[2]
KIB, MIB = 1 << 10, 1 << 20
UNNOTICED_SECONDS = 0.05
"""Shorter times depend on caches shared with other processes, and delay no other request noticeably."""
REFUSALS = (InvalidRequestError, ApiError, Problem, ToolError, SettingsError, NotTextError)

TEXT = ("a", " ", "\n", "\r", "a ", "\u4e2d", "\U0001f99c", "e\u0301", "\u00a0", "'s", "1", "<", "!", "a=a", "\x85")
JSON = ('"', '\\"', "[", "{", '[{"a":', "\\u0041", '"a":1,', "0", ",", "\\\\")
MARKUP = (
    "*",
    "**a",
    "_a",
    "a*",
    "`",
    "`a``",
    "[",
    "![",
    "[](",
    "](",
    "[a](<",
    "> ",
    "- ",
    "1. ",
    "#",
    "|",
    "|-",
    "$a$",
)
MARKS = (*MARKUP, "\\(", "$$", "http://", "[^a]", "~~", "<b>", "&amp;", "\\*", "```\n", "    a\n", "- a\n  ", "* * *\n")
PATTERN = (
    "[",
    "(",
    "\\u{",
    "[^",
    "[\\",
    "a|",
    "(?:",
    "a{1,2}",
    "\\",
    ".",
    "[[:alpha:]]",
    "&&",
    "\\p{L}",
    "(?=a)",
    "\\c",
)
GRAMMAR = (
    '"',
    '"\\',
    '\\"',
    "/\\",
    "/a",
    "//",
    "#",
    "[",
    "[\\",
    "(",
    "a ",
    "a: b\n",
    "a ::= b\n",
    "|",
    "{",
    "&",
    "%json",
)
HTML = ("<b>", "<b id=x>", "</b>", "<!--", "<a href='", "<table>", "<p>", "&", "<svg>", "<i><p>", "<hx-")
CALLS = ("<tool_call>", "</tool_call>", '"', '\\"', '{"name": "', "<tool_call>\n{", '"</tool_call>', "\n")


@dataclass(frozen=True)
class Entry:
    """A function to test, its maximum number of characters, texts to repeat, and what precedes and follows them."""

    work: Callable[[str], object]
    most: int
    pumps: Iterable[str]
    before: str = ""
    after: str = ""
    budget_s: float = 0.0
    clock: Clock = time.thread_time

    @property
    def sizes(self) -> Iterable[int]:
        """Yield small steps first: if a few characters double the cost, larger sizes would take forever."""
        yield from (size + len(self.before) for size in SMALL_SIZES)
        size = 256
        while size < self.most:
            yield size
            size *= 4
        yield self.most


def body(
    parse: Callable[[dict[str, object]], object], make: Callable[[str], dict[str, object]]
) -> Callable[[str], object]:
    """Return a function that parses a text in a JSON body as an API does."""
    return lambda text: parse(parse_object(json.dumps(make(text)).encode()))


def asked(text: str) -> list[object]:
    return [{"role": "system", "content": text}, {"role": "user", "content": text}]


def tool(pattern: str) -> list[object]:
    schema = {"type": "object", "properties": {pattern[:32]: {"type": "string", "pattern": pattern}}}
    return [{"type": "function", "function": {"name": "f", "parameters": schema, "strict": True}}]


def grammar(kind: str) -> Callable[[str], object]:
    return lambda text: grammar_part(Grammar(kind, text))  # type: ignore[arg-type]


@cache
def small_model() -> tuple[Tokenizer, ChatTemplate]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "m.gguf"
        write_synthetic(path, layers=1, hidden=256, ffn=256, heads=4, kv_heads=1, vocab=4096)
        with GGUFFile.open(path) as file:
            tokenizer = Tokenizer.from_gguf(file.metadata)
    source = (ROOT / "training/chat_template.jinja").read_text()
    return tokenizer, ChatTemplate(source, tokenizer.specials)


def encoded(text: str) -> object:
    tokenizer, _ = small_model()
    ids = tokenizer.encode(text, control=True)
    return [tokenizer.decode([token]) for token in ids]


def written(text: str) -> object:
    tokenizer, template = small_model()
    return template.encode(tokenizer, [Message("system", text), Message("user", text)], date=date(2026, 1, 1))


def printed(text: str) -> object:
    """Encode the output of a chat template, which was rendered in another process and is untrusted."""
    tokenizer, _ = small_model()
    return tokenizer.encode_runs(SpecialTexts(tokenizer.specials).split(text))


def stopped(text: str) -> object:
    stops = StopStrings([text[:length] for length in range(1, 65)])
    for at in range(0, len(text), 512):
        stops.push("\u00e9" + text[at + 1 : at + 512])
    return stops.finish()


def called(text: str) -> object:
    parser = ToolCallParser()
    return parser.push(text), parser.finish()


def pushed(text: str) -> object:
    """Parse in pieces, as a model generates text."""
    parser = ToolCallParser(in_parts=True)
    for at in range(0, len(text), max(len(text) // 64, 1)):
        parser.push(text[at : at + max(len(text) // 64, 1)])
    return parser.finish()


def _commented(text: str) -> object:
    try:
        return read_commented_json(text)
    except (ValueError, RecursionError):
        return None


def _configured(text: str) -> object:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "mcp.json"
        path.write_text(text)
        return read_mcp_config(path)


_MCP = '{"mcpServers": {"a": {"command": "x", "args": ["'


ENTRIES = {
    "system text": Entry(
        strip_volatile_lines, MIB, ("a=a", "a=", " ", "a=a;", " a=a", "a"), "x-anthropic-billing-header:", "!"
    ),
    "JSON": Entry(lambda text: parse_object(text.encode()), MIB, JSON, '{"a": '),
    "JSON text": Entry(lambda text: parse_object(text.encode()), MIB, JSON, '{"a": "', '"}'),
    "chat": Entry(
        body(parse_chat_request, lambda text: {"messages": asked(text), "stop": [text[:256]]}), MIB // 4, TEXT
    ),
    "chat tools": Entry(
        body(parse_chat_request, lambda text: {"messages": asked("x"), "tools": tool(text)}), MIB, PATTERN
    ),
    "messages": Entry(
        body(parse_message_request, lambda text: {"max_tokens": 1, "system": text, "messages": asked(text)[1:]}),
        MIB // 4,
        TEXT,
        "x-anthropic-billing-header:",
    ),
    "responses": Entry(
        body(parse_response_request, lambda text: {"input": text, "instructions": text}), MIB // 4, TEXT
    ),
    "completions": Entry(body(parse_text_request, lambda text: {"prompt": text, "suffix": ""}), MIB // 2, TEXT),
    "llama.cpp": Entry(
        body(parse_native_request, lambda text: {"prompt": text, "grammar": text[:1000]}), MIB // 2, TEXT
    ),
    "schema": Entry(grammar("json_schema"), MAX_CHARACTERS, JSON, '{"type": "string", "const": '),
    "pattern": Entry(lambda text: enforced_schema({"pattern": text}, "tools"), MAX_CHARACTERS, PATTERN),
    "pattern of names": Entry(
        lambda text: enforced_schema({"patternProperties": {text: {}}}, "tools"), MAX_CHARACTERS, PATTERN
    ),
    "regex": Entry(grammar("regex"), 256 * KIB, PATTERN),
    "Lark": Entry(grammar("lark"), 256 * KIB, GRAMMAR, "start: "),
    "GBNF": Entry(grammar("gbnf"), 256 * KIB, GRAMMAR, "root ::= "),
    "choice": Entry(grammar("choice"), 256 * KIB, ('"a",', '"', "[", '"\\"",'), "["),
    "tokens": Entry(encoded, MIB, (*TEXT, "<|im_end|>", "<think>", "<|"), clock=time.process_time),
    "prompt": Entry(written, MIB // 4, (*TEXT, "/think", "/no_think", "<think>"), clock=time.process_time),
    "printed template": Entry(
        printed, MIB, ("<|im_end|>", "<|im_", "<", "<|", "<|<|im_end|>|>", " <|im_start|>"), clock=time.process_time
    ),
    "stop strings": Entry(stopped, MIB // 4, TEXT),
    "tool calls": Entry(called, MIB // 4, CALLS, "<tool_call>\n{"),
    "tool calls in pieces": Entry(pushed, MIB // 4, CALLS, '<tool_call>\n{"name": "f", "arguments": {"a": "'),
    "Markdown": Entry(render_markdown, 256 * KIB, MARKS, budget_s=1.5 * MESSAGE_SECONDS),
    "open Markdown": Entry(complete, 16 * KIB, MARKS),
    "title": Entry(parse_title, 64 * KIB, (" ", '"', "title:", "*", ".", "title: '", "\n"), "a ", "!"),
    "questions": Entry(parse_questions, 64 * KIB, ("1. a?\n", " ", "- ", "\n", "?", "1", '"')),
    "form": Entry(lambda text: parse_form(text.encode()), MIB, ("%41", "+", "=", "%", "a", "%C3%A9"), "a="),
    "import": Entry(
        lambda text: read_chats(text.encode(), str), 4 * MIB, JSON, '{"messages": [{"role": "user", "content": "'
    ),
    "search words": Entry(parse_query, 64 * KIB, TEXT),
    "indexed words": Entry(to_tsvector, 256 * KIB, TEXT),
    "snippet": Entry(lambda text: extract_snippet(text, text[:32], parse_query(text[:32])), 256 * KIB, TEXT),
    "phrases": Entry(lambda text: fts5_query(parse_query(text)), 64 * KIB, TEXT),
    "calculator": Entry(calculate, 64 * KIB, ("1", "(", "1+", " ", "-", "2**", "1.", "a", "1e1,", "sqrt(")),
    "line of a tool": Entry(lambda text: sanitize_line(text, 1000), MIB, TEXT),
    "text": Entry(lambda text: decode_text(text.encode()), MIB // 4, (*TEXT, "\r\n", "a\0", "\0", "\ufeff")),
    "commented JSON": Entry(_commented, MIB, (*JSON, "//", "/*", "*", "*/", "/", ", ", ",\n", '"\\'), '{"a": '),
    "MCP configuration": Entry(
        _configured, 128 * KIB, (*JSON, "$", "${", "${a:-", "${env:", "{env:", " $a", "a b "), _MCP, '"]}}}'
    ),
    "duration": Entry(parse_duration, 64 * KIB, ("1m", "1", "1.1", "1ms", "m"), "", "!"),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_entry_point_time_grows_in_proportion_to_text_length(name: str) -> None:
    entry = ENTRIES[name]

    def work(text: str) -> object:
        try:
            return entry.work(text)
        except REFUSALS:
            return None

    for pump in entry.pumps:
        for after in dict.fromkeys((entry.after, "")):

            def made(size: int, pump: str = pump, after: str = after) -> str:
                count = max(size - len(entry.before) - len(after), 0) // len(pump)
                return entry.before + pump * count + after

            budget_s = max(entry.budget_s, UNNOTICED_SECONDS)
            check_growth(work, made, entry.sizes, budget_s=budget_s, clock=entry.clock)
