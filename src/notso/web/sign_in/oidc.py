"""Sign users in with OpenID Connect: the authorization code flow with PKCE, state and nonce."""

# The extra `oidc` installs Authlib and joserfc. Only this module imports them, and it is imported only if a provider is
# configured.

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import secrets
import time
from collections.abc import AsyncIterator, Callable, Collection, Coroutine
from typing import Any, cast

import httpx2
from authlib.integrations.httpx_client import AsyncOAuth2Client
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

from notso.web.edge.access import Caller
from notso.web.values.errors import SignInError
from notso.web.values.sign_in import OidcSettings, is_listed, is_user_name

SECONDS = 10.0
"""Timeout of each request to the provider."""
MAX_ANSWER_BYTES = 1 << 20
FLOW_SECONDS = 600.0
"""Time limit for completing a sign-in."""
MAX_COMPLETED = 10_000
"""Maximum number of finished sign-in attempts that are remembered to reject replays. The oldest is forgotten first."""
KEYS_SECONDS = 3600.0
"""Age at which the provider's public keys are fetched again."""
KEYS_REFRESH_SECONDS = 10.0
"""Minimum age at which keys that failed to verify a token are fetched again. The provider may have replaced them."""
LEEWAY_SECONDS = 60
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Accepted signature algorithms: only asymmetric ones, neither `none` nor those with a shared secret."""
CALLBACK = "/login/oidc/callback"


class OidcProvider:
    """One OpenID provider. Use on the event loop."""

    def __init__(self, settings: OidcSettings, operators: Collection[str]) -> None:
        self._settings = settings
        self._secret = settings.secret()
        self._operators = operators
        # Whether browsers use https. Requests do not show this, because a proxy may forward them as http.
        self.is_https = settings.public_url.lower().startswith("https:")
        self._redirect = settings.public_url.rstrip("/") + CALLBACK
        # All requests share this TLS context, because loading the CA certificates is slow.
        self._trusted = httpx2.create_ssl_context(trust_env=False)
        self._flow_secret = secrets.token_bytes(32)
        self._completed: dict[str, None] = {}
        self._configuration: dict[str, Any] = {}
        self._keys: KeySet | None = None
        self._keys_fetched_at = 0.0
        self._fetches: dict[str, asyncio.Task[None]] = {}  # running requests to the provider

    async def begin(self, browser: str) -> str:
        """Return the provider's URL for the redirect. Raises SignInError.

        `browser`: value of the cookie that identifies the browser when it returns.
        """
        configuration = await self._provider()
        began = f"{time.monotonic():.0f}"
        address: str = prepare_grant_uri(
            configuration["authorization_endpoint"],
            self._settings.client_id,
            "code",
            self._redirect,
            self._settings.scope,
            f"{began}.{self._derive('state', browser, began)}",
            nonce=self._derive("nonce", browser, began),
            code_challenge=create_s256_code_challenge(self._derive("verifier", browser, began)),
            code_challenge_method="S256",
        )
        return address

    async def finish(self, browser: str, state: str, code: str) -> Caller:
        """Complete a sign-in and return the caller. Raises SignInError."""
        began, _, proof = state.partition(".")
        if not browser or not secrets.compare_digest(proof.encode(), self._derive("state", browser, began).encode()):
            raise SignInError("this sign-in was not started in this browser")
        if state in self._completed or time.monotonic() - float(began) > FLOW_SECONDS:
            raise SignInError("this sign-in took too long or has already ended")
        self._completed[state] = None
        while len(self._completed) > MAX_COMPLETED:
            del self._completed[next(iter(self._completed))]
        configuration = await self._provider()
        verifier = self._derive("verifier", browser, began)
        try:
            async with asyncio.timeout(SECONDS), self._client() as client:
                token = await client.fetch_token(
                    configuration["token_endpoint"], grant_type="authorization_code", code=code, code_verifier=verifier
                )
        except Exception as error:  # each library has its own errors for an unreachable provider or a rejected code
            raise SignInError(f"the provider issued no token ({type(error).__name__})") from None
        claims = await self._claims(str(token.get("id_token", "")), self._derive("nonce", browser, began))
        return self._caller(claims)

    def _derive(self, what: str, browser: str, began: str) -> str:
        # Derive state, nonce and verifier (64 characters each) from the browser's cookie and a secret, so that sign-ins
        # in progress need not be stored: a client could start thousands of them.
        return hmac.new(self._flow_secret, f"{what} {began} {browser}".encode(), hashlib.sha256).hexdigest()

    async def _claims(self, token: str, nonce: str) -> dict[str, Any]:
        for refresh in (False, True):  # the provider may have rotated its keys
            with contextlib.suppress(JoseError, ValueError, KeyError, TypeError):
                decoded = jwt.decode(token, await self._key_set(refresh=refresh), algorithms=ALGORITHMS)
                break
        else:
            raise SignInError("the provider's token has no valid signature")
        claims = dict(decoded.claims)
        audience = claims.get("aud")
        registry = jwt.JWTClaimsRegistry(
            leeway=LEEWAY_SECONDS,
            iss={"essential": True, "value": self._configuration["issuer"]},
            aud={"essential": True, "value": self._settings.client_id},
            exp={"essential": True},
            iat={"essential": True},
            sub={"essential": True},
            nonce={"essential": True, "value": nonce},
        )
        try:
            registry.validate(claims)
        except (JoseError, ValueError, TypeError) as error:
            raise SignInError(f"the provider's token is invalid ({type(error).__name__})") from None
        if isinstance(audience, list) and len(audience) > 1 and claims.get("azp") != self._settings.client_id:
            raise SignInError("the provider's token is for another application")
        return claims

    def _caller(self, claims: dict[str, Any]) -> Caller:
        name = claims.get(self._settings.claim)
        if not isinstance(name, str) or not is_user_name(name):
            raise SignInError(f"the provider's token has no {self._settings.claim} claim to identify users")
        verified = claims.get("email_verified", self._settings.assume_email_verified)
        if self._settings.claim == "email" and verified not in (True, "true"):
            raise SignInError("the provider has not verified that email address")
        if not self._settings.allows(name):
            raise SignInError("you are not allowed to use this server; ask its operator")
        return Caller(self._settings.owner(name), name, is_listed(name, self._operators))

    async def _provider(self) -> dict[str, Any]:
        if not self._configuration:
            await self._fetch_once("configuration", self._fetch_configuration)
        return self._configuration

    async def _key_set(self, *, refresh: bool = False) -> KeySet:
        await self._provider()
        age = time.monotonic() - self._keys_fetched_at
        if self._keys is None or age > (KEYS_REFRESH_SECONDS if refresh else KEYS_SECONDS):
            await self._fetch_once("keys", self._fetch_keys)
        return cast(KeySet, self._keys)

    async def _fetch_once(self, what: str, fetch: Callable[[], Coroutine[Any, Any, None]]) -> None:
        # Concurrent sign-ins share one request, and its error if it fails. With a lock, each would repeat a failed one.
        task = self._fetches.get(what)
        if task is None:
            task = self._fetches[what] = asyncio.create_task(fetch())
            task.add_done_callback(lambda _: self._fetches.pop(what))
        await asyncio.wait({task})
        task.result()

    async def _fetch_configuration(self) -> None:
        issuer = self._settings.issuer.rstrip("/")
        configuration = await self._fetch_json(f"{issuer}/.well-known/openid-configuration")
        if str(configuration.get("issuer", "")).rstrip("/") != issuer:
            raise SignInError("the provider is not the configured issuer")
        urls = ("issuer", "authorization_endpoint", "token_endpoint", "jwks_uri")
        if not all(_is_https_or_loopback(configuration.get(name)) for name in urls):
            raise SignInError("a URL in the provider's configuration is missing or not https")
        self._configuration = configuration

    async def _fetch_keys(self) -> None:
        self._keys = _import_keys(await self._fetch_json(self._configuration["jwks_uri"]))
        self._keys_fetched_at = time.monotonic()

    async def _fetch_json(self, address: str) -> dict[str, Any]:
        try:
            async with asyncio.timeout(SECONDS), self._bounded_client() as client:
                response = await client.get(address, headers={"Accept": "application/json"})
                response.raise_for_status()
            document = response.json()
        except (httpx2.HTTPError, httpx2.InvalidURL, TimeoutError, ValueError, RecursionError) as error:
            raise SignInError(f"a request to the provider failed ({type(error).__name__})") from None
        if not isinstance(document, dict):
            raise SignInError("the provider returned an invalid response")
        return document

    def _client(self) -> AsyncOAuth2Client:
        # A provider that lists no authentication methods supports client_secret_basic.
        methods = self._configuration.get("token_endpoint_auth_methods_supported")
        is_post = isinstance(methods, list) and "client_secret_post" in methods and "client_secret_basic" not in methods
        method = "client_secret_post" if is_post else "client_secret_basic"
        return AsyncOAuth2Client(
            self._settings.client_id,
            self._secret,
            token_endpoint_auth_method=method if self._secret else "none",
            scope=self._settings.scope,
            redirect_uri=self._redirect,
            timeout=SECONDS,
            trust_env=False,
            transport=self._transport(),
        )

    def _bounded_client(self) -> httpx2.AsyncClient:
        return httpx2.AsyncClient(transport=self._transport(), trust_env=False)

    def _transport(self) -> httpx2.AsyncBaseTransport:
        return _Bounded(httpx2.AsyncHTTPTransport(verify=self._trusted, trust_env=False))


class _Bounded(httpx2.AsyncBaseTransport):
    # HTTP transport that rejects responses that are compressed or larger than MAX_ANSWER_BYTES. A small compressed
    # response could take up any amount of memory.

    def __init__(self, inner: httpx2.AsyncBaseTransport) -> None:
        self._inner = inner

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        request.headers["Accept-Encoding"] = "identity"
        response = await self._inner.handle_async_request(request)
        if response.headers.get("content-encoding", "identity") != "identity":
            await response.aclose()
            raise httpx2.ReadError("the provider compressed its response although it was not asked to")
        return httpx2.Response(
            response.status_code,
            headers=response.headers,
            stream=_BoundedStream(cast(httpx2.AsyncByteStream, response.stream)),
            extensions=response.extensions,
        )

    async def aclose(self) -> None:
        await self._inner.aclose()


class _BoundedStream(httpx2.AsyncByteStream):
    def __init__(self, inner: httpx2.AsyncByteStream) -> None:
        self._inner = inner

    async def __aiter__(self) -> AsyncIterator[bytes]:
        received = 0
        async for piece in self._inner:
            received += len(piece)
            if received > MAX_ANSWER_BYTES:
                raise httpx2.ReadError("the provider's response is too large")
            yield piece

    async def aclose(self) -> None:
        await self._inner.aclose()


def _import_keys(document: dict[str, Any]) -> KeySet:
    # Unsupported keys are ignored, as RFC 7517 recommends. The library ignores only keys of unknown types, not those
    # with unknown curves.
    listed = document.get("keys")
    keys: list[Any] = []
    for each in listed if isinstance(listed, list) else ():
        with contextlib.suppress(JoseError, ValueError, KeyError, TypeError):
            keys += KeySet.import_key_set({"keys": [each]})
    if not keys:
        raise SignInError("the provider's keys cannot be read")
    return KeySet(keys)


def _is_https_or_loopback(address: Any) -> bool:
    if not isinstance(address, str):
        return False
    try:
        url = httpx2.URL(address)
    except httpx2.InvalidURL:
        return False
    return url.scheme == "https" or (url.scheme == "http" and url.host in ("localhost", "127.0.0.1", "::1"))
