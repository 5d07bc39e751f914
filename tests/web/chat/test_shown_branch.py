"""Messages continue the branch that the page shows, even if another branch is stored as chosen."""

from __future__ import annotations

import html
import itertools
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from scripted_engine import ScriptedEngine, say
from web.conftest import Running

from notso.smollm3 import SamplingParams
from notso.web.store.tree import path_to, shown_path
from notso.web.values.ids import new_id
from notso.web.values.settings import Settings

LONG = os.environ.get("CHAOS") == "long"
OPERATIONS = 5_000 if LONG else 120
ARTICLES = re.compile(r'<article class="turn [^"]*" id="msg-([0-9a-f-]{36})"')
LAST = re.compile(r'<input type="hidden" name="last" value="([^"]*)">')


class Tab:
    """A page of a chat, with scripts (htmx swaps the response) or without (each form reloads the page)."""

    def __init__(self, server: Running, chat_id: str, *, scripts: bool) -> None:
        self.server, self.chat_id, self.scripts = server, chat_id, scripts
        self.shown: list[str] = []
        self.last = ""
        self.open()

    def open(self, at: str = "") -> None:
        page = self.server.client.get(f"/chats/{self.chat_id}", params={"all": "on"} | ({"at": at} if at else {}))
        self.shown = ARTICLES.findall(page.text)
        self.last = next(iter(LAST.findall(page.text.split('id="composer"')[1])), "")

    def follow(self) -> None:
        """Refresh the page as its script does after the feed reports a change from another tab."""
        if self.scripts:
            self.take(self._fragment("GET", "turns", {}), appended=False)

    def post(self, path: str, fields: dict[str, str], *, appended: bool = False) -> int:
        """Send a form and show the response. Return the status, which is 409 if the form was refused."""
        fields = {"key": new_id()} | fields
        if self.scripts:
            response = self._fragment("POST", path, fields)
            if response.status_code < 400:
                self.take(response, appended=appended)
        else:
            response = self.server.client.post(f"/chats/{self.chat_id}/{path}", data={"last": self.last} | fields)
            if response.status_code == 303:
                self.open()
        return response.status_code

    def take(self, response: httpx.Response, *, appended: bool) -> None:
        assert response.status_code == 200, response.text
        articles = ARTICLES.findall(response.text)
        self.shown = [*self.shown, *articles] if appended else articles

    def _fragment(self, method: str, path: str, fields: dict[str, str]) -> httpx.Response:
        headers = {"HX-Request": "true", "X-Last": self.shown[-1] if self.shown else ""}
        headers |= {"X-From": self.shown[0]} if self.shown else {}
        address = f"/chats/{self.chat_id}/{path}"
        return self.server.client.request(method, address, data=fields or None, headers=headers)


