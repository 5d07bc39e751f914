"""Answers made to be slow to read as Markdown: they may cost their own chat its layout, and nobody else anything."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable

from chaos.ledger import LONG, Ledger
from chaos.victim import ANSWERED, Victim, Witness

from notso.web.wording import words

SAY = """
SIZE = 256 * 1024
SHAPES = [
    "\\n\\n".join(["[" * 16_000] * 16),
    "\\n\\n".join(["![a](" * 3_200] * 16),
    "\\n\\n".join(["$$" * 8_000] * 16),
    "a\\n===\\n" * 40_000,
    "- a\\n" * 20_000,
    "\\n\\n".join(["a  \\n" * 3_900] * 16),
    "\\n\\n".join(["*a_" * 5_300] * 16),
    "\\n\\n".join(["[a](" * 4_000] * 16),
]

def script(messages, thinking):
    text = messages[-1].content
    attack = SHAPES[int(text)][: SIZE - 1] if text.isdigit() else text
    yield from say(attack, piece=16_384)
"""
"""The engine's answers: a number asks for one of the shapes."""

SHAPES = 8
READERS = 3


def at_once(jobs: list[Callable[[], object]]) -> None:
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_slow_answers_cost_nobody_else(victim: Callable[..., Victim], ledger: Ledger) -> None:
    """A chat of eight such answers, written while another visitor reads, then its page asked for again and again."""
    server, plain = victim(SAY), 0
    shapes, gets = (SHAPES, 30) if LONG else (2, 2)
    with Witness(server) as witness:
        chat = server.ask("0")
        server.wait_for(ANSWERED, chat)
        for shape in range(1, shapes):
            server.ask(str(shape), chat)
            server.wait_for(f'data-state="done"', f"{chat}?{shape}")
            while server.client.get(chat).text.count(ANSWERED) <= shape:
                pass
        pages: list[str] = []
        at_once([lambda: pages.extend(server.client.get(chat).text for _ in range(gets))] * READERS)
        plain = pages[0].count(words["unformatted"])
        changed = sum(page.count("<em>") != pages[0].count("<em>") for page in pages)
    figures = witness.figures | {"shown plain": plain}
    tried = f"{shapes} answers of up to 256 KiB in one chat, {len(pages)} views of it by {READERS} readers"
    assert plain
    ledger.note("clients", "answers that are slow to read as Markdown", tried, changed, figures)


def test_slow_answers_of_many_chats(victim: Callable[..., Victim], ledger: Ledger) -> None:
    """Many chats at once, so that much waits to be rendered."""
    server = victim(SAY)
    chats = 16 if LONG else 2
    with Witness(server) as witness:
        paths = [server.ask(str(number % SHAPES)) for number in range(chats)]
        at_once([lambda path=path: server.wait_for(ANSWERED, path) for path in paths])  # type: ignore[misc]
    tried = f"{chats} chats whose answers come at once"
    ledger.note("clients", "slow answers in many chats", tried, 0, witness.figures)


def test_an_import_is_rendered_once(victim: Callable[..., Victim], ledger: Ledger) -> None:
    """Messages that come without HTML: made when they are first shown, and kept."""
    server = victim()
    answers = 32 if LONG else 2
    text = "\n\n".join(["*a_" * 5_300] * 16)
    messages = [{"role": role, "content": text[:200_000]} for _ in range(answers) for role in ("user", "assistant")]
    with Witness(server) as witness:
        made = server.client.post("/import", content=json.dumps(messages), headers={"content-type": "application/json"})
        assert made.status_code == 303, made.text[:300]
        chat = str(made.headers["location"])
        at_once([lambda: server.wait_for(words["unformatted"], chat)] * READERS)
        while (page := server.client.get(chat).text).count(words["not_yet_laid_out"]):
            pass
        again = sum(server.client.get(chat).text.count("<em>") != page.count("<em>") for _ in range(3))
    tried = f"a chat of {answers} such answers without HTML, read by {READERS} at once until all were made"
    ledger.note("clients", "an import that is slow to read as Markdown", tried, again, witness.figures)
