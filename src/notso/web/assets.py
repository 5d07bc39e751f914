"""The files a page needs, read once, served from memory under a name that changes with their content."""

from __future__ import annotations

import gzip
import hashlib
import mimetypes
from dataclasses import dataclass
from pathlib import Path

STATIC_DIRECTORY = Path(__file__).parent / "static"
FOREVER = "public, max-age=31536000, immutable"

_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml"}


@dataclass(frozen=True, slots=True)
class Asset:
    """One file. `packed` is its gzip form."""

    body: bytes
    packed: bytes
    media_type: str


class Assets:
    """All files under a directory, each at /static/<digest>/<name>."""

    def __init__(self, directory: Path = STATIC_DIRECTORY) -> None:
        self._by_path: dict[str, Asset] = {}
        self._urls: dict[str, str] = {}
        for path in sorted(directory.rglob("*")):
            if path.suffix in _TYPES and path.is_file():
                name, body = path.relative_to(directory).as_posix(), path.read_bytes()
                digest = hashlib.sha256(body).hexdigest()[:16]
                media_type = _TYPES.get(path.suffix) or mimetypes.guess_type(name)[0] or "application/octet-stream"
                self._by_path[f"{digest}/{name}"] = Asset(body, gzip.compress(body, mtime=0), media_type)
                self._urls[name] = f"/static/{digest}/{name}"

    def url(self, name: str) -> str:
        """Where a page finds the file. Raises KeyError for one that does not exist."""
        return self._urls[name]

    def find(self, path: str) -> Asset | None:
        """The file at `<digest>/<name>`."""
        return self._by_path.get(path)
