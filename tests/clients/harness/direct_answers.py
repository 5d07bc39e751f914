"""The engine's results without a server: questions as JSON on standard input, answers as JSON on standard output.

Run this with the server's Python. A question is a name from `ANSWERS` and its arguments.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from typing import Any

from notso.smollm3 import Engine, Message, PromptInput, RequestOptions, SamplingParams
from notso.smollm3.sampling.sampler import log_probabilities


def score(engine: Engine, context: str, continuation: str) -> tuple[float, bool]:
    """Return the log probability of the continuation, and whether each of its tokens is the most likely one.

    As in the harness, blanks between the texts belong to the continuation, and an empty context becomes the end
    token.
    """
    text = context + continuation
    context = context.rstrip()
    before = engine.tokenize(context or engine.info.end_token, special=True)
    if context:
        ids = before + engine.tokenize(text, special=True)[len(before) :]
    else:
        ids = before + engine.tokenize(text, special=True)
    weighed = log_probabilities(engine.logits(ids))
    total, greedy = 0.0, True
    for at in range(len(before), len(ids)):
        row = weighed[at - 1]
        total += float(row[ids[at]])
        greedy = greedy and row[ids[at]] == row.max()
    return total, bool(greedy)


def written(engine: Engine, prompt: PromptInput, sampling: Mapping[str, Any], **options: Any) -> str:
    """Return the greedy answer."""
    params = SamplingParams(temperature=0.0, stop=tuple(sampling["stop"]), max_tokens=sampling["max_tokens"])
    events = engine.generate(prompt, params, RequestOptions(**options))
    return "".join(event.text for event in events if event.kind == "text")


def text(engine: Engine, prompt: str, sampling: Mapping[str, Any]) -> str:
    """Return the greedy continuation of a text."""
    return written(engine, engine.tokenize(prompt, special=True), sampling, thinking=False, is_plain=True)


def chat(engine: Engine, messages: list[dict[str, str]], sampling: Mapping[str, Any]) -> str:
    """Return the greedy answer in a conversation."""
    return written(engine, [Message(each["role"], each["content"]) for each in messages], sampling)  # type: ignore[arg-type]


ANSWERS: dict[str, Callable[..., Any]] = {"score": score, "text": text, "chat": chat}


if __name__ == "__main__":
    with Engine.load(threads=1) as loaded:
        json.dump([ANSWERS[name](loaded, *given) for name, *given in json.load(sys.stdin)], sys.stdout)
