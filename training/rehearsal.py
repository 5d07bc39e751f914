"""Conversations of the kind that the demo model was trained on, for `notso tune --rehearse`: a sample of the corpus.

`python -m training.rehearsal --count 300 > rehearsal.jsonl`. Each ends before an answer, which the model gives itself.
What the score asks is not among them but by chance: its numbers and phrasings are kept out of the corpus.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from random import Random
from typing import Any

from training.backends import parse
from training.corpus import dialogue
from training.topics.base import Dialogue

SEED = 7
LAST_TURN = 8  # later answers are not asked for: their prompts are long, and say little that is new


def conversations(count: int, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """Rows with `messages`, `tools` where there are any, and whether the model thinks."""
    rng = Random(seed)
    for _ in range(count):
        made = dialogue(rng)
        asked_at = rng.choice([at for at, turn in enumerate(made.turns) if turn.role == "assistant" and at < LAST_TURN])
        row: dict[str, Any] = {
            "messages": _messages(made, asked_at),
            "chat_template_kwargs": {"enable_thinking": made.thinking},
        }
        if made.tools:
            tools = [json.loads(tool) for tool in made.tools]
            row["tools"] = [tool if "function" in tool else {"type": "function", "function": tool} for tool in tools]
        yield row


def _messages(made: Dialogue, asked_at: int) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "system", "content": made.system}] if made.system else []
    for turn in made.turns[:asked_at]:
        call = parse(turn.text).call if turn.role == "assistant" else None
        if call is None:
            messages.append({"role": turn.role, "content": turn.text})
            continue
        written = json.loads(call)
        function = {"name": written["name"], "arguments": json.dumps(written["arguments"])}
        messages.append(
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]}
        )
    return messages


def main() -> None:
    """Print conversations, one a line."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    for row in conversations(options.count, options.seed):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
