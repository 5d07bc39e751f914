"""What the routes of the chat answer with: whole pages, the turns of a chat, one turn; and finding what they name."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from starlette.responses import RedirectResponse

from notso.web.chat.chat_view import ChatView, ShownView
from notso.web.chat.services import ChatServices, Services
from notso.web.chat.templates import is_fragment
from notso.web.edge.access import owner_of
from notso.web.engine.model_names import model_facts
from notso.web.engine.port import thinking_set_by
from notso.web.store.protocol import Chat, Shown, StoredMessage
from notso.web.turns.chat_settings import settings_from, shown_values
from notso.web.turns.turn_stats import TurnStats, stats_of
from notso.web.values.ids import is_generation_id, is_id, new_id
from notso.web.values.problems import Problem
from notso.web.values.wording import words

JUST_ENDED_MS = 60_000
LISTED_CHATS, MOST_LISTED = 100, 1000
"""Chats of the sidebar: at first and with each step, and at most. The page of all chats has the others."""

STARTS = ("explain", "rewrite", "plan", "code")
"""How a question may begin, by the names of its words."""

Owner = Annotated[str, Depends(owner_of)]
View = TypeVar("View", ChatView, ShownView)


async def chat_page(
    request: Request,
    services: ChatServices,
    owner: str,
    view: ShownView | None,
    *,
    problem: Problem | None = None,
    draft: str = "",
    temporary: bool = False,
    toast: dict[str, str] | None = None,
) -> Response:
    """The whole page of a chat, or of none yet; with `problem`, what went wrong and the text it kept.

    `draft` is what stands in the input; `temporary`: a new chat is to be one.
    """
    revision = view.revision if view is not None else services.feed.revision  # of before anything is looked up
    chat = view.chat if view is not None else None
    settings = view.settings if view is not None else settings_from(await services.shared.store.defaults(owner))
    path = await services.kept_html.path(
        owner, view.path if view is not None else [], user_messages=not settings.raw_user_messages
    )
    return await services.pages.respond(
        request,
        "chat.html",
        problem.status if problem else 200,
        **composer_context(services, chat, path),
        **status_context(services, view),
        **details_context(services, path),
        thinking=chat is None or chat.thinking,
        thinking_fixed=thinking_set_by(settings.system_prompt),
        raw_user_messages=settings.raw_user_messages,
        **await list_context(services, owner, chat),
        prompts=await services.shared.store.prompts(owner),
        temporary=chat.temporary if chat is not None else temporary,
        path=path,
        earlier=view.earlier if view is not None else 0,
        finished=_just_ended(path),
        problem=problem.sentence if problem else "",
        draft=problem.draft if problem else draft,
        toast=toast,
        tab=new_id(),
        revision=revision,
    )


async def turns_view(
    request: Request,
    services: ChatServices,
    owner: str,
    view: ShownView,
    *,
    toast: dict[str, str] | None = None,
) -> Response:
    """A chat's shown branch, for a page that shows the chat already; a page without scripts loads anew."""
    chat, raw = view.chat, view.settings.raw_user_messages
    if not is_fragment(request):
        undo = f"?undo={toast['undo_url'].removeprefix('/undo/')}" if toast and toast.get("undo_url") else ""
        return RedirectResponse(f"/chats/{chat.id}{undo}", 303)
    path = await services.kept_html.path(owner, view.path, user_messages=not raw)
    return await services.pages.respond(
        request,
        "_turns.html",
        **in_step_context(request, view.revision),
        **composer_context(services, chat, path),
        **status_context(services, view),
        raw_user_messages=raw,
        path=path,
        earlier=view.earlier,
        toast=toast,
    )


async def turn_view(
    request: Request,
    services: ChatServices,
    owner: str,
    view: ShownView,
    shown: list[Shown],
    *,
    finished: bool,
    after: str = "",
) -> Response:
    """Some messages as they are now, with the composer's buttons to match. `finished`: their stream has ended;
    `after`: what the page has heard of other tabs' doings.
    """
    raw = view.settings.raw_user_messages
    return await services.pages.respond(
        request,
        "_turn.html",
        **in_step_context(request, after or view.revision),
        **composer_context(services, view.chat, view.path),
        **status_context(services, view),
        raw_user_messages=raw,
        path=await services.kept_html.path(owner, shown, user_messages=not raw),
        finished=finished,
    )


def first_on(request: Request) -> str | None:
    """The message that the page which asks begins with, where it says so."""
    first = request.headers.get("x-from", "")
    return first if is_id(first) else None


async def list_context(services: ChatServices, owner: str, chat: Chat | None, count: str = "") -> dict[str, Any]:
    """The newest chats of the sidebar, `count` of them where a page has asked for more, with their marks; and how many
    others want to be looked at."""
    limit = min(max(int(count), LISTED_CHATS), MOST_LISTED) if count.isdecimal() and len(count) < 9 else LISTED_CHATS
    found = await services.shared.store.chat_list(owner, limit)
    marks: dict[str, str] = {each.id: "unread" for each in found.chats if each.unread} | dict(services.turns.marks)
    if chat is not None and marks.get(chat.id) == "unread":
        del marks[chat.id]
    others = [each for each in found.chats if chat is None or each.id != chat.id]
    news = sum(marks.get(each.id) in ("unread", "asking") for each in others)
    news += found.unread - sum(each.unread for each in found.chats)
    more = min(limit + LISTED_CHATS, MOST_LISTED) if found.has_more else 0
    return {"chats": found.chats, "marks": marks, "news": news, "listed": limit, "more": more}


