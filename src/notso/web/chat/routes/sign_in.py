"""Routes for signing in with a key or an OpenID provider, and for signing out."""

from __future__ import annotations

import secrets
from typing import Protocol

from fastapi import APIRouter, Response
from starlette.responses import RedirectResponse

from notso.web.chat.chat_view import require
from notso.web.chat.views import Fields, Page, PageRequest
from notso.web.edge.access import GUARDED, NOBODY, PUBLIC, Caller, KeyRing, caller_of, cookie_name
from notso.web.values.errors import SignInError
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
async def login_page(page: Page) -> Response:
    return await _login_response(page, _key_ring(page), 200, "")


@router.post("/login", dependencies=[PUBLIC])
async def login(page: Page, fields: Fields) -> Response:
    """Exchange the key for an HttpOnly session cookie."""
    ring = _key_ring(page)
    key = fields.get("api_key", "").strip()  # a copied key often ends with a space
    caller = await ring.caller_for_key(key)
    if caller is None and ring.rejects(key):
        await _audit(page, NOBODY, "used a wrong key")
        return await _login_response(page, ring, 403, words["login_wrong"])
    response = RedirectResponse("/", 303)
    await _begin_session(page, response, caller, secure=_is_secure(page))
    return response


@router.get("/login/oidc", dependencies=[PUBLIC])
async def redirect_to_provider(page: Page) -> Response:
    """Redirect to the provider, with a cookie that identifies the browser."""
    provider = _provider(page)
    browser, secure = secrets.token_urlsafe(32), provider.is_https or _is_secure(page)
    try:
        response = RedirectResponse(await provider.begin(browser), 303)
    except SignInError as error:
        return await _login_response(page, _key_ring(page), 502, str(error))
    flow = cookie_name(page.request, FLOW_COOKIE)
    response.set_cookie(flow, browser, FLOW_SECONDS, path="/login", httponly=True, samesite="lax", secure=secure)
    return response


@router.get("/login/oidc/callback", dependencies=[PUBLIC])
async def provider_callback(page: Page) -> Response:
    query, provider = page.request.query_params, _provider(page)
    secure = provider.is_https or _is_secure(page)
    flow = cookie_name(page.request, FLOW_COOKIE)
    browser = page.request.cookies.get(flow, "")
    try:
        if "error" in query:
            raise SignInError(words["login_refused"])
        caller = await provider.finish(browser, query.get("state", ""), query.get("code", ""))
    except SignInError as error:
        await _audit(page, NOBODY, "could not sign in")
        return await _login_response(page, _key_ring(page), 403, str(error))
    # Instead of a redirect, return a page that navigates to the chats, because browsers do not send a SameSite=Strict
    # cookie with a navigation that another site initiated.
    response = await page.respond("signed_in.html")
    response.delete_cookie(flow, path="/login", httponly=True, samesite="lax", secure=secure)
    await _begin_session(page, response, caller, secure=secure)
    return response


@sessions.post("/logout", dependencies=[GUARDED])
async def logout(page: Page, _: Fields) -> Response:
    # Ending the session also invalidates copies of its cookie.
    ring, name = _key_ring(page), cookie_name(page.request)
    await ring.end_session(page.request.cookies.get(name, ""), page.request)
    await _audit(page, caller_of(page.request), "signed out")
    response = RedirectResponse("/" if ring.is_open else "/login", 303)
    response.delete_cookie(name, httponly=True, samesite="strict", secure=_is_secure(page))
    return response


def _key_ring(page: PageRequest) -> KeyRing:
    ring: KeyRing = page.request.app.state.key_ring
    return ring


async def _begin_session(page: PageRequest, response: Response, caller: Caller | None, *, secure: bool) -> None:
    ring = _key_ring(page)
    if replaced := page.request.cookies.get(cookie_name(page.request), ""):
        await ring.end_session(replaced, page.request)
    token = await (ring.new_session(caller) if caller is not None else ring.new_session())
    response.set_cookie(cookie_name(page.request), token, httponly=True, samesite="strict", secure=secure)
    if caller is not None:
        await _audit(page, caller, "signed in")


async def _login_response(page: PageRequest, ring: KeyRing, status: int, problem: str) -> Response:
    # A server without authentication denies access only to a browser whose key was revoked. For such a browser, the
    # page contains a form without a key field, which signs it in as the local user.
    has_provider = page.request.app.state.oidc is not None
    is_revoked = ring.is_open and await ring.caller(page.request) is None
    return await page.respond("login.html", status, problem=problem, has_provider=has_provider, is_revoked=is_revoked)


async def _audit(page: PageRequest, caller: Caller, action: str) -> None:
    if page.services.shared.accounts is not None:
        await page.services.shared.accounts.audit(caller.owner, action, page.request, by_operator=caller.is_operator)


def _provider(page: PageRequest) -> Provider:
    provider: Provider | None = page.request.app.state.oidc
    return require(provider)


def _is_secure(page: PageRequest) -> bool:
    return bool(page.request.scope["scheme"] == "https")
