"""Model listing: the default model, installed files and their adapters."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from notso.smollm3 import ModelInfo
from notso.web.api.shared.services import ApiServices, Services
from notso.web.api.shared.serving import chosen_model
from notso.web.edge.access import guarded
from notso.web.edge.api_error import ApiError
from notso.web.engine.model_names import (
    ModelChoice,
    adapters_of,
    listed_names,
    model_id,
    names_of,
    other_models,
    served_file,
)
from notso.web.engine.models import Installed
from notso.web.engine.served_model import ServedModel

router = APIRouter(dependencies=[Depends(guarded)])


@router.get("/v1/models")
async def list_models(services: Services) -> Response:
    """List models and adapters, the default model first. Empty until that is loaded."""
    return JSONResponse({"object": "list", "data": [entry for _, entry in await _entries(services)]})


@router.get("/v1/models/{name:path}")
async def show_model(services: Services, name: str) -> Response:
    """Describe a model by any of its names."""
    choice = await chosen_model(services, name)
    for listed, entry in await _entries(services):
        if listed == choice:
            return JSONResponse(entry)
    raise ApiError(404, "model_not_found", "that model is not here any more", param="model")


async def _entries(services: ApiServices) -> list[tuple[ModelChoice, dict[str, Any]]]:
    host, registry = services.shared.engine, services.shared.model_registry
    entries: list[tuple[ModelChoice, dict[str, Any]]] = []
    info = host.info
    if info is not None:
        created = await asyncio.to_thread(_changed_s, Path(info.path) if info.path else None)
        entry = _loaded_entry(info, host.default, created)
        entries += [(ModelChoice(), entry), *_with_adapters(host.default, entry)]
    if registry is None or (info is None and host.state != "failed"):
        return entries
    others = await asyncio.to_thread(other_models, host, registry)
    dates = await asyncio.to_thread(lambda: [_changed_s(each.model.path) for each in others])
    for installed, created in zip(others, dates, strict=True):
        served = served_file(host, registry, installed)
        entry = _installed_entry(installed, served, created)
        entries += [(ModelChoice(served.key), entry), *_with_adapters(served, entry)]
    return entries


def _changed_s(path: Path | None) -> int:
    return int(path.stat().st_mtime) if path is not None and path.exists() else 0


def _with_adapters(served: ServedModel, base: dict[str, Any]) -> Iterator[tuple[ModelChoice, dict[str, Any]]]:
    # As in vLLM, `parent` is the adapter's base model.
    infos = served.engine.adapters.infos if served.engine is not None else {}
    for name in adapters_of(served):
        info = infos.get(name)
        meta = {"rank": info.rank, "scale": info.scale, "size": info.size_bytes} if info is not None else {}
        about = {"id": f"{base['id']}:{name.lower()}", "parent": base["id"], "aliases": [name], "meta": meta}
        yield ModelChoice(served.key, name), base | about


def _loaded_entry(info: ModelInfo, served: ServedModel, created: int) -> dict[str, Any]:
    own = {
        "n_ctx": info.context_tokens,
        "n_params": info.parameter_count,
        "size": info.size_bytes,
        "demo": info.is_demo,
        "loaded": served.engine is not None,
    }
    names = names_of(info) | ({served.name} if served.name else set())
    return _entry(model_id(info), created, sorted(names - {model_id(info)}), own)


def _installed_entry(installed: Installed, served: ServedModel, created: int) -> dict[str, Any]:
    meta: dict[str, Any] = {"size": installed.model.size_bytes, "demo": installed.path is None}
    if served.info is not None:
        meta = {"n_ctx": served.info.context_tokens, "n_params": served.info.parameter_count} | meta
    names = sorted(listed_names(installed) - {served.name})
    return _entry(served.name, created, names, meta | {"loaded": served.engine is not None})


def _entry(id: str, created: int, aliases: list[str], meta: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": id,
        "object": "model",
        "created": created,
        "owned_by": "notso",
        "aliases": aliases,
        "meta": meta,
    }
