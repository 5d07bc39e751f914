"""Routes for tools, for prompts and resources of MCP servers, and for commands and pages of plugins."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, cast

from fastapi import APIRouter, Response
from starlette.responses import JSONResponse, RedirectResponse

from notso.plugins.errors import PluginError, PluginRefusalError
from notso.plugins.process import START_SECONDS, PluginProcess
from notso.smollm3 import Message, ModelError, RequestOptions
from notso.web.chat.chat_view import require
from notso.web.chat.services import engine_and_registry
from notso.web.chat.submit import load_settings
from notso.web.chat.views import Fields, FoundGeneration, NamedChat, Page, PageRequest, find_chat, render_page
from notso.web.edge.access import GUARDED, operator_only
from notso.web.edge.forms import read_form
from notso.web.engine.model_names import engine_if_loaded
from notso.web.engine.port import ChatEngine
from notso.web.store.protocol import SettingValue
from notso.web.tools.chat_tool import ChatTool
from notso.web.turns.chat_settings import allowed_digests, merge_settings, with_tools
from notso.web.turns.documents import MAX_ATTACHMENT_BYTES
from notso.web.turns.tool_calls import PERMISSIONS, Permission
from notso.web.values.child_work import call_plugin
from notso.web.values.errors import Problem, ToolError
from notso.web.values.wording import number, words

plugins_router = APIRouter()

COMMAND_SECONDS = 10.0
PAGE_SECONDS = 10.0
MAX_TOAST_CHARACTERS = 2_000
NO_SCRIPTS = (
    "default-src 'none'; style-src 'self'; img-src 'self'; font-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
"""Content security policy for plugins' pages. It blocks even notso's own scripts, which a plugin could misuse."""
MEDIA_TYPES = ("text/html", "text/plain", "text/csv", "application/json")


@plugins_router.post("/plugins/{name}/start", dependencies=[operator_only(audit="switched a plugin on")])
async def start_plugin(page: Page, _: Fields, name: str) -> Response:
    process = _require_plugin(page, name)
    await asyncio.to_thread(process.start)
    await asyncio.to_thread(process.ready.wait, START_SECONDS)
    return RedirectResponse("/settings", 303)


@plugins_router.post("/plugins/{name}/commands/{command}", dependencies=[GUARDED])
async def run_command(page: Page, fields: Fields, name: str, command: str) -> Response:
    process = _require_plugin(page, name)
    require(any(row["name"] == command for row in process.offer.get("slash_commands", [])))
    params = {"name": command, "argument": fields.get("argument", "")}
    text = str(await _call_plugin(process, "command", params, f"command {command}", COMMAND_SECONDS))
    toast = {"text": text[:MAX_TOAST_CHARACTERS], "undo_url": ""}
    if not page.is_fragment:
        return await page.respond("problem.html", problem=toast["text"])
    return await page.respond("_toast.html", toast=toast)


@plugins_router.get("/plugins/{name}/pages/{path:path}", dependencies=[GUARDED])
@plugins_router.post("/plugins/{name}/pages/{path:path}", dependencies=[GUARDED])
async def show_page(page: Page, name: str, path: str) -> Response:
    request = page.request
    form = await read_form(request) if request.method == "POST" else {}
    process = _require_plugin(page, name)
    require(any(row["path"] == path for row in process.offer.get("pages", [])))
    query = dict(request.query_params)
    params = {"method": request.method, "path": path, "query": query, "form": form, "owner": page.owner}
    answer = await _call_plugin(process, "page", params, f"page {path or '/'}", PAGE_SECONDS)
    body, media_type, status = answer["body"], answer["media_type"], answer["status"]
    if media_type not in MEDIA_TYPES or not _is_status(status):
        raise Problem(502, words["error_plugin_page"].format(name=name))
    headers = {"Content-Security-Policy": NO_SCRIPTS}
    return Response(body.encode("utf-8", "replace"), status, headers, f"{media_type}; charset=utf-8")


def _is_status(status: Any) -> bool:
    # Allows 2xx statuses with a body, and 4xx statuses except 401.
    return type(status) is int and (200 <= status < 300 or 400 <= status < 500) and status not in (204, 205, 401)


def _require_plugin(page: PageRequest, name: str) -> PluginProcess:
    return require(page.services.shared.plugins.find(name))


async def _call_plugin(process: PluginProcess, kind: str, params: Mapping[str, Any], what: str, seconds: float) -> Any:
    try:
        return await call_plugin(process, kind, params, what, seconds)
    except PluginRefusalError as error:
        raise Problem(422, str(error)) from None
    except PluginError as error:
        raise Problem(502, str(error)) from None


router = APIRouter()

OFFER_SECONDS = 60.0
MAX_CHOICES = 1000  # maximum number of fields in the form that enables tools; each plugin may have 32 tools


@router.get("/generations/{generation_id}/permission", dependencies=[GUARDED])
async def show_permission(page: Page, message: FoundGeneration) -> Response:
    """Show a pending request for permission or input."""
    generation_id = message.generation_id or ""
    return await page.respond(
        "_tool_permission.html",
        asking=page.services.turns.asking(generation_id),
        question=page.services.turns.question(generation_id),
        generation_id=generation_id,
        message_id=message.id,
    )


@router.post("/generations/{generation_id}/permission", dependencies=[GUARDED])
async def give_permission(page: Page, message: FoundGeneration, fields: Fields, generation_id: str) -> Response:
    """Reply to a permission request. A late reply has no effect."""
    permission, call = fields.get("answer", ""), fields.get("call", "")
    if permission not in PERMISSIONS:
        raise Problem(400, words["error_form"])
    permitted = page.services.turns.permit(generation_id, call, cast(Permission, permission))
    require(permitted or any(use.id == call for use in message.tool_uses), words["error_permission"], 409)
    if not page.is_fragment:
        return RedirectResponse(f"/chats/{message.chat_id}", 303)
    return await show_permission(page, message)


@router.post("/generations/{generation_id}/question", dependencies=[GUARDED])
async def answer_question(page: Page, message: FoundGeneration, fields: Fields, generation_id: str) -> Response:
    """Reply to a tool server's request for input, or decline it."""
    form = {name: value for name, value in fields.items() if name == "answer" or name.startswith("value-")}
    replied = message.active and page.services.turns.reply(generation_id, fields.get("question", ""), form)
    require(replied, words["error_question"], 409)
    if not page.is_fragment:
        return RedirectResponse(f"/chats/{message.chat_id}", 303)
    return await show_permission(page, message)


