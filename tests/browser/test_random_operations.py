"""Random operations in two tabs; after each, the server and both tabs are compared with a model of every chat.

The operations send, stop, edit, regenerate, switch versions, rename, pin, archive, delete, restore, move to a project,
search, import, attach, queue, reload and go back. After each, the database must hold exactly the chats and messages of
the model, and both tabs must show them with their drafts, files and queues.
"""

from __future__ import annotations

import difflib
import json
import os
import random
import re
import sqlite3
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from browser.chat_model import Chat, Node, Talker
from browser.conversation import more, show_settings, until
from long_tests import is_long
from playwright.sync_api import Error, Locator, Page, expect

from notso.smollm3 import EngineError
from notso.web.values.wording import words

OPERATIONS = int(os.environ.get("OPERATIONS", "200" if is_long("page") else "25"))
MOST_CHATS, MOST_MESSAGES, NEWEST = 7, 16, 40
WORDS = ("so", "und", "für", "שלום", "1 < 2", "{{ y }}", "日本", "a & b", "<i>", "naïve")
PROJECT = "Birds"
NOISE = "status of 4(00|04|09)|htmx:error|Transition was skipped"  # refusals, and page transitions that are interrupted

STATE = """() => ({
  path: location.pathname,
  title: document.getElementById("chat-title").textContent,
  text: document.getElementById("text").value,
  files: [...document.querySelectorAll("#attachments .name")].map((name) => name.textContent),
  queue: [...document.querySelectorAll("#queued .what")].map((what) => what.textContent),
  stop: !!document.querySelector("#composer-action[data-stop]"),
  list: [...document.querySelectorAll("#chat-list .chats > li:has(.row-menu)")].map((row) =>
    (row.querySelector(".pinned") ? "^" : "") + row.querySelector("a").textContent).sort(),
  turns: [...document.querySelectorAll("#turns > article")].map((turn) => [
    turn.matches(".user") ? "user" : "assistant",
    turn.matches(".pending") ? "pending" : turn.dataset.state ?? "",
    (turn.querySelector(".bubble, .answer")?.textContent ?? "").trim(),
    turn.querySelector(".versions span")?.textContent ?? "",
  ]),
})"""


@dataclass(eq=False)
class Tab:
    page: Page
    path: str = "/"
    drafts: dict[str, str] = field(default_factory=dict)
    files: dict[str, list[str]] = field(default_factory=dict)
    queues: dict[str, list[str]] = field(default_factory=dict)


