"""Estimate the benefit of speculative decoding from accepted draft tokens and the cost of steps.

    python benchmarks/speculation.py --file build/synth-3b.gguf
    python benchmarks/speculation.py --tokenizer tokenizer.json --no-demo

The output is the same with and without speculation, so a known answer is sufficient: each step proposes draft tokens,
those that agree with the answer are accepted, and the step costs as much as a step with that number of rows. There are
three kinds of tasks:

- verbatim: repeat pages of this project word for word;
- edits: return files of this project with a change (a name replaced everywhere; a line added to every function; every
  twelfth line omitted);
- prose: pages that are not in the prompt, and real answers of the demo model (temperature 0.6).

`--file` measures steps of 1 to 16 rows with that model; without it, the engine's estimates are used. `--tokenizer`
reads a tokenizer.json; without it, the demo model's tokenizer is used, which has shorter tokens.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import tokenizers

from notso import Engine, Message, SamplingParams, __version__
from notso.qtensor import CPU
from notso.smollm3.diagnostics.benchmark import StolenTime, describe_machine
from notso.smollm3.model.input_batch import InputBatch
from notso.smollm3.scheduling.ngram_drafter import MATCH_CLASSES, NgramDrafter, StepLatency, planned_cost

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "src" / "notso" / "smollm3"
PAGES = ("docs/kernels/gemv.md", "SECURITY.md", "CONTRIBUTING.md", "training/README.md")
CODE = ("sampling/sampler.py", "output/lookahead.py", "config.py", "output/tool_parser.py")
QUESTIONS = (
    "What is NoPE?",
    "Tell me a joke.",
    "Who are you?",
    "What can you do?",
    "How does quantization work?",
    "Explain grouped-query attention.",
    "What is 12 plus 30?",
    "How do I start the server?",
    "Why is the sky blue?",
    "Write a short poem about rain.",
)
ROWS = (1, 2, 3, 4, 6, 8, 12, 16)
ROUNDS = 9
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt and its known answer."""

    kind: str
    name: str
    prompt: list[int]
    answer: list[int]


@dataclass(slots=True)
class Outcome:
    """Results of a task. `cost` is in steps of one row."""

    tokens: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    cost: float = 0.0
    proposing_s: float = 0.0

    @property
    def speed_up(self) -> float:
        return self.tokens / self.cost


def run(
    task: Task, price: Callable[[int], float], latency: StepLatency, tried: Counter[tuple[int, bool]] | None = None
) -> Outcome:
    """Answer the task with draft tokens. `tried` counts accepted and rejected ones by class of match; `latency` is
    shared by all tasks, as in an engine."""
    outcome = Outcome(tokens=len(task.answer))
    drafter = NgramDrafter(task.prompt, latency=latency)
    at = 0
    while at < len(task.answer):
        started = time.perf_counter()
        drafts = drafter.propose(limit=len(task.answer) - at - 1)
        accepted = 0
        while accepted < len(drafts) and drafts[accepted] == task.answer[at + accepted]:
            accepted += 1
        drafter.record_acceptance(len(drafts), accepted)
        drafter.extend(task.answer[at : at + accepted + 1])
        outcome.proposing_s += time.perf_counter() - started
        if tried is not None and drafts:
            tried[drafter._class, True] += accepted
            tried[drafter._class, False] += accepted < len(drafts)
        latency.observe(1 + len(drafts), price(1 + len(drafts)))
        outcome.cost += price(1 + len(drafts))
        outcome.drafted += len(drafts)
        outcome.accepted += accepted
        outcome.steps += 1
        at += accepted + 1
    return outcome


def tasks(encode: Encode, demo: bool) -> Iterator[Task]:
    """Yield all tasks."""
    texts = {page: (ROOT / page).read_text("utf-8") for page in PAGES}
    code = {name: (MODEL / name).read_text("utf-8") for name in CODE}
    for page, text in texts.items():
        yield Task("verbatim", page, encode(f"Repeat this word for word:\n\n{text}\n\n"), encode(text))
    for name, text in code.items():
        for what, changed in (
            ("a name replaced", renamed(text)),
            ("a line in every function", with_logging(text)),
            ("lines left out", thinned(text)),
        ):
            yield Task("edits", f"{name}: {what}", encode(f"Change this file, {what}:\n\n{text}\n\n"), encode(changed))
    for page, text in texts.items():
        yield Task("prose", page, encode(f"Write {page}, please."), encode(text))
    if demo:
        yield from demo_answers()


def demo_answers() -> Iterator[Task]:
    """Yield the demo model's answers, including reasoning, in its own tokens."""
    with Engine.load() as engine:
        for seed, question in enumerate(QUESTIONS):
            messages = [Message("user", question)]
            params = SamplingParams(max_tokens=300, seed=seed)
            events = list(engine.generate(messages, params))
            said = "".join(event.text for event in events if event.kind in ("reasoning", "text"))
            yield Task("demo's answers", question, engine.encode_chat(messages), engine.tokenizer.encode(said))


def renamed(text: str) -> str:
    """Replace the most frequent name of a file."""
    names = Counter(node.id for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Name) and len(node.id) > 4)
    return re.sub(rf"\b{names.most_common(1)[0][0]}\b", "replacement_value", text)


