"""Control access. Every route declares its audience with a mark: a dependency such as PUBLIC or GUARDED.

If neither an API key nor another sign-in method is configured, the server listens on loopback only, and guarded routes
accept every request that passed the `Host` and origin checks. Otherwise, API clients send a key as a bearer token or in
`x-api-key`. Browsers send the key once and receive a random session cookie, or use another sign-in method.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import secrets
import time
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import astuple, dataclass, field
from typing import Any, Protocol, cast

from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from notso.web.edge.connections import ClientConnection, KeyWatch, connection_of
from notso.web.values.errors import Problem
from notso.web.values.wording import words

COOKIE = "notso_session"
"""Base name of the session cookie. `cookie_name` appends the port, because browsers share cookies between all ports of
a host."""
MAX_SESSIONS_SINGLE_USER, MAX_SESSIONS_MULTIUSER = 64, 10_000
"""Maximum number of browser sessions on a server with one user, and on a server with several users."""
KEY_PREFIX = "notso-"
"""Prefix of the API keys that an operator issues to users."""
SESSION_SECONDS = 30 * 86_400.0
"""Maximum session lifetime. It limits how long a stolen cookie can be used."""
SESSION_IDLE_SECONDS = 7 * 86_400.0
"""Maximum idle time of a session. A cookie that has not been used for longer was probably left behind on a machine or
in a backup."""
SESSION_RENEWAL_SECONDS = 3600.0
"""Minimum interval between renewals of a session's expiry in the shared storage."""
SESSION_END_SECONDS = 1.0
"""Time for which running requests may continue after their session has ended."""
LOCAL_OWNER = "local"
WRONG_KEY = "notso.wrong_key"
"""ASGI scope entry that marks a request with an invalid API key. RateLimit counts such requests per address."""
INTERNAL_CALLER = "notso.inside"
"""ASGI scope entry with the Caller of a request that the server sends to itself. Clients cannot set it."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Authenticated sender of a request.

    The limits are those of the API key that was used; 0 means no limit.
    """

    owner: str  # user ID under which this caller's conversations are stored
    name: str  # for display
    is_operator: bool = False  # whether the caller may use `operator_only` routes
    key_id: str = ""
    requests_per_minute: int = 0
    tokens_per_day: int = 0
    requests_per_day: int = 0


LOCAL = Caller(LOCAL_OWNER, LOCAL_OWNER, is_operator=True)
"""The user of this machine, or any client that sent the server's own API key."""
NOBODY = Caller("nobody", "nobody")
"""Caller of requests without authentication, such as those to public routes."""


class SignIn(Protocol):
    async def __call__(self, request: Request) -> Caller | None:
        """Return the caller, or None if the client is not signed in.

        Implementations must return in bounded time, without raising exceptions.
        """


class KeyStore(Protocol):
    """Store of issued API keys. Its methods raise StorageError."""

    async def by_token(self, token: str) -> Caller | None: ...

    async def lookup(self, key_id: str) -> Caller | None: ...

    async def valid_ids(self, key_ids: Collection[str]) -> set[str]: ...


class QuotaCheck(Protocol):
    async def __call__(self, request: Request, caller: Caller) -> None:
        """Count the request against the caller's limits. Raises QuotaError or StorageError."""


PEER = "notso.peer"
"""ASGI scope entry with the address at the other end of the TCP connection, which may be a proxy."""


