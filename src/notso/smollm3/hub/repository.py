"""Look up model files in any Hugging Face Hub repository, with the size and hash that the Hub reports."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

from notso.smollm3.errors import DownloadError, InvalidRequestError, quoted
from notso.smollm3.hub import download
from notso.smollm3.hub.registry import (
    PART,
    KnownFile,
    cached_files,
    hub_cache,
    known_file,
    official_file,
    quantization_in,
)
from notso.smollm3.strict_json import json_or_none

PREFERRED = "Q4_K_M"  # default if a repository has several quantizations

MAX_LISTING_BYTES = 16 << 20

_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def is_repository(name: str) -> bool:
    """Return whether a name is `owner/repository`, optionally with `:QUANTIZATION` or `:FILE`."""
    return _REPOSITORY.fullmatch(name.strip().partition(":")[0]) is not None


def is_downloadable(name: str) -> bool:
    """Return whether a name denotes an official file or a repository rather than a path."""
    is_file = name.partition(":")[0].lower().endswith(".gguf")
    return official_file(name) is not None or (is_repository(name) and not is_file)


def find_cached(name: str) -> Path | None:
    """Return the cached file of `owner/repository[:QUANTIZATION]` or `owner/repository:FILE`, if any.

    Raises InvalidRequestError if several files of the latest snapshot match.
    """
    repository, _, wanted = name.strip().partition(":")
    depth = len(hub_cache().parts) + 3  # models--owner--repository/snapshots/REVISION
    files = {path: "/".join(path.parts[depth:]) for path in cached_files(repository)}
    selected = _matching(files.values(), wanted)
    matches = [path for path in files if files[path] in selected]
    if not matches:
        return None
    same = {files[path] for path in matches if path.parts[:depth] == matches[-1].parts[:depth]}
    _require_one(repository, same)
    return matches[-1]


def _matching(filenames: Iterable[str], wanted: str) -> list[str]:
    # `wanted`: a quantization, a file name, or "".
    types = {filename: (quantization_in(filename) or filename).upper() for filename in filenames}
    found = set(types.values())
    wanted = wanted.upper() or (PREFERRED if PREFERRED in found or len(found) != 1 else found.pop())
    exact = [filename for filename in types if filename.upper() == wanted]
    return exact or [filename for filename, each in types.items() if each == wanted]


def _require_one(repository: str, filenames: Collection[str]) -> None:
    if len(filenames) > 1:
        choices = ", ".join(f"{repository}:{filename}" for filename in sorted(filenames))
        raise InvalidRequestError(f"{repository} has several files of this type; choices: {choices}", param="name")


def find_hub_file(name: str, *, offline: bool = False) -> KnownFile:
    """Return an official file, or look up `owner/repository[:QUANTIZATION]` or `owner/repository:FILE` on the Hub.

    Raises InvalidRequestError or DownloadError.
    """
    if official_file(name) is not None or not is_repository(name):
        return known_file(name)
    if offline:
        raise DownloadError(f"the files of {name.strip()} cannot be listed, because the network is disabled")
    repository, _, quantization = name.strip().partition(":")
    return _select_file(repository, quantization, _fetch_listing(repository))


def _fetch_listing(repository: str) -> Mapping[str, Any]:
    import httpx2

    endpoint = download.hub_endpoint()
    url = f"{endpoint}/api/models/{quote(repository)}/revision/main?blobs=true"
    received = b""
    try:
        with download.request_from_hub("GET", url) as response:
            if response.status_code in (401, 403, 404):
                raise DownloadError(
                    f"{endpoint} has no repository {repository}, or it is private; log in with `hf auth login`"
                )
            if response.status_code != 200:
                raise DownloadError(f"{endpoint} cannot list {repository}: HTTP {response.status_code}")
            for chunk in response.iter_bytes():
                received += chunk
                if len(received) > MAX_LISTING_BYTES:
                    raise DownloadError(f"{endpoint} returned a file list for {repository} that is too long")
    except (httpx2.HTTPError, OSError) as error:
        raise DownloadError(f"{endpoint} cannot be reached: {str(error) or type(error).__name__}") from error
    listing = json_or_none(received, is_strict=True)
    if not isinstance(listing, dict) or not isinstance(listing.get("siblings"), list):
        raise DownloadError(f"{endpoint} returned an invalid file list for {repository}")
    return listing


def _select_file(repository: str, quantization: str, listing: Mapping[str, Any]) -> KnownFile:
    commit = listing.get("sha")
    if not isinstance(commit, str) or not _COMMIT.fullmatch(commit):
        raise DownloadError(f"the Hub returned no commit hash for {repository}")
    parsed = (_parse_file(repository, commit, each) for each in listing["siblings"])
    found = {file.filename: file for file in parsed if file is not None}
    if not found:
        raise InvalidRequestError(f"{repository} has no GGUF file that can be downloaded", param="name")
    matches = _matching(found, quantization)
    if not matches:
        choices = ", ".join(sorted({each.quantization or each.filename for each in found.values()}))
        selected = quantization.upper() or PREFERRED
        raise InvalidRequestError(f"{repository} has no {quoted(selected)}; choices: {choices}", param="name")
    _require_one(repository, matches)
    file = found[matches[0]]
    is_unique = sum(each.name == file.name for each in found.values()) == 1
    return file if is_unique else replace(file, name=f"{repository}:{file.filename}")


def _parse_file(repository: str, commit: str, sibling: Any) -> KnownFile | None:
    # Returns None unless the file is a complete model whose size and hash the Hub reports.
    name, lfs = (sibling.get("rfilename"), sibling.get("lfs")) if isinstance(sibling, dict) else (None, None)
    if not isinstance(name, str) or not isinstance(lfs, dict):
        return None
    size, sha256 = lfs.get("size"), lfs.get("sha256")
    if not name.lower().endswith(".gguf") or PART.search(name) or "mmproj" in name.lower():
        return None
    if any(part in ("", ".", "..") for part in name.split("/")) or "\\" in name or not name.isprintable():
        return None
    if type(size) is not int or size <= 0 or not isinstance(sha256, str) or not _SHA256.fullmatch(sha256):
        return None
    return KnownFile(
        name=f"{repository}:{quantization_in(name) or name}",
        repository=repository,
        revision=commit,
        filename=name,
        size_bytes=size,
        sha256=sha256,
    )
