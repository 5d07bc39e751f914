"""The part of a chat's history that the prompt contains."""

from __future__ import annotations

from dataclasses import replace

from notso.web.store.protocol import Attachment, MessageState, StoredMessage, ToolUse
from notso.web.turns.chat_settings import ChatSettings
from notso.web.turns.prompt import SUMMARY_HEADING, prompt_messages


def stored(role: str, content: str, state: MessageState = "done") -> StoredMessage:
    return StoredMessage("id", "chat", role, content, "thoughts", state, 0)  # type: ignore[arg-type]


def read(*line: StoredMessage, system_prompt: str = "") -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in prompt_messages(line, ChatSettings(system_prompt))]


def test_question_whose_answer_failed_empty_is_left_out() -> None:
    assert read(
        stored("user", "hello"),
        stored("assistant", "Hello!"),
        stored("user", "a question that does not fit"),
        stored("assistant", "", "failed"),
        stored("user", "a question whose answer broke off"),
        stored("assistant", "It", "failed"),
        stored("user", "and now?"),
    ) == [
        *(("user", "hello"), ("assistant", "Hello!"), ("user", "a question whose answer broke off")),
        *(("assistant", "It"), ("user", "and now?")),
    ]


def test_tool_results_of_a_failed_question_are_left_out() -> None:
    failed = replace(
        stored("assistant", "", "failed"), tool_uses=(ToolUse("c", "clock", "{}", "done", result="x" * 8000),)
    )
    assert read(stored("user", "too much"), failed, stored("user", "and now?")) == [("user", "and now?")]


def test_stopped_answers_are_kept_unless_empty() -> None:
    assert read(
        stored("user", "a"),
        stored("assistant", "", "stopped"),
        stored("user", "b"),
        stored("assistant", "half", "stopped"),
        stored("user", "c"),
    ) == [("user", "a"), ("user", "b"), ("assistant", "half"), ("user", "c")]


def test_reasoning_is_left_out_of_prompt() -> None:
    messages = prompt_messages([stored("user", "a"), stored("assistant", "b"), stored("user", "c")], ChatSettings())
    assert all(message.reasoning_content is None for message in messages)


def test_first_question_is_the_whole_prompt() -> None:
    assert read(stored("user", "hello")) == [("user", "hello")]
    assert read(stored("user", "hello"), system_prompt=" \n") == [("user", "hello")]


def test_summary_replaces_earlier_messages() -> None:
    summary = replace(stored("assistant", "They met."), kind="summary")
    line = [stored("user", "a"), stored("assistant", "b"), summary, stored("user", "c")]
    heading = f"{SUMMARY_HEADING}\nThey met."
    assert read(*line) == [("system", heading), ("user", "c")]
    assert read(*line, system_prompt="Be brief.") == [("system", f"Be brief.\n\n{heading}"), ("user", "c")]
    newer = replace(summary, content="They parted.")
    assert read(*line, stored("assistant", "d"), newer, stored("user", "e")) == [
        *(("system", f"{SUMMARY_HEADING}\nThey parted."), ("user", "e"))
    ]


def test_stopped_summary_is_ignored() -> None:
    summary = replace(stored("assistant", "They"), kind="summary", state="stopped")
    line = [stored("user", "a"), stored("assistant", "b"), summary, stored("user", "c")]
    assert read(*line) == [("user", "a"), ("assistant", "b"), ("user", "c")]


def test_attachments_precede_the_question_with_their_names() -> None:
    files = (Attachment("a.txt", "one\ntwo"), Attachment("b.md", "# three"))
    (_, text), *_ = read(replace(stored("user", "Compare."), attachments=files))
    first, second = "--- a.txt ---\none\ntwo\n--- end of a.txt ---", "--- b.md ---\n# three\n--- end of b.md ---"
    assert text == f"{first}\n\n{second}\n\nCompare."
    (_, alone), *_ = read(replace(stored("user", ""), attachments=files[:1]))
    assert alone == first
