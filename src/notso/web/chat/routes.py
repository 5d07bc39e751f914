"""The pages of the chat and what their forms do. Each works with and without a script in the browser."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Request, Response
from fastapi.sse import EventSourceResponse
from starlette.responses import RedirectResponse

from notso.web.access import guarded, owner_of
from notso.web.chat.questions import MAX_TITLE_CHARACTERS, ask, new_chat
from notso.web.chat.stream import finished_log, last_number, turn_events
from notso.web.chat.turn_log import TurnLog
from notso.web.forms import read_form
from notso.web.ids import is_generation_id, is_id, new_id
from notso.web.pages import answer_html, is_fragment, reasoning_html
from notso.web.problems import Problem
from notso.web.state import State, state_of
from notso.web.store.protocol import Chat, StoredMessage
from notso.web.wording import words

router = APIRouter(dependencies=[Depends(guarded)])

Owner = Annotated[str, Depends(owner_of)]
Shared = Annotated[State, Depends(state_of)]


@router.get("/")
async def home(request: Request, state: Shared, owner: Owner) -> Response:
    """A greeting and an empty composer."""
    return await chat_page(request, state, owner, None)


@router.post("/chats")
async def begin_chat(request: Request, state: Shared, owner: Owner) -> Response:
    """The first message makes the chat."""
    fields = await read_form(request)
    chat = new_chat(fields.get("text", ""), thinking="thinking" in fields)
    accepted = await ask(state, owner, chat, fields, is_new=True)
    return RedirectResponse(f"/chats/{accepted.question.chat_id}", 303)


@router.get("/chats/{chat_id}")
async def show_chat(request: Request, state: Shared, owner: Owner, chat_id: str) -> Response:
    """A chat with all its messages; an unfinished answer attaches itself to its stream."""
    return await chat_page(request, state, owner, await _chat(state, owner, chat_id))


@router.post("/chats/{chat_id}/messages")
async def send_message(request: Request, state: Shared, owner: Owner, chat_id: str) -> Response:
    """Create a turn. Both bubbles come back once it is on disk; the answer's bubble attaches to the stream."""
    chat = await _chat(state, owner, chat_id)
    fields = await read_form(request)
    if chat.thinking != ("thinking" in fields):
        chat = replace(chat, thinking="thinking" in fields)
        await state.store.set_thinking(owner, chat.id, chat.thinking)
    accepted = await ask(state, owner, chat, fields, is_new=False)
    if not is_fragment(request):
        return RedirectResponse(f"/chats/{chat.id}", 303)
    messages = [accepted.question, accepted.answer]
    return await state.pages.respond(
        request, "_turn.html", **_composer(chat, messages), **_status(state), messages=messages
    )


@router.get("/chats/{chat_id}/messages/{message_id}")
async def show_message(request: Request, state: Shared, owner: Owner, chat_id: str, message_id: str) -> Response:
    """One message as it is now, with the composer's buttons to match: what a page fetches when a stream is done."""
    chat = await _chat(state, owner, chat_id)
    message = await state.store.message(owner, chat_id, message_id) if is_id(message_id) else None
    if message is None:
        raise Problem(404, words["error_unknown_page"])
    return await state.pages.respond(
        request, "_turn.html", **_composer(chat, [message]), **_status(state), messages=[message]
    )


@router.post("/chats/{chat_id}/thinking")
async def set_thinking(request: Request, state: Shared, owner: Owner, chat_id: str) -> Response:
    """The toggle beside the input; it counts from the next message."""
    chat = await _chat(state, owner, chat_id)
    fields = await read_form(request)
    await state.store.set_thinking(owner, chat.id, "thinking" in fields)
    return _back(request, f"/chats/{chat.id}")


@router.post("/chats/{chat_id}/title")
async def rename(request: Request, state: Shared, owner: Owner, chat_id: str) -> Response:
    """Rename a chat."""
    chat = await _chat(state, owner, chat_id)
    title = " ".join((await read_form(request)).get("title", "").split())
    if not 1 <= len(title) <= MAX_TITLE_CHARACTERS:
        raise Problem(400, words["error_title"].format(limit=MAX_TITLE_CHARACTERS))
    await state.store.set_title(owner, chat.id, title)
    return RedirectResponse(f"/chats/{chat.id}", 303)


