"""Services of the API routes, created once per application."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, cast

from fastapi import Depends, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from notso.web.api.shared.background import BackgroundResponses
from notso.web.api.shared.resumable import ResumableStreams
from notso.web.edge.limits import StreamLimiter
from notso.web.engine.metrics import Metrics
from notso.web.services import SharedServices

MAX_REREAD_STREAMS = 64
"""Maximum number of resumed streams per owner; high, because one client may follow many answers."""


async def _not_built(scope: Scope, receive: Receive, send: Send) -> None:
    raise RuntimeError("the application has not been started")


@dataclass(slots=True)
class ApiServices:
    shared: SharedServices
    metrics: Metrics
    resumable_streams: ResumableStreams
    background: BackgroundResponses
    inner_app: ASGIApp = _not_built  # the application without its middleware, for internal requests
    reread_streams: StreamLimiter = field(default_factory=lambda: StreamLimiter(MAX_REREAD_STREAMS))


def api_services(request: Request) -> ApiServices:
    return cast(ApiServices, request.app.state.api)


async def _services(request: Request) -> ApiServices:  # a coroutine: FastAPI would call a plain function in a thread
    return cast(ApiServices, request.app.state.api)


Services = Annotated[ApiServices, Depends(_services)]
