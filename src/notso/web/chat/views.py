"""Render responses of the chat routes (a page, a branch, or one turn), and look up chats and messages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, TypeVar

from fastapi import Depends, Request, Response
from starlette.responses import RedirectResponse

from notso.smollm3 import thinking_set_by
from notso.web.chat.chat_view import ChatView, ShownView, read_shown, read_turn, require
from notso.web.chat.services import ChatServices, ChatUser, chat_services
from notso.web.chat.templates import is_fragment
from notso.web.edge.access import owner_of
from notso.web.edge.forms import read_form
from notso.web.engine.model_names import model_facts
from notso.web.store.documents import Library, StoredDocument
from notso.web.store.protocol import Chat, ChatDefaults, ShownMessage, StoredMessage, TurnAccepted
from notso.web.turns.chat_settings import ChatSettings, merge_settings
from notso.web.turns.status_line import TurnStats, stats_from_message
from notso.web.values.durations import current_ms
from notso.web.values.errors import Problem, StorageError
from notso.web.values.ids import is_generation_id, is_id, new_id
from notso.web.values.wording import words

JUST_ENDED_MS = 60_000
LISTED_CHATS, MOST_LISTED = 100, 1000
"""Number of chats by which the sidebar's list grows, and the list's maximum length. The page *All chats* has no
maximum."""

STARTS = ("explain", "rewrite", "plan", "code")
"""Names of the prompt templates offered in a new chat."""

View = TypeVar("View", ChatView, ShownView)


@dataclass(frozen=True, slots=True)
class PageRequest(ChatUser):
    request: Request

    @property
    def is_fragment(self) -> bool:
        return is_fragment(self.request)

    @property
    def tab(self) -> str:
        tab = self.request.headers.get("x-tab", "")
        return tab if is_id(tab) else ""

    def announce(self, chat_id: str, *, turns: bool = False) -> None:
        """Notify other tabs of a change to a chat. `turns`: whether its messages changed, too."""
        self.services.feed.announce(self.owner, chat_id, self.tab, turns=turns)

    async def respond(self, template: str, status: int = 200, **context: Any) -> Response:
        return await self.services.pages.respond(self.request, template, status, **context)

    async def respond_with_sidebar(
        self, template: str, status: int = 200, *, chat: Chat | None = None, **context: Any
    ) -> Response:
        return await self.respond(template, status, **await _sidebar_context(self, chat) | context)

    def done(self, address: str) -> Response:
        """Return an empty response; without htmx, redirect to `address`."""
        return Response(status_code=204) if self.is_fragment else RedirectResponse(address, 303)

    def redirect(self, address: str) -> Response:
        if self.is_fragment:
            return Response(status_code=204, headers={"HX-Redirect": address})
        return RedirectResponse(address, 303)


async def page_request(request: Request) -> PageRequest:
    return PageRequest(chat_services(request), owner_of(request), request)


Page = Annotated[PageRequest, Depends(page_request)]


async def _fields(page: Page) -> dict[str, str]:
    return await read_form(page.request)


Fields = Annotated[dict[str, str], Depends(_fields)]
"""The fields of the request's form. Raises the same errors as `read_form`."""


