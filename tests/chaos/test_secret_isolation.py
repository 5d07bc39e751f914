"""Many chats at once, each with a secret, while answers are constantly cancelled: no secret shows in another answer."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from chaos.ledger import LONG, Ledger

from notso.smollm3 import Engine, Message, RequestOptions, SamplingParams

CHATS = 100 if LONG else 10
ROUNDS = 4 if LONG else 1
GREEDY = SamplingParams(max_tokens=24, temperature=0)


def question(number: int, secret: str) -> list[Message]:
    return [Message("user", f"My name is {secret}. " * (1 + number % 7) + f"Say my name, {secret}!")]


def text_of(engine: Engine, messages: list[Message], owner: str, stop_after: int | None = None) -> str:
    """Return the answer's text, or its beginning if it is stopped after `stop_after` events."""
    generation = engine.submit(messages, GREEDY, RequestOptions(thinking=False, owner=owner))
    said = ""
    for number, event in enumerate(generation.events()):
        said += event.text if event.kind == "text" else ""
        if number == stop_after:
            generation.stop()
    return said


def test_no_answer_contains_the_secret_of_another_chat(ledger: Ledger) -> None:
    chance = random.Random(3)
    secrets = [f"{chance.choice('BDKLMNRT')}{chance.getrandbits(40):x}" for _ in range(CHATS)]
    asked = [question(number, secret) for number, secret in enumerate(secrets)]
    with Engine.load(context_tokens=1024, speculation=False) as engine:
        alone = [text_of(engine, each, f"alone{number}") for number, each in enumerate(asked)]
    failed = answers = cancelled = 0
    lock = threading.Lock()
    with Engine.load(context_tokens=1024) as engine:

        def one(engine_request: tuple[int, int | None]) -> None:
            nonlocal failed, answers, cancelled
            number, stop_after = engine_request
            said = text_of(engine, asked[number], f"owner{number % 7}", stop_after)
            whole = alone[number].startswith(said) if stop_after is not None else said == alone[number]
            foreign = any(secret in said for other, secret in enumerate(secrets) if other != number)
            with lock:
                failed += not whole or foreign
                answers, cancelled = answers + 1, cancelled + (stop_after is not None)

        jobs = [
            (n, None if chance.random() < 0.5 else chance.randrange(12)) for n in range(CHATS) for _ in range(ROUNDS)
        ]
        chance.shuffle(jobs)
        with ThreadPoolExecutor(min(CHATS, 100)) as pool:
            list(pool.map(one, jobs))
        stats = engine.stats()
        failed += stats.running + stats.waiting
    ledger.note(
        "engine",
        "secrets in many concurrent chats, with many answers stopped",
        f"{answers} answers of {CHATS} chats, {cancelled} of them stopped: each equals the answer of the chat alone,"
        " up to where it was stopped",
        failed,
    )
