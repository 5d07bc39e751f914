"""Routes of saved prompts and of memory.

A saved prompt is a named text that the command palette offers. Memory is a short list of texts that the user's
prompts include by default.
"""

from __future__ import annotations

import re
from typing import cast

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from notso.web.chat.services import ChatServices, Services
from notso.web.chat.views import Owner, sidebar_context
from notso.web.edge.access import GUARDED
from notso.web.edge.forms import read_form
from notso.web.store.protocol import MAX_MEMORIES, MAX_MEMORY_CHARACTERS, Memory, PromptKind, SavedPrompt
from notso.web.tools.built_in import MAX_MEMORY_ENTRY
from notso.web.values.durations import current_ms
from notso.web.values.errors import Problem
from notso.web.values.ids import is_id, new_id
from notso.web.values.slash_commands import commands_of
from notso.web.values.visible_text import sanitize_line
from notso.web.values.wording import number, words

memory_router = APIRouter()


@memory_router.get("/memory", dependencies=[GUARDED])
async def show_memory(request: Request, services: Services, owner: Owner) -> Response:
    return await _memory_page(request, services, owner)


@memory_router.post("/memory", dependencies=[GUARDED])
async def save_memory(request: Request, services: Services, owner: Owner) -> Response:
    """Add a memory. If the form field `id` is set, replace that memory's text, or delete it if the text is empty."""
    fields = await read_form(request)
    typed, entry_id = fields.get("text", ""), fields.get("id", "")
    entry_ids = {each.id for each in await services.shared.store.memories(owner)}
    if entry_id and (not is_id(entry_id) or entry_id not in entry_ids):
        raise Problem(404, words["error_unknown_page"], draft=typed)
    text = sanitize_line(typed, MAX_MEMORY_ENTRY + 1)
    if not text and entry_id:
        await services.shared.store.delete(owner, "memory", entry_id)
    elif not 1 <= len(text) <= MAX_MEMORY_ENTRY:
        return await _memory_page(request, services, owner, words["error_title"].format(limit=MAX_MEMORY_ENTRY), typed)
    else:
        entry = Memory(entry_id or new_id(), text, current_ms())
        if not await services.shared.store.save_memory(owner, entry):
            limits = {"limit": MAX_MEMORIES, "characters": number(MAX_MEMORY_CHARACTERS)}
            return await _memory_page(request, services, owner, words["error_memory"].format(**limits), typed)
    return RedirectResponse("/memory", 303)


@memory_router.post("/memory/{memory_id}/delete", dependencies=[GUARDED])
async def delete_memory(request: Request, services: Services, owner: Owner, memory_id: str) -> Response:
    await read_form(request)
    if not await services.shared.store.delete(owner, "memory", memory_id):
        raise Problem(404, words["error_unknown_page"])
    return RedirectResponse("/memory", 303)


async def _memory_page(
    request: Request, services: ChatServices, owner: str, problem: str = "", typed: str = ""
) -> Response:
    return await services.pages.respond(
        request,
        "memory.html",
        400 if problem else 200,
        **await sidebar_context(services, owner),
        memories=await services.shared.store.memories(owner),
        most=MAX_MEMORY_ENTRY,
        problem=problem,
        typed=typed,
    )


router = APIRouter()

MAX_PROMPTS = 200
MAX_PROMPT_CHARACTERS = 20_000
KINDS = ("message", "instructions")
_NAME = re.compile(r"[a-z0-9_-]{1,32}")


@router.get("/prompts", dependencies=[GUARDED])
async def show_prompts(request: Request, services: Services, owner: Owner) -> Response:
    return await _page(request, services, owner)


@router.post("/prompts", dependencies=[GUARDED])
async def save_prompt(request: Request, services: Services, owner: Owner) -> Response:
    """Add a prompt, or change the prompt that the form field `was` names. The new name must not be taken."""
    fields = await read_form(request)
    name, kind, text = fields.get("name", "").strip(), fields.get("kind", ""), fields.get("text", "").strip("\n")
    typed = SavedPrompt(name, cast(PromptKind, kind if kind in KINDS else "message"), text)
    is_command = name in {command.name for command in commands_of("page")}
    if not _NAME.fullmatch(name) or is_command:
        return await _page(request, services, owner, words["error_prompt_name"].format(name=name[:40] or "''"), typed)
    if not text.strip() or len(text) > MAX_PROMPT_CHARACTERS:
        problem = words["error_prompt_text"].format(limit=number(MAX_PROMPT_CHARACTERS))
        return await _page(request, services, owner, problem, typed)
    saved, was = {each.name for each in await services.shared.store.prompts(owner)}, fields.get("was", "")
    if name in saved and name != was:
        return await _page(request, services, owner, words["error_prompt_taken"].format(name=name), typed)
    if len(saved | {name}) > MAX_PROMPTS:
        return await _page(request, services, owner, words["error_prompts"].format(limit=MAX_PROMPTS), typed)
    await services.shared.store.save_prompt(owner, typed)
    # Save under the new name first, so that a failure in between loses nothing.
    if was != name and was in saved:
        await services.shared.store.delete(owner, "prompt", was)
    return RedirectResponse("/prompts", 303)


@router.post("/prompts/{name}/delete", dependencies=[GUARDED])
async def delete_prompt(request: Request, services: Services, owner: Owner, name: str) -> Response:
    await read_form(request)
    if not await services.shared.store.delete(owner, "prompt", name):
        raise Problem(404, words["error_unknown_page"])
    return RedirectResponse("/prompts", 303)


async def _page(
    request: Request, services: ChatServices, owner: str, problem: str = "", typed: SavedPrompt | None = None
) -> Response:
    prompts = await services.shared.store.prompts(owner)
    return await services.pages.respond(
        request,
        "prompts.html",
        400 if problem else 200,
        **await sidebar_context(services, owner),
        prompts=prompts,
        problem=problem,
        typed=typed or SavedPrompt("", "message", ""),
    )
