"""Routes for the settings of chats and projects, the page language, and the cost estimate of a draft."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends, Response
from starlette.background import BackgroundTask
from starlette.responses import RedirectResponse

from notso.smollm3 import ModelError, RequestOptions, process_memory, thinking_set_by
from notso.web.chat.chat_view import ChatView, read_branch
from notso.web.chat.context_gauge import DraftPrompt
from notso.web.chat.services import engine_and_registry
from notso.web.chat.submit import load_branch_documents, new_chat
from notso.web.chat.templates import LANGUAGE_COOKIE
from notso.web.chat.views import (
    Fields,
    NamedChat,
    Page,
    PageRequest,
    budget_context,
    find_chat,
    find_own_project,
    last_shown_id,
    render_page,
)
from notso.web.edge.access import GUARDED
from notso.web.engine.model_names import available_model_names, engine_if_loaded
from notso.web.store.documents import Library
from notso.web.store.protocol import Chat, SettingValue, StoredMessage
from notso.web.turns.chat_settings import (
    ChatSettings,
    form_defaults,
    form_digests,
    form_values,
    is_changed,
    merge_settings,
    updated_settings,
)
from notso.web.turns.documents import parse_attachments
from notso.web.turns.prompt import text_size
from notso.web.values.errors import Problem
from notso.web.values.wording import LANGUAGES, words

router = APIRouter()

YEAR_SECONDS = 365 * 24 * 3600


async def _named_project(page: Page) -> Library | None:
    project_id = page.request.path_params.get("project_id")
    return await find_own_project(page, project_id) if project_id is not None else None


NamedProject = Annotated[Library | None, Depends(_named_project)]


@router.get("/settings", dependencies=[GUARDED])
@router.get("/chats/{chat_id}/settings", dependencies=[GUARDED])
@router.get("/projects/{project_id}/settings", dependencies=[GUARDED])
async def show_settings(page: Page, chat: NamedChat, project: NamedProject) -> Response:
    return await _show(page, chat, project)


@router.post("/settings", dependencies=[GUARDED])
@router.post("/chats/{chat_id}/settings", dependencies=[GUARDED])
@router.post("/projects/{project_id}/settings", dependencies=[GUARDED])
async def change_settings(page: Page, chat: NamedChat, project: NamedProject, form: Fields) -> Response:
    """Change settings. A missing or invalid field leaves its setting unchanged; an empty field resets it."""
    if project is not None:
        form.pop("system_prompt", None)  # a project has instructions instead

    def change(stored: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
        return updated_settings(stored, form)[0]

    _, problems = updated_settings(await _settings_of(page, chat, project), form)
    by_command = "command" in form and page.is_fragment
    if problems and by_command:
        problem = " ".join(f"{words['set_' + name]}{words['colon']}{reason}" for name, reason in problems.items())
        return await page.respond("_problem.html", 400, problem=problem)
    if project is not None:
        await page.store.documents.change_library(page.owner, project.id, settings=change)
        project = await find_own_project(page, project.id)
    elif chat is None:
        await page.store.change_defaults(page.owner, change)
    else:
        await page.store.change_settings(page.owner, chat.id, change)
        chat = await find_chat(page, chat.id)
    # Compare with the value that the page showed, not with the stored one. If the user edits a field and then clicks
    # Save, the page sends two requests and shows only the second response, but the first request stored the change.
    budget_changed = project is None and is_changed("thinking_budget", form)
    if problems:
        typed = {name: value for name, value in form.items() if name in form_values({})}
        return await _show(page, chat, project, typed=typed, problems=problems, budget_changed=budget_changed)
    if not page.is_fragment:
        chat_url = f"/chats/{chat.id}" if chat is not None else "/"
        return RedirectResponse(f"/projects/{project.id}" if project is not None else chat_url, 303)
    # A slash command shows no form, so report the change in a toast.
    toast = {"text": _describe_changes(form, chat), "undo_url": ""} if by_command else None
    thinking = "thinking" in form  # sent for a new chat, whose thinking switch is not stored yet
    saved = not by_command
    return await _show(page, chat, project, saved=saved, toast=toast, thinking=thinking, budget_changed=budget_changed)


@router.post("/estimate", dependencies=[GUARDED])
@router.post("/chats/{chat_id}/estimate", dependencies=[GUARDED])
async def estimate(page: Page, fields: Fields) -> Response:
    """Estimate the context usage and cost of a draft."""
    services, owner = page.services, page.owner
    chat_id = page.request.path_params.get("chat_id")
    if chat_id is None:
        new = replace(new_chat("", thinking="thinking" in fields), temporary="temporary" in fields)
        view = ChatView(new, await page.store.chat_base(owner, fields.get("project", "")), services.feed.revision)
    else:
        last = last_shown_id(page, fields)
        try:
            view = await read_branch(page, chat_id, last)
        except Problem as problem:
            if problem.moved or page.is_fragment:  # the chat was cleared or deleted; the page is about to be notified
                return Response(status_code=204)
            raise
    settings, line = view.settings, view.line
    engine, choice = await engine_if_loaded(*engine_and_registry(services), settings.model)
    if engine is None:
        return Response(status_code=204)
    text = fields.get("text", "").strip("\n")
    attachments = parse_attachments(fields, services.shared.settings.max_message_characters)
    draft = StoredMessage("", "", "user", text, "", "done", 0, attachments=attachments)
    options = RequestOptions(
        thinking="thinking" in fields,
        tools=services.toolbox.definitions(settings.tool_names),
        date=view.chat.prompt_date,
        owner=owner,
        conversation=view.first_id,
        when_full=settings.when_full,
        adapter=choice.adapter,
    )
    documents = await load_branch_documents(page, view, choice, draft)
    prompt = DraftPrompt(line, draft, settings, options, documents)
    try:
        gauge = await services.shared.large_work.run(lambda: prompt.measure(engine), text_size([*line, draft]), owner)
    except ModelError:  # for example, while the engine is shutting down; the page retries on the next keystroke
        return Response(status_code=204)
    chat = view.chat if chat_id is not None else None
    response = await page.respond("_context_gauge.html", chat=chat, gauge=gauge, memory=process_memory())
    has_content = bool(draft.content.strip() or draft.attachments)
    prefills = settings.speculative_prefill and has_content and not any(message.active for message in line)
    if prefills and await services.shared.requests.allows_prompt(owner, gauge.used):
        response.background = BackgroundTask(prompt.prefill, engine)
    return response


@router.post("/language", dependencies=[GUARDED])
async def choose_language(page: Page, fields: Fields) -> Response:
    """Set the page language for this browser. An empty value selects the browser's default."""
    chosen = fields.get("language", "")
    if chosen and chosen not in LANGUAGES:
        raise Problem(400, words["error_form"])
    refresh = Response(status_code=204, headers={"HX-Refresh": "true"})
    response = refresh if page.is_fragment else RedirectResponse("/", 303)
    if chosen:
        secure = page.request.scope["scheme"] == "https"
        response.set_cookie(LANGUAGE_COOKIE, chosen, max_age=YEAR_SECONDS, samesite="strict", secure=secure)
    else:
        response.delete_cookie(LANGUAGE_COOKIE)
    return response


