"""Questions about general knowledge, which the model learns to decline."""

from __future__ import annotations

from functools import cache
from random import Random

from training.topics import words
from training.topics.base import TEXT_DIR, Context, Turn, ask

_SLOTS = {
    "<country>": words.COUNTRIES + words.CITIES[:60],
    "<work>": words.WORKS,
    "<person>": words.PEOPLE + words.NAMES[:40],
    "<thing>": words.THINGS + words.PLAIN,
    "<dish>": words.DISHES,
    "<task>": words.TASKS,
    "<event>": words.EVENTS,
    "<soft>": words.SOFTWARE,
}

ANSWER = "I do not know that: I am only a small demo model. SmolLM3-3B may know it; you get it with notso pull."


@cache
def _patterns() -> tuple[str, ...]:
    lines = (TEXT_DIR / "unknown.txt").read_text(encoding="utf-8").splitlines()
    return tuple(line for line in lines if line and not line.startswith("#"))


def unknown(rng: Random, context: Context) -> list[Turn]:
    """Ask for general knowledge."""
    text = rng.choice(_patterns())
    for slot, values in _SLOTS.items():
        if slot in text:
            value = rng.choice(values) if rng.random() < 0.9 else words.made_up(rng)
            text = text.replace(slot, value)
    return [
        Turn("user", ask(text, rng, varied=True)),
        Turn("assistant", ANSWER, "This is general knowledge. I do not know it."),
    ]
