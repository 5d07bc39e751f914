"""The models page: loaded and available models and adapters, and downloads."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Response
from starlette.responses import RedirectResponse

from notso.smollm3 import AdapterSource, official_files
from notso.web.chat.chat_view import require
from notso.web.chat.services import ChatServices
from notso.web.chat.views import Fields, Page, status_context
from notso.web.edge.access import GUARDED, operator_only
from notso.web.engine.downloads import create_switch_callback
from notso.web.engine.model_names import register_installed
from notso.web.engine.models import Inventory, adapter_files, resolve_within, scan_models
from notso.web.values.errors import NotsoError, Problem
from notso.web.values.ids import is_id
from notso.web.values.wording import words

router = APIRouter()


@router.get("/models", dependencies=[GUARDED])
async def models_page(page: Page, chat: str = "") -> Response:
    """Show the models. After a model is loaded, the page returns to `chat` (an id, or "new"), if given."""
    context = await _context(page.services) | {"return_to": chat if is_id(chat) else "" if chat == "new" else None}
    return await page.respond_with_sidebar("models.html", **context)


@router.get("/models/download", dependencies=[GUARDED])
async def show_download(page: Page) -> Response:
    # The page polls this part while a model is downloaded or loaded.
    if not page.is_fragment:
        return RedirectResponse("/models", 303)
    return await page.respond("_models.html", **await _context(page.services))


@router.post("/models/download", dependencies=[operator_only(audit="fetched a model")])
async def begin_download(page: Page, fields: Fields) -> Response:
    """Start or resume a download. If the demo model is the default, the downloaded model replaces it."""
    services, name = page.services, fields.get("name", "")
    file = require(next((file for file in official_files() if file.name == name), None), words["error_unknown_model"])
    if services.shared.stopping:
        raise Problem(503, words["error_stopping"], retry_after_seconds=5)
    on_complete = create_switch_callback(services.shared.engine, services.shared.model_registry, file)
    require(services.downloads.start(file, on_complete), words["error_downloading"], 409)
    return await show_download(page)


@router.post("/models/download/stop", dependencies=[operator_only()])
async def stop_download(page: Page, _: Fields) -> Response:
    page.services.downloads.stop()
    return await show_download(page)


@router.post("/models/switch", dependencies=[operator_only(audit="switched the model")])
async def switch_model(page: Page, fields: Fields) -> Response:
    """Make another model the default. Running answers continue; new ones wait for the model."""
    services = page.services
    host, registry = services.shared.engine, services.shared.model_registry
    name, inventory = fields.get("model", ""), await _inventory(services)
    chosen = inventory.find(name)
    if chosen is None and "command" in fields:
        # In a slash command, an unambiguous part of a model's name is sufficient.
        matches = inventory.search(name)
        if len(matches) > 1:
            names = words["comma"].join(each.model.name for each in matches)
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
    return page.redirect(address)


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
async def load_adapter(page: Page, fields: Fields) -> Response:
    """Load an adapter for the default model."""
    shared, file = page.services.shared, fields.get("file", "")
    folder = shared.settings.adapter_dir
    found = resolve_within(folder, file) if folder is not None and file else None
    path = require(found, words["error_unknown_adapter"])
    engine = shared.engine.engine
    if engine is None:
        raise Problem(503, words["error_loading"], retry_after_seconds=5)
    try:
        await asyncio.to_thread(engine.adapters.add, AdapterSource(fields.get("name", "").strip(), str(path)))
    except NotsoError as error:
        raise Problem(400, words["error_adapter"].format(reason=error)) from error
    return await show_download(page)


@router.post("/models/adapters/unload", dependencies=[operator_only(audit="unloaded an adapter")])
async def unload_adapter(page: Page, fields: Fields) -> Response:
    """Unload an adapter. Running answers keep using it."""
    name, engine = fields.get("name", ""), page.services.shared.engine.engine
    if engine is None or name not in engine.adapters.infos:
        raise Problem(404, words["error_unknown_adapter"])
    try:
        await asyncio.to_thread(engine.adapters.remove, name)
    except NotsoError as error:
        if name not in engine.adapters.infos:
            raise Problem(404, words["error_unknown_adapter"]) from error
        raise Problem(400, words["error_adapter"].format(reason=error)) from error
    return await show_download(page)
