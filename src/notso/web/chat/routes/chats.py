"""Routes for whole chats, for example to list, search, rename, delete or summarize them.

The page of all chats includes archived ones and offers actions on several chats at once.
"""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Annotated, Any, NamedTuple, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Query, Response
from markupsafe import Markup, escape
from starlette.responses import RedirectResponse

from notso.web.chat.chat_view import read_branch, read_shown, require
from notso.web.chat.services import engine_and_registry
from notso.web.chat.submit import MAX_TITLE_CHARACTERS, add_summary, follow_up_request
from notso.web.chat.suggestions import MAX_TOKENS, REQUEST
from notso.web.chat.views import (
    Fields,
    FoundChat,
    Page,
    PageRequest,
    last_shown_id,
    list_context,
    oldest_shown_id,
    parse_count,
    render_branch,
    render_new_turn,
    render_page,
    render_turns,
)
from notso.web.edge.access import GUARDED, USES_MODEL
from notso.web.edge.forms import read_form
from notso.web.engine.model_names import engine_if_loaded
from notso.web.store.protocol import HIT_BEGINS, HIT_ENDS, ChatOrder, SearchHit
from notso.web.values.errors import Problem
from notso.web.values.ids import is_generation_id, is_id, new_id
from notso.web.values.wording import words

archive_router = APIRouter()

PAGE_CHATS = 200
MOST_CHOSEN = 2000
MAX_FILTER_CHARACTERS = 200
ORDERS = get_args(ChatOrder)
ACTIONS = {"archive": "toast_archived", "unarchive": "toast_unarchived", "delete": "toast_deleted_many"}
"""Action -> key of the text that reports its success."""


@archive_router.get("/archive", dependencies=[GUARDED])
async def show_archive(
    page: Page,
    number: Annotated[str, Query(alias="page")] = "",
    sort: str = "",
    q: str = "",
    did: str = "",
    count: str = "",
    undo: str = "",
) -> Response:
    """Show a page of the list of all chats."""
    # After a redirect, `did`, `count` and `undo` describe the last action.
    toast = None
    if did in ACTIONS and (done := parse_count(count, -1)) >= 0:
        undo_url = f"/archive/undo/{undo}" if is_generation_id(undo) else ""
        toast = {"text": words[ACTIONS[did]].format(count=done), "undo_url": undo_url}
    return await _respond(page, _Place(number, sort, q), toast=toast)


@archive_router.post("/archive", dependencies=[GUARDED])
async def update_selected(page: Page) -> Response:
    """Archive, unarchive or delete the selected chats."""
    fields = await read_form(page.request, most=MOST_CHOSEN)
    action = fields.get("action", "")
    chosen = [name.removeprefix("chat-") for name in fields if name.startswith("chat-")]
    if action not in ACTIONS or not all(map(is_id, chosen)):
        raise Problem(400, words["error_form"])
    place = _Place(fields.get("page", ""), fields.get("sort", ""), fields.get("filter", ""))
    if not chosen:
        return await _respond(page, place, problem=words["archive_none"])
    done, undo = 0, None
    if action == "delete":
        with page.services.turns.stopping(page.owner, *chosen):
            undo, done = await page.store.trash_chats(page.owner, chosen)
    else:
        for chat_id in chosen:
            done += await page.store.update_chat(page.owner, chat_id, archived=action == "archive")
    for chat_id in chosen:
        page.announce(chat_id, turns=action == "delete")
    shown = {
        "q": place.title[:MAX_FILTER_CHARACTERS],
        "sort": place.sort[:20],
        "page": place.page[:9],
        "did": action,
        "count": done,
        "undo": undo or "",
    }
    return page.redirect(f"/archive?{urlencode(shown)}")


@archive_router.post("/archive/undo/{trash_id}", dependencies=[GUARDED])
async def undo_selected(page: Page, _: Fields, trash_id: str) -> Response:
    await _restore(page, trash_id)
    return page.redirect("/archive")


@archive_router.post("/chats/{chat_id}/archive", dependencies=[GUARDED])
async def archive(page: Page, chat: FoundChat, fields: Fields) -> Response:
    await page.store.update_chat(page.owner, chat.id, archived=True)
    page.announce(chat.id)
    return page.redirect("/") if fields.get("current", chat.id) == chat.id else page.done("/")


class _Place(NamedTuple):
    page: str
    sort: str
    title: str


