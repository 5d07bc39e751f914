"""Hostile conversations and answers: content never becomes a special token, and splitting a stream changes no
character.

Runs for a few seconds by default; `FUZZ_SECONDS=300` (or `make fuzz`) runs longer. A failure prints the seed of its
case: `FUZZ_SEED=<n>` runs only that case.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import jinja2
import pytest

from notso.smollm3.output.lookahead import StopStrings
from notso.smollm3.output.reasoning_parser import ReasoningParser
from notso.smollm3.output.tool_parser import ToolCallParser
from notso.smollm3.text.chat_template import ChatTemplate
from notso.smollm3.text.tokenizer import Tokenizer, TokenStream
from notso.smollm3.text.vocabulary import BYTE_CHARACTERS
from notso.smollm3.values.messages import ROLES, Message, ToolCall

ROOT = Path(__file__).parents[2]
TEMPLATES = {
    "demo": ROOT / "training" / "chat_template.jinja",
    "hf": ROOT.parent / "shared" / "data" / "chat_template.jinja",
    "gguf": ROOT.parent / "shared" / "data" / "chat_template.ggml-org-gguf.jinja",
}
SECONDS = float(os.environ.get("FUZZ_SECONDS", "2"))
ONE_SEED = os.environ.get("FUZZ_SEED")
DAY = date(2025, 7, 8)
SPECIAL = [
    "<|end_of_text|>",
    "<|im_start|>",
    "<|im_end|>",
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<code>",
]

HOSTILE = [
    *("<|im_end|>", "<|im_start|>", "<|im_start|>system\n", "<think>", "</think>", "<tool_call>", "</tool_call>"),
    *("<|im_", "end|>", "im_end|>", "|>", "<", "<|", ">", "</", "think>", "<code>", "<|end_of_text|>", "&lt;"),
    *("‹", "⟨", "❮", "〈", "一", "‹|im_end|>", "‹think>", "\\u003c", "{{ '<' }}", "{% raw %}", "x" * 30),
    *("/think", "/no_think", "/system_override", "/no_/think", "/th", "ink", "/system_", "override"),
    *("\n", " ", "\r\n", "\t", "\x1c", "\u2028", "\x00", "é", "👩", "user\n", "assistant\n"),
]


def _text(chance: Random) -> str:
    pieces = chance.choices(HOSTILE, k=chance.randrange(7))
    if chance.random() < 0.3:
        pieces.insert(0, chr(chance.choice((chance.randrange(0x80), chance.randrange(0xE000, 0x20000)))))
    return "".join(pieces)


def _object(chance: Random) -> dict[str, str]:
    return {_text(chance): _text(chance) for _ in range(chance.randrange(3))}


def _message(chance: Random) -> Message:
    role = chance.choice(ROLES)
    calls = [
        ToolCall("call_x", _text(chance), json.dumps(_object(chance), ensure_ascii=chance.random() < 0.5))
        for _ in range(chance.randrange(3) if role == "assistant" else 0)
    ]
    return Message(role, _text(chance), _text(chance), tuple(calls))


def _mask(text: str) -> str:
    """Mask content as the prompt's skeleton does, with a different implementation."""
    return "".join(
        piece if piece.isspace() or piece in ("/no_think", "/think", "/system_override") else "x"
        for piece in re.findall(r"/no_think|/think|/system_override|[\s\S]", text)
    )


@functools.cache
def _compiled(source: str) -> jinja2.Template:
    source = source.replace("{% generation %}", "{% if true %}").replace("{% endgeneration %}", "{% endif %}")
    return jinja2.Environment(trim_blocks=True, lstrip_blocks=True).from_string(source)


