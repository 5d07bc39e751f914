"""The page of all chats, including archived ones, and actions on several of them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, get_args

from fastapi import APIRouter, Request, Response

from notso.web.chat.services import ChatServices, Services
from notso.web.chat.views import Owner, back, find_chat, sidebar_context, tab_of, to_page
from notso.web.edge.access import GUARDED
from notso.web.edge.forms import read_form
from notso.web.store.protocol import ChatOrder
from notso.web.values.errors import Problem
from notso.web.values.ids import is_id
from notso.web.values.wording import words

router = APIRouter()

PAGE_CHATS = 200
MOST_CHOSEN = 2000
MAX_FILTER_CHARACTERS = 200
ORDERS = get_args(ChatOrder)
ACTIONS = ("archive", "unarchive", "delete")


@router.get("/archive", dependencies=[GUARDED])
async def show_all(
    request: Request, services: Services, owner: Owner, page: str = "", sort: str = "", q: str = ""
) -> Response:
    return await _page(request, services, owner, _Place(page, sort, q))


@router.post("/archive", dependencies=[GUARDED])
async def change_many(request: Request, services: Services, owner: Owner) -> Response:
    """Archive, unarchive or delete the selected chats."""
    fields = await read_form(request, most=MOST_CHOSEN)
    action = fields.get("action", "")
    chosen = [name.removeprefix("chat-") for name in fields if name.startswith("chat-")]
    if action not in ACTIONS or not all(map(is_id, chosen)):
        raise Problem(400, words["error_form"])
    if not chosen:
        return await _page(request, services, owner, _place_in(fields), problem=words["archive_none"])
    thrown: list[str] = []
    done = 0
    for chat_id in chosen:
        if action == "delete":
            services.turns.stop_chat(owner, chat_id)
            trash_id = await services.shared.store.trash_chat(owner, chat_id)
            thrown += [trash_id] if trash_id is not None else []
            done += trash_id is not None
        else:
            done += await services.shared.store.update_chat(owner, chat_id, archived=action == "archive")
        services.feed.announce(owner, chat_id, tab_of(request), turns=action == "delete")
    name = {"archive": "toast_archived", "unarchive": "toast_unarchived", "delete": "toast_deleted_many"}[action]
    toast: dict[str, Any] = {"text": words[name].format(count=done), "undo_url": ""}
    if thrown:
        toast |= {"undo_url": "/undo", "undo_fields": thrown}
    return await _page(request, services, owner, _place_in(fields), toast=toast)


@router.post("/undo", dependencies=[GUARDED])
async def undo_many(request: Request, services: Services, owner: Owner) -> Response:
    fields = await read_form(request, most=MOST_CHOSEN)
    restored = [await services.shared.store.restore(owner, trash_id) for trash_id in fields if trash_id != "key"]
    if not any(restored):
        raise Problem(404, words["error_too_late"])
    for chat_id in filter(None, restored):
        services.feed.announce(owner, chat_id, "")
    return to_page(request, "/archive")


@router.post("/chats/{chat_id}/archive", dependencies=[GUARDED])
async def archive(request: Request, services: Services, owner: Owner, chat_id: str) -> Response:
    """Archive a chat; search still finds it."""
    chat = await find_chat(services, owner, chat_id)
    current = (await read_form(request)).get("current", chat.id)
    await services.shared.store.update_chat(owner, chat.id, archived=True)
    services.feed.announce(owner, chat.id, tab_of(request), turns=False)
    return to_page(request, "/") if current == chat.id else back(request, "/")


class _Place(NamedTuple):
    """The shown part of the table, as the request names it."""

    page: str = ""
    sort: str = ""
    title: str = ""


def _place_in(fields: Mapping[str, str]) -> _Place:
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
    number = int(place.page) if place.page.isdecimal() and len(place.page) < 9 else 0
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
