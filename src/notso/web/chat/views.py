"""Render responses of the chat routes (a page, a branch, or one turn), and look up chats and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from starlette.responses import RedirectResponse

from notso.web.chat.chat_view import ChatView, ShownView, read_shown, read_turn
from notso.web.chat.services import ChatServices, Services
from notso.web.chat.templates import is_fragment
from notso.web.edge.access import owner_of
from notso.web.engine.model_names import model_facts
from notso.web.engine.port import thinking_set_by
from notso.web.store.documents import Library, StoredDocument
from notso.web.store.protocol import Chat, ChatDefaults, ShownMessage, StoredMessage, TurnAccepted
from notso.web.turns.chat_settings import merge_settings
from notso.web.turns.status_line import TurnStats, stats_from_message
from notso.web.values.durations import current_ms
from notso.web.values.errors import Problem, StorageError
from notso.web.values.ids import is_generation_id, is_id, new_id
from notso.web.values.wording import words

JUST_ENDED_MS = 60_000
LISTED_CHATS, MOST_LISTED = 100, 1000
"""Number of chats by which the sidebar's list grows, and the list's maximum length. The page *All chats* has none."""

STARTS = ("explain", "rewrite", "plan", "code")
"""Names of the prompt templates offered in a new chat."""

Owner = Annotated[str, Depends(owner_of)]
View = TypeVar("View", ChatView, ShownView)


async def render_chat_page(
    request: Request,
    services: ChatServices,
    owner: str,
    view: ShownView | None,
    *,
    problem: Problem | None = None,
    draft: str = "",
    temporary: bool = False,
    documents: Sequence[StoredDocument] = (),
    project: str = "",
    toast: dict[str, str] | None = None,
) -> Response:
    """Render the page of a chat, or of a new chat in `project`."""
    # Read the revision before the data, so that the page is notified of changes that occur while the data is loaded.
    revision = view.revision if view is not None else services.feed.revision
    chat = view.chat if view is not None else None
    base = view.base if view is not None else await services.shared.store.chat_base(owner, project)
    settings = view.settings if view is not None else merge_settings(base.defaults)
    path = await services.html_cache.path(
        owner, view.path if view is not None else [], user_messages=not settings.raw_user_messages
    )
    return await services.pages.respond(
        request,
        "chat.html",
        problem.status if problem else 200,
        **composer_context(services, chat, path),
        **budget_context(base, chat),
        **status_context(services, view),
        **details_context(services, path),
        thinking=chat is None or chat.thinking,
        thinking_fixed=thinking_set_by(settings.system_prompt),
        raw_user_messages=settings.raw_user_messages,
        **await list_context(services, owner, chat),
        prompts=await services.shared.store.prompts(owner),
        chosen_documents=documents,
        project=base.project,
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


async def render_turns(
    request: Request,
    services: ChatServices,
    owner: str,
    view: ShownView,
    *,
    toast: dict[str, str] | None = None,
) -> Response:
    """Render the shown branch; without htmx, redirect to the chat's page."""
    chat, raw = view.chat, view.settings.raw_user_messages
    if not is_fragment(request):
        undo = f"?undo={toast['undo_url'].removeprefix('/undo/')}" if toast and toast.get("undo_url") else ""
        return RedirectResponse(f"/chats/{chat.id}{undo}", 303)
    path = await services.html_cache.path(owner, view.path, user_messages=not raw)
    return await services.pages.respond(
        request,
        "_turns.html",
        **sync_context(request, view.revision),
        **composer_context(services, chat, path),
        **status_context(services, view),
        raw_user_messages=raw,
        path=path,
        earlier=view.earlier,
        toast=toast,
    )


async def render_branch(
    request: Request,
    services: ChatServices,
    owner: str,
    chat_id: str,
    *,
    through: str | None = None,
    toast: dict[str, str] | None = None,
) -> Response:
    """Announce a change to a chat, and render the branch that contains `through` (None: the chosen branch)."""
    view = await read_shown(services, owner, chat_id, through=through, first=oldest_shown_id(request))
    return await render_turns(request, services, owner, announce(request, services, owner, view), toast=toast)


