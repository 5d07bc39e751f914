"""Static files, read once and served from memory under content-addressed names."""

from __future__ import annotations

import gzip
import hashlib
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path

STATIC_DIRECTORY = Path(__file__).parents[1] / "static"
FOREVER = "public, max-age=31536000, immutable"

_TYPES = {
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".webmanifest": "application/manifest+json",
}
# Patterns that find relative references to other files: fonts in style sheets, icons in the manifest.
_REFERENCES = {
    ".css": re.compile(rb"(?<=url\()[\w./-]+(?=\))"),
    ".webmanifest": re.compile(rb'(?<="src": ")[\w./-]+(?=")'),
}


_WEIGHT = re.compile(r"[01](\.[0-9]{0,3})?")  # `qvalue` in RFC 9110


@dataclass(frozen=True, slots=True)
class Asset:
    body: bytes
    media_type: str

    @property
    def packed(self) -> bytes:
        return _packed(self.body)


_packed = cache(partial(gzip.compress, mtime=0))


def accepts_gzip(headers: Mapping[str, str]) -> bool:
    """Return whether Accept-Encoding allows gzip, by name or by `*`, with a weight above 0."""
    weights: dict[str, float] = {}
    for each in headers.get("accept-encoding", "").split(","):
        coding, *parameters = (part.strip().lower() for part in each.split(";"))
        weight = next((value for name, _, value in (each.partition("=") for each in parameters) if name == "q"), "1")
        weights[coding] = float(weight) if _WEIGHT.fullmatch(weight) else 0.0
    return weights.get("gzip", weights.get("*", 0.0)) > 0


class Assets:
    """Files of a directory, published at /static/<digest>/<name>. References between them are rewritten."""

    def __init__(self, directory: Path = STATIC_DIRECTORY) -> None:
        self.by_path: dict[str, Asset] = {}
        self._urls: dict[str, str] = {}
        paths = [path for path in sorted(directory.rglob("*")) if path.suffix in _TYPES and path.is_file()]
        # Files that contain references come last, because a rewritten reference includes the referenced file's digest.
        for path in sorted(paths, key=lambda path: path.suffix in _REFERENCES):
            name, body = path.relative_to(directory).as_posix(), path.read_bytes()
            if pattern := _REFERENCES.get(path.suffix):
                body = pattern.sub(lambda match, name=name: self._rewrite(name, match[0]), body)  # type: ignore[misc]
            digest = hashlib.sha256(body).hexdigest()[:16]
            self.by_path[f"{digest}/{name}"] = Asset(body, _TYPES[path.suffix])
            self._urls[name] = f"/static/{digest}/{name}"

    def _rewrite(self, name: str, reference: bytes) -> bytes:
        neighbor = posixpath.normpath(posixpath.join(posixpath.dirname(name), reference.decode()))
        url = self._urls.get(neighbor)
        # The rewritten reference is a relative URL, because a proxy may publish the server below a base path.
        up = "../" * (name.count("/") + 1)
        return (up + url.removeprefix("/static/") if url else reference.decode()).encode()

    def url(self, name: str) -> str:
        """Return a file's URL. Raises KeyError if there is no such file."""
        return self._urls[name]
