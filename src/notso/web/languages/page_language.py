"""Which language a page speaks: the one chosen in this browser, else the browser's own. Programs get English."""

from __future__ import annotations

from http.cookies import CookieError, SimpleCookie

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from notso.web.edge.errors import is_api
from notso.web.values.wording import chosen_language, language

LANGUAGE_COOKIE = "notso-language"


class PageLanguage:
    """A pure ASGI layer: whatever answers the request, in its own task, speaks that language."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not is_api(scope):
            headers = Headers(scope=scope)
            language.set(chosen_language(_chosen(headers.get("cookie", "")), headers.get("accept-language", "")))
        await self._app(scope, receive, send)


def _chosen(cookie: str) -> str:
    try:
        found = SimpleCookie(cookie).get(LANGUAGE_COOKIE)
    except CookieError:
        return ""
    return found.value if found is not None else ""
