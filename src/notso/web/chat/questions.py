"""From what a person typed to a stored turn in the engine's queue."""

from __future__ import annotations

import time
from dataclasses import replace
from datetime import date

from notso.web.chat.engine_port import Message
from notso.web.chat.turn import Turn
from notso.web.ids import is_id, new_generation_id, new_id
from notso.web.problems import Problem
from notso.web.state import State
from notso.web.store.protocol import Chat, NewTurn, StoredMessage, TurnAccepted
from notso.web.wording import words

MAX_TITLE_CHARACTERS = 120
TITLE_WIDTH = 48


async def ask(state: State, owner: str, chat: Chat, fields: dict[str, str], *, is_new: bool) -> TurnAccepted:
    """Store the question and start its answer; what comes back is on disk. Raises Problem, which keeps the text."""
    text = fields.get("text", "").strip("\n")
    try:
        _check_text(text, state.settings.max_message_characters)
        _check_admission(state)
        key = fields.get("key", "")
        if not is_id(key):
            raise Problem(400, words["error_form"])
        return await _store_and_start(state, owner, chat, text, key, is_new=is_new)
    except Problem as problem:
        problem.draft = text
        raise


def new_chat(first_text: str, *, thinking: bool) -> Chat:
    """A chat named after its first line. Its date is today's for good."""
    now = time.time_ns() // 1_000_000
    return Chat(new_id(), title_of(first_text), thinking, date.today(), now, now)


def title_of(text: str) -> str:
    """The first line that says something, cut at a word."""
    line = " ".join(next((line for line in text.splitlines() if line.strip()), "").split())
    if len(line) <= TITLE_WIDTH:
        return line or words["new_chat"]
    cut = line[:TITLE_WIDTH]
    return (cut.rpartition(" ")[0] if " " in cut[TITLE_WIDTH // 2 :] else cut) + "…"


def prompt_messages(history: list[StoredMessage], question: str) -> tuple[Message, ...]:
    """What the model reads: earlier questions and answers without their thoughts, then the question.

    A question that failed without a word of answer is left out: one that did not fit would make every later one fail.
    """
    answers = [*history[1:], None]
    earlier = [
        Message(message.role, message.content)
        for message, answer in zip(history, answers, strict=False)
        if message.content and not message.active and not _failed_empty(answer)
    ]
    return (*earlier, Message("user", question))


def _failed_empty(answer: StoredMessage | None) -> bool:
    return answer is not None and answer.role == "assistant" and answer.state == "failed" and not answer.content


async def _store_and_start(state: State, owner: str, chat: Chat, text: str, key: str, *, is_new: bool) -> TurnAccepted:
    history = [] if is_new else await state.store.messages(owner, chat.id)
    now = time.time_ns() // 1_000_000
    question = StoredMessage(new_id(), chat.id, "user", text, "", "done", now)
    answer = StoredMessage(new_id(), chat.id, "assistant", "", "", "queued", now, generation_id=new_generation_id())
    new_turn = NewTurn(question, answer, key)
    outcome = await state.store.add_turn(owner, new_turn, chat if is_new else None)
    if not isinstance(outcome, TurnAccepted) and outcome.running is not None:
        await _let_go_of_lost(state, outcome.running)
        outcome = await state.store.add_turn(owner, new_turn, chat if is_new else None)
    if not isinstance(outcome, TurnAccepted):
        if outcome.running is None:
            raise Problem(404, words["error_unknown_chat"])
        raise Problem(409, words["error_running"])
    if outcome.question.chat_id != chat.id and not is_new:
        raise Problem(400, words["error_form"])  # the key of another chat's message
    if not outcome.repeated:
        turn = Turn(answer, prompt_messages(history, text), thinking=chat.thinking, prompt_date=chat.prompt_date)
        state.turns.start(turn)
    return outcome


async def _let_go_of_lost(state: State, answer: StoredMessage) -> None:
    """A turn marked running that nobody runs (its last save failed) must not lock its chat for ever."""
    turn = state.turns.find(answer.generation_id or "")
    if turn is None:
        await state.store.save_answer(replace(answer, state="interrupted"))
    elif turn.log.finished:
        await state.store.save_answer(turn.answer)


def _check_text(text: str, limit: int) -> None:
    if not text.strip():
        raise Problem(400, words["error_empty"])
    if len(text) > limit:
        raise Problem(400, words["error_too_long"].format(length=f"{len(text):,}", limit=f"{limit:,}"))


def _check_admission(state: State) -> None:
    if state.stopping:
        raise Problem(503, words["error_stopping"], retry_after_seconds=15)
    if state.engine.state in ("failed", "stopped"):
        raise Problem(503, words["error_not_loaded"].format(reason=state.engine.failure))
    if state.turns.waiting >= state.settings.max_waiting_turns:
        raise Problem(429, words["error_busy"], retry_after_seconds=10)
