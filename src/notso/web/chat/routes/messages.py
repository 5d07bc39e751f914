"""What can be done with one message: see it, copy it, edit it, have it answered again, go on, choose a version."""

from __future__ import annotations

from typing import Literal

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import PlainTextResponse

from notso.web.chat.services import Services
from notso.web.chat.submit import answer_again, ask, write_on
from notso.web.chat.templates import is_fragment
from notso.web.chat.views import Owner, find_chat, find_message, tab_of, turn_view, turns_view
from notso.web.edge.access import guarded
from notso.web.edge.forms import read_form
from notso.web.store.protocol import Attachment
from notso.web.values.ids import new_id
from notso.web.values.problems import Problem
from notso.web.values.wording import words

router = APIRouter(prefix="/chats/{chat_id}/messages/{message_id}", dependencies=[Depends(guarded)])

Part = Literal["answer", "reasoning", "all", "note"]


@router.get("")
async def show_message(
    request: Request, services: Services, owner: Owner, chat_id: str, message_id: str, after: str = ""
) -> Response:
    """One message as it is now, with the composer's buttons to match: what a page fetches when a stream is done."""
    chat = await find_chat(services, owner, chat_id)
    message = await find_message(services, owner, chat_id, message_id)
    return await turn_view(request, services, owner, chat, [message.id], settled=not message.active, after=after)


@router.get("/text")
async def text(services: Services, owner: Owner, chat_id: str, message_id: str, part: Part = "answer") -> Response:
    """A message as it was written, Markdown and all, to be copied; `note`: why it failed."""
    message = await find_message(services, owner, chat_id, message_id)
    thoughts = f"<think>\n{message.reasoning}\n</think>\n\n" if message.reasoning else ""
    texts = {"answer": message.content, "reasoning": message.reasoning, "all": thoughts + message.content}
    texts["note"] = message.note
    return PlainTextResponse(texts[part])


@router.get("/edit")
async def edit_form(request: Request, services: Services, owner: Owner, chat_id: str, message_id: str) -> Response:
    """The message's text in a form."""
    chat = await find_chat(services, owner, chat_id)
    message = await find_message(services, owner, chat_id, message_id)
    template = "_edit.html" if is_fragment(request) else "edit.html"
    return await services.pages.respond(request, template, chat=chat, message=message, key=new_id())


@router.post("/edit")
async def edit(request: Request, services: Services, owner: Owner, chat_id: str, message_id: str) -> Response:
    """A changed question is asked again, beside the first; a changed answer takes the place of what it was."""
    chat = await find_chat(services, owner, chat_id)
    message = await find_message(services, owner, chat_id, message_id)
    fields = await read_form(request)
    if message.role == "user":
        kept = {name: value for name, value in _files(message.attachments) if name not in fields}
        await ask(services, owner, chat, fields | kept, instead_of=message.id)
    else:
        content = fields.get("text", "").strip("\n")
        if not content.strip() or len(content) > services.shared.settings.max_answer_characters:
            raise Problem(400, words["error_empty"] if not content.strip() else words["error_answer_too_long"])
        if not await services.shared.store.edit_answer(owner, chat.id, message.id, content):
            raise Problem(409, words["error_running"])
    services.feed.announce(owner, chat.id, tab_of(request))
    return await turns_view(request, services, owner, chat.id)


@router.post("/regenerate")
async def regenerate(request: Request, services: Services, owner: Owner, chat_id: str, message_id: str) -> Response:
    """Another answer to the same question, beside the first."""
    chat = await find_chat(services, owner, chat_id)
    message = await find_message(services, owner, chat_id, message_id)
    await answer_again(services, owner, chat, message.id, await read_form(request))
    services.feed.announce(owner, chat.id, tab_of(request))
    return await turns_view(request, services, owner, chat.id)


@router.post("/continue")
async def continue_answer(
    request: Request, services: Services, owner: Owner, chat_id: str, message_id: str
) -> Response:
    """Write the same answer on; with mode `answer`, an unfinished thought is closed first."""
    chat = await find_chat(services, owner, chat_id)
    message = await find_message(services, owner, chat_id, message_id)
    fields = await read_form(request)
    if (
        message.role != "assistant"
        or message.kind != "turn"
        or fields.get("mode", "") not in ("", "thinking", "answer")
    ):
        raise Problem(400, words["error_form"])
    await write_on(services, owner, chat, message.id, hurry=fields.get("mode") == "answer")
    services.feed.announce(owner, chat.id, tab_of(request))
    return await turns_view(request, services, owner, chat.id)


@router.post("/choose")
async def choose(request: Request, services: Services, owner: Owner, chat_id: str, message_id: str) -> Response:
    """Show this version, and remember it."""
    chat = await find_chat(services, owner, chat_id)
    message = await find_message(services, owner, chat_id, message_id)
    await read_form(request)
    await services.shared.store.choose(owner, chat.id, message.id)
    services.feed.announce(owner, chat.id, tab_of(request))
    return await turns_view(request, services, owner, chat.id)


@router.post("/unsummarize")
async def unsummarize(request: Request, services: Services, owner: Owner, chat_id: str, message_id: str) -> Response:
    """Take a summary out: the model reads everything again."""
    chat = await find_chat(services, owner, chat_id)
    message = await find_message(services, owner, chat_id, message_id)
    await read_form(request)
    if not await services.shared.store.remove_summary(owner, chat.id, message.id):
        raise Problem(409, words["error_running"])
    services.feed.announce(owner, chat.id, tab_of(request))
    return await turns_view(request, services, owner, chat.id)


def _files(attachments: tuple[Attachment, ...]) -> list[tuple[str, str]]:
    """Attachments as the fields of the form that sent them."""
    return [
        (f"file-{number}-{part}", getattr(each, part))
        for number, each in enumerate(attachments, start=1)
        for part in ("name", "text")
    ]
