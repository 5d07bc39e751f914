"""Hostile text in every part of a prompt, with the tokenizers and templates of real models, never becomes control
tokens."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import pytest
from chaos.ledger import LONG, Ledger
from fuzz import test_prompt_fuzz as fuzz
from smollm3.conftest import metadata_of

from notso.qtensor.gguf import GGUFFile
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.text.chat_template import ChatTemplate
from notso.smollm3.text.tokenizer import Tokenizer
from notso.web.store.protocol import Attachment, StoredMessage
from notso.web.turns.chat_settings import ChatSettings
from notso.web.turns.prompt import prompt_messages

CHATS = 20_000 if LONG else 150
VOCABULARY = Path(__file__).parents[3] / "shared" / "data" / "tokenizer.json"


@cache
def tokenizer_of(model: str) -> Tokenizer:
    if model == "demo":
        with GGUFFile.open(demo_path()) as file:
            return Tokenizer.from_gguf(file.metadata)
    if not VOCABULARY.is_file():
        pytest.skip("the official tokenizer.json is not in ../shared/data")
    data = json.loads(VOCABULARY.read_bytes())
    return Tokenizer.from_gguf(metadata_of(data, {each["content"] for each in data["added_tokens"] if each["special"]}))


def chat(chance: Random) -> list[Any]:
    """Return messages of an API request, or a question with files as the page sends it."""
    messages = [fuzz._message(chance) for _ in range(chance.randint(1, 4))]
    if chance.random() < 0.3:
        files = tuple(Attachment(fuzz._text(chance), fuzz._text(chance)) for _ in range(chance.randint(1, 3)))
        asked = StoredMessage("m", "c", "user", fuzz._text(chance), "", "done", 0, attachments=files)
        messages += prompt_messages([asked], ChatSettings(fuzz._text(chance)))[-1:]
    return messages


@pytest.mark.parametrize(("model", "template"), [("demo", "demo"), ("official", "hf"), ("official", "gguf")])
def test_no_text_becomes_a_control_token(ledger: Ledger, model: str, template: str) -> None:
    """TK5: the control tokens must be the same, in order, as those of the same chat with every character replaced
    by x."""
    tokenizer = tokenizer_of(model)
    if not fuzz.TEMPLATES[template].is_file():
        pytest.skip(f"the official {fuzz.TEMPLATES[template].name} is not in ../shared/data")
    source = fuzz.TEMPLATES[template].read_text()
    printed = ChatTemplate(source, tokenizer.specials)
    special = tokenizer.special_ids
    failed = 0
    for seed in range(CHATS):
        chance = Random(seed)
        messages, thinking = chat(chance), chance.random() < 0.5
        tools = [{"name": fuzz._text(chance), **fuzz._object(chance)} for _ in range(chance.randrange(3))]
        ids = printed.encode(tokenizer, messages, tools=tools, thinking=thinking, date=fuzz.DAY)
        skeleton = tokenizer.encode(fuzz._plain(source, messages, tools, thinking, masked=True), control=True)
        plain = fuzz._plain(source, messages, tools, thinking, masked=False)
        same_tokens = [t for t in ids if t in special] == [t for t in skeleton if t in special]
        failed += not same_tokens or tokenizer.decode(ids, skip_control=False) != plain
    ledger.note(
        "clients",
        f"control tokens in messages, results, names and files ({model} tokenizer, {template} template)",
        f"{CHATS:,} chats; the only special tokens are those of the template, no character changed",
        failed,
    )
