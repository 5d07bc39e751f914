"""Whether the server lives, and whether a turn would be admitted."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse

from notso.web.edge.access import public
from notso.web.state import State, state_of

router = APIRouter(dependencies=[Depends(public)])


@router.get("/health")
@router.head("/health")
async def health(state: Annotated[State, Depends(state_of)]) -> JSONResponse:
    """200 only when a new turn would be answered; 503 while loading, failed or stopping."""
    status = "stopping" if state.stopping else state.engine.state
    if status != "ready":
        return JSONResponse({"status": status}, 503, headers={"Retry-After": "5"})
    info = state.engine.info
    return JSONResponse({"status": "ok", "model": info.name if info else "", "demo": bool(info and info.is_demo)})


@router.get("/livez")
@router.head("/livez")
async def livez() -> JSONResponse:
    """200 while the process answers; it waits for nothing."""
    return JSONResponse({"status": "alive"})
