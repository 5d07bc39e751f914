"""Numbers for an operator."""

from __future__ import annotations

import asyncio

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import Response

from notso.web.api.shared.services import Services
from notso.web.edge.access import guarded

router = APIRouter(dependencies=[Depends(guarded)])


@router.get("/metrics")
async def metrics(services: Services) -> Response:
    """Counters and gauges in Prometheus's text form. They tell how much the owner talks, so the key is asked for."""
    headers = {"Content-Type": CONTENT_TYPE_LATEST, "Process-Start-Time-Unix": str(services.metrics.started)}
    return Response(await asyncio.to_thread(services.metrics.text), headers=headers)
