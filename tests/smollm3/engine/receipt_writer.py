"""Write receipts of the demo model, or check those of another kernel family or backend, in a separate process:

    python receipt_writer.py write FILE COUNT | check FILE... | attack FILE COUNT

Prints one JSON object. It does not import pytest, so that it runs under qemu.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from notso.smollm3 import Engine, InvalidRequestError, Message, Replay, RequestOptions, SamplingParams
from notso.smollm3.engine.receipts import _hash
from notso.smollm3.engine.request import ids_digest

QUESTIONS = ("Hello, I am number {0}", "What is {0} * 7?", "Who are you?", "Write about the number {0}")
SAMPLED = (
    {"temperature": 1.2},
    {"temperature": 0.0},
    {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2},
    {"temperature": 1.5, "min_p": 0.02, "thinking_budget": 6},
)


def asked(number: int) -> tuple[list[Message], SamplingParams]:
    question = QUESTIONS[number % len(QUESTIONS)].format(number)
    given: dict[str, Any] = SAMPLED[number // len(QUESTIONS) % len(SAMPLED)]
    return [Message("user", question)], SamplingParams(seed=number, max_tokens=40, **given)


def written(engine: Engine, messages: list[Message], params: SamplingParams) -> Replay:
    ids, closed_at, origin = list[int](), list[int](), ""
    for event in engine.submit(messages, params, RequestOptions(token_ids=True)).events():
        if event.kind == "started":
            origin = event.origin
        if event.is_forced:
            closed_at.append(len(ids))
        ids += event.token_ids
    return Replay(tuple(ids), tuple(closed_at), origin)


def receipts(engine: Engine, count: int) -> tuple[list[dict[str, Any]], float]:
    """Return `count` receipts, and the seconds to generate their answers."""
    made, spent = [], 0.0
    for number in range(count):
        messages, params = asked(number)
        began = time.perf_counter()
        replay = written(engine, messages, params)
        spent += time.perf_counter() - began
        told = engine.receipt(messages, params, RequestOptions(replay=replay))
        made.append(json.loads(json.dumps(told)))
    return made, spent


def checked(engine: Engine, made: list[dict[str, Any]]) -> tuple[list[str], float]:
    """Return the faults found in receipts, and the seconds for checking."""
    began = time.perf_counter()
    found = [engine.check_receipt(each).problem for each in made]
    return [each for each in found if each], time.perf_counter() - began


def signed(told: dict[str, Any]) -> dict[str, Any]:
    """Return a changed receipt with recomputed, matching hashes."""
    for part in ("prompt", "answer"):
        told[part] |= {"tokens": len(told[part]["ids"]), "sha256": ids_digest(told[part]["ids"])}
    told["options"]["sha256"] = _hash({key: value for key, value in told["options"].items() if key != "sha256"})
    content = {key: value for key, value in told.items() if key != "digest"}
    return content | {"digest": _hash(content)}


def refused(engine: Engine, told: dict[str, Any]) -> str:
    try:
        return engine.check_receipt(told).problem
    except InvalidRequestError as error:
        return str(error)


def attack(engine: Engine, made: list[dict[str, Any]], count: int) -> tuple[dict[str, int], list[str]]:
    """Return the number of receipts changed in each way, and the changes that were judged incorrectly."""
    tried, wrong = dict.fromkeys(("token", "digest", "hash", "seed", "parameter"), 0), list[str]()
    for number in range(count):
        rng, kind = random.Random(number), list(tried)[number % len(tried)]
        told = copy.deepcopy(made[number % len(made)])
        ids, place = told["answer"]["ids"], -1
        tried[kind] += 1
        if kind == "token":
            place = rng.randrange(len(ids))
            ids[place] = (ids[place] + rng.randrange(1, 200)) % engine.config.vocab_size
            is_right = bool(refused(engine, told)) and engine.check_receipt(signed(told)).place == place
        elif kind == "digest":
            told["digest"] = f"{rng.getrandbits(256):064x}"
            is_right = bool(refused(engine, told))
        elif kind == "hash":
            part = rng.choice((told["prompt"], told["answer"], told["options"], told["model"], told["template"]))
            part["sha256"] = f"{rng.getrandbits(256):064x}"
            content = {key: value for key, value in told.items() if key != "digest"}
            is_right = bool(refused(engine, content | {"digest": _hash(content)}))
        else:
            if kind == "seed":
                told["seed"] += rng.randrange(1, 1000)
            else:
                told["sampling"]["temperature"] = rng.choice((0.0, 0.5, 2.0))
            messages, params = asked(number % len(made))
            params = replace(params, seed=told["seed"])
            if kind == "parameter":
                params = replace(params, temperature=told["sampling"]["temperature"])
            other = written(engine, messages, params).ids
            differ = (at for at, pair in enumerate(zip(ids, (*other, -1), strict=False)) if pair[0] != pair[1])
            is_right = engine.check_receipt(signed(told)).place == next(differ, None)
        if not is_right:
            wrong.append(f"{number}: {kind} at {place}")
    return tried, wrong


def main(what: str, path: str, *more: str) -> dict[str, Any]:
    with Engine.load(None, threads=1, context_tokens=1024) as engine:
        if what == "write":
            made, write_s = receipts(engine, int(more[0]))
            problems, check_s = checked(engine, made)
            Path(path).write_text(json.dumps(made))
            return {"receipts": len(made), "problems": problems, "write_s": write_s, "check_s": check_s}
        made = json.loads(Path(path).read_text())
        if what == "check":
            problems, check_s = checked(engine, made[: int(more[0])] if more else made)
            return {"receipts": len(made[: int(more[0])] if more else made), "problems": problems, "check_s": check_s}
        tried, wrong = attack(engine, made, int(more[0]))
        return {"tried": tried, "problems": wrong}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
