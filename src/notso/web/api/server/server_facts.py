"""Server status: properties, slots, health, metrics, and errors for unsupported endpoints."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

from fastapi import APIRouter
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import JSONResponse, Response

from notso.extras import installed_release
from notso.smollm3 import ModelInfo, SamplingParams
from notso.web.api.llama_cpp.request import generation_settings
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import model_failed_error, model_loading_error, require_model_available
from notso.web.edge.access import GUARDED, PUBLIC, operator_only
from notso.web.edge.errors import ApiError
from notso.web.engine.model_names import model_id

router = APIRouter()


@router.get("/props", dependencies=[GUARDED])
async def props(services: Services) -> Response:
    """Return the model, its context length and the default parameters."""
    info = _require_model_info(services)
    return JSONResponse(
        {
            "default_generation_settings": {
                "n_ctx": info.context_tokens,
                "params": generation_settings(SamplingParams().with_defaults(info.sampling)),
            },
            "total_slots": info.max_num_seqs,
            "model_alias": model_id(info),
            "model_path": Path(info.path).name,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"notso {installed_release()}",
            "chat_template": info.chat_template,
            "bos_token": "",  # the model has no begin-of-text token
            "eos_token": info.end_token,
            "n_params": info.parameter_count,
            "size": info.size_bytes,
            "quantization": dict(info.quantization),
            "device": info.device,
            "kernels": info.kernels,
            "threads": info.threads,
            "kv_format": info.kv_format,
            "is_demo": info.is_demo,
            "is_sleeping": services.shared.engine.state == "unloaded",
        }
    )


@router.get("/slots", dependencies=[GUARDED])
async def slots(services: Services) -> Response:
    """List slots and whether each is processing a request. Prompts are not shown."""
    info, stats = _require_model_info(services), services.shared.engine.stats()
    running = stats.running if stats is not None else 0
    listed: list[dict[str, Any]] = [
        {"id": number, "n_ctx": info.context_tokens, "is_processing": number < running}
        for number in range(info.max_num_seqs)
    ]
    return JSONResponse(listed)


def _require_model_info(services: Services) -> ModelInfo:
    require_model_available(services)
    info, failure = services.shared.engine.info, services.shared.engine.failure
    if info is None:
        raise model_failed_error(services.shared.engine.default, failure) if failure else model_loading_error()
    return info


health_router = APIRouter()


@health_router.api_route(
    "/ping", methods=["GET", "POST"], dependencies=[PUBLIC], description="Alias of /health, as in SageMaker and vLLM."
)
@health_router.get("/health", dependencies=[PUBLIC])
@health_router.head("/health", dependencies=[PUBLIC])
@health_router.get("/v1/health", dependencies=[PUBLIC])
async def health(services: Services) -> JSONResponse:
    """Return 200 if the default model has been loaded, even if it was unloaded while idle. Return 503 during the first
    load, after a failed load, without a database connection, and while stopping."""
    # `leaving` is set before the server stops, so that a load balancer sees the 503 and stops sending requests.
    shared = services.shared
    info, status = shared.engine.info, "ok"
    if shared.stopping or shared.leaving:
        status = "stopping"
    elif info is None:
        status = shared.engine.state
    elif shared.leases is not None and shared.leases.failing:
        status = "database_away"
    if info is None or status != "ok":
        return JSONResponse({"status": status}, 503, headers={"Retry-After": "5"})
    about = {"model": info.name, "demo": info.is_demo, "device": info.device}
    # An unreachable Valkey server is reported, but is not an error: replicas also work without it.
    missing = {"missing": ["valkey"]} if shared.exchange.is_unreachable else {}
    return JSONResponse({"status": "ok", **about, **missing})


@health_router.get("/livez", dependencies=[PUBLIC])
@health_router.head("/livez", dependencies=[PUBLIC])
async def livez() -> JSONResponse:
    """Return 200 without checking the model or database."""
    return JSONResponse({"status": "alive"})


@router.get("/version", dependencies=[GUARDED])
async def version() -> Response:
    """Return the server's version, in vLLM's format."""
    return JSONResponse({"version": installed_release()})


@router.get("/load", dependencies=[GUARDED])
async def load(services: Services) -> Response:
    """Return the number of running and waiting requests, in vLLM's format."""
    stats = services.shared.engine.stats()
    return JSONResponse({"server_load": 0 if stats is None else stats.running + stats.waiting})


@router.get("/metrics", dependencies=[operator_only()])
async def metrics(services: Services) -> Response:
    """Return metrics in Prometheus text format. For operators only, because metrics reveal usage."""
    headers = {"Content-Type": CONTENT_TYPE_LATEST, "Process-Start-Time-Unix": str(services.metrics.started)}
    return Response(await asyncio.to_thread(services.metrics.text), headers=headers)


_CHAT = "SmolLM3 is a chat model"
_refused = partial(ApiError, 400, "not_supported")


@router.post("/v1/rerank", dependencies=[GUARDED])
@router.post("/rerank", dependencies=[GUARDED])
@router.post("/v1/reranking", dependencies=[GUARDED])
@router.post("/reranking", dependencies=[GUARDED])
async def rerank() -> Response:
    """Not supported: SmolLM3 was not trained for ranking."""
    raise _refused(f"{_CHAT}: it was not trained for ranking; use a chat completion")


@router.post("/v1/infill", dependencies=[GUARDED])
@router.post("/infill", dependencies=[GUARDED])
async def infill() -> Response:
    """Not supported: the vocabulary has no infill tokens."""
    raise _refused(f"{_CHAT}: it was not trained to fill in the middle; use a chat completion")
