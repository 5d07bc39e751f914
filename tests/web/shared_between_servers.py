"""What all servers of a test process share, because preparing it for each of them takes longer than most tests: the
compiled templates, the static files, and a TLS context for clients."""

from __future__ import annotations

import ssl
from functools import cache, partial
from types import CodeType

from jinja2 import Environment
from jinja2.bccache import Bucket, BytecodeCache

from notso.web import app
from notso.web.chat import templates

NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""`httpx.Client(verify=NO_AUTHORITIES)`: certificates are no matter on loopback, and loading them takes 20 ms."""


class _Compiled(BytecodeCache):
    def __init__(self) -> None:
        self._codes: dict[tuple[str, str], CodeType] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = self._codes.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        assert bucket.code is not None
        self._codes[bucket.key, bucket.checksum] = bucket.code


def share_between_servers() -> None:
    """Let all servers of this process share templates and static files."""
    templates.Environment = partial(Environment, bytecode_cache=_Compiled())  # type: ignore[misc,assignment]
    app.Assets = cache(app.Assets)  # type: ignore[misc,assignment]
