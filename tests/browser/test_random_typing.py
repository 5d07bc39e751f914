"""No typed text is lost, whatever happens on the page and even if the server is killed.

A random user types into the input, settings and edit forms, attaches files, switches chats, goes back and reloads,
while the server is killed now and then. Four dictionaries record what each place must contain. `OPERATIONS=5000` runs
longer.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser.conversation import begin, show_settings
from browser.test_crash import Process, unused_port
from long_tests import is_long
from playwright.sync_api import Page, expect

OPERATIONS = int(os.environ.get("OPERATIONS", "1000" if is_long("page") else "24"))
CHATS = 3
WORDS = ("so ", "und\n", "für ", "שלום ", "1 < 2 ", "/x ", "{{ y }} ", "\u00a0— ")
NOISE = "htmx:(sse:)?error|ERR_(CONNECTION|CONTENT_LENGTH|INCOMPLETE|NETWORK|EMPTY|ABORTED|SOCKET)|Failed to fetch"


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[[], Process]]:
    port, started = unused_port(), []

    def begin_process() -> Process:
        started.append(Process(tmp_path, port, 0))
        return started[-1]

    begin_process.port = port  # type: ignore[attr-defined]
    yield begin_process
    for process in started:
        process.kill()


class Person:
    """Performs random actions and records what each place must contain. `paths`: the start page and the chats."""

    def __init__(self, page: Page, url: str, start: Callable[[], Process], process: Process, seed: int) -> None:
        self.page = page
        self.random = random.Random(seed)
        self.start, self.process, self.url = start, process, url
        self.paths = ["/"]
        self.drafts: dict[str, str] = {}
        self.files: dict[str, list[str]] = {}
        self.instructions: dict[str, str] = {}
        self.edits: dict[str, str] = {}
        self.typed = 0

    def make_chats(self) -> None:
        for number in range(CHATS):
            self.page.goto(self.url)
            begin(self.page, f"What is {number} + 1?")
            self.paths.append(self.here)

    @property
    def here(self) -> str:
        return "/" + self.page.url.split("/", 3)[3]

    def words(self) -> str:
        found = "".join(self.random.choice(WORDS) for _ in range(self.random.randrange(1, 4)))
        self.typed += len(found)
        return found

    # ---- actions

    def type(self) -> None:
        self.page.locator("#text").focus()
        added = self.words()
        self.page.keyboard.press("Control+End")
        self.page.keyboard.insert_text(added)
        self.drafts[self.here] = self.drafts.get(self.here, "") + added

    def attach(self) -> None:
        names = self.files.setdefault(self.here, [])
        if len(names) < 8:
            name = f"file-{self.random.randrange(10_000)}.txt"
            self.page.locator("#files").set_input_files(
                {"name": name, "mimeType": "text/plain", "buffer": self.words().encode()}
            )
            names.append(name)
            expect(self.page.locator("#attachments .name")).to_have_text(names)

    def settings(self) -> None:
        field = self.page.locator("#set-system_prompt")
        show_settings(self.page, "chat")
        expect(field).to_have_value(self.instructions.get(self.here, ""))
        value = self.instructions.get(self.here, "") + self.words().strip() + "."
        field.fill(value)
        with self.page.expect_response(lambda answer: answer.request.method == "POST" and "settings" in answer.url):
            if self.random.random() < 0.5:
                self.page.keyboard.press("Escape")
            else:
                field.blur()
        self.page.evaluate("document.getElementById('settings').close()")
        self.instructions[self.here] = value

    def edit(self) -> None:
        if self.here == "/":
            return
        box = self.page.locator("#edit-text")
        if not box.count():
            self.page.locator("article.user [data-edit]").first.dispatch_event("click")
            expect(box).to_be_focused()  # later, the focus would move away from what is typed into next
        if self.here in self.edits:
            expect(box).to_have_value(self.edits[self.here])
        value = box.input_value() + self.words()
        box.fill(value)
        self.edits[self.here] = value

    def switch(self) -> None:
        self.page.goto(self.url.rstrip("/") + self.random.choice(self.paths))

    def reload(self) -> None:
        self.page.reload()

    def back(self) -> None:
        self.page.go_back()
        if not self.page.url.startswith(self.url):
            self.page.goto(self.url)

    def kill(self) -> None:
        self.process.kill()
        if self.random.random() < 0.5:
            self.type()
        self.process = self.start()

    # ---- checks

    def check(self) -> None:
        expect(self.page.locator("#text")).to_have_value(self.drafts.get(self.here, ""))
        expect(self.page.locator("#attachments .name")).to_have_text(self.files.get(self.here, []))

    def check_all(self) -> None:
        for path in self.paths:
            self.page.goto(self.url.rstrip("/") + path)
            self.check()
            show_settings(self.page, "chat")
            expect(self.page.locator("#set-system_prompt")).to_have_value(self.instructions.get(path, ""))
            self.page.evaluate("document.getElementById('settings').close()")
            if path in self.edits:
                self.page.locator("article.user [data-edit]").first.dispatch_event("click")
                expect(self.page.locator("#edit-text")).to_have_value(self.edits[path])


ACTS = {"type": 40, "attach": 4, "settings": 8, "edit": 8, "switch": 18, "reload": 12, "back": 9, "kill": 1}


@pytest.mark.timeout(900)  # usually half a minute; up to eight times that on a busy machine
def test_typed_text_survives_random_actions_and_server_kills(start: Any, open_page: Callable[..., Page]) -> None:
    url, process = f"http://127.0.0.1:{start.port}/", start()
    page = open_page(url, expected=NOISE)
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    person = Person(page, url, start, process, seed)
    person.make_chats()
    # each action at least once
    acts = [*ACTS, *person.random.choices(list(ACTS), list(ACTS.values()), k=OPERATIONS - len(ACTS))]
    person.random.shuffle(acts)
    for number, act in enumerate(acts):
        getattr(person, act)()
        try:
            person.check()
        except AssertionError as error:
            focused = page.evaluate("document.activeElement?.outerHTML.slice(0, 200)")
            raise AssertionError(
                f"seed {seed}, operation {number} of {acts[max(0, number - 5) : number + 1]}, focused: {focused}"
            ) from error
    person.check_all()
    print(f"{OPERATIONS} operations, {person.typed} characters")
    assert person.typed > OPERATIONS
