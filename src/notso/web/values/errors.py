"""The error tree of the web floor. Each message is one line, fit to be shown to a person.

NotsoError
└── WebError
    ├── SettingsError            a setting is out of range or contradicts another
    │   └── UnsafeBindError      an address others can reach was asked for without a key
    ├── AddressInUseError        another program listens on that address
    ├── QuotaError               what a key may use of the model is used up, or held by running requests
    ├── SignInError              sign-in failed
    ├── ToolError                a tool cannot do what it was called for; the model reads why
    └── StorageError             the conversations cannot be read or written
        ├── DataDirectoryBusyError   another notso uses that data directory
        ├── DataDirectoryNewerError  the data was written by a newer release
        ├── StorageDamagedError      the database failed its check; it was left untouched
        └── StorageFullError         the disk is full
"""

from __future__ import annotations

from notso.smollm3 import NotsoError as NotsoError


class WebError(NotsoError):
    """Something about serving pages, not about the model."""


class SettingsError(WebError, ValueError):
    """A setting is out of range. `setting` is its name."""

    def __init__(self, message: str, *, setting: str) -> None:
        super().__init__(message)
        self.setting = setting


class UnsafeBindError(SettingsError):
    """Binding to an address that other machines reach needs a key, and none was given."""


class AddressInUseError(WebError):
    """The address cannot be listened on. `host` and `port` are what was asked for."""

    def __init__(self, message: str, *, host: str, port: int) -> None:
        super().__init__(message)
        self.host = host
        self.port = port


class QuotaError(WebError):
    """A key has not enough left of its quota for a request. `draft` as of a StorageError."""

    draft: str = ""

    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class SignInError(WebError):
    """Sign-in failed. The message is one sentence that can be shown."""


class ToolError(WebError):
    """A tool cannot do what it was called for. The model reads the sentence as the call's result."""


class StorageError(WebError):
    """A read or write of the conversations failed; nothing half-written stays behind. `draft` is what the person had
    written, so that no page loses it."""

    draft: str = ""


class DataDirectoryBusyError(StorageError):
    """Another process holds the data directory's lock."""


class DataDirectoryNewerError(StorageError):
    """The database has a schema this release does not know. It was not touched."""


class StorageDamagedError(StorageError):
    """The database failed its integrity check, or commits are missing from it. It was not touched."""


class StorageFullError(StorageError):
    """There is no room to write, or none for this owner."""
