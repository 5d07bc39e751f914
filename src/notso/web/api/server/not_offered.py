"""What others of this kind offer and we do not: said by name, so that nobody looks for a fault of theirs, and
with a status that no client tries again."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from starlette.responses import Response

from notso.web.edge.access import guarded
from notso.web.edge.api_error import ApiError

router = APIRouter(dependencies=[Depends(guarded)])

_CHAT = "SmolLM3 is a chat model"


def _refused(reason: str) -> ApiError:
    return ApiError(400, "not_supported", reason)


@router.post("/v1/embeddings")
@router.post("/embeddings")
async def embeddings() -> Response:
    """Refused: the model was not trained for it."""
    raise _refused(f"{_CHAT}: it makes no embeddings worth comparing")


@router.post("/v1/rerank")
@router.post("/rerank")
@router.post("/v1/reranking")
@router.post("/reranking")
async def rerank() -> Response:
    """Refused: the model was not trained for it."""
    raise _refused(f"{_CHAT}: it ranks no documents; ask it in a chat completion")


@router.post("/v1/infill")
@router.post("/infill")
async def infill() -> Response:
    """Refused: the vocabulary has no tokens for it."""
    raise _refused(f"{_CHAT}: it has no tokens for filling gaps; ask it in a chat completion")
