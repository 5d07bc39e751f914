"""What a program may know of the server: its model and defaults, and what the places for answers are doing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse, Response

from notso.smollm3 import SamplingParams
from notso.web.api.shared.completion import model_id, release
from notso.web.api.shared.generation_settings import generation_settings
from notso.web.api.shared.services import Services
from notso.web.api.shared.serving import ready_engine
from notso.web.edge.access import guarded

router = APIRouter(dependencies=[Depends(guarded)])


@router.get("/props")
async def props(services: Services) -> Response:
    """The model, the context and what a request that says nothing gets."""
    _, info = ready_engine(services)
    return JSONResponse(
        {
            "default_generation_settings": {
                "n_ctx": info.context_tokens,
                "params": generation_settings(SamplingParams()),
            },
            "total_slots": info.max_num_seqs,
            "model_alias": model_id(info),
            "model_path": Path(info.path).name,
            "modalities": {"vision": False, "audio": False},
            "build_info": f"notso {release()}",
            "n_params": info.parameter_count,
            "size": info.size_bytes,
            "quantisation": dict(info.quantisation),
            "device": info.device,
            "kernels": info.kernels,
            "threads": info.threads,
            "kv_format": info.kv_format,
            "is_demo": info.is_demo,
            "is_sleeping": False,
        }
    )


@router.get("/slots")
async def slots(services: Services) -> Response:
    """Each place for an answer and whether it is taken: counts, and no word of anybody's."""
    engine, info = ready_engine(services)
    stats = engine.stats()
    listed: list[dict[str, Any]] = [
        {"id": number, "n_ctx": info.context_tokens, "is_processing": number < stats.running}
        for number in range(info.max_num_seqs)
    ]
    return JSONResponse(listed)
