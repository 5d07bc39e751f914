"""Errors of the tensor layer, and `NotsoError`, from which most errors of the project derive.

ARCHITECTURE.md shows the errors as a tree.
"""

from __future__ import annotations

from collections.abc import Mapping

# Maximum length of a message (a few lines on a screen). Without a limit, values quoted from a file could make it
# megabytes long.
MAX_MESSAGE_CHARACTERS = 600

# Maximum length of one quoted value, so that the rest of the message is not cut off.
MAX_QUOTED_CHARACTERS = 80


def one_line(text: str, limit: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Return `text` truncated to `limit` characters, with nonprintable characters escaped."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def quoted(value: object) -> str:
    """Quote and shorten a value read from a file, for an error message."""
    if isinstance(value, str) and len(value) > MAX_QUOTED_CHARACTERS:
        value = value[: MAX_QUOTED_CHARACTERS - 3] + "..."
    return repr(value) if isinstance(value, str) else one_line(repr(value), MAX_QUOTED_CHARACTERS)


class Sentence(str):
    """An error message that web pages can translate: `code` identifies it, and `values` are inserted into it."""

    code: str
    values: Mapping[str, str | int]

    def __new__(cls, english: str, code: str, /, **values: str | int) -> Sentence:
        sentence = super().__new__(cls, english)
        sentence.code, sentence.values = code, values
        return sentence


class NotsoError(Exception):
    """Base class of most errors; `str(error)` is one printable line.

    path: the invalid file, if known. sentence: the message; a Sentence if it can be translated.
    """

    is_about_a_file = False
    path: str | None = None

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))
        self.sentence: str = str(self)
        if isinstance(message, Sentence):
            self.sentence = Sentence(str(self), message.code, **message.values)


def set_error_path(error: BaseException | None, path: object) -> None:
    """Set the path of an error about a file, unless the error has one."""
    if isinstance(error, NotsoError) and error.is_about_a_file and error.path is None:
        error.path = str(path)
        # Users of a server may see the message, so the path is added as a note, which appears only in tracebacks.
        error.add_note(f"in {path}")


class QTensorError(NotsoError):
    """Error about a tensor, its file or an operation."""


class GGUFError(QTensorError):
    """Invalid, unreadable or unsupported GGUF file. `field` and `offset` (in bytes) locate the problem."""

    is_about_a_file = True

    def __init__(self, message: str, *, field: str = "file", offset: int | None = None) -> None:
        where = f"{field} at byte {offset}" if offset is not None else field
        super().__init__(f"{where}: {message}")
        self.field = field
        self.offset = offset


class UnsupportedFormatError(GGUFError):
    """Unsupported version or block format."""


class SafetensorsError(QTensorError):
    """Invalid safetensors file, or a file beyond the reader's limits."""

    is_about_a_file = True


class KernelChoiceError(QTensorError):
    """Unknown or unsupported kernels, attention variant or number of threads."""


class DeviceError(QTensorError):
    """Unusable GPU: missing or old driver, unknown device, unsupported architecture, or incorrect results."""


class DeviceMemoryError(DeviceError):
    """Insufficient GPU memory."""


class DeviceLostError(DeviceError):
    """The GPU failed during computation; its memory is lost."""


class OperandError(QTensorError, ValueError):
    """Invalid operands. The failed operation wrote no output."""
