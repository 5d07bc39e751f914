"""Routes for a single message, for example to show, edit, regenerate, continue, rate or delete it."""

from __future__ import annotations

import asyncio
from typing import Literal

from fastapi import APIRouter, Response
from starlette.responses import PlainTextResponse

from notso.web.chat.chat_view import read_branch_above, read_shown, require
from notso.web.chat.services import engine_and_registry
from notso.web.chat.submit import (
    continue_answer,
    copy_branch,
    keep_draft,
    load_settings,
    regenerate_answer,
    submit_question,
)
from notso.web.chat.views import (
    Fields,
    FoundChat,
    FoundMessage,
    Page,
    find_message,
    last_shown_id,
    render_branch,
    render_new_turn,
    render_page,
    render_turn,
)
from notso.web.edge.access import GUARDED, USES_MODEL
from notso.web.engine.model_names import available_model_names
from notso.web.store.protocol import Rating
from notso.web.values.errors import Problem
from notso.web.values.ids import is_id, new_id
from notso.web.values.wording import words

router = APIRouter(prefix="/chats/{chat_id}/messages/{message_id}")

Part = Literal["answer", "reasoning", "all", "note"]


@router.get("", dependencies=[GUARDED])
async def show_message(page: Page, chat_id: str, message_id: str, after: str = "") -> Response:
    """Show a message after the end of its stream, and update the message input."""
    view = await read_shown(page, chat_id, through=message_id)
    shown = next((each for each in view.path if each.message.id == message_id), None)
    if shown is None and is_id(message_id):
        shown = await page.store.shown_message(page.owner, chat_id, message_id)
    shown = require(shown)
    return await render_turn(page, view, [shown], finished=not shown.message.active, after=after)


@router.get("/text", dependencies=[GUARDED])
async def text(page: Page, chat_id: str, message_id: str, part: Part = "answer") -> Response:
    message = await find_message(page, chat_id, message_id)
    reasoning = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
    texts = {"answer": message.content, "reasoning": message.reasoning, "all": reasoning + message.content}
    texts["note"] = message.note
    return PlainTextResponse(texts[part])


@router.get("/edit", dependencies=[GUARDED])
async def edit_form(page: Page, chat: FoundChat, message: FoundMessage) -> Response:
    template = "_edit.html" if page.is_fragment else "edit.html"
    return await page.respond(template, chat=chat, message=message, key=new_id())


@router.post("/edit", dependencies=[USES_MODEL])
async def edit(page: Page, fields: Fields, chat_id: str, message_id: str) -> Response:
    """Submit an edited question, or replace the text of an answer."""
    with keep_draft(fields.get("text", "")):
        message = await find_message(page, chat_id, message_id)
        if message.role == "user":
            view = await read_branch_above(page, message)
            accepted, view = await submit_question(page, view, fields, instead_of=message)
            return await render_new_turn(page, view, accepted)
        content = fields.get("text", "").strip("\n")
        if not content.strip() or len(content) > page.services.shared.settings.max_answer_characters:
            raise Problem(400, words["error_empty"] if not content.strip() else words["error_answer_too_long"])
        through = last_shown_id(page, fields)
        edited = await page.store.edit_message(page.owner, chat_id, message.id, content, through=through)
        require(edited, words["error_running"], 409)
        return await render_branch(page, chat_id)


@router.post("/regenerate", dependencies=[USES_MODEL])
async def regenerate(page: Page, fields: Fields, message: FoundMessage) -> Response:
    accepted, view = await regenerate_answer(page, message, fields)
    return await render_new_turn(page, view, accepted)


@router.post("/continue", dependencies=[USES_MODEL])
async def continue_message(page: Page, fields: Fields, message: FoundMessage) -> Response:
    """Continue an answer. If the form field `mode` is `answer`, end the reasoning first."""
    mode = fields.get("mode", "")
    if message.role != "assistant" or message.kind != "turn" or mode not in ("", "thinking", "answer"):
        raise Problem(400, words["error_form"])
    through, hurry = last_shown_id(page, fields), mode == "answer"
    accepted, view = await continue_answer(page, message, through=through, hurry=hurry)
    return await render_new_turn(page, view, accepted)


@router.post("/choose", dependencies=[GUARDED])
async def choose(page: Page, _: Fields, message: FoundMessage) -> Response:
    await page.store.choose(page.owner, message.chat_id, message.id)
    return await render_branch(page, message.chat_id, through=message.id)


@router.get("/again", dependencies=[GUARDED])
async def regenerate_form(page: Page, chat: FoundChat, message: FoundMessage) -> Response:
    return await render_page(
        page,
        "again.html",
        chat=chat,
        message=message,
        models=await available_model_names(*engine_and_registry(page.services)),
        settings=await load_settings(page, chat),
        key=new_id(),
    )


@router.post("/rate", dependencies=[GUARDED])
async def rate(page: Page, fields: Fields, message: FoundMessage) -> Response:
    ratings: dict[str, Rating] = {"up": 1, "down": -1, "none": 0}
    rating: Rating = require(ratings.get(fields.get("mode", "")), words["error_form"], 400)
    require(await page.store.rate_message(page.owner, message.chat_id, message.id, rating), words["error_form"], 400)
    return await render_branch(page, message.chat_id, through=last_shown_id(page, fields))


@router.post("/delete", dependencies=[GUARDED])
async def delete(page: Page, _: Fields, message: FoundMessage) -> Response:
    """Delete a message and all that follow it."""
    trash_id = await page.store.trash_message(page.owner, message.chat_id, message.id)
    require(trash_id, words["error_running"], 409)
    toast = {"text": words["toast_message_deleted"], "undo_url": f"/undo/{trash_id}"}
    return await render_branch(page, message.chat_id, toast=toast)


@router.post("/branch", dependencies=[GUARDED])
async def branch(page: Page, _: Fields, chat_id: str, message_id: str) -> Response:
    """Copy the branch that ends in this message to a new chat."""
    is_valid = is_id(chat_id) and is_id(message_id)
    found = await page.store.branch(page.owner, chat_id, message_id) if is_valid else None
    if found is None or not found.line:
        raise Problem(404, words["error_unknown_chat" if found is None else "error_unknown_page"])
    chat, copied = await asyncio.to_thread(copy_branch, found.chat, found.line)
    if any(each.active for each in copied):
        raise Problem(409, words["error_running"])
    await page.store.add_chat(page.owner, chat, copied)
    page.announce(chat.id)
    return page.redirect(f"/chats/{chat.id}")


@router.post("/unsummarize", dependencies=[GUARDED])
async def unsummarize(page: Page, fields: Fields, message: FoundMessage) -> Response:
    """Remove a summary, so that prompts contain the messages before it again."""
    through = last_shown_id(page, fields)
    removed = await page.store.remove_summary(page.owner, message.chat_id, message.id, through=through)
    require(removed, words["error_running"], 409)
    return await render_branch(page, message.chat_id)
