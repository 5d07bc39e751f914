"""Generator of docs/compatibility.md from the field tables: `python -m notso.web.api.server.compatibility`."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from pydantic import BaseModel

from notso.web.api.batches.routes import NOTES as BATCH_NOTES
from notso.web.api.batches.routes import BatchFields
from notso.web.api.chat_completions.fields import CHAT_NOTES, WITHIN_CHAT, ChatFields
from notso.web.api.completions.fields import TEXT_NOTES, TextFields
from notso.web.api.llama_cpp.request import NATIVE_NOTES, WITHIN_NATIVE, NativeFields
from notso.web.api.messages.fields import COUNT_NOTES, MESSAGE_NOTES, WITHIN_MESSAGE, CountFields, MessageFields
from notso.web.api.ollama import fields as ollama
from notso.web.api.request_fields.fields import Note, Notes
from notso.web.api.request_fields.sampling_fields import WITHIN_SAMPLING
from notso.web.api.responses.fields import (
    INPUT_TOKEN_NOTES,
    RESPONSE_NOTES,
    WITHIN_RESPONSE,
    InputTokenFields,
    ResponseFields,
)
from notso.web.api.server.adapters import LOAD_NOTES, UNLOAD_NOTES, LoadFields, UnloadFields
from notso.web.api.server.tokens import DETOKENIZE_NOTES, TOKENIZE_NOTES, DetokenizeFields, TokenizeFields

ORDER = ("works", "inert", "hint", "refused", "later")
COLUMNS = "| {} | done | hint | refused |"

HEAD = """\
# Compatibility, field by field

Made by `python -m notso.web.api.server.compatibility > docs/compatibility.md` from the table of fields;
a test holds the two together. A documented field is refused, by name, only where its value would change the answer and
is not supported; anything else is accepted.

- **done**: these values do what the API's own documents say, or ask for what is the case.
- **hint**: taken and ignored, for the reason given, and named in the answer's header `x-notso-ignored`, which leaves
  out the places in lists (`messages.name`). `notso serve --strict-fields` refuses all of them but those that only tell
  of the caller.
- **refused**: status 400, and the error names the field and its place (`messages.3.content`). What is said here is what
  to do instead. Values outside their range are refused as well.

A field that is null asks for nothing, whatever its name. **A name that is not listed** is ignored, at any depth, and
named in `x-notso-ignored` (at most 32 names, and how many more there are); `--strict-fields` refuses it. What the
addresses do, and what comes back, is described in [api.md](api.md).
"""


@dataclass(frozen=True, slots=True)
class Address:
    """An endpoint's body: its fields, and notes on them and on nested ones."""

    path: str
    api: str
    fields: type[BaseModel]
    notes: Notes
    within: Notes


ADDRESSES = (
    Address("POST /v1/chat/completions", "OpenAI", ChatFields, CHAT_NOTES, WITHIN_CHAT),
    Address("POST /v1/responses", "OpenAI", ResponseFields, RESPONSE_NOTES, WITHIN_RESPONSE),
    Address("POST /v1/responses/input_tokens", "OpenAI", InputTokenFields, INPUT_TOKEN_NOTES, {}),
    Address("POST /v1/batches", "OpenAI", BatchFields, BATCH_NOTES, {}),
    Address("POST /v1/completions", "OpenAI", TextFields, TEXT_NOTES, WITHIN_SAMPLING),
    Address("POST /v1/messages", "Anthropic", MessageFields, MESSAGE_NOTES, WITHIN_MESSAGE),
    Address("POST /v1/messages/count_tokens", "Anthropic", CountFields, COUNT_NOTES, {}),
    Address("POST /api/chat", "Ollama", ollama.OllamaChatFields, ollama.CHAT_NOTES, ollama.WITHIN_CHAT),
    Address("POST /api/generate", "Ollama", ollama.GenerateFields, ollama.GENERATE_NOTES, ollama.WITHIN_ANSWER),
    Address("POST /api/show", "Ollama", ollama.ShowFields, ollama.SHOW_NOTES, {}),
    Address("POST /completion", "llama-server", NativeFields, NATIVE_NOTES, WITHIN_NATIVE),
    Address("POST /v1/load_lora_adapter", "vLLM", LoadFields, LOAD_NOTES, {}),
    Address("POST /v1/unload_lora_adapter", "vLLM", UnloadFields, UNLOAD_NOTES, {}),
    Address("POST /tokenize", "llama-server", TokenizeFields, TOKENIZE_NOTES, {}),
    Address("POST /detokenize", "llama-server", DetokenizeFields, DETOKENIZE_NOTES, {}),
)


def page() -> str:
    return "\n".join([HEAD, *map(_section, ADDRESSES)])


def _section(address: Address) -> str:
    lines = [f"## {address.path} ({address.api})", "", *_head("field")]
    top = {name: note for name, note in address.notes.items() if name not in address.within}
    lines += [_row(name, note) for name, note in sorted(top.items(), key=lambda item: ORDER.index(item[1].state))]
    if address.within:
        lines += ["", "Within those:", "", *_head("field or type")]
        lines += [_row(name, note) for name, note in address.within.items()]
    return "\n".join([*lines, ""])


def _head(first: str) -> list[str]:
    return [COLUMNS.format(first), "|---|---|---|---|"]


def _row(name: str, note: Note) -> str:
    done = note.text if note.is_taken else ""
    refused = f"not yet: {note.advice}" if note.state == "later" else note.advice
    return f"| `{name}` | {done} | {note.ignored} | {refused} |".replace("|  |", "| |").replace("|  |", "| |")


if __name__ == "__main__":
    sys.stdout.write(page())
