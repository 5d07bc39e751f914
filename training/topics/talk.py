"""Small talk, and today's date."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from random import Random

from training.topics.base import TEXT_DIR, Context, Turn, ask, expand


@dataclass
class Talk:
    """A kind of small talk: trained and held-out phrasings, possible answers, and the reasoning."""

    key: str
    said: list[str] = field(default_factory=list)
    held_out: list[str] = field(default_factory=list)
    answers: list[str] = field(default_factory=list)
    think: str = ""


@cache
def talks() -> tuple[Talk, ...]:
    """Return all small talk, in the order of the file."""
    found: list[Talk] = []
    for line in (TEXT_DIR / "talk.txt").read_text(encoding="utf-8").splitlines():
        mark, _, rest = line.partition(" ")
        if mark == "@":
            found.append(Talk(rest))
        elif mark == "?":
            found[-1].said.append(rest)
        elif mark == "~":
            found[-1].held_out.append(rest)
        elif mark in ("=", "/"):
            found[-1].answers.append(rest.replace("\\n", "\n"))
        elif mark == "+":
            found[-1].think = rest
    return tuple(found)


_RARE = {"story": 0.5, "poem": 0.5, "markdown": 0.7, "table": 0.6, "code": 0.7}
_COMMON = {"hello": 5.0, "howareyou": 2.0, "thanks": 2.0, "bye": 1.5, "joke": 1.5, "yesno": 1.5}


def small_talk(rng: Random, context: Context) -> list[Turn]:
    """Make small talk."""
    choice = [t for t in talks() if not (context.tool_names and t.key in ("whattime", "weathernotool"))]
    talk = rng.choices(choice, [_RARE.get(t.key, _COMMON.get(t.key, 1.0)) for t in choice])[0]
    pattern = rng.choice(talk.said)
    text = expand(pattern, rng)
    if talk.key != "empty":
        text = (
            ask(text, rng)
            if rng.random() < 0.5
            else rng.choice([text, text.capitalize(), text + "!", text.capitalize() + "."])
        )
    return [Turn("user", text), Turn("assistant", rng.choice(talk.answers), talk.think)]


_DATE = [
    "what day is it {|today}",
    "{what is|what's} {the date|today's date|the date today}",
    "which {day|date} is it today",
    "today's date",
    "tell me the date",
    "what date {is it|do we have} {|today}",
    "do you know {the date|what day it is}",
]
_YEAR = ["what year is it", "which year is it {|now}", "{what is|what's} the {current |}year"]
_MONTH = ["what month is it", "which month is it {|now}", "{what is|what's} the {current |}month"]


def today(rng: Random, context: Context) -> list[Turn]:
    """Ask for the date, the year or the month; the date is in the system prompt."""
    kind = rng.random()
    _, month, year = context.date.split(" ")
    think = f"The system text says: Today Date: {context.date}."
    if kind < 0.6:
        return [
            Turn("user", ask(expand(rng.choice(_DATE), rng), rng)),
            Turn("assistant", f"Today is {context.date}.", think),
        ]
    if kind < 0.8:
        return [
            Turn("user", ask(expand(rng.choice(_YEAR), rng), rng)),
            Turn("assistant", f"It is the year {year}.", think),
        ]
    return [Turn("user", ask(expand(rng.choice(_MONTH), rng), rng)), Turn("assistant", f"It is {month}.", think)]