async def render_new_turn(
    request: Request, services: ChatServices, owner: str, view: ChatView, accepted: TurnAccepted
) -> Response:
    """Announce a new turn, and render its branch."""
    view = announce(request, services, owner, view)
    shown = await read_turn(services, owner, accepted, first=oldest_shown_id(request))
    return await render_turns(request, services, owner, replace(shown, revision=view.revision))


async def render_turn(
    request: Request,
    services: ChatServices,
    owner: str,
    view: ShownView,
    shown: list[ShownMessage],
    *,
    finished: bool,
    after: str = "",
) -> Response:
    """Render some messages and the message input. finished: whether the messages' stream has ended.

    after: the feed revision that the page has already received.
    """
    raw = view.settings.raw_user_messages
    return await services.pages.respond(
        request,
        "_turn.html",
        **sync_context(request, after or view.revision),
        **composer_context(services, view.chat, view.path),
        **status_context(services, view),
        raw_user_messages=raw,
        path=await services.html_cache.path(owner, shown, user_messages=not raw),
        finished=finished,
    )


async def render_page(
    request: Request,
    services: ChatServices,
    owner: str,
    name: str,
    status: int = 200,
    *,
    chat: Chat | None = None,
    **context: Any,
) -> Response:
    """Render the template `name` with the sidebar or, for htmx, only the fragment `f"_{name}"`."""
    if is_fragment(request):
        return await services.pages.respond(request, f"_{name}", status, chat=chat, **context)
    return await services.pages.respond(
        request, name, status, **await sidebar_context(services, owner, chat), **context
    )


def oldest_shown_id(request: Request) -> str | None:
    # Returns the id of the oldest message on the page that sent the request.
    first = request.headers.get("x-from", "")
    return first if is_id(first) else None


def parse_count(text: str, default: int) -> int:
    return int(text) if text.isdecimal() and len(text) < 9 else default


async def list_context(services: ChatServices, owner: str, chat: Chat | None, count: str = "") -> dict[str, Any]:
    """Return the sidebar's chats with their marks, and how many chats other than `chat` need attention."""
    limit = min(max(parse_count(count, LISTED_CHATS), LISTED_CHATS), MOST_LISTED)
    found = await services.shared.store.chat_list(owner, limit)
    libraries = await services.shared.store.documents.libraries(owner)
    marks: dict[str, str] = {each.id: "unread" for each in found.chats if each.unread} | dict(services.turns.marks)
    if chat is not None and marks.get(chat.id) == "unread":
        del marks[chat.id]
    others = [each for each in found.chats if chat is None or each.id != chat.id]
    news = sum(marks.get(each.id) in ("unread", "asking") for each in others)
    news += found.unread - sum(each.unread for each in found.chats)
    more = min(limit + LISTED_CHATS, MOST_LISTED) if found.has_more else 0
    listed = {"chats": found.chats, "marks": marks, "news": news, "listed": limit, "more": more}
    return listed | {"projects": [each for each in libraries if each.is_project]}


async def sidebar_context(services: ChatServices, owner: str, chat: Chat | None = None) -> dict[str, Any]:
    """Return the sidebar's context, or an empty one if the store fails."""
    try:
        return await list_context(services, owner, chat) | {"chat": chat}
    except StorageError:
        return dict.fromkeys(("chats", "projects"), ()) | {"marks": {}, "news": 0, "listed": 0, "more": 0, "chat": chat}


def sync_context(request: Request, revision: str) -> dict[str, Any]:
    return {"tab": request_tab(request), "revision": revision}


def announce(request: Request, services: ChatServices, owner: str, view: View) -> View:
    """Notify other tabs of a change, and advance the view's revision."""
    # If there was a concurrent change, keep the old revision, so that this tab is also notified of that change.
    is_current = services.feed.revision == view.revision
    services.feed.announce(owner, view.chat.id, request_tab(request))
    return replace(view, revision=services.feed.revision) if is_current else view


def _just_ended(path: list[ShownMessage]) -> bool:
    now_ms = current_ms()
    # If an answer ends before the page connects to its stream, show it like one that ended while the page was open.
    return bool(path) and not path[-1].message.active and now_ms - path[-1].message.created_ms < JUST_ENDED_MS


