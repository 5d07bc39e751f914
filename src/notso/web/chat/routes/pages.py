"""The pages of the chat, sending, and watching an answer. Each works with and without a script in the browser."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Request, Response
from starlette.responses import RedirectResponse

from notso.web.chat.chat_view import (
    NEWEST_MESSAGES,
    ChatView,
    new_turn,
    read_above,
    read_branch,
    read_shown,
    read_shown_if_any,
)
from notso.web.chat.services import ChatServices, Services
from notso.web.chat.submit import ask, keeping, new_chat
from notso.web.chat.templates import is_fragment, reasoning_html
from notso.web.chat.views import (
    STARTS,
    Owner,
    announce,
    back,
    chat_page,
    details_context,
    find_chat,
    find_generation,
    last_shown,
    status_context,
    tab_of,
    to_page,
    turn_view,
)
from notso.web.edge.access import guarded
from notso.web.edge.forms import read_form
from notso.web.edge.open_streams import CountedStream
from notso.web.store.protocol import MOST_SHOWN, Chat, Shown, StoredMessage
from notso.web.turns.chat_settings import changed
from notso.web.turns.sse import both, feed_events, finished_log, last_number, turn_events
from notso.web.turns.turn_log import TurnLog
from notso.web.values.errors import StorageError
from notso.web.values.ids import is_generation_id, is_id
from notso.web.values.problems import Problem
from notso.web.values.wording import words

router = APIRouter(dependencies=[Depends(guarded)])


@router.get("/")
async def home(
    request: Request, services: Services, owner: Owner, undo: str = "", start: str = "", temporary: str = ""
) -> Response:
    """A greeting and an empty composer, or in it how a question may begin."""
    toast = {"text": words["toast_deleted"], "undo_url": f"/undo/{undo}"} if is_generation_id(undo) else None
    draft = words[f"start_{start}_text"] if start in STARTS else ""
    return await chat_page(request, services, owner, None, draft=draft, temporary=temporary == "on", toast=toast)


@router.post("/chats")
async def begin_chat(request: Request, services: Services, owner: Owner) -> Response:
    """The first message makes the chat."""
    fields = await read_form(request)
    chat = new_chat(fields.get("text", "") or fields.get("file-1-name", ""), thinking="thinking" in fields)
    chat = replace(chat, temporary="temporary" in fields)
    if fields.get("thinking_budget"):
        chat = replace(chat, settings=_with_field(chat, fields, "thinking_budget").settings)
    chat = _with_field(chat, fields, "system_prompt")
    revision = services.feed.revision
    with keeping(fields.get("text", "")):
        defaults = await services.shared.store.defaults(owner)
    view = ChatView(chat, defaults, revision)
    accepted, _ = await ask(services, owner, view, fields, is_new=True)
    services.feed.announce(owner, accepted.user_message.chat_id, tab_of(request))
    return to_page(request, f"/chats/{accepted.user_message.chat_id}")


@router.get("/chats/{chat_id}")
async def show_chat(
    request: Request, services: Services, owner: Owner, chat_id: str, at: str = "", undo: str = "", all: str = ""
) -> Response:
    """A chat with its messages; an unfinished answer attaches itself to its stream."""
    through, limit = at if is_id(at) else None, MOST_SHOWN if all == "on" else NEWEST_MESSAGES
    view = await read_shown(services, owner, chat_id, through=through, first=through, limit=limit)
    await _seen(services, owner, view.chat)
    toast = {"text": words["toast_cleared"], "undo_url": f"/undo/{undo}"} if is_generation_id(undo) else None
    return await chat_page(request, services, owner, view, toast=toast)


@router.get("/chats/{chat_id}/earlier")
async def show_earlier(request: Request, services: Services, owner: Owner, chat_id: str, before: str = "") -> Response:
    """The messages above one that a page begins with, some of them at a time."""
    view = await read_above(services, owner, chat_id, before)
    if not is_fragment(request):
        return RedirectResponse(f"/chats/{chat_id}", 303)
    raw = view.settings.raw_user_messages
    return await services.pages.respond(
        request,
        "_earlier.html",
        chat=view.chat,
        path=await services.kept_html.path(owner, view.path, user_messages=not raw),
        earlier=view.earlier,
        raw_user_messages=raw,
    )


@router.post("/chats/{chat_id}/messages")
async def send_message(request: Request, services: Services, owner: Owner, chat_id: str) -> Response:
    """Create a turn. Both bubbles come back once it is on disk; the answer's bubble attaches to the stream."""
    fields = await read_form(request)
    last = last_shown(request, fields)
    with keeping(fields.get("text", "")):
        view = await read_branch(services, owner, chat_id, last)
        view = replace(view, chat=await _with_toggle(services, owner, view.chat, fields))
        accepted, view = await ask(services, owner, view, fields, last=last)
        view = announce(request, services, owner, view)
        if not is_fragment(request):
            return RedirectResponse(f"/chats/{chat_id}", 303)
        shown = replace(await new_turn(services, owner, view, accepted), revision=view.revision)
    return await turn_view(request, services, owner, shown, shown.path, finished=False)


@router.post("/chats/{chat_id}/thinking")
async def set_thinking(request: Request, services: Services, owner: Owner, chat_id: str) -> Response:
    """The toggle beside the input, and its budget; they count from the next message."""
    chat = await find_chat(services, owner, chat_id)
    await _with_toggle(services, owner, chat, await read_form(request))
    return back(request, f"/chats/{chat.id}")


