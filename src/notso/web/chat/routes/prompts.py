"""Saved prompts: reusable texts with a name that the command palette offers."""

from __future__ import annotations

import re
from typing import cast

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from notso.web.chat.services import ChatServices, Services
from notso.web.chat.views import Owner, sidebar_context
from notso.web.edge.access import GUARDED
from notso.web.edge.forms import read_form
from notso.web.store.protocol import PromptKind, SavedPrompt
from notso.web.values.errors import Problem
from notso.web.values.slash_commands import commands_of
from notso.web.values.wording import number, words

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
    """Add, replace or rename (`was`) a prompt."""
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
    # Saved under the new name first: a failure in between loses nothing.
    if was != name and was in saved:
        await services.shared.store.delete_prompt(owner, was)
    return RedirectResponse("/prompts", 303)


@router.post("/prompts/{name}/delete", dependencies=[GUARDED])
async def delete_prompt(request: Request, services: Services, owner: Owner, name: str) -> Response:
    await read_form(request)
    if not await services.shared.store.delete_prompt(owner, name):
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