@router.post("/chats/{chat_id}/delete")
async def delete(request: Request, state: Shared, owner: Owner, chat_id: str) -> Response:
    """Delete a chat with everything in it; a running answer stops first."""
    chat = await _chat(state, owner, chat_id)
    await read_form(request)
    state.turns.stop_chat(chat.id)
    await state.store.delete_chat(owner, chat.id)
    return RedirectResponse("/", 303)


@router.post("/generations/{generation_id}/stop")
async def stop(request: Request, state: Shared, owner: Owner, generation_id: str) -> Response:
    """Stop an answer; what it has said so far is kept. Stopping a finished one does nothing."""
    answer = await _generation(state, owner, generation_id)
    await read_form(request)
    state.turns.stop(generation_id)
    return _back(request, f"/chats/{answer.chat_id}")


async def attached(state: Shared, owner: Owner, generation_id: str) -> tuple[str, TurnLog]:
    """The message and log behind a stream. Everything that can be refused is refused here, before the first byte."""
    answer = await _generation(state, owner, generation_id)
    turn = state.turns.find(generation_id)
    if turn is not None:
        return answer.id, turn.log
    answer = await _generation(state, owner, generation_id)  # it may have ended between the two looks
    html = await asyncio.get_running_loop().run_in_executor(
        state.renderer, lambda: (str(answer_html(answer)), str(reasoning_html(answer)))
    )
    return answer.id, finished_log(answer, *html)


@router.get("/generations/{generation_id}/events")
async def events(
    target: Annotated[tuple[str, TurnLog], Depends(attached)],
    last_event_id: Annotated[str | None, Header()] = None,
) -> EventSourceResponse:
    """Attach to an answer: a snapshot or what came after Last-Event-ID, then the rest as it comes, then `done`."""
    events = turn_events(*target, last_number(last_event_id))
    return EventSourceResponse(events, headers={"X-Accel-Buffering": "no"})


@router.get("/status")
async def status(request: Request, state: Shared) -> Response:
    """What the status pill asks for while the model loads, and until the questions that waited for it are answered.

    The pill's own words are left alone meanwhile: the stream of an answer on the page sets them.
    """
    context = _status(state) | {"polling": state.engine.state == "loading" or state.turns.unfinished > 0}
    return await state.pages.respond(request, "_status.html", **context)


async def chat_page(
    request: Request,
    state: State,
    owner: str,
    chat: Chat | None,
    *,
    problem: Problem | None = None,
) -> Response:
    """The whole page of a chat, or of none yet; with `problem`, what went wrong and the text it kept."""
    messages = await state.store.messages(owner, chat.id) if chat is not None else []
    return await state.pages.respond(
        request,
        "chat.html",
        problem.status if problem else 200,
        **_composer(chat, messages),
        **_status(state),
        chats=await state.store.chats(owner),
        messages=messages,
        problem=problem.sentence if problem else "",
        draft=problem.draft if problem else "",
    )


def _composer(chat: Chat | None, messages: list[StoredMessage]) -> dict[str, Any]:
    answering = next((message for message in messages if message.active), None)
    return {"chat": chat, "answering": answering, "key": new_id(), "keys": [new_id() for _ in range(4)]}


def _status(state: State) -> dict[str, Any]:
    engine = state.engine
    polling = engine.state == "loading"
    return {"engine_state": engine.state, "info": engine.info, "failure": engine.failure, "polling": polling}


def _back(request: Request, address: str) -> Response:
    return Response(status_code=204) if is_fragment(request) else RedirectResponse(address, 303)


async def _chat(state: State, owner: str, chat_id: str) -> Chat:
    chat = await state.store.chat(owner, chat_id) if is_id(chat_id) else None
    if chat is None:
        raise Problem(404, words["error_unknown_chat"])
    return chat


async def _generation(state: State, owner: str, generation_id: str) -> StoredMessage:
    known = is_generation_id(generation_id)
    answer = await state.store.generation(owner, generation_id) if known else None
    if answer is None:
        raise Problem(404, words["error_unknown_page"])
    return answer