class Walk:
    """Two tabs that perform random operations on one chat, and the stored tree to compare with."""

    def __init__(self, server: Running, engine: ScriptedEngine, seed: int) -> None:
        self.server, self.engine = server, engine
        self.chance = random.Random(seed)
        self.numbers = itertools.count()
        self.asked = server.ask("word0 begins")
        server.finished(self.asked)
        self.chat_id = self.asked.chat_id
        self.tabs = [Tab(server, self.chat_id, scripts=True), Tab(server, self.chat_id, scripts=False)]
        self.differences: list[str] = []
        self.done: dict[str, int] = {}

    def tree(self) -> list[Any]:
        messages = self.server.on_loop(lambda: self.server.shared.store.messages("local", self.chat_id))
        return list(messages)

    def chosen(self) -> list[str]:
        chat = self.server.on_loop(lambda: self.server.shared.store.chat("local", self.chat_id))
        return [each.message.id for each in shown_path(self.tree(), chat.chosen_root)]

    def step(self) -> None:
        tab = self.chance.choice(self.tabs)
        acts: list[Callable[[Tab], int | None]] = [self.ask, self.ask, self.edit_question, self.regenerate, self.hit]
        acts += [self.hit, self.choose, self.edit_answer, self.write_on, self.summarize, self.unsummarize, self.look]
        acts += [self.follow, self.empty] if self.chance.random() < 0.2 or len(self.tree()) > 60 else []
        act = self.chance.choice(acts)
        before = list(tab.shown)
        status = act(tab)
        if status is None:
            return
        name = f"{act.__name__}{'' if status < 400 else ' refused'}"
        self.done[name] = self.done.get(name, 0) + 1
        if status >= 400:
            if status != 409:
                self.differences.append(f"{name} by a tab with {before}: {status}")
            tab.open()
            return
        self.rest()
        there = {each.id for each in self.tree()}
        # The other tab may have deleted a summary; the feed reports that.
        if [id for id in tab.shown if id in there] != self.chosen():
            self.differences.append(f"{name}: the page shows {tab.shown}, the store's branch is {self.chosen()}")

    def rest(self) -> None:
        """Wait until no answer is being written."""
        for message in self.tree():
            if message.active:
                self.server.wait(lambda: not any(each.active for each in self.tree()))

    def words(self) -> str:
        return f"word{next(self.numbers)} {self.chance.choice(('alpha', 'beta', 'gamma'))}"

    def pick(self, tab: Tab, role: str, kind: str = "turn") -> Any | None:
        """Return a random message of that kind that the tab shows, or None."""
        there = {each.id: each for each in self.tree()}
        fit = [there[id] for id in tab.shown if id in there and (there[id].role, there[id].kind) == (role, kind)]
        return self.chance.choice(fit) if fit else None

    def ask(self, tab: Tab) -> int:
        before, text = list(tab.shown), self.words()
        known = {each.id for each in self.tree()}
        status = tab.post("messages", {"text": text, "thinking": "on"}, appended=True)
        new = [each for each in self.tree() if each.id not in known]
        if status < 400:
            line = [each.id for each in path_to(self.tree(), new[-1].id)]
            self.rest()
            read = [message.content for message in self.engine.requests[-1].messages if message.role == "user"]
            there = {each.id: each for each in self.tree()}
            before = [id for id in before if id in there]  # The other tab may have deleted a summary.
            cut = max((at for at, id in enumerate(before) if there[id].kind == "summary"), default=0)
            wanted = [there[id].content for id in before[cut:] if there[id].role == "user"] + [text]
            if line[:-2] != before or read != wanted:
                self.differences.append(f"asked after {before}, stored after {line[:-2]}, read {read}")
        elif new:
            self.differences.append("a refused question was stored")
        return status

    def edit_question(self, tab: Tab) -> int | None:
        message = self.pick(tab, "user")
        return message and tab.post(f"messages/{message.id}/edit", {"text": self.words()})

    def edit_answer(self, tab: Tab) -> int | None:
        message = self.pick(tab, "assistant")
        return message and tab.post(f"messages/{message.id}/edit", {"text": self.words()})

    def regenerate(self, tab: Tab) -> int | None:
        message = self.pick(tab, "assistant")
        return message and tab.post(f"messages/{message.id}/regenerate", {})

    def write_on(self, tab: Tab) -> int | None:
        message = self.pick(tab, "assistant")
        return message and tab.post(f"messages/{message.id}/continue", {})

    def choose(self, tab: Tab) -> int | None:
        there = {each.id: each for each in self.tree()}
        shown = [there[id] for id in tab.shown if id in there]
        others = [each for one in shown for each in there.values() if each.parent_id == one.parent_id]
        return tab.post(f"messages/{self.chance.choice(others).id}/choose", {}) if others else None

    def summarize(self, tab: Tab) -> int | None:
        there = {each.id: each for each in self.tree()}
        if len(tab.shown) < 2 or there.get(tab.shown[-1]) is None or there[tab.shown[-1]].kind == "summary":
            return None
        return tab.post("summarize", {})

    def unsummarize(self, tab: Tab) -> int | None:
        message = self.pick(tab, "assistant", "summary")
        return message and tab.post(f"messages/{message.id}/unsummarize", {})

    def hit(self, tab: Tab) -> None:
        """Open a search hit in whatever branch it is; this only changes the page, not the store."""
        hits = self.server.client.get("/search", params={"q": self.chance.choice(("alpha", "beta", "gamma"))}).text
        found = [at for chat, at in re.findall(r"/chats/([0-9a-f-]{36})\?at=([0-9a-f-]{36})", html.unescape(hits))]
        if found:
            tab.open(at=self.chance.choice(found))

    def look(self, tab: Tab) -> None:
        tab.open()

    def follow(self, tab: Tab) -> None:
        tab.follow()

    def empty(self, tab: Tab) -> int:
        return tab.post("clear", {})


