"""Protocol for document libraries: documents, their text, and full-text search.

A "reading" is the KV cache of documents at the beginning of a prompt. It is pinned in the disk cache and used by all
chats that begin with the same documents. Its scope (a cache namespace) is derived from the salts of the documents'
libraries, so that only users with access to these libraries can use it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from notso.documents.passages import Passage
from notso.documents.values import Document

DocumentState = Literal["queued", "parsing", "ready", "failed"]
Rights = Literal["own", "add", "read"]
"""`own`: all rights. `add`: read and add documents. `read`: only read."""

EVERYONE = ""
"""Owner id of libraries that all users can read."""
DEFAULT_LIBRARY = "Documents"
"""Name of each owner's library for documents that belong to no project."""
MAX_LIBRARIES_OF_OWNER = 500
MAX_MEMBERS = 500
MAX_DOCUMENTS_OF_OWNER = 10_000
MAX_DOCUMENT_BYTES_OF_OWNER = 2 << 30
MAX_HITS = 50
PARSING_SECONDS = 600.0
"""Time after which another process may claim a document that is still being parsed."""
RETRY_SECONDS = 3600.0
"""Minimum time between attempts to read a document again, after a failure that may be temporary."""


@dataclass(frozen=True, slots=True)
class Library:
    """A named collection of documents. A library that can contain chats is called a project."""

    id: str
    owner: str
    name: str
    salt: str  # random text, hashed into the keys of KV cache blocks of the library's documents
    created_ms: int
    instructions: str = ""  # inserted into prompts of the project's chats, after the documents
    # Settings of a project's chats, which override the user's defaults.
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    rights: Rights = "own"  # the user's rights; set only by DocumentStore.libraries

    @property
    def is_project(self) -> bool:
        return self.owner != EVERYONE and self.name != DEFAULT_LIBRARY


@dataclass(frozen=True, slots=True)
class Member:
    """A user with whom a library is shared."""

    member: str  # the user's id, called `owner` elsewhere
    name: str  # as entered by the library's owner
    rights: Literal["add", "read"]


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document of a library, without its content."""

    id: str
    library_id: str
    name: str
    sha256: str  # digest of the file, unique in the library
    size: int  # bytes
    created_ms: int
    reading_day: str  # date stated in prompts that start with the document; fixed, so that their KV cache stays valid
    state: DocumentState = "queued"
    reason: str = ""  # why parsing failed
    note: str = ""  # the parser's warnings, for the user
    kind: str = ""
    pages: int = 0
    characters: int = 0
    reader: int = 0  # READER_VERSION when the text was read


@dataclass(frozen=True, slots=True)
class DocumentText:
    """Text of a document, start offsets of its pages, and its passages."""

    text: str
    pages: tuple[int, ...]
    passages: tuple[Passage, ...]


@dataclass(frozen=True, slots=True)
class PassageHit:
    """A passage found by search. `number` is its index in the document."""

    document: StoredDocument
    number: int
    page: int
    start: int
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class Citation:
    """A quotation in an answer, with its position in the quoted document."""

    at: int  # start in the answer
    to: int  # end in the answer
    document: str = ""  # empty if no readable document contains the quotation
    revision: str = ""  # hash of the document's text when it was quoted (see revision_of)
    start: int = 0  # start in the document's text
    end: int = 0  # end in the document's text
    page: int = 0  # from 1; 0 if the document has one page
    name: str = ""


@dataclass(frozen=True, slots=True)
class StaleCache:
    """A KV cache that engines must clear: that of `owner`'s `conversation`, or that of `reading` in `scope`."""

    number: int
    owner: str
    conversation: str
    scope: str
    reading: str


