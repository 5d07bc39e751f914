"""Routes that serve chat pages and their assets, accept messages, and stream answers.

Pages and forms also work without JavaScript, but answers are then shown only after a reload.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Response
from starlette.responses import PlainTextResponse, RedirectResponse

from notso.web.chat.chat_view import (
    NEWEST_MESSAGES,
    ChatView,
    ShownView,
    read_branch,
    read_earlier,
    read_new_turn,
    read_shown,
)
from notso.web.chat.routes.documents import load_chosen_documents
from notso.web.chat.submit import finish_if_lost, keep_draft, new_chat, submit_question
from notso.web.chat.templates import reasoning_html
from notso.web.chat.views import (
    STARTS,
    Fields,
    FoundChat,
    FoundGeneration,
    Page,
    PageRequest,
    announce,
    details_context,
    find_generation,
    last_shown_id,
    messages_context,
    render_chat_page,
    render_turn,
    status_context,
)
from notso.web.edge.access import GUARDED, PUBLIC, USES_MODEL
from notso.web.edge.assets import FOREVER, accepts_gzip
from notso.web.edge.limits import CountedStream
from notso.web.store.protocol import MOST_SHOWN, Chat, StoredMessage
from notso.web.turns.chat_settings import updated_settings
from notso.web.turns.sse import feed_events, finished_log, merge_streams, parse_last_event_id, turn_events
from notso.web.turns.turn_log import TurnLog
from notso.web.values.errors import Problem, StorageError
from notso.web.values.ids import is_generation_id, is_id
from notso.web.values.wording import words

router = APIRouter()

Chosen = Annotated[Sequence[str], Query(max_length=100)]
"""Ids of documents to attach."""


@router.get("/static/{path:path}", dependencies=[PUBLIC])
async def static_file(page: Page, path: str) -> Response:
    asset = page.services.assets.by_path.get(path)
    if asset is None:
        return PlainTextResponse("Not found.\n", 404)
    # The address contains the file's digest, so the content at an address never changes.
    headers = {"Cache-Control": FOREVER, "Vary": "Accept-Encoding"}
    if accepts_gzip(page.request.headers):
        return Response(asset.packed, media_type=asset.media_type, headers=headers | {"Content-Encoding": "gzip"})
    return Response(asset.body, media_type=asset.media_type, headers=headers)


@router.get("/", dependencies=[GUARDED])
async def home(
    page: Page, document: Chosen = (), undo: str = "", start: str = "", temporary: str = "", project: str = ""
) -> Response:
    toast = {"text": words["toast_deleted"], "undo_url": f"/undo/{undo}"} if is_generation_id(undo) else None
    draft = words[f"start_{start}_text"] if start in STARTS else ""
    documents = await load_chosen_documents(page, document)
    chosen: dict[str, Any] = {"temporary": temporary == "on", "documents": documents, "project": project}
    return await render_chat_page(page, None, draft=draft, toast=toast, **chosen)


@router.post("/chats", dependencies=[USES_MODEL])
async def begin_chat(page: Page, fields: Fields) -> Response:
    chat = new_chat(fields.get("text", "") or fields.get("file-1-name", ""), thinking="thinking" in fields)
    chat = replace(chat, temporary="temporary" in fields, project=fields.get("project", ""))
    chat = _with_field(_with_field(chat, fields, "thinking_budget"), fields, "system_prompt")
    revision = page.services.feed.revision
    with keep_draft(fields.get("text", "")):
        base = await page.store.chat_base(page.owner, chat.project)
        if chat.project and base.project is None:
            raise Problem(404, words["error_unknown_project"])
    view = ChatView(chat, base, revision)
    accepted, _ = await submit_question(page, view, fields, is_new=True)
    page.announce(accepted.user_message.chat_id, turns=True)
    return page.redirect(f"/chats/{accepted.user_message.chat_id}")


@router.get("/chats/{chat_id}", dependencies=[GUARDED])
async def show_chat(
    page: Page, chat_id: str, document: Chosen = (), at: str = "", undo: str = "", all: str = ""
) -> Response:
    through, limit = at if is_id(at) else None, MOST_SHOWN if all == "on" else NEWEST_MESSAGES
    read = partial(read_shown, page, chat_id, through=through, first=through, limit=limit)
    view = await read()
    with contextlib.suppress(StorageError):  # show the chat even if an answer cannot be saved
        if any([await finish_if_lost(page, each.message) for each in view.path]):
            view = await read()
    await _mark_read(page, view.chat)
    toast = {"text": words["toast_cleared"], "undo_url": f"/undo/{undo}"} if is_generation_id(undo) else None
    documents = await load_chosen_documents(page, document)
    return await render_chat_page(page, view, documents=documents, toast=toast)


@router.get("/chats/{chat_id}/earlier", dependencies=[GUARDED])
async def show_earlier(page: Page, chat_id: str, before: str = "") -> Response:
    view = await read_earlier(page, chat_id, before)
    if not page.is_fragment:
        return RedirectResponse(f"/chats/{chat_id}", 303)
    context = await messages_context(page, view.path, view.settings)
    return await page.respond("_earlier.html", chat=view.chat, earlier=view.earlier, **context)


@router.post("/chats/{chat_id}/messages", dependencies=[USES_MODEL])
async def send_message(page: Page, fields: Fields, chat_id: str) -> Response:
    """Store a question and queue its answer."""
    last = last_shown_id(page, fields)
    with keep_draft(fields.get("text", "")):
        view = await read_branch(page, chat_id, last)
        view = replace(view, chat=await _save_thinking(page, view.chat, fields))
        accepted, view = await submit_question(page, view, fields, last=last)
        view = announce(page, view)
        if not page.is_fragment:
            return RedirectResponse(f"/chats/{chat_id}", 303)
        shown = replace(await read_new_turn(page, view, accepted), revision=view.revision)
    return await render_turn(page, shown, shown.path, finished=False)


@router.post("/chats/{chat_id}/thinking", dependencies=[GUARDED])
async def set_thinking(page: Page, chat: FoundChat, fields: Fields) -> Response:
    """Turn thinking on or off, and set the thinking budget."""
    await _save_thinking(page, chat, fields)
    return page.done(f"/chats/{chat.id}")


@router.post("/generations/{generation_id}/stop", dependencies=[GUARDED])
async def stop(page: Page, message: FoundGeneration, _: Fields, generation_id: str) -> Response:
    if not page.services.turns.stop(generation_id) and await finish_if_lost(page, message):
        page.services.feed.announce(page.owner, message.chat_id, "")
    return page.done(f"/chats/{message.chat_id}")


@router.post("/generations/{generation_id}/answer-now", dependencies=[GUARDED])
async def answer_now(page: Page, message: FoundGeneration, _: Fields, generation_id: str) -> Response:
    """End the reasoning of a running answer."""
    page.services.turns.answer_now(generation_id)
    return page.done(f"/chats/{message.chat_id}")


async def find_event_log(page: Page, message: FoundGeneration, generation_id: str) -> tuple[StoredMessage, TurnLog]:
    """Return an answer and its event log. Raises Problem (404, 429)."""
    services, owner = page.services, page.owner
    # Reject the request before anything is rendered for it.
    if services.turn_streams.full(owner):
        raise Problem(429, words["error_streams"], retry_after_seconds=5)
    await services.turns.begun(generation_id)
    turn = services.turns.find(generation_id)
    if turn is not None:
        return message, turn.log
    message = await find_generation(page, generation_id)  # again, because the turn may have ended
    log = await services.relay.log_of(owner, message) if message.active else None
    if log is not None:
        return message, log
    [message] = await services.html_cache.messages(owner, [message])
    html = await asyncio.to_thread(lambda: (str(services.pages.answer_html(message)), str(reasoning_html(message))))
    return message, finished_log(message, *html)


@router.get("/generations/{generation_id}/events", dependencies=[GUARDED])
async def events(
    target: Annotated[tuple[StoredMessage, TurnLog], Depends(find_event_log)],
    page: Page,
    tab: str = "",
    after: str = "",
    last_event_id: Annotated[str | None, Header()] = None,
) -> CountedStream:
    """Stream an answer as server-sent events: a snapshot (or the events after Last-Event-ID), updates, and `done`."""
    message, log = target
    events = turn_events(message.id, log, parse_last_event_id(last_event_id))
    # If `after` (a revision of the feed) is given, the stream also contains the events of /feed since then. This saves
    # the page a second connection.
    if after:
        feed_changes = feed_events(page.services.feed, after, page.owner, message.chat_id, tab, numbered=False)
        events = merge_streams(events, feed_changes)
    return CountedStream(page.services.turn_streams, page.owner, events)


@router.get("/feed", dependencies=[GUARDED])
async def feed(
    page: Page, chat: str = "", tab: str = "", after: str = "", last_event_id: Annotated[str | None, Header()] = None
) -> CountedStream:
    """Report changes as server-sent events. `chats`: the chat list has changed. `turns`: messages of `chat` were
    changed in another tab."""
    shown = await page.store.chat(page.owner, chat) if is_id(chat) else None
    if shown is not None:  # an answer that ended before the page connected may have marked the chat as unread
        await _mark_read(page, shown)
    events = feed_events(page.services.feed, last_event_id or after, page.owner, chat, tab)
    return CountedStream(page.services.page_streams, page.owner, events)


@router.get("/status", dependencies=[GUARDED])
async def status(page: Page, chat: str = "") -> Response:
    # The page polls this while a model is being loaded or downloaded, or an answer is running.
    services, view = page.services, await _read_shown_if_any(page, chat)
    context = status_context(services, view) | details_context(services, view.path if view is not None else [])
    # While an answer is running, the template omits the status label, which the answer's stream updates.
    context["polling"] = context["polling"] or services.turns.unfinished > 0
    where = f"/chats/{chat}" if is_id(chat) else ""
    return await page.respond("_status.html", **context, where=where)


@router.get("/status/details", dependencies=[GUARDED])
async def status_details(page: Page, chat: str = "") -> Response:
    view = await _read_shown_if_any(page, chat)
    path = view.path if view is not None else []
    context = status_context(page.services) | details_context(page.services, path)
    return await page.respond("_status_watch.html", **context, delay_ms=1000 if path else 3000)


async def _read_shown_if_any(page: PageRequest, chat_id: str) -> ShownView | None:
    with contextlib.suppress(Problem):
        return await read_shown(page, chat_id)
    return None


async def _mark_read(page: PageRequest, chat: Chat) -> None:
    if not chat.unread:
        return
    with contextlib.suppress(StorageError):  # show the chat even if its unread mark cannot be removed
        await page.store.update_chat(page.owner, chat.id, unread=False)
        page.services.feed.announce(page.owner, chat.id, "", turns=False)


async def _save_thinking(page: PageRequest, chat: Chat, fields: dict[str, str]) -> Chat:
    if chat.thinking != ("thinking" in fields):
        chat = replace(chat, thinking="thinking" in fields)
        await page.store.update_chat(page.owner, chat.id, thinking=chat.thinking)
    with_budget = _with_field(chat, fields, "thinking_budget")
    if with_budget.settings != chat.settings:
        budget = {"thinking_budget": fields["thinking_budget"]}
        await page.store.change_settings(page.owner, chat.id, lambda stored: updated_settings(stored, budget)[0])
    return with_budget


def _with_field(chat: Chat, fields: dict[str, str], name: str) -> Chat:
    # The page may be older than a change in the settings dialog, so an unchanged field must not undo that change.
    if name not in fields or fields[name] == fields.get(f"{name}_was"):
        return chat
    settings, problems = updated_settings(chat.settings, {name: fields[name]})
    if problems:
        raise Problem(400, problems[name], draft=fields.get("text", ""))
    return replace(chat, settings=settings)
