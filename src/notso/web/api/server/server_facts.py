"""What a program may know of the server: its model and defaults, and what the places for answers are doing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from notso.smollm3 import ModelInfo, SamplingParams
from notso.web.api.shared.completion import release
from notso.web.api.shared.generation_settings import generation_settings
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import require_serving
from notso.web.edge.access import guarded
from notso.web.edge.api_error import ApiError
from notso.web.engine.model_names import model_id

router = APIRouter(dependencies=[Depends(guarded)])


@router.get("/props")
async def props(services: Services) -> Response:
    """The model, the context and what a request that says nothing gets."""
    info = _info(services)
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
            "build_info": f"notso {release()}",
            "chat_template": info.chat_template,
            "n_params": info.parameter_count,
            "size": info.size_bytes,
            "quantisation": dict(info.quantisation),
            "device": info.device,
            "kernels": info.kernels,
            "threads": info.threads,
            "kv_format": info.kv_format,
            "is_demo": info.is_demo,
            "is_sleeping": services.shared.engine.state == "unloaded",
        }
    )


@router.get("/slots")
async def slots(services: Services) -> Response:
    """Each place for an answer and whether it is taken: counts, and no word of anybody's."""
    info, stats = _info(services), services.shared.engine.stats()
    running = stats.running if stats is not None else 0
    listed: list[dict[str, Any]] = [
        {"id": number, "n_ctx": info.context_tokens, "is_processing": number < running}
        for number in range(info.max_num_seqs)
    ]
    return JSONResponse(listed)


def _info(services: Services) -> ModelInfo:
    """Of the default model, loaded or not. Raises ApiError (503) while it is not known."""
    require_serving(services)
    info, failure = services.shared.engine.info, services.shared.engine.failure
    if info is None and failure:
        raise ApiError(503, "model_failed", f"no model can answer: {failure}", retry_after_seconds=60)
    if info is None:
        raise ApiError(503, "model_loading", "the model is being loaded", retry_after_seconds=5)
    return info
