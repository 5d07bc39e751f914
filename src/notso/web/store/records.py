"""Protocol for what the APIs keep besides conversations: uploaded files, batches, and answers by idempotency key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

PART_BYTES = 256 * 1024
"""Maximum size of a piece of a file in the database and in memory."""
MAX_FILES = 1000
MAX_FILE_BYTES_OF_OWNER = 256 * 1024 * 1024
MAX_KEPT_ANSWERS = 1000
MAX_KEPT_BYTES_OF_OWNER = 64 * 1024 * 1024
KEPT_SECONDS = 24 * 3600.0
"""Lifetime of answers by idempotency key."""
LEASE_SECONDS = 60.0
"""A batch whose process has not renewed it for this long is continued by another one."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An uploaded file, or the output of a batch. Times are milliseconds since 1970, UTC; `expires_ms` 0: never."""

    id: str
    name: str
    purpose: str
    size: int  # bytes
    created_ms: int
    expires_ms: int = 0


@dataclass(frozen=True, slots=True)
class StoredBatch:
    id: str
    owner: str
    created_ms: int
    body: Mapping[str, Any]  # the object of the API
    plan: Mapping[str, Any]  # what its execution needs and the API does not show
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The response to the first request with an idempotency key, and the SHA-256 of that request."""

    digest: bytes
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    created_ms: int


MOST_LEFT, MOST_LEFT_BEGUN = 6, 2


@dataclass(frozen=True, slots=True)
class OpenResponse:
    """A response that has not ended and survives its process: its request, who sent it (as JSON), and its seed.

    `headers` is JSON, as is `progress`, its tokens so far; `conversation` is that of X-Conversation-Id. `tries` counts
    the processes that were killed with it before a further token. It is given up after MOST_LEFT of them, or after
    MOST_LEFT_BEGUN if the engine had begun.
    """

    id: str
    owner: str
    body: str  # the request
    caller: str  # its sender, as JSON
    seed: int
    created_ms: int
    tries: int = 0
    path: str = "/v1/responses"
    headers: str = "{}"
    conversation: str = ""
    progress: str = ""

    @property
    def is_given_up(self) -> bool:
        return self.tries >= (MOST_LEFT_BEGUN if self.progress else MOST_LEFT)


class ApiRecords(Protocol):
    """Records by owner; foreign ids are treated as unknown. Methods raise StorageError."""

    async def add_file(self, owner: str, file: StoredFile, content: bytes) -> None:
        """Store a file. Raises StorageFullError past MAX_FILES or MAX_FILE_BYTES_OF_OWNER."""

    async def files(self, owner: str) -> list[StoredFile]:
        """Return all files, newest first."""

    async def file(self, owner: str, file_id: str) -> StoredFile | None: ...

    def content(self, owner: str, file_id: str) -> AsyncIterator[bytes]:
        """Yield a file's parts in order; nothing for an unknown file."""

    async def delete_file(self, owner: str, file_id: str) -> bool: ...

    async def add_batch(self, batch: StoredBatch) -> None: ...

    async def batches(self, owner: str) -> list[StoredBatch]:
        """Return all batches, newest first."""

    async def batch(self, owner: str, batch_id: str) -> StoredBatch | None: ...

    async def claim_batch(self, holder: str, busy: Sequence[str], now_ms: int) -> StoredBatch | None:
        """Lease the oldest open batch that no live process holds, of an owner not in `busy`."""

    async def renew_batch(self, batch_id: str, holder: str, now_ms: int) -> StoredBatch | None:
        """Renew the lease and return the batch; None if another process has it, or it has exited."""

    async def change_batch(
        self, owner: str, batch_id: str, body: Mapping[str, Any], *, before: str, is_open: bool = True
    ) -> bool:
        """Replace the body if the status is still `before`."""

    async def add_line(self, batch_id: str, holder: str, file_id: str, number: int, content: bytes) -> bool:
        """Append a line to an output file in the making; False if the process has lost its lease."""

    async def lines(self, *file_ids: str) -> set[int]:
        """Return the numbers of the lines in these files."""

    async def finish_file(self, owner: str, file: StoredFile) -> StoredFile | None:
        """Make the lines written for a file available under its id; None if there are none."""

    async def add_open_response(self, response: OpenResponse, holder: str) -> None:
        """Store a response that has begun, leased to `holder`."""

    async def open_response(self, owner: str, response_id: str) -> OpenResponse | None: ...

    async def open_stream(self, owner: str, conversation: str) -> OpenResponse | None:
        """Return the latest response of a named conversation."""

    async def note_progress(
        self, response_id: str, holder: str, first: int, progress: str, *, is_further: bool
    ) -> None:
        """Store the tokens of a response that the process still holds, from number `first`, with which earlier ones
        were. `is_further`: they are more than it took up."""

    async def renew_open_responses(self, holder: str, now_ms: int) -> None:
        """Renew the leases of a process."""

    async def claim_open_response(self, holder: str, known: Sequence[str], now_ms: int) -> OpenResponse | None:
        """Lease the oldest response that no live process holds, or that this one holds and does not know: the result
        of a claim may be lost."""

    async def leave_open_responses(self, holder: str) -> None:
        """End the leases of a process that stops, without counting it."""

    async def end_open_response(self, owner: str, response_id: str) -> None: ...

    async def keep_answer(self, owner: str, key: str, answer: KeptAnswer) -> None:
        """Keep an answer for KEPT_SECONDS, and at most MAX_KEPT_ANSWERS and MAX_KEPT_BYTES_OF_OWNER, newest first."""

    async def kept_answer(self, owner: str, key: str, now_ms: int) -> KeptAnswer | None: ...

    async def purge(self, now_ms: int) -> None: ...