def with_logging(text: str) -> str:
    """Insert a line at the beginning of every function."""
    return re.sub(r"(?m)^( *)def (\w+)\((?:[^:]|:(?!\n))*:\n", r'\g<0>\1    logger.debug("entering \2")\n', text)


def thinned(text: str) -> str:
    """Remove every twelfth line."""
    return "".join(line for number, line in enumerate(text.splitlines(keepends=True), 1) if number % 12)


def measured(file: Path) -> dict[int, float]:
    """Return the seconds of a step by its number of rows: medians of interleaved measurements."""
    seconds: dict[int, list[float]] = {rows: [] for rows in ROWS}
    with Engine.load(file, context_tokens=1024, kv="k8v8") as engine:
        engine.wait_for_placement(120)
        for timed in range(ROUNDS + 1):
            for rows in ROWS:
                step = step_of(engine, rows)
                started = time.perf_counter()
                engine._core.call(partial(engine._runner._model.forward, step))
                if timed:  # the first round warms up pages and caches
                    seconds[rows].append(time.perf_counter() - started)
    return {rows: statistics.median(seconds[rows]) for rows in ROWS}


def priced(steps: dict[int, float]) -> Callable[[int], float]:
    """Return the cost of a step as a function of its rows, in steps of one row; interpolated linearly."""
    rows, seconds = list(steps), list(steps.values())
    print("| rows | " + " | ".join(map(str, rows)) + " |\n| --- |" + " ---: |" * len(rows))
    print("| ms | " + " | ".join(f"{1000 * one:.1f}" for one in seconds) + " |")
    print("| cost | " + " | ".join(f"{one / seconds[0]:.2f}" for one in seconds) + " |\n")
    return lambda count: float(np.interp(count, rows, seconds)) / seconds[0]


def step_of(engine: Engine, rows: int) -> InputBatch:
    """Return a step over `rows` positions of a sequence, all with logits."""
    step = InputBatch(CPU(), engine.config, rows, rows)
    ids = np.random.default_rng(rows).integers(0, engine.config.vocab_size, rows, np.int32)
    step.fill(ids, range(rows), [0] * rows, range(rows))
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--file", type=Path, help="model to measure steps with")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer.json")
    parser.add_argument("--no-demo", action="store_true", help="omit the demo model's answers")
    parser.add_argument("--each", action="store_true", help="show every task")
    parser.add_argument("--classes", action="store_true", help="show the acceptance rate by length of match")
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    given = parser.parse_args()

    stolen = StolenTime()
    steps = measured(given.file) if given.file else {}
    machine = describe_machine() | {"stolen_percent": round(stolen.percent(), 2)}
    price = priced(steps) if steps else planned_cost
    if given.tokenizer:
        library = tokenizers.Tokenizer.from_file(str(given.tokenizer))
        encode: Encode = lambda text: library.encode(text, add_special_tokens=False).ids  # noqa: E731
    else:
        with Engine.load() as engine:
            encode = engine.tokenizer.encode
    latency = StepLatency()
    totals: dict[str, Outcome] = {}
    worst: dict[str, float] = {}
    tried: dict[str, Counter[tuple[int, bool]]] = {}
    print("| task | tokens | steps | drafted | accepted | us per token | speedup | worst task |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |")
    for task in tasks(encode, not given.no_demo):
        outcome = run(task, price, latency, tried.setdefault(task.kind, Counter()))
        if given.each:
            show(f"{task.kind}: {task.name}", outcome, outcome.speed_up)
        total = totals.setdefault(task.kind, Outcome())
        for name in ("tokens", "steps", "drafted", "accepted", "cost", "proposing_s"):
            setattr(total, name, getattr(total, name) + getattr(outcome, name))
        worst[task.kind] = min(worst.get(task.kind, 99.0), outcome.speed_up)
    for kind, total in totals.items():
        show(f"**{kind}**", total, worst[kind])
    if given.out is not None:
        kept = {
            "speculation": [
                {"work": kind, "tokens": total.tokens, "steps": total.steps, "guessed": total.drafted}
                | {"right": total.accepted, "speed_up": round(total.speed_up, 3), "worst": round(worst[kind], 3)}
                for kind, total in totals.items()
            ],
            "step_ms": {rows: round(1000 * seconds, 2) for rows, seconds in steps.items()},
            "tokenizer": given.tokenizer.name if given.tokenizer else "the demo model's",
            "machine": machine,
            "version": __version__,
        }
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(kept, indent=1) + "\n")
    if given.classes:
        for kind, counts in tried.items():
            rates = [
                f"{match}+: {counts[i, True]}/{counts[i, True] + counts[i, False]}"
                for i, match in enumerate(MATCH_CLASSES)
            ]
            print(f"{kind}: {', '.join(rates)}")


def show(name: str, outcome: Outcome, worst: float) -> None:
    right = outcome.accepted / outcome.drafted if outcome.drafted else 0.0
    print(
        f"| {name} | {outcome.tokens:,} | {outcome.steps:,} | {outcome.drafted:,} | {100 * right:.0f} % | "
        f"{1e6 * outcome.proposing_s / outcome.tokens:.1f} | {outcome.speed_up:.2f} | {worst:.2f} |"
    )


if __name__ == "__main__":
    main()
