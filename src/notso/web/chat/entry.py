"""Routes that are no pages of the chat: assets, and swapping the key for a cookie and giving that back."""

from __future__ import annotations

from fastapi import APIRouter, Depends, Request, Response
from starlette.responses import PlainTextResponse, RedirectResponse

from notso.web.chat.services import Services
from notso.web.edge.access import COOKIE, KeyRing, guarded, public
from notso.web.edge.assets import FOREVER
from notso.web.edge.forms import read_form
from notso.web.values.wording import words

router = APIRouter(dependencies=[Depends(public)])
sessions = APIRouter(dependencies=[Depends(guarded)])


@router.get("/static/{path:path}")
async def static_file(request: Request, services: Services, path: str) -> Response:
    """A file by its content's digest and its name, from memory."""
    asset = services.assets.find(path)
    if asset is None:
        return PlainTextResponse("Not found.\n", 404)
    headers = {"Cache-Control": FOREVER, "Vary": "Accept-Encoding"}
    if "gzip" in request.headers.get("accept-encoding", ""):
        return Response(asset.packed, media_type=asset.media_type, headers=headers | {"Content-Encoding": "gzip"})
    return Response(asset.body, media_type=asset.media_type, headers=headers)


@router.get("/login")
async def login_page(request: Request, services: Services) -> Response:
    """Asks for the key."""
    return await services.pages.respond(request, "login.html", problem="")


@router.post("/login")
async def login(request: Request, services: Services) -> Response:
    """The right key gets a cookie that scripts cannot read and other sites' pages do not send."""
    ring: KeyRing = request.app.state.key_ring
    fields = await read_form(request)
    if not ring.open and not ring.fits(fields.get("api_key", "")):
        return await services.pages.respond(request, "login.html", 403, problem=words["login_wrong"])
    response = RedirectResponse("/", 303)
    response.set_cookie(
        COOKIE, await ring.new_session(), httponly=True, samesite="strict", secure=request.scope["scheme"] == "https"
    )
    return response


@sessions.post("/logout")
async def logout(request: Request) -> Response:
    """The browser's cookie counts no more, here or wherever else it went."""
    ring: KeyRing = request.app.state.key_ring
    await read_form(request)
    await ring.end_session(request.cookies.get(COOKIE, ""))
    response = RedirectResponse("/" if ring.open else "/login", 303)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=request.scope["scheme"] == "https")
    return response