async def _show(
    page: PageRequest,
    chat: Chat | None,
    project: Library | None,
    *,
    typed: Mapping[str, str] | None = None,
    problems: Mapping[str, str] | None = None,
    saved: bool = False,
    toast: Mapping[str, str] | None = None,
    thinking: bool = True,
    budget_changed: bool = False,
) -> Response:
    services = page.services
    base = await page.store.chat_base(page.owner, chat.project if chat is not None else "")
    own = await _settings_of(page, chat, project)
    settings, values = merge_settings(base.defaults, own), form_values(own)
    info = services.shared.engine.info
    model_sampling = {} if info is None else info.sampling
    is_default = chat is None and project is None
    own_defaults = form_defaults(ChatSettings() if is_default else merge_settings(base.defaults), model_sampling)
    return await render_page(
        page,
        "settings.html",
        400 if problems else 200,
        chat=chat,
        part=page.is_fragment,
        project=project,
        values=values | dict(typed or {}),
        models=await available_model_names(*engine_and_registry(services)),
        defaults=own_defaults,
        was=form_digests(values, own_defaults),
        problems=dict(problems or {}),
        saved=saved,
        toast=toast,
        folder=await asyncio.to_thread(
            measure_directory, services.shared.settings.directory, is_shared=page.store.is_shared
        ),
        thinking=thinking if chat is None else chat.thinking,
        budget_changed=budget_changed,
        **budget_context(base, chat),
        thinking_fixed=thinking_set_by(settings.system_prompt),
    )


async def _settings_of(page: PageRequest, chat: Chat | None, project: Library | None) -> Mapping[str, SettingValue]:
    if project is not None:
        return project.settings
    return chat.settings if chat is not None else await page.store.defaults(page.owner)


def _describe_changes(form: Mapping[str, str], chat: Chat | None) -> str:
    names = [name for name in form_values({}) if name in form]
    changes = words["comma"].join(f"{words['set_' + name]} {form[name].strip() or words['unset']}" for name in names)
    return (words["toast_set_default"] if chat is None else words["toast_set_chat"]).format(changes=changes)


@dataclass(frozen=True, slots=True)
class DataFolder:
    """Disk usage of chats and of the KV cache. `chats_bytes` is None if chats are stored elsewhere."""

    path: str
    chats_bytes: int | None
    cache_bytes: int


def measure_directory(path: Path, *, is_shared: bool = False) -> DataFolder:
    """Measure a data directory. Blocking."""
    chats = None if is_shared else sum(_size(file) for file in path.glob("notso.db*"))
    shown = str(path).encode("utf-8", "replace").decode()  # the path may be invalid UTF-8
    return DataFolder(shown, chats, sum(_size(file) for file in (path / "kv").rglob("*")))


def _size(path: Path) -> int:
    try:
        return path.stat().st_size if path.is_file() else 0
    except OSError:  # deleted in the meantime
        return 0