async def render_chat_page(
    page: PageRequest,
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
    services = page.services
    # Read the revision before the data, so that the page is notified of changes that occur while the data is loaded.
    revision = view.revision if view is not None else services.feed.revision
    chat = view.chat if view is not None else None
    base = view.base if view is not None else await page.store.chat_base(page.owner, project)
    settings = view.settings if view is not None else merge_settings(base.defaults)
    path = view.path if view is not None else []
    messages = await messages_context(page, path, settings)
    return await page.respond(
        "chat.html",
        problem.status if problem else 200,
        **_composer_context(services, chat, path),
        **budget_context(base, chat),
        **status_context(services, view),
        **details_context(services, path),
        thinking=chat is None or chat.thinking,
        thinking_fixed=thinking_set_by(settings.system_prompt),
        **messages,
        **await list_context(page, chat),
        prompts=await page.store.prompts(page.owner),
        chosen_documents=documents,
        project=base.project,
        temporary=chat.temporary if chat is not None else temporary,
        earlier=view.earlier if view is not None else 0,
        finished=_just_ended(path),
        problem=problem.sentence if problem else "",
        draft=problem.draft if problem else draft,
        toast=toast,
        tab=new_id(),
        revision=revision,
    )


async def render_turns(page: PageRequest, view: ShownView, *, toast: dict[str, str] | None = None) -> Response:
    """Render the shown branch; without htmx, redirect to the chat's page."""
    if not page.is_fragment:
        undo = f"?undo={toast['undo_url'].removeprefix('/undo/')}" if toast and toast.get("undo_url") else ""
        return RedirectResponse(f"/chats/{view.chat.id}{undo}", 303)
    context = await _turns_context(page, view, view.path, view.revision)
    return await page.respond("_turns.html", **context, earlier=view.earlier, toast=toast)


async def render_branch(
    page: PageRequest, chat_id: str, *, through: str | None = None, toast: dict[str, str] | None = None
) -> Response:
    """Announce a change to a chat, and render the branch that contains `through` (None: the chosen branch)."""
    view = await read_shown(page, chat_id, through=through, first=oldest_shown_id(page))
    return await render_turns(page, announce(page, view), toast=toast)


async def render_new_turn(page: PageRequest, view: ChatView, accepted: TurnAccepted) -> Response:
    """Announce a new turn, and render its branch."""
    view = announce(page, view)
    shown = await read_turn(page, accepted, first=oldest_shown_id(page))
    return await render_turns(page, replace(shown, revision=view.revision))


async def render_turn(
    page: PageRequest, view: ShownView, shown: list[ShownMessage], *, finished: bool, after: str = ""
) -> Response:
    """Render some messages and the message input. finished: whether the messages' stream has ended.

    after: the feed revision that the page has already received.
    """
    context = await _turns_context(page, view, shown, after or view.revision)
    return await page.respond("_turn.html", **context, finished=finished)


async def _turns_context(
    page: PageRequest, view: ShownView, shown: list[ShownMessage], revision: str
) -> dict[str, Any]:
    return {
        **await messages_context(page, shown, view.settings),
        **_composer_context(page.services, view.chat, view.path),
        **status_context(page.services, view),
        "tab": page.tab,
        "revision": revision,
    }


async def messages_context(page: PageRequest, path: list[ShownMessage], settings: ChatSettings) -> dict[str, Any]:
    raw = settings.raw_user_messages
    shown = await page.services.html_cache.path(page.owner, path, user_messages=not raw)
    return {"path": shown, "raw_user_messages": raw}


async def render_page(
    page: PageRequest, name: str, status: int = 200, *, chat: Chat | None = None, **context: Any
) -> Response:
    """Render the template `name` with the sidebar or, for htmx, only the fragment `f"_{name}"`."""
    if page.is_fragment:
        return await page.respond(f"_{name}", status, chat=chat, **context)
    return await page.respond_with_sidebar(name, status, chat=chat, **context)


def oldest_shown_id(page: PageRequest) -> str | None:
    # Returns the id of the oldest message on the page that sent the request.
    first = page.request.headers.get("x-from", "")
    return first if is_id(first) else None


def parse_count(text: str, default: int) -> int:
    return int(text) if text.isdecimal() and len(text) < 9 else default


async def list_context(page: PageRequest, chat: Chat | None, count: str = "") -> dict[str, Any]:
    """Return the sidebar's chats with their marks, and how many chats other than `chat` need attention."""
    limit = min(max(parse_count(count, LISTED_CHATS), LISTED_CHATS), MOST_LISTED)
    found = await page.store.chat_list(page.owner, limit)
    libraries = await page.store.documents.libraries(page.owner)
    unread = {each.id: "unread" for each in found.chats if each.unread}
    marks: dict[str, str] = unread | dict(page.services.turns.marks)
    if chat is not None and marks.get(chat.id) == "unread":
        del marks[chat.id]
    others = [each for each in found.chats if chat is None or each.id != chat.id]
    news = sum(marks.get(each.id) in ("unread", "asking") for each in others)
    news += found.unread - len(unread)
    more = min(limit + LISTED_CHATS, MOST_LISTED) if found.has_more else 0
    listed = {"chats": found.chats, "marks": marks, "news": news, "listed": limit, "more": more}
    return listed | {"projects": [each for each in libraries if each.is_project]}


async def _sidebar_context(page: PageRequest, chat: Chat | None) -> dict[str, Any]:
    try:
        return await list_context(page, chat) | {"chat": chat}
    except StorageError:
        return {"chats": (), "projects": (), "marks": {}, "news": 0, "listed": 0, "more": 0, "chat": chat}


def announce(page: PageRequest, view: View) -> View:
    """Notify other tabs of a change, and advance the view's revision."""
    # If there was a concurrent change, keep the old revision, so that this tab is also notified of that change.
    feed = page.services.feed
    is_current = feed.revision == view.revision
    page.announce(view.chat.id, turns=True)
    return replace(view, revision=feed.revision) if is_current else view


def _just_ended(path: list[ShownMessage]) -> bool:
    now_ms = current_ms()
    # If an answer ends before the page connects to its stream, show it as if it had ended while the page was open.
    return bool(path) and not path[-1].message.active and now_ms - path[-1].message.created_ms < JUST_ENDED_MS


def _composer_context(services: ChatServices, chat: Chat | None, path: list[ShownMessage]) -> dict[str, Any]:
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


def last_shown_id(page: PageRequest, fields: Mapping[str, str] | None = None) -> str | None:
    """Return the id of the last message on the page: '' for an empty page, None if not sent. Raises Problem (400)."""
    last = page.request.headers.get("x-last", (fields or {}).get("last"))
    if last and not is_id(last):
        raise Problem(400, words["error_form"])
    return last


# The functions below look up objects named in a request's path. They raise Problem (404).


async def find_chat(page: Page, chat_id: str) -> Chat:
    return require(await page.store.chat(page.owner, chat_id) if is_id(chat_id) else None, words["error_unknown_chat"])


FoundChat = Annotated[Chat, Depends(find_chat)]


async def _named_chat(page: Page) -> Chat | None:
    chat_id = page.request.path_params.get("chat_id")
    return await find_chat(page, chat_id) if chat_id is not None else None


NamedChat = Annotated[Chat | None, Depends(_named_chat)]
"""The chat named in the path, if any."""


async def find_project(page: Page, project_id: str) -> Library:
    """Return a project that the user may read."""
    found = await page.store.documents.libraries(page.owner) if is_id(project_id) else []
    project = next((each for each in found if each.id == project_id and each.is_project), None)
    return require(project, words["error_unknown_project"])


async def find_own_project(page: Page, project_id: str) -> Library:
    """Return a project that the user owns. Raises Problem (403) if the user is only a member."""
    project = await find_project(page, project_id)
    if project.rights != "own":
        raise Problem(403, words["error_project_rights"])
    return project


FoundProject = Annotated[Library, Depends(find_project)]
OwnProject = Annotated[Library, Depends(find_own_project)]


async def find_message(page: Page, chat_id: str, message_id: str) -> StoredMessage:
    is_valid = is_id(chat_id) and is_id(message_id)
    return require(await page.store.message(page.owner, chat_id, message_id) if is_valid else None)


FoundMessage = Annotated[StoredMessage, Depends(find_message)]


async def find_generation(page: Page, generation_id: str) -> StoredMessage:
    """Return the answer with this generation id."""
    is_valid = is_generation_id(generation_id)
    return require(await page.store.generation(page.owner, generation_id) if is_valid else None)


FoundGeneration = Annotated[StoredMessage, Depends(find_generation)]
