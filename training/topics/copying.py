"""Repeating phrases, counting, and system prompts with names and rules."""

from __future__ import annotations

from random import Random

from training.topics import words
from training.topics.base import Context, Turn, ask


def _phrase(rng: Random) -> str:
    count = rng.choice([1, 1, 2, 2, 3, 4, 5])
    parts = [rng.choice(words.PLAIN) if rng.random() < 0.8 else words.made_up(rng) for _ in range(count)]
    if rng.random() < 0.2:
        parts[rng.randrange(count)] = str(rng.randrange(1000))
    if rng.random() < 0.2:
        parts[0] = parts[0].capitalize()
    return " ".join(parts)


# Texts that a page must escape or decode correctly: markup, and characters of several bytes.
_ODD = [
    "<b>bold</b>",
    "<i>x</i>",
    "<script>alert(1)</script>",
    "**bold**",
    "*star*",
    "`code`",
    "a & b",
    "1 < 2",
    "x > y",
    "(a, b)",
    "[link]",
    "$x$",
    "#1",
    "100%",
    "a@b.c",
    "http://example.org",
    "café",
    "naïve",
    "Zürich",
    "über",
    "ñandú",
    "Straße",
    "😀",
    "🎉",
    "👍",
    "❤️",
    "🚀",
    "日本",
    "你好",
    "привет",
    "€5",
    "½",
    "→",
    "…",
    "“quoted”",
    "<div>",
    "</div>",
    "<img src=x>",
    "&amp;",
    "it's",
    "don't",
    "C++",
    "3.14",
    "-7",
    "a_b",
    "x=1",
    "{}",
    "\\n",
]

_ECHO = [
    "say {x}",
    "repeat {x}",
    "repeat after me: {x}",
    "please say {x}",
    "say: {x}",
    "write {x}",
    "echo {x}",
    "say the words {x}",
    "please repeat: {x}",
    "can you say {x}",
    "just write {x}",
    "answer with {x}",
    'say "{x}"',
    'repeat "{x}"',
    "say exactly: {x}",
    "type {x}",
]


def echo(rng: Random, context: Context) -> list[Turn]:
    """Ask to repeat a phrase."""
    draw = rng.random()
    if draw < 0.7:
        phrase = _phrase(rng)
    elif draw < 0.85:
        phrase = " ".join(
            rng.choice(_ODD) if rng.random() < 0.6 else rng.choice(words.PLAIN) for _ in range(rng.choice([1, 1, 2, 3]))
        )
    else:
        phrase = rng.choice(
            [
                "hello world",
                "hello",
                "Hello, world!",
                "yes",
                "ok",
                "I am a model",
                " ".join(rng.choice(words.PLAIN) for _ in range(9)),
            ]
        )
    question = rng.choice(_ECHO)
    question = question[:1].upper() + question[1:] if rng.random() < 0.5 else question
    return [Turn("user", question.format(x=phrase)), Turn("assistant", phrase, f"The user wants me to say: {phrase}")]


_COUNT = [
    "count from {a} to {b}",
    "count {a} to {b}",
    "can you count from {a} to {b}",
    "list the numbers from {a} to {b}",
    "write the numbers {a} to {b}",
]
_COUNT_TO = ["count to {b}", "can you count to {b}", "please count to {b}", "count up to {b}"]


def count(rng: Random, context: Context) -> list[Turn]:
    """Ask to count up, usually fewer than 14 steps."""
    a = 1 if rng.random() < 0.6 else rng.randrange(0, 80)
    b = a + (rng.randrange(2, 14) if rng.random() < 0.85 else rng.choice([19, 24, 29, 49]))
    question = rng.choice(_COUNT_TO) if a == 1 and rng.random() < 0.7 else rng.choice(_COUNT)
    numbers = ", ".join(str(n) for n in range(a, b + 1))
    return [
        Turn("user", ask(question.format(a=a, b=b), rng, typos=False)),
        Turn("assistant", numbers, f"I count from {a} to {b}."),
    ]


PERSONAS = (
    "You are {n}.",
    "Your name is {n}.",
    "You are {n}, a helpful assistant.",
    "You are an assistant called {n}.",
    "Your name is {n}. Be friendly.",
    "You are {n}, a friendly chatbot. Keep your answers short.",
    "Act as {n}.",
)
PLAIN_SYSTEMS = (
    "You are a helpful assistant.",
    "Be brief.",
    "You are a friendly assistant.",
    "Answer the questions of the user.",
    "Keep it short.",
    "You are a chatbot.",
    "You are a helpful AI assistant.",
    "Be polite and honest.",
    "You help people with small questions.",
    "Be concise.",
    "You are talking to a child.",
    "Help the user.",
    "You are a careful assistant who helps with homework.",
)
ENDINGS = ('End every answer with "{x}".', 'Always end with the word "{x}".', 'Finish each reply with "{x}".')
STARTS = ('Begin every answer with "{x}".', 'Start each answer with the word "{x}".', 'Always say "{x}" first.')