class PeerAddress:
    """ASGI middleware that saves the peer's address before X-Forwarded-For replaces it."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        address, *port = scope.get("client") or ("",)
        # A dual-stack socket reports the IPv4 address 192.0.2.1 as ::ffff:192.0.2.1.
        scope[PEER] = address.removeprefix("::ffff:") if "." in address else address
        if port:
            scope["client"] = (scope[PEER], *port)
        await self._app(scope, receive, send)


def ipv4_network(network: str) -> str:
    """Convert a network of IPv4-mapped addresses to IPv4, the form that `PeerAddress` stores."""
    parsed = ipaddress.ip_network(network)
    mapped = getattr(parsed.network_address, "ipv4_mapped", None)
    return f"{mapped}/{parsed.prefixlen - 96}" if mapped is not None and parsed.prefixlen >= 96 else network


def is_in_networks(host: str, networks: Iterable[ipaddress.IPv4Network | ipaddress.IPv6Network]) -> bool:
    """Return whether `host` is an address in one of the networks. IPv4-mapped addresses count as IPv4."""
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return False
    address = getattr(address, "ipv4_mapped", None) or address
    return any(address in network for network in networks)


def peer_of(request: Request) -> str:
    return str(request.scope.get(PEER, request.client.host if request.client else ""))


def cookie_name(request: Request, name: str = COOKIE) -> str:
    # Two servers on one host must not overwrite each other's cookie. The port is that of the `Host` header, not the one
    # the server listens on, so that replicas behind a proxy use the same cookie.
    _, colon, port = request.headers.get("host", "").rpartition("]")[2].rpartition(":")
    return f"{name}_{port}" if colon and port.isascii() and port.isdecimal() else name


class KeyRequiredError(HTTPException):
    """401: the request has no valid key or session."""

    def __init__(self) -> None:
        super().__init__(401, headers={"WWW-Authenticate": "Bearer"})


@dataclass(slots=True)
class _Session:
    # Times are wall-clock seconds, because the monotonic clock stops while the machine is suspended.

    began: float
    used: float
    shared: float  # when the session was last written to the shared storage
    caller: Caller
    # Maps uvicorn's response objects to the connections of the session's running requests.
    running: weakref.WeakKeyDictionary[Any, weakref.ref[ClientConnection]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def is_expired(self, now: float) -> bool:
        return now - self.began >= SESSION_SECONDS or now - self.used >= SESSION_IDLE_SECONDS


class SharedStorage(Protocol):
    @property
    def is_unreachable(self) -> bool: ...

    async def set_value(self, name: str, value: str, seconds: float) -> None: ...

    async def get_value(self, name: str, if_unreachable: str | None = None) -> str | None: ...

    def send(self, kind: str, **body: Any) -> None: ...

    def subscribe(self, kind: str, subscriber: Callable[[Mapping[str, Any]], None]) -> None: ...


class KeyRing:
    """Holds the browser sessions, the sign-in methods, and the hash of the server's API key.

    Replicas with the same API key and sign-in `rules` share sessions through `storage`.
    """

    def __init__(
        self,
        api_key: str | None,
        clock: Callable[[], float] = time.time,
        *,
        sign_ins: tuple[SignIn, ...] = (),
        storage: SharedStorage | None = None,
        keys: KeyStore | None = None,
        quota_check: QuotaCheck | None = None,
        requires_authentication: bool = False,
        rules: str = "",
    ) -> None:
        self.quota_check = quota_check
        self._clock = clock
        self._sign_ins = sign_ins
        self._keys = keys
        self._requires_sign_in = requires_authentication or bool(sign_ins)
        self._max_sessions = MAX_SESSIONS_MULTIUSER if keys is not None or sign_ins else MAX_SESSIONS_SINGLE_USER
        self._digest = _digest(api_key) if api_key is not None else None
        self._signing_key = _digest(f"{api_key} {rules}")
        self._storage = storage if api_key is not None else None  # without a key, entries could not be signed
        if self._storage is not None:
            self._storage.subscribe("logout", lambda body: self._drop(bytes.fromhex(body["session"])))
        self._key_watch = KeyWatch(keys.valid_ids) if keys is not None else None
        self._sessions: dict[bytes, _Session] = {}
        self._digests_by_owner: dict[str, dict[bytes, None]] = {}  # digests of sessions by owner, oldest first

    @property
    def is_open(self) -> bool:
        return self._digest is None and not self._requires_sign_in

    def is_server_key(self, key: str) -> bool:
        return self._digest is not None and hmac.compare_digest(_digest(key), self._digest)

    async def new_session(self, caller: Caller = LOCAL) -> str:
        token = secrets.token_urlsafe(32)
        now = self._clock()
        await self._share_session(_digest(token), self._add(_digest(token), _Session(now, now, now, caller)))
        return token

    async def end_session(self, token: str, request: Request | None = None) -> None:
        """End a cookie's session on all replicas and, soon after, its running requests except `request`."""
        # The stored session is not deleted, because another replica may be about to renew it. Instead, a revocation
        # is stored that outlives the session. The other replicas are notified afterward: a replica that loads the
        # session meanwhile either finds the revocation or receives the notification.
        digest = _digest(token)
        if self._storage is not None:
            await self._storage.set_value(_revocation_key(digest), "1", SESSION_SECONDS)
            self._storage.send("logout", session=digest.hex())
        session, connection = self._sessions.get(digest), connection_of(request.scope) if request is not None else None
        if session is not None and connection is not None:
            session.running.pop(connection.cycle, None)
        self._drop(digest)

    def rejects(self, invalid_key: str) -> bool:
        # Many client libraries cannot omit the key, so a server without authentication ignores invalid keys. With a key
        # store, it rejects those that begin with KEY_PREFIX, such as revoked keys.
        return not self.is_open or (self._keys is not None and invalid_key.startswith(KEY_PREFIX))

    async def caller_for_key(self, key: str) -> Caller | None:
        if self.is_server_key(key):
            return LOCAL
        if self._keys is None or not key.startswith(KEY_PREFIX):
            return None
        return await self._keys.by_token(key)

    async def caller(self, request: Request) -> Caller | None:
        """Return the request's caller, or None if access is denied."""
        if (internal_caller := request.scope.get(INTERNAL_CALLER)) is not None:
            return cast(Caller, internal_caller)
        if keys := keys_sent(request):
            caller = await self.caller_for_key(keys[0])
            for key in keys[1:]:  # all keys of a request must belong to the same caller
                if caller is None or await self.caller_for_key(key) != caller:
                    caller = None
                    break
            if caller is not None:
                return caller
            if any(map(self.rejects, keys)):
                return None
        token = request.cookies.get(cookie_name(request), "")
        if (session_caller := await self._resume_session(token)) is not None:
            if (connection := connection_of(request.scope)) is not None:
                # Register the request immediately, because one that is not registered when the session ends would
                # continue.
                self._sessions[_digest(token)].running[connection.cycle] = weakref.ref(connection)
            # If the session's key was revoked, deny access even on an open server: the sender is not the local user.
            return await self.with_current_key(session_caller)
        if self.is_open:
            return LOCAL
        for sign_in in self._sign_ins:
            if (caller := await sign_in(request)) is not None:
                return caller
        return None

    async def with_current_key(self, caller: Caller) -> Caller | None:
        """Return `caller` with the current settings of its key, or None if the key was revoked."""
        return caller if not caller.key_id or self._keys is None else await self._keys.lookup(caller.key_id)

    def end_if_revoked(self, request: Request, caller: Caller) -> None:
        """Close the request's connection if the caller's key is revoked before the response is complete."""
        if caller.key_id and self._key_watch is not None:
            self._key_watch.add(request.scope, caller.key_id)

    async def _resume_session(self, token: str) -> Caller | None:
        digest, now = _digest(token), self._clock()
        session = self._sessions.get(digest)
        if session is None or session.is_expired(now):
            self._drop(digest)
            # A session that has expired here may still be in use on another replica.
            session = await self._load_session(digest) if token else None
        if session is None or session.is_expired(now):
            return None
        session.used = now
        if now - session.shared >= SESSION_RENEWAL_SECONDS:  # always true if the session was just loaded
            if self._storage is not None:
                if session.shared and self._storage.is_unreachable:
                    return session.caller  # without waiting for the storage; a later request renews the session
                # If the storage is unreachable, do not accept a session that was just loaded, because it may have been
                # revoked.
                unknown = None if session.shared else "1"
                if await self._storage.get_value(_revocation_key(digest), unknown) is not None:
                    self._drop(digest)
                    return None
            session.shared = now
            await self._share_session(digest, session)
        return session.caller if self._sessions.get(digest) is session else None  # None: the session has just ended

    def _add(self, digest: bytes, session: _Session) -> _Session:
        # At the limit, end the oldest session of the owner with the most sessions. Otherwise, one user could sign out
        # the others by signing in repeatedly.
        while len(self._sessions) >= self._max_sessions:
            largest = max(self._digests_by_owner.values(), key=lambda digests: len(digests))
            self._drop(next(iter(largest)))
        self._sessions[digest] = session
        self._digests_by_owner.setdefault(session.caller.owner, {})[digest] = None
        return session

    def _drop(self, digest: bytes) -> None:
        session = self._sessions.pop(digest, None)
        if session is not None:
            digests = self._digests_by_owner[session.caller.owner]
            del digests[digest]
            if not digests:
                del self._digests_by_owner[session.caller.owner]
            # Close connections after a delay, so that short requests complete. Otherwise, a second click on "sign out"
            # would show an error.
            for cycle, reference in session.running.items():
                if (connection := reference()) is not None:
                    connection.loop.call_later(SESSION_END_SECONDS, connection.close_during, cycle)

    async def _share_session(self, digest: bytes, session: _Session) -> None:
        # The entry is signed, so that write access to the shared storage is not enough to forge a session.
        if self._storage is not None:
            seconds = min(SESSION_IDLE_SECONDS, session.began + SESSION_SECONDS - session.used)
            text = json.dumps([session.began, *astuple(session.caller)])
            await self._storage.set_value(_storage_key(digest), self._signature(digest, text) + text, seconds)

    async def _load_session(self, digest: bytes) -> _Session | None:
        entry = await self._storage.get_value(_storage_key(digest)) if self._storage is not None else None
        if entry is None or not hmac.compare_digest(entry[:64].encode(), self._signature(digest, entry[64:]).encode()):
            return None
        began, *fields = json.loads(entry[64:])
        try:
            caller = Caller(*fields)
        except TypeError:  # written by a release in which Caller has different fields
            return None
        if digest in self._sessions:  # a concurrent request has loaded the session
            return self._sessions[digest]
        return self._add(digest, _Session(began, self._clock(), 0.0, caller))

    def _signature(self, digest: bytes, text: str) -> str:
        return hmac.new(self._signing_key, digest + text.encode(), hashlib.sha256).hexdigest()


