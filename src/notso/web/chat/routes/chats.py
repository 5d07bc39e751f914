"""Routes for whole chats, for example to list, search, rename, delete or summarize them.

The page of all chats includes archived ones and offers actions on several chats at once.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime
from functools import partial
from typing import Any, NamedTuple, get_args
from urllib.parse import urlencode

from fastapi import APIRouter, Request, Response
from markupsafe import Markup, escape
from starlette.responses import RedirectResponse

from notso.web.chat.chat_view import read_branch, read_branch_if_any, read_shown_if_any
from notso.web.chat.services import ChatServices, Services, engine_and_registry
from notso.web.chat.submit import MAX_TITLE_CHARACTERS, add_summary, follow_up_request
from notso.web.chat.suggestions import MAX_TOKENS, REQUEST
from notso.web.chat.templates import is_fragment
from notso.web.chat.views import (
    Owner,
    done_response,
    find_chat,
    last_shown_id,
    list_context,
    oldest_shown_id,
    parse_count,
    redirect_to,
    render_branch,
    render_new_turn,
    render_page,
    render_turns,
    request_tab,
    sidebar_context,
    sync_context,
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
"""Action -> key of the text that reports it."""


@archive_router.get("/archive", dependencies=[GUARDED])
async def show_archive(
    request: Request,
    services: Services,
    owner: Owner,
    page: str = "",
    sort: str = "",
    q: str = "",
    did: str = "",
    count: str = "",
    undo: str = "",
) -> Response:
    """Show a page of the list of all chats."""
    # After a redirect, `did`, `count` and `undo` describe the last action.
    toast = None
    if did in ACTIONS and (number := parse_count(count, -1)) >= 0:
        undo_url = f"/archive/undo/{undo}" if is_generation_id(undo) else ""
        toast = {"text": words[ACTIONS[did]].format(count=number), "undo_url": undo_url}
    return await _page(request, services, owner, _Place(page, sort, q), toast=toast)


@archive_router.post("/archive", dependencies=[GUARDED])
async def update_selected(request: Request, services: Services, owner: Owner) -> Response:
    """Archive, unarchive or delete the selected chats."""
    fields = await read_form(request, most=MOST_CHOSEN)
    action = fields.get("action", "")
    chosen = [name.removeprefix("chat-") for name in fields if name.startswith("chat-")]
    if action not in ACTIONS or not all(map(is_id, chosen)):
        raise Problem(400, words["error_form"])
    if not chosen:
        return await _page(request, services, owner, _place_from_form(fields), problem=words["archive_none"])
    done, undo = 0, None
    if action == "delete":
        for chat_id in chosen:
            services.turns.stop_chat(owner, chat_id)
        undo, done = await services.shared.store.trash_chats(owner, chosen)
    else:
        for chat_id in chosen:
            done += await services.shared.store.update_chat(owner, chat_id, archived=action == "archive")
    for chat_id in chosen:
        services.feed.announce(owner, chat_id, request_tab(request), turns=action == "delete")
    place = _place_from_form(fields)
    title = place.title[:MAX_FILTER_CHARACTERS]
    shown = {
        "q": title,
        "sort": place.sort[:20],
        "page": place.page[:9],
        "did": action,
        "count": done,
        "undo": undo or "",
    }
    return redirect_to(request, f"/archive?{urlencode(shown)}")


@archive_router.post("/archive/undo/{trash_id}", dependencies=[GUARDED])
async def undo_selected(request: Request, services: Services, owner: Owner, trash_id: str) -> Response:
    await read_form(request)
    await _restore(services, owner, trash_id)
    return redirect_to(request, "/archive")


@archive_router.post("/chats/{chat_id}/archive", dependencies=[GUARDED])
async def archive(request: Request, services: Services, owner: Owner, chat_id: str) -> Response:
    chat = await find_chat(services, owner, chat_id)
    current = (await read_form(request)).get("current", chat.id)
    await services.shared.store.update_chat(owner, chat.id, archived=True)
    services.feed.announce(owner, chat.id, request_tab(request), turns=False)
    return redirect_to(request, "/") if current == chat.id else done_response(request, "/")


class _Place(NamedTuple):
    page: str = ""
    sort: str = ""
    title: str = ""


def _place_from_form(fields: Mapping[str, str]) -> _Place:
    return _Place(fields.get("page", ""), fields.get("sort", ""), fields.get("filter", ""))


async def _page(
    request: Request,
    services: ChatServices,
    owner: str,
    place: _Place,
    *,
    problem: str = "",
    toast: dict[str, Any] | None = None,
) -> Response:
    number = parse_count(place.page, 0)
    order: ChatOrder = place.sort if place.sort in ORDERS else "-used"  # type: ignore[assignment]
    title = place.title.strip()[:MAX_FILTER_CHARACTERS]
    found, has_more = await services.shared.store.chat_rows(
        owner, PAGE_CHATS, skip=number * PAGE_CHATS, order=order, title=title
    )
    sidebar = await sidebar_context(services, owner)
    shown: dict[str, Any] = {"page": number, "sorted_by": order, "query": title, "has_more": has_more}
    shown |= {"problem": problem, "toast": toast}
    return await services.pages.respond(
        request, "archive.html", 400 if problem else 200, **(sidebar | {"rows": found} | shown)
    )


router = APIRouter()

MAX_HITS, MOST_HITS = 40, 1000  # number of search results shown at first, and maximum number
MAX_QUERY_CHARACTERS = 200
_MARKS = re.compile(r"\*\*|__|~~|`+|^#{1,6} ", re.MULTILINE)
"""Markdown syntax, removed from search hits, which are shown as plain text."""


@router.get("/chats", dependencies=[GUARDED])
async def list_chats(
    request: Request, services: Services, owner: Owner, current: str = "", count: str = ""
) -> Response:
    """Show the first `count` chats in the sidebar. `current` is the id of the open chat."""
    if not is_fragment(request):
        return RedirectResponse("/", 303)
    chat = await services.shared.store.chat(owner, current) if is_id(current) else None
    listed = await list_context(services, owner, chat, count)
    return await services.pages.respond(request, "_chat_list.html", **listed, chat=chat, part=True)


@router.get("/search", dependencies=[GUARDED])
async def search(request: Request, services: Services, owner: Owner, q: str = "", count: str = "") -> Response:
    query = q[:MAX_QUERY_CHARACTERS]
    limit = min(parse_count(count, MAX_HITS), MOST_HITS)
    found = await services.shared.store.search(owner, query, limit + 1)
    shown = found[:limit]
    more = min(limit + 4 * MAX_HITS, MOST_HITS) if len(found) > limit and limit < MOST_HITS else 0
    return await render_page(
        request,
        services,
        owner,
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
async def show_turns(request: Request, services: Services, owner: Owner, chat_id: str) -> Response:
    """Show a chat's messages again after a change in another tab."""
    revision = services.feed.revision
    view = await read_shown_if_any(services, owner, chat_id, first=oldest_shown_id(request))
    if view is not None:
        return await render_turns(request, services, owner, view)
    if is_fragment(request):
        gone: dict[str, Any] = {
            "problem": words["error_unknown_chat"],
            "answering": None,
            "key": new_id(),
            "last_user_message": "",
        }
        # The page keeps the chat's id, because undo in another tab may restore the chat.
        gone |= sync_context(request, revision) | {"chat": {"id": chat_id}}
        return await services.pages.respond(request, "_gone.html", 404, **gone)
    raise Problem(404, words["error_unknown_chat"])


