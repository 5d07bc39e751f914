"""Questions about the demo, the project and SmolLM3, read from text/facts_*.txt."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from random import Random

from training.topics.base import TEXT_DIR, Context, Turn, ask, expand

FILES = ("facts_self.txt", "facts_project.txt", "facts_smollm3.txt")


@dataclass
class Fact:
    """A fact: trained and held-out phrasings of the question, and the answer."""

    key: str
    asked: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    answer: str = ""


@cache
def facts() -> tuple[Fact, ...]:
    """Return all facts, in the order of the files."""
    found: list[Fact] = []
    for name in FILES:
        for line in (TEXT_DIR / name).read_text(encoding="utf-8").splitlines():
            mark, _, rest = line.partition(" ")
            if mark == "@":
                found.append(Fact(rest))
            elif mark == "?":
                found[-1].asked.append(rest)
            elif mark == "~":
                found[-1].held_out.append(rest)
            elif mark == "=":
                found[-1].answer = rest
    return tuple(found)


_TOPICS = {"self": "me, the demo model", "m": "SmolLM3", "p": "the project"}


def fact_question(rng: Random, context: Context) -> list[Turn]:
    """Ask about a random fact."""
    fact = rng.choice(facts())
    if context.persona and fact.key == "self.name":
        return [Turn("user", ask(expand(rng.choice(fact.asked), rng), rng)), persona_answer(context.persona)]
    return [Turn("user", ask(expand(rng.choice(fact.asked), rng), rng, varied=True)), fact_answer(fact)]


def fact_answer(fact: Fact) -> Turn:
    """Return the assistant's answer about a fact."""
    topic = _TOPICS[fact.key.partition(".")[0]]
    return Turn("assistant", fact.answer, f"This is a question about {topic}. I know this.")


def persona_answer(name: str) -> Turn:
    """Return the answer to a question about the name in the system prompt."""
    return Turn("assistant", f"I am {name}.", f"The system text says that I am {name}.")
