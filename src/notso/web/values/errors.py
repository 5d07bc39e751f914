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
    """Error of the web layer."""


class SettingsError(WebError, ValueError):
    """A setting is out of range. `setting` is its name."""

    def __init__(self, message: str, *, setting: str) -> None:
        super().__init__(message)
        self.setting = setting


class UnsafeBindError(SettingsError):
    """A public address requires a key."""


class AddressInUseError(WebError):
    """The address cannot be listened on."""

    def __init__(self, message: str, *, host: str, port: int) -> None:
        super().__init__(message)
        self.host = host
        self.port = port


class QuotaError(WebError):
    """A key's remaining quota does not suffice."""

    draft: str = ""  # as in StorageError

    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class SignInError(WebError):
    """Sign-in failed. The message may be shown."""


class ToolError(WebError):
    """A tool call failed. The model receives the message as the result."""


class StorageError(WebError):
    """Conversations could not be read or written. Nothing is half-written."""

    draft: str = ""  # the user's text, so that no page loses it


class DataDirectoryBusyError(StorageError):
    """Another process has locked the data directory."""


class DataDirectoryNewerError(StorageError):
    """The database is of a newer release. It was not modified."""


class StorageDamagedError(StorageError):
    """The database failed its integrity check or lacks commits. It was not modified."""


class StorageFullError(StorageError):
    """The disk or the owner's quota is full."""