async def _respond(
    page: PageRequest, place: _Place, *, problem: str = "", toast: dict[str, Any] | None = None
) -> Response:
    number = parse_count(place.page, 0)
    order: ChatOrder = place.sort if place.sort in ORDERS else "-used"  # type: ignore[assignment]
    title = place.title.strip()[:MAX_FILTER_CHARACTERS]
    rows, has_more = await page.store.chat_rows(
        page.owner, PAGE_CHATS, skip=number * PAGE_CHATS, order=order, title=title
    )
    return await page.respond_with_sidebar(
        "archive.html",
        400 if problem else 200,
        rows=rows,
        page=number,
        sorted_by=order,
        query=title,
        has_more=has_more,
        problem=problem,
        toast=toast,
    )


router = APIRouter()

MAX_HITS, MOST_HITS = 40, 1000  # number of search results shown at first, and maximum number
MAX_QUERY_CHARACTERS = 200
_MARKS = re.compile(r"\*\*|__|~~|`+|^#{1,6} ", re.MULTILINE)
"""Markdown syntax to remove from search hits, which are shown as plain text."""


@router.get("/chats", dependencies=[GUARDED])
async def list_chats(page: Page, current: str = "", count: str = "") -> Response:
    """Show the first `count` chats in the sidebar. `current` is the id of the open chat."""
    if not page.is_fragment:
        return RedirectResponse("/", 303)
    chat = await page.store.chat(page.owner, current) if is_id(current) else None
    return await page.respond("_chat_list.html", **await list_context(page, chat, count), chat=chat, part=True)


@router.get("/search", dependencies=[GUARDED])
async def search(page: Page, q: str = "", count: str = "") -> Response:
    query = q[:MAX_QUERY_CHARACTERS]
    limit = min(parse_count(count, MAX_HITS), MOST_HITS)
    found = await page.store.search(page.owner, query, limit + 1)
    shown = found[:limit]
    more = min(limit + 4 * MAX_HITS, MOST_HITS) if len(found) > limit and limit < MOST_HITS else 0
    return await render_page(
        page,
        "search.html",
        groups=_group_by_chat(shown),
        query=query,
        more_hits=more,
        cut=len(found) > limit and not more,
        similar=any(hit.similar for hit in shown),
    )


def _group_by_chat(hits: list[SearchHit]) -> list[dict[str, Any]]:
    groups: dict[str, dict[str, Any]] = {}
    for hit in hits:
        group = groups.setdefault(
            hit.chat_id, {"chat_id": hit.chat_id, "title": hit.title, "day": _day(hit.at_ms), "messages": []}
        )
        if hit.message_id is None:
            group["title"] = _highlight(hit.snippet)
            continue
        word = hit.snippet.partition(HIT_BEGINS)[2].partition(HIT_ENDS)[0]
        group["messages"].append(
            {"id": hit.message_id, "marked": _highlight(hit.snippet), "word": word, "day": _day(hit.at_ms)}
        )
    return list(groups.values())


def _day(milliseconds: int) -> str:
    try:
        return datetime.fromtimestamp(milliseconds / 1000).date().isoformat() if milliseconds else ""
    except (ValueError, OverflowError, OSError):
        return ""


@router.get("/chats/{chat_id}/turns", dependencies=[GUARDED])
async def show_turns(page: Page, chat_id: str) -> Response:
    """Show a chat's messages again after a change in another tab."""
    revision = page.services.feed.revision
    try:
        view = await read_shown(page, chat_id, first=oldest_shown_id(page))
    except Problem as problem:
        if not page.is_fragment:
            raise
        return await page.respond(
            "_gone.html",
            404,
            problem=problem.sentence,
            answering=None,
            key=new_id(),
            last_user_message="",
            tab=page.tab,
            revision=revision,
            chat={"id": chat_id},  # the page keeps the chat's id, because undo in another tab may restore the chat
        )
    return await render_turns(page, view)


@router.post("/chats/{chat_id}/title", dependencies=[GUARDED])
async def rename(page: Page, chat: FoundChat, fields: Fields) -> Response:
    title = " ".join(fields.get("title", "").split())
    if not 1 <= len(title) <= MAX_TITLE_CHARACTERS:
        raise Problem(400, words["error_title"].format(limit=MAX_TITLE_CHARACTERS))
    await page.store.update_chat(page.owner, chat.id, title=title)
    page.announce(chat.id)
    return page.done(f"/chats/{chat.id}")


@router.post("/chats/{chat_id}/pin", dependencies=[GUARDED])
async def pin(page: Page, chat: FoundChat, fields: Fields) -> Response:
    await page.store.update_chat(page.owner, chat.id, pinned=fields.get("pinned") == "on")
    page.announce(chat.id)
    return page.done(f"/chats/{chat.id}")


