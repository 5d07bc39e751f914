"""Routes of saved prompts and of memory.

A saved prompt is a named text that the command palette offers. Memory is a short list of texts that the user's
prompts include by default.
"""

from __future__ import annotations

import re
from typing import Any, cast

from fastapi import APIRouter, Response
from starlette.responses import RedirectResponse

from notso.web.chat.chat_view import require
from notso.web.chat.views import Fields, Page, PageRequest
from notso.web.edge.access import GUARDED
from notso.web.store.protocol import MAX_MEMORIES, MAX_MEMORY_CHARACTERS, Memory, PromptKind, SavedPrompt
from notso.web.tools.built_in import MAX_MEMORY_ENTRY
from notso.web.values.durations import current_ms
from notso.web.values.errors import Problem
from notso.web.values.ids import new_id
from notso.web.values.slash_commands import commands_of
from notso.web.values.visible_text import sanitize_line
from notso.web.values.wording import number, words

memory_router = APIRouter()


@memory_router.get("/memory", dependencies=[GUARDED])
async def show_memory(page: Page) -> Response:
    return await page.respond_with_sidebar("memory.html", **await _memory_context(page))


@memory_router.post("/memory", dependencies=[GUARDED])
async def save_memory(page: Page, fields: Fields) -> Response:
    """Add a memory. If the form field `id` is set, replace that memory's text, or delete it if the text is empty."""
    typed, entry_id = fields.get("text", ""), fields.get("id", "")
    if entry_id and entry_id not in {each.id for each in await page.store.memories(page.owner)}:
        raise Problem(404, words["error_unknown_page"], draft=typed)
    text = sanitize_line(typed, MAX_MEMORY_ENTRY + 1)
    if not text and entry_id:
        await page.store.delete(page.owner, "memory", entry_id)
    elif not 1 <= len(text) <= MAX_MEMORY_ENTRY:
        problem = words["error_title"].format(limit=MAX_MEMORY_ENTRY)
        return await page.respond_with_sidebar("memory.html", 400, **await _memory_context(page, problem, typed))
    elif not await page.store.save_memory(page.owner, Memory(entry_id or new_id(), text, current_ms())):
        limits = {"limit": MAX_MEMORIES, "characters": number(MAX_MEMORY_CHARACTERS)}
        problem = words["error_memory"].format(**limits)
        return await page.respond_with_sidebar("memory.html", 400, **await _memory_context(page, problem, typed))
    return RedirectResponse("/memory", 303)


@memory_router.post("/memory/{memory_id}/delete", dependencies=[GUARDED])
async def delete_memory(page: Page, _: Fields, memory_id: str) -> Response:
    require(await page.store.delete(page.owner, "memory", memory_id))
    return RedirectResponse("/memory", 303)


async def _memory_context(page: PageRequest, problem: str = "", typed: str = "") -> dict[str, Any]:
    memories = await page.store.memories(page.owner)
    return {"memories": memories, "most": MAX_MEMORY_ENTRY, "problem": problem, "typed": typed}


router = APIRouter()

MAX_PROMPTS = 200
MAX_PROMPT_CHARACTERS = 20_000
KINDS = ("message", "instructions")
_NAME = re.compile(r"[a-z0-9_-]{1,32}")


@router.get("/prompts", dependencies=[GUARDED])
async def show_prompts(page: Page) -> Response:
    return await _prompts_page(page)


@router.post("/prompts", dependencies=[GUARDED])
async def save_prompt(page: Page, fields: Fields) -> Response:
    """Add a prompt, or change the prompt named in the form field `was`. The new name must not be taken."""
    name, kind, text = fields.get("name", "").strip(), fields.get("kind", ""), fields.get("text", "").strip("\n")
    typed = SavedPrompt(name, cast(PromptKind, kind if kind in KINDS else "message"), text)
    is_command = name in {command.name for command in commands_of("page")}
    if not _NAME.fullmatch(name) or is_command:
        return await _prompts_page(page, words["error_prompt_name"].format(name=name[:40] or "''"), typed)
    if not text.strip() or len(text) > MAX_PROMPT_CHARACTERS:
        problem = words["error_prompt_text"].format(limit=number(MAX_PROMPT_CHARACTERS))
        return await _prompts_page(page, problem, typed)
    saved, was = {each.name for each in await page.store.prompts(page.owner)}, fields.get("was", "")
    if name in saved and name != was:
        return await _prompts_page(page, words["error_prompt_taken"].format(name=name), typed)
    if len(saved | {name}) > MAX_PROMPTS:
        return await _prompts_page(page, words["error_prompts"].format(limit=MAX_PROMPTS), typed)
    await page.store.save_prompt(page.owner, typed)
    # Delete the old prompt only now, so that a failure in between loses nothing.
    if was != name and was in saved:
        await page.store.delete(page.owner, "prompt", was)
    return RedirectResponse("/prompts", 303)


@router.post("/prompts/{name}/delete", dependencies=[GUARDED])
async def delete_prompt(page: Page, _: Fields, name: str) -> Response:
    require(await page.store.delete(page.owner, "prompt", name))
    return RedirectResponse("/prompts", 303)


async def _prompts_page(page: PageRequest, problem: str = "", typed: SavedPrompt | None = None) -> Response:
    return await page.respond_with_sidebar(
        "prompts.html",
        400 if problem else 200,
        prompts=await page.store.prompts(page.owner),
        problem=problem,
        typed=typed or SavedPrompt("", "message", ""),
    )
