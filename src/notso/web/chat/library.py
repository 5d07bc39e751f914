"""Maintain document libraries: parse queued documents, watch a folder, and clear caches of deleted documents."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import logging
import os
import re
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePath

from notso.documents.pdf import PageDrawer
from notso.documents.reading import DocumentReader
from notso.documents.values import EXTENSIONS, MAX_FILE_BYTES, UnreadableError
from notso.text_file import read_regular
from notso.web.engine.host import EngineHost
from notso.web.store.documents import EVERYONE, MAX_DOCUMENTS_OF_OWNER, DocumentStore, StoredDocument
from notso.web.store.protocol import UNSHARED_SEARCH_SECONDS, ChatStore
from notso.web.values.child_work import child_work
from notso.web.values.durations import current_ms
from notso.web.values.errors import NotsoError, StorageFullError
from notso.web.values.visible_text import sanitize_line

logger = logging.getLogger("notso.web.library")

MAX_NAME_CHARACTERS = 200
_COMPARED_CHARACTERS = 185  # `display_name` keeps at least this many characters from the start of a name
MAX_IMAGE_BYTES = 32 << 20  # total size of cached page images
CHECK_SECONDS = 5.0  # interval between checks for documents queued by other servers and for changes in the folder
_reported: set[Path] = set()  # folders already logged as having too many documents


class LibraryWorker:
    """Parses documents one at a time, each in its own child process."""

    def __init__(self, store: ChatStore, *, unconfined: bool = False, folder: Path | None = None) -> None:
        """folder: its files form a library that all users can read."""
        self._store = store
        self._unconfined = unconfined
        self._folder = FolderLibrary(store.documents, folder)
        self._images: dict[tuple[str, int], bytes] = {}  # least recently used first

    async def run_parser(self) -> None:
        if self._store.read_only:
            return
        must_requeue, has_failed = not self._store.is_shared, False
        while True:
            self._store.documents.queued.clear()
            try:
                if must_requeue:
                    await self._store.documents.requeue()
                await self.parse_queued()
                must_requeue = has_failed = False
            except (NotsoError, RuntimeError, OSError) as error:  # RuntimeError: no thread could be started
                if not has_failed:
                    logger.warning("documents cannot be parsed at present: %s", error)
                has_failed = True
            is_soon = has_failed or self._store.is_shared
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(CHECK_SECONDS if is_soon else UNSHARED_SEARCH_SECONDS):
                    await self._store.documents.queued.wait()

    async def parse_queued(self) -> None:
        """Parse all queued documents. Raises StorageError."""
        while await self._parse_one():
            pass

    async def watch_folder(self) -> None:
        if self._store.read_only or (self._folder.root is None and self._store.is_shared):
            return  # without a folder, a sync would delete the folder library, which another server may use
        has_failed = False
        while True:
            try:
                await self._folder.sync()
                has_failed = False
            except (NotsoError, RuntimeError, OSError) as error:
                if not has_failed:
                    logger.warning("the document folder cannot be read at present: %s", error)
                has_failed = True
            if self._folder.root is None:
                return
            await asyncio.sleep(CHECK_SECONDS)

    async def page_image(self, owner: str, document: StoredDocument, page: int) -> bytes:
        """Return a page of a PDF file as PNG. Raises UnreadableError or StorageError."""
        key = document.id, page
        image = self._images.pop(key, None)
        if image is None:
            data = await self._store.documents.content(owner, document.id)
            image = await child_work(lambda: PageDrawer(data, page, self._unconfined), PageDrawer.draw)
        self._images[key] = image
        while sum(map(len, self._images.values())) > MAX_IMAGE_BYTES:
            del self._images[next(iter(self._images))]
        return image

    def forget_images(self, document_id: str) -> None:
        for key in [each for each in self._images if each[0] == document_id]:
            del self._images[key]

    async def _parse_one(self) -> bool:
        claimed = await self._store.documents.claim(current_ms())
        if claimed is None:
            return False
        document, data = claimed
        try:
            parsed = await child_work(
                lambda: DocumentReader(data, document.name, self._unconfined), DocumentReader.read
            )
        except UnreadableError as error:
            await self._store.documents.fail(document.id, error.stored(), is_passing=error.is_passing)
        else:
            await self._store.documents.finish(document.id, parsed)
        return True


async def clear_stale_caches(store: ChatStore, host: EngineHost) -> None:
    stale = await store.documents.stale()
    if stale and not host.loaded():
        host.request_load(host.default)
    if not stale or not host.loaded():
        return
    for each in stale:
        if each.conversation:
            await host.clear_cache(each.owner, each.conversation)
        else:
            await host.forget_reading(each.scope, each.reading)
    await store.documents.mark_cleared(stale)


@dataclass(frozen=True, slots=True)
class _FileState:
    state: tuple[int, int, int]
    sha256: str


class FolderLibrary:
    """Library of a folder's documents. Files are identified by content, so a renamed file is not added again."""

    def __init__(self, store: DocumentStore, root: Path | None) -> None:
        self.root = root
        self._store = store
        self._files: dict[str, _FileState] = {}
        self._refused: set[str] = set()  # digests of files for which the library has no space
        self._unreadable: set[str] = set()

    async def sync(self) -> bool:
        """Add new documents and delete missing ones; return whether any were added. Raises OSError or StorageError."""
        in_folder, unreadable = (
            await asyncio.to_thread(self._scan_folder, self.root) if self.root is not None else ({}, [])
        )
        for each in unreadable:
            if each not in self._unreadable:
                logger.warning("%s in the document folder cannot be read at present", each)
        self._unreadable = set(unreadable)
        stored = {each.sha256: each for each in await self._store.documents(EVERYONE)}
        for sha256, document in stored.items():
            # Keep documents that cannot be read at present, because computing their caches again would be slow.
            name = f"{document.name}/"[:_COMPARED_CHARACTERS]
            if sha256 not in in_folder and not any(
                name.startswith(f"{each}/"[:_COMPARED_CHARACTERS]) for each in unreadable
            ):
                await self._store.delete(EVERYONE, document.id)
                self._refused.clear()
        missing = {
            sha256: name for sha256, name in in_folder.items() if sha256 not in stored and sha256 not in self._refused
        }
        if not missing or self.root is None:
            return False
        library, has_added = await self._store.library(EVERYONE, self.root.name or "/"), False
        for sha256, name in missing.items():
            data = await asyncio.to_thread(read_regular, self.root / name, MAX_FILE_BYTES)
            try:
                await self._store.add(EVERYONE, library.id, display_name(name), data)
                has_added = True
            except StorageFullError as error:
                self._refused.add(sha256)
                logger.warning("%s was not added to the library: %s", name, error)
        return has_added

    def _scan_folder(self, root: Path) -> tuple[dict[str, str], list[str]]:
        # Returns names by digest, and the names of files and folders that cannot be read.
        root.stat()  # raises if the folder is missing: treating it as empty would delete its documents
        unreadable: list[str] = []

        def on_error(error: OSError) -> None:
            if Path(error.filename) == root:
                raise error
            if not isinstance(error, FileNotFoundError):  # otherwise, the file was deleted in the meantime
                unreadable.append(display_name(os.path.relpath(error.filename, root)))

        found: dict[str, str] = {}
        files: dict[str, _FileState] = {}
        for path in find_document_files(root, on_error):
            name = str(path.relative_to(root))
            try:
                status = path.stat()
                state = (status.st_mtime_ns, status.st_size, status.st_ino)
                file = self._files.get(name)
                if file is None or file.state != state:
                    file = _FileState(state, hashlib.sha256(read_regular(path, MAX_FILE_BYTES)).hexdigest())
            except OSError as error:
                error.filename = path
                on_error(error)
                continue
            files[name] = file
            found.setdefault(file.sha256, name)
        self._files = files
        return found, unreadable


