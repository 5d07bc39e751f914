"""Protocol for libraries: documents, their text, and search in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from notso.documents.passages import Passage
from notso.documents.values import Document

DocumentState = Literal["queued", "parsing", "ready", "failed"]
Rights = Literal["own", "add", "read"]
"""`own`: everything. `add`: read and add documents."""

EVERYONE = ""
"""Owner of the libraries that everyone can read."""
DEFAULT_LIBRARY = "Documents"
"""Name of the library of an owner that is no project."""
MAX_LIBRARIES_OF_OWNER = 500
MAX_MEMBERS = 500
MAX_DOCUMENTS_OF_OWNER = 10_000
MAX_DOCUMENT_BYTES_OF_OWNER = 2 << 30
MAX_HITS = 50
PARSING_SECONDS = 600.0
"""A document whose process has not finished parsing after this long is parsed by another one."""


@dataclass(frozen=True, slots=True)
class Library:
    """Named documents of an owner. Blocks of the KV cache that contain them start from `salt`.

    In chats of a project, `instructions` follow the documents in the prompt, and `settings` take precedence over the
    user's defaults. `rights` are those of the user for whom the library was read.
    """

    id: str
    owner: str
    name: str
    salt: str
    created_ms: int
    instructions: str = ""
    settings: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    rights: Rights = "own"

    @property
    def is_project(self) -> bool:
        return self.owner != EVERYONE and self.name != DEFAULT_LIBRARY


@dataclass(frozen=True, slots=True)
class Member:
    """Another user of a library, `member` as an owner of chats, and `name` as the library's owner entered it."""

    member: str
    name: str
    rights: Literal["add", "read"]


@dataclass(frozen=True, slots=True)
class StoredDocument:
    """A document. `sha256` identifies its content within the library.

    `reason` says why it `failed`. `note` is a remark on what was read. `reading_day` is the date in prompts that begin
    with it, fixed so that what was computed of them stays valid.
    """

    id: str
    library_id: str
    name: str
    sha256: str
    size: int  # bytes
    created_ms: int
    reading_day: str
    state: DocumentState = "queued"
    reason: str = ""
    note: str = ""
    kind: str = ""
    pages: int = 0
    characters: int = 0


@dataclass(frozen=True, slots=True)
class DocumentText:
    """The text of a document and the offsets at which its pages begin."""

    text: str
    pages: tuple[int, ...]
    passages: tuple[Passage, ...]


@dataclass(frozen=True, slots=True)
class PassageHit:
    """A passage that a search found; `number` is its place among those of the document."""

    document: StoredDocument
    number: int
    page: int
    start: int
    text: str
    score: float


@dataclass(frozen=True, slots=True)
class Citation:
    """What characters `at` to `to` of an answer quote: characters `start` to `end` of a document ('': of none).

    `revision` names the text that was quoted, see `revision_of`; `page` counts from 1 (0: there is one page).
    """

    at: int
    to: int
    document: str = ""
    revision: str = ""
    start: int = 0
    end: int = 0
    page: int = 0
    name: str = ""


@dataclass(frozen=True, slots=True)
class StaleCache:
    """What engines must forget as a document was deleted: a conversation of `owner`, or a reading of `scope`."""

    number: int
    owner: str
    conversation: str
    scope: str
    reading: str


class DocumentStore(Protocol):
    """Documents of libraries that an owner may read; others are treated as unknown. Methods raise StorageError.

    An owner reads its own libraries, those of EVERYONE and those it is a member of, and changes its own. A member may
    have the right to add documents. A bool result is False if the object does not exist or is not the owner's.
    """

    async def library(self, owner: str, name: str) -> Library:
        """Return the owner's library of that name, which is created if it does not exist."""

    async def new_library(self, owner: str, name: str) -> Library | None:
        """Create a library; None if the owner has one of that name, or MAX_LIBRARIES_OF_OWNER."""

    async def libraries(self, owner: str) -> list[Library]:
        """Return all readable libraries, oldest first."""

    async def change_library(self, owner: str, library_id: str, **changes: Any) -> bool:
        """Change name, instructions or settings; False also if the name is taken."""

    async def delete_library(self, owner: str, library_id: str) -> bool:
        """Delete a library with its documents. Chats of the project stay, outside of it."""

    async def members(self, owner: str, library_id: str) -> list[Member]:
        """Return the members of an own library, by name."""

    async def set_member(self, owner: str, library_id: str, member: Member) -> bool:
        """Add a member or change its rights; False also past MAX_MEMBERS."""

    async def remove_member(self, owner: str, library_id: str, member: str) -> bool: ...

    async def move_chat(self, owner: str, chat_id: str, library_id: str) -> bool:
        """Move a chat into a project, or out of all ('')."""

    async def add(
        self, owner: str, library_id: str, name: str, content: bytes, *, document_id: str = ""
    ) -> StoredDocument:
        """Store a document to be parsed, or return the one with the same content or id.

        Raises StorageFullError past the owner's limits.
        """

    async def documents(self, owner: str, library_id: str | None = None) -> list[StoredDocument]:
        """Return the documents of a library, or of all readable ones, oldest first."""

    async def some(self, owner: str, document_ids: Sequence[str]) -> list[StoredDocument]:
        """Return the readable ones of these documents, oldest first."""

    async def content(self, owner: str, document_id: str) -> bytes:
        """Return the file; nothing for an unknown document."""

    async def text(self, owner: str, document_id: str) -> DocumentText | None:
        """Return the text of a document that is ready."""

    async def search(
        self,
        owner: str,
        query: str,
        limit: int,
        *,
        document_ids: Sequence[str] | None = None,
        library_id: str | None = None,
    ) -> list[PassageHit]:
        """Rank the passages that contain words of the query by BM25, the best first.

        Searches these documents, this library, or everything readable.
        """

    async def retry(self, owner: str, document_id: str) -> bool: ...

    async def delete(self, owner: str, document_id: str) -> bool:
        """Delete a document with everything derived from it. What the engine must forget is kept for `stale`."""

    async def claim(self, now_ms: int) -> tuple[StoredDocument, bytes] | None:
        """Take the oldest queued document for parsing."""

    async def requeue(self) -> None:
        """Queue what was being parsed when this process, the only one, was killed."""

    async def finish(self, document_id: str, document: Document) -> bool:
        """Store what was parsed; False if the document was deleted meanwhile."""

    async def fail(self, document_id: str, reason: str) -> None: ...

    async def note_reading(self, scope: str, name: str, document_ids: Sequence[str]) -> None:
        """Record which documents a pinned reading contains, so that it is forgotten with the first of them."""

    async def stale(self) -> list[StaleCache]:
        """Return what this process's engines have not forgotten yet."""

    async def forgot(self, found: Sequence[StaleCache]) -> None:
        """Record that the engines of this process have forgotten these."""
