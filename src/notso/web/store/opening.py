"""Which database keeps the conversations: a directory's own, or one that was named."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from notso.web.store.sqlite.store import SQLiteStore
from notso.web.values.errors import SettingsError

if TYPE_CHECKING:
    from notso.web.store.postgres.store import PostgresStore


def store_at(directory: Path, database_url: str | None) -> SQLiteStore | PostgresStore:
    """A store that is not open yet. Raises SettingsError: what PostgreSQL needs is not installed; and StorageError: its
    address cannot be read."""
    if database_url is None:
        return SQLiteStore(directory)
    try:
        from notso.web.store.postgres.store import PostgresStore
    except ImportError as error:
        message = "PostgreSQL needs the extra of that name: pip install 'notso-smollm3-bot[postgres]'"
        raise SettingsError(message, setting="database_url") from error
    return PostgresStore(database_url)
