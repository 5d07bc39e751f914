"""Static assets, addressed by content digest."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from notso.web.chat.services import Services
from notso.web.edge.access import PUBLIC
from notso.web.edge.assets import FOREVER, accepts_gzip

router = APIRouter()


@router.get("/static/{path:path}", dependencies=[PUBLIC])
async def static_file(request: Request, services: Services, path: str) -> Response:
    """Serve an asset from memory."""
    asset = services.assets.find(path)
    if asset is None:
        return PlainTextResponse("Not found.\n", 404)
    # The address holds the digest, so an asset never changes.
    headers = {"Cache-Control": FOREVER, "Vary": "Accept-Encoding"}
    if accepts_gzip(request.headers):
        return Response(asset.packed, media_type=asset.media_type, headers=headers | {"Content-Encoding": "gzip"})
    return Response(asset.body, media_type=asset.media_type, headers=headers)
