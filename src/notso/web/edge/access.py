"""Every route says who may use it, `public` or `guarded`; a test walks the table and fails on one that says nothing.

Without a key and without another way to sign in, the server listens on loopback only and a guarded route is open to
whoever passed the Host and cross-site guards. Else a program shows a key as a bearer token or as `x-api-key`, whichever
its client library sends, and a browser swaps it once for a random cookie; or a way to sign in knows who it is.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass
from typing import Any, Protocol

from fastapi import HTTPException, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from notso.web.values.problems import Problem
from notso.web.values.wording import words

COOKIE = "notso_session"
"""With the port behind it, where a browser names one: cookies are those of a host, whatever its ports."""
MAX_BROWSER_SESSIONS, MAX_SESSIONS_OF_MANY = 64, 10_000
"""Of one person, and of many."""
KEY_PREFIX = "notso-"
"""What a key that was given out begins with."""
SESSION_SECONDS = 30 * 86_400.0
"""Then a browser shows the key again, however often it came: a stolen cookie does not last for ever."""
SESSION_IDLE_SECONDS = 7 * 86_400.0
"""Not used for so long, a cookie was left behind on a machine or a backup of one."""
SHARE_SECONDS = 3600.0
"""Other servers are told so often that a cookie is in use."""
LOCAL_OWNER = "local"
OPERATORS_ONLY = frozenset(
    {
        *("GET /backup", "GET /metrics", "GET /operator"),
        *("POST /models/switch", "POST /models/download", "POST /models/download/stop"),
        *("POST /models/adapters/load", "POST /models/adapters/unload"),
        *("POST /plugins/{name}/start", "POST /v1/load_lora_adapter", "POST /v1/unload_lora_adapter"),
    }
)
"""What concerns everybody. Where one person uses the server, that one is its operator."""
WRONG_KEY = "notso.wrong_key"
"""Set in the scope of a request that showed a key which is none: what is counted by whom it comes from."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sent a request. `owner`: whose conversations these are; `name`: for people to read; `is_operator`: may see
    what concerns everybody. Where it came with a key: that one's id, and its limits (0: none)."""

    owner: str
    name: str
    is_operator: bool = False
    key_id: str = ""
    requests_per_minute: int = 0
    tokens_per_day: int = 0
    requests_per_day: int = 0


LOCAL = Caller(LOCAL_OWNER, LOCAL_OWNER, is_operator=True)
"""Whoever is at this machine, or holds the server's own key."""
NOBODY = Caller("nobody", "nobody")


class SignIn(Protocol):
    """A way to know who sent a request, besides the server's key."""

    async def __call__(self, request: Request) -> Caller | None:
        """None: this way does not know. It takes bounded time and raises nothing."""


class Keys(Protocol):
    """The keys that an operator has given out. Methods raise StorageError where that cannot be known."""

    async def by_token(self, token: str) -> Caller | None:
        """Whose key this is, if it counts."""

    async def by_id(self, key_id: str) -> Caller | None:
        """The same, of one that was shown before."""


class Gate(Protocol):
    """Decides whether a known caller may do this now, and notes what is to be noted."""

    async def __call__(self, request: Request, caller: Caller) -> None:
        """Raises Problem (429), and StorageError where what was used cannot be looked up."""


PEER = "notso.peer"


