"""Values and text functions shared by the topics."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

TEXT_DIR = Path(__file__).parent.parent / "text"


@dataclass(frozen=True)
class Turn:
    """A message. `think` is the reasoning of an assistant's message."""

    role: str
    text: str
    think: str = ""


@dataclass
class Dialogue:
    """A training conversation before it is rendered."""

    turns: list[Turn]
    thinking: bool
    date: str
    system: str | None = None
    tools: list[str] | None = None
    kind: str = ""


@dataclass
class Context:
    """State of the conversation that is being generated."""

    date: str
    thinking: bool
    memory: dict[str, str] = field(default_factory=dict)
    persona: str | None = None
    tool_names: tuple[str, ...] = ()
    last_user: str | None = None


_BRACES = re.compile(r"\{([^{}]*)\}")

MACROS = {
    "<m>": [
        "smollm3",
        "SmolLM3",
        "smollm3-3b",
        "SmolLM3-3B",
        "the 3b model",
        "the 3b",
        "the big model",
        "smol lm 3",
        "smollm",
        "the 3B model",
        "the smollm3 model",
    ],
    "<p>": [
        "notso-smollm3-bot",
        "this project",
        "the project",
        "notso",
        "this app",
        "this program",
        "the bot",
        "this software",
        "this chatbot",
        "the app",
        "notso smollm3 bot",
    ],
}


def expand(pattern: str, rng: Random) -> str:
    """Choose one alternative in each `{a|b}` and one name for each macro."""
    while match := _BRACES.search(pattern):
        pattern = pattern[: match.start()] + rng.choice(match.group(1).split("|")) + pattern[match.end() :]
    for macro, names in MACROS.items():
        while macro in pattern:
            pattern = pattern.replace(macro, rng.choice(names), 1)
    return " ".join(pattern.split())


_OPENERS = [
    "hey, ",
    "hi, ",
    "hello, ",
    "please ",
    "please tell me: ",
    "can you tell me: ",
    "tell me, ",
    "ok, ",
    "so ",
    "and ",
    "now ",
    "well, ",
    "quick question: ",
    "i wonder, ",
    "one more question: ",
    "next: ",
    "good. ",
    "great, ",
    "another question: ",
    "i want to know: ",
    "question: ",
    "do you know: ",
    "um, ",
    "sorry, ",
    "thanks. ",
    "then ",
]
_ENDINGS = [
    "?",
    "?",
    "?",
    "?",
    "",
    "",
    "",
    ".",
    "??",
    " ?",
    " please",
    ", please?",
    "!",
    " now?",
    "?!",
    "...",
    " then?",
]


_FORMS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        r"^(what is|what's|whats) ",
        (
            "what is ",
            "what's ",
            "whats ",
            "tell me ",
            "do you know ",
            "can you tell me ",
            "i want to know ",
            "say me ",
            "could you explain ",
            "i would like to know ",
            "what exactly is ",
            "give me ",
        ),
    ),
    (
        r"^(explain|describe|tell me about) ",
        (
            "explain ",
            "describe ",
            "tell me about ",
            "could you explain ",
            "say something about ",
            "can you explain ",
            "explain to me ",
            "tell me something about ",
            "what can you say about ",
            "please describe ",
        ),
    ),
    (
        r"^(how do i|how can i|can i) ",
        (
            "how do i ",
            "how can i ",
            "how would i ",
            "tell me how to ",
            "what must i do to ",
            "i want to ",
            "how to ",
            "i would like to ",
            "how does one ",
            "show me how to ",
            "what is the way to ",
        ),
    ),
    (
        r"^how many (.+?) (does|do) (.+) have$",
        (
            r"how many \1 \2 \3 have",
            r"number of \1 in \3",
            r"\3 has how many \1",
            r"what number of \1 \2 \3 have",
            r"count of \1 of \3",
            r"tell me how many \1 \3 has",
            r"the number of \1 of \3",
        ),
    ),
    (
        r"^(which|what) command ",
        (
            "which command ",
            "what command ",
            "which make or notso command ",
            "tell me which command ",
            "what do i type that ",
        ),
    ),
    (
        r"^(who|where|why|how|when|which) ",
        (r"\1 ", r"\1 ", r"tell me \1 ", r"do you know \1 ", r"\1 exactly ", r"can you say \1 "),
    ),
    (r"^(is|are|does|do|can) ", (r"\1 ", r"\1 ", r"tell me: \1 ", r"say, \1 ", r"i wonder: \1 ")),
)
_SMALL_WORDS = {
    "what",
    "is",
    "the",
    "a",
    "do",
    "does",
    "how",
    "are",
    "of",
    "can",
    "i",
    "to",
    "in",
    "for",
    "me",
    "you",
    "there",
    "an",
}


def vary(question: str, rng: Random) -> str:
    """Rephrase the beginning of a question, or omit small words."""
    if rng.random() < 0.06:
        kept = [w for w in question.split() if w not in _SMALL_WORDS or rng.random() < 0.3]
        if len(kept) > 1:
            return " ".join(kept)
    for pattern, forms in _FORMS:
        if re.search(pattern, question):
            return re.sub(pattern, rng.choice(forms), question)
    return question


def typo(text: str, rng: Random) -> str:
    """Omit or double a letter, or swap two."""
    spots = [i for i in range(1, len(text) - 1) if text[i].isalpha() and text[i + 1].isalpha()]
    if not spots:
        return text
    i = rng.choice(spots)
    kind = rng.randrange(3)
    if kind == 0:
        return text[:i] + text[i + 1 :]
    if kind == 1:
        return text[:i] + text[i] + text[i:]
    return text[:i] + text[i + 1] + text[i] + text[i + 2 :]


def ask(question: str, rng: Random, *, typos: bool = True, endings: bool = True, varied: bool = False) -> str:
    """Vary a question as typed by users: add openers and endings, and change case and spelling."""
    text = vary(question, rng) if varied and rng.random() < 0.4 else question
    if rng.random() < 0.22:
        text = rng.choice(_OPENERS) + text
    if typos and rng.random() < 0.08:
        text = typo(text, rng)
    draw = rng.random()
    if draw < 0.45:
        text = text[:1].upper() + text[1:]
    elif typos and draw < 0.53:
        text = text.lower()
    elif typos and draw < 0.55:
        text = text.upper()
    if endings and text[-1:] not in "?.!":
        text += rng.choice(_ENDINGS)
    return text
