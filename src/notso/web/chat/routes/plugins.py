"""Routes for plugins: their commands, their pages, and restarting after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from notso.plugins.errors import PluginError, PluginRefusalError
from notso.plugins.process import PluginProcess
from notso.web.chat.services import ChatServices, Services
from notso.web.chat.templates import is_fragment
from notso.web.chat.views import Owner
from notso.web.edge.access import GUARDED, operator_only
from notso.web.edge.forms import read_form
from notso.web.values.child_work import call_plugin
from notso.web.values.errors import Problem
from notso.web.values.wording import words

router = APIRouter()

COMMAND_SECONDS = 10.0
PAGE_SECONDS = 10.0
MAX_TOAST_CHARACTERS = 2_000
NO_SCRIPTS = (
    "default-src 'none'; style-src 'self'; img-src 'self'; font-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
"""Policy without any script, even ours: untrusted text on a plugin's page could trigger them by markup."""
MEDIA_TYPES = ("text/html", "text/plain", "text/csv", "application/json")


@router.post("/plugins/{name}/start", dependencies=[operator_only(audit="switched a plugin on")])
async def start_plugin(request: Request, services: Services, name: str) -> Response:
    await read_form(request)
    process = _find(services, name)
    await asyncio.to_thread(process.start)
    await asyncio.to_thread(process.wait)
    return RedirectResponse("/settings", 303)


@router.post("/plugins/{name}/commands/{command}", dependencies=[GUARDED])
async def run_command(request: Request, services: Services, name: str, command: str) -> Response:
    argument = (await read_form(request)).get("argument", "")
    process = _find(services, name)
    rows = process.offer.get("slash_commands", [])
    if not any(row["name"] == command for row in rows):
        raise Problem(404, words["error_unknown_page"])
    given = {"name": command, "argument": argument}
    text = str(await _asked(process, "command", given, f"command {command}", COMMAND_SECONDS))
    toast = {"text": text[:MAX_TOAST_CHARACTERS], "undo_url": ""}
    if not is_fragment(request):
        return await services.pages.respond(request, "problem.html", problem=toast["text"])
    return await services.pages.respond(request, "_toast.html", toast=toast)


@router.get("/plugins/{name}/pages/{path:path}", dependencies=[GUARDED])
@router.post("/plugins/{name}/pages/{path:path}", dependencies=[GUARDED])
async def show_page(request: Request, services: Services, owner: Owner, name: str, path: str) -> Response:
    """Serve a plugin's page under a stricter policy."""
    form = await read_form(request) if request.method == "POST" else {}
    process = _find(services, name)
    if not any(row["path"] == path for row in process.offer.get("pages", [])):
        raise Problem(404, words["error_unknown_page"])
    given = {
        "method": request.method,
        "path": path,
        "query": dict(request.query_params),
        "form": form,
        "owner": owner,
    }
    shown = await _asked(process, "page", given, f"page {path or '/'}", PAGE_SECONDS)
    body, media_type, status = shown["body"], shown["media_type"], shown["status"]
    if media_type not in MEDIA_TYPES or not _is_status(status):
        raise Problem(502, words["error_plugin_page"].format(name=name))
    headers = {"Content-Security-Policy": NO_SCRIPTS}
    return Response(body.encode("utf-8", "replace"), status, headers, f"{media_type}; charset=utf-8")


def _is_status(status: Any) -> bool:
    # No redirects, no 401, and neither 204 nor 205, which have no body.
    return type(status) is int and (200 <= status < 300 or 400 <= status < 500) and status not in (204, 205, 401)


def _find(services: ChatServices, name: str) -> PluginProcess:
    process = services.shared.plugins.find(name)
    if process is None:
        raise Problem(404, words["error_unknown_page"])
    return process


async def _asked(process: PluginProcess, kind: str, given: Mapping[str, Any], what: str, seconds: float) -> Any:
    try:
        return await call_plugin(process, kind, given, what, seconds)
    except PluginRefusalError as error:
        raise Problem(422, str(error)) from None
    except PluginError as error:
        raise Problem(502, str(error)) from None
