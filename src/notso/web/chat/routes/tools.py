"""Permission for tool calls, and the selection of tools for a chat."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import date
from typing import cast

from fastapi import APIRouter, Request, Response
from starlette.responses import JSONResponse, RedirectResponse

from notso.web.chat.services import ChatServices, Services, models_of
from notso.web.chat.submit import allowed_in, settings_of, with_tools
from notso.web.chat.templates import is_fragment
from notso.web.chat.views import NamedChat, Owner, find_chat, find_generation, sidebar_context
from notso.web.edge.access import GUARDED
from notso.web.edge.forms import read_form
from notso.web.engine.model_names import loaded_engine
from notso.web.engine.port import ChatEngine, Message, ModelError, RequestOptions
from notso.web.store.protocol import Chat, StoredMessage
from notso.web.tools.chat_tool import ChatTool
from notso.web.turns.attachments import MAX_ATTACHMENT_BYTES
from notso.web.turns.tool_calls import PERMISSIONS, Permission
from notso.web.values.errors import Problem, ToolError
from notso.web.values.wording import number, words

router = APIRouter()

OFFER_SECONDS = 60.0


@router.get("/generations/{generation_id}/permission", dependencies=[GUARDED])
async def show_permission(request: Request, services: Services, owner: Owner, generation_id: str) -> Response:
    """Show a pending permission request or tool's question."""
    return await _permission(request, services, await find_generation(services, owner, generation_id))


@router.post("/generations/{generation_id}/permission", dependencies=[GUARDED])
async def give_permission(request: Request, services: Services, owner: Owner, generation_id: str) -> Response:
    """Answer a permission request; late answers change nothing."""
    message = await find_generation(services, owner, generation_id)
    fields = await read_form(request)
    permission = fields.get("answer", "")
    if permission not in PERMISSIONS:
        raise Problem(400, words["error_form"])
    if not services.turns.permit(generation_id, fields.get("call", ""), cast(Permission, permission)):
        known = any(use.id == fields.get("call") for use in message.tool_uses)
        if not known:
            raise Problem(409, words["error_permission"])
    if not is_fragment(request):
        return RedirectResponse(f"/chats/{message.chat_id}", 303)
    return await _permission(request, services, message)


@router.post("/generations/{generation_id}/question", dependencies=[GUARDED])
async def answer_question(request: Request, services: Services, owner: Owner, generation_id: str) -> Response:
    """Answer a tool server's question, or decline."""
    message = await find_generation(services, owner, generation_id)
    fields = await read_form(request)
    form = {name: value for name, value in fields.items() if name == "answer" or name.startswith("value-")}
    if not message.active or not services.turns.reply(generation_id, fields.get("question", ""), form):
        raise Problem(409, words["error_question"])
    if not is_fragment(request):
        return RedirectResponse(f"/chats/{message.chat_id}", 303)
    return await _permission(request, services, message)


@router.get("/tools", dependencies=[GUARDED])
@router.get("/chats/{chat_id}/tools", dependencies=[GUARDED])
async def show_tools(request: Request, services: Services, owner: Owner, chat: NamedChat) -> Response:
    """Show the available tools with their prompt cost."""
    return await _show(request, services, owner, chat)


@router.post("/tools", dependencies=[GUARDED])
@router.post("/chats/{chat_id}/tools", dependencies=[GUARDED])
async def choose_tools(request: Request, services: Services, owner: Owner, chat: NamedChat) -> Response:
    fields = await read_form(request)
    await services.toolbox.ready()
    stored = (await settings_of(services, owner, chat)).tool_names
    names = [tool.name for tool in services.toolbox.all() if _is_chosen(tool.name, fields, stored)]
    if chat is None:
        await services.shared.store.set_defaults(owner, with_tools(await services.shared.store.defaults(owner), names))
    else:
        settings = with_tools(chat.settings, names, ask_again="ask-again" in fields)
        await services.shared.store.update_chat(owner, chat.id, settings=settings)
        chat = await find_chat(services, owner, chat.id)
    if not is_fragment(request):
        return RedirectResponse(f"/chats/{chat.id}/tools" if chat is not None else "/tools", 303)
    return await _show(request, services, owner, chat)


@router.post("/tools/offers/{command}", dependencies=[GUARDED])
async def fetch_offer(request: Request, services: Services, command: str) -> JSONResponse:
    """Return the text of an MCP server's prompt, or the name and text of its resource."""
    typed = (await read_form(request)).get("argument", "")
    offers = services.mcp.offers() if services.mcp is not None else ()
    offer = next((each for each in offers if each.command == command), None)
    if offer is None:
        return JSONResponse({"problem": words["error_unknown_page"]}, 404)
    try:
        async with asyncio.timeout(OFFER_SECONDS):
            text = (await offer.fetch(typed)).replace("\x00", " ").encode("utf-8", "replace").decode()
    except (ToolError, TimeoutError) as error:
        reason = str(error) or f"{command} did not respond within {OFFER_SECONDS:g} s"
        return JSONResponse({"problem": f"/{command}: {reason}."}, 502)
    if len(text.encode()) > MAX_ATTACHMENT_BYTES:
        return JSONResponse({"problem": words["attach_too_long"].format(characters=number(len(text)))}, 422)
    return JSONResponse({"name": offer.name, "text": text})


def _is_chosen(name: str, fields: Mapping[str, str], stored: Sequence[str]) -> bool:
    checked = f"tool-{name}" in fields
    # Unchanged in this form: another tab may have changed the stored value since.
    if "was" in fields and checked == (name in fields["was"].split()):
        return name in stored
    return checked


async def _permission(request: Request, services: ChatServices, message: StoredMessage) -> Response:
    generation_id = message.generation_id or ""
    return await services.pages.respond(
        request,
        "_tool_permission.html",
        asking=services.turns.asking(generation_id),
        question=services.turns.question(generation_id),
        generation_id=generation_id,
        message_id=message.id,
    )


async def _show(request: Request, services: ChatServices, owner: str, chat: Chat | None) -> Response:
    await services.toolbox.ready()
    settings = await settings_of(services, owner, chat)
    chosen = services.toolbox.chosen(settings.tool_names)
    (engine, _), costs = await loaded_engine(*models_of(services), settings.model), None
    if engine is not None:
        thinking = chat.thinking if chat is not None else True
        day = chat.prompt_date if chat is not None else date.today()
        try:
            costs = await asyncio.to_thread(_costs, engine, services.toolbox.all(), chosen, thinking, day)
        except ModelError:
            costs = None  # the engine is shutting down, or its template has no tools
    return await services.pages.respond(
        request,
        "_tools.html" if is_fragment(request) else "tools.html",
        **({"chat": chat} if is_fragment(request) else await sidebar_context(services, owner, chat)),
        tools=services.toolbox.all(),
        chosen={tool.name for tool in chosen},
        allowed=allowed_in(chat),
        costs=costs,
        failures=services.toolbox.failures(),
        left_out=services.toolbox.left_out(),
    )


def _costs(
    engine: ChatEngine, tools: Sequence[ChatTool], chosen: Sequence[ChatTool], thinking: bool, day: date
) -> dict[str, int]:
    """Tokens of each tool, and under '' of all chosen ones."""
    question = (Message("user", ""),)

    def count(some: Sequence[ChatTool]) -> int:
        definitions = [tool.definition for tool in some] or None
        return engine.count_tokens(question, RequestOptions(thinking=thinking, tools=definitions, date=day))

    bare = count(())
    return {tool.name: count([tool]) - bare for tool in tools} | {"": count(chosen) - bare}
