"""Training rows for quoting first: quotations occur in the prompt, and the grammar permits every token."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from web.store.some_chats import run_with_store

from notso.cli.app import run_command_line
from notso.documents.citations import QUOTE_FIRST, locate_quote, replace_newlines
from notso.documents.passages import split_into_passages
from notso.documents.values import Document
from notso.smollm3 import Engine, QuoteSource
from notso.smollm3.sampling.quotes import QuoteManager
from notso.smollm3.text.tokenizer import Tokenizer
from notso.web.chat.files.quoting_rows import GAP, quoting_rows
from notso.web.edge.access import LOCAL_OWNER
from notso.web.store.documents import DocumentText
from notso.web.store.sqlite.store import SQLiteStore

WORDS = ["heron", "stork", "river", "morning", "waits", "quietly", "between", "1887", "reeds", "fishing", "village"]


def text(seed: int, sentences: int) -> str:
    rng = random.Random(seed)
    made = [" ".join(rng.choices(WORDS, k=rng.randint(4, 30))).capitalize() for _ in range(sentences)]
    ends = [". ", ".\n", "!\n\n"]
    return "".join(f"{each} number{at}{rng.choice(ends)}" for at, each in enumerate(made))


def stored(content: str) -> DocumentText:
    return DocumentText(content, (0,), tuple(split_into_passages(content, (0,))))


def parts(row: Any) -> tuple[str, str]:
    asked, answered = row["messages"]
    assert (asked["role"], answered["role"]) == ("user", "assistant") and asked["content"].endswith(QUOTE_FIRST)
    return asked["content"], answered["content"]


def test_answers_quote_the_prompt_or_report_no_mention() -> None:
    document = stored(text(1, 300))
    rows = list(quoting_rows("birds.txt", document, 60))
    assert len(rows) == 60 and rows == list(quoting_rows("birds.txt", document, 60))
    absent = gaps = 0
    for row in rows:
        asked, answered = parts(row)
        question = asked.rpartition("\n\n")[0].rpartition("\n\n")[2]
        mark, _, answer = answered.partition("]]\n\n")
        if mark == "[[none":
            subject = question.partition("“")[2].partition("”")[0]
            head = asked.rpartition(question)[0]
            assert subject in answer and subject.casefold() not in replace_newlines(head).casefold()
            absent += 1
            continue
        words = mark.removeprefix("[[1: ")
        assert locate_quote(document.text, words) is not None and words in replace_newlines(asked)
        assert answer in words
        gaps += GAP in question
        assert GAP not in question or question.partition("“")[2].partition("”")[0].replace(GAP, answer) == words
    assert absent >= 5 and gaps >= 10
    assert not list(quoting_rows("table.csv", stored("a|b\n1|2\n" * 50), 10))


@pytest.fixture
def tokenizer() -> Iterator[Tokenizer]:
    with Engine.load() as engine:
        yield engine.tokenizer


def test_quote_constraint_permits_every_token_of_the_rows(tokenizer: Tokenizer) -> None:
    quotes = QuoteManager(tokenizer)
    rows = list(quoting_rows("birds.txt", stored(text(2, 80)), 12))
    assert len(rows) == 12
    for row in rows:
        asked, answered = parts(row)
        held = quotes.output([QuoteSource(replace_newlines(asked))], None, "")
        assert held is not None
        for token in tokenizer.encode(answered):
            logits = np.full(tokenizer.vocab_size, -1, np.float32)
            logits[token] = 1
            assert held.restrict(logits, False).argmax() == token, answered
            held.consume(token, False, 1_000)


def test_dataset_command_writes_rows_of_a_library(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def add(store: Any) -> None:
        library = await store.documents.library(LOCAL_OWNER, "Birds")
        await store.documents.add(LOCAL_OWNER, library.id, "birds.txt", b"birds")
        claimed = await store.documents.claim(1)
        await store.documents.finish(claimed[0].id, Document("text", "", text(3, 60), (0,)))

    run_with_store(SQLiteStore(tmp_path / "data"), add)
    out = tmp_path / "rows.jsonl"
    given = ["dataset", str(out), "--data-dir", str(tmp_path / "data")]
    assert run_command_line([*given, "--documents", "Fish"]) == 1
    assert "no documents with sentences" in capsys.readouterr().err and not out.exists()
    assert run_command_line([*given, "--documents", "Birds", "--rows", "9"]) == 0
    rows = [json.loads(line) for line in out.read_text("utf-8").splitlines()]
    assert len(rows) == 9 and all("birds.txt" in parts(row)[0] for row in rows)
    assert run_command_line([*given, "--force", "--documents", "Birds", "--preferences", "x.jsonl"]) == 2
