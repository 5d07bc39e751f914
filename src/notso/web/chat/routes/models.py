"""The page about models: what answers now, what else is here, and fetching what is not."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import RedirectResponse

from notso.smollm3 import official_files
from notso.web.chat.services import ChatServices, Services
from notso.web.chat.templates import is_fragment
from notso.web.edge.access import guarded
from notso.web.edge.forms import read_form
from notso.web.engine.facts import model_facts
from notso.web.engine.models import Inventory, take_inventory
from notso.web.values.ids import is_id
from notso.web.values.problems import Problem
from notso.web.values.wording import words

router = APIRouter(dependencies=[Depends(guarded)])


@router.get("/models")
async def models_page(request: Request, services: Services) -> Response:
    """What answers now and what else could."""
    return await services.pages.respond(request, "models.html", **await _context(services))


@router.get("/models/download")
async def show_download(request: Request, services: Services) -> Response:
    """The page's moving part: what it asks for each second while something is loaded or fetched."""
    if not is_fragment(request):
        return RedirectResponse("/models", 303)
    return await services.pages.respond(request, "_models.html", **await _context(services))


@router.post("/models/download")
async def begin_download(request: Request, services: Services) -> Response:
    """Fetch an official file, or go on where that stopped."""
    name = (await read_form(request)).get("name", "")
    file = next((file for file in official_files() if file.name == name), None)
    if file is None:
        raise Problem(404, words["error_unknown_model"])
    if services.shared.stopping:
        raise Problem(503, words["error_stopping"], retry_after_seconds=5)
    if not services.downloads.start(file):
        raise Problem(409, words["error_downloading"])
    return await _shown(request, services)


@router.post("/models/download/stop")
async def stop_download(request: Request, services: Services) -> Response:
    """End a download; what has arrived is kept."""
    await read_form(request)
    services.downloads.stop()
    return await _shown(request, services)


@router.post("/models/switch")
async def switch_model(request: Request, services: Services) -> Response:
    """Load another model in place of this one. Chats stay; answers under way end with what they have.

    A command names it as a person would, by a part of its name that only one has.
    """
    fields = await read_form(request)
    name, inventory, model_registry = fields.get("model", ""), await _inventory(services), services.model_registry
    chosen = inventory.find(name)
    if chosen is None and "command" in fields:
        likely = inventory.like(name)
        if len(likely) > 1:
            names = ", ".join(each.model.name for each in likely)
            raise Problem(400, words["error_models_fit"].format(names=names))
        chosen = likely[0] if likely else None
    if chosen is None or model_registry is None:
        raise Problem(404, words["error_unknown_model"])
    if services.shared.stopping:
        raise Problem(503, words["error_stopping"], retry_after_seconds=5)
    path = chosen.path
    services.shared.engine.switch(lambda: model_registry.load(path))
    chat = fields.get("chat", "")
    address = f"/chats/{chat}" if is_id(chat) else "/" if "chat" in fields else "/models"
    if is_fragment(request):
        return Response(status_code=204, headers={"HX-Redirect": address})
    return RedirectResponse(address, 303)


async def _shown(request: Request, services: ChatServices) -> Response:
    if not is_fragment(request):
        return RedirectResponse("/models", 303)
    return await services.pages.respond(request, "_models.html", **await _context(services))


async def _context(services: ChatServices) -> dict[str, Any]:
    inventory = await _inventory(
        services
    )  # first: what is read below is of one moment, or the page may wait for what has come
    engine, download = services.shared.engine, services.downloads.current
    return {
        "engine_state": engine.state,
        "failure": engine.failure,
        "facts": model_facts(engine),
        "download": download,
        "inventory": inventory,
        "can_switch": services.model_registry is not None,
        "busy": services.turns.unfinished,
        "polling": engine.state == "loading" or (download is not None and download.active),
    }


async def _inventory(services: ChatServices) -> Inventory:
    folder = services.model_registry.folder if services.model_registry is not None else None
    return await asyncio.to_thread(take_inventory, services.shared.engine.info, folder)
