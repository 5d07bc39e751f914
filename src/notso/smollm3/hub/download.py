"""Download, resume and verify files before they become visible in the Hugging Face cache.

huggingface_hub builds the URL and provides the HTTP session. The transfer is implemented here because huggingface_hub
2.4 discards a partial file when the process ends, and makes a file visible before checking its hash.

Each redirect is validated before it is followed. By default, the HTTP library follows redirects to any address,
including from https to http and into the local network.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from notso.smollm3.errors import DownloadError, NoSpaceError, Sentence, quoted
from notso.smollm3.hub import registry
from notso.smollm3.hub.registry import KnownFile, Progress
from notso.system.files import lock_or_close, sync, unlock_and_close
from notso.system.processes import is_public_address

if TYPE_CHECKING:
    import httpx2

# Must be set before huggingface_hub is imported; otherwise, the library sends telemetry.
os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

MAX_REDIRECTS = 5  # usually, there is only one: from the Hub to its content network
TIMEOUT_S = 20.0


@contextlib.contextmanager
def request_from_hub(
    method: str, url: str, headers: Mapping[str, str] | None = None, *, leave_origin: bool = True
) -> Iterator[httpx2.Response]:
    """Call `stream_following_redirects` with the user's token."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    sent = {**build_hf_headers(), **(headers or {})}
    with stream_following_redirects(
        get_session(), method, url, headers=sent, timeout=TIMEOUT_S, leave_origin=leave_origin
    ) as response:
        yield response


@contextlib.contextmanager
def stream_following_redirects(
    session: httpx2.Client,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str],
    timeout: float,
    leave_origin: bool = True,
) -> Iterator[httpx2.Response]:
    """Yield the final response for `url`, with its body unread, after following validated redirects.

    leave_origin=False yields a cross-origin redirect instead of following it. Raises DownloadError for a forbidden URL
    or too many redirects, and httpx2.HTTPError.
    """
    # Redirects must lead to https. If the first URL is http, they may also lead to http on this machine. Redirects into
    # the local network are followed only if the first URL is in that network. The Authorization header is sent only to
    # the first origin.
    first = require_safe(url)
    starts_local = _is_local(first)
    sent = dict(headers)
    for _ in range(MAX_REDIRECTS + 1):
        with session.stream(method, url, headers=sent, timeout=timeout, follow_redirects=False) as response:
            following = response.next_request
            if following is None:
                yield response
                return
            url = str(following.url)
            if _origin(_split(url)) != _origin(first):
                if not leave_origin:
                    yield response
                    return
                sent = {name: value for name, value in sent.items() if name.lower() != "authorization"}
            _require_safe_hop(url, first, starts_local)
    raise DownloadError(f"{first.hostname} redirects more than {MAX_REDIRECTS} times")


def require_safe(url: str) -> SplitResult:
    """Parse a URL. Raises DownloadError unless it is https, or http on this machine."""
    parts = _split(url)
    if parts.scheme != "https" and not (parts.scheme == "http" and _is_loopback(parts)):
        raise DownloadError(f"models are downloaded over https only, not from {parts.scheme}://{parts.hostname}")
    return parts


def _require_safe_hop(url: str, first: SplitResult, starts_local: bool) -> None:
    parts = _split(url)
    if parts.scheme != "https" and not (parts.scheme == first.scheme == "http" and _is_loopback(parts)):
        raise DownloadError(
            f"models are downloaded over https only; {first.hostname} redirects to {parts.scheme}://{parts.hostname}"
        )
    if not starts_local and _is_local(parts):
        raise DownloadError(f"{first.hostname} redirects to {parts.hostname}, which is on the local network")


