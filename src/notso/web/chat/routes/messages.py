"""Routes for a single message, for example to show, edit, regenerate, continue, rate or delete it."""

from __future__ import annotations

import asyncio
from typing import Literal

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from notso.web.chat.chat_view import read_branch, read_shown
from notso.web.chat.services import Services, engine_and_registry
from notso.web.chat.submit import (
    continue_answer,
    copy_branch,
    keep_draft,
    load_settings,
    regenerate_answer,
    submit_question,
)
from notso.web.chat.templates import is_fragment
from notso.web.chat.views import (
    Owner,
    find_chat,
    find_message,
    last_shown_id,
    redirect_to,
    render_branch,
    render_new_turn,
    render_page,
    render_turn,
    request_tab,
)
from notso.web.edge.access import GUARDED, USES_MODEL
from notso.web.edge.forms import read_form
from notso.web.engine.model_names import available_model_names
from notso.web.store.protocol import Rating
from notso.web.values.errors import Problem
from notso.web.values.ids import is_id, new_id
from notso.web.values.wording import words

router = APIRouter(prefix="/chats/{chat_id}/messages/{message_id}")

Part = Literal["answer", "reasoning", "all", "note"]


@router.get("", dependencies=[GUARDED])
async def show_message(
    request: Request, services: Services, owner: Owner, chat_id: str, message_id: str, after: str = ""
) -> Response:
    """Show a message after the end of its stream, and update the message input."""
    view = await read_shown(services, owner, chat_id, through=message_id)
    shown = next((each for each in view.path if each.message.id == message_id), None)
    if shown is None and is_id(message_id):
        shown = await services.shared.store.shown_message(owner, chat_id, message_id)
    if shown is None:
        raise Problem(404, words["error_unknown_page"])
    return await render_turn(request, services, owner, view, [shown], finished=not shown.message.active, after=after)


@router.get("/text", dependencies=[GUARDED])
async def text(services: Services, owner: Owner, chat_id: str, message_id: str, part: Part = "answer") -> Response:
    message = await find_message(services, owner, chat_id, message_id)
    reasoning = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
    texts = {"answer": message.content, "reasoning": message.reasoning, "all": reasoning + message.content}
    texts["note"] = message.note  # the error message
    return PlainTextResponse(texts[part])


@router.get("/edit", dependencies=[GUARDED])
async def edit_form(request: Request, services: Services, owner: Owner, chat_id: str, message_id: str) -> Response:
    chat = await find_chat(services, owner, chat_id)
    message = await find_message(services, owner, chat_id, message_id)
    template = "_edit.html" if is_fragment(request) else "edit.html"
    return await services.pages.respond(request, template, chat=chat, message=message, key=new_id())


@router.post("/edit", dependencies=[USES_MODEL])
async def edit(request: Request, services: Services, owner: Owner, chat_id: str, message_id: str) -> Response:
    """Submit an edited question, or replace the text of an answer."""
    fields = await read_form(request)
    with keep_draft(fields.get("text", "")):
        message = await find_message(services, owner, chat_id, message_id)
        if message.role == "user":
            view = await read_branch(services, owner, chat_id, message.parent_id or "")
            accepted, view = await submit_question(services, owner, view, fields, instead_of=message)
            return await render_new_turn(request, services, owner, view, accepted)
        content = fields.get("text", "").strip("\n")
        if not content.strip() or len(content) > services.shared.settings.max_answer_characters:
            raise Problem(400, words["error_empty"] if not content.strip() else words["error_answer_too_long"])
        through = last_shown_id(request, fields)
        if not await services.shared.store.edit_message(owner, chat_id, message.id, content, through=through):
            raise Problem(409, words["error_running"])
        return await render_branch(request, services, owner, chat_id)


@router.post("/regenerate", dependencies=[USES_MODEL])
async def regenerate(request: Request, services: Services, owner: Owner, chat_id: str, message_id: str) -> Response:
    fields = await read_form(request)
    message = await find_message(services, owner, chat_id, message_id)
    view = await read_branch(services, owner, chat_id, message.parent_id or "")
    accepted, view = await regenerate_answer(services, owner, view, message, fields)
    return await render_new_turn(request, services, owner, view, accepted)


