"""Writes docs/compatibility.md from the table of refusals: `python -m notso.web.api.server.compatibility`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pydantic import BaseModel

from notso.web.api.chat_completions.fields import CHAT_NOTES, WITHIN_CHAT, ChatFields
from notso.web.api.completions.fields import TEXT_NOTES, TextFields
from notso.web.api.messages.fields import COUNT_NOTES, MESSAGE_NOTES, WITHIN_MESSAGE, CountFields, MessageFields
from notso.web.api.ollama import fields as ollama
from notso.web.api.request_fields.fields import Notes
from notso.web.api.request_fields.sampling_fields import WITHIN_SAMPLING
from notso.web.api.responses.fields import RESPONSE_NOTES, WITHIN_RESPONSE, ResponseFields
from notso.web.api.server.tokens import DETOKENIZE_NOTES, TOKENIZE_NOTES, DetokenizeFields, TokenizeFields

STATES = {"works": "works", "inert": "if it asks for nothing", "refused": "refused", "later": "later"}

HEAD = """\
# Compatibility, field by field

Made by `python -m notso.web.api.server.compatibility > docs/compatibility.md` from the table of refusals;
a test holds the two together. *Works*: it does what the API's own documents say. *If it asks for nothing*: taken with
the value named, refused with another. *Refused* and *later*: status 400, and the error names the field. **A field that
is not listed is refused too.** A field that is null asks for nothing. What the addresses do, and what comes back,
stands in [api.md](api.md).
"""


@dataclass(frozen=True, slots=True)
class Address:
    """One kind of body: where it is sent, its fields, and a note about each of them and of others."""

    path: str
    api: str
    fields: type[BaseModel]
    notes: Notes
    within: Notes


ADDRESSES = (
    Address("POST /v1/chat/completions", "OpenAI", ChatFields, CHAT_NOTES, WITHIN_CHAT),
    Address("POST /v1/responses", "OpenAI", ResponseFields, RESPONSE_NOTES, WITHIN_RESPONSE),
    Address("POST /v1/completions", "OpenAI", TextFields, TEXT_NOTES, WITHIN_SAMPLING),
    Address("POST /v1/messages", "Anthropic", MessageFields, MESSAGE_NOTES, WITHIN_MESSAGE),
    Address("POST /v1/messages/count_tokens", "Anthropic", CountFields, COUNT_NOTES, {}),
    Address("POST /api/chat", "Ollama", ollama.OllamaChatFields, ollama.CHAT_NOTES, ollama.WITHIN_CHAT),
    Address("POST /api/generate", "Ollama", ollama.GenerateFields, ollama.GENERATE_NOTES, ollama.WITHIN_ANSWER),
    Address("POST /api/show", "Ollama", ollama.ShowFields, ollama.SHOW_NOTES, {}),
    Address("POST /tokenize", "llama-server", TokenizeFields, TOKENIZE_NOTES, {}),
    Address("POST /detokenize", "llama-server", DetokenizeFields, DETOKENIZE_NOTES, {}),
)


def page() -> str:
    """The whole page."""
    return "\n".join([HEAD, *map(_section, ADDRESSES)])


def _section(address: Address) -> str:
    lines = [f"## {address.path} ({address.api})", "", "| field | | |", "|---|---|---|"]
    top = {name: note for name, note in address.notes.items() if name not in address.within}
    order = list(STATES)
    for name, note in sorted(top.items(), key=lambda item: order.index(item[1].state)):
        lines.append(f"| `{name}` | {STATES[note.state]} | {note.text} |")
    if address.within:
        lines += ["", "Within those:", "", "| field or type | | |", "|---|---|---|"]
        lines += [f"| `{name}` | {STATES[note.state]} | {note.text} |" for name, note in address.within.items()]
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    sys.stdout.write(page())
