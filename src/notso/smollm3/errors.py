"""Errors of the model layer. ARCHITECTURE.md shows them as a tree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from notso.qtensor import NotsoError as NotsoError
from notso.qtensor import Sentence as Sentence
from notso.qtensor import one_line as one_line
from notso.qtensor import quoted as quoted
from notso.qtensor import set_error_path as set_error_path


class ModelError(NotsoError):
    """Base class of model and request errors."""


class ModelFileError(ModelError):
    """The model file or folder is missing or unsupported."""

    is_about_a_file = True


class AdapterFileError(ModelFileError):
    """The file is not a supported adapter for this model."""


class TemplateError(ModelError):
    """The chat template failed, or rejected the messages."""

    is_about_a_file = True


class InvalidRequestError(ModelError, ValueError):
    """A request is invalid; `param` names the field."""

    index: int | None = None  # index of the invalid request, if several were submitted together

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


def require(holds: bool, name: str, what: str) -> None:
    """Raise InvalidRequestError ("NAME must be WHAT") unless `holds`."""
    if not holds:
        raise InvalidRequestError(f"{name} must be {what}", param=name)


def iterate(values: Any, name: str, what: str) -> Iterator[Any]:
    """Return an iterator over `values`. Raises InvalidRequestError ("NAME must be WHAT")."""
    # isinstance(values, Iterable) would accept zero-dimensional arrays and reject some sequences.
    try:
        return iter(values)
    except TypeError:
        raise InvalidRequestError(f"{name} must be {what}", param=name) from None


class ContextLengthError(InvalidRequestError):
    """The prompt is too long for the context. If `at_least`, `needed_tokens` is only a lower bound."""

    # Clients that shorten conversations recognize this error by the first words of its message.
    def __init__(self, needed_tokens: int, context_tokens: int, *, at_least: bool = False) -> None:
        needed = f"at least {needed_tokens:,}" if at_least else f"{needed_tokens:,}"
        message = f"prompt is too long: it needs {needed} tokens, but the context is {context_tokens:,}"
        code = "prompt_too_long_at_least" if at_least else "prompt_too_long"
        super().__init__(Sentence(message, code, needed=needed_tokens, context=context_tokens), param="messages")
        self.needed_tokens = needed_tokens
        self.context_tokens = context_tokens
        self.at_least = at_least


class UnknownOptionError(InvalidRequestError, TypeError):
    """An option is unknown; `param` is its name."""


class OutOfMemoryError(ModelError):
    """More memory is needed than is available. Sizes are in bytes."""

    def __init__(self, message: str, *, needed_bytes: int, available_bytes: int) -> None:
        super().__init__(message)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class EngineError(ModelError):
    """The engine cannot answer, or an answer failed, for example because of a non-finite logit."""


class EngineLostError(EngineError):
    """The engine was lost during this answer. Another engine can continue the answer from its tokens."""


class DownloadError(ModelError):
    """A download failed, was truncated, or does not match its published size or SHA-256."""


class NoSpaceError(DownloadError):
    """The disk lacks space for a download."""
