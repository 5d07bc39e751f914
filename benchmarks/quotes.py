"""Measure the CPU time of constraining quotations to a text: building the index, and the masks of a quotation's tokens.

    python benchmarks/quotes.py --tokenizer tokenizer.json --characters 60000 300000 20000000

The text consists of words of the documentation with Zipf frequencies. Logits are random, with higher logits for the
tokens that begin a word. Without --tokenizer, the demo model's tokenizer is used.
"""

from __future__ import annotations

import argparse
import gc
import random
import re
import resource
import statistics
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from notso.smollm3 import Engine, QuoteSource
from notso.smollm3.sampling.quote_index import CLOSE
from notso.smollm3.sampling.quotes import QuoteManager
from notso.smollm3.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[1]


@dataclass
class Tokens:
    """The part of a tokenizer that quotations use, read from its JSON."""

    texts: list[bytes]
    special_ids: frozenset[int]
    tool_call_open_id: int | None = None
    think_open_id: int | None = None
    think_close_id: int | None = None
    end_ids: frozenset[int] = frozenset({0})
    unused_ids: frozenset[int] = frozenset()

    @property
    def vocab_size(self) -> int:
        return len(self.texts)

    def token_bytes(self, token: int) -> bytes:
        return self.texts[token]

    def encode(self, text: str) -> list[int]:
        return []


def tokens_of(path: Path) -> Tokens:
    import tokenizers

    from notso.smollm3.text.vocabulary import BYTE_CHARACTERS

    known = {character: byte for byte, character in enumerate(BYTE_CHARACTERS)}
    encoder = tokenizers.Tokenizer.from_file(str(path))
    ids = {id: text for text, id in encoder.get_vocab().items()}
    special = frozenset(encoder.get_added_tokens_decoder())
    texts = [
        ids[each].encode() if each in special else bytes(known[character] for character in ids[each])
        for each in range(len(ids))
    ]
    return Tokens(texts, special)


def text_of(characters: int, seed: int) -> str:
    prose = "".join(path.read_text() for path in sorted((ROOT / "docs").rglob("*.md")))
    words = sorted(set(re.findall(r"\S+", prose)))
    rng = random.Random(seed)
    rng.shuffle(words)
    words += [f"{rng.choice(words)}{rng.choice('aeiou')}{rng.randint(0, 99)}" for _ in range(characters // 400)]
    weights = [1 / (rank + 3) for rank in range(len(words))]
    drawn = rng.choices(words, weights, k=characters // 4)
    return " ".join(drawn)[:characters]


def measure(tokenizer: Tokenizer, characters: int, quotations: int) -> None:
    text = text_of(characters, 1)
    quotes = QuoteManager(tokenizer)
    quotes.vocabulary.spaced_tokens  # noqa: B018
    started = time.thread_time()
    quotes.index(text)
    build_s = time.thread_time() - started
    index = quotes.index(text)
    arrays = (index.starts, index.shortest, index.longest, index.ends)
    held_mb = (len(index.content) + sum(each.nbytes for each in arrays)) / 1e6
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    gc.collect()
    gc.freeze()  # as a server does after its start
    drawn = np.random.default_rng(2)
    first, later = list[float](), list[float]()
    for _ in range(quotations):
        held = quotes.output([QuoteSource(text)], None, "[[1:")
        assert held is not None
        for step in range(400):
            logits = drawn.standard_normal(tokenizer.vocab_size).astype(np.float32)
            if step == 0:
                logits[quotes.vocabulary.spaced] += 10
            started = time.thread_time()
            restricted = held.restrict(logits, False)
            (first if step == 0 else later).append(1000 * (time.thread_time() - started))
            token = int(restricted.argmax())
            held.consume(token, False, 1000)
            if tokenizer.token_bytes(token).startswith(CLOSE):
                break
    place = lambda times: f"{statistics.median(times):.2f} {sorted(times)[int(0.99 * len(times))]:.2f} {max(times):.2f}"  # noqa: E731
    print(f"{characters:>10,} characters: built in {build_s:.2f} s, {held_mb:.1f} MB, {len(index.starts):,} positions,"
          f" peak memory {peak_mb:,.0f} MB; ms (median, p99, maximum): "
          f"first {place(first)}, later {place(later)} ({len(later):,})")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--characters", type=int, nargs="+", default=[60_000, 300_000, 20_000_000])
    parser.add_argument("--quotations", type=int, default=100)
    given = parser.parse_args()
    if given.tokenizer is None:
        with Engine.load() as engine:
            tokenizer = engine.tokenizer
    else:
        tokenizer = tokens_of(given.tokenizer)  # type: ignore[assignment]
    for characters in given.characters:
        measure(tokenizer, characters, given.quotations)


if __name__ == "__main__":
    main()