@router.post("/chats/{chat_id}/title", dependencies=[GUARDED])
async def rename(request: Request, services: Services, owner: Owner, chat_id: str) -> Response:
    chat = await find_chat(services, owner, chat_id)
    title = " ".join((await read_form(request)).get("title", "").split())
    if not 1 <= len(title) <= MAX_TITLE_CHARACTERS:
        raise Problem(400, words["error_title"].format(limit=MAX_TITLE_CHARACTERS))
    await services.shared.store.update_chat(owner, chat.id, title=title)
    services.feed.announce(owner, chat.id, request_tab(request), turns=False)
    return done_response(request, f"/chats/{chat.id}")


@router.post("/chats/{chat_id}/pin", dependencies=[GUARDED])
async def pin(request: Request, services: Services, owner: Owner, chat_id: str) -> Response:
    chat = await find_chat(services, owner, chat_id)
    pinned = (await read_form(request)).get("pinned") == "on"
    await services.shared.store.update_chat(owner, chat.id, pinned=pinned)
    services.feed.announce(owner, chat.id, request_tab(request), turns=False)
    return done_response(request, f"/chats/{chat.id}")


@router.post("/chats/{chat_id}/keep", dependencies=[GUARDED])
async def make_permanent(request: Request, services: Services, owner: Owner, chat_id: str) -> Response:
    chat = await find_chat(services, owner, chat_id)
    await read_form(request)
    await services.shared.store.update_chat(owner, chat.id, temporary=False)
    services.feed.announce(owner, chat.id, request_tab(request), turns=False)
    return redirect_to(request, f"/chats/{chat.id}")


