"""Sixteen simulated users who chat for hours: ask, read, leave, return, stop, delete and start over."""

from __future__ import annotations

import random
import re
import threading
import time
from collections import Counter

import httpx
from chaos.victim import Victim

from notso.web.values.ids import new_id

PEOPLE = 16
TURNS_OF_A_CHAT = 6
ANSWER_SECONDS = 600.0
"""Far more than an answer takes under any load. An answer that takes longer counts as a failure."""

_QUESTIONS = (
    *("What is 12 + 30?", "Who are you?", "Tell me of NoPE.", "hello", "What is a GGUF file?", "7 * 8?", "Thank you!"),
    *("What can you do?", "Write a list of three things.", "Is water wet?", "What did I say first?"),
)
_STREAM = re.compile(r"/generations/([\w-]+)/events")


class Crowd:
    """Simulated users. `done` counts successful actions, `failed` errors."""

    def __init__(self, victim: Victim, seed: int, pause_seconds: float = 0.0) -> None:
        self.done: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self._victim = victim
        self._seed = seed
        self._pause = pause_seconds
        self._over = threading.Event()
        self._counting = threading.Lock()

    def run(self, *, seconds: float | None = None, turns: int | None = None) -> None:
        """Run for `seconds`, or for `turns` turns per user."""
        threads = [threading.Thread(target=self._live, args=(n, turns), daemon=True) for n in range(PEOPLE)]
        for thread in threads:
            thread.start()
        if seconds is not None:
            self._over.wait(seconds)
            self._over.set()
        for thread in threads:
            thread.join()

    def _live(self, number: int, turns: int | None) -> None:
        chance = random.Random(1000 * self._seed + number)
        # shorter than the server's timeout, so that no request meets a closing connection
        limits = httpx.Limits(keepalive_expiry=2.0)
        with httpx.Client(base_url=self._victim.url, timeout=ANSWER_SECONDS, limits=limits) as client:
            chat, in_chat, made = "", 0, 0
            while not self._over.is_set() and (turns is None or made < turns):
                try:
                    chat = self._turn(client, chance, chat)
                    made, in_chat = made + 1, in_chat + 1
                    if in_chat == TURNS_OF_A_CHAT:
                        self._count("deleted", client.post(f"{chat}/delete"))
                        chat, in_chat = "", 0
                except (httpx.HTTPError, AssertionError) as error:
                    self._fail(f"{type(error).__name__}: {error}"[:200])
                    chat, in_chat = "", 0
                self._over.wait(chance.uniform(0, 2 * self._pause))
            if chat:
                self._count("deleted", client.post(f"{chat}/delete"))

    def _turn(self, client: httpx.Client, chance: random.Random, chat: str) -> str:
        """Ask one question, read its whole answer, and return the path of the chat."""
        form = {"text": chance.choice(_QUESTIONS), "key": new_id()}
        if chance.random() < 0.5:
            form["thinking"] = "on"
        answer = client.post(f"{chat}/messages" if chat else "/chats", data=form)
        self._count("asked", answer)
        chat = answer.headers.get("location", chat)
        page = client.get(chat)
        self._count("pages", page)
        stream = _STREAM.search(page.text)
        if stream is not None:
            self._read_along(client, chance, stream[1])
        self._until_done(client, chat)
        return chat

    def _read_along(self, client: httpx.Client, chance: random.Random, generation: str) -> None:
        for _ in range(chance.randrange(3)):  # connect, read a little, disconnect
            with client.stream("GET", f"/generations/{generation}/events") as stream:
                if stream.status_code == 429:  # eight streams are open already; the page would retry later
                    return
                self._count("streams", stream)
                most, read = chance.randrange(1, 4000), 0
                for piece in stream.iter_raw(256):
                    read += len(piece)
                    if read >= most:
                        break
        if chance.random() < 0.1:
            self._count("stopped", client.post(f"/generations/{generation}/stop"))

    def _until_done(self, client: httpx.Client, chat: str) -> None:
        deadline = time.monotonic() + ANSWER_SECONDS
        while True:
            page = client.get(chat)
            self._count("pages", page)
            if _STREAM.search(page.text) is None:
                return
            assert time.monotonic() < deadline, "an answer never ended"
            self._over.wait(0.2)
            time.sleep(0.1)

    def _count(self, what: str, answer: httpx.Response) -> None:
        if answer.status_code < 400:
            with self._counting:
                self.done[what] += 1
        else:
            self._fail(f"{what}: {answer.status_code}")

    def _fail(self, what: str) -> None:
        with self._counting:
            self.failed[what] += 1
