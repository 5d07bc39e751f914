"""Branches, deleted objects and search, on every store."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from web.store.conftest import Kept
from web.store.some_chats import OWNER, a_chat, a_turn, an_answer, finished, large_chats, shown

from notso.web.store import tree
from notso.web.store.protocol import (
    MOST_SHOWN,
    AnswerStats,
    Attachment,
    ChatStore,
    NewMessage,
    StoredMessage,
    TurnAccepted,
    TurnRefused,
)
from notso.web.store.sql import shown_part, tree_writes
from notso.web.store.sql import store as store_module
from notso.web.store.tree import branch, path_to, shown_path
from notso.web.values.errors import StorageError
from notso.web.values.ids import new_generation_id, new_id


def test_selected_branches_are_remembered(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chat = a_chat()
        first = await finished(store, a_turn(chat, "q1"), "a1", chat)
        await finished(store, a_turn(chat, "q2"), "a2")
        await finished(store, a_turn(chat, "q1 again", instead_of=first.user_message.id), "a1 again")
        assert await shown(store, chat) == ["q1 again", "a1 again"]
        assert await store.choose(OWNER, chat.id, first.user_message.id)
        assert await shown(store, chat) == ["q1", "a1", "q2", "a2"]
        other = await store.add_message(OWNER, NewMessage(an_answer(chat), first.user_message.id, new_id()))
        assert isinstance(other, TurnAccepted) and other.user_message.id == first.user_message.id
        await store.save_message(replace(other.assistant_message, content="a1 b", state="done"))
        assert await shown(store, chat) == ["q1", "a1 b"]
        await finished(store, a_turn(chat, "q3"), "a3")
        assert await shown(store, chat) == ["q1", "a1 b", "q3", "a3"]
        assert await store.choose(OWNER, chat.id, first.assistant_message.id)
        assert await shown(store, chat) == ["q1", "a1", "q2", "a2"], "choosing a1 restores its continuation"
        assert not await store.choose(OWNER, chat.id, new_id())

    kept.run(work)


def test_resuming_keeps_the_text_and_changes_the_generation_id(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chat = a_chat()
        turn = await finished(store, a_turn(chat), "half", chat)
        name = new_generation_id()
        resumed = await store.resume_message(OWNER, chat.id, turn.assistant_message.id, name)
        assert isinstance(resumed, TurnAccepted)
        assert (
            resumed.assistant_message.content,
            resumed.assistant_message.state,
            resumed.assistant_message.generation_id,
        ) == ("half", "queued", name)
        assert (await store.generation(OWNER, name)) is not None
        assert await store.generation(OWNER, turn.assistant_message.generation_id or "") is None
        again = await store.resume_message(OWNER, chat.id, turn.assistant_message.id, new_generation_id())
        assert isinstance(again, TurnRefused) and again.running is not None
        assert not await store.edit_message(OWNER, chat.id, turn.assistant_message.id, "x"), "the answer is running"
        question = await store.resume_message(OWNER, chat.id, turn.user_message.id, new_generation_id())
        assert isinstance(question, TurnRefused)

    kept.run(work)


def test_summary_can_be_removed_from_the_middle(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chat = a_chat()
        turn = await finished(store, a_turn(chat, "q1"), "a1", chat)
        answer = replace(an_answer(chat), kind="summary")
        summary = await store.add_message(OWNER, NewMessage(answer, turn.assistant_message.id, new_id()))
        assert isinstance(summary, TurnAccepted)
        await store.save_message(replace(summary.assistant_message, content="sum", state="done"))
        await finished(store, a_turn(chat, "q2"), "a2")
        assert await shown(store, chat) == ["q1", "a1", "sum", "q2", "a2"]
        assert not await store.remove_summary(OWNER, chat.id, turn.assistant_message.id)
        assert await store.remove_summary(OWNER, chat.id, summary.assistant_message.id)
        assert await shown(store, chat) == ["q1", "a1", "q2", "a2"]
        assert await store.search(OWNER, "sum", 9) == []

    kept.run(work)


def test_repeated_question_is_refused_after_its_answer_was_purged(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chat = a_chat()
        turn = await finished(store, a_turn(chat, "q", key="k"), "a", chat)
        assert await store.trash_message(OWNER, chat.id, turn.assistant_message.id)
        assert isinstance(await store.add_turn(OWNER, a_turn(chat, "q", key="k")), TurnAccepted)
        assert await store.purge(0.0) == 1
        assert isinstance(await store.add_turn(OWNER, a_turn(chat, "q", key="k")), TurnRefused)
        assert await shown(store, chat) == ["q"]

    kept.run(work)


def test_replies_deleted_before_their_question_are_purged_with_it(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = iter(["1" * 32, "0" * 32])  # the second entry is purged first
    monkeypatch.setattr(tree_writes, "uuid", SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=next(ids))))

    async def work(store: ChatStore) -> None:
        [(chat, messages)] = large_chats(turns=510, small=0)
        await store.add_chat(OWNER, chat, [])
        await store.add_messages(OWNER, messages)
        assert await store.trash_message(OWNER, chat.id, messages[2].id)
        assert (await store.trash_messages(OWNER, chat.id, reset=False))[0]
        assert await store.purge(0.0) == 2 and await store.purge(0.0) == 0
        words = await store.run_read(lambda db: set(db.vocabulary(OWNER)), OWNER)  # type: ignore[attr-defined]
        assert words == {"long"}, "the words of deleted messages are erased"

    kept.run(work)


def test_deleted_chats_and_messages_can_be_restored_until_purged(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chat = a_chat("Walruses")
        await finished(store, a_turn(chat, "about walruses"), "tusks", chat)
        await store.update_chat(OWNER, chat.id, settings={"seed": 1})
        trash_id = await store.trash_chat(OWNER, chat.id)
        assert trash_id is not None
        assert await store.chats(OWNER) == [] and await store.chat(OWNER, chat.id) is None
        assert await store.search(OWNER, "walruses", 9) == []
        assert isinstance(await store.add_turn(OWNER, a_turn(chat)), TurnRefused)
        assert await store.restore("other", trash_id) == []
        assert await store.restore(OWNER, trash_id) == [chat.id]
        assert await shown(store, chat) == ["about walruses", "tusks"]
        trash_id, _ = await store.trash_messages(OWNER, chat.id, reset=True)
        assert await shown(store, chat) == [] and await store.search(OWNER, "tusks", 9) == []
        assert (await store.chats(OWNER))[0].settings == {}
        assert await store.restore(OWNER, trash_id or "") == [chat.id]
        assert await shown(store, chat) == ["about walruses", "tusks"]
        assert (await store.chats(OWNER))[0].settings == {"seed": 1}
        for reset in (False, True):  # settings changed after the deletion are kept
            trash_id, _ = await store.trash_messages(OWNER, chat.id, reset=reset)
            await store.update_chat(OWNER, chat.id, settings={"seed": 2})
            assert await store.restore(OWNER, trash_id or "") == [chat.id]
            assert (await store.chats(OWNER))[0].settings == {"seed": 2}
        first = (await store.messages(OWNER, chat.id))[0].id
        await store.trash_messages(OWNER, chat.id, reset=False)
        assert await store.purge(60) == 0 == len(await store.documents.stale()), "the deletion is too recent to purge"
        later = await finished(store, a_turn(chat, "about seals"), "whiskers")
        assert await store.purge(0) == 1
        assert [(each.owner, each.conversation) for each in await store.documents.stale()] == [(OWNER, first)]
        assert await shown(store, chat) == ["about seals", "whiskers"], "messages added after clearing stay"
        trash_id = await store.trash_chat(OWNER, chat.id)
        assert await store.purge(60) == 0, "the deletion is too recent to purge"
        assert await store.purge(0) == 1
        assert [each.conversation for each in await store.documents.stale()] == [first, later.user_message.id]
        assert await store.restore(OWNER, trash_id or "") == []
        words = ("indexed", "texts") if kept.kind == "sqlite" else ("indexed",)
        for table in ("chats", "messages", "trash", *words):
            (row,) = await store.read("", f"SELECT count(*) AS n FROM {table}")
            assert row["n"] == 0, table

    kept.run(work)


def test_chats_deleted_together_are_restored_and_purged_together(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: ChatStore) -> None:
        monkeypatch.setattr(tree_writes, "PURGED_MESSAGES", 3)  # force several transactions
        made = [a_chat(title) for title in ("Auks", "Gulls", "Terns", "Skuas")]
        for chat in made:
            await finished(store, a_turn(chat, "about birds"), "wings", chat)
        before = await store.trash_chat(OWNER, made[3].id)
        assert await store.trash_chats("other", [made[0].id]) == (None, 0)
        trash_id, count = await store.trash_chats(OWNER, [made[3].id, *(chat.id for chat in made[:3])])
        assert trash_id is not None and count == 3, "the fourth chat was deleted before"
        assert await store.chats(OWNER) == []
        assert sorted(await store.restore(OWNER, trash_id)) == sorted(chat.id for chat in made[:3])
        assert len(await store.chats(OWNER)) == 3
        assert await store.restore(OWNER, before or "") == [made[3].id]
        trash_id, _ = await store.trash_chats(OWNER, [chat.id for chat in made])
        assert await store.purge(0) == 1 and await store.restore(OWNER, trash_id or "") == []
        assert len(await store.documents.stale()) == 4
        for table in ("chats", "messages", "trash"):
            (row,) = await store.read("", f"SELECT count(*) AS n FROM {table}")
            assert row["n"] == 0, table

    kept.run(work)


def test_restored_messages_become_a_branch_beside_newer_ones(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chat = a_chat()
        await finished(store, a_turn(chat, "old"), "old answer", chat)
        trash_id, _ = await store.trash_messages(OWNER, chat.id, reset=False)
        await finished(store, a_turn(chat, "new"), "new answer")
        assert await shown(store, chat) == ["new", "new answer"]
        assert await store.restore(OWNER, trash_id or "") == [chat.id]
        assert await shown(store, chat) == ["old", "old answer"]
        assert len(await store.messages(OWNER, chat.id)) == 4

    kept.run(work)


def test_restoring_a_running_answer_leaves_only_the_newer_unfinished(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chat = a_chat()
        await store.add_turn(OWNER, a_turn(chat, "old"), chat)
        trash_id, _ = await store.trash_messages(OWNER, chat.id, reset=False)
        await store.add_turn(OWNER, a_turn(chat, "new"))
        assert await store.restore(OWNER, trash_id or "") == [chat.id]
        unfinished = [message for message in await store.messages(OWNER, chat.id) if message.active]
        assert len(unfinished) == 1, "only the newer request is unfinished"

    kept.run(work)


@pytest.mark.parametrize(
    "query",
    ['"', "'", "a AND", "NEAR(", "*", "-", "content:x", "(", "\x00", "^", "x" * 5000, "a\x00b", "\ud7ff", " ", ""],
)
def test_unusual_search_queries_return_no_hits(kept: Kept, query: str) -> None:
    async def work(store: ChatStore) -> None:
        chat = a_chat()
        await finished(store, a_turn(chat), "answer", chat)
        assert await store.search(OWNER, query, 9) == []

    kept.run(work)


def test_words_are_found_in_titles_questions_and_answers(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chat, other = a_chat("Über Walrösser"), a_chat("Other")
        turn = await finished(store, a_turn(chat, "Where do walruses live?"), "In the cold <b>north</b>.", chat)
        await finished(store, a_turn(other, "Nothing"), "to see", other)

        async def found(query: str) -> list[str | None]:
            return [hit.message_id for hit in await store.search(OWNER, query, 9)]

        assert await found("uber") == [None], "accents are ignored"
        assert await found("WALRUS") == [turn.user_message.id], "the last word matches as a prefix"
        assert await found("walruses live") == [turn.user_message.id]
        hits = await store.search(OWNER, "walrus live", 9)
        assert [hit.similar for hit in hits] == [True], "earlier words match only whole or by similarity"
        assert await found("north") == [turn.assistant_message.id]
        (hit,) = await store.search(OWNER, "cold", 9)
        assert (hit.title, hit.snippet) == ("Über Walrösser", "In the \x02cold\x03 <b>north</b>.")
        await store.update_chat(OWNER, chat.id, title="Seals")
        assert await found("uber") == [] and await found("seals") == [None]
        await store.edit_message(OWNER, chat.id, turn.assistant_message.id, "In the warm south.")
        assert await found("north") == [] and await found("south") == [turn.assistant_message.id]

    kept.run(work)


def test_running_answer_is_not_searchable(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chat = a_chat()
        turn = a_turn(chat)
        await store.add_turn(OWNER, turn, chat)
        await store.save_message(replace(turn.assistant_message, content="walrus", state="running"))
        assert await store.search(OWNER, "walrus", 9) == []
        await store.save_message(replace(turn.assistant_message, content="walrus", state="stopped"))
        assert len(await store.search(OWNER, "walrus", 9)) == 1

    kept.run(work)


def test_pinned_chats_come_first(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chats = [replace(a_chat(str(number)), updated_ms=number) for number in range(3)]
        for chat in chats:
            await store.add_chat(OWNER, chat, [])
        assert await store.update_chat(OWNER, chats[0].id, pinned=True)
        assert [chat.title for chat in await store.chats(OWNER)] == ["0", "2", "1"]

    kept.run(work)


def test_added_chat_is_read_back_unchanged(kept: Kept) -> None:
    async def work(store: ChatStore) -> None:
        chat = replace(a_chat(), pinned=True, settings={"temperature": 0.5, "suggestions": False}, chosen_root="q")
        chat = replace(chat, id=new_id())
        question = StoredMessage(
            new_id(), chat.id, "user", "q", "", "done", 5, attachments=(Attachment("n", "t"),), edited=True
        )
        answer = replace(
            an_answer(chat), content="a", reasoning="r", state="stopped", note="n", parent_id=question.id, renderer=1
        )
        answer = replace(answer, numbers=AnswerStats(*range(1, 10)), dropped_messages=3, kind="summary")  # type: ignore[arg-type]
        await store.add_chat(OWNER, chat, [question, answer])
        assert await store.chat(OWNER, chat.id) == chat
        assert await store.messages(OWNER, chat.id) == [question, answer]

    kept.run(work)


@pytest.mark.parametrize("seed", range(4))
def test_shown_messages_match_the_branch_of_random_trees(
    kept: Kept, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Compare with a tree built in memory, for random trees, choices and positions."""
    chance = random.Random(seed)

    async def work(store: Any) -> None:
        chat, messages = a_chat(), list[StoredMessage]()
        for number in range(60):
            parent = chance.choice([None, *messages[-6:]] if chance.random() < 0.3 else messages[-1:] or [None])
            role: Any = "user" if number % 2 == 0 else "assistant"
            message = replace(an_answer(chat), role=role, state="done", parent_id=parent and parent.id)
            messages.append(replace(message, generation_id=message.generation_id if role == "assistant" else None))
        await store.add_chat(OWNER, chat, messages)
        for _ in range(12):
            if chance.random() < 0.5:
                await store.choose(OWNER, chat.id, chance.choice(messages).id)
            whole = await store.chat_snapshot(OWNER, chat.id)
            through, first = (chance.choice([None, *messages]) for _ in range(2))
            names = {"through": through and through.id, "first": first and first.id}
            wanted = shown_path(whole.messages, whole.chat.chosen_root, names["through"])
            found = await store.shown_chat(OWNER, chat.id, 5, **names)
            assert list(found.path) == wanted[found.earlier :]
            assert found.earlier + len(found.path) == len(wanted) and found.chat == whole.chat
            begin = min([at for at, each in enumerate(wanted) if each.message.id == names["first"]] + [len(wanted) - 5])
            begins = [at for at in range(max(0, begin) + 1) if wanted[at].message.role == "user"]
            assert found.earlier == max(begins, default=0)
            at = chance.randrange(len(wanted))
            above = await store.shown_before(OWNER, chat.id, wanted[at].message.id, 5)
            assert [each.message for each in above.path] == [each.message for each in wanted[above.earlier : at]]
            assert [each.versions for each in above.path] == [each.versions for each in wanted[above.earlier : at]]
            end = chance.randrange(1, len(wanted) + 1)
            for read_only in (False, True):
                monkeypatch.setattr(type(store), "read_only", read_only)
                part = await store.shown_before(OWNER, chat.id, wanted[at].message.id, 5, first=end)
                monkeypatch.undo()
                assert (part is None) == (end >= at)
                if part is not None:
                    assert [each.message for each in part.path] == [each.message for each in wanted[part.earlier : end]]
            (one,) = [await store.shown_message(OWNER, chat.id, wanted[at].message.id)]
            assert (one.message, one.versions) == (wanted[at].message, wanted[at].versions)
        assert await store.shown_chat("another", chat.id, 5) is None
        assert await store.shown_before("another", chat.id, messages[-1].id, 5) is None
        assert await store.shown_message("another", chat.id, messages[-1].id) is None

    kept.run(work)