async def public() -> None:
    """Mark a route that requires no key or session."""


@dataclass(frozen=True, slots=True)
class AccessMark:
    # audit: action recorded in the audit log for each request to the route, or "" for none.
    # uses_model: whether requests to a page route count toward the limits of the caller's key.

    operators: bool = False
    audit: str = ""
    uses_model: bool = False

    async def __call__(self, request: Request) -> None:
        ring: KeyRing = request.app.state.key_ring
        caller = await ring.caller(request)
        if caller is None:
            if keys_sent(request):
                request.scope[WRONG_KEY] = True
            raise KeyRequiredError
        request.state.caller = caller
        if self.operators and not caller.is_operator:
            raise Problem(403, words["error_operator"])
        if ring.quota_check is not None:
            await ring.quota_check(request, caller)
        ring.end_if_revoked(request, caller)


def operator_only(audit: str = "") -> Any:
    """Restrict a route to operators. `audit`: action for the audit log."""
    return Depends(AccessMark(operators=True, audit=audit))


def audited(action: str) -> Any:
    """Record a route's requests in the audit log as `action`, which must not contain user data."""
    return Depends(AccessMark(audit=action))


def mark_of(route: Any) -> AccessMark:
    found = (each.dependency for each in getattr(route, "dependencies", ()))
    return next((each for each in found if isinstance(each, AccessMark)), AccessMark())


