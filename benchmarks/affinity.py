"""Measure the share of prompt tokens found in the prompt caches of one or more servers behind one address.

    python benchmarks/affinity.py URL [--conversations 100] [--turns 10] [--scattered] [--json]

Simulates API clients in multi-turn conversations. Measure a single server for the reference value of a cluster.
--scattered gives each turn a new conversation id, so that turns reach arbitrary replicas; compare both runs to see the
benefit of affinity. The prompts are the same in each run; a different `--name` gives prompts that no cache contains.
"""

from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import httpx2

QUESTION = "why is that so, and what would you do about it? " * 4


class Found(NamedTuple):
    """Number of prompt tokens, and how many of them were cached."""

    prompt: int
    cached: int


def converse(url: str, turns: int, name: str, number: int, *, scattered: bool = False) -> list[Found]:
    """Hold a conversation, turn by turn. Raises httpx2.HTTPStatusError if a request is rejected."""
    messages: list[dict[str, str]] = []
    found = []
    with httpx2.Client(base_url=url, timeout=300) as client:
        for turn in range(turns):
            messages.append({"role": "user", "content": f"{name} {number}, {turn}: {QUESTION}"})
            conversation = f"{name}-{number}-{turn}" if scattered else f"{name}-{number}"
            body = {"messages": messages, "max_tokens": 8, "temperature": 0, "reasoning_effort": "none"}
            answer = client.post("/v1/chat/completions", json=body, headers={"X-Conversation-Id": conversation})
            said = answer.raise_for_status().json()
            messages.append({"role": "assistant", "content": said["choices"][0]["message"]["content"]})
            usage = said["usage"]
            found.append(Found(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--conversations", type=int, default=100)
    parser.add_argument("--turns", type=int, default=10)
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--name", default="affinity")
    parser.add_argument("--scattered", action="store_true")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    began = time.monotonic()
    one = partial(converse, asked.url, asked.turns, asked.name, scattered=asked.scattered)
    with ThreadPoolExecutor(asked.at_once) as people:
        talks = list(people.map(one, range(asked.conversations)))
    prompt, cached = (sum(turn[of] for turns in talks for turn in turns) for of in (0, 1))
    figures = {
        "turns": asked.conversations * asked.turns,
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "cached_share": round(cached / prompt, 4),
        "turns_after_another": asked.conversations * (asked.turns - 1),
        "of_which_found_it": sum(now.cached >= last.prompt for turns in talks for last, now in pairwise(turns)),
        "seconds": round(time.monotonic() - began, 1),
    }
    print(json.dumps(figures) if asked.json else "\n".join(f"{name}: {value}" for name, value in figures.items()))


if __name__ == "__main__":
    main()