def numbered_engine() -> ScriptedEngine:
    answers = itertools.count()
    return ScriptedEngine(lambda messages, thinking: say(f"answer {next(answers)}", piece=4096))


def test_page_and_store_agree_after_random_operations(tmp_path: Path) -> None:
    engine = numbered_engine()
    server = Running(lambda: engine, Settings(port=0, data_dir=tmp_path)).ready()
    try:
        walk = Walk(server, engine, seed=int(os.environ.get("FUZZ_SEED", "36")))
        for _ in range(OPERATIONS):
            walk.step()
    finally:
        server.close()
    assert not walk.differences, f"{len(walk.differences)} of {OPERATIONS}: {walk.differences[:3]}"
    assert walk.done["ask"] > OPERATIONS // 20 and walk.done["ask refused"] >= OPERATIONS // 100, walk.done


@pytest.fixture
def branches(shared: Running) -> tuple[Running, str, list[str], list[str]]:
    """Return the server, a chat with two branches, and the messages of the older and of the chosen branch."""
    first = shared.ask("first question")
    shared.finished(first)
    second = shared.ask("older way", first.chat_id)
    shared.finished(second)
    tab = Tab(shared, first.chat_id, scripts=True)
    older = list(tab.shown)
    assert tab.post(f"messages/{older[2]}/edit", {"text": "newer way"}) == 200
    shared.finished(shared.last(first.chat_id))
    return shared, first.chat_id, older, list(tab.shown)


@pytest.mark.parametrize("scripts", [True, False])
@pytest.mark.parametrize("verb", ["continue", "edit"])
def test_continue_or_edit_keeps_the_branch_of_a_search_result(
    branches: tuple[Running, str, list[str], list[str]], verb: str, scripts: bool
) -> None:
    server, chat_id, older, newer = branches
    tab = Tab(server, chat_id, scripts=scripts)
    assert tab.shown == newer
    tab.open(at=older[-1])
    assert tab.shown == older
    assert tab.post(f"messages/{older[1]}/{verb}", {"text": "already sent"} if verb == "edit" else {}) in (200, 303)
    server.wait(lambda: not any(each.active for each in server.on_loop(lambda: messages(server, chat_id))))
    assert tab.shown == older and Tab(server, chat_id, scripts=False).shown == older


async def messages(server: Running, chat_id: str) -> list[Any]:
    return list(await server.shared.store.messages("local", chat_id))


def test_question_from_a_stale_tab_returns_409(
    branches: tuple[Running, str, list[str], list[str]],
) -> None:
    server, chat_id, _, _ = branches
    stale = Tab(server, chat_id, scripts=True)
    server.finished(server.ask("meanwhile", chat_id))
    response = server.client.post(
        f"/chats/{chat_id}/messages", data={"text": "what I wrote", "key": new_id(), "last": stale.shown[-1]}
    )
    assert response.status_code == 409 and "another tab" in response.text and "what I wrote" in response.text
    assert stale.post("summarize", {}) == 409
    # without a form field, the header names the last message shown
    assert stale.post("messages", {"text": "x", "last": new_id()}) == 409
    assert server.client.post(f"/chats/{chat_id}/messages", data={"text": "x", "last": "'"}).status_code == 400
    contents = [each.content for each in server.on_loop(lambda: messages(server, chat_id)) if each.role == "user"]
    assert contents[-1] == "meanwhile"


