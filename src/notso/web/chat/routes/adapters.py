"""Routes that load adapters from the operator's folder and remove them."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Request, Response

from notso.web.chat.routes.models import shown
from notso.web.chat.services import Services
from notso.web.edge.access import operator_only
from notso.web.edge.forms import read_form
from notso.web.engine.adapter_files import within
from notso.web.engine.port import AdapterSource
from notso.web.values.errors import NotsoError
from notso.web.values.problems import Problem
from notso.web.values.wording import words

router = APIRouter()


@router.post("/models/adapters/load", dependencies=[operator_only(audit="loaded an adapter")])
async def load_adapter(request: Request, services: Services) -> Response:
    """Load an adapter for the default model."""
    fields = await read_form(request)
    folder, file = services.shared.settings.adapter_dir, fields.get("file", "")
    path = within(folder, file) if folder is not None and file else None
    if path is None:
        raise Problem(404, words["error_unknown_adapter"])
    engine = services.shared.engine.engine
    if engine is None:
        raise Problem(503, words["error_loading"], retry_after_seconds=5)
    try:
        await asyncio.to_thread(engine.adapters.add, AdapterSource(fields.get("name", "").strip(), str(path)))
    except NotsoError as error:
        raise Problem(400, words["error_adapter"].format(reason=error)) from error
    return await shown(request, services)


@router.post("/models/adapters/unload", dependencies=[operator_only(audit="unloaded an adapter")])
async def unload_adapter(request: Request, services: Services) -> Response:
    """Remove an adapter; running answers keep it until they end."""
    name, engine = (await read_form(request)).get("name", ""), services.shared.engine.engine
    if engine is None or name not in engine.adapters.infos:
        raise Problem(404, words["error_unknown_adapter"])
    try:
        await asyncio.to_thread(engine.adapters.remove, name)
    except NotsoError as error:
        if name not in engine.adapters.infos:  # removed in between
            raise Problem(404, words["error_unknown_adapter"]) from error
        raise Problem(400, words["error_adapter"].format(reason=error)) from error
    return await shown(request, services)
