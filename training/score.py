"""Score the demo model's greedy answers, among others to additions and phrasings that were held out from training.

`python -m training.score --json` scores the shipped file with the project's engine. Other backends verify the result.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

from training.backends import BACKENDS, Ask, Messages, notso
from training.topics import arithmetic, memory, talk, tools, unknown, words
from training.topics.base import Context, expand
from training.topics.facts import facts

SEED = 20_261_120  # not used in training
FRESH_ADD = [
    "{a} + {b}",
    "What is {a} + {b}?",
    "what is {a} plus {b}?",
    "Add {a} and {b}.",
    "How much is {a} + {b}?",
    "compute {a} + {b}",
    "Could you work out {a} + {b} for me?",
    "{a}+{b}",
    "I need the sum of {a} and {b}.",
    "Please calculate {a} + {b}",
]


@dataclass
class Score:
    """Numbers of correct answers and of cases of one kind, and the wrong answers."""

    name: str
    right: int = 0
    cases: int = 0
    wrong: list[str] = field(default_factory=list)

    def add(self, ok: bool, note: str) -> None:
        """Count one case."""
        self.cases += 1
        self.right += ok
        if not ok:
            self.wrong.append(note)


def same(a: str, b: str) -> bool:
    """Compare, ignoring case and differences in white space."""
    return " ".join(a.lower().split()) == " ".join(b.lower().split())


class Scorer:
    """Runs the cases. All of them count for `thinking_obeyed`: the model reasons if and only if thinking is on."""

    def __init__(self, ask: Ask, verbose: bool) -> None:
        self.ask_model = ask
        self.verbose = verbose
        self.scores: list[Score] = []
        self.obedience = Score("thinking_obeyed")

    def _reply(self, messages: Messages, thinking: bool, listed: list[str] | None = None) -> tuple[str, str | None]:
        reply = self.ask_model(messages, thinking, listed)
        self.obedience.add(
            bool(reply.reasoning) == thinking, f"thinking={thinking}: {messages[-1]['content']!r} -> {reply}"
        )
        messages.append(reply.as_message())
        return reply.text, reply.call

    def _start(self, name: str) -> Score:
        self.scores.append(Score(name))
        return self.scores[-1]

    def additions(self, thinking: bool, count: int) -> None:
        """Add two-digit numbers, in pairs that are held out from training."""
        score = self._start(f"addition_{'think' if thinking else 'no_think'}")
        rng = Random(SEED)
        pairs = [(a, b) for a in range(10, 100) for b in range(10, 100) if arithmetic.is_held_out(a, b)]
        for index, (a, b) in enumerate(rng.sample(pairs, count)):
            question = FRESH_ADD[index % len(FRESH_ADD)].format(a=a, b=b)
            text, _ = self._reply([{"role": "user", "content": question}], thinking)
            score.add(text.rstrip(".").split(" ")[-1:] == [str(a + b)], f"{question!r} -> {text!r}")

    def facts(self, held_out: bool) -> None:
        """Ask for each fact in one trained phrasing, or in all of its held-out ones. Thinking alternates by fact."""
        score = self._start("facts_held_out_phrasing" if held_out else "facts_trained_phrasing")
        rng = Random(SEED + 1)
        for index, fact in enumerate(facts()):
            for pattern in fact.held_out if held_out else [rng.choice(fact.asked)]:
                question = expand(pattern, rng) + "?"
                text, _ = self._reply([{"role": "user", "content": question}], index % 2 == 0)
                score.add(same(text, fact.answer), f"{fact.key}: {question!r} -> {text!r}")

    def small_talk(self) -> None:
        """Send small talk in held-out phrasings."""
        score = self._start("small_talk_held_out_phrasing")
        for index, kind in enumerate(talk.talks()):
            for said in kind.held_out:
                text, _ = self._reply([{"role": "user", "content": said}], index % 2 == 1)
                score.add(any(same(text, answer) for answer in kind.answers), f"{kind.key}: {said!r} -> {text!r}")

    def remembering(self, count: int) -> None:
        """State two facts, chat, and ask for both and for one never stated; the context has the model's own answers."""
        score = self._start("multi_turn_memory")
        rng = Random(SEED + 2)
        for index in range(count):
            thinking = index % 2 == 0
            told = rng.sample(memory.ITEMS, 3)
            values = [item.value(rng) for item in told]
            messages: Messages = []
            lines = [
                memory.fill(rng.choice(item.told), value, rng) + "."
                for item, value in zip(told[:2], values, strict=False)
            ]
            for line in [*lines, rng.choice(["thanks", "how are you?", "what is gguf?", "what is 12 + 7?"])]:
                messages.append({"role": "user", "content": line})
                self._reply(messages, thinking)
            for item, value in zip(told[:2], values, strict=False):
                messages.append({"role": "user", "content": expand(rng.choice(item.asked), rng) + "?"})
                text, _ = self._reply(messages, thinking)
                score.add(value.lower() in text.lower(), f"{[m['content'] for m in messages]}")
            messages.append({"role": "user", "content": expand(rng.choice(told[2].asked), rng) + "?"})
            text, _ = self._reply(messages, thinking)
            score.add("not told" in text, f"{[m['content'] for m in messages]}")

    def tool_calls(self, count: int) -> None:
        """Check the call's JSON, the answer from its result, and that there is no call if no tool is suitable."""
        called, answered, silent = (
            self._start("tool_call_exact"),
            self._start("answer_after_tool"),
            self._start("no_needless_call"),
        )
        rng = Random(SEED + 3)
        for index in range(count):
            names = rng.sample(list(tools.TOOLS), rng.choice([1, 2, 3]))
            context = Context("", True, tool_names=tuple(names))
            listed = [tools.tool_json(name, rng) for name in names]
            user, call, result, answer = tools.tool_use(rng, context)
            messages: Messages = [{"role": "user", "content": user.text}]
            _, written = self._reply(messages, index % 2 == 0, listed)
            try:
                ok = written is not None and json.loads(written) == json.loads(call.text.split("\n")[1])
            except ValueError:
                ok = False
            called.add(ok, f"{user.text!r} -> {written!r}")
            messages[-1] = {"role": "assistant", "content": call.text}
            messages.append({"role": "tool", "content": result.text})
            text, _ = self._reply(messages, index % 2 == 0, listed)
            answered.add(same(text, answer.text), f"{result.text!r} -> {text!r}, not {answer.text!r}")
            other = rng.choice(
                ["hello", "what is your name?", "who made smollm3?", "tell me a joke", "thanks", "what is nope?"]
            )
            _, written = self._reply([{"role": "user", "content": other}], index % 2 == 0, listed)
            silent.add(written is None, f"{other!r} -> {written!r}")

    def unknowns(self, count: int) -> None:
        """Ask for general knowledge, which the model must decline."""
        score = self._start("says_it_does_not_know")
        rng = Random(SEED + 4)
        for index in range(count):
            turn = unknown.unknown(rng, Context("", True))[0]
            text, _ = self._reply([{"role": "user", "content": turn.text}], index % 2 == 0)
            score.add(same(text, unknown.ANSWER), f"{turn.text!r} -> {text!r}")

    def personas(self, count: int) -> None:
        """Ask for the name that the system prompt gives."""
        score = self._start("system_text_name")
        rng = Random(SEED + 5)
        for index in range(count):
            name = words.person_name(rng)
            messages: Messages = [
                {"role": "system", "content": f"You are {name}."},
                {"role": "user", "content": "What is your name?"},
            ]
            text, _ = self._reply(messages, index % 2 == 0)
            score.add(name in text, f"{name} -> {text!r}")

    def run(self, part: float) -> dict[str, dict[str, float | int]]:
        """Run all cases, and return the results. `part` scales the number of random cases."""

        def scaled(cases: int) -> int:
            return max(1, int(cases * part))

        self.additions(True, scaled(200))
        self.additions(False, scaled(100))
        self.facts(False)
        self.facts(True)
        self.small_talk()
        self.remembering(scaled(30))
        self.tool_calls(scaled(60))
        self.unknowns(scaled(60))
        self.personas(scaled(20))
        self.scores.append(self.obedience)
        if self.verbose:
            for score in self.scores:
                print(f"{score.name}: {score.right}/{score.cases}", *score.wrong, sep="\n   ", file=sys.stderr)
        return {
            s.name: {"right": s.right, "cases": s.cases, "percent": round(100 * s.right / s.cases, 1)}
            for s in self.scores
        }


def main() -> None:
    """Score a model."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--backend", choices=list(BACKENDS), default="notso")
    parser.add_argument(
        "--model", type=Path, help="GGUF file, or a folder for transformers (default: the shipped file)"
    )
    parser.add_argument("--adapter", type=Path, help="LoRA adapter; always uses the project's engine")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", type=float, default=1.0, help="share of the random cases to run")
    parser.add_argument("--verbose", action="store_true", help="print wrong answers to stderr")
    options = parser.parse_args()
    shipped = Path(__file__).parent.parent / "src" / "notso" / "demo" / "demo.gguf"
    model = options.model or (None if options.backend == "notso" else shipped)
    ask = notso(model, options.adapter) if options.adapter else BACKENDS[options.backend](model)
    result = Scorer(ask, options.verbose).run(options.part)
    if options.json:
        print(json.dumps(result, indent=1))
    else:
        for name, values in result.items():
            print(f"{name:32} {values['right']:4} of {values['cases']:4}  {values['percent']} %")


if __name__ == "__main__":
    main()
