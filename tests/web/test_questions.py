"""What of a chat's history the model reads."""

from __future__ import annotations

from notso.web.chat.questions import prompt_messages
from notso.web.store.protocol import MessageState, StoredMessage


def stored(role: str, content: str, state: MessageState = "done") -> StoredMessage:
    return StoredMessage("id", "chat", role, content, "", state, 0)  # type: ignore[arg-type]


def test_a_question_that_failed_without_an_answer_is_not_asked_again() -> None:
    history = [
        stored("user", "hello"),
        stored("assistant", "Hello!"),
        stored("user", "a question that does not fit"),
        stored("assistant", "", "failed"),
        stored("user", "a question whose answer broke off"),
        stored("assistant", "It", "failed"),
    ]
    read = [message.content for message in prompt_messages(history, "and now?")]
    assert read == ["hello", "Hello!", "a question whose answer broke off", "It", "and now?"]


def test_a_stopped_answer_without_a_word_leaves_its_question() -> None:
    history = [stored("user", "hello"), stored("assistant", "", "stopped")]
    assert [message.content for message in prompt_messages(history, "again")] == ["hello", "again"]


def test_a_new_chat_has_no_history() -> None:
    assert [message.content for message in prompt_messages([], "hello")] == ["hello"]
