"""Whether the server lives, and whether a turn would be admitted."""

from __future__ import annotations

from fastapi import APIRouter, Depends
from starlette.responses import JSONResponse

from notso.web.api.shared.services import Services
from notso.web.edge.access import public

router = APIRouter(dependencies=[Depends(public)])


@router.get("/health")
@router.head("/health")
@router.get("/v1/health")
async def health(services: Services) -> JSONResponse:
    """200 only when a new turn would be answered, if need be by a model that is loaded for it; 503 while the model is
    first loaded or exchanged, after it failed, while the database of conversations does not answer, and while
    stopping, before that for as long as a proxy may need to see it."""
    shared = services.shared
    status: str = "stopping" if shared.stopping or shared.leaving else shared.engine.state
    if status in ("ready", "unloaded") and shared.leases is not None and shared.leases.failing:
        status = "database_away"
    if status not in ("ready", "unloaded"):  # the next request loads it
        return JSONResponse({"status": status}, 503, headers={"Retry-After": "5"})
    info = shared.engine.info
    about = {"model": info.name, "demo": info.is_demo, "device": info.device} if info else {}
    missing = {"missing": ["valkey"]} if shared.exchange.is_away else {}  # each server goes on alone
    return JSONResponse({"status": "ok", **about, **missing})


@router.get("/livez")
@router.head("/livez")
async def livez() -> JSONResponse:
    """200 while the process answers; it waits for nothing."""
    return JSONResponse({"status": "alive"})
