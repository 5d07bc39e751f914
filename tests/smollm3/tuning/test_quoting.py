"""Training on rows from a user's documents: the demo model learns to begin with a quotation, in any document."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from smollm3.tuning.test_trainer import needs_libraries
from web.store.some_chats import run_with_store

from notso import Engine, Message, QuoteSource, RequestOptions, SamplingParams
from notso.cli.app import run_command_line
from notso.documents.citations import find_marked_quotes, replace_newlines
from notso.documents.passages import split_into_passages
from notso.documents.values import Document
from notso.web.chat.files.quoting_rows import quoting_rows
from notso.web.edge.access import LOCAL_OWNER
from notso.web.store.documents import DocumentText
from notso.web.store.sqlite.store import SQLiteStore

DOCUMENTS, ROWS = 25, 8
RECIPE = ["--epochs", "4", "--learning-rate", "2e-3", "--no-rehearsal"]
WHO = ("heron", "farmer", "teacher", "doctor", "dog", "child", "painter", "sailor", "baker", "king", "fox", "singer")
DOES = ("waits", "sleeps", "works", "reads", "walks", "sings", "plays", "cooks", "swims", "writes", "dances", "runs")
WHERE = ("river", "garden", "school", "forest", "kitchen", "market", "village", "station", "castle", "library", "lake")
WHEN = ("morning", "evening", "summer", "winter", "Monday", "Friday", "spring", "autumn", "night", "holiday", "week")


def text(seed: int, sentences: int = 16) -> str:
    rng = random.Random(seed)
    made = (
        f"The {rng.choice(WHO)} {rng.choice(DOES)} near the {rng.choice(WHERE)} for {rng.randint(2, 99)} minutes"
        f" every {rng.choice(WHEN)}."
        for _ in range(sentences)
    )
    return " ".join(made)


def rows(seed: int, count: int) -> list[Any]:
    content = text(seed)
    return list(
        quoting_rows(f"notes {seed}.txt", DocumentText(content, (0,), tuple(split_into_passages(content, (0,)))), count)
    )


def quotes(adapter: Path | None, asked: list[Any], *, held: bool) -> tuple[int, int]:
    """Return the number of answers that begin with a quotation, and of those whose quotation occurs in the prompt.

    held: whether quotations are constrained to the prompt, as in chats.
    """
    begun = verbatim = 0
    with Engine.load("demo", adapters=[f"quotes={adapter}"] if adapter is not None else []) as engine:
        for row in asked:
            prompt = row["messages"][0]["content"]
            sources = (QuoteSource(replace_newlines(prompt)),) if held else ()
            name = "quotes" if adapter is not None else None
            options = RequestOptions(thinking=False, adapter=name, sources=sources)
            sampling = SamplingParams(temperature=0, max_tokens=80)
            answer = engine.submit([Message("user", prompt)], sampling, options).result().text
            mark = next(find_marked_quotes(answer), None)
            begun += mark is not None and mark.start == 0
            verbatim += mark is not None and bool(mark.words) and mark.words in replace_newlines(prompt)
    return begun, verbatim


@needs_libraries
@pytest.mark.timeout(7200)
def test_training_on_document_rows_teaches_quotations(tmp_path: Path) -> None:
    async def fill(store: Any) -> None:
        library = await store.documents.library(LOCAL_OWNER, "Notes")
        for seed in range(DOCUMENTS):
            await store.documents.add(LOCAL_OWNER, library.id, f"notes {seed}.txt", text(seed).encode())
            (document, _) = await store.documents.claim(1)
            content = text(seed)
            await store.documents.finish(document.id, Document("text", "", content, (0,)))

    run_with_store(SQLiteStore(tmp_path / "data"), fill)
    data, out = tmp_path / "quotes.jsonl", tmp_path / "quotes.gguf"
    command = ["dataset", str(data), "--documents", "Notes", "--data-dir", str(tmp_path / "data"), "--rows", str(ROWS)]
    assert run_command_line(command) == 0
    command = [sys.executable, "-m", "notso", "tune", str(data), "--out", str(out), "--json", *RECIPE]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"NOTSO_MODEL": ""}, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["held_out_after"] < 0.2 * told["held_out_before"]
    asked = [each for seed in range(1000, 1005) for each in rows(seed, 6)]  # documents without training rows
    assert quotes(None, asked, held=True) == (0, 0)
    free, held = quotes(out, asked, held=False), quotes(out, asked, held=True)
    assert free[0] >= 0.8 * len(asked), "the model must learn the form"
    # A model as small as the demo cannot copy a sentence reliably, so the constraint is necessary.
    assert held[0] >= 0.8 * len(asked) and held[1] >= 0.6 * len(asked) and held[1] > free[1]