def _plain(source: str, messages: list[Message], tools: list[Any] | None, thinking: bool, masked: bool) -> str:
    """Return the prompt rendered by plain Jinja2, with content as it is or masked."""
    seen = _mask if masked else str
    turns = []
    for message in messages:
        content, last = seen(message.content), message.content
        for call in message.tool_calls:
            body = f'{{"name": {json.dumps(call.name, ensure_ascii=False)}, "arguments": {call.arguments}}}'
            content += "\n" if last and not last.endswith("\n") else ""
            content += f"<tool_call>\n{seen(body)}\n</tool_call>"
            last = "</tool_call>"
        turns.append({"role": message.role, "content": content})
    variables = {"xml_tools": [seen(json.dumps(tool, ensure_ascii=False)) for tool in tools]} if tools else {}
    return _compiled(source).render(
        messages=turns,
        enable_thinking=thinking,
        add_generation_prompt=True,
        strftime_now=lambda pattern: "08 July 2025",
        **variables,
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Create a tokenizer with bytes and special tokens, without merges."""
    return Tokenizer.from_gguf(
        {
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smaug-bpe",
            "tokenizer.ggml.tokens": [*SPECIAL, *BYTE_CHARACTERS],
            "tokenizer.ggml.token_type": [*[3 if "|" in text else 4 for text in SPECIAL], *[1] * 256],
            "tokenizer.ggml.merges": [],
        }
    )


def _seeds() -> Iterator[int]:
    """Yield seeds until the time limit, the same ones in each run, except for long runs."""
    if ONE_SEED is not None:
        yield int(ONE_SEED)
        return
    seed = 0 if "FUZZ_SECONDS" not in os.environ else SystemRandom().getrandbits(48)
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        yield seed
        seed += 1


@pytest.mark.parametrize("name", TEMPLATES)
def test_special_tokens_come_only_from_the_template(name: str, tokenizer: Tokenizer) -> None:
    """Requirement TK5; in addition, the text must be equal to that of plain Jinja2."""
    if not TEMPLATES[name].is_file():
        pytest.skip(f"the official {TEMPLATES[name].name} is not in ../shared/data")
    source = TEMPLATES[name].read_text()
    template = ChatTemplate(source, tokenizer.specials)
    special = tokenizer.special_ids
    for seed in _seeds():
        chance = Random(seed)
        messages = [_message(chance) for _ in range(chance.randint(1, 4))]
        tools = [{"name": _text(chance), **_object(chance)} for _ in range(chance.randrange(3))]
        thinking = chance.random() < 0.5
        ids = template.encode(tokenizer, messages, tools=tools, thinking=thinking, date=DAY)
        skeleton = tokenizer.encode(_plain(source, messages, tools, thinking, masked=True), control=True)
        assert [t for t in ids if t in special] == [t for t in skeleton if t in special], f"FUZZ_SEED={seed}"
        text = tokenizer.decode(ids, skip_control=False)
        assert text == _plain(source, messages, tools, thinking, masked=False), f"FUZZ_SEED={seed}"


ANSWER = [*HOSTILE, "</tool_call>\n", '{"name": "f", "arguments": {"a": "', '"}}', '"', "{", "}", "stop", "st", "op!"]


def test_answer_parsing_does_not_depend_on_chunk_boundaries(tokenizer: Tokenizer) -> None:
    """Random tokens pass through every stage of an answer, and then their text does, character by character."""
    for seed in _seeds():
        chance = Random(seed)
        ids: list[int] = []
        for _ in range(chance.randrange(20)):
            if chance.random() < 0.1:
                ids.append(chance.randrange(tokenizer.vocab_size))
            else:
                ids += tokenizer.encode(chance.choice(ANSWER), control=chance.random() < 0.5)
        stream = TokenStream(tokenizer)
        texts = [*map(stream.push, ids), stream.finish()]
        assert "".join(texts) == tokenizer.decode(ids), f"FUZZ_SEED={seed}"
        thinking = ReasoningParser(tokenizer.think_open_id, tokenizer.think_close_id, chance.random() < 0.5)
        parts = [part for token, text in zip([*ids, -1], texts, strict=True) for part in thinking.feed(token, text)]
        parts += thinking.finish()
        for part in ("reasoning", "text"):
            pieces = [text for kind, text in parts if kind == part]
            assert _read(pieces) == _read(list("".join(pieces))), f"FUZZ_SEED={seed}"


def _read(pieces: list[str]) -> list[tuple[str, str]]:
    """Feed pieces to the stop strings and the tool-call parser. Return joined texts, and calls without random ids."""
    stops, calls = StopStrings(["stop!", "op"]), ToolCallParser()
    found: list[str | ToolCall] = []
    for piece in pieces:
        shown, stopped = stops.push(piece)
        found += calls.push(shown)
        if stopped:
            break
    found += calls.push(stops.finish())
    found += calls.finish()
    read: list[tuple[str, str]] = []
    for part in found:
        if isinstance(part, ToolCall):
            read.append((part.name, part.arguments))
        elif read and read[-1][0] == "":
            read[-1] = ("", read[-1][1] + part)
        else:
            read.append(("", part))
    return read
