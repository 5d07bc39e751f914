"""What Ollama does and we do not: said in its form, with a status that nobody tries again."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from starlette.responses import Response

from notso.web.edge.access import guarded
from notso.web.edge.api_error import ApiError

router = APIRouter(dependencies=[Depends(guarded)])


@router.post("/api/embed")
@router.post("/api/embeddings")
async def embed() -> Response:
    """Refused: the model was not trained for it."""
    raise ApiError(400, "not_supported", "this model does not support embeddings: SmolLM3 is a chat model")


@router.post("/api/pull")
@router.post("/api/push")
@router.post("/api/create")
@router.post("/api/copy")
@router.delete("/api/delete")
async def manage() -> Response:
    """Refused: models come and go by the server's own page and command line."""
    raise ApiError(
        400, "not_supported", "models are not managed by this API: use `notso pull`, or the page about models"
    )
