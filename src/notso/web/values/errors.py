"""Define the errors of the web layer. Each message is one line that can be shown to users."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass

from notso.extras import install_line
from notso.smollm3 import EngineError
from notso.smollm3 import NotsoError as NotsoError
from notso.smollm3 import Sentence as Sentence


class WebError(NotsoError):
    """Base class of the web layer's errors."""


class SettingsError(WebError, ValueError):
    """A setting is invalid. `setting` is its name."""

    def __init__(self, message: str, *, setting: str) -> None:
        super().__init__(message)
        self.setting = setting


@contextmanager
def require_extra(extra: str, setting: str) -> Iterator[None]:
    """Convert an ImportError in the `with` block to SettingsError."""
    try:
        yield
    except ImportError as error:
        raise SettingsError(f"the extra {extra} is not installed: {install_line(extra)}", setting=setting) from error


class UnsafeBindError(SettingsError):
    """Listening beyond loopback requires authentication."""


class AddressInUseError(WebError):
    def __init__(self, message: str, *, host: str, port: int) -> None:
        super().__init__(message)
        self.host = host
        self.port = port


class QuotaError(WebError):
    """A key's quota is used up, or reserved by running requests."""

    draft: str = ""  # the user's text, to be shown again

    def __init__(self, message: str, *, retry_after_seconds: int) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class EngineUnavailableError(EngineError):
    """A front end's engine cannot be reached or is stopping. Later requests may succeed."""


class SignInError(WebError):
    """Sign-in failed."""


class ToolError(WebError):
    """A tool call failed. The model receives the message as the result."""


class StorageError(WebError):
    """Stored data could not be read or written."""

    draft: str = ""  # the user's text, to be shown again


class DataDirectoryBusyError(StorageError):
    """Another process has locked the data directory."""


class DataDirectoryNewerError(StorageError):
    """The database was written by a newer release. It was not modified."""


class StorageDamagedError(StorageError):
    """The database is damaged or lacks committed transactions. It was not modified."""


class StorageFullError(StorageError):
    """The disk or the owner's quota is full."""


def is_thread_shortage(error: BaseException) -> bool:
    """Return whether the system refused to start a thread."""
    return type(error) is RuntimeError and str(error).startswith("can't start new thread")


@dataclass(eq=False, repr=False)
class Problem(Exception):
    """Error that ends a request and is shown to the user."""

    status: int
    sentence: str
    _: KW_ONLY
    draft: str = ""  # the user's text, to be shown again
    retry_after_seconds: int | None = None
    full: bool = False  # the context is full; the page offers remedies
    moved: bool = False  # the chat was changed elsewhere; the page offers to show the change

    def __post_init__(self) -> None:
        super().__init__(self.sentence)
