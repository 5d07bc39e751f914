"""Ollama's discovery endpoints: version, models and capabilities, under Ollama's model names."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import JSONResponse, Response

from notso.smollm3 import ModelInfo
from notso.web.api.ollama.fields import SHOW_NOTES, ShowFields
from notso.web.api.ollama.stream import timestamp
from notso.web.api.request_fields.fields import invalid, read_fields
from notso.web.api.request_fields.sampling_fields import sampling_names
from notso.web.api.shared.completion import fingerprint, release
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import chosen_model, read_body
from notso.web.edge.access import GUARDED
from notso.web.engine.model_names import LATEST, model_id, names_of, other_models
from notso.web.engine.models import Installed

LIBRARY_NAMES = {"smollm3": "smollm3-3b", "smollm3:3b": "smollm3-3b"}
"""Names as in Ollama's model library -> names in the other APIs."""


def plain_name(name: str | None, info: ModelInfo | None) -> str | None:
    """Return the name used by the other APIs, if `name` is a spelling of it."""
    if name is None:
        return None
    short = name.lower().removesuffix(LATEST)
    known = LIBRARY_NAMES.get(short, short)
    return known if info is not None and known in names_of(info) else name


def listed_name(info: ModelInfo) -> str:
    return tagged(model_id(info))


def tagged(name: str) -> str:
    """Add the default tag to a name without one."""
    return name if ":" in name else name + LATEST


router = APIRouter()

API_VERSION = "0.13.0"
"""Implemented version of Ollama's API, which clients compare with their minimum."""
FAMILY = "smollm3"
CAPABILITIES = ("completion", "tools", "thinking")
NEVER = "9999-12-31T23:59:59Z"  # expiry of a model that stays loaded
PLAIN_FORMATS = frozenset({"F32"})  # norms are F32 whatever the format of the weights


@router.head("/", dependencies=[GUARDED])
async def heartbeat() -> Response:
    """Check for a server; Ollama's command line sends this first."""
    return Response()


@router.get("/api/version", dependencies=[GUARDED])
@router.head("/api/version", dependencies=[GUARDED])
async def version() -> Response:
    """Return the implemented version of Ollama's API and the server's own."""
    return JSONResponse({"version": API_VERSION, "notso": release()})


@router.get("/api/tags", dependencies=[GUARDED])
@router.head("/api/tags", dependencies=[GUARDED])
async def tags(services: Services) -> Response:
    """List models, the default first. Empty until the default model is loaded."""
    host, registry = services.shared.engine, services.shared.model_registry
    info = host.info
    listed = [await asyncio.to_thread(_entry, info)] if info is not None else []
    if registry is not None and (listed or host.state == "failed"):
        others = await asyncio.to_thread(other_models, host, registry)
        listed += await asyncio.to_thread(lambda: [_installed_entry(each) for each in others])
    return JSONResponse({"models": listed})


@router.get("/api/ps", dependencies=[GUARDED])
async def loaded(services: Services) -> Response:
    """List loaded models and when they expire if idle."""
    host, models = services.shared.engine, []
    for served in host.loaded():
        if served.info is None:
            continue
        entry = await asyncio.to_thread(_entry, served.info)
        if served is not host.default and served.name:
            entry |= {"name": tagged(served.name), "model": tagged(served.name)}
        stays_s = host.stays_s(served)
        expires = NEVER if stays_s < 0 else timestamp(datetime.now(UTC) + timedelta(seconds=stays_s))
        models.append(entry | {"expires_at": expires, "size_vram": 0, "context_length": served.info.context_tokens})
    return JSONResponse({"models": models})


@router.post("/api/show", dependencies=[GUARDED])
async def show(request: Request, services: Services) -> Response:
    """Describe a model by any of its names."""
    fields = await read_body(request, lambda body: read_fields(ShowFields, body, SHOW_NOTES), of_any_type=True)
    name = fields.model or fields.name
    if name is None:
        raise invalid("model", "model is required")
    host = services.shared.engine
    choice = await chosen_model(services, plain_name(name, host.default.info))
    served = host.model(choice.model)
    info = served.info
    if info is None:  # never loaded: only its name and file are known
        model_info: dict[str, Any] = {"general.architecture": FAMILY, "general.basename": served.name}
        about = {"license": "", "modelfile": f"FROM {tagged(served.name)}\n", "parameters": "", "template": ""}
        details = {"parent_model": "", "format": "gguf", "family": FAMILY, "families": [FAMILY]}
        return JSONResponse(about | {"details": details, "model_info": model_info, "capabilities": CAPABILITIES})
    return JSONResponse(
        {
            "license": info.license,
            "modelfile": f"FROM {listed_name(info)}\n",
            "parameters": _parameters(info),
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


def _installed_entry(installed: Installed) -> dict[str, Any]:
    # The model need not be loaded, so the digest is over file name, size and modification time.
    model = installed.model
    name, status = "-".join(model.name.lower().split()), model.path.stat()
    digest = hashlib.sha256(repr((name, status.st_size, status.st_mtime_ns)).encode()).hexdigest()
    return {
        "name": tagged(name),
        "model": tagged(name),
        "modified_at": timestamp(datetime.fromtimestamp(status.st_mtime, UTC)),
        "size": model.size_bytes,
        "digest": digest,
        "details": {
            "parent_model": "",
            "format": "gguf",
            "family": FAMILY,
            "families": [FAMILY],
            "quantization_level": model.quantisation or "unknown",
        },
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


def _parameters(info: ModelInfo) -> str:
    """Return the file's sampling defaults as lines of a Modelfile."""
    names = sampling_names("ollama")
    known = {names[name]: value for name, value in info.sampling.items() if name in names}
    return "\n".join(f"{name:<30} {value:g}" for name, value in known.items())


def _modified(info: ModelInfo) -> str:
    path = Path(info.path)
    seconds = path.stat().st_mtime if info.path and path.exists() else 0.0
    return timestamp(datetime.fromtimestamp(seconds, UTC))


def _main_format(tensors: Mapping[str, int]) -> str:
    # The format of most weights.
    weights = {name: count for name, count in tensors.items() if name.upper() not in PLAIN_FORMATS} or tensors
    return max(weights, key=lambda name: weights[name], default="unknown").upper()


def _in_short(count: int) -> str:
    return f"{count / 1e9:.1f}B" if count >= 10**9 else f"{count / 1e6:.2f}M"