def composer_context(services: ChatServices, chat: Chat | None, path: list[ShownMessage]) -> dict[str, Any]:
    answering = next((shown.message for shown in path if shown.message.active), None)
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
    }


def budget_context(base: ChatDefaults, chat: Chat | None) -> dict[str, Any]:
    """Return the chat's thinking budget ('': the default applies) and the default budget (None: no limit)."""
    own = chat.settings.get("thinking_budget", "") if chat is not None else ""
    return {"thinking_budget": own, "default_budget": merge_settings(base.defaults).sampling.thinking_budget}


def status_context(services: ChatServices, view: ShownView | None = None) -> dict[str, Any]:
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


def details_context(services: ChatServices, path: list[ShownMessage]) -> dict[str, Any]:
    messages = [shown.message for shown in path if shown.message.role == "assistant"]
    last = messages[-1] if messages else None
    stats: TurnStats | None = None
    if last is not None:
        stats = services.turns.stats(last.generation_id or "") or stats_from_message(last)
    failed = next((message for message in reversed(messages) if message.state == "failed" and message.note), None)
    return {
        "stats": stats,
        "failed": failed,
        "last_is_active": last is not None and last.active,
        "working": services.turns.unfinished > 0,
    }


def done_response(request: Request, address: str) -> Response:
    return Response(status_code=204) if is_fragment(request) else RedirectResponse(address, 303)


def redirect_to(request: Request, address: str) -> Response:
    if is_fragment(request):
        return Response(status_code=204, headers={"HX-Redirect": address})
    return RedirectResponse(address, 303)


def request_tab(request: Request) -> str:
    tab = request.headers.get("x-tab", "")
    return tab if is_id(tab) else ""


def last_shown_id(request: Request, fields: Mapping[str, str] | None = None) -> str | None:
    """Return the id of the last message on the page: '' for an empty page, None if not sent. Raises Problem (400)."""
    last = request.headers.get("x-last", (fields or {}).get("last"))
    if last and not is_id(last):
        raise Problem(400, words["error_form"])
    return last


async def find_chat(services: ChatServices, owner: str, chat_id: str) -> Chat:
    """Return a chat. Raises Problem (404)."""
    chat = await services.shared.store.chat(owner, chat_id) if is_id(chat_id) else None
    if chat is None:
        raise Problem(404, words["error_unknown_chat"])
    return chat


async def _named_chat(request: Request, services: Services, owner: Owner) -> Chat | None:
    chat_id = request.path_params.get("chat_id")
    return await find_chat(services, owner, chat_id) if chat_id is not None else None


NamedChat = Annotated[Chat | None, Depends(_named_chat)]
"""The chat named in the path, if any. Raises Problem (404)."""


async def find_project(services: ChatServices, owner: str, project_id: str) -> Library:
    """Return a project that the user may read. Raises Problem (404)."""
    found = await services.shared.store.documents.libraries(owner) if is_id(project_id) else []
    project = next((each for each in found if each.id == project_id and each.is_project), None)
    if project is None:
        raise Problem(404, words["error_unknown_project"])
    return project


async def find_own_project(services: ChatServices, owner: str, project_id: str) -> Library:
    """Return a project that the user owns. Raises Problem: 404, or 403 if the user is only a member."""
    project = await find_project(services, owner, project_id)
    if project.rights != "own":
        raise Problem(403, words["error_project_rights"])
    return project


async def find_message(services: ChatServices, owner: str, chat_id: str, message_id: str) -> StoredMessage:
    """Return a message of a chat. Raises Problem (404)."""
    is_valid = is_id(chat_id) and is_id(message_id)
    message = await services.shared.store.message(owner, chat_id, message_id) if is_valid else None
    if message is None:
        raise Problem(404, words["error_unknown_page"])
    return message


async def find_generation(services: ChatServices, owner: str, generation_id: str) -> StoredMessage:
    """Return the answer with this generation id. Raises Problem (404)."""
    is_valid = is_generation_id(generation_id)
    message = await services.shared.store.generation(owner, generation_id) if is_valid else None
    if message is None:
        raise Problem(404, words["error_unknown_page"])
    return message