class Operator:
    """Performs random operations on the page and on the model."""

    def __init__(self, pages: list[Page], url: str, database: Path, talker: Talker, seed: int) -> None:
        self.random = random.Random(seed)
        self.url, self.database, self.talker = url.rstrip("/"), database, talker
        self.tabs = [Tab(page) for page in pages]
        self.chats: dict[str, Chat] = {}
        self.numbers = 0
        self.log: list[str] = []
        self.tab = self.tabs[0]

    # ---- position

    @property
    def page(self) -> Page:
        return self.tab.page

    @property
    def chat(self) -> Chat | None:
        return self.chats.get(self.tab.path.removeprefix("/chats/"))

    def idle_chat(self) -> Chat | None:
        return self.chat if self.chat is not None and self.chat.running() is None else None

    def listed(self) -> list[Chat]:
        return [chat for chat in self.chats.values() if not chat.archived]

    def words(self, kind: str = "q") -> str:
        self.numbers += 1
        return " ".join([f"{kind}{self.numbers}z", *self.random.choices(WORDS, k=self.random.randrange(1, 4))])

    def maybe(self, chance: float = 0.5) -> bool:
        return self.random.random() < chance

    def go(self, path: str, tab: Tab | None = None) -> None:
        tab = tab or self.tab
        tab.page.goto(self.url + path)
        tab.path = path
        self.advance(tab)

    def arrived(self) -> None:
        """Continue the queue of the chat that the tab has just opened."""
        self.advance(self.tab)

    # ---- what happens to a message

    def ask(self, chat: Chat, above: Node, text: str, files: list[str] | None = None) -> None:
        question = chat.add(above, "user", text, files=files or [])
        self.answer(chat, question)

    def answer(self, chat: Chat, question: Node) -> None:
        chat.add(question, "assistant", None, state="running")
        if not self.talker.held:
            self.end(chat)

    def end(self, chat: Chat) -> None:
        """Record in the model that the running answer has ended."""
        node = chat.running()
        if node is None:
            return
        assert node.parent is not None and node.parent.content is not None
        self.settle(chat)
        sql = (
            "SELECT answer.content FROM messages AS answer JOIN messages AS question ON question.id = answer.parent_id"
            " WHERE answer.chat_id = ? AND question.content = ? ORDER BY answer.position DESC LIMIT 1"
        )
        [(content,)] = self.read(sql, chat.id, node.parent.content)  # a copy of the chat may contain the same question
        assert content in self.said(node)
        node.state, node.content = "done", content

    def newest(self, columns: str, chat: Chat) -> list[tuple[Any, ...]]:
        newest = "WHERE chat_id = ? AND role = 'assistant' ORDER BY position DESC LIMIT 1"
        return self.read(f"SELECT {columns} FROM messages {newest}", chat.id)

    def said(self, node: Node) -> list[str]:
        assert node.parent is not None and node.parent.content is not None
        given = [text for asked, texts in self.talker.said.items() for text in texts if node.parent.content in asked]
        assert given, f"the engine was not asked {node.parent.content}"
        return given

    def settle(self, chat: Chat) -> None:
        """Wait until the store has no unfinished answer of the chat."""
        query = "SELECT count(*) FROM messages WHERE chat_id = ? AND state IN ('queued', 'running')"
        for _ in range(4000):
            if not self.read(query, chat.id)[0][0]:
                return
            self.page.wait_for_timeout(5)
        raise AssertionError("an answer did not end")

    def advance(self, tab: Tab) -> None:
        """Send the queued messages of this tab if the chat is idle, or return them to the input after a failure."""
        chat = self.chats.get(tab.path.removeprefix("/chats/"))
        while chat is not None and chat.running() is None and (queue := tab.queues.get(tab.path)):
            last = chat.line()[-1] if chat.line() else None
            if last is None or last.state != "done":
                tab.drafts[tab.path] = "\n\n".join([*queue, *filter(None, [tab.drafts.get(tab.path, "")])])
                tab.queues[tab.path] = []
                return
            text = queue.pop(0).strip("\n")
            until(tab.page, "(text) => [...document.querySelectorAll('#turns .bubble')].some("
                  "(bubble) => bubble.textContent.trim() === text)", text.strip())  # fmt: skip
            files = tab.files.pop(tab.path, [])
            self.stored(chat, text)
            self.ask(chat, chat.line()[-1], text, files)

    def stored(self, chat: Chat, text: str) -> None:
        """Wait until the store contains the message."""
        for _ in range(4000):
            if self.read("SELECT 1 FROM messages WHERE chat_id = ? AND content = ?", chat.id, text):
                return
            self.page.wait_for_timeout(5)
        raise AssertionError(f"{text} was not stored")

    # ---- operations; each returns False if it is not possible now

    def type(self) -> bool:
        if len(self.tab.drafts.get(self.tab.path, "")) > 60:
            return False  # a longer first line would be shortened for the title
        added = self.words("d") + self.random.choice(("", "\n", " "))
        self.page.locator("#text").focus()
        self.page.keyboard.press("Control+End")
        self.page.keyboard.insert_text(added)
        self.tab.drafts[self.tab.path] = self.tab.drafts.get(self.tab.path, "") + added
        return True

    def attach(self) -> bool:
        names = self.tab.files.setdefault(self.tab.path, [])
        if len(names) >= 3:
            return False
        name = f"{self.words('file').split()[0]}.txt"
        file = {"name": name, "mimeType": "text/plain", "buffer": b"A short file."}
        self.page.locator("#files").set_input_files(file)  # type: ignore[arg-type]
        names.append(name)
        expect(self.page.locator("#attachments .name")).to_have_text(names)
        return True

    def send(self, *, may_hold: bool = True) -> bool:
        chat = self.chat
        if chat is None and len(self.chats) >= MOST_CHATS:
            return False
        if chat is not None and (chat.running() or len(chat.line()) >= MOST_MESSAGES):
            return False
        if not self.tab.drafts.get(self.tab.path, "").strip():
            self.type()
        text = self.tab.drafts.pop(self.tab.path).strip("\n")
        files = self.tab.files.pop(self.tab.path, [])
        if may_hold and self.maybe(0.3):
            self.talker.hold()
        self.page.locator("#text").press("Enter")
        if chat is None:
            self.page.wait_for_url("**/chats/*")
            self.tab.path = "/" + self.page.url.split("/", 3)[3]
            chat = Chat(self.tab.path.removeprefix("/chats/"), text.splitlines()[0].strip())
            self.chats[chat.id] = chat
        elif self.maybe(0.3):  # keep typing while the question is being sent
            more = self.words("m")
            self.page.keyboard.insert_text(more)
            self.tab.drafts[self.tab.path] = more
        self.stored(chat, text)
        self.ask(chat, chat.line()[-1] if chat.line() else chat.root, text, files)
        return True

    def collide(self) -> bool:
        """Send from both tabs at once: each text must be stored once or returned to its input."""
        chat = self.idle_chat()
        if chat is None or len(chat.line()) + 4 > MOST_MESSAGES or self.talker.held:
            return False
        here, other = self.tab, next(tab for tab in self.tabs if tab is not self.tab)
        self.tab = other
        self.go(here.path)
        if chat.running() or any(tab.files.get(here.path) for tab in self.tabs):
            return True
        self.check()
        texts = []
        for tab in self.tabs:
            tab.page.locator("#text").fill(self.words("both"))
            texts.append(tab.page.locator("#text").input_value())
        for tab in self.tabs:
            tab.page.locator("#text").press("Enter")
        for tab in self.tabs:
            until(tab.page, "() => !document.querySelector('.pending, #composer-action[data-stop], [aria-busy]')")
        self.settle(chat)
        of_chat = "FROM messages WHERE chat_id = ? AND trash_id IS NULL ORDER BY position"
        stored = [content for (content,) in self.read(f"SELECT content {of_chat}", chat.id)]
        for text in sorted({*texts} & {*stored}, key=stored.index):
            self.ask(chat, chat.line()[-1] if chat.line() else chat.root, text)
        for tab, text in zip(self.tabs, texts, strict=True):
            tab.drafts[tab.path] = "" if text in stored else text
        return True

    def queue(self) -> bool:
        if self.chat is None or self.chat.running() is None or len(self.chat.line()) >= MOST_MESSAGES:
            return False
        if not self.tab.drafts.get(self.tab.path, "").strip():
            self.type()
        self.tab.queues.setdefault(self.tab.path, []).append(self.tab.drafts.pop(self.tab.path))
        self.page.locator("#text").press("Enter")
        return True

    def unqueue(self) -> bool:
        queue = self.tab.queues.get(self.tab.path)
        if not queue or self.chat is None or self.chat.running() is None:
            return False
        item = self.page.locator("#queued li").first
        text = queue.pop(0)
        if self.maybe():
            item.get_by_role("button", name=words["queue_remove"]).click()
            return True
        item.locator("[data-take-back]").click()
        draft = self.tab.drafts.get(self.tab.path, "")
        self.tab.drafts[self.tab.path] = f"{text}\n\n{draft}" if draft else text
        return True

    def finish(self) -> bool:
        """Let all held answers end, and continue the queues of the tabs."""
        if not self.talker.held:
            return False
        self.talker.release()
        for chat in self.chats.values():
            self.end(chat)
        for tab in self.tabs:
            self.advance(tab)
        return True

    def stop(self) -> bool:
        chat = self.chat
        node = chat.running() if chat is not None else None
        if chat is None or node is None:
            return False
        self.page.locator("#composer-action[data-stop]").click()
        self.cut(chat, node)
        for tab in self.tabs:
            self.advance(tab)
        return True

    def cut(self, chat: Chat, node: Node) -> None:
        """Record the beginning of the answer that the store has kept."""
        self.settle(chat)
        assert node.parent is not None
        [(content, state)] = self.newest("content, state", chat)
        assert any(text.startswith(content) for text in self.said(node)) and state == "stopped"
        node.content, node.state = content, "stopped"

    def fail(self) -> bool:
        chat = self.idle_chat()
        if chat is None or self.talker.held or len(chat.line()) >= MOST_MESSAGES:
            return False
        self.talker.engine.failure = EngineError("the engine gave up")
        sent = self.send(may_hold=False)
        self.talker.engine.failure = None
        if sent:
            chat.line()[-1].state = "failed"
        return sent

    def go_on(self) -> bool:
        """Continue a stopped answer."""
        chat = self.idle_chat()
        node = chat.line()[-1] if chat is not None and chat.line() else None
        if chat is None or node is None or node.state != "stopped" or not node.content or self.talker.held:
            return False
        begun = node.content
        last = self.page.locator("#turns article.assistant").last
        last.locator(".toolbar").hover()
        last.locator("[data-continue]").click()
        until(self.page, "() => document.querySelector('#turns article:last-of-type')?.dataset.state === 'done'")
        self.settle(chat)
        node.content, node.state = begun + self.said(node)[-1], "done"
        return True

    def turn(self, roles: str = "user assistant") -> tuple[Node, Locator] | None:
        """Return a random message of the shown branch and its article."""
        chat = self.idle_chat()
        line = [] if chat is None else chat.line()
        choices = [at for at, node in enumerate(line) if node.role in roles and node.content]
        if not choices:
            return None
        at = self.random.choice(choices)
        return line[at], self.page.locator("#turns > article").nth(at)

    def edit(self) -> bool:
        found = self.turn("user")
        if found is None or self.chat is None or len(self.chat.nodes()) > 5 * MOST_MESSAGES:
            return False
        node, article = found
        article.locator(".toolbar").hover()
        article.locator("[data-edit]").click()
        box = self.page.locator("#edit-text")
        expect(box).to_have_value(node.content or "")
        text = self.words("e")
        box.fill(text)
        if self.maybe(0.3):
            self.page.locator(".edit [data-stop]").click()
            return True
        assert node.parent is not None
        self.page.locator(".edit [data-regenerate]").click()
        self.stored(self.chat, text)
        self.ask(self.chat, node.parent, text, node.files)
        return True

    def regenerate(self) -> bool:
        found = self.turn("assistant")
        if found is None or self.chat is None or len(self.chat.nodes()) > 5 * MOST_MESSAGES:
            return False
        node, article = found
        assert node.parent is not None
        count = self.count(self.chat)
        article.locator(".toolbar").hover()
        article.locator("[data-regenerate]").click()
        for _ in range(4000):
            if self.count(self.chat) > count:
                break
            self.page.wait_for_timeout(5)
        self.answer(self.chat, node.parent)
        return True

    def count(self, chat: Chat) -> int:
        return int(self.read("SELECT count(*) FROM messages WHERE chat_id = ?", chat.id)[0][0])

    def version(self) -> bool:
        chat = self.idle_chat()
        line = [] if chat is None else chat.line()
        choices = [at for at, node in enumerate(line) if node.parent and len(node.parent.children) > 1]
        if not choices:
            return False
        at = self.random.choice(choices)
        node, article = line[at], self.page.locator("#turns > article").nth(at)
        assert node.parent is not None
        family = node.parent.children
        place = family.index(node)
        way = "previous" if place and (place == len(family) - 1 or self.maybe()) else "next"
        article.locator(".toolbar").hover()
        article.locator(f"[data-version={way}]").click()
        node.parent.chosen = family[place + (1 if way == "next" else -1)]
        while node.parent is not None:  # all messages above become the chosen branch
            node = node.parent
            if node.parent is not None:
                node.parent.chosen = node
        return True

    def rate(self) -> bool:
        found = self.turn("assistant")
        if found is None:
            return False
        node, article = found
        article.locator(".toolbar").hover()
        article.get_by_role("button", name=words["rate_up"]).click()
        node.rating = 0 if node.rating else 1
        pressed = "true" if node.rating else "false"
        expect(article.get_by_role("button", name=words["rate_up"])).to_have_attribute("aria-pressed", pressed)
        return True

    def clear_toasts(self) -> None:
        """Remove earlier notifications, so that the next one is the last."""
        self.page.evaluate("document.querySelectorAll('.toast').forEach((toast) => toast.remove())")

    def delete_message(self) -> bool:
        found = self.turn()
        chat = self.chat
        if found is None or chat is None:
            return False
        node, article = found
        assert node.parent is not None
        self.clear_toasts()
        if node.role == "user":
            article.locator(".toolbar").hover()
            article.get_by_role("button", name=words["delete_message"]).click()
        else:
            more(article).get_by_role("button", name=words["delete_message"]).click()
        family, place, line = node.parent.children, node.parent.children.index(node), chat.line()
        family.remove(node)
        undo = self.page.locator(".toast").filter(has_text=words["toast_message_deleted"])
        expect(undo.last).to_be_visible()
        if self.maybe(0.3):
            self.prompt()
        if self.maybe():
            undo.last.get_by_role("button", name=words["undo"]).click()
            expect(self.page.locator("#turns > article")).to_have_count(len(line))
            family.insert(place, node)
            for each in line:
                assert each.parent is not None
                each.parent.chosen = each
        return True

    def prompt(self) -> bool:
        """Change the chat's system prompt in its settings."""
        if self.chat is None:
            return False
        field = self.page.locator("#set-system_prompt")
        show_settings(self.page, "chat")
        expect(field).to_have_value(self.chat.prompt)
        self.chat.prompt = self.words("p")
        field.fill(self.chat.prompt)
        with self.page.expect_response(lambda answer: answer.request.method == "POST" and "settings" in answer.url):
            field.blur()
        self.page.evaluate("document.getElementById('settings').close()")
        return True

    def one(self, chats: list[Chat]) -> Chat | None:
        return self.random.choice(chats) if chats else None

    def menu(self, chat: Chat) -> Locator:
        """Open the menu of a chat in the list."""
        row = self.page.locator(f"#chat-list li:has(a[href='{chat.path}'])")
        row.hover()
        row.locator(".row-menu").click()
        return row.locator("[popover]")

    def rename(self) -> bool:
        chat = self.one(self.listed())
        if chat is None:
            return False
        title = self.words("t")
        if chat is self.chat and self.maybe():
            self.page.get_by_role("button", name=words["chat_menu"]).click()
            self.page.locator("#title").fill(title)
            self.page.locator("#title").press("Enter")
            expect(self.page.locator("#chat-title")).to_have_text(title)
        else:
            menu = self.menu(chat)
            menu.locator("input[name=title]").fill(title)
            menu.get_by_role("button", name=words["rename"]).click()
        chat.title = title
        return True

    def pin(self) -> bool:
        chat = self.one(self.listed())
        if chat is None:
            return False
        label = words["unpin"] if chat.pinned else words["pin"]
        self.menu(chat).get_by_role("button", name=label, exact=True).click()
        chat.pinned = not chat.pinned
        return True

    def archive(self) -> bool:
        chat = self.one(self.listed())
        if chat is None:
            return False
        self.menu(chat).get_by_role("button", name=words["archive_this"]).click()
        chat.archived = True
        if chat is self.chat:
            self.page.wait_for_url(re.compile(r"/$"))
            self.tab.path = "/"
        return True

    def delete(self) -> bool:
        chat = self.one(self.listed())
        if chat is None or (len(self.chats) < 3 and self.maybe(0.8)):
            return False
        node = chat.running()
        if node is not None and not self.talker.said.get(node.parent.content if node.parent else "", []):
            return False
        here = chat is self.chat
        self.clear_toasts()
        self.menu(chat).get_by_role("button", name=words["delete"]).click()
        undo = self.page.locator(".toast").filter(has_text=words["toast_deleted"]).last
        expect(undo).to_be_visible()
        del self.chats[chat.id]
        if here:
            self.tab.path = "/"
        if self.maybe():
            undo.get_by_role("button", name=words["undo"]).click()
            self.page.wait_for_url(f"**{chat.path}")
            self.chats[chat.id] = chat
            self.tab.path = chat.path
            if node is not None:
                self.cut(chat, node)
            self.arrived()
        for tab in self.tabs:  # the other tab loads the chat again, or the start page
            if tab is not self.tab and tab.path == chat.path:
                self.go(chat.path if chat.id in self.chats else "/", tab)
        return True

    def many(self) -> bool:
        """Change several chats at once on the page of all chats."""
        chosen = [chat for chat in self.chats.values() if chat.running() is None and self.maybe(0.4)]
        if not chosen:
            return False
        here = self.tab.path
        self.page.goto(self.url + "/archive")
        for chat in chosen:
            self.page.locator(f"[name='chat-{chat.id}']").check()
        action = self.random.choice(("archive", "unarchive", "delete" if self.maybe(0.5) else "unarchive"))
        self.page.locator(f"[name=action][value={action}]").click()
        expect(self.page.locator(".toast")).to_be_visible()
        kept = self.maybe(0.7)
        for chat in chosen:
            if action == "delete":
                if not kept:
                    del self.chats[chat.id]
            else:
                chat.archived = action == "archive"
        if action == "delete" and kept:
            self.page.get_by_role("button", name=words["undo"]).click()
            self.page.wait_for_url("**/archive")
        for tab in self.tabs:
            if tab is self.tab or (action == "delete" and tab.path != "/"):
                back = here if tab is self.tab else tab.path
                self.go(back if back.removeprefix("/chats/") in self.chats else "/", tab)
        return True

    def move(self) -> bool:
        """Move the chat into the project, or out of it."""
        if self.chat is None:
            return False
        self.page.get_by_role("button", name=words["chat_menu"]).click()
        label = words["project_none"] if self.chat.project else PROJECT
        self.page.locator("#project").select_option(label=label)
        self.page.locator("#chat-menu").get_by_role("button", name=words["project_move"]).click()
        expect(self.page.locator(".in-project")).to_have_count(0 if self.chat.project else 1)
        self.chat.project = not self.chat.project
        self.page.wait_for_load_state()
        self.arrived()
        return True

    def search(self) -> bool:
        """Open a search hit in whatever branch it is, and send a message there."""
        chat = self.one([chat for chat in self.chats.values() if chat.running() is None])
        nodes = [] if chat is None else [node for node in chat.nodes() if node.content and "z" in node.content]
        if chat is None or not nodes or self.talker.held:
            return False
        node = self.random.choice(nodes)
        word = (node.content or "").split()[0]
        self.page.locator("#sidebar [commandfor=search]").click()
        self.page.locator("#search-text").fill(word)
        hit = self.page.locator(f"#search-results a[href*='{chat.path}?at=']").filter(has_text=word).first
        hit.click()
        self.page.wait_for_url(f"**{chat.path}?at=*")
        self.page.wait_for_load_state()
        self.tab.path = chat.path
        shown = (node.content or "").strip()
        until(self.page, "(text) => [...document.querySelectorAll('#turns .bubble, #turns .answer')].some("
              "(one) => one.textContent.trim() === text)", shown)  # fmt: skip
        above = node
        while above.children:
            above = above.chosen if above.chosen in above.children else above.children[-1]
        if queue := self.tab.queues.pop(chat.path, []):  # it may belong to another branch, so it returns to the input
            self.tab.drafts[chat.path] = "\n\n".join([*queue, *filter(None, [self.tab.drafts.get(chat.path, "")])])
            expect(self.page.locator("#text")).to_have_value(self.tab.drafts[chat.path])
        waits = self.tab.files.get(chat.path)
        if waits or self.maybe() or len(chat.line()) >= MOST_MESSAGES:
            self.go(chat.path)
            return True
        text = self.words("h")
        self.page.locator("#text").fill(text)
        self.page.locator("#text").press("Enter")
        self.tab.drafts[chat.path] = ""
        self.stored(chat, text)
        self.ask(chat, above, text)
        return True

    def branch(self) -> bool:
        """Copy the messages up to an answer into a new chat."""
        found = self.turn("assistant")
        if found is None or self.chat is None or len(self.chats) >= MOST_CHATS:
            return False
        node, article = found
        chat, before = self.chat, self.page.url
        more(article).get_by_role("button", name=words["branch"]).click()
        self.page.wait_for_url(lambda url: url != before)
        self.tab.path = "/" + self.page.url.split("/", 3)[3]
        copied = Chat(self.tab.path.removeprefix("/chats/"), self.page.locator("#chat-title").inner_text())
        copied.project, copied.prompt = chat.project, chat.prompt
        above: list[Node] = []
        while node.parent is not None:
            above.insert(0, node)
            node = node.parent
        end = copied.root
        for each in above:
            end = copied.add(end, each.role, each.content, state=each.state, files=each.files)
            end.rating = each.rating
        self.chats[copied.id] = copied
        return True

    def bring(self) -> bool:
        """Import a file in the settings."""
        if len(self.chats) >= MOST_CHATS or self.chat is None:
            return False
        texts = [self.words("i"), self.words("i")]
        messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant"), texts, strict=True)]
        body = json.dumps({"messages": messages}).encode()
        show_settings(self.page, "data")
        before = self.page.url
        file = {"name": "chat.json", "mimeType": "application/json", "buffer": body}
        self.page.locator("#import").set_input_files(file)  # type: ignore[arg-type]
        self.page.wait_for_url(lambda url: url != before)
        self.tab.path = "/" + self.page.url.split("/", 3)[3]
        chat = Chat(self.tab.path.removeprefix("/chats/"), self.page.locator("#chat-title").inner_text())
        chat.add(chat.add(chat.root, "user", texts[0]), "assistant", texts[1])
        self.chats[chat.id] = chat
        return True

    def switch(self) -> bool:
        chat = self.one(self.listed())
        if chat is None:
            self.go("/")
        elif self.maybe():
            self.page.locator(f"#chat-list a[href='{chat.path}']").click()
            self.page.wait_for_url(f"**{chat.path}")
            self.page.wait_for_load_state()
            self.tab.path = chat.path
            self.arrived()
        else:
            self.go(chat.path)
        return True

    def new(self) -> bool:
        self.page.locator("#new-chat").click()
        self.page.wait_for_url(re.compile(r"/$"))
        self.tab.path = "/"
        return True

    def reload(self) -> bool:
        self.page.reload()
        self.arrived()
        return True

    def back(self) -> bool:
        self.page.go_back()
        path = "/" + self.page.url.split("/", 3)[3] if self.page.url.startswith(self.url) else ""
        known = path == "/" or path.removeprefix("/chats/") in self.chats
        self.go("/") if not known else None
        self.tab.path = path if known else "/"
        self.arrived()
        return True

    # ---- checks

    def read(self, sql: str, *values: Any) -> list[tuple[Any, ...]]:
        with sqlite3.connect(f"file:{self.database}?mode=ro", uri=True) as db:
            return db.execute(sql, values).fetchall()

    def run_with_store(self) -> dict[str, Any]:
        rows = self.read(
            "SELECT id, chat_id, parent_id, role, state, content, attachments, rating FROM messages"
            " WHERE trash_id IS NULL ORDER BY chat_id, position"
        )
        below: dict[str, list[Any]] = {}
        trees: dict[str, list[Any]] = {}
        for id, chat_id, parent, role, state, content, files, rating in rows:
            names = [each["name"] for each in json.loads(files)]
            is_open = state in ("queued", "running")
            node = [role, "running" if is_open else state, None if is_open else content, names, rating]
            node.append(below.setdefault(id, []))
            (trees.setdefault(chat_id, []) if parent is None else below.setdefault(parent, [])).append(node)
        found: dict[str, Any] = {}
        columns = "id, title, pinned, archived, project <> '', settings"
        for id, title, *flags, settings in self.read(f"SELECT {columns} FROM chats WHERE trash_id IS NULL"):
            prompt = json.loads(settings).get("system_prompt", "")
            found[id] = [title, *map(bool, flags), prompt, trees.get(id, [])]
        return found

    def expected_store(self) -> dict[str, Any]:
        return {
            chat.id: [chat.title, chat.pinned, chat.archived, chat.project, chat.prompt, chat.root.tree()[-1]]
            for chat in self.chats.values()
        }

    def expected(self, tab: Tab) -> dict[str, Any]:
        chat = self.chats.get(tab.path.removeprefix("/chats/"))
        turns = []
        for node in chat.line() if chat is not None else []:
            assert node.parent is not None
            family = node.parent.children
            label = f"{family.index(node) + 1}/{len(family)}" if len(family) > 1 and node.content is not None else ""
            text = None if node.content is None else " ".join(node.content.split())
            turns.append([node.role, "" if node.role == "user" else node.state, text, label])
        return {
            "path": tab.path,
            "title": words["new_chat"] if chat is None else chat.title,
            "text": tab.drafts.get(tab.path, ""),
            "files": tab.files.get(tab.path, []),
            "queue": tab.queues.get(tab.path, []),
            "stop": chat is not None and chat.running() is not None,
            "list": sorted(("^" if each.pinned else "") + each.title for each in self.listed()),
            "turns": turns[-NEWEST:],
        }

    def shown(self, tab: Tab) -> dict[str, Any]:
        try:
            found: dict[str, Any] = tab.page.evaluate(STATE)
        except Error:  # the tab is between two pages
            return {}
        for turn in found["turns"]:
            turn[1] = "running" if turn[1] == "queued" else turn[1]
            turn[2] = None if turn[1] == "running" else " ".join(turn[2].split())
        return found

    def check(self) -> None:
        """Compare the store with the model, then both tabs after they have settled."""
        wanted, found = self.expected_store(), {}
        for _ in range(2000):
            if (found := self.run_with_store()) == wanted:
                break
            self.page.wait_for_timeout(5)
        assert found == wanted, difference(found, wanted)
        for tab in self.tabs:
            shown: dict[str, Any] = {}
            wanted = self.expected(tab)
            for _ in range(3000):
                if (shown := self.shown(tab)) == wanted:
                    break
                tab.page.wait_for_timeout(10)
            assert shown == wanted, difference(shown, wanted)


