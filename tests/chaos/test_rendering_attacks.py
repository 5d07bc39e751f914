"""Answers made to render slowly as Markdown may lose the formatting of their own chat but must not affect other
chats."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

import pytest
from chaos.ledger import LONG, Ledger
from chaos.victim import ANSWERED, Victim, Witness

from notso.web.values.wording import words

SIZE = 256 * 1024 - 1  # the longest text that is rendered as Markdown
SHAPES = (
    ("[", 16_000),
    ("![a](", 3_200),
    ("$$", 8_000),
    ("a\n===\n", 45_000),
    ("- a\n", 65_000),
    ("a  \n", 3_900),
    ("*a_", 5_300),
    ("[a](", 4_000),
    ("```c\na " + "\n" * 18_000 + "```\n", 1),  # code: a regular expression of its lexer would take 45 s per block
)
"""(unit, repetitions) of a paragraph. Paragraphs are repeated up to the size limit."""
READERS = 3
SAY = """
size, shapes = settings.pop("size"), settings.pop("shapes")

def script(messages, thinking):
    text = messages[-1].content
    if text.isdigit():
        unit, times = shapes[int(text)]
        text = (unit * times + "\\n\\n") * (size // len(unit * times) + 1)
    yield from say(text[:size], piece=16_384)
"""
"""The engine's script: a number selects one of the shapes."""


def at_once(jobs: Iterable[Callable[[], object]]) -> None:
    with ThreadPoolExecutor(32) as threads:
        for done in [threads.submit(engine_request) for engine_request in jobs]:
            done.result()


def test_slow_markdown_does_not_block_other_requests(victim: Callable[..., Victim], ledger: Ledger) -> None:
    """The answers arrive without HTML, as in an import, and are rendered once for all readers."""
    server = victim()
    answers, views = (len(SHAPES), 10) if LONG else (1, 2)
    texts = [(unit * times + "\n\n") * (SIZE // len(unit * times) + 1) for unit, times in SHAPES[:answers]]
    turns = [(("user", "?"), ("assistant", text[:SIZE])) for text in texts]
    messages = [{"role": role, "content": content} for turn in turns for role, content in turn]
    pages: list[str] = []
    with Witness(server) as witness:
        made = server.client.post("/import", content=json.dumps(messages), headers={"content-type": "application/json"})
        assert made.status_code == 303, made.text[:300]
        chat = str(made.headers["location"])
        at_once([lambda: server.client.get(chat)] * READERS)
        while words["not_yet_laid_out"] in (page := server.client.get(chat).text):
            pass
        at_once([lambda: [pages.append(server.client.get(chat).text) for _ in range(views)]] * READERS)
    looks = {text.count("<em>") for text in (page, *pages)}
    figures = witness.figures | {"shown plain": page.count(words["unformatted"])}
    tried = (
        f"a chat of {answers} answers of 256 KiB, requested by {READERS} clients at once, {views} times each"
        " after it was rendered"
    )
    ledger.note("clients", "answers that are slow to render as Markdown", tried, len(looks) - 1, figures)


@pytest.mark.long("chaos")
def test_slow_markdown_in_many_chats_does_not_block_other_requests(
    victim: Callable[..., Victim], ledger: Ledger
) -> None:
    """The answers are written at the same time, and each is polled until it is complete."""
    chats = len(SHAPES) if LONG else 2
    server = victim(SAY, shapes=SHAPES, size=SIZE if LONG else 60_000)
    with Witness(server) as witness:
        paths = [server.ask(str(number % len(SHAPES))) for number in range(chats)]
        at_once([lambda path=path: server.wait_for(ANSWERED, path, 400) for path in paths])  # type: ignore[misc]
    tried = f"{chats} chats with simultaneous answers, each polled until it was complete"
    ledger.note("clients", "answers that are slow to render as Markdown, in many chats", tried, 0, witness.figures)