def in_step_context(request: Request, revision: str) -> dict[str, Any]:
    """What a page needs to hear of other tabs' doings from `revision` on."""
    return {"tab": tab_of(request), "revision": revision}


def announce(request: Request, services: ChatServices, owner: str, view: View) -> View:
    """Tell other tabs what this one did. It hears of that only if others did something since the chat was read."""
    nothing_since = services.feed.revision == view.revision
    services.feed.announce(owner, view.chat.id, tab_of(request))
    return replace(view, revision=services.feed.revision) if nothing_since else view


def _just_ended(path: list[Shown]) -> bool:
    """Whether the page comes right after an answer that was too quick for a stream; old chats are only looked at."""
    now_ms = time.time_ns() // 1_000_000
    return bool(path) and not path[-1].message.active and now_ms - path[-1].message.created_ms < JUST_ENDED_MS


def composer_context(services: ChatServices, chat: Chat | None, path: list[Shown]) -> dict[str, Any]:
    """What the composer needs to know, and what waits for a person: a call for permission, or a tool's question."""
    answering = next((shown.message for shown in path if shown.message.active), None)
    values = shown_values(chat.settings if chat is not None else {})
    return {
        "chat": chat,
        "answering": answering,
        "asking": services.turns.asking(answering.generation_id or "") if answering is not None else None,
        "question": services.turns.question(answering.generation_id or "") if answering is not None else None,
        "key": new_id(),
        "keys": [new_id() for _ in range(4)],
        "starts": STARTS,
        "last_id": path[-1].message.id if path else "",
        "last_user_message": next((each.message.id for each in reversed(path) if each.message.role == "user"), ""),
        "thinking_budget": values["thinking_budget"],
    }


def status_context(services: ChatServices, view: ShownView | None = None) -> dict[str, Any]:
    """What the status badge and the banner need to know; the chat may have a model of its own."""
    engine, download = services.shared.engine, services.downloads.current
    polling = engine.is_loading or (download is not None and download.active)
    return {
        "engine_state": engine.state,
        "info": engine.info,
        "chat_model": (view.settings.model or "") if view is not None else "",
        "failure": engine.failure,
        "facts": model_facts(engine),
        "download": download,
        "polling": polling,
        "damage": services.shared.store.damage,
    }


def details_context(services: ChatServices, path: list[Shown]) -> dict[str, Any]:
    """What stands behind the badge, besides the model: the last answer in figures, and what went wrong last."""
    messages = [shown.message for shown in path if shown.message.role == "assistant"]
    last = messages[-1] if messages else None
    stats: TurnStats | None = None
    if last is not None:
        stats = services.turns.stats(last.generation_id or "") or stats_of(last)
    failed = next((message for message in reversed(messages) if message.state == "failed" and message.note), None)
    return {
        "stats": stats,
        "failed": failed,
        "last_is_active": last is not None and last.active,
        "working": services.turns.unfinished > 0,
    }


def back(request: Request, address: str) -> Response:
    """Nothing to show: a page without scripts goes back to where it was."""
    return Response(status_code=204) if is_fragment(request) else RedirectResponse(address, 303)


def to_page(request: Request, address: str) -> Response:
    """The browser goes to another page, whether htmx asked or the form itself."""
    if is_fragment(request):
        return Response(status_code=204, headers={"HX-Redirect": address})
    return RedirectResponse(address, 303)


def tab_of(request: Request) -> str:
    """Which tab asks, so that it is not told of its own doing; '' where none says."""
    tab = request.headers.get("x-tab", "")
    return tab if is_id(tab) else ""


def last_shown(request: Request, fields: Mapping[str, str] | None = None) -> str | None:
    """The last message that the page shows, as its script or its form says: '' for none, None where neither says.
    Raises Problem 400."""
    last = request.headers.get("x-last", (fields or {}).get("last"))
    if last and not is_id(last):
        raise Problem(400, words["error_form"])
    return last


async def find_chat(services: ChatServices, owner: str, chat_id: str) -> Chat:
    """A chat. Raises Problem 404."""
    chat = await services.shared.store.chat(owner, chat_id) if is_id(chat_id) else None
    if chat is None:
        raise Problem(404, words["error_unknown_chat"])
    return chat


async def _named_chat(request: Request, services: Services, owner: Owner) -> Chat | None:
    chat_id = request.path_params.get("chat_id")
    return await find_chat(services, owner, chat_id) if chat_id is not None else None


NamedChat = Annotated[Chat | None, Depends(_named_chat)]
"""The chat that an address names; None of one that is about new chats. 404 where there is none of that name."""


async def find_message(services: ChatServices, owner: str, chat_id: str, message_id: str) -> StoredMessage:
    """A message of a chat. Raises Problem 404."""
    known = is_id(chat_id) and is_id(message_id)
    message = await services.shared.store.message(owner, chat_id, message_id) if known else None
    if message is None:
        raise Problem(404, words["error_unknown_page"])
    return message


async def find_generation(services: ChatServices, owner: str, generation_id: str) -> StoredMessage:
    """The answer a generation writes or wrote. Raises Problem 404."""
    known = is_generation_id(generation_id)
    message = await services.shared.store.generation(owner, generation_id) if known else None
    if message is None:
        raise Problem(404, words["error_unknown_page"])
    return message
