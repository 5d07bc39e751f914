"""The models there are: one at a time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from notso.smollm3 import ModelInfo
from notso.web.api.shared.completion import model_id
from notso.web.api.shared.model_names import names_of, require_model
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import ready_engine
from notso.web.edge.access import guarded

router = APIRouter(dependencies=[Depends(guarded)])


@router.get("/v1/models")
async def list_models(services: Services) -> Response:
    """The model that answers; none while it loads."""
    info = services.shared.engine.info
    data = [await asyncio.to_thread(_model_entry, info)] if info is not None else []
    return JSONResponse({"object": "list", "data": data})


@router.get("/v1/models/{name:path}")
async def show_model(services: Services, name: str) -> Response:
    """The model that answers, by any of its names."""
    info = ready_engine(services)[1]
    require_model(name, info)
    return JSONResponse(await asyncio.to_thread(_model_entry, info))


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