def test_question_is_rejected_if_chat_was_filled_or_cleared_since(
    branches: tuple[Running, str, list[str], list[str]],
) -> None:
    server, chat_id, _, newer = branches
    empty = Tab(server, chat_id, scripts=True)
    empty.shown = []
    assert empty.post("messages", {"text": "into the void"}) == 409
    assert empty.post("clear", {}) == 200 and empty.shown == []
    assert empty.post("messages", {"text": "the first one"}, appended=True) == 200
    server.finished(server.last(chat_id))
    stale = Tab(server, chat_id, scripts=True)
    stale.shown = newer  # the chat has been cleared since
    assert stale.post("messages", {"text": "after what is gone"}) == 409


def test_estimate_counts_the_shown_branch(branches: tuple[Running, str, list[str], list[str]]) -> None:
    server, chat_id, older, _ = branches
    fields = {"text": "and then?", "thinking": "on"}

    def gauge(last: str) -> str:
        headers = {"HX-Request": "true", "X-Last": last}
        return server.client.post(f"/chats/{chat_id}/estimate", data=fields, headers=headers).text

    assert gauge(older[1]) != gauge(older[-1])
    assert server.client.post(f"/chats/{chat_id}/estimate", data=fields | {"last": new_id()}).status_code == 204


def test_stale_settings_form_changes_only_edited_fields(shared: Running) -> None:
    chat_id = shared.ask("settings").chat_id

    def form(page: str) -> dict[str, str]:
        part = page.split('<form class="settings"')[1].split("</form>")[0]
        fields = {name: html.unescape(value) for name, value in re.findall(r'name="(\w+)"[^>]* value="([^"]*)"', part)}
        for name, body in re.findall(r'<select[^>]* name="(\w+)"[^>]*>(.*?)</select>', part, re.DOTALL):
            chosen = re.findall(r'<option value="([^"]*)" selected', body)
            fields[name] = chosen[0] if chosen else re.findall(r'<option value="([^"]*)"', body)[0]
        return fields | {"system_prompt": html.unescape(re.findall(r"<textarea[^>]*>\n(.*?)</textarea>", part)[0])}

    address = f"/chats/{chat_id}/settings"
    stale = form(shared.client.get(address).text)
    assert {"was", "temperature", "titles"} <= set(stale)
    shared.client.post(address, data=form(shared.client.get(address).text) | {"temperature": "0.25", "titles": "on"})
    shared.client.post(address, data=stale | {"top_p": "0.5"})

    def settings() -> Any:
        return shared.on_loop(lambda: shared.shared.store.chat("local", chat_id)).settings

    assert settings() == {"temperature": 0.25, "titles": True, "top_p": 0.5}
    assert settings()["temperature"] != SamplingParams().temperature
    shared.client.post(address, data=form(shared.client.get(address).text) | {"temperature": ""})
    assert settings() == {"titles": True, "top_p": 0.5}


def test_budget_is_shown_again_if_the_first_response_is_lost(shared: Running) -> None:
    """A click on Save after a change sends two requests; the page discards the first one's response."""
    address = f"/chats/{shared.ask('budget').chat_id}/settings"
    (was,) = re.findall(r'name="was" value="([^"]*)"', shared.client.get(address).text)
    headers = {"HX-Request": "true", "HX-Request-Type": "partial"}
    for budget, shows in (("", False), ("1024", True), ("1024", True)):
        page = shared.client.post(address, data={"was": was, "thinking_budget": budget}, headers=headers).text
        assert ('hx-target="#thinking-budget"' in page) == shows


def test_stale_tools_form_changes_only_edited_tools(shared: Running) -> None:
    chat_id = shared.ask("tools").chat_id
    address = f"/chats/{chat_id}/tools"
    names = re.findall(r'name="tool-([\w.-]+)"', shared.client.get(address).text)
    assert len(names) > 2
    shared.client.post(address, data={"was": "", f"tool-{names[0]}": "on"})
    # this form was rendered before the first tool was enabled
    shared.client.post(address, data={"was": "", f"tool-{names[1]}": "on"})
    stored = shared.on_loop(lambda: shared.shared.store.chat("local", chat_id)).settings["tools"]
    assert stored.split() == sorted(names[:2], key=names.index)
    shared.client.post(address, data={"was": names[0]})
    stored = shared.on_loop(lambda: shared.shared.store.chat("local", chat_id)).settings["tools"]
    assert stored.split() == [names[1]]