@router.post("/continue", dependencies=[USES_MODEL])
async def continue_message(
    request: Request, services: Services, owner: Owner, chat_id: str, message_id: str
) -> Response:
    """Continue an answer. If the form field `mode` is `answer`, end the reasoning first."""
    fields = await read_form(request)
    message = await find_message(services, owner, chat_id, message_id)
    if (
        message.role != "assistant"
        or message.kind != "turn"
        or fields.get("mode", "") not in ("", "thinking", "answer")
    ):
        raise Problem(400, words["error_form"])
    view = await read_branch(services, owner, chat_id, message.parent_id or "")
    through, hurry = last_shown_id(request, fields), fields.get("mode") == "answer"
    accepted, view = await continue_answer(services, owner, view, message, through=through, hurry=hurry)
    return await render_new_turn(request, services, owner, view, accepted)


@router.post("/choose", dependencies=[GUARDED])
async def choose(request: Request, services: Services, owner: Owner, chat_id: str, message_id: str) -> Response:
    await read_form(request)
    message = await find_message(services, owner, chat_id, message_id)
    await services.shared.store.choose(owner, chat_id, message.id)
    return await render_branch(request, services, owner, chat_id, through=message.id)


@router.get("/again", dependencies=[GUARDED])
async def regenerate_form(
    request: Request, services: Services, owner: Owner, chat_id: str, message_id: str
) -> Response:
    chat = await find_chat(services, owner, chat_id)
    message = await find_message(services, owner, chat_id, message_id)
    return await render_page(
        request,
        services,
        owner,
        "again.html",
        chat=chat,
        message=message,
        models=await available_model_names(*engine_and_registry(services)),
        settings=await load_settings(services, owner, chat),
        key=new_id(),
    )


@router.post("/rate", dependencies=[GUARDED])
async def rate(request: Request, services: Services, owner: Owner, chat_id: str, message_id: str) -> Response:
    ratings: dict[str, Rating] = {"up": 1, "down": -1, "none": 0}
    fields = await read_form(request)
    message = await find_message(services, owner, chat_id, message_id)
    if (rating := ratings.get(fields.get("mode", ""))) is None:
        raise Problem(400, words["error_form"])
    if not await services.shared.store.rate_message(owner, chat_id, message.id, rating):
        raise Problem(400, words["error_form"])
    return await render_branch(request, services, owner, chat_id, through=last_shown_id(request, fields))


@router.post("/delete", dependencies=[GUARDED])
async def delete(request: Request, services: Services, owner: Owner, chat_id: str, message_id: str) -> Response:
    """Delete a message and all that follow it."""
    await read_form(request)
    message = await find_message(services, owner, chat_id, message_id)
    trash_id = await services.shared.store.trash_message(owner, chat_id, message.id)
    if trash_id is None:
        raise Problem(409, words["error_running"])
    toast = {"text": words["toast_message_deleted"], "undo_url": f"/undo/{trash_id}"}
    return await render_branch(request, services, owner, chat_id, toast=toast)


@router.post("/branch", dependencies=[GUARDED])
async def branch(request: Request, services: Services, owner: Owner, chat_id: str, message_id: str) -> Response:
    """Copy the branch that ends in this message to a new chat."""
    await read_form(request)
    is_valid = is_id(chat_id) and is_id(message_id)
    found = await services.shared.store.branch(owner, chat_id, message_id) if is_valid else None
    if found is None or not found.line:
        raise Problem(404, words["error_unknown_chat" if found is None else "error_unknown_page"])
    chat, copied = await asyncio.to_thread(copy_branch, found.chat, found.line)
    if any(each.active for each in copied):
        raise Problem(409, words["error_running"])
    await services.shared.store.add_chat(owner, chat, copied)
    services.feed.announce(owner, chat.id, request_tab(request), turns=False)
    return redirect_to(request, f"/chats/{chat.id}")


@router.post("/unsummarize", dependencies=[GUARDED])
async def unsummarize(request: Request, services: Services, owner: Owner, chat_id: str, message_id: str) -> Response:
    """Remove a summary, so that prompts contain the messages before it again."""
    fields = await read_form(request)
    message = await find_message(services, owner, chat_id, message_id)
    through = last_shown_id(request, fields)
    if not await services.shared.store.remove_summary(owner, chat_id, message.id, through=through):
        raise Problem(409, words["error_running"])
    return await render_branch(request, services, owner, chat_id)
