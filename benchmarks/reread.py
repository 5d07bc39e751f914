"""Measure the cost of another question about a long document: tokens computed again, and the additional time.

    notso synth build/words-3b.gguf --tokenizer tokenizer.json
    python benchmarks/reread.py build/words-3b.gguf --tokens 16000

Computed tokens are those of the question, and those of the document that were not cached. The time of n tokens with a
cached document is interpolated between questions of two lengths. The document is prefilled once with thinking and once
without, which takes minutes; with --folder, later runs read it from disk. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import itertools
import os
import random
import re
import shutil
import statistics
import tempfile
import time
from datetime import date
from pathlib import Path

from notso.smollm3 import Engine, FixedPrefix, Message, RequestOptions, SamplingParams
from notso.smollm3.diagnostics.benchmark import StolenTime, describe_machine

ROOT = Path(__file__).parents[1]
ONE = SamplingParams(max_tokens=1, temperature=0)
ROUNDS = 3
READING_DAY = date(2026, 11, 25)


class Reader:
    """Asks about a document, and estimates the time of a number of tokens with a cached document."""

    def __init__(self, document: str) -> None:
        self._document = document
        self._asked = random.randrange(1_000, 9_000)  # so that questions of an earlier run are not repeated
        self._warm: list[tuple[int, float]] = []
        self._again = 0

    def ask(self, engine: Engine, question: str, owner: str = "ann", *, thinking: bool = False) -> tuple[int, float]:
        """Return the tokens computed, and the seconds to the first token."""
        prefix = FixedPrefix(0, len(self._document), "library", "document")
        asked = RequestOptions(thinking=thinking, date=READING_DAY, owner=owner, conversation=owner, prefix=prefix)
        self._asked += 1
        text = f"{self._document}Question {self._asked}: {question}"
        began = time.perf_counter()
        usage = engine.submit([Message("user", text)], ONE, asked).result().usage
        seconds = time.perf_counter() - began
        assert usage is not None
        prompts = (engine.encode_chat([Message("user", self._document + each)], asked) for each in ("a", "b"))
        same = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(*prompts, strict=False)))
        self._again = max(0, same - usage.cached_tokens)
        return usage.prompt_tokens - usage.cached_tokens, seconds

    def calibrate(self, engine: Engine) -> None:
        for words in (1, 90):
            asked = [self.ask(engine, "why " * words) for _ in range(ROUNDS)]
            self._warm.append((asked[0][0], statistics.median(seconds for _, seconds in asked)))

    def warm_s(self, tokens: int) -> float:
        (few, fast), (many, slow) = self._warm
        return fast + (slow - fast) * (tokens - few) / (many - few)

    def report(self, what: str, engine: Engine, question: str, owner: str = "ann", *, thinking: bool = False) -> None:
        tokens, seconds = self.ask(engine, question, owner, thinking=thinking)
        beyond = f", {max(0.0, seconds - self.warm_s(tokens)):.2f} s more than if cached" if self._warm else ""
        print(
            f"{what}: {tokens:,} tokens computed ({self._again:,} of the document), first token after"
            f" {seconds:.2f} s{beyond}",
            flush=True,
        )


def settle(engine: Engine) -> None:
    """Wait until the cache is written to disk."""
    offload = engine._offload
    assert offload is not None
    while engine._core.call(lambda: offload.work() or offload.has_work):
        time.sleep(0.05)
    for files in offload._stores:
        assert files.flush(600)


def document_of(engine: Engine, tokens: int) -> str:
    prose = " ".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    known = re.findall(r"[a-z]{2,}", prose)
    words = (known * (1 + tokens // len(known)))[: int(1.3 * tokens)]
    ids = engine.tokenizer.encode(" ".join(words))[:tokens]
    return f"--- document ---\n{engine.tokenizer.decode(ids)}\n--- end of document ---\n\n"


def measure(model: Path, folder: Path, tokens: int, threads: int | None) -> None:
    def load(path: Path) -> Engine:
        engine = Engine.load(path, document_tokens=tokens + 4096, kv="k8v8", cache_dir=folder / "kv", threads=threads)
        assert engine._identity is not None
        engine._identity.wait(600)
        return engine

    with load(model) as engine:
        reader = Reader(document_of(engine, tokens))
        reader.report("first question", engine, "What is it about?")
        reader.calibrate(engine)
        reader.report("second question, in another chat", engine, "Who wrote it?")
        reader.report("on the next day", engine, "Today is 26 November 2026. Who wrote that?")
        reader.report("another user", engine, "Who has it?", "bob")
        reader.report("with thinking, first time", engine, "Who read it?", thinking=True)
        reader.report("with thinking, second time", engine, "Who knows it?", thinking=True)
        settle(engine)
    with load(model) as engine:
        reader.report("after a restart, from disk", engine, "Who can say?")
        reader.report("  another user", engine, "Who else?", "carol")
        reader.report("  with thinking, from disk", engine, "Who thinks so?", thinking=True)
    copy = Path(shutil.copy(model, folder / "copy.gguf"))
    for what in ("a copied model file", "the copy with a new modification time"):
        with load(copy) as engine:
            reader.report(f"{what}, from disk", engine, "Who would say so?")
        os.utime(copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--folder", type=Path, help="folder in which computed documents are kept for the next run")
    parser.add_argument("--threads", type=int)
    given = parser.parse_args()
    stolen = StolenTime()
    with tempfile.TemporaryDirectory() as folder:
        measure(given.model, given.folder or Path(folder), given.tokens, given.threads)
    print(describe_machine() | {"stolen_percent": round(stolen.percent(), 2)})


if __name__ == "__main__":
    main()
