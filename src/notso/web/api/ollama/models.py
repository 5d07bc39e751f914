"""What Ollama's clients ask before they talk: which version, which models, what one can do, what is loaded."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends, Request
from starlette.responses import JSONResponse, Response

from notso.smollm3 import ModelInfo
from notso.web.api.ollama.fields import SHOW_NOTES, ShowFields
from notso.web.api.ollama.names import listed_name, plain_name
from notso.web.api.ollama.stream import timestamp
from notso.web.api.request_fields.field_reader import invalid, read_fields
from notso.web.api.shared.completion import fingerprint, release
from notso.web.api.shared.model_names import require_model
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import read_body, ready_engine
from notso.web.edge.access import guarded

router = APIRouter(dependencies=[Depends(guarded)])

API_VERSION = "0.13.0"
"""Of Ollama, whose API is spoken here as of then: clients compare it with the oldest they can use."""
FAMILY = "smollm3"
CAPABILITIES = ("completion", "tools", "thinking")
NEVER = "9999-12-31T23:59:59Z"  # the model stays loaded
PLAIN_FORMATS = frozenset({"F32"})  # of norms, whatever the weights are in


@router.head("/")
async def heartbeat() -> Response:
    """Ollama's command line asks this before anything else."""
    return Response()


@router.get("/api/version")
@router.head("/api/version")
async def version() -> Response:
    """The version of Ollama's API that is spoken, and our own."""
    return JSONResponse({"version": API_VERSION, "notso": release()})


@router.get("/api/tags")
@router.head("/api/tags")
async def tags(services: Services) -> Response:
    """The model that answers; none while it loads."""
    info = services.shared.engine.info
    return JSONResponse({"models": [await asyncio.to_thread(_entry, info)] if info is not None else []})


@router.get("/api/ps")
async def loaded(services: Services) -> Response:
    """The same: what is there is loaded, and stays so."""
    info = services.shared.engine.info
    if info is None:
        return JSONResponse({"models": []})
    entry = await asyncio.to_thread(_entry, info)
    entry |= {"expires_at": NEVER, "size_vram": 0, "context_length": info.context_tokens}
    return JSONResponse({"models": [entry]})


@router.post("/api/show")
async def show(request: Request, services: Services) -> Response:
    """What the model is and can do, by any of its names."""

    def parse(body: Mapping[str, Any]) -> ShowFields:
        return read_fields(ShowFields, body, SHOW_NOTES)

    fields = await read_body(request, parse, of_any_type=True)
    name = fields.model or fields.name
    if name is None:
        raise invalid("model", "model is required")
    engine, info = ready_engine(services)
    require_model(plain_name(name, info), info, engine.adapters.infos)
    return JSONResponse(
        {
            "modelfile": f"FROM {listed_name(info)}\n",
            "parameters": "",
            "template": "",
            "details": _details(info),
            "model_info": {
                "general.architecture": FAMILY,
                "general.basename": info.name,
                "general.parameter_count": info.parameter_count,
                f"{FAMILY}.block_count": info.num_hidden_layers,
                f"{FAMILY}.context_length": info.context_tokens,
            },
            "capabilities": CAPABILITIES,
            "modified_at": await asyncio.to_thread(_modified, info),
        }
    )


def _entry(info: ModelInfo) -> dict[str, Any]:
    return {
        "name": listed_name(info),
        "model": listed_name(info),
        "modified_at": _modified(info),
        "size": info.size_bytes,
        "digest": hashlib.sha256(fingerprint(info).encode()).hexdigest(),
        "details": _details(info),
    }


def _details(info: ModelInfo) -> dict[str, Any]:
    return {
        "parent_model": "",
        "format": "gguf",
        "family": FAMILY,
        "families": [FAMILY],
        "parameter_size": _in_short(info.parameter_count),
        "quantization_level": _main_format(info.quantisation),
        "context_length": info.context_tokens,
    }


def _modified(info: ModelInfo) -> str:
    path = Path(info.path)
    seconds = path.stat().st_mtime if info.path and path.exists() else 0.0
    return timestamp(datetime.fromtimestamp(seconds, UTC))


def _main_format(tensors: Mapping[str, int]) -> str:
    """Of most of the weights."""
    weights = {name: count for name, count in tensors.items() if name.upper() not in PLAIN_FORMATS} or tensors
    return max(weights, key=lambda name: weights[name], default="unknown").upper()


def _in_short(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 10**9 else f"{count / 1e6:.2f}M"
