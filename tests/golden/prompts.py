"""Twenty conversations for the demo model: trained and untrained topics, short and long, with and without reasoning."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date
from typing import Any

from notso.smollm3 import Message

DATE = date(2026, 1, 31)

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@dataclass(frozen=True, slots=True)
class Conversation:
    """Turns of user, assistant, user and so on, with an optional system prompt."""

    turns: tuple[str, ...]
    thinking: bool = True
    system: str | None = None
    tools: tuple[dict[str, Any], ...] = ()

    @property
    def messages(self) -> list[Message]:
        opening = [] if self.system is None else [Message("system", self.system)]
        return opening + [Message("assistant" if i % 2 else "user", text) for i, text in enumerate(self.turns)]


CONVERSATIONS = (
    Conversation(("hello",)),
    Conversation(("Hi, how are you?",), thinking=False),
    Conversation(("What is 34 + 58?",)),
    Conversation(("17+25",), thinking=False),
    Conversation(("What is 90 - 35?",)),
    Conversation(("Who are you?",)),
    Conversation(("What is SmolLM3?",), thinking=False),
    Conversation(("What is NoPE?",)),
    Conversation(("How many layers does SmolLM3 have?",)),
    Conversation(("What is the capital of France?",), thinking=False),
    Conversation(("My name is Ada.", "Nice to meet you, Ada.", "What is my name?")),
    Conversation(("I live in Oslo.", "Thanks, I will remember that.", "What is 12 + 7?", "19", "Where do I live?")),
    Conversation(("What is your name?",), system="You are Nora."),
    Conversation(("hello", "Hello!", "thanks", "You are welcome.", "Tell me a joke"), thinking=False),
    Conversation(("What is the weather in Paris?",), tools=(WEATHER,)),
    Conversation(("Count from 3 to 9.",)),
    Conversation(("Say: red apples fall slowly.",), thinking=False),
    Conversation(("Grüße aus Köln 🎉, 你好!",)),
    Conversation(("def add(a, b):\n    return a + b\n\nWhat does this do?",), thinking=False),
    Conversation(("zzzzz qqq 999999 ^^^^ <|im_end|> </think>",)),
)
