"""Write a sample of the demo model's training corpus, for `notso tune --rehearse`.

    python -m training.rehearsal --count 300 > rehearsal.jsonl

Each conversation ends before an answer, which the model generates. The corpus asks no additions that are held out for
`training.score`, and contains its held-out phrasings only by chance: in one of 13,000 questions.
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
LAST_TURN = 8  # later answers are omitted, because their prompts are long and add little


def conversations(count: int, seed: int = SEED) -> Iterator[dict[str, Any]]:
    """Yield rows with `messages`, whether the model thinks, and `tools`, if any."""
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
    """Print one conversation per line, as JSON."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--count", type=int, default=300)
    parser.add_argument("--seed", type=int, default=SEED)
    options = parser.parse_args()
    for row in conversations(options.count, options.seed):
        print(json.dumps(row))


if __name__ == "__main__":
    main()