def difference(found: dict[str, Any], wanted: dict[str, Any]) -> str:
    """Return a diff of the two as JSON."""
    before, after = (
        json.dumps(each, indent=1, ensure_ascii=False, sort_keys=True).splitlines() for each in (wanted, found)
    )
    return "\n".join(difflib.unified_diff(before, after, "wanted", "found", n=4, lineterm=""))


CHANCES = {
    **{"type": 10, "attach": 3, "send": 20, "collide": 3, "queue": 8, "unqueue": 3, "finish": 9, "stop": 6, "fail": 2},
    **{"go_on": 4, "edit": 7, "regenerate": 7, "version": 9, "rate": 2, "delete_message": 4, "prompt": 2, "rename": 4},
    **{"pin": 3, "archive": 2, "delete": 5, "many": 3, "move": 3, "search": 6, "branch": 2, "bring": 2, "switch": 10},
    **{"new": 4, "reload": 5, "back": 4},
}


@pytest.mark.timeout(0)  # bounded by the number of operations, each of which has its own timeout
def test_store_and_tabs_match_the_model_after_random_operations(
    serve: Any, open_page: Callable[..., Page], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("notso.web.app.UNDO_SECONDS", 3600.0)  # must not expire on a busy machine
    seed = int(os.environ.get("SEED", "1"))
    talker = Talker()
    served = serve(talker.engine)
    first = open_page(served.url + "documents", expected=NOISE)
    first.get_by_label("New project").fill(PROJECT)
    first.get_by_role("button", name="Create", exact=True).click()
    first.goto(served.url)
    pages = [
        first,
        open_page(served.url, like=first, expected=NOISE),
    ]
    database = tmp_path / "data" / "notso.db"
    operator = Operator(pages, served.url, database, talker, seed)
    done: dict[str, int] = {}
    while sum(done.values()) < OPERATIONS:
        [name] = operator.random.choices(list(CHANCES), list(CHANCES.values()))
        operator.tab = operator.random.choice(operator.tabs)
        where = f"{name} in tab {operator.tabs.index(operator.tab)} at {operator.tab.path}"
        operator.log.append(where)
        try:
            if not getattr(operator, name)():
                operator.log.pop()
                continue
            operator.check()
        except Exception as error:
            last = "\n".join(operator.log[-8:] + [f"shown: {tab.page.url}" for tab in operator.tabs])
            raise AssertionError(f"seed {seed}, operation {sum(done.values())}, the last of:\n{last}") from error
        done[name] = done.get(name, 0) + 1
    operator.finish()
    operator.check()
    print(f"seed {seed}: {done}")