class TruePeer:
    """Keeps the address of the other end, before a proxy's word for whom it speaks for takes its place."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[PEER] = (scope.get("client") or ("",))[0]
        await self._app(scope, receive, send)


def peer_of(request: Request) -> str:
    """The address of the other end of the connection; '' where it has none."""
    return str(request.scope.get(PEER, request.client.host if request.client else ""))


def cookie_name(request: Request, name: str = COOKIE) -> str:
    """As `notso_session_3000`: what it is called for the port that the browser asks at, so that two servers of one host
    sign nobody out of each other. Servers behind one proxy are asked at one."""
    _, colon, port = request.headers.get("host", "").rpartition("]")[2].rpartition(":")
    return f"{name}_{port}" if colon and port.isascii() and port.isdecimal() else name


class NeedsKey(HTTPException):
    """401: this route is guarded and the request showed no key."""

    def __init__(self) -> None:
        super().__init__(401, headers={"WWW-Authenticate": "Bearer"})


@dataclass(slots=True)
class _Session:
    """When it began, was last used, and others were told so, in seconds of the wall clock: a machine that slept gets
    older too."""

    began: float
    used: float
    shared: float
    caller: Caller

    def over(self, now: float) -> bool:
        return now - self.began >= SESSION_SECONDS or now - self.used >= SESSION_IDLE_SECONDS


class SessionBook(Protocol):
    """Where servers over one store keep their browsers' sessions together."""

    async def remember(self, name: str, value: str, seconds: float) -> None: ...

    async def recall(self, name: str) -> str | None: ...

    async def forget(self, name: str) -> None: ...

    def tell(self, kind: str, **body: Any) -> None: ...

    def hear(self, kind: str, heard: Callable[[Mapping[str, Any]], None]) -> None: ...


class KeyRing:
    """The server's key, kept as a hash, and the browsers that have shown it: to this server, or to another with the
    same key that writes in the same `book`. `rules` say who may come in: who came in under others is asked again."""

    def __init__(
        self,
        api_key: str | None,
        clock: Callable[[], float] = time.time,
        *,
        sign_ins: tuple[SignIn, ...] = (),
        book: SessionBook | None = None,
        keys: Keys | None = None,
        gate: Gate | None = None,
        asks_who: bool = False,
        rules: str = "",
    ) -> None:
        self.gate = gate
        self._clock = clock
        self._sign_ins = sign_ins
        self._keys = keys
        self._asks_who = asks_who or bool(sign_ins)
        self._most_sessions = MAX_SESSIONS_OF_MANY if keys is not None or sign_ins else MAX_BROWSER_SESSIONS
        self._digest = _digest(api_key) if api_key is not None else None
        self._signing = _digest(f"{api_key} {rules}")
        self._book = book if api_key is not None else None  # what is written there is signed with the key
        if self._book is not None:
            self._book.hear("logout", lambda body: self._drop(bytes.fromhex(body["session"])))
        self._sessions: dict[bytes, _Session] = {}
        self._of_owners: dict[str, dict[bytes, None]] = {}  # the oldest first

    @property
    def open(self) -> bool:
        """Whether nobody is asked who they are."""
        return self._digest is None and not self._asks_who

    def fits(self, key: str) -> bool:
        """Compare in constant time."""
        return self._digest is not None and hmac.compare_digest(_digest(key), self._digest)

    async def new_session(self, caller: Caller = LOCAL) -> str:
        """A cookie value for a browser of that caller. Past the limit, the oldest browser of the owner who has most is
        forgotten."""
        token = secrets.token_urlsafe(32)
        now = self._clock()
        await self._share(_digest(token), self._add(_digest(token), _Session(now, now, now, caller)))
        return token

    async def end_session(self, token: str) -> None:
        """This cookie value admits nobody any more."""
        digest = _digest(token)
        self._drop(digest)
        if self._book is not None:
            self._book.tell("logout", session=digest.hex())
            await self._book.forget(_named(digest))

    async def caller_with(self, key: str) -> Caller | None:
        """Whose key this is."""
        if self.fits(key):
            return LOCAL
        if self._keys is None or not key.startswith(KEY_PREFIX):
            return None
        return await self._keys.by_token(key)

    async def caller(self, request: Request) -> Caller | None:
        """Who sent this request; None for nobody who may pass. A key that is shown must be one that counts, unless
        nobody is asked and it is not of ours: clients have to send something."""
        if shown := _keys_shown(request):
            caller = await self.caller_with(shown[0])
            for key in shown[1:]:  # no more is looked up than shows that one of them does not count
                if caller is None or await self.caller_with(key) != caller:
                    caller = None
                    break
            if caller is not None:
                return caller
            if not self.open or (self._keys is not None and any(key.startswith(KEY_PREFIX) for key in shown)):
                return None
        if self.open:
            return LOCAL
        if (known := await self._continues(request.cookies.get(cookie_name(request), ""))) is not None:
            return known if not known.key_id or self._keys is None else await self._keys.by_id(known.key_id)
        for sign_in in self._sign_ins:
            if (caller := await sign_in(request)) is not None:
                return caller
        return None

    async def _continues(self, token: str) -> Caller | None:
        digest, now = _digest(token), self._clock()
        session = self._sessions.get(digest) or (await self._recalled(digest) if token else None)
        if session is None:
            return None
        if session.over(now):
            await self.end_session(token)
            return None
        session.used = now
        if now - session.shared >= SHARE_SECONDS:
            session.shared = now
            await self._share(digest, session)
        return session.caller

    def _add(self, digest: bytes, session: _Session) -> _Session:
        while len(self._sessions) >= self._most_sessions:
            most = max(self._of_owners.values(), key=lambda theirs: len(theirs))
            self._drop(next(iter(most)))
        self._drop(digest)
        self._sessions[digest] = session
        self._of_owners.setdefault(session.caller.owner, {})[digest] = None
        return session

    def _drop(self, digest: bytes) -> None:
        session = self._sessions.pop(digest, None)
        if session is not None:
            theirs = self._of_owners[session.caller.owner]
            del theirs[digest]
            if not theirs:
                del self._of_owners[session.caller.owner]

    async def _share(self, digest: bytes, session: _Session) -> None:
        """Write it in the book, signed with the key: who can write there makes none."""
        if self._book is not None:
            left = min(SESSION_IDLE_SECONDS, session.began + SESSION_SECONDS - session.used)
            text = json.dumps([session.began, *astuple(session.caller)])
            await self._book.remember(_named(digest), self._signature(digest, text) + text, left)

    async def _recalled(self, digest: bytes) -> _Session | None:
        """One that another server began: it is in the book as long as it is good."""
        found = await self._book.recall(_named(digest)) if self._book is not None else None
        if found is None or not hmac.compare_digest(found[:64].encode(), self._signature(digest, found[64:]).encode()):
            return None
        began, *caller = json.loads(found[64:])
        try:
            known = Caller(*caller)
        except TypeError:  # of another release, which knows more of callers
            return None
        return self._add(digest, _Session(began, self._clock(), 0.0, known))

    def _signature(self, digest: bytes, text: str) -> str:
        return hmac.new(self._signing, digest + text.encode(), hashlib.sha256).hexdigest()


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
    if not caller.is_operator and asked_of(request) in OPERATORS_ONLY:
        raise Problem(403, words["error_operator"])
    if ring.gate is not None:
        await ring.gate(request, caller)