@router.post("/chats/{chat_id}/keep", dependencies=[GUARDED])
async def make_permanent(page: Page, chat: FoundChat, _: Fields) -> Response:
    await page.store.update_chat(page.owner, chat.id, temporary=False)
    page.announce(chat.id)
    return page.redirect(f"/chats/{chat.id}")


@router.post("/chats/{chat_id}/delete", dependencies=[GUARDED])
async def delete(page: Page, chat: FoundChat, fields: Fields) -> Response:
    current = fields.get("current", chat.id)
    with page.services.turns.stopping(page.owner, chat.id):
        trash_id = require(await page.store.trash_chat(page.owner, chat.id), words["error_unknown_chat"])
    page.announce(chat.id, turns=True)
    if not page.is_fragment or current == chat.id:
        return page.redirect(f"/?undo={trash_id}")
    shown = await page.store.chat(page.owner, current) if is_id(current) else None
    listed = await list_context(page, shown, fields.get("count", ""))
    toast = {"text": words["toast_deleted"], "undo_url": f"/undo/{trash_id}"}
    return await page.respond("_chat_list.html", **listed, chat=shown, toast=toast, in_place=True)


@router.post("/chats/{chat_id}/clear", dependencies=[GUARDED])
@router.post("/chats/{chat_id}/reset", dependencies=[GUARDED])
async def clear(page: Page, chat: FoundChat, _: Fields) -> Response:
    """Delete a chat's messages; /reset also resets the chat's settings."""
    reset, turns = page.request.url.path.endswith("/reset"), page.services.turns
    try:
        found, unfinished = await page.store.trash_messages(page.owner, chat.id, reset=reset)
    except BaseException:  # the error may have occurred after the commit (see `Turns.stopping`)
        turns.stop_chat(page.owner, chat.id)
        raise
    for generation_id in unfinished:  # do not stop answers that another tab has started since then
        turns.stop(generation_id)
    trash_id = require(found, words["error_unknown_chat"])
    toast = {"text": words["toast_cleared"], "undo_url": f"/undo/{trash_id}"}
    return await render_branch(page, chat.id, toast=toast)


@router.post("/undo/{trash_id}", dependencies=[GUARDED])
async def undo(page: Page, _: Fields, trash_id: str) -> Response:
    restored = await _restore(page, trash_id)
    return page.redirect(f"/chats/{restored[0]}")


async def _restore(page: PageRequest, trash_id: str) -> list[str]:
    restored = await page.store.restore(page.owner, trash_id) if is_generation_id(trash_id) else []
    if not restored:
        raise Problem(404, words["error_too_late"])
    for chat_id in restored:
        page.services.feed.announce(page.owner, chat_id, "")
    return restored


@router.post("/chats/{chat_id}/summarize", dependencies=[USES_MODEL])
async def summarize(page: Page, fields: Fields, chat_id: str) -> Response:
    view = await read_branch(page, chat_id, last_shown_id(page, fields))
    accepted, view = await add_summary(page, view, fields)
    return await render_new_turn(page, view, accepted)


@router.get("/chats/{chat_id}/suggestions", dependencies=[GUARDED])
async def suggestions(page: Page, chat_id: str) -> Response:
    services, nothing, last_id = page.services, Response(status_code=204), last_shown_id(page)
    try:
        view = await read_branch(page, chat_id, last_id)
    except Problem:  # the chat was deleted or continued in the meantime
        return nothing
    last = view.line[-1] if view.line and view.settings.suggestions else None
    if last is None or (last.role, last.state, last.kind) != ("assistant", "done", "turn"):
        return nothing
    engine, choice = await engine_if_loaded(*engine_and_registry(services), view.settings.model)
    if engine is None:  # do not load a model only for suggestions
        return nothing
    params = replace(view.settings.sampling, max_tokens=MAX_TOKENS, thinking_budget=0)
    build_request = partial(follow_up_request, page, view, choice, REQUEST, params)
    found = await services.suggestions.suggest(last, build_request)
    if not found:
        return nothing
    return await page.respond("_suggestions.html", found=found, chat=view.chat, last_id=last.id)


def _highlight(snippet: str) -> Markup:
    text = str(escape(_MARKS.sub("", snippet))).replace(HIT_BEGINS, "<mark>").replace(HIT_ENDS, "</mark>")
    return Markup(text)  # safe: the text is escaped before the <mark> tags are inserted
