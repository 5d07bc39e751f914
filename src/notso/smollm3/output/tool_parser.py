"""Parse tool calls while streaming.

SmolLM3 writes a call as `<tool_call>` JSON `</tool_call>`, with optional newlines inside the tags and ordinary text
around them. Text between tags that is not a valid call is returned as text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from notso.smollm3.output.lookahead import Lookahead, Span, pending_length
from notso.smollm3.strict_json import DECODER
from notso.smollm3.values.messages import ToolCall
from notso.text_file import is_unicode

OPEN = "<tool_call>"
CLOSE = "</tool_call>"

_JSON_STRING_OR_CLOSE = re.compile(rf'"(?:[^"\\\n]|\\.)*+(?P<quote>")?|{CLOSE}')
_JSON_SPACE = re.compile(r"[ \t\n\r]*")
# Start of a call up to its arguments, in the form that grammars enforce.
_HEAD = re.compile(r'\s*\{"name": ("(?:[^"\\\n]|\\.)*+"), "arguments": (?=\{)')


@dataclass(frozen=True, slots=True)
class ToolCallPart:
    """Next part of an unfinished call's arguments; the final ToolCall has the same `id`."""

    id: str
    name: str
    text: str


class ToolCallParser:
    """Splits streamed model output into text, ToolCalls and, with `in_parts`, ToolCallParts."""

    # Newlines around calls are dropped. The result does not depend on how the text is divided into chunks.
    #
    # in_parts: before each ToolCall, return its arguments as ToolCallParts while they arrive. An incomplete call at the
    # end is returned neither as a ToolCall nor as text; a continued answer can begin it again. Requires a grammar that
    # guarantees valid calls.
    # tool_names: names of the available tools; a call to any other tool is returned as text, as it cannot be executed.
    # None: accept any name.
    def __init__(self, in_parts: bool = False, tool_names: Collection[str] | None = None) -> None:
        self._in_parts = in_parts
        self._tool_names = tool_names
        self._arguments_reader: _ArgumentsReader | None = None
        self._lookahead = Lookahead()
        self._in_call = False
        # Offset of the call's body in the lookahead. If the body is not a call, the tag is returned as text, too.
        self._body_start = 0
        self._after_call = False

    def push(self, text: str) -> list[Span | ToolCall | ToolCallPart]:
        self._lookahead.add(text)
        pieces: list[Span | ToolCall | ToolCallPart] = []
        while (piece := self._next_in_call() if self._in_call else self._next_in_text()) is not None:
            _append(pieces, piece)
        if self._in_parts and self._in_call and (part := self._next_part()) is not None:
            pieces.append(part)
        return pieces

    def finish(self) -> list[Span | ToolCall | ToolCallPart]:
        """Return the remaining pieces. The last call may lack its closing tag."""
        pieces: list[Span | ToolCall | ToolCallPart] = []
        call = self._call(self._lookahead.text[self._body_start :]) if self._in_call else None
        rest = self._lookahead.pop_text(len(self._lookahead.text))
        if call is not None or not (self._in_parts and self._in_call):
            _append(pieces, call or rest)
        self._in_call = False
        return pieces

    def _next_part(self) -> ToolCallPart | None:
        body = self._lookahead.text[self._body_start :]
        if self._arguments_reader is None:
            head = _HEAD.match(body)
            if head is None:
                return None
            self._arguments_reader = _ArgumentsReader(_new_id(), json.loads(head[1]), head.end())
        text = self._arguments_reader.read_more(body)
        return ToolCallPart(self._arguments_reader.id, self._arguments_reader.name, text) if text else None

    def _call(self, body: str) -> ToolCall | None:
        call = parse_call(body)
        if call is not None and self._tool_names is not None and call.name not in self._tool_names:
            return None
        if call is None or self._arguments_reader is None:
            return call
        return ToolCall(self._arguments_reader.id, call.name, call.arguments)

    def _next_in_text(self) -> Span | None:
        if self._after_call:
            self._lookahead.drop_newlines()
            self._after_call = not self._lookahead.text
        pending = self._lookahead.text
        before, tag, _ = pending.partition(OPEN)
        if tag:
            text = before.rstrip("\n")
            self._body_start, self._in_call, self._arguments_reader = len(before) - len(text) + len(OPEN), True, None
            return self._lookahead.pop_text(len(text))
        certain = pending[: len(pending) - pending_length(pending, [OPEN])].rstrip("\n")
        return self._lookahead.pop_text(len(certain)) if certain else None

    def _next_in_call(self) -> Span | ToolCall | None:
        body = self._lookahead.text[self._body_start :]
        stripped_body = body.lstrip()
        if stripped_body and stripped_body[0] != "{":
            self._in_call = False
            return self._lookahead.pop_text(self._body_start)
        end = _find_call_end(body)
        if end is None:
            return None
        call, self._arguments_reader = self._call(body[:end]), None
        span = self._lookahead.pop_text(self._body_start + end + len(CLOSE))
        self._in_call, self._after_call = False, call is not None
        return call or span


