"""Objects shared by all servers of a test process, because creating them per server takes longer than most tests:
compiled templates, static files, an empty database, and a TLS context for clients."""

from __future__ import annotations

import ssl
import tempfile
from functools import cache, partial
from pathlib import Path
from types import CodeType

import httpx._transports.default as httpx_transport
import httpx2._transports.default as httpx2_transport
from jinja2 import Environment
from jinja2.bccache import Bucket, BytecodeCache

from notso.web import app
from notso.web.chat import templates
from notso.web.store.sqlite import store
from notso.web.store.sqlite.connection import storage_errors
from notso.web.store.sqlite.store import Writer

NO_AUTHORITIES = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
"""Pass as `httpx.Client(verify=NO_AUTHORITIES)`. Loopback needs no certificates, and loading them takes 20 ms."""


class _Compiled(BytecodeCache):
    def __init__(self) -> None:
        self._codes: dict[tuple[str, str], CodeType] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = self._codes.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        assert bucket.code is not None
        self._codes[bucket.key, bucket.checksum] = bucket.code


@cache
def _empty_database() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "notso.db"
        writer = Writer(path)
        writer.copy(path.with_name("copy.db"))
        writer.close()
        return path.with_name("copy.db").read_bytes()


def _begun(path: Path) -> Writer:
    if not path.exists():
        with storage_errors():
            path.touch(0o600)
            path.write_bytes(_empty_database())
    return Writer(path)


def share_between_servers() -> None:
    """Let all servers of this process share templates and static files and start from a copy of one database.

    All HTTP clients share the certificate authorities, which take 30 ms to load.
    """
    for transport in (httpx_transport, httpx2_transport):
        transport.create_ssl_context = cache(transport.create_ssl_context)  # type: ignore[attr-defined]
    templates.Environment = partial(Environment, bytecode_cache=_Compiled())  # type: ignore[misc,assignment]
    app.Assets = cache(app.Assets)  # type: ignore[misc,assignment]
    store.Writer = _begun  # type: ignore[misc,assignment]