def audience_of(route: Any) -> str:
    """Return "public", "guarded", "operators" or "front_ends_only". Raises TypeError for a route without a mark."""
    found = [each.dependency for each in getattr(route, "dependencies", ())]
    for kind in (public, front_ends_only):
        if kind in found:
            return kind.__name__
    if not any(isinstance(each, AccessMark) for each in found):
        raise TypeError(f"{route.path} has no access mark: use PUBLIC, GUARDED, operator_only() or FRONT_ENDS_ONLY")
    return "operators" if mark_of(route).operators else "guarded"


def include_marked(app: FastAPI, router: APIRouter) -> None:
    """Register the routes of a router. Raises TypeError for a route without a mark."""
    # With FastAPI.include_router, the first request would take longer, because FastAPI would build a second copy of
    # every route.
    for route in router.routes:
        audience_of(route)
    app.router.routes.extend(router.routes)


async def front_ends_only(request: Request) -> None:
    """Require the engine's key, which only front ends (servers that use this engine remotely) have."""
    ring: KeyRing = request.app.state.engine_ring
    keys = keys_sent(request)
    if not keys or not all(ring.is_server_key(key) for key in keys):
        request.scope[WRONG_KEY] = bool(keys)
        raise KeyRequiredError


PUBLIC, GUARDED, FRONT_ENDS_ONLY = Depends(public), Depends(AccessMark()), Depends(front_ends_only)
USES_MODEL = Depends(AccessMark(uses_model=True))
"""Mark for guarded page routes that run the model."""


def caller_of(request: Request) -> Caller:
    caller: Caller = getattr(request.state, "caller", NOBODY)
    return caller


def owner_of(request: Request) -> str:
    return caller_of(request).owner


def keys_sent(request: Request) -> list[str]:
    # Every key is checked, so that no header can override another. Authorization schemes other than Bearer are ignored,
    # because a proxy may forward the Basic credentials with which clients sign in to it.
    keys = request.headers.getlist("x-api-key")
    for value in request.headers.getlist("authorization"):
        scheme, _, token = value.partition(" ")
        if scheme.lower() == "bearer":
            keys.append(token.strip())
    return list(dict.fromkeys(keys))


def _storage_key(digest: bytes) -> str:
    return f"session:{digest.hex()}"


def _revocation_key(digest: bytes) -> str:
    return f"logout:{digest.hex()}"


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).digest()