def _split(url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
        _ = parts.port  # raises ValueError for an invalid port
    except ValueError:
        raise DownloadError(f"{quoted(url)} is not a URL") from None
    if not parts.hostname:
        raise DownloadError(f"{quoted(url)} has no host")
    return parts


def _origin(parts: SplitResult) -> tuple[str, str | None, int | None]:
    return parts.scheme, parts.hostname, parts.port or {"http": 80, "https": 443}.get(parts.scheme)


def _is_loopback(parts: SplitResult) -> bool:
    return parts.hostname in ("127.0.0.1", "localhost", "::1")


def _is_local(parts: SplitResult) -> bool:
    # A name that this machine cannot resolve is accepted, because an HTTP proxy may resolve it. If a name resolves to a
    # local address after this check, the TLS handshake fails, because a local host has no certificate for that name.
    try:
        found = socket.getaddrinfo(parts.hostname, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return False
    return not all(is_public_address(str(entry[4][0])) for entry in found)


RETRIES = 5  # maximum number of consecutive failures without progress
SPARE_BYTES = 64 << 20  # disk space to keep free
_CHUNK_BYTES = 1 << 20
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})
_UNCOMPRESSED = {"Accept-Encoding": "identity"}
_TRUE = frozenset({"1", "ON", "YES", "TRUE"})


@dataclass(frozen=True, slots=True)
class DownloadedFile:
    """A verified file, with the number of bytes transferred."""

    path: Path
    sha256: str
    size_bytes: int
    downloaded_bytes: int
    resumed_at_bytes: int


@dataclass(frozen=True, slots=True)
class DownloadPlan:
    """Disk space for a download. `have_bytes`: size of the partial file."""

    folder: Path
    have_bytes: int
    needed_bytes: int
    free_bytes: int

    @property
    def fits(self) -> bool:
        return self.needed_bytes <= self.free_bytes


def plan_download(
    file: KnownFile, free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
) -> DownloadPlan:
    """Return the disk space needed, without using the network."""
    part = part_path(file)
    existing = next(each for each in part.parents if os.path.exists(each))  # noqa: PTH110 - raises no error
    have = part.stat().st_size if os.path.exists(part) else 0  # noqa: PTH110
    return DownloadPlan(registry.hub_cache(), have, max(0, file.size_bytes - have) + SPARE_BYTES, free_bytes(existing))


def part_path(file: KnownFile) -> Path:
    """Return the partial file's path."""
    return registry.blob_path(file).with_name(f"{file.sha256}.incomplete")


def hub_endpoint() -> str:
    """Return the address of the Hugging Face Hub or of the mirror in HF_ENDPOINT."""
    return (os.environ.get("HF_ENDPOINT") or "https://huggingface.co").rstrip("/")


def is_offline() -> bool:
    """Return whether Hugging Face's environment variables disable the network."""
    return any(os.environ.get(name, "").upper() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))


def pull(
    file: KnownFile,
    *,
    offline: bool = False,
    force: bool = False,
    progress: Progress | None = None,
    free_bytes: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free,
    sleep: Callable[[float], None] = time.sleep,
) -> DownloadedFile:
    """Download `file` unless it is cached, and verify it. `force` ignores the cache and discards partial files.

    Raises DownloadError; a partial file is kept for resuming unless its hash is wrong.
    """
    report = progress or (lambda _what, _done, _total: None)
    if not force and (present := registry.find_local(file)) is not None:
        return _verify_cached(file, present, report)
    if offline or is_offline():
        raise DownloadError(
            Sentence(
                f"{file.filename} is not on this machine, and the network is disabled",
                "download_offline",
                file=file.filename,
            )
        )
    partial_path = part_path(file)
    try:
        partial_path.parent.mkdir(parents=True, exist_ok=True)
        with _download_lock(file):
            if force:
                partial_path.unlink(missing_ok=True)
            _require_space(file, free_bytes)
            url = _resolve_url(file)
            with _Part(partial_path, file, report) as part:
                resumed_at = part.size
                _fetch(url, part, report, sleep)
                downloaded = part.received
                if part.sha256 != file.sha256:
                    partial_path.unlink()
                    raise DownloadError(
                        Sentence(
                            f"{file.filename} does not match its published SHA-256: "
                            f"expected {file.sha256}, got {part.sha256}; the download has been deleted",
                            "download_damaged",
                            file=file.filename,
                        )
                    )
            path = _install_file(file, partial_path)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise NoSpaceError(
                Sentence(
                    f"the disk is full; {file.filename} can be resumed when there is enough space",
                    "download_disk_full",
                    file=file.filename,
                )
            ) from error
        raise DownloadError(f"{file.filename} cannot be stored: {error.strerror or error}") from error
    registry.store_hash(path, file.sha256)
    return DownloadedFile(path, file.sha256, file.size_bytes, downloaded, resumed_at)


