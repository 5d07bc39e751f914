"""Routes for signing in with a key or an OpenID provider, and for signing out."""

from __future__ import annotations

import secrets
from typing import Protocol

from fastapi import APIRouter, Request, Response
from starlette.responses import RedirectResponse

from notso.web.chat.services import ChatServices, Services
from notso.web.edge.access import GUARDED, NOBODY, PUBLIC, Caller, KeyRing, caller_of, cookie_name
from notso.web.edge.forms import read_form
from notso.web.values.errors import Problem, SignInError
from notso.web.values.wording import words

router = APIRouter()
sessions = APIRouter()

FLOW_COOKIE = "notso_flow"
FLOW_SECONDS = 600


class Provider(Protocol):
    """An OpenID provider. Methods raise SignInError. `is_https`: whether the callback address uses HTTPS."""

    is_https: bool

    async def begin(self, browser: str) -> str: ...

    async def finish(self, browser: str, state: str, code: str) -> Caller:
        """Verify the callback and return the signed-in user."""


@router.get("/login", dependencies=[PUBLIC])
async def login_page(request: Request, services: Services) -> Response:
    return await _login_response(request, services)


@router.post("/login", dependencies=[PUBLIC])
async def login(request: Request, services: Services) -> Response:
    """Exchange the key for an HttpOnly session cookie."""
    ring: KeyRing = request.app.state.key_ring
    key = (await read_form(request)).get("api_key", "").strip()  # a copied key often ends with a space
    caller = await ring.caller_for_key(key)
    if caller is None and not ring.is_open:
        await _audit(request, services, NOBODY, "used a wrong key")
        return await _login_response(request, services, 403, words["login_wrong"])
    response = RedirectResponse("/", 303)
    await _begin_session(request, services, response, caller, secure=_is_secure(request))
    return response


@router.get("/login/oidc", dependencies=[PUBLIC])
async def redirect_to_provider(request: Request, services: Services) -> Response:
    """Redirect to the provider, with a cookie that identifies the browser."""
    provider = _provider(request)
    browser, secure = secrets.token_urlsafe(32), provider.is_https or _is_secure(request)
    try:
        response = RedirectResponse(await provider.begin(browser), 303)
    except SignInError as error:
        return await _login_response(request, services, 502, str(error))
    flow = cookie_name(request, FLOW_COOKIE)
    response.set_cookie(flow, browser, FLOW_SECONDS, path="/login", httponly=True, samesite="lax", secure=secure)
    return response


@router.get("/login/oidc/callback", dependencies=[PUBLIC])
async def provider_callback(request: Request, services: Services) -> Response:
    query, provider = request.query_params, _provider(request)
    secure = provider.is_https or _is_secure(request)
    flow = cookie_name(request, FLOW_COOKIE)
    browser = request.cookies.get(flow, "")
    try:
        if "error" in query:
            raise SignInError(words["login_refused"])
        caller = await provider.finish(browser, query.get("state", ""), query.get("code", ""))
    except SignInError as error:
        await _audit(request, services, NOBODY, "could not sign in")
        return await _login_response(request, services, 403, str(error))
    # Instead of a redirect, return a page that navigates to the chats, because browsers do not send a SameSite=Strict
    # cookie with a navigation that another site initiated.
    response = await services.pages.respond(request, "signed_in.html")
    response.delete_cookie(flow, path="/login", httponly=True, samesite="lax", secure=secure)
    await _begin_session(request, services, response, caller, secure=secure)
    return response


@sessions.post("/logout", dependencies=[GUARDED])
async def logout(request: Request, services: Services) -> Response:
    # Ending the session also invalidates copies of its cookie.
    ring: KeyRing = request.app.state.key_ring
    await read_form(request)
    await ring.end_session(request.cookies.get(cookie_name(request), ""))
    await _audit(request, services, caller_of(request), "signed out")
    response = RedirectResponse("/" if ring.is_open else "/login", 303)
    response.delete_cookie(cookie_name(request), httponly=True, samesite="strict", secure=_is_secure(request))
    return response


async def _begin_session(
    request: Request, services: ChatServices, response: Response, caller: Caller | None, *, secure: bool
) -> None:
    ring: KeyRing = request.app.state.key_ring
    token = await (ring.new_session(caller) if caller is not None else ring.new_session())
    response.set_cookie(cookie_name(request), token, httponly=True, samesite="strict", secure=secure)
    if caller is not None:
        await _audit(request, services, caller, "signed in")


async def _login_response(request: Request, services: ChatServices, status: int = 200, problem: str = "") -> Response:
    has_provider = request.app.state.oidc is not None
    return await services.pages.respond(request, "login.html", status, problem=problem, has_provider=has_provider)


async def _audit(request: Request, services: ChatServices, caller: Caller, action: str) -> None:
    if services.shared.accounts is not None:
        await services.shared.accounts.audit(caller.owner, action, request, by_operator=caller.is_operator)


def _provider(request: Request) -> Provider:
    provider: Provider | None = request.app.state.oidc
    if provider is None:
        raise Problem(404, words["error_unknown_page"])
    return provider


def _is_secure(request: Request) -> bool:
    return bool(request.scope["scheme"] == "https")
