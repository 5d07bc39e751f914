"""Protocol for the store of API data: files, batches, unfinished responses, and responses by idempotency key."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

PART_BYTES = 256 * 1024
"""Size of the parts in which files are stored."""
MAX_FILES = 1000
MAX_FILE_BYTES_OF_OWNER = 256 * 1024 * 1024
MAX_KEPT_ANSWERS = 1000
MAX_KEPT_BYTES_OF_OWNER = 64 * 1024 * 1024
KEPT_SECONDS = 24 * 3600.0
"""Lifetime of responses stored by idempotency key."""
LEASE_SECONDS = 60.0
"""Duration of a lease on a batch or response. After it expires, another process may continue the batch or response."""


@dataclass(frozen=True, slots=True)
class StoredFile:
    """An uploaded file, or the output of a batch. Times are milliseconds since 1970, UTC."""

    id: str
    name: str
    purpose: str
    size: int  # bytes
    created_ms: int
    expires_ms: int = 0  # 0: never


@dataclass(frozen=True, slots=True)
class StoredBatch:
    id: str
    owner: str
    created_ms: int
    body: Mapping[str, Any]  # the batch object of the API
    plan: Mapping[str, Any]  # internal data needed to run the batch
    is_open: bool = True


@dataclass(frozen=True, slots=True)
class IdempotentResponse:
    """The response to the first request with an idempotency key, and the SHA-256 of that request."""

    digest: bytes
    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    created_ms: int


MAX_TRIES, MAX_TRIES_BEGUN = 6, 2


@dataclass(frozen=True, slots=True)
class UnfinishedResponse:
    """An unfinished response, stored so that another process can continue it."""

    # It is abandoned after MAX_TRIES takeovers without a new token, or MAX_TRIES_BEGUN if it already has tokens.
    id: str
    owner: str
    body: str
    caller: str  # the authenticated caller, as JSON
    seed: int
    created_ms: int
    tries: int = 0  # number of takeovers by other processes since the last new token
    path: str = "/v1/responses"
    headers: str = "{}"  # JSON
    conversation: str = ""  # value of X-Conversation-Id
    progress: str = ""  # tokens so far, as JSON

    @property
    def has_used_all_tries(self) -> bool:
        return self.tries >= (MAX_TRIES_BEGUN if self.progress else MAX_TRIES)


class ApiRecords(Protocol):
    """Store of API data by owner. Objects of other owners are treated as unknown. Methods raise StorageError."""

    async def add_file(self, owner: str, file: StoredFile, content: bytes) -> None:
        """Store a file. Raises StorageFullError if MAX_FILES or MAX_FILE_BYTES_OF_OWNER would be exceeded."""

    async def files(self, owner: str) -> list[StoredFile]:
        """Return all files, newest first."""

    async def file(self, owner: str, file_id: str) -> StoredFile | None: ...

    def content(self, owner: str, file_id: str) -> AsyncIterator[bytes]:
        """Yield the parts of a file in order; none for an unknown file."""

    async def delete_file(self, owner: str, file_id: str) -> bool: ...

    async def add_batch(self, batch: StoredBatch) -> None: ...

    async def batches(self, owner: str) -> list[StoredBatch]:
        """Return all batches, newest first."""

    async def batch(self, owner: str, batch_id: str) -> StoredBatch | None: ...

    async def claim_batch(self, holder: str, busy: Sequence[str], now_ms: int) -> StoredBatch | None:
        """Lease the oldest open batch without a valid lease, skipping batches of the owners in `busy`."""

    async def renew_batch(self, batch_id: str, holder: str, now_ms: int) -> StoredBatch | None:
        """Renew the lease and return the batch, or None if another process holds the lease or the batch has ended."""

    async def change_batch(
        self, owner: str, batch_id: str, body: Mapping[str, Any], *, before: str, is_open: bool = True
    ) -> bool:
        """Replace the body if its `status` still equals `before`; return whether it was replaced."""

    async def add_line(self, batch_id: str, holder: str, file_id: str, number: int, content: bytes) -> bool:
        """Append a line to an unfinished output file; return False if the process has lost its lease."""

    async def lines(self, *file_ids: str) -> set[int]:
        """Return the numbers of the lines written to these files."""

    async def finish_file(self, owner: str, file: StoredFile) -> StoredFile | None:
        """Make an output file available for download; return None if it has no lines."""

    async def add_unfinished_response(self, response: UnfinishedResponse, holder: str) -> None:
        """Store an unfinished response, leased to `holder`."""

    async def unfinished_response(self, owner: str, response_id: str) -> UnfinishedResponse | None: ...

    async def unfinished_stream(self, owner: str, conversation: str) -> UnfinishedResponse | None:
        """Return the latest unfinished response of a named conversation."""

    async def save_progress(
        self, response_id: str, holder: str, first: int, progress: str, *, is_further: bool
    ) -> None:
        """Replace the stored tokens of a response from token `first` on, if the process still holds the lease.

        `is_further`: whether tokens have been generated since this process took over the response.
        """

    async def renew_unfinished_responses(self, holder: str, now_ms: int) -> None:
        """Renew all leases of a process."""

    async def claim_unfinished_response(
        self, holder: str, known: Sequence[str], now_ms: int
    ) -> UnfinishedResponse | None:
        """Lease the oldest response without a valid lease.

        Also returns a response that this process has leased but that is not in `known`, because an earlier result may
        have been lost.
        """

    async def release_unfinished_responses(self, holder: str) -> None:
        """Release the leases of a process that is stopping, and reset the number of tries."""

    async def delete_unfinished_response(self, owner: str, response_id: str) -> None: ...

    async def save_idempotent_response(self, owner: str, key: str, answer: IdempotentResponse) -> None:
        """Store a response for KEPT_SECONDS. The owner's oldest responses beyond the limits are deleted."""

    async def idempotent_response(self, owner: str, key: str, now_ms: int) -> IdempotentResponse | None: ...

    async def purge(self, now_ms: int) -> None: ...
