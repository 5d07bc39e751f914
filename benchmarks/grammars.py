"""Measure the cost of constraining an answer to a grammar: microseconds per token for the mask, and for applying it.

    python benchmarks/grammars.py
    python benchmarks/grammars.py --gguf SmolLM3-Q4_K_M.gguf

For each grammar, a few hundred tokens are drawn at random from those that it allows. Random tokens cost more than a
model's answers, because they reach unusual states. `mask` is the time to determine the tokens that may follow; `row`
includes setting the logits of all other tokens to minus infinity. The tokenizer is read from the given file (its
tensors are not read), or from the demo model.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import numpy as np

from notso.qtensor import GGUFFile
from notso.smollm3 import Grammar
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.sampling.grammar import GrammarCompiler, grammar_part
from notso.smollm3.sampling.structured_output import GrammarOutput
from notso.smollm3.text.tokenizer import Tokenizer

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["new", "old", "lost"]}},
        "address": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
    "required": ["name", "age", "tags"],
}
CASES = {
    "any object": Grammar("json_object"),
    "a schema": Grammar("json_schema", json.dumps(PERSON)),
    "1,000 values": Grammar("json_schema", json.dumps({"enum": [f"value {number}" for number in range(1000)]})),
    "a telephone number": Grammar("regex", r"\+?[0-9]{2,3}( [0-9]{2,4}){2,4}"),
    "nested choices": Grammar("lark", 'start: /[a-z]+/ start | "(" start ")" | /[0-9]+/'),
}


def follow(
    grammars: GrammarCompiler, tokenizer: Tokenizer, grammar: Grammar, tokens: int
) -> tuple[float, list[float], list[float]]:
    """Return the seconds to create a matcher, for each mask, and for each row (including the mask)."""
    chance = np.random.default_rng(1)
    logits = chance.standard_normal(tokenizer.vocab_size).astype(np.float32)
    masks: list[float] = []
    rows: list[float] = []
    start = time.perf_counter()
    matcher = grammars.matcher([grammar_part(grammar)], "grammar")
    started = time.perf_counter() - start
    while len(masks) < tokens:
        start = time.perf_counter()
        allowed = np.flatnonzero(matcher.allowed())
        masks.append(time.perf_counter() - start)
        start = time.perf_counter()
        GrammarOutput(tokenizer, matcher).restrict(logits, in_reasoning=False)
        rows.append(time.perf_counter() - start)
        going_on = [int(token) for token in allowed if token not in tokenizer.end_ids]
        if going_on:
            matcher.consume(int(chance.choice(going_on)))
        if not going_on or matcher.is_over:
            matcher = grammars.matcher([grammar_part(grammar)], "grammar")
    return started, masks, rows


def main() -> None:
    """Print a table row for each grammar."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path, help="file to read the tokenizer from (default: the demo model)")
    parser.add_argument("--tokens", type=int, default=300)
    arguments = parser.parse_args()
    path = arguments.gguf or demo_path()
    tokenizer = Tokenizer.from_gguf(GGUFFile.open(path).metadata, path)
    grammars = GrammarCompiler(tokenizer)
    start = time.perf_counter()
    grammars.matcher([grammar_part(Grammar("regex", "a"))], "grammar")
    print(
        f"{tokenizer.vocab_size:,} tokens; building the library's vocabulary took {time.perf_counter() - start:.2f} s"
    )
    print("| grammar | start, ms | mask, us: median | p99 | max | row, us: median |")
    print("|---|---|---|---|---|---|")
    for name, grammar in CASES.items():
        started, masks, rows = follow(grammars, tokenizer, grammar, arguments.tokens)
        median, late = statistics.median(masks), statistics.quantiles(masks, n=100)[-1]
        figures = (1e3 * started, 1e6 * median, 1e6 * late, 1e6 * max(masks), 1e6 * statistics.median(rows))
        print(
            f"| {name} | "
            + " | ".join(f"{figure:.1f}" if figure < 10 else f"{figure:.0f}" for figure in figures)
            + " |"
        )


if __name__ == "__main__":
    main()
