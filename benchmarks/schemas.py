"""Measure how many published JSON schemas can be enforced, and whether every generated answer is valid.

    python benchmarks/schemas.py --bench jsonschemabench/data --suite JSON-Schema-Test-Suite/tests/draft2020-12

--bench: a folder of data sets, each a folder of schemas; a fixed seed draws the same number of schemas from each. For
every accepted schema, several random answers are generated to their end and validated with the library `jsonschema`,
including the enforced formats. Then answers are drawn uniformly from the allowed tokens, with a limit of 400 tokens.
--suite: groups of a schema and values known to be valid or invalid; each value is offered to the grammar, with the
properties of objects in any order. --write: Markdown page to update with the tables.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import json
import random
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from jsonschema.validators import validator_for

from notso.qtensor import GGUFFile
from notso.smollm3 import Grammar, InvalidRequestError
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.sampling.grammar import GrammarCompiler, Matcher, grammar_part
from notso.smollm3.sampling.schemas.simplifying import FORMATS
from notso.smollm3.text.tokenizer import Tokenizer

LIMIT, LIMITED_ANSWERS = 400, 3
"""Limit for answers of uniformly drawn tokens, and number of such answers per schema."""

FREE_TOKENS = 60
MOST_TOKENS = 3_000
MOST_ORDERS = 48
"""Random tokens of an answer, after which tokens that lead to its end are preferred; maximum tokens; and maximum orders
of properties tried."""

HELD_FORMATS = jsonschema.FormatChecker()
HELD_FORMATS.checkers = {
    name: check for name, check in jsonschema.Draft202012Validator.FORMAT_CHECKER.checkers.items() if name in FORMATS
}

OLD_DRAFTS = {f"draft{number}": f"http://json-schema.org/draft-0{number}/schema#" for number in (4, 6, 7)}
"""Folder of the suite -> `$schema` of that draft."""


MARKS = "<!-- figures -->", "<!-- /figures -->"


@dataclass
class Count:
    """Results for the schemas of a data set, or of a file of the suite."""

    schemas: int = 0
    taken: int = 0
    answers: int = 0
    unfinished: int = 0
    limited: int = 0
    ended: int = 0
    narrower: int = 0
    wrong: list[str] = field(default_factory=list)
    refusals: collections.Counter[str] = field(default_factory=collections.Counter)
    seconds: list[float] = field(default_factory=list)


class Answers:
    """Creates matchers and random answers."""

    def __init__(self, path: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_gguf(GGUFFile.open(path).metadata, path)
        self._grammars = GrammarCompiler(self._tokenizer)
        self._grammars.matcher([grammar_part(Grammar("regex", "a"))], "grammar")  # builds the vocabulary
        self._chance = random.Random(seed)
        words = [self._tokenizer.token_bytes(token) for token in range(self._tokenizer.vocab_size)]
        self._closing = np.array([bool(re.fullmatch(rb'[^"\[{]*["\]}]+[, ]*', word)) for word in words])
        self._short = np.array([len(word) == 1 for word in words])

    def matcher(self, schema: Any) -> Matcher:
        """Return a matcher at the beginning of an answer. Raises InvalidRequestError if the schema is rejected."""
        return self._grammars.matcher([grammar_part(Grammar("json_schema", json.dumps(schema)))], "grammar")

    def takes(self, schema: Any, text: str) -> bool:
        """Return whether the schema's grammar accepts a text as a complete answer."""
        matcher = self.matcher(schema)
        return matcher.try_consume_all(self._tokenizer.encode(text)) and matcher.may_end

    def draw(self, schema: Any) -> str | None:
        """Return a random answer, or None if it did not end within MOST_TOKENS."""
        matcher, tokens = self.matcher(schema), []
        while not matcher.is_over:
            allowed = matcher.allowed()
            if matcher.may_end and (len(tokens) > FREE_TOKENS or self._chance.random() < 0.3):
                break
            allowed[sorted(self._tokenizer.end_ids)] = False
            for narrowed in (allowed & self._closing, allowed & self._short):
                is_late = len(tokens) > FREE_TOKENS or self._chance.random() < 0.3
                if is_late and narrowed.any():
                    allowed = narrowed
                    break
            token = int(self._chance.choice(np.flatnonzero(allowed)))
            matcher.consume(token)
            tokens.append(token)
            if len(tokens) > MOST_TOKENS:
                return None
        return self._tokenizer.decode(tokens)

    def limited(self, schema: Any) -> str | None:
        """Return an answer of uniformly drawn tokens, or None if it did not end within LIMIT."""
        matcher, tokens = self.matcher(schema), []
        chance = np.random.default_rng(self._chance.randrange(2**32))
        while len(tokens) < LIMIT and not matcher.is_over:
            left = LIMIT - len(tokens) - 1
            logits = np.where(matcher.allowed(), chance.random(self._tokenizer.vocab_size), -1)
            token = int(logits.argmax())
            while not matcher.permits(token, left):
                ids = matcher.remaining_choices(token, left)
                logits[token] = -1
                token = int(logits.argmax() if ids is None else chance.choice(ids))
            if token in self._tokenizer.end_ids:
                break
            matcher.consume(token, left)
            tokens.append(token)
        return self._tokenizer.decode(tokens) if matcher.is_over or matcher.may_end else None


