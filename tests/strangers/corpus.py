"""Requests of other programs: reading the corpus, and combining streamed responses as those programs do.

Each file of requests/ is a list of sessions with these keys:

- `program`, `version`, `headers`.
- `source`: the file in the program's repository that builds the request, or its package if requests were recorded.
- `port`: `ollama` for Ollama's port, otherwise the server's own.
- `turns`: each with `method`, `address`, an optional `body`, and what is `expected` (see `check` in test_requests).

Names, values and their order are those of the program. The prompts are ours, and if a program's tools exceed the demo
model's context, only the first are kept. A later turn can contain a part of an earlier answer:
`{{0/choices/0/message/content}}` is the number of the turn and a JSON pointer into its combined answer. The suffix
`|object` parses the string as JSON; `|compact` and `|spaced` reformat it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "requests"
PLACE = re.compile(r"\{\{(\d+)((?:/[^|{}/]*)+)(?:\|(object|compact|spaced))?\}\}")

Whole = dict[str, Any]
"""A complete answer: one response, or the chunks of a stream combined into that form."""


def sessions() -> list[dict[str, Any]]:
    """Return every session of the corpus, sorted by file."""
    return [each for path in sorted(FOLDER.glob("*.json")) for each in json.loads(path.read_text("utf-8"))]


def at(whole: Any, pointer: str) -> Any:
    """Return the value that a JSON pointer refers to, or None."""
    for name in pointer.split("/")[1:]:
        try:
            whole = whole[int(name)] if isinstance(whole, list) else whole[name]
        except (KeyError, IndexError, TypeError):
            return None
    return whole


WAYS: dict[str | None, Callable[[Any], Any]] = {
    None: lambda value: value,
    "object": json.loads,
    "compact": lambda text: json.dumps(json.loads(text), separators=(",", ":"), ensure_ascii=False),
    "spaced": lambda text: json.dumps(json.loads(text), ensure_ascii=False),
}


def filled(body: Any, answers: Sequence[Whole]) -> Any:
    """Return a copy of the body with parts of earlier answers in place of the placeholders."""

    def value(found: re.Match[str]) -> Any:
        part = at(answers[int(found[1])], found[2])
        assert part is not None, f"the answer has no {found[0]}"
        return WAYS[found[3]](part)

    if isinstance(body, dict):
        return {name: filled(each, answers) for name, each in body.items()}
    if isinstance(body, list):
        return [filled(each, answers) for each in body]
    if not isinstance(body, str):
        return body
    whole = PLACE.fullmatch(body)
    return value(whole) if whole else PLACE.sub(lambda found: str(value(found)), body)


def events(text: str) -> Iterator[tuple[str, str]]:
    """Yield the name and data of each event of a stream."""
    for block in text.replace("\r\n", "\n").split("\n\n"):
        lines = [line.partition(": ") for line in block.split("\n")]
        name = next((value for key, _, value in lines if key == "event"), "")
        data = "\n".join(value for key, _, value in lines if key == "data")
        if data:
            yield name, data


def _merged(whole: Any, piece: Any) -> Any:
    """Merge a delta of OpenAI or Ollama: texts are concatenated, list items merged by index, other values replaced."""
    if isinstance(whole, dict) and isinstance(piece, dict):
        fixed = ("id", "type", "role", "object", "model", "created_at", "finish_reason")
        return whole | {
            name: value if name in fixed or name not in whole else _merged(whole[name], value)
            for name, value in piece.items()
            if value is not None or name not in whole
        }
    if isinstance(whole, str) and isinstance(piece, str):
        return whole + piece
    if isinstance(whole, list) and isinstance(piece, list):
        for number, each in enumerate(piece):
            index = each.get("index", number) if isinstance(each, dict) else len(whole)
            whole = [*whole[:index], _merged(whole[index], each) if index < len(whole) else each, *whole[index + 1 :]]
        return whole
    return piece


def _chunks(text: str) -> Whole:
    whole: Whole = {}
    for _, data in events(text):
        if data == "[DONE]":
            return whole
        piece = json.loads(data)
        assert "error" not in piece, data
        for choice in piece.get("choices", []):
            if "delta" in choice:
                choice["message"] = choice.pop("delta")
        whole = _merged(whole, piece)
    raise AssertionError("the stream ended without [DONE]")


def _messages(text: str) -> Whole:
    whole: Whole = {}
    inputs: dict[int, str] = {}
    for name, data in events(text):
        piece = json.loads(data)
        assert name == piece["type"] != "error", data
        if name == "message_start":
            whole = piece["message"]
        elif name == "content_block_start":
            whole["content"].append(piece["content_block"])
        elif name == "content_block_delta":
            delta = {key: value for key, value in piece["delta"].items() if key != "type"}
            if "partial_json" in delta:
                inputs[piece["index"]] = inputs.get(piece["index"], "") + delta["partial_json"]
            else:
                whole["content"][piece["index"]] = _merged(whole["content"][piece["index"]], delta)
        elif name == "message_delta":
            whole |= piece["delta"]
            whole["usage"] |= piece["usage"]
        elif name == "message_stop":
            for index, written in inputs.items():
                whole["content"][index]["input"] = json.loads(written or "{}")
            return whole
    raise AssertionError("the stream ended without message_stop")


def _response(text: str) -> Whole:
    name, data = list(events(text))[-1]
    assert name in ("response.completed", "response.incomplete"), data
    response: Whole = json.loads(data)["response"]
    return response


def _lines(text: str) -> Whole:
    whole: Whole = {}
    for line in text.splitlines():
        piece = json.loads(line)
        assert "error" not in piece, line
        whole = _merged(whole, piece)
    assert whole.get("done") is True or whole.get("status") == "success"
    return whole


def whole_answer(address: str, kind: str, text: str) -> Whole:
    """Return the complete answer of an endpoint."""
    if "ndjson" in kind:
        return _lines(text)
    if "event-stream" in kind:
        if "/responses" in address:
            return _response(text)
        return _messages(text) if "/messages" in address else _chunks(text)
    answer = json.loads(text)
    return answer if isinstance(answer, dict) else {"": answer}


@dataclass(frozen=True)
class Said:
    """The content of an answer of any API. `calls`: names and arguments."""

    text: str
    thought: str
    calls: tuple[tuple[str, Any], ...]
    tokens: int | None


def said(address: str, whole: Mapping[str, Any]) -> Said:
    """Parse an answer of the API at that address."""
    if "/responses" in address:
        items = whole["output"]
        parts = [part for item in items if item["type"] == "message" for part in item["content"]]
        thoughts = [part for item in items if item["type"] == "reasoning" for part in item.get("content") or ()]
        calls = [(item["name"], json.loads(item["arguments"])) for item in items if item["type"] == "function_call"]
        return Said(*(_text(each) for each in (parts, thoughts)), tuple(calls), whole["usage"]["output_tokens"])
    if "/messages" in address:
        blocks = whole["content"]
        calls = [(block["name"], block["input"]) for block in blocks if block["type"] == "tool_use"]
        thought = "".join(block["thinking"] for block in blocks if block["type"] == "thinking")
        texts = [block for block in blocks if block["type"] == "text"]
        return Said(_text(texts), thought, tuple(calls), whole["usage"]["output_tokens"])
    if "/api/" in address:
        message = whole.get("message") or {"content": whole.get("response"), "thinking": whole.get("thinking")}
        made = [each["function"] for each in message.get("tool_calls") or ()]
        calls = [(each["name"], each["arguments"]) for each in made]
        tokens = whole.get("eval_count")
        return Said(message.get("content") or "", message.get("thinking") or "", tuple(calls), tokens)
    if "choices" not in whole:
        return Said(whole["content"], "", (), whole["tokens_predicted"])
    choice = whole["choices"][0]
    message = choice.get("message") or {"content": choice.get("text")}
    made = [each["function"] for each in message.get("tool_calls") or ()]
    calls = [(each["name"], json.loads(each["arguments"])) for each in made]
    tokens = (whole.get("usage") or {}).get("completion_tokens")
    return Said(message.get("content") or "", message.get("reasoning_content") or "", tuple(calls), tokens)


def _text(parts: Sequence[Mapping[str, Any]]) -> str:
    return "".join(part["text"] for part in parts)