class _Interrupted(Exception):
    pass


class _Part:
    def __init__(self, path: Path, file: KnownFile, report: Progress) -> None:
        self._handle: IO[bytes] = path.open("a+b")
        self.name, self.total = file.filename, file.size_bytes
        self._digest = hashlib.sha256()
        self.size = 0
        self.received = 0
        self._handle.seek(0)
        while chunk := self._handle.read(_CHUNK_BYTES):
            self._digest.update(chunk)
            self.size += len(chunk)
            report("checking", self.size, self.total)
        if self.size > self.total:
            self.restart()

    def __enter__(self) -> _Part:
        return self

    def __exit__(self, *_: object) -> None:
        self._handle.close()

    @property
    def complete(self) -> bool:
        return self.size == self.total

    @property
    def sha256(self) -> str:
        self._handle.flush()
        sync(self._handle.fileno())
        return self._digest.hexdigest()

    def restart(self) -> None:
        self._handle.truncate(0)
        self._digest = hashlib.sha256()
        self.size = 0

    def append(self, chunk: bytes) -> None:
        if self.size + len(chunk) > self.total:
            self.restart()
            raise DownloadError(f"{self.name} is longer than the published {self.total:,} bytes")
        self._handle.write(chunk)
        self._digest.update(chunk)
        self.size += len(chunk)
        self.received += len(chunk)


def _verify_cached(file: KnownFile, path: Path, report: Progress) -> DownloadedFile:
    try:
        sha256 = registry.stored_hash(path)
        is_stored = sha256 == file.sha256
        sha256 = file.sha256 if is_stored else registry.sha256_of(path, report)
    except OSError as error:
        raise DownloadError(f"{path} cannot be read: {error.strerror or error}") from error
    if not is_stored:
        if sha256 != file.sha256:
            raise DownloadError(
                f"{path} does not match its published SHA-256: expected {file.sha256}, got {sha256}; "
                "download it again with --force"
            )
        registry.store_hash(path, sha256)
    return DownloadedFile(path, sha256, file.size_bytes, 0, 0)


@contextlib.contextmanager
def _download_lock(file: KnownFile) -> Iterator[None]:
    # huggingface_hub locks the same path, so it does not download the file at the same time.
    folder = registry.hub_cache() / ".locks" / registry.repository_folder(file).name
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder / f"{file.sha256}.lock", os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o666)
    if not lock_or_close(descriptor):
        raise DownloadError(
            Sentence(f"another process is already downloading {file.filename}", "download_busy", file=file.filename)
        )
    try:
        yield
    finally:
        unlock_and_close(descriptor)


def _require_space(file: KnownFile, free_bytes: Callable[[Path], int]) -> None:
    plan = plan_download(file, free_bytes)
    if not plan.fits:
        raise NoSpaceError(
            Sentence(
                f"{file.filename} needs {plan.needed_bytes / 1e9:.2f} GB more on the disk of {plan.folder}, but only "
                f"{plan.free_bytes / 1e9:.2f} GB are free",
                "download_space",
                file=file.filename,
                needed=plan.needed_bytes // 1_000_000,
                free=plan.free_bytes // 1_000_000,
            )
        )