def bench_counts(folder: Path, answers: Answers, sample: int, seed: int, walks: int) -> dict[str, Count]:
    """Return results by data set."""
    chance, counts = random.Random(seed), {}
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    for data_set in folders:
        count = counts[data_set.name] = Count()
        paths = sorted(data_set.glob("*.json"))
        for path in chance.sample(paths, min(len(paths), sample // len(folders))):
            _follow(path.name, json.loads(path.read_text()), answers, walks, count)
    return counts


def _follow(name: str, schema: Any, answers: Answers, walks: int, count: Count) -> None:
    count.schemas += 1
    start = time.process_time()
    try:
        answers.matcher(schema)
    except InvalidRequestError as error:
        count.refusals[f"{name}: {error}"] += 1
        return
    count.seconds.append(time.process_time() - start)
    count.taken += 1
    judge = validator_for(schema, default=jsonschema.Draft202012Validator)(schema, format_checker=HELD_FORMATS)
    for _ in range(walks):
        try:
            text = answers.draw(schema)
        except InvalidRequestError as error:
            count.refusals[f"{name}: within an answer: {error}"] += 1
            continue
        if text is None:
            count.unfinished += 1
            continue
        count.answers += 1
        _judge(name, text, judge, count)
    for _ in range(LIMITED_ANSWERS):
        count.limited += 1
        try:
            text = answers.limited(schema)
        except InvalidRequestError as error:
            count.refusals[f"{name}: within an answer: {error}"] += 1
            continue
        if text is None:
            count.refusals[f"{name}: cut at {LIMIT} tokens"] += 1
            continue
        count.ended += 1
        _judge(name, text, judge, count)


def _judge(name: str, text: str, judge: Any, count: Count) -> None:
    fault = next(iter(judge.iter_errors(json.loads(text))), None)
    if fault is not None:
        count.wrong.append(f"{name}: {fault.message[:200]} in {text[:300]}")


def suite_counts(folder: Path, answers: Answers) -> dict[str, Count]:
    """Return results by file of the suite."""
    counts = {}
    formats = [folder / "optional" / "format" / f"{name}.json" for name in FORMATS]
    for path in (*sorted(folder.glob("*.json")), *(path for path in formats if path.exists())):
        count = counts[path.stem if path.parent == folder else f"format: {path.stem}"] = Count()
        for group in json.loads(path.read_text()):
            if isinstance(group["schema"], dict) and folder.name in OLD_DRAFTS:
                group["schema"].setdefault("$schema", OLD_DRAFTS[folder.name])
            _offer(group, answers, count)
    return counts


def _offer(group: dict[str, Any], answers: Answers, count: Count) -> None:
    count.schemas += 1
    schema = group["schema"]
    try:
        answers.matcher(schema)
    except InvalidRequestError as error:
        count.refusals[f"{group['description']}: {error}"] += 1
        return
    count.taken += 1
    for test in group["tests"]:
        count.answers += 1
        orders = itertools.islice(_orders(test["data"]), MOST_ORDERS)
        is_taken = any(answers.takes(schema, json.dumps(value, ensure_ascii=False)) for value in orders)
        if is_taken and not test["valid"]:
            count.wrong.append(f"{group['description']}: {json.dumps(test['data'])[:100]} ({test['description']})")
        count.narrower += test["valid"] and not is_taken


def _orders(value: Any) -> Iterator[Any]:
    """Yield the value with the properties of its objects in every order."""
    if isinstance(value, list):
        yield from map(list, itertools.product(*([*itertools.islice(_orders(each), 6)] for each in value)))
    elif isinstance(value, dict):
        for names in itertools.permutations(value):
            members = itertools.product(*([*itertools.islice(_orders(value[name]), 6)] for name in names))
            yield from (dict(zip(names, each, strict=True)) for each in members)
    else:
        yield value


def _row(name: str, count: Count, *figures: int) -> str:
    return f"| {name} | " + " | ".join(f"{figure:,}" for figure in (count.schemas, count.taken, *figures)) + " |"


def main() -> None:
    """Print a table row for each data set and each file, then rejected schemas and wrong answers."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bench", type=Path, help="folder of data sets of schemas")
    parser.add_argument("--suite", type=Path, help="folder of one draft of the JSON Schema Test Suite")
    parser.add_argument("--write", type=Path, help="write the tables to this page, between its markers")
    parser.add_argument("--gguf", type=Path, help="file to read the tokenizer from (default: the demo model)")
    parser.add_argument("--sample", type=int, default=150, help="number of schemas from all data sets together")
    parser.add_argument("--walks", type=int, default=20, help="number of random answers per schema")
    parser.add_argument("--seed", type=int, default=17)
    arguments = parser.parse_args()
    answers = Answers(arguments.gguf or demo_path(), arguments.seed)
    tables, told = [], {}
    if arguments.bench:
        bench = bench_counts(arguments.bench, answers, arguments.sample, arguments.seed, arguments.walks)
        tables.append(bench_table(bench))
        told |= bench
    if arguments.suite:
        suite = suite_counts(arguments.suite, answers)
        tables.append(suite_table(suite))
        told |= suite
    print("\n".join(tables))
    if arguments.write:
        before, _, rest = arguments.write.read_text().partition(MARKS[0])
        after = rest.partition(MARKS[1])[2]
        arguments.write.write_text(before + MARKS[0] + "\n\n" + "\n".join(tables) + "\n" + MARKS[1] + after)
    for name, count in told.items():
        for reason, times in count.refusals.items():
            print(f"refused: {name}: {reason}" + (f" ({times} times)" if times > 1 else ""))
        for wrong in count.wrong:
            print(f"wrong: {name}: {wrong}")


def bench_table(counts: dict[str, Count]) -> str:
    """Return the results as a Markdown table."""
    total = _sum(counts)
    seconds = sorted(total.seconds) or [0.0]
    rows = [_bench_row(name, count) for name, count in counts.items()]
    return "\n".join(
        (
            f"| data set | schemas | accepted | answers | invalid | no end found | ended within {LIMIT} tokens |",
            "|---|---|---|---|---|---|---|",
            *rows,
            _bench_row("all", total),
            "",
            f"CPU time to compile: median {1e3 * seconds[len(seconds) // 2]:.0f} ms, "
            f"maximum {1e3 * seconds[-1]:.0f} ms.\n",
        )
    )


def _bench_row(name: str, count: Count) -> str:
    figures = count.answers, len(count.wrong), count.unfinished
    return f"{_row(name, count, *figures)} {count.ended:,} of {count.limited:,} |"


def suite_table(counts: dict[str, Count]) -> str:
    """Return the results as a Markdown table, with files without deviations in one row."""
    plain = {name: count for name, count in counts.items() if count.taken == count.schemas and not count.narrower}
    shown = {name: count for name, count in counts.items() if name not in plain or count.wrong}
    rows = [_row(name, count, count.answers, len(count.wrong), count.narrower) for name, count in shown.items()]
    others, total = _sum(plain), _sum(counts)
    return "\n".join(
        (
            "| file | schemas | accepted | values | invalid but accepted | valid but refused |",
            "|---|---|---|---|---|---|",
            *rows,
            _row(f"{len(plain)} others", others, others.answers, len(others.wrong), others.narrower),
            _row("all", total, total.answers, len(total.wrong), total.narrower),
            "",
        )
    )


def _sum(counts: dict[str, Count]) -> Count:
    total = Count()
    for count in counts.values():
        total.schemas += count.schemas
        total.taken += count.taken
        total.answers += count.answers
        total.unfinished += count.unfinished
        total.limited += count.limited
        total.ended += count.ended
        total.narrower += count.narrower
        total.wrong += count.wrong
        total.seconds += count.seconds
    return total


if __name__ == "__main__":
    main()
