"""Training rows from chats: questions, shown answers, preferences, and nothing that was deleted or temporary."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say
from web.store.some_chats import OWNER, a_chat, a_turn, finished, run_with_store
from web.store.test_documents import added

from notso.cli.app import run_command_line
from notso.documents.citations import QUOTE_FIRST
from notso.documents.values import Document
from notso.web.chat.files.export import NO_THOUGHTS, conversation, preference_rows
from notso.web.store.documents import StoredDocument
from notso.web.store.protocol import Attachment, Chat, ChatDefaults, ChatSnapshot, NewTurn, StoredMessage, ToolUse
from notso.web.store.sqlite.store import SQLiteStore
from notso.web.values.ids import new_id

Start = Callable[..., Any]

CHAT = Chat("c", "title", thinking=False, prompt_date=date(2027, 5, 17), created_ms=0, updated_ms=0)


def user(name: str, text: str, parent: str | None = None, chosen: str | None = None) -> StoredMessage:
    return StoredMessage(name, "c", "user", text, "", "done", 0, parent_id=parent, chosen_child=chosen)


def assistant(name: str, text: str, parent: str, **changes: Any) -> StoredMessage:
    return replace(StoredMessage(name, "c", "assistant", text, "", "done", 0, parent_id=parent), **changes)


def whole(*messages: StoredMessage, **settings: Any) -> ChatSnapshot:
    return ChatSnapshot(replace(CHAT, settings=settings), ChatDefaults({"system_prompt": "Be brief."}), messages)


def said(row: Any) -> list[tuple[str, str]]:
    return [(each["role"], each["content"]) for each in row["messages"]]


def test_selected_branch_becomes_the_conversation_row() -> None:
    made = whole(
        user("1", "Hello", chosen="3"),
        assistant("2", "no", "1"),
        assistant("3", "Good day", "1"),
        user("4", "And now?", "3"),
        assistant("5", "Goodbye", "4"),
    )
    row = conversation(made)
    assert row == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Hello"},
            {"role": "assistant", "content": "Good day"},
            {"role": "user", "content": "And now?"},
            {"role": "assistant", "content": "Goodbye"},
        ],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    own = conversation(replace(made, chat=replace(CHAT, settings={"system_prompt": "Rhyme."})))
    assert own is not None and said(own)[0] == ("system", "Rhyme.")


def test_reasoning_is_written_in_think_tags_as_in_the_chat_template() -> None:
    """In a conversation with reasoning, each answer is marked as with or without it, as the chat template does."""
    row = conversation(
        whole(
            user("1", "2 + 2?"),
            assistant("2", "4", "1", reasoning="two and two"),
            user("3", "Thanks", "2"),
            assistant("4", "Welcome", "3"),
        )
    )
    assert row is not None and row["chat_template_kwargs"] == {"enable_thinking": True}
    assert said(row)[2] == ("assistant", "<think>\ntwo and two\n</think>\n4")
    assert said(row)[4] == ("assistant", f"{NO_THOUGHTS}Welcome")


def test_conversation_row_includes_tool_calls_and_attachments() -> None:
    use = ToolUse("id", "calculator", '{"x": "2*3"}', "done", result="6")
    row = conversation(
        whole(
            replace(user("1", "Work it out"), attachments=(Attachment("a.txt", "2*3"),)),
            assistant("2", "It is 6", "1", tool_uses=(use,)),
        )
    )
    assert row is not None
    question, call, result, answer = row["messages"][1:]
    assert "--- a.txt ---\n2*3" in question["content"]
    assert call["tool_calls"] == [{"type": "function", "function": {"name": "calculator", "arguments": {"x": "2*3"}}}]
    assert (result["role"], result["content"], answer["content"]) == ("tool", "6", "It is 6")
    deep = ('{"x":' * depth + "1" + "}" * depth for depth in (99, 9999))
    for text in ("{", '{"x": "\\ud83d"}', '{"x": 1e999}', *deep):
        uses = (replace(use, arguments=text),)
        broken = conversation(whole(user("1", "?"), assistant("2", "x", "1", tool_uses=uses)))
        assert broken is not None and broken["messages"][2]["tool_calls"][0]["function"]["arguments"] == text


@pytest.mark.parametrize("state", ["queued", "running", "stopped", "failed", "interrupted"])
def test_unfinished_answers_are_left_out_of_conversation_rows(state: Any) -> None:
    begun = user("1", "One"), assistant("2", "first", "1"), user("3", "Two", "2")
    row = conversation(whole(*begun, assistant("4", "secon", "3", state=state), user("5", "Three", "4")))
    assert row is not None and said(row)[-1] == ("assistant", "first")
    assert conversation(whole(user("1", "One"), assistant("2", "fir", "1", state=state))) is None


def test_summary_replaces_earlier_messages_in_conversation_row() -> None:
    row = conversation(
        whole(
            user("1", "A long story"),
            assistant("2", "I see", "1"),
            assistant("s", "They told a story.", "2", kind="summary"),
            user("3", "Go on", "s"),
            assistant("4", "Then", "3"),
        )
    )
    assert row is not None
    assert [role for role, _ in said(row)] == ["system", "user", "assistant"]
    assert "They told a story." in said(row)[0][1]


def test_selected_version_is_preferred_over_every_other_version() -> None:
    made = whole(
        user("0", "Hi"),
        assistant("00", "Hello", "0"),
        user("1", "Why?", "00", chosen="3"),
        assistant("2", "Because", "1"),
        assistant("3", "It is so", "1"),
        assistant("4", "half", "1", state="stopped"),
        assistant("5", "It is so", "1"),
        assistant("6", "Who knows", "1", reasoning="hm"),
    )
    pairs = list(preference_rows(made))
    assert [pair["rejected"][0]["content"] for pair in pairs] == ["Because", "<think>\nhm\n</think>\nWho knows"]
    assert [pair["chosen"][0]["content"] for pair in pairs] == ["It is so", f"{NO_THOUGHTS}It is so"]
    assert [pair["chat_template_kwargs"]["enable_thinking"] for pair in pairs] == [False, True]
    assert [each["content"] for each in pairs[0]["prompt"]] == ["Be brief.", "Hi", "Hello", "Why?"]


def test_edited_version_is_preferred_over_the_selected_one() -> None:
    made = whole(
        user("1", "Why?", chosen="3"),
        assistant("2", "Because of the wind", "1", edited=True),
        assistant("3", "Because", "1"),
    )
    (pair,) = preference_rows(made)
    assert pair["chosen"][0]["content"] == "Because of the wind" and pair["rejected"][0]["content"] == "Because"


def test_single_version_gives_no_preference_pair() -> None:
    assert not list(preference_rows(whole(user("1", "Why?"), assistant("2", "Because", "1", edited=True))))
    assert conversation(whole(user("1", "Why?"))) is None and conversation(whole()) is None


def test_dataset_rows_contain_documents_as_the_prompts_did(tmp_path: Path) -> None:
    """Documents of chats and projects appear in full if they fit, and otherwise as the passages that a search finds."""
    long = " ".join(f"Item {number} costs {number * 7} coins." for number in range(4_000))

    async def fill(store: Any) -> None:
        def asks(document: StoredDocument, text: str) -> NewTurn:
            turn = a_turn(chat, text)
            files = (Attachment(document.name, "", document.id),)
            return replace(turn, user_message=replace(turn.user_message, attachments=files))

        short = await added(store, "The heron stands in the reeds.", name="birds.txt")
        gone = await added(store, "Nobody reads this.", name="gone.txt")
        prices = await added(store, long, name="prices.txt")
        for document, text in ((short, "Where is it?"), (gone, "What?"), (prices, "What does item 2977 cost?")):
            chat = a_chat(text)
            await finished(store, asks(document, text), f"[[1: {text}]] Here.", chat)
        project = await store.documents.new_library(OWNER, "Zoo")
        assert await store.documents.change_library(
            OWNER, project.id, instructions="Feed them.", settings=lambda _: {"system_prompt": "Rhyme."}
        )
        inside = await store.documents.add(OWNER, project.id, "zoo.txt", b"zoo")
        await store.documents.claim(1)
        await store.documents.finish(inside.id, Document("text", "", "Lions roar.", (0,)))
        chat = replace(a_chat("in the project"), project=project.id)
        await finished(store, a_turn(chat, "Who roars?"), "Lions.", chat)
        assert await store.documents.delete(OWNER, gone.id)

    run_with_store(SQLiteStore(tmp_path / "data"), fill)
    out = tmp_path / "rows.jsonl"
    assert run_command_line(["dataset", str(out), "--data-dir", str(tmp_path / "data")]) == 0
    asked = {said(row)[-1][1]: "\n".join(text for role, text in said(row) if role != "assistant") for row in lines(out)}
    assert len(asked) == 4
    whole = asked["[[1: Where is it?]] Here."]
    assert whole.startswith("--- birds.txt ---\nThe heron stands in the reeds.\n--- end of birds.txt ---\n\nToday is ")
    assert whole.endswith(f"Where is it?\n\n{QUOTE_FIRST}")
    assert asked["[[1: What?]] Here."] == "What?", "a deleted document is left out"
    found = asked["[[1: What does item 2977 cost?]] Here."]
    assert "[prices.txt]\n" in found and f"Item 2977 costs {2977 * 7} coins." in found and len(found) < len(long) / 4
    project = asked["Lions."]
    assert project.startswith("--- zoo.txt ---\nLions roar.") and "Feed them." in project and "Rhyme." in project


def lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


def test_dataset_rows_from_server_and_data_folder_are_identical(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A running server and its stopped data folder give the same rows."""
    said_so_far = iter(["One", "Two", "Of the bin", "Of the moment"])
    server = start(ScriptedEngine(lambda messages, thinking: say(next(said_so_far), "hm" if thinking else ""))).ready()
    asked = server.ask("Count", thinking=False)
    server.finished(asked)
    url = f"/chats/{asked.chat_id}/messages/{asked.message_id}"
    server.client.post(f"{url}/regenerate", data={"key": new_id()})
    server.wait(lambda: server.chat.turns.unfinished == 0)
    assert server.client.post(f"{url}/edit", data={"text": "Eins"}).status_code < 400
    for text, act in (("thrown away", "delete"), ("soon gone", "")):
        other = server.ask(text, thinking=False)
        server.finished(other)
        if act:
            server.client.post(f"/chats/{other.chat_id}/{act}")
    out, pairs = tmp_path / "chats.jsonl", tmp_path / "pairs.jsonl"
    command = ["dataset", str(out), "--preferences", str(pairs)]
    assert run_command_line([*command, "--from", server.address]) == 0
    assert capsys.readouterr().out == f"{out} (2 conversations)\n{pairs} (1 pair)\n"
    assert out.stat().st_mode & 0o077 == 0 and pairs.stat().st_mode & 0o077 == 0
    rows, (pair,) = lines(out), lines(pairs)
    assert [row["messages"][0]["content"] for row in rows] == ["Count", "soon gone"]
    assert pair["chosen"] == [{"role": "assistant", "content": "Eins"}]
    assert pair["rejected"] == [{"role": "assistant", "content": "Two"}]
    assert run_command_line(command) != 0 and "already exists" in capsys.readouterr().err
    before = out.read_bytes(), pairs.read_bytes()
    server.close()
    assert run_command_line([*command, "--force", "--data-dir", str(tmp_path / "data")]) == 0
    assert (out.read_bytes(), pairs.read_bytes()) == before
    assert not list(tmp_path.glob("notso-dataset-*"))