@router.get("/tools", dependencies=[GUARDED])
@router.get("/chats/{chat_id}/tools", dependencies=[GUARDED])
async def show_tools(page: Page, chat: NamedChat) -> Response:
    services = page.services
    await services.toolbox.ready()
    settings = await load_settings(page, chat)
    chosen = services.toolbox.chosen(settings.tool_names)
    (engine, _), costs = await engine_if_loaded(*engine_and_registry(services), settings.model), None
    if engine is not None:
        thinking = chat.thinking if chat is not None else True
        day = chat.prompt_date if chat is not None else date.today()
        try:
            costs = await asyncio.to_thread(_costs, engine, services.toolbox.all(), chosen, thinking, day)
        except ModelError:
            costs = None  # the engine is shutting down, or its template does not support tools
    return await render_page(
        page,
        "tools.html",
        chat=chat,
        tools=services.toolbox.all(),
        chosen={tool.name for tool in chosen},
        allowed=allowed_digests(chat),
        costs=costs,
        failures=services.toolbox.failures(),
        left_out=services.toolbox.left_out(),
    )


@router.post("/tools", dependencies=[GUARDED])
@router.post("/chats/{chat_id}/tools", dependencies=[GUARDED])
async def choose_tools(page: Page, chat: NamedChat) -> Response:
    fields = await read_form(page.request, most=MAX_CHOICES)
    toolbox = page.services.toolbox
    await toolbox.ready()
    tools, base = toolbox.all(), await page.store.chat_base(page.owner, chat.project if chat is not None else "")

    def change(settings: Mapping[str, SettingValue]) -> dict[str, SettingValue]:
        stored = merge_settings(base.defaults, settings).tool_names
        names = [tool.name for tool in tools if _is_chosen(tool.name, fields, stored)]
        return with_tools(settings, names, ask_again="ask-again" in fields)

    if chat is None:
        await page.store.change_defaults(page.owner, change)
    else:
        await page.store.change_settings(page.owner, chat.id, change)
        chat = await find_chat(page, chat.id)
    if not page.is_fragment:
        return RedirectResponse(f"/chats/{chat.id}/tools" if chat is not None else "/tools", 303)
    return await show_tools(page, chat)


@router.post("/tools/offers/{command}", dependencies=[GUARDED])
async def fetch_offer(page: Page, fields: Fields, command: str) -> JSONResponse:
    """Return a prompt or resource of an MCP server."""
    offers = page.services.mcp.offers() if page.services.mcp is not None else ()
    offer = next((each for each in offers if each.command == command), None)
    if offer is None:
        return JSONResponse({"problem": words["error_unknown_page"]}, 404)
    try:
        async with asyncio.timeout(OFFER_SECONDS):
            text = await offer.fetch(fields.get("argument", ""))
    except (ToolError, TimeoutError) as error:
        reason = str(error) or f"{command} did not respond within {OFFER_SECONDS:g} s"
        return JSONResponse({"problem": f"/{command}: {reason}."}, 502)
    text = text.replace("\x00", " ").encode("utf-8", "replace").decode()
    if len(text.encode()) > MAX_ATTACHMENT_BYTES:
        return JSONResponse({"problem": words["attach_too_long"].format(characters=number(len(text)))}, 422)
    return JSONResponse({"name": offer.name, "text": text})


def _is_chosen(name: str, fields: Mapping[str, str], stored: Sequence[str]) -> bool:
    checked = f"tool-{name}" in fields
    # If the user did not change the checkbox, keep the stored value, which another tab may have changed meanwhile.
    if "was" in fields and checked == (name in fields["was"].split()):
        return name in stored
    return checked


def _costs(
    engine: ChatEngine, tools: Sequence[ChatTool], chosen: Sequence[ChatTool], thinking: bool, day: date
) -> dict[str, int]:
    # Returns the token cost of each tool by name, and under '' the cost of all chosen tools together.
    question = (Message("user", ""),)

    def count(subset: Sequence[ChatTool]) -> int:
        definitions = [tool.definition for tool in subset] or None
        return engine.count_tokens(question, RequestOptions(thinking=thinking, tools=definitions, date=day))

    base = count(())
    return {tool.name: count([tool]) - base for tool in tools} | {"": count(chosen) - base}