async def front_ends_only(request: Request) -> None:
    """Only another server of ours, which shows the engine's key."""
    ring: KeyRing = request.app.state.engine_ring
    shown = _keys_shown(request)
    if not shown or not all(ring.fits(key) for key in shown):
        request.scope[WRONG_KEY] = bool(shown)
        raise NeedsKey


def asked_of(request: Request) -> str:
    """Method and route of a request, as `GET /chats/{chat_id}`."""
    return f"{request.method} {getattr(request.scope.get('route'), 'path', '')}"


def caller_of(request: Request) -> Caller:
    """Who sent a request that has passed `guarded`."""
    caller: Caller = getattr(request.state, "caller", NOBODY)
    return caller


def owner_of(request: Request) -> str:
    """Whose conversations this request may see."""
    return caller_of(request).owner


def _keys_shown(request: Request) -> list[str]:
    """Every key in the headers, once. Who shows two must hold both, so that no header can speak for another. What else
    `Authorization` says is not for us: a proxy that asks for names and passwords passes on what it was told."""
    keys = request.headers.getlist("x-api-key")
    for value in request.headers.getlist("authorization"):
        scheme, _, token = value.partition(" ")
        if scheme.lower() == "bearer":
            keys.append(token.strip())
    return list(dict.fromkeys(keys))


def _named(digest: bytes) -> str:
    return f"session:{digest.hex()}"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
