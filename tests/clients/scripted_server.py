"""A server whose scripted engine calls tools and follows schemas, so that clients can be tested with both.

`python scripted_server.py FOLDER` prints its address and runs until it is stopped. The answer is the first that
applies:

- If a user message contains `Steps: [{"name": ..., "arguments": ...}, ...]`, these tools are called in turn. `[[]]` in
  the arguments is replaced by the text in double brackets in the previous result.
- If other tools are offered and none has returned a result, the required one or else the first is called.
- If a schema is given, the answer follows it.
- If documents may be quoted, the answer quotes words 3 to 8 of each.
- Otherwise the answer repeats the last message.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event, Message, RequestOptions, ToolCall, ToolName
from notso.web.server import serve
from notso.web.values.settings import Settings

LAST_CALLS = ("final_answer", "final_result")
"""Tools through which smolagents and pydantic-ai receive the final answer."""

OBSERVATION = "Observation:"
"""Prefix of a tool result that smolagents sends as a user message."""

STEPS = "Steps: "
"""Prefix of the tool calls that a user message prescribes, for agents whose tools need specific arguments."""

FOUND = re.compile(r"\[\[(\w+)\]\]")
"""The part of a tool result that the next step receives."""

CONTEXT_TOKENS = 65_536
"""The context of SmolLM3-3B, because clients' default requests are meant for large models."""

_calls = count(1)


def instance(schema: Any, whole: Any) -> Any:
    """Return a minimal value that matches the schema."""
    if "$ref" in schema:
        return instance(whole["$defs"][schema["$ref"].rsplit("/", 1)[1]], whole)
    if "const" in schema or "enum" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return instance(schema[several][0], whole)
    kinds = schema.get("type")
    kind = kinds[0] if isinstance(kinds, list) else kinds
    if kind == "object" or "properties" in schema:
        return {name: instance(each, whole) for name, each in schema.get("properties", {}).items()}
    if kind == "array":
        return [instance(schema.get("items", {}), whole)]
    plain = {"integer": 7, "number": 7.5, "boolean": True, "null": None}
    return plain.get(kind, "Vienna")


def step(messages: Sequence[Message], offered: Iterable[str]) -> ToolCall | None:
    """Return the next prescribed call, or None if there is none or its tool is not offered."""
    asked_at = max((at for at, message in enumerate(messages) if message.role == "user" and STEPS in message.content))
    steps, _ = json.JSONDecoder().raw_decode(messages[asked_at].content.partition(STEPS)[2])
    answers = [message.content for message in messages[asked_at:] if message.role == "tool"]
    if len(answers) >= len(steps) or steps[len(answers)]["name"] not in offered:
        return None
    found = FOUND.search(answers[-1]) if answers else None
    arguments = json.dumps(steps[len(answers)]["arguments"]).replace("[[]]", found[1] if found else "nothing")
    return ToolCall(f"call_{next(_calls)}", steps[len(answers)]["name"], arguments)


def called(messages: Sequence[Message], options: RequestOptions) -> ToolCall | None:
    """Return the tool call to make, or None."""
    functions = {tool["function"]["name"]: tool["function"] for tool in options.tools or ()}
    last = [name for name in LAST_CALLS if name in functions]
    if not functions:
        return None
    if any(message.role == "user" and STEPS in message.content for message in messages):
        return step(messages, functions)
    if isinstance(options.tool_choice, ToolName):
        name = options.tool_choice.name
    elif messages[-1].role == "tool" or messages[-1].content.startswith(OBSERVATION):
        if not last:
            return None
        name = last[0]
    else:
        name = next((name for name in functions if name not in LAST_CALLS), last[0] if last else "")
    schema = functions[name].get("parameters") or {"type": "object"}
    return ToolCall(f"call_{next(_calls)}", name, json.dumps(instance(schema, schema)))


def quotable_words(options: RequestOptions) -> Iterator[tuple[int, str]]:
    """Yield the number of each document that may be quoted, and six of its words."""
    for at, source in enumerate(options.sources, start=1):
        if len(words := source.text.split(" ")) > 8:
            yield at, " ".join(words[2:8])


def main() -> None:
    def script(messages: Sequence[Message], thinking: bool) -> Iterable[Event]:
        options = engine.requests[-1].options
        if call := called(messages, options):
            return [Event("tool_call", tool_call=call)]
        if options.grammar is not None:
            schema = json.loads(options.grammar.source or "{}")
            return say(json.dumps(instance(schema, schema)))
        if quoted := [f"[[{at}: {words}]]" for at, words in quotable_words(options)]:
            return say(f"It says {' and '.join(quoted)} so.", piece=7)
        return say(f"You said: {messages[-1].content}", "Hm." if thinking else "")

    engine = ScriptedEngine(script)
    engine.info = replace(engine.info, context_tokens=CONTEXT_TOKENS)
    settings = Settings(port=0, data_dir=Path(sys.argv[1]))
    serve(lambda: engine, settings, on_ready=lambda address: print(address, flush=True))


if __name__ == "__main__":
    main()
