"""The models there are: one at a time, and what adapters make of it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from notso.smollm3 import AdapterInfo, ModelInfo
from notso.web.api.shared.completion import model_id
from notso.web.api.shared.model_names import adapter_id, names_of, require_model
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import ready_engine
from notso.web.edge.access import guarded

router = APIRouter(dependencies=[Depends(guarded)])


@router.get("/v1/models")
async def list_models(services: Services) -> Response:
    """The model that answers, and itself with each adapter; none while it loads."""
    engine, info = services.shared.engine.engine, services.shared.engine.info
    data = [await asyncio.to_thread(_model_entry, info)] if info is not None else []
    if engine is not None and info is not None:
        data += [_adapter_entry(info, each, data[0]) for each in engine.adapters.infos.values()]
    return JSONResponse({"object": "list", "data": data})


@router.get("/v1/models/{name:path}")
async def show_model(services: Services, name: str) -> Response:
    """The model that answers, by any of its names."""
    engine, info = ready_engine(services)
    adapter = require_model(name, info, engine.adapters.infos)
    entry = await asyncio.to_thread(_model_entry, info)
    return JSONResponse(entry if adapter is None else _adapter_entry(info, engine.adapters.infos[adapter], entry))


def _adapter_entry(info: ModelInfo, adapter: AdapterInfo, base: dict[str, Any]) -> dict[str, Any]:
    """As vLLM lists adapters: `parent` is the model that they belong to."""
    return base | {
        "id": adapter_id(info, adapter.name),
        "parent": base["id"],
        "aliases": [adapter.name],
        "meta": {"rank": adapter.rank, "scale": adapter.scale, "size": adapter.size_bytes},
    }


def _model_entry(info: ModelInfo) -> dict[str, Any]:
    path = Path(info.path)
    return {
        "id": model_id(info),
        "object": "model",
        "created": int(path.stat().st_mtime) if info.path and path.exists() else 0,
        "owned_by": "notso",
        "aliases": sorted(names_of(info) - {model_id(info)}),
        "meta": {
            "n_ctx": info.context_tokens,
            "n_params": info.parameter_count,
            "size": info.size_bytes,
            "demo": info.is_demo,
        },
    }
