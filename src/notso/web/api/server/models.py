"""Routes that list models with their adapters, and vLLM's routes that load and unload adapters.

Requests can load only adapters in the folder given with `--adapter-dir`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response

from notso.smollm3 import AdapterSource, EngineError, InvalidRequestError, ModelInfo, NotsoError, OutOfMemoryError
from notso.web.api.request_fields.fields import Fields, Notes, Text, hint, invalid_field, notes_in, works
from notso.web.api.shared.listing import NANOSECONDS_PER_SECOND, modified_ns, paginate
from notso.web.api.shared.serializer import as_api_error
from notso.web.api.shared.services import ApiServices, Services
from notso.web.api.shared.serving import read_fields_and_headers, resolve_model_choice, serving
from notso.web.edge.access import GUARDED, operator_only
from notso.web.edge.errors import ApiError
from notso.web.engine.host import ServedModel
from notso.web.engine.model_names import (
    ModelChoice,
    accepted_names,
    adapter_names,
    listed_names,
    model_id,
    other_installed_models,
    register_installed,
)
from notso.web.engine.models import InstalledModel, resolve_within

adapters_router = APIRouter()


class LoadFields(Fields):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: Text
    lora_path: Text
    scale: float | None = None
    base_model_name: Text | None = None


LOAD_NOTES: Notes = {
    "lora_name": works("the adapter's name in requests: `model: smollm3:NAME`"),
    "lora_path": works("a GGUF file or PEFT folder in the folder given with `--adapter-dir`"),
    "scale": works("multiplies the adapter's own scale; default 1"),
    "base_model_name": works("name of the adapter's base model; default: the default model"),
}


class UnloadFields(Fields):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: Text
    lora_int_id: Annotated[int | None, hint("adapters have no numeric ids")] = None


UNLOAD_NOTES: Notes = {"lora_name": works("the adapter's name in requests")} | notes_in(UnloadFields)


@adapters_router.post("/v1/load_lora_adapter", dependencies=[operator_only(audit="loaded an adapter")])
async def load(request: Request, services: Services) -> Response:
    """Load an adapter. Later requests can name it in `model`."""
    fields, headers = await read_fields_and_headers(request, LoadFields, LOAD_NOTES)
    path = _resolve_adapter_path(services.shared.settings.adapter_dir, fields.lora_path)
    async with serving(services, fields.base_model_name) as model:
        try:
            scale = 1.0 if fields.scale is None else fields.scale
            source = AdapterSource(fields.lora_name, str(path), scale)
            info = await asyncio.to_thread(model.engine.adapters.add, source)
        except (InvalidRequestError, EngineError, OutOfMemoryError) as error:
            raise as_api_error(error, {"adapter": "lora_name", "adapters": "lora_name"}) from error
        except NotsoError as error:
            raise invalid_field("lora_path", f"not an adapter for this model: {error}") from None
    return PlainTextResponse(f"Success: LoRA adapter '{info.name}' added successfully.", headers=headers)


@adapters_router.post("/v1/unload_lora_adapter", dependencies=[operator_only(audit="unloaded an adapter")])
async def unload(request: Request, services: Services) -> Response:
    """Unload an adapter. Running answers that use it continue."""
    fields, headers = await read_fields_and_headers(request, UnloadFields, UNLOAD_NOTES)
    _resolve_adapter_path(services.shared.settings.adapter_dir, "")
    for served in services.shared.engine.models():
        names = {name.lower(): name for name in adapter_names(served)}
        name = names.get(fields.lora_name.lower())
        if name is not None:
            try:
                if served.engine is not None:
                    await asyncio.to_thread(served.engine.adapters.remove, name)
            except NotsoError as error:
                if name not in adapter_names(served):  # another request has removed the adapter in the meantime
                    break
                raise as_api_error(error, {"adapter": "lora_name"}) from error
            served.forget_adapter(name)
            return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.", headers=headers)
    raise ApiError(404, "model_not_found", "the adapter is not loaded", param="lora_name")


def _resolve_adapter_path(folder: Path | None, name: str) -> Path:
    if folder is None:
        raise ApiError(403, "not_allowed", "loading adapters by request requires the option --adapter-dir")
    path = resolve_within(folder, name)
    if path is None:
        raise invalid_field("lora_path", "the adapter is not in the folder given with --adapter-dir")
    return path


router = APIRouter()

ANTHROPIC_VERSION = "anthropic-version"
ANTHROPIC_MAX_LIMIT = 1000


@router.get("/v1/models", dependencies=[GUARDED])
async def list_models(request: Request, services: Services) -> Response:
    """List models and adapters, the default model first. The list is empty until the first load of the default
    model ends.

    With the request header `anthropic-version`, the format is Anthropic's.
    """
    entries = [entry for _, entry in await _entries(services)]
    if ANTHROPIC_VERSION not in request.headers:
        return JSONResponse({"object": "list", "data": entries})
    in_order = {**request.query_params, "order": "asc"}  # the default model first; Anthropic's API has no `order`
    page = paginate([_anthropic_entry(entry) for entry in entries], in_order, max_limit=ANTHROPIC_MAX_LIMIT)
    del page["object"]
    return JSONResponse(page)


@router.get("/v1/models/{name:path}", dependencies=[GUARDED])
async def show_model(request: Request, services: Services, name: str) -> Response:
    """Describe a model by any of its names."""
    if not name:
        return await list_models(request, services)
    choice = await resolve_model_choice(services, name)
    for listed, entry in await _entries(services):
        if listed == choice:
            return JSONResponse(_anthropic_entry(entry) if ANTHROPIC_VERSION in request.headers else entry)
    raise ApiError(404, "model_not_found", "that model is no longer installed", param="model")


def _anthropic_entry(entry: dict[str, Any]) -> dict[str, Any]:
    length = entry["meta"].get("n_ctx")
    created = datetime.fromtimestamp(entry["created"], UTC).isoformat().replace("+00:00", "Z")
    limits = {"max_input_tokens": length, "max_tokens": length} if length else {}
    about = {"type": "model", "id": entry["id"], "display_name": entry["id"], "created_at": created}
    return about | {"lifecycle": "active", **limits}


async def _entries(services: ApiServices) -> list[tuple[ModelChoice, dict[str, Any]]]:
    host, registry = services.shared.engine, services.shared.model_registry
    entries: list[tuple[ModelChoice, dict[str, Any]]] = []
    info = host.info
    if info is not None:
        entry = _loaded_entry(info, host.default, await asyncio.to_thread(_modified_s, info.path))
        entries += [(ModelChoice(), entry), *_with_adapters(host.default, entry)]
    if registry is None or (info is None and host.state != "failed"):
        return entries
    others = await asyncio.to_thread(other_installed_models, host, registry)
    dates = await asyncio.to_thread(lambda: [_modified_s(each.model.path) for each in others])
    for installed, created in zip(others, dates, strict=True):
        served = register_installed(host, registry, installed)
        entry = _installed_entry(installed, served, created)
        entries += [(ModelChoice(served.key), entry), *_with_adapters(served, entry)]
    return entries


def _modified_s(path: str | Path) -> int:
    return modified_ns(path) // NANOSECONDS_PER_SECOND


def _with_adapters(served: ServedModel, base: dict[str, Any]) -> Iterator[tuple[ModelChoice, dict[str, Any]]]:
    # As in vLLM, `parent` is the adapter's base model.
    infos = served.engine.adapters.infos if served.engine is not None else {}
    for name in adapter_names(served):
        info = infos.get(name)
        meta = {"rank": info.rank, "scale": info.scale, "size": info.size_bytes} if info is not None else {}
        about = {"id": f"{base['id']}:{name.lower()}", "parent": base["id"], "aliases": [name], "meta": meta}
        yield ModelChoice(served.key, name), base | about


def _loaded_entry(info: ModelInfo, served: ServedModel, created: int) -> dict[str, Any]:
    meta = {
        "n_ctx": info.context_tokens,
        "n_params": info.parameter_count,
        "size": info.size_bytes,
        "demo": info.is_demo,
        "loaded": served.engine is not None,
    }
    names = accepted_names(info) | ({served.name} if served.name else set())
    return _entry(model_id(info), created, sorted(names - {model_id(info)}), meta)


def _installed_entry(installed: InstalledModel, served: ServedModel, created: int) -> dict[str, Any]:
    meta: dict[str, Any] = {"size": installed.model.size_bytes, "demo": installed.path is None}
    if served.info is not None:
        meta = {"n_ctx": served.info.context_tokens, "n_params": served.info.parameter_count} | meta
    names = sorted(listed_names(installed) - {served.name})
    return _entry(served.name, created, names, meta | {"loaded": served.engine is not None})


def _entry(id: str, created: int, aliases: list[str], meta: dict[str, Any]) -> dict[str, Any]:
    return {"id": id, "object": "model", "created": created, "owned_by": "notso", "aliases": aliases, "meta": meta}
