"""The page of all chats, including archived ones, and actions on several of them."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request, Response

from notso.web.chat.services import ChatServices, Services
from notso.web.chat.views import Owner, find_chat, tab_of, to_page
from notso.web.edge.access import GUARDED
from notso.web.edge.forms import read_form
from notso.web.values.ids import is_id
from notso.web.values.problems import Problem
from notso.web.values.wording import words

router = APIRouter()

PAGE_CHATS = 200
MOST_CHOSEN = 2000
ACTIONS = ("archive", "unarchive", "delete")


@router.get("/archive", dependencies=[GUARDED])
async def show_all(request: Request, services: Services, owner: Owner, page: str = "") -> Response:
    return await _page(request, services, owner, page)


@router.post("/archive", dependencies=[GUARDED])
async def change_many(request: Request, services: Services, owner: Owner) -> Response:
    """Archive, unarchive or delete the selected chats."""
    fields = await read_form(request, most=MOST_CHOSEN)
    action = fields.get("action", "")
    chosen = [name.removeprefix("chat-") for name in fields if name.startswith("chat-")]
    if action not in ACTIONS or not all(map(is_id, chosen)):
        raise Problem(400, words["error_form"])
    if not chosen:
        return await _page(request, services, owner, fields.get("page", ""), problem=words["archive_none"])
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
    return await _page(request, services, owner, fields.get("page", ""), toast=toast)


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
    await read_form(request)
    await services.shared.store.update_chat(owner, chat.id, archived=True)
    services.feed.announce(owner, chat.id, tab_of(request), turns=False)
    return to_page(request, "/")


async def _page(
    request: Request,
    services: ChatServices,
    owner: str,
    page: str,
    *,
    problem: str = "",
    toast: dict[str, Any] | None = None,
) -> Response:
    number = int(page) if page.isdecimal() and len(page) < 9 else 0
    listed = await services.shared.store.chat_list(owner, PAGE_CHATS, skip=number * PAGE_CHATS, archived=True)
    shown = {"chats": listed.chats, "page": number, "has_more": listed.has_more, "problem": problem, "toast": toast}
    return await services.pages.respond(request, "archive.html", 400 if problem else 200, **shown)
