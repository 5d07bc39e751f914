"""Loading and unloading of adapters at runtime, on vLLM's endpoints.

Files are only read from the operator's `--adapter-dir`.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

from fastapi import APIRouter, Request
from starlette.responses import PlainTextResponse, Response

from notso.smollm3 import EngineError, InvalidRequestError, NotsoError, OutOfMemoryError
from notso.web.api.request_fields.fields import Fields, Notes, Text, hint, invalid, read_fields, works
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import known, read_body, serving
from notso.web.edge.access import operator_only
from notso.web.edge.api_error import ApiError
from notso.web.engine.adapter_files import within
from notso.web.engine.model_names import adapters_of
from notso.web.engine.port import AdapterSource

router = APIRouter()


class LoadFields(Fields):
    """The body of POST /v1/load_lora_adapter."""

    lora_name: Text
    lora_path: Text
    scale: float | None = None
    base_model_name: Text | None = None


LOAD_NOTES: Notes = {
    "lora_name": works("its name in requests: `model: smollm3:NAME`"),
    "lora_path": works("a GGUF file or PEFT folder in the folder given with `--adapter-dir`"),
    "scale": works("multiplies the adapter's own scale; default 1"),
    "base_model_name": works("its model, as in `model`; default: the default model"),
}


class UnloadFields(Fields):
    """The body of POST /v1/unload_lora_adapter."""

    lora_name: Text
    lora_int_id: int | None = None


UNLOAD_NOTES: Notes = {
    "lora_name": works("its name in requests"),
    "lora_int_id": hint("adapters have no numeric ids"),
}


@router.post("/v1/load_lora_adapter", dependencies=[operator_only(audit="loaded an adapter")])
async def load(request: Request, services: Services) -> Response:
    """Load an adapter. Requests may name it from then on."""
    fields = await read_body(request, lambda body: read_fields(LoadFields, body, LOAD_NOTES))
    path = _within(services.shared.settings.adapter_dir, fields.lora_path)
    async with serving(services, fields.base_model_name) as model:
        try:
            scale = 1.0 if fields.scale is None else fields.scale
            source = AdapterSource(fields.lora_name, str(path), scale)
            info = await asyncio.to_thread(model.engine.adapters.add, source)
        except (InvalidRequestError, EngineError, OutOfMemoryError) as error:
            raise known(error, {"adapter": "lora_name", "adapters": "lora_name"}) from error
        except NotsoError as error:
            raise invalid("lora_path", f"not an adapter for this model: {error}") from None
    return PlainTextResponse(f"Success: LoRA adapter '{info.name}' added successfully.")


@router.post("/v1/unload_lora_adapter", dependencies=[operator_only(audit="unloaded an adapter")])
async def unload(request: Request, services: Services) -> Response:
    """Unload an adapter. Running answers that use it continue."""
    fields = await read_body(request, lambda body: read_fields(UnloadFields, body, UNLOAD_NOTES))
    _within(services.shared.settings.adapter_dir, "")
    for served in services.shared.engine.models():
        names = {name.lower(): name for name in adapters_of(served)}
        name = names.get(fields.lora_name.lower())  # names are case-insensitive
        if name is not None:
            try:
                if served.engine is not None:
                    await asyncio.to_thread(served.engine.adapters.remove, name)
            except NotsoError as error:
                if name not in adapters_of(served):  # removed in between
                    break
                raise known(error, {"adapter": "lora_name"}) from error
            served.forget_adapter(name)
            return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
    raise ApiError(404, "model_not_found", "the adapter is not loaded", param="lora_name")


def _within(folder: Path | None, name: str) -> Path:
    if folder is None:
        raise ApiError(
            403, "not_allowed", "adapters are loaded by requests only where --adapter-dir names their folder"
        )
    path = within(folder, name)
    if path is None:
        raise invalid("lora_path", "adapters are taken from the folder that --adapter-dir names, and from nowhere else")
    return path