def find_document_files(root: Path, on_error: Callable[[OSError], None] | None = None) -> Iterator[Path]:
    """Yield up to MAX_DOCUMENTS_OF_OWNER files with a document extension, sorted within each folder.

    Hidden, empty and oversized files, and symbolic links, are skipped. If reading fails, `on_error` receives the error.
    """
    count = 0
    for folder, folders, names in os.walk(root, onerror=on_error):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.startswith(".") or path.suffix[1:].lower() not in EXTENSIONS:
                continue
            try:
                status = path.lstat()
            except OSError as error:
                if on_error is not None:
                    on_error(error)
                continue
            if not stat.S_ISREG(status.st_mode) or not 0 < status.st_size <= MAX_FILE_BYTES:
                continue
            count += 1
            if count > MAX_DOCUMENTS_OF_OWNER:
                if root not in _reported:
                    logger.warning("%s has more than %d documents; the rest are ignored", root, MAX_DOCUMENTS_OF_OWNER)
                _reported.add(root)
                return
            yield path


def display_name(name: str) -> str:
    """Return a file name or relative path as one visible line. Long names are truncated before the extension."""
    extension = PurePath(name).suffix
    if len(name) <= MAX_NAME_CHARACTERS or not re.fullmatch(r"\.\w{1,10}", extension):
        extension = ""
    stem = sanitize_line(name.removesuffix(extension), MAX_NAME_CHARACTERS - len(extension))
    return f"{stem}{extension}" or "document"