def parse_call(body: str) -> ToolCall | None:
    """Parse the text between tags; return None if it is not a call."""
    # The name must be a nonempty string. The arguments must be an object, {} by default; they keep their original text.
    try:
        members = _parse_members(body.strip())
    except (ValueError, RecursionError):
        return None
    name, _ = members.get("name", (None, ""))
    arguments, written = members.get("arguments", ({}, "{}"))
    if not isinstance(name, str) or not name or not isinstance(arguments, dict) or not is_unicode(name):
        return None
    return ToolCall(id=_new_id(), name=name, arguments=written)


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"


class _ArgumentsReader:
    def __init__(self, id: str, name: str, start: int) -> None:
        self.id = id
        self.name = name
        self._position = start
        self._depth = 0
        self._in_string = False
        self._finished = False

    def read_more(self, body: str) -> str:
        start = self._position
        while not self._finished and self._position < len(body):
            character = body[self._position]
            if self._in_string and character == "\\":
                if self._position + 1 == len(body):
                    break
                self._position += 1
            elif character == '"':
                self._in_string = not self._in_string
            elif not self._in_string and character in "{[":
                self._depth += 1
            elif not self._in_string and character in "}]":
                self._depth -= 1
                self._finished = self._depth == 0
            self._position += 1
        return body[start : self._position]


def _find_call_end(text: str) -> int | None:
    if CLOSE not in text:
        return None
    for found in _JSON_STRING_OR_CLOSE.finditer(text):
        if found[0] == CLOSE:
            return found.start()
        if not found["quote"]:
            line_end = text.find("\n", found.end())  # strings do not span lines
            end = text.find(CLOSE, line_end) if line_end >= 0 else -1
            return end if end >= 0 else None
    return None


def _parse_members(text: str) -> dict[str, tuple[Any, str]]:
    if not isinstance(DECODER.decode(text), dict):
        raise ValueError("not an object")
    members = {}
    position = _skip_space(text, 1)
    while text[position] != "}":
        key, position = DECODER.raw_decode(text, position)
        start = _skip_space(text, _skip_space(text, position) + 1)
        value, position = DECODER.raw_decode(text, start)
        members[key] = (value, text[start:position])
        position = _skip_space(text, position)
        if text[position] == ",":
            position = _skip_space(text, position + 1)
    return members


def _skip_space(text: str, position: int) -> int:
    found = _JSON_SPACE.match(text, position)
    return found.end() if found else position


def _append(pieces: list[Span | ToolCall | ToolCallPart], piece: Span | ToolCall) -> None:
    last = pieces[-1] if pieces else None
    if isinstance(piece, Span) and isinstance(last, Span):
        pieces[-1] = Span(last + piece, last.start)
    elif piece != "":
        pieces.append(piece)
