"""The models page: loaded and available models and adapters, and downloads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from notso.smollm3 import official_files
from notso.web.chat.services import ChatServices, Services
from notso.web.chat.templates import is_fragment
from notso.web.chat.views import Owner, redirect_to, sidebar_context, status_context
from notso.web.edge.access import GUARDED, operator_only
from notso.web.edge.forms import read_form
from notso.web.engine.downloads import create_switch_callback
from notso.web.engine.model_names import register_installed
from notso.web.engine.models import Inventory, adapter_files, resolve_within, scan_models
from notso.web.engine.port import AdapterSource
from notso.web.values.errors import NotsoError, Problem
from notso.web.values.ids import is_id
from notso.web.values.wording import words

router = APIRouter()


@router.get("/models", dependencies=[GUARDED])
async def models_page(request: Request, services: Services, owner: Owner, chat: str = "") -> Response:
    """Show the models. After a model is loaded, the page returns to `chat` (an id, or "new"), if given."""
    sidebar = await sidebar_context(services, owner)
    context = await _context(services) | {"return_to": chat if is_id(chat) else "" if chat == "new" else None}
    return await services.pages.respond(request, "models.html", **sidebar, **context)


@router.get("/models/download", dependencies=[GUARDED])
async def show_download(request: Request, services: Services) -> Response:
    # The page polls this part while a model is downloaded or loaded.
    if not is_fragment(request):
        return RedirectResponse("/models", 303)
    return await services.pages.respond(request, "_models.html", **await _context(services))


@router.post("/models/download", dependencies=[operator_only(audit="fetched a model")])
async def begin_download(request: Request, services: Services) -> Response:
    """Start or resume a download. If the demo model is the default, the downloaded model replaces it."""
    name = (await read_form(request)).get("name", "")
    file = next((file for file in official_files() if file.name == name), None)
    if file is None:
        raise Problem(404, words["error_unknown_model"])
    if services.shared.stopping:
        raise Problem(503, words["error_stopping"], retry_after_seconds=5)
    on_complete = create_switch_callback(services.shared.engine, services.shared.model_registry, file)
    if not services.downloads.start(file, on_complete):
        raise Problem(409, words["error_downloading"])
    return await models_response(request, services)


@router.post("/models/download/stop", dependencies=[operator_only()])
async def stop_download(request: Request, services: Services) -> Response:
    await read_form(request)
    services.downloads.stop()
    return await models_response(request, services)


@router.post("/models/switch", dependencies=[operator_only(audit="switched the model")])
async def switch_model(request: Request, services: Services) -> Response:
    """Make another model the default. Running answers continue; new ones wait for the model."""
    fields = await read_form(request)
    host, registry = services.shared.engine, services.shared.model_registry
    name, inventory = fields.get("model", ""), await _inventory(services)
    chosen = inventory.find(name)
    if chosen is None and "command" in fields:
        # A slash command may name a model by an unambiguous part of its name.
        matches = inventory.search(name)
        if len(matches) > 1:
            names = ", ".join(each.model.name for each in matches)
            raise Problem(400, words["error_models_fit"].format(names=names))
        chosen = matches[0] if matches else None
    if chosen is None or registry is None:
        raise Problem(404, words["error_unknown_model"])
    if services.shared.stopping:
        raise Problem(503, words["error_stopping"], retry_after_seconds=5)
    if registry.check is not None:
        try:
            # Reject an unsupported file before the current model is unloaded.
            await asyncio.to_thread(registry.check, chosen.path)
        except (NotsoError, OSError) as error:
            raise Problem(400, words["error_model_refused"].format(name=chosen.model.name, reason=error)) from error
    host.switch(register_installed(host, registry, chosen))
    chat = fields.get("chat", "")
    address = f"/chats/{chat}" if is_id(chat) else "/" if "chat" in fields else "/models"
    return redirect_to(request, address)


async def models_response(request: Request, services: ChatServices) -> Response:
    if not is_fragment(request):
        return RedirectResponse("/models", 303)
    return await services.pages.respond(request, "_models.html", **await _context(services))


async def _context(services: ChatServices) -> dict[str, Any]:
    folder = services.shared.settings.adapter_dir
    files = await asyncio.to_thread(adapter_files, folder)
    inventory = await _inventory(services)  # the last await, so that the state read below is consistent
    engine = services.shared.engine
    loaded = engine.engine.adapters.infos if engine.engine is not None else {}
    in_use = {Path(each.path).name for each in loaded.values()}
    return status_context(services) | {
        "inventory": inventory,
        "can_switch": services.shared.model_registry is not None,
        "loaded_paths": {served.path for served in engine.loaded()},
        "adapters": list(loaded.values()),
        "adapter_folder": folder,
        "adapter_files": [file for file in files if file.path not in in_use],
        "busy": services.turns.unfinished,
        "loading_paths": {served.path for served in engine.models() if served.state == "loading"},
        "return_to": None,
    }


async def _inventory(services: ChatServices) -> Inventory:
    registry = services.shared.model_registry
    folder = registry.folder if registry is not None else None
    return await asyncio.to_thread(scan_models, services.shared.engine.default.info, folder)


@router.post("/models/adapters/load", dependencies=[operator_only(audit="loaded an adapter")])
async def load_adapter(request: Request, services: Services) -> Response:
    """Load an adapter for the default model."""
    fields = await read_form(request)
    folder, file = services.shared.settings.adapter_dir, fields.get("file", "")
    path = resolve_within(folder, file) if folder is not None and file else None
    if path is None:
        raise Problem(404, words["error_unknown_adapter"])
    engine = services.shared.engine.engine
    if engine is None:
        raise Problem(503, words["error_loading"], retry_after_seconds=5)
    try:
        await asyncio.to_thread(engine.adapters.add, AdapterSource(fields.get("name", "").strip(), str(path)))
    except NotsoError as error:
        raise Problem(400, words["error_adapter"].format(reason=error)) from error
    return await models_response(request, services)


@router.post("/models/adapters/unload", dependencies=[operator_only(audit="unloaded an adapter")])
async def unload_adapter(request: Request, services: Services) -> Response:
    """Unload an adapter. Running answers keep using it."""
    name, engine = (await read_form(request)).get("name", ""), services.shared.engine.engine
    if engine is None or name not in engine.adapters.infos:
        raise Problem(404, words["error_unknown_adapter"])
    try:
        await asyncio.to_thread(engine.adapters.remove, name)
    except NotsoError as error:
        if name not in engine.adapters.infos:  # removed in the meantime
            raise Problem(404, words["error_unknown_adapter"]) from error
        raise Problem(400, words["error_adapter"].format(reason=error)) from error
    return await models_response(request, services)