@router.post("/chats/{chat_id}/delete", dependencies=[GUARDED])
async def delete(request: Request, services: Services, owner: Owner, chat_id: str) -> Response:
    # The chat can be restored from the trash for a short time.
    chat = await find_chat(services, owner, chat_id)
    fields = await read_form(request)
    current = fields.get("current", chat.id)
    services.turns.stop_chat(owner, chat.id)
    trash_id = await services.shared.store.trash_chat(owner, chat.id)
    if trash_id is None:
        raise Problem(404, words["error_unknown_chat"])  # another tab has deleted it
    services.feed.announce(owner, chat.id, request_tab(request))
    if not is_fragment(request) or current == chat.id:
        return redirect_to(request, f"/?undo={trash_id}")
    shown = await services.shared.store.chat(owner, current) if is_id(current) else None  # the open chat
    listed = await list_context(services, owner, shown, fields.get("count", ""))
    toast = {"text": words["toast_deleted"], "undo_url": f"/undo/{trash_id}"}
    return await services.pages.respond(request, "_chat_list.html", **listed, chat=shown, toast=toast, in_place=True)


@router.post("/chats/{chat_id}/clear", dependencies=[GUARDED])
@router.post("/chats/{chat_id}/reset", dependencies=[GUARDED])
async def clear(request: Request, services: Services, owner: Owner, chat_id: str) -> Response:
    """Delete a chat's messages; /reset also resets the chat's settings."""
    chat = await find_chat(services, owner, chat_id)
    await read_form(request)
    services.turns.stop_chat(owner, chat.id)
    reset = request.url.path.endswith("/reset")
    trash_id = await services.shared.store.trash_messages(owner, chat.id, reset=reset)
    if trash_id is None:
        raise Problem(404, words["error_unknown_chat"])
    toast = {"text": words["toast_cleared"], "undo_url": f"/undo/{trash_id}"}
    return await render_branch(request, services, owner, chat_id, toast=toast)


@router.post("/undo/{trash_id}", dependencies=[GUARDED])
async def undo(request: Request, services: Services, owner: Owner, trash_id: str) -> Response:
    await read_form(request)
    restored = await _restore(services, owner, trash_id)
    return redirect_to(request, f"/chats/{restored[0]}")


async def _restore(services: ChatServices, owner: str, trash_id: str) -> list[str]:
    restored = await services.shared.store.restore(owner, trash_id) if is_generation_id(trash_id) else []
    if not restored:
        raise Problem(404, words["error_too_late"])
    for chat_id in restored:
        services.feed.announce(owner, chat_id, "")
    return restored


@router.post("/chats/{chat_id}/summarize", dependencies=[USES_MODEL])
async def summarize(request: Request, services: Services, owner: Owner, chat_id: str) -> Response:
    fields = await read_form(request)
    view = await read_branch(services, owner, chat_id, last_shown_id(request, fields))
    accepted, view = await add_summary(services, owner, view, fields)
    return await render_new_turn(request, services, owner, view, accepted)


@router.get("/chats/{chat_id}/suggestions", dependencies=[GUARDED])
async def suggestions(request: Request, services: Services, owner: Owner, chat_id: str) -> Response:
    # A missing branch is not an error: the chat may have been deleted or continued in the meantime.
    view = await read_branch_if_any(services, owner, chat_id, last_shown_id(request))
    if view is None or not view.line or not view.settings.suggestions:
        return Response(status_code=204)
    last = view.line[-1]
    if last.role != "assistant" or last.state != "done" or last.kind != "turn":
        return Response(status_code=204)
    engine, choice = await engine_if_loaded(*engine_and_registry(services), view.settings.model)
    if engine is None:  # do not load a model only for suggestions
        return Response(status_code=204)
    params = replace(view.settings.sampling, max_tokens=MAX_TOKENS, thinking_budget=0)
    build_request = partial(follow_up_request, services, owner, view, choice, REQUEST, params)
    found = await services.suggestions.suggest(last, build_request)
    if not found:
        return Response(status_code=204)
    return await services.pages.respond(request, "_suggestions.html", found=found, chat=view.chat, last_id=last.id)


def _highlight(snippet: str) -> Markup:
    text = str(escape(_MARKS.sub("", snippet))).replace(HIT_BEGINS, "<mark>").replace(HIT_ENDS, "</mark>")
    return Markup(text)  # safe: the text is escaped before the <mark> tags are inserted
