"""Every route says who may use it, `public` or `guarded`; a test walks the table and fails on one that says nothing.

Without an API key the server listens on loopback only and a guarded route is open to whoever passed the Host and
cross-site guards. With one, a program shows the key as a bearer token or as `x-api-key`, whichever its client library
sends, and a browser swaps it once for a random cookie.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass

from fastapi import HTTPException, Request

COOKIE = "notso_session"
MAX_BROWSER_SESSIONS = 64
SESSION_SECONDS = 30 * 86_400.0
"""Then a browser shows the key again, however often it came: a stolen cookie does not last for ever."""
SESSION_IDLE_SECONDS = 7 * 86_400.0
"""Not used for so long, a cookie was left behind on a machine or a backup of one."""
LOCAL_OWNER = "local"
WRONG_KEY = "notso.wrong_key"
"""Set in the scope of a request that showed a key which is none: what is counted by whom it comes from."""


class NeedsKey(HTTPException):
    """401: this route is guarded and the request showed no key."""

    def __init__(self) -> None:
        super().__init__(401, headers={"WWW-Authenticate": "Bearer"})


@dataclass(slots=True)
class _Session:
    """When it began and was last used, in seconds of the wall clock: a machine that slept gets older too."""

    began: float
    used: float

    def over(self, now: float) -> bool:
        return now - self.began >= SESSION_SECONDS or now - self.used >= SESSION_IDLE_SECONDS


class KeyRing:
    """The server's key, kept as a hash, and the browsers that have shown it."""

    def __init__(self, api_key: str | None, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._digest = _digest(api_key) if api_key is not None else None
        self._sessions: dict[bytes, _Session] = {}

    @property
    def open(self) -> bool:
        """Whether no key is asked for."""
        return self._digest is None

    def fits(self, key: str) -> bool:
        """Compare in constant time."""
        return self._digest is not None and hmac.compare_digest(_digest(key), self._digest)

    def new_session(self) -> str:
        """A cookie value for a browser that has shown the key. The oldest browser is forgotten past the limit."""
        while len(self._sessions) >= MAX_BROWSER_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        token = secrets.token_urlsafe(32)
        now = self._clock()
        self._sessions[_digest(token)] = _Session(now, now)
        return token

    def end_session(self, token: str) -> None:
        """This cookie value admits nobody any more."""
        self._sessions.pop(_digest(token), None)

    def admits(self, request: Request) -> bool:
        """Whether this request may pass."""
        if self.open:
            return True
        if shown := _keys_shown(request):
            return all(map(self.fits, shown))
        return self._continues(request.cookies.get(COOKIE, ""))

    def _continues(self, token: str) -> bool:
        session = self._sessions.get(_digest(token))
        if session is None:
            return False
        now = self._clock()
        if session.over(now):
            self.end_session(token)
            return False
        session.used = now
        return True


async def public() -> None:
    """Anyone who reaches the server may use this route: it shows and changes nothing of anybody's."""


async def guarded(request: Request) -> None:
    """Only whoever holds the key, where there is one."""
    ring: KeyRing = request.app.state.key_ring
    if not ring.admits(request):
        if _keys_shown(request):
            request.scope[WRONG_KEY] = True
        raise NeedsKey


def owner_of(request: Request) -> str:
    """Whose conversations this request may see. One person uses a local server; the store is ready for more."""
    return LOCAL_OWNER


def _keys_shown(request: Request) -> list[str]:
    """Every key in the headers. Who shows two must hold both, so that no header can speak for another."""
    keys = request.headers.getlist("x-api-key")
    for value in request.headers.getlist("authorization"):
        scheme, _, token = value.partition(" ")
        keys.append(token.strip() if scheme.lower() == "bearer" else "")
    return keys


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