@router.post("/generations/{generation_id}/stop")
async def stop(request: Request, services: Services, owner: Owner, generation_id: str) -> Response:
    """Stop an answer; what it has said so far is kept. Stopping a finished one does nothing."""
    message = await find_generation(services, owner, generation_id)
    await read_form(request)
    services.turns.stop(generation_id)
    return back(request, f"/chats/{message.chat_id}")


@router.post("/generations/{generation_id}/answer-now")
async def answer_now(request: Request, services: Services, owner: Owner, generation_id: str) -> Response:
    """Let it think no further; the answer begins."""
    message = await find_generation(services, owner, generation_id)
    await read_form(request)
    services.turns.answer_now(generation_id)
    return back(request, f"/chats/{message.chat_id}")


async def attached(services: Services, owner: Owner, generation_id: str) -> tuple[StoredMessage, TurnLog]:
    """The answer and log behind a stream. Whatever can be refused is, before anything is rendered for it."""
    message = await find_generation(services, owner, generation_id)
    if services.turn_streams.full(owner):
        raise Problem(429, words["error_streams"], retry_after_seconds=5)
    turn = services.turns.find(generation_id)
    if turn is not None:
        return message, turn.log
    message = await find_generation(services, owner, generation_id)  # it may have ended between the two looks
    log = await services.relay.log_of(owner, message) if message.active else None
    if log is not None:
        return message, log
    [message] = await services.kept_html.messages(owner, [message])
    html = await asyncio.to_thread(lambda: (str(services.pages.answer_html(message)), str(reasoning_html(message))))
    return message, finished_log(message, *html)


@router.get("/generations/{generation_id}/events")
async def events(
    target: Annotated[tuple[StoredMessage, TurnLog], Depends(attached)],
    services: Services,
    owner: Owner,
    tab: str = "",
    after: str = "",
    last_event_id: Annotated[str | None, Header()] = None,
) -> CountedStream:
    """Attach to an answer: a snapshot or what came after Last-Event-ID, then the rest as it comes, then `done`.

    A page that says where it stands with `after` hears here what it hears from /feed while no answer comes.
    """
    message, log = target
    events = turn_events(message.id, log, last_number(last_event_id))
    if after:
        others = feed_events(services.feed, after, owner, message.chat_id, tab, numbered=False)
        events = both(events, others)
    return CountedStream(services.turn_streams, owner, events)


@router.get("/feed")
async def feed(
    services: Services,
    owner: Owner,
    chat: str = "",
    tab: str = "",
    after: str = "",
    last_event_id: Annotated[str | None, Header()] = None,
) -> CountedStream:
    """What other tabs do: `chats` when the list of chats changed, `turns` when this chat did."""
    shown = await services.shared.store.chat(owner, chat) if is_id(chat) else None
    if shown is not None:  # a short answer may have ended before its page was there to read it
        await _seen(services, owner, shown)
    events = feed_events(services.feed, last_event_id or after, owner, chat, tab)
    return CountedStream(services.page_streams, owner, events)


@router.get("/status")
async def status(request: Request, services: Services, owner: Owner, chat: str = "") -> Response:
    """What the status badge and the banner ask for while a model loads or is fetched, and until questions are answered.

    The badge's own words are left alone meanwhile: the stream of an answer on the page sets them.
    """
    view = await read_shown_if_any(services, owner, chat)
    context = status_context(services, view) | details_context(services, view.path if view is not None else [])
    context["polling"] = context["polling"] or services.turns.unfinished > 0
    where = f"/chats/{chat}" if is_id(chat) else ""
    return await services.pages.respond(request, "_status.html", **context, where=where)


@router.get("/status/details")
async def status_details(request: Request, services: Services, owner: Owner, chat: str = "") -> Response:
    """What stands behind the badge: asked for again and again for as long as a person looks at it."""
    path = await _path_if_any(services, owner, chat)
    context = status_context(services) | details_context(services, path)
    return await services.pages.respond(request, "_status_watch.html", **context, delay_ms=1000 if path else 3000)


async def _seen(services: ChatServices, owner: str, chat: Chat) -> None:
    if not chat.unread:
        return
    with contextlib.suppress(StorageError):  # it is shown anyhow
        await services.shared.store.set_unread(owner, chat.id, False)
        services.feed.announce(owner, chat.id, "", turns=False)


async def _path_if_any(services: ChatServices, owner: str, chat_id: str) -> list[Shown]:
    view = await read_shown_if_any(services, owner, chat_id)
    return view.path if view is not None else []


async def _with_toggle(services: ChatServices, owner: str, chat: Chat, fields: dict[str, str]) -> Chat:
    """The chat with the composer's own settings, stored where they changed."""
    if chat.thinking != ("thinking" in fields):
        chat = replace(chat, thinking="thinking" in fields)
        await services.shared.store.set_thinking(owner, chat.id, chat.thinking)
    with_budget = _with_field(chat, fields, "thinking_budget")
    if with_budget.settings != chat.settings:
        await services.shared.store.set_settings(owner, chat.id, with_budget.settings)
    return with_budget


def _with_field(chat: Chat, fields: dict[str, str], name: str) -> Chat:
    if name not in fields:
        return chat
    settings, problems = changed(chat.settings, {name: fields[name]})
    if problems:
        raise Problem(400, problems[name], draft=fields.get("text", ""))
    return replace(chat, settings=settings)
