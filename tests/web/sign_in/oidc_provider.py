"""A small OpenID provider on loopback. Each fault in its tokens can be enabled separately."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

from joserfc import jwt
from joserfc.jwk import OctKey, RSAKey

CLIENT, SECRET = "notso-client", "a secret: of % signs"


@cache
def rsa_key(name: str, *, is_foreign: bool = False) -> RSAKey:
    """Return the key with this id, of the provider or of somebody else."""
    return RSAKey.generate_key(2048, {"kid": name})


class Provider:
    """An OpenID provider. Tests may change `claims` and `wrong` at any time; `asked` lists the requested paths."""

    def __init__(self) -> None:
        self.key = rsa_key("one")
        self.claims: dict[str, Any] = {"sub": "ann", "email": "ann@example.org", "email_verified": True}
        self.wrong = ""
        self.other_keys: list[Any] = []  # listed before the provider's key
        self.secret_in_header = True  # otherwise, clients must send it in the form
        self.asked: list[str] = []
        self.codes: dict[str, dict[str, str]] = {}
        self.issuer = ""

    def facts(self) -> dict[str, Any]:
        issuer = self.issuer + ("/other" if self.wrong == "issuer" else "")
        ends = {"authorization_endpoint": "authorize", "token_endpoint": "token", "jwks_uri": "keys"}
        methods = {} if self.secret_in_header else {"token_endpoint_auth_methods_supported": ["client_secret_post"]}
        return {"issuer": issuer, **methods, **{name: f"{self.issuer}/{end}" for name, end in ends.items()}}

    def authorize(self, query: dict[str, str]) -> str:
        """Return the redirect address of a user who consents."""
        assert query["response_type"] == "code" and query["client_id"] == CLIENT and "openid" in query["scope"].split()
        assert query["code_challenge_method"] == "S256"
        code = f"code-{len(self.codes)}"
        self.codes[code] = query
        return query["redirect_uri"] + "?" + urlencode({"code": code, "state": query["state"]})

    def token(self, form: dict[str, str], authorization: str) -> tuple[int, dict[str, Any]]:
        query = self.codes.pop(form.get("code", ""), None)
        given = base64.b64decode(authorization.removeprefix("Basic ")).decode() if authorization else ""
        if not self.secret_in_header:
            given = f"{form.get('client_id')}:{form.get('client_secret')}"
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form.get("code_verifier", "").encode()).digest())
        is_right = (
            query is not None
            and given in (f"{CLIENT}:{SECRET}", f"{CLIENT}:a%20secret%3A%20of%20%25%20signs")
            and challenge.rstrip(b"=").decode() == query["code_challenge"]
            and form["redirect_uri"] == query["redirect_uri"]
        )
        if not is_right or query is None:
            return 400, {"error": "invalid_grant"}
        more = {"x": "y" * (2 << 20)} if self.wrong == "long token" else {}
        return 200, {"access_token": "x", "token_type": "Bearer", "id_token": self.id_token(query["nonce"])} | more

    def id_token(self, nonce: str) -> str:
        now = int(time.time())
        claims = {"iss": self.issuer, "aud": CLIENT, "iat": now, "exp": now + 60, "nonce": nonce, **self.claims}
        claims |= {
            "nonce": {"nonce": "another"},
            "audience": {"aud": "another"},
            "audiences": {"aud": [CLIENT, "another"], "azp": "another"},
            "expired": {"exp": now - 3600, "iat": now - 7200},
            "token issuer": {"iss": "https://example.org"},
        }.get(self.wrong, {})
        if self.wrong == "no expiry":
            del claims["exp"]
        if self.wrong == "unsigned":
            parts = ({"alg": "none"}, claims)
            return (
                ".".join(base64.urlsafe_b64encode(json.dumps(each).encode()).rstrip(b"=").decode() for each in parts)
                + "."
            )
        if self.wrong == "public key as secret":
            public = self.key.as_pem(private=False)
            return jwt.encode({"alg": "HS256", "kid": "one"}, claims, OctKey.import_key(public))
        key = rsa_key("one", is_foreign=True) if self.wrong == "key" else self.key
        return jwt.encode({"alg": "RS256", "kid": str(key.kid)}, claims, key)


def serving(provider: Provider) -> ThreadingHTTPServer:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlsplit(self.path)
            provider.asked.append(parts.path)
            if parts.path == "/authorize":
                query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                self.send_response(302)
                self.send_header("Location", provider.authorize(query))
                self.end_headers()
            elif provider.wrong == "silent":
                self.send_error(503)
            elif parts.path == "/.well-known/openid-configuration":
                self.say(200, {"issuer": 1, "x": "y" * (2 << 20)} if provider.wrong == "much" else provider.facts())
            else:
                self.say(200, {"keys": [*provider.other_keys, provider.key.as_dict(private=False)]})

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            form = {name: values[0] for name, values in parse_qs(body).items()}
            self.say(*provider.token(form, self.headers.get("Authorization", "")))

        def say(self, status: int, answer: Any) -> None:
            body = json.dumps(answer).encode()
            self.send_response(status)
            if provider.wrong == "compressed":
                body = gzip.compress(body)
                self.send_header("Content-Encoding", "gzip")
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Print no log lines."""

    return ThreadingHTTPServer(("127.0.0.1", 0), Handler)


@contextmanager
def running_provider() -> Iterator[Provider]:
    """Run a provider inside the context."""
    provider = Provider()
    server = serving(provider)
    provider.issuer = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield provider
    finally:
        server.shutdown()
        server.server_close()
        thread.join(30)