@pytest.mark.parametrize("seed", range(3))
def test_branch_and_prompt_part_match_random_trees(kept: Kept, seed: int) -> None:
    """Compare with a tree built in memory, for random trees with summaries and files. The branch for a prompt begins
    with the newest finished summary, or with the message that exceeds the limit."""
    chance = random.Random(seed)

    def text_of(message: StoredMessage) -> int:
        return len(message.content) + sum(len(each.text) for each in message.attachments)

    async def work(store: Any) -> None:
        chat, messages = a_chat(), list[StoredMessage]()
        for number in range(80):
            parent = chance.choice([None, *messages[-6:]] if chance.random() < 0.2 else messages[-1:] or [None])
            role: Any = "user" if number % 2 == 0 else "assistant"
            kind: Any = "summary" if role == "assistant" and chance.random() < 0.1 else "turn"
            state: Any = chance.choice(["done", "done", "failed"]) if role == "assistant" else "done"
            content = "" if state == "failed" else "x" * chance.randrange(20, 60)
            message = replace(an_answer(chat), role=role, state=state, kind=kind, content=content)
            files = (Attachment(f"{number}.txt", "y" * 30),) if role == "user" and chance.random() < 0.2 else ()
            generation_id = message.generation_id if role == "assistant" else None
            message = replace(message, parent_id=parent and parent.id, attachments=files, generation_id=generation_id)
            messages.append(message)
        await store.add_chat(OWNER, chat, messages)
        for _ in range(20):
            if chance.random() < 0.5:
                await store.choose(OWNER, chat.id, chance.choice(messages).id)
            whole = await store.chat_snapshot(OWNER, chat.id)
            last = chance.choice([None, *messages])
            wanted = path_to(whole.messages, last.id) if last else branch(whole.messages, whole.chat.chosen_root)
            found = await store.branch(OWNER, chat.id, last and last.id)
            assert (list(found.line), found.chat) == (wanted, whole.chat)
            assert (found.first_id, found.above, found.summarized) == (wanted[0].id, 0, False) or found.summarized
            room = chance.randrange(20, 1500)
            part = await store.branch(OWNER, chat.id, last and last.id, most_characters=room)
            assert [*wanted[: part.above], *part.line] == wanted and part.first_id == wanted[0].id
            stands = [each.kind == "summary" and each.state == "done" for each in part.line]
            assert not any(stands[1:]) and stands[0] == part.summarized
            assert part.summarized or not part.above or sum(map(text_of, part.line)) > room
            files = await store.earlier_attachments(OWNER, chat.id, part.line[0].id)
            assert files == [file for each in wanted[: part.above] for file in each.attachments]
        empty = await store.branch(OWNER, chat.id, "")
        assert (empty.line, empty.first_id, empty.chat) == ((), None, whole.chat)
        assert (await store.branch(OWNER, chat.id, new_id())).line == ()
        assert await store.branch("another", chat.id, None) is None
        assert await store.earlier_attachments("another", chat.id, messages[-1].id) == []

    kept.run(work)


