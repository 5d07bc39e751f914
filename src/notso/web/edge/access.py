"""Every route says who may use it, `public` or `guarded`; a test walks the table and fails on one that says nothing.

Without a key and without another way to sign in, the server listens on loopback only and a guarded route is open to
whoever passed the Host and cross-site guards. Else a program shows a key as a bearer token or as `x-api-key`, whichever
its client library sends, and a browser swaps it once for a random cookie; or a way to sign in knows who it is.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `owner`: whose conversations these are; `name`: for people to read; `is_operator`: may see
    what concerns everybody."""

    owner: str
    name: str
    is_operator: bool = False


LOCAL = Caller(LOCAL_OWNER, LOCAL_OWNER, is_operator=True)
"""Whoever is at this machine, or holds the server's own key."""
NOBODY = Caller("nobody", "nobody")


class SignIn(Protocol):
    """A way to know who sent a request, besides the server's key."""

    async def __call__(self, request: Request) -> Caller | None:
        """None: this way does not know. It takes bounded time and raises nothing."""


class NeedsKey(HTTPException):
    """401: this route is guarded and the request showed no key."""

    def __init__(self) -> None:
        super().__init__(401, headers={"WWW-Authenticate": "Bearer"})


@dataclass(slots=True)
class _Session:
    """When it began and was last used, in seconds of the wall clock: a machine that slept gets older too."""

    began: float
    used: float
    caller: Caller

    def over(self, now: float) -> bool:
        return now - self.began >= SESSION_SECONDS or now - self.used >= SESSION_IDLE_SECONDS


class KeyRing:
    """The server's key, kept as a hash, and the browsers that have shown it."""

    def __init__(
        self, api_key: str | None, clock: Callable[[], float] = time.time, *, sign_ins: tuple[SignIn, ...] = ()
    ) -> None:
        self._clock = clock
        self._sign_ins = sign_ins
        self._digest = _digest(api_key) if api_key is not None else None
        self._sessions: dict[bytes, _Session] = {}

    @property
    def open(self) -> bool:
        """Whether nobody is asked who they are."""
        return self._digest is None and not self._sign_ins

    def fits(self, key: str) -> bool:
        """Compare in constant time."""
        return self._digest is not None and hmac.compare_digest(_digest(key), self._digest)

    def new_session(self, caller: Caller = LOCAL) -> str:
        """A cookie value for a browser of that caller. The oldest browser is forgotten past the limit."""
        while len(self._sessions) >= MAX_BROWSER_SESSIONS:
            del self._sessions[next(iter(self._sessions))]
        token = secrets.token_urlsafe(32)
        now = self._clock()
        self._sessions[_digest(token)] = _Session(now, now, caller)
        return token

    def end_session(self, token: str) -> None:
        """This cookie value admits nobody any more."""
        self._sessions.pop(_digest(token), None)

    async def caller(self, request: Request) -> Caller | None:
        """Who sent this request; None for nobody who may pass. A key that is shown must be one."""
        if self.open:
            return LOCAL
        shown = _keys_shown(request)
        if shown and all(map(self.fits, shown)):
            return LOCAL
        if not shown and (caller := self._continues(request.cookies.get(COOKIE, ""))) is not None:
            return caller
        for sign_in in self._sign_ins:
            if (caller := await sign_in(request)) is not None:
                return caller
        return None

    def _continues(self, token: str) -> Caller | None:
        session = self._sessions.get(_digest(token))
        if session is None:
            return None
        now = self._clock()
        if session.over(now):
            self.end_session(token)
            return None
        session.used = now
        return session.caller


async def public() -> None:
    """Anyone who reaches the server may use this route: it shows and changes nothing of anybody's."""


async def guarded(request: Request) -> None:
    """Only who is known, where anybody is asked."""
    ring: KeyRing = request.app.state.key_ring
    caller = await ring.caller(request)
    if caller is None:
        if _keys_shown(request):
            request.scope[WRONG_KEY] = True
        raise NeedsKey
    request.state.caller = caller


def caller_of(request: Request) -> Caller:
    """Who sent a request that has passed `guarded`."""
    caller: Caller = getattr(request.state, "caller", NOBODY)
    return caller


def owner_of(request: Request) -> str:
    """Whose conversations this request may see."""
    return caller_of(request).owner


def _keys_shown(request: Request) -> list[str]:
    """Every key in the headers. Who shows two must hold both, so that no header can speak for another."""
    keys = request.headers.getlist("x-api-key")
    for value in request.headers.getlist("authorization"):
        scheme, _, token = value.partition(" ")
        keys.append(token.strip() if scheme.lower() == "bearer" else "")
    return keys


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
