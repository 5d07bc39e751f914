"""Two browsers with one key act on the same chats at once: no error, no lost data, and both see the same in the end."""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import httpx
from chaos.ledger import LONG, Ledger
from chaos.victim import Victim

from notso.web.values.ids import new_id

KEY = "correct horse battery staple"
STEPS = 1_500 if LONG else 40  # per browser
CHATS = 3
REFUSALS = {400, 404, 409, 429}  # statuses if the other browser was faster
OWN = re.compile(
    r'nonce[-="]+[\w-]+|value="[0-9a-f-]{36}"|X-Tab": "[0-9a-f-]+|tab=[0-9a-f-]+|[\d.]+ MB (?:in use|including)'
)
"""Parts of a page that differ between requests."""


class Browser:
    """Performs random actions. `kept`: texts of acknowledged questions."""

    def __init__(self, server: Victim, name: str, chats: list[str]) -> None:
        self.client = httpx.Client(base_url=server.url, timeout=120)
        assert self.client.post("/login", data={"api_key": KEY}).status_code == 303
        self.name, self.chats = name, chats
        self.chance = random.Random(name)
        self.kept: list[str] = []
        self.done = self.failed = 0

    def run(self) -> None:
        acts = [self.ask, self.ask, self.edit, self.again, self.stop, self.settings, self.look, self.delete, self.empty]
        acts += [self.bring, self.choose]
        for _ in range(STEPS):
            chat = self.chance.choice(self.chats)
            try:
                self.chance.choice(acts)(chat)
            except httpx.HTTPError:
                self.failed += 1
            self.done += 1

    def post(self, path: str, expected: set[int] = REFUSALS, **fields: str) -> httpx.Response:
        answer = self.client.post(path, data=fields)
        self.failed += answer.status_code not in {200, 204, 303} | expected
        return answer

    def ids(self, chat: str, part: str) -> list[str]:
        return re.findall(rf"/messages/([0-9a-f-]{{36}})/{part}", self.client.get(chat).text)

    def words(self) -> str:
        return f"{self.name}-{self.done}-{self.chance.getrandbits(32):x}"

    def ask(self, chat: str) -> None:
        words = self.words()
        if self.post(f"{chat}/messages", text=words, key=new_id()).status_code == 303:
            self.kept.append(words)

    def edit(self, chat: str) -> None:
        if messages := self.ids(chat, "edit"):
            words = self.words()
            answer = self.post(f"{chat}/messages/{self.chance.choice(messages)}/edit", text=words, key=new_id())
            if answer.status_code in (200, 303):
                self.kept.append(words)

    def again(self, chat: str) -> None:
        if messages := self.ids(chat, "regenerate"):
            self.post(f"{chat}/messages/{self.chance.choice(messages)}/regenerate", key=new_id())

    def choose(self, chat: str) -> None:
        if messages := self.ids(chat, "choose"):
            self.post(f"{chat}/messages/{self.chance.choice(messages)}/choose")

    def stop(self, chat: str) -> None:
        for generation in set(re.findall(r"/generations/(\w+)/", self.client.get(chat).text)):
            self.post(f"/generations/{generation}/stop")

    def settings(self, chat: str) -> None:
        self.post(f"{chat}/title", title=self.words())
        self.post(f"{chat}/pin", pinned=self.chance.choice(("on", "")))
        self.post(f"{chat}/thinking", thinking=self.chance.choice(("on", "")))
        self.post(f"{chat}/settings", system_prompt=self.words())

    def look(self, chat: str) -> None:
        for path in ("/", chat, f"{chat}/turns", "/chats", f"{chat}/export/json", "/search?q=a"):
            self.failed += self.client.get(path).status_code not in (200, 303, 404)

    def delete(self, chat: str) -> None:
        answer = self.post(f"{chat}/delete")
        self.undone(answer.headers.get("location", ""))

    def empty(self, chat: str) -> None:
        how = self.chance.choice(("clear", "reset"))
        answer = self.client.post(f"{chat}/{how}", data={}, headers={"HX-Request": "true"})
        self.failed += answer.status_code not in {200} | REFUSALS
        self.undone(answer.text if answer.status_code == 200 else "")

    def undone(self, said: str) -> None:
        """Undo a deletion at once; if that fails, data is lost."""
        if trash := re.search(r"undo[=/](\w+)", said):
            time.sleep(0.01 * self.chance.random())
            self.post(f"/undo/{trash[1]}", expected=set())

    def bring(self, chat: str) -> None:
        exported = self.client.get(f"{chat}/export/json")
        if exported.status_code == 200 and len(exported.content) < 50_000:
            headers = {"Content-Type": "application/json"}
            answer = self.client.post("/import", content=exported.content, headers=headers)
            self.failed += answer.status_code not in {303} | REFUSALS

    def page(self, path: str) -> str:
        return OWN.sub("", self.client.get(path).text)


def test_two_browsers_with_one_key_lose_no_data(victim: Callable[..., Victim], ledger: Ledger) -> None:
    server = victim(api_key=KEY, pace_seconds=0.01, requests_per_minute=0)
    server.client.headers["x-api-key"] = KEY
    chats = [server.ask(f"the first words of {number}") for number in range(CHATS)]
    browsers = [Browser(server, name, chats) for name in ("anna", "bert")]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(Browser.run, browsers))
    for chat in chats:
        server.wait_for("composer", chat)
        wait_until_quiet(server, chat)
    failed = sum(browser.failed for browser in browsers)
    everything = json.dumps(server.client.get("/export").json())
    lost = [words for browser in browsers for words in browser.kept if words not in everything]
    differing = [path for path in (*chats, "/chats") if keeps_differing(path, *browsers)]
    ledger.note(
        "clients",
        "two browsers with the same key ask, stop, edit, regenerate, delete, undo, change settings and"
        " import in the same chats",
        f"{sum(browser.done for browser in browsers):,} actions in {CHATS} chats,"
        f" {sum(len(browser.kept) for browser in browsers):,} questions acknowledged: {len(lost)} lost,"
        f" {len(differing)} pages that differ, {failed} errors",
        failed + len(lost) + len(differing),
    )


def keeps_differing(path: str, one: Browser, other: Browser) -> bool:
    """Return whether the browsers still see different pages after a while.

    A page can change between the two requests. For example, it offers no more suggestions a minute after a question.
    """
    deadline = time.monotonic() + 120
    while one.page(path) != other.page(path):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.05)
    return False


def wait_until_quiet(server: Victim, chat: str) -> None:
    deadline = time.monotonic() + 120
    while re.search(r'data-state="(queued|running)"', server.client.get(chat).text):
        assert time.monotonic() < deadline
        time.sleep(0.05)