def _resolve_url(file: KnownFile) -> str:
    import httpx2
    from huggingface_hub import hf_hub_url

    endpoint = hub_endpoint()
    require_safe(endpoint)
    url = hf_hub_url(file.repository, file.filename, revision=file.revision, endpoint=endpoint)
    try:
        # The headers of the Hub's redirect already contain the file's size and ETag, so the redirect is not followed.
        with request_from_hub("HEAD", url, _UNCOMPRESSED, leave_origin=False) as response:
            if response.status_code >= 400:
                raise DownloadError(f"{endpoint} refused {file.filename}: {_status(response)}")
            size, etag = _parse_size_and_etag(response)
    except (httpx2.HTTPError, OSError) as error:
        raise DownloadError(
            Sentence(f"{endpoint} cannot be reached: {_error_line(error)}", "download_unreachable", host=endpoint)
        ) from error
    if size is not None and size != file.size_bytes:
        raise DownloadError(
            f"{endpoint} has a different {file.filename}: expected {file.size_bytes:,} bytes, got {size:,}"
        )
    # On the Hub, the ETag of a large file is its SHA-256; mirrors may send other ETags, which are ignored.
    if len(etag) == 64 and etag != file.sha256:
        raise DownloadError(
            f"{endpoint} has a different {file.filename}: expected SHA-256 {file.sha256}, got {quoted(etag)}"
        )
    return url


def _parse_size_and_etag(response: httpx2.Response) -> tuple[int | None, str]:
    # In the Hub's redirects, the X-Linked headers contain the file's size and ETag.
    headers = response.headers
    size = str(headers.get("X-Linked-Size") or (not response.is_redirect and headers.get("Content-Length")) or "")
    etag = str(headers.get("X-Linked-ETag") or headers.get("ETag") or "")
    return int(size) if size.isdecimal() and len(size) < 20 else None, etag.removeprefix("W/").strip('"')


def _fetch(url: str, part: _Part, report: Progress, sleep: Callable[[float], None]) -> None:
    import httpx2

    failures = restarts = 0
    while not part.complete:
        before = part.size
        try:
            _transfer(url, part, report)
            reason = "the server sent fewer bytes than announced"
        except (_Interrupted, httpx2.HTTPError) as error:
            reason = _error_line(error)
        if part.complete:
            return
        # A server that ignores ranges sends the same bytes again, so only growth of the partial file counts as
        # progress. Restarts are limited separately, because growth and restarts could alternate forever.
        failures = 1 if part.size > before else failures + 1
        restarts += part.size < before
        if max(failures, restarts) > RETRIES:
            raise DownloadError(
                Sentence(
                    f"the download stopped at {part.size:,} of {part.total:,} bytes ({reason});"
                    " the same command resumes it",
                    "download_stopped",
                    done=part.size,
                    total=part.total,
                )
            )
        sleep(min(2.0 ** (failures - 1), 16.0))


def _transfer(url: str, part: _Part, report: Progress) -> None:
    # Raises _Interrupted or httpx2.HTTPError for transient failures.
    headers = {**_UNCOMPRESSED, **({"Range": f"bytes={part.size}-"} if part.size else {})}
    # Every request starts at the Hub, because the Hub redirects to signed URLs, which expire.
    with request_from_hub("GET", url, headers) as response:
        if response.status_code in _TRANSIENT_STATUS:
            raise _Interrupted(_status(response))
        if response.status_code == 416:
            part.restart()
            raise _Interrupted(_status(response))
        if response.status_code not in (200, 206):
            raise DownloadError(f"the server refused {part.name}: {_status(response)}")
        if part.size and response.status_code == 200:
            part.restart()  # the server ignores ranges and sends the whole file
        elif part.size and not response.headers.get("Content-Range", "").startswith(f"bytes {part.size}-"):
            raise DownloadError(f"the server sent a different range of {part.name} than requested")
        for chunk in response.iter_raw():  # unbuffered, because a disconnect would lose buffered bytes
            part.append(chunk)
            report("downloading", part.size, part.total)


def _install_file(file: KnownFile, partial_path: Path) -> Path:
    blob, snapshot = registry.blob_path(file), registry.snapshot_path(file)
    partial_path.replace(blob)
    snapshot.parent.mkdir(parents=True, exist_ok=True)
    snapshot.unlink(missing_ok=True)
    try:
        snapshot.symlink_to(os.path.relpath(blob, snapshot.parent))
    except OSError:
        blob.replace(snapshot)  # the file system does not support symbolic links
    return snapshot


def _status(response: httpx2.Response) -> str:
    return f"HTTP {response.status_code} {response.reason_phrase}".strip()


def _error_line(error: Exception) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