class DocumentStore(Protocol):
    """Store of libraries and documents; `owner` is the requesting user. Methods raise StorageError.

    Users can read their own libraries, the libraries of EVERYONE and the libraries that are shared with them; other
    libraries are treated as unknown. Users can change only their own libraries, but members with the right `add` can
    add documents and retry their parsing. Methods that return a bool return False if the object does not exist or the
    user may not change it.
    """

    queued: asyncio.Event  # set by methods that queue documents for parsing

    async def library(self, owner: str, name: str) -> Library:
        """Return the owner's library with this name; create it if it does not exist."""

    async def new_library(self, owner: str, name: str) -> Library | None:
        """Create a library; return None if the name is taken or MAX_LIBRARIES_OF_OWNER is reached."""

    async def libraries(self, owner: str) -> list[Library]:
        """Return all readable libraries, oldest first."""

    async def change_library(self, owner: str, library_id: str, **changes: Any) -> bool:
        """Change name, instructions or settings. Also return False if the name is taken.

        `settings` is a SettingsChange, which is applied to the stored settings in the same transaction.
        """

    async def delete_library(self, owner: str, library_id: str) -> bool:
        """Delete a library and its documents. Its chats are kept without a project."""

    async def members(self, owner: str, library_id: str) -> list[Member]:
        """Return the members of one of the owner's libraries, sorted by name."""

    async def set_member(self, owner: str, library_id: str, member: Member) -> bool:
        """Add or change a member. Also return False if `member` is the owner or MAX_MEMBERS is reached."""

    async def remove_member(self, owner: str, library_id: str, member: str) -> bool:
        """Remove a member from a library of `owner`, or `owner` from another user's library."""

    async def move_chat(self, owner: str, chat_id: str, library_id: str) -> bool:
        """Move a chat to a project, or out of its project if `library_id` is ''."""

    async def add(
        self, owner: str, library_id: str, name: str, content: bytes, *, document_id: str = ""
    ) -> StoredDocument:
        """Store a document for parsing, or return the existing one with the same content or id.

        A document whose parsing failed is queued again. Raises StorageFullError if the library's owner has reached a
        limit.
        """

    async def documents(self, owner: str, library_id: str | None = None) -> list[StoredDocument]:
        """Return the documents of a library, or of all readable libraries, oldest first."""

    async def some(self, owner: str, document_ids: Sequence[str]) -> list[StoredDocument]:
        """Return those of the given documents that the user can read, oldest first."""

    async def content(self, owner: str, document_id: str) -> bytes:
        """Return the original file, or b'' for an unknown document."""

    async def text(self, owner: str, document_id: str) -> DocumentText | None:
        """Return the text of a document, or None if there is none."""

    async def search(
        self,
        owner: str,
        query: str,
        limit: int,
        *,
        document_ids: Sequence[str] | None = None,
        library_id: str | None = None,
    ) -> list[PassageHit]:
        """Return passages that contain words of the query, ranked by BM25.

        Searches `document_ids` or `library_id`, or by default all readable documents, and queues those whose text is
        from an older reader, as `reread` does.
        """

    async def retry(self, owner: str, document_id: str) -> bool: ...

    async def delete(self, owner: str, document_id: str) -> bool:
        """Delete a document and all derived data; `stale` then returns the caches to clear."""

    async def claim(self, now_ms: int) -> tuple[StoredDocument, bytes] | None:
        """Claim the oldest new document, or else the oldest queued by `reread`; return it with its content."""

    async def requeue(self) -> None:
        """Requeue documents whose parsing was interrupted by a restart. Do not call this for shared stores."""

    async def reread(self, document_ids: Sequence[str]) -> None:
        """Queue the given documents whose text is from an older reader. The text is kept until `finish` replaces it."""

    async def finish(self, document_id: str, document: Document) -> bool:
        """Store the parsed document; return False if it was deleted, or stored by another process, in the meantime."""

    async def fail(self, document_id: str, reason: str, *, is_passing: bool = False) -> None:
        """Record that a document cannot be read. A text from an older reader is kept.

        `is_passing`: whether a document with an older text may be queued again after RETRY_SECONDS.
        """

    async def record_reading(self, scope: str, name: str, document_ids: Sequence[str]) -> None:
        """Record the documents of a reading, which becomes stale when one of them is deleted."""

    async def stale(self) -> list[StaleCache]:
        """Return the caches that the engines of this process must still clear."""

    async def mark_cleared(self, caches: Sequence[StaleCache]) -> None:
        """Record that the engines of this process have cleared the caches."""