def test_page_reads_only_shown_messages(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(store: Any) -> None:
        chat, messages = a_chat(), list[StoredMessage]()
        for number in range(2000):
            role: Any = "user" if number % 2 == 0 else "assistant"
            message = replace(an_answer(chat), role=role, state="done", parent_id=messages[-1].id if messages else None)
            messages.append(replace(message, generation_id=message.generation_id if role == "assistant" else None))
        await store.add_chat(OWNER, chat, messages)
        read: list[str] = []
        plain = shown_part.message_from_row
        monkeypatch.setattr(shown_part, "message_from_row", lambda row: (read.append(row["id"]), plain(row))[1])
        page = await store.shown_chat(OWNER, chat.id, 40)
        assert (len(page.path), page.earlier, len(read)) == (40, 1960, 40)
        read.clear()
        page = await store.shown_before(OWNER, chat.id, page.path[0].message.id, 40)
        assert (len(page.path), page.earlier, len(read)) == (40, 1920, 40)
        read.clear()
        for first, count in (
            (messages[1500], 500),
            (messages[-MOST_SHOWN], MOST_SHOWN),
            (messages[-MOST_SHOWN - 1], 40),
        ):
            read.clear()
            page = await store.shown_chat(OWNER, chat.id, 40, through=first.id, first=first.id)
            assert (len(page.path), page.earlier, len(read)) == (count, 2000 - count, count)

    kept.run(work)


def test_page_reads_limited_characters_in_whole_turns(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tree, "MOST_SHOWN_CHARACTERS", 100_000)

    async def work(store: Any) -> None:
        chat, messages = a_chat(), list[StoredMessage]()
        for number in range(300):
            role: Any = "user" if number % 2 == 0 else "assistant"
            message = replace(an_answer(chat), role=role, state="done", parent_id=messages[-1].id if messages else None)
            text = "" if role == "user" else "x" * (300_000 if number == 201 else 15_000)
            name = message.generation_id if role == "assistant" else None
            messages.append(replace(message, content=text, reasoning=text, generation_id=name))
        await store.add_chat(OWNER, chat, messages)
        read: list[str] = []
        plain = shown_part.message_from_row
        monkeypatch.setattr(shown_part, "message_from_row", lambda row: (read.append(row["id"]), plain(row))[1])
        for limit, first in ((40, None), (MOST_SHOWN, None), (40, messages[0].id)):
            read.clear()
            page = await store.shown_chat(OWNER, chat.id, limit, first=first)
            assert (len(page.path), page.earlier, len(read)) == (6, 294, 6)
        found = [each.message.id for each in page.path]
        sizes = set[int]()
        while page.earlier:
            read.clear()
            page = await store.shown_before(OWNER, chat.id, found[0], MOST_SHOWN)
            found[:0] = [each.message.id for each in page.path]
            assert page.path[0].message.role == "user" and page.earlier == 300 - len(found)
            assert len(read) == len(page.path)
            sizes.add(len(read))
        assert found == [each.id for each in messages] and sizes == {2, 6}
        whole = await store.chat_snapshot(OWNER, chat.id)
        path, earlier = tree.branch_end(shown_path(whole.messages, whole.chat.chosen_root), MOST_SHOWN)
        assert (len(path), earlier) == (6, 294)

    kept.run(work)


def test_large_import_is_interleaved_with_writes_and_visible_at_once(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    chats = large_chats()
    order: list[str] = []
    add_piece = tree_writes.add_piece

    def noted(db: Any, owner: str, piece: Any) -> None:
        order.append("piece")
        add_piece(db, owner, piece)

    async def work(store: Any) -> None:
        long = chats[0][0].id
        await store.add_chat("another", mine := a_chat(), [])
        monkeypatch.setattr(tree_writes, "add_piece", noted)
        adding = asyncio.create_task(store.add_chats(OWNER, chats))
        others = [asyncio.create_task(store.write(lambda db: order.append("another"), "another")) for _ in range(3)]
        while not adding.done():
            seen = [await store.chat(OWNER, long), await store.chat_snapshot(OWNER, long)]
            seen += await store.search(OWNER, "needle", 5)
            seen += await store.chats(OWNER)
            assert not any(seen) or len(await store.chats(OWNER)) == len(chats), "readers see all chats or none"
        await asyncio.gather(adding, *others)
        assert order.count("piece") == 7
        assert "piece" in order[order.index("another") + 2 :], "the other owner waits for one piece, not for all"
        if kept.kind == "sqlite":  # SQLite has one writer, which alternates between owners
            assert order[:7] == ["piece", "another", "piece", "another", "piece", "another", "piece"]
        assert await store.update_chat("another", mine.id, pinned=True)
        assert {each.id for each in await store.chats(OWNER)} == {chat.id for chat, _ in chats}
        assert await store.messages(OWNER, long) == chats[0][1]
        assert await store.purge(0) == 0 == len(await store.documents.stale())

    kept.run(work)


def test_interrupted_import_is_never_visible_and_is_purged(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process or its connection ends after some pieces; the next start purges them."""
    chats = large_chats()
    written: list[int] = []
    add_piece = tree_writes.add_piece

    def failing(db: Any, owner: str, piece: Any) -> None:
        written.append(len(piece))
        if len(written) == 4:
            raise StorageError("the disk is not available")
        add_piece(db, owner, piece)

    async def begin(store: Any) -> None:
        monkeypatch.setattr(tree_writes, "add_piece", failing)
        with pytest.raises(StorageError, match="not available"):
            await store.add_chats(OWNER, chats)
        monkeypatch.setattr(tree_writes, "add_piece", add_piece)
        assert len(written) == 4 and await store.chats(OWNER) == []

    async def after(store: Any) -> None:
        assert await store.chats(OWNER) == []
        kept_of_it = "SELECT count(*) AS n FROM messages WHERE owner = ?"
        assert (await store.read(OWNER, kept_of_it, OWNER))[0]["n"] > 0
        assert await store.purge(0) == 1
        assert (await store.read(OWNER, kept_of_it, OWNER))[0]["n"] == 0
        assert await store.chats(OWNER) == [] and await store.search(OWNER, "needle", 5) == []

    kept.run(begin)
    kept.run(after)


def test_slow_import_renews_its_trash_id_and_fails_if_purged(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    chats = large_chats()
    monkeypatch.setattr(store_module, "RENEW_SECONDS", -1.0)
    names: list[str] = []
    renew = tree_writes.renew_trash_id
    monkeypatch.setattr(
        tree_writes, "renew_trash_id", lambda *all, **named: names.append(renew(*all, **named)) or names[-1]
    )

    async def work(store: Any) -> None:
        await store.add_chats(OWNER, chats)
        assert len(names) == len(set(names)) >= 3
        assert len(await store.chats(OWNER)) == len(chats)
        monkeypatch.setattr(store_module, "RENEW_SECONDS", 1e9)
        write, writes = store.write, list[str]()

        async def purged_before_the_third(work: Any, owner: str = "") -> Any:
            writes.append(owner)
            if writes.count("slow") == 3 and owner == "slow":
                assert await store.purge(0) == 1
            return await write(work, owner)

        monkeypatch.setattr(store, "write", purged_before_the_third)
        with pytest.raises(StorageError, match="try again"):
            await store.add_chats("slow", large_chats())
        monkeypatch.setattr(store, "write", write)
        await store.purge(0)
        assert await store.chats("slow") == []

    kept.run(work)


def test_deep_chat_is_purged_in_parts_interleaved_with_writes(kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    """SQLite's cascades delete at most 1,000 messages, and a single transaction would block other writers."""
    chats = large_chats(turns=700, small=1)
    order: list[str] = []
    purge_piece = tree_writes.purge_piece

    async def work(store: Any) -> None:
        def noted(db: Any, trash_id: str) -> bool:
            if order.count("piece") == 1:
                assert not tree_writes.restore(db, OWNER, trash_id), "a partly purged chat must not be restored"
            order.append("piece")
            return purge_piece(db, trash_id)

        await store.add_chats(OWNER, chats)
        await store.add_chat(OWNER, kept_chat := a_chat("kept"), [])
        await store.trash_chat(OWNER, chats[0][0].id)
        monkeypatch.setattr(tree_writes, "purge_piece", noted)
        purging = asyncio.create_task(store.purge(0))
        others = [asyncio.create_task(store.write(lambda db: order.append("another"), "another")) for _ in range(3)]
        await asyncio.gather(purging, *others)
        assert purging.result() == 1 and order.count("piece") == 8
        assert "piece" in order[order.index("another") + 2 :]
        words = ("indexed", "texts") if kept.kind == "sqlite" else ("indexed",)
        for table, count in ({"chats": 2, "messages": 0, "trash": 0} | dict.fromkeys(words, 2)).items():
            (row,) = await store.read("", f"SELECT count(*) AS n FROM {table}")
            assert row["n"] == count, table
        assert {each.id for each in await store.chats(OWNER)} == {chats[1][0].id, kept_chat.id}

    kept.run(work)


def test_messages_are_read_in_pieces(kept: Kept) -> None:
    [(chat, messages), *_] = large_chats()
    messages[7] = replace(messages[7], content="x" * (1 << 18))

    async def work(store: Any) -> None:
        await store.add_chat(OWNER, chat, messages)
        for shown_only in (False, True):
            pieces = [piece async for piece in store.message_chunks(OWNER, chat.id, shown=shown_only)]
            assert [each for piece in pieces for each in piece] == messages
            assert [len(piece) for piece in pieces[:4]] == [7, 1, 100, 100]
            assert [piece async for piece in store.message_chunks("other", chat.id, shown=shown_only)] == []
        reading = store.message_chunks(OWNER, chat.id)
        await anext(reading)
        await store.trash_messages(OWNER, chat.id, reset=False)
        assert [piece async for piece in reading] == [], "messages deleted during the read are missing"

    kept.run(work)
