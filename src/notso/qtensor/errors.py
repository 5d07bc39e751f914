"""The error tree of the lowest floor, and its root.

    NotsoError
    └── QTensorError
        ├── GGUFError                a file is not what it claims to be
        │   └── UnsupportedFormatError   a block format or container version we do not read
        ├── KernelChoiceError        a forced kernel family is unknown or this CPU lacks it
        ├── DeviceError              a GPU was asked for, and none can be used
        │   ├── DeviceMemoryError    it has not the memory
        │   └── DeviceLostError      it failed while it computed; what it held is gone
        └── OperandError             an op was called with a wrong shape, dtype, stride or range

Every error of the project descends from `NotsoError`; each floor maps what it receives at its own border.
"""

from __future__ import annotations

MAX_MESSAGE_CHARACTERS = 600
"""Of one error: a screen's few lines. What a file or a request said in it may be a megabyte."""

MAX_QUOTED_CHARACTERS = 80
"""Of one value that a message quotes, so that the message still says what is wrong with it."""


def one_line(text: str, limit: int = MAX_MESSAGE_CHARACTERS) -> str:
    """`text` with newlines, control characters and their like escaped, cut at `limit` characters."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def quoted(value: object) -> str:
    """A name or value out of a file, fit to stand within a line."""
    if isinstance(value, str) and len(value) > MAX_QUOTED_CHARACTERS:
        value = value[: MAX_QUOTED_CHARACTERS - 3] + "..."
    return repr(value) if isinstance(value, str) else one_line(repr(value), MAX_QUOTED_CHARACTERS)


class NotsoError(Exception):
    """Root of everything this package raises on purpose. `str(error)` is one line, fit to be shown to a person,
    whatever a file or a request put into it."""

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))


class QTensorError(NotsoError):
    """Something is wrong with a quantised tensor, its file or an operation on it."""


class GGUFError(QTensorError):
    """A GGUF file breaks the format or one of our limits.

    `field` names the part of the file, `offset` is the byte position where it was read (None where there is none).
    """

    def __init__(self, message: str, *, field: str = "file", offset: int | None = None) -> None:
        where = f"{field} at byte {offset}" if offset is not None else field
        super().__init__(f"{where}: {message}")
        self.field = field
        self.offset = offset


class UnsupportedFormatError(GGUFError):
    """The file is sound but holds a container version or a block format that is not supported; it is named."""


class KernelChoiceError(QTensorError):
    """`NOTSO_KERNELS` or `NOTSO_ATTENTION` names something that does not exist or that this CPU cannot run."""


class DeviceError(QTensorError):
    """A GPU cannot be used: no driver, one that is too old, no such device, or no machine code for it."""


class DeviceMemoryError(DeviceError):
    """The GPU has not as much memory as was asked for."""


class DeviceLostError(DeviceError):
    """The GPU failed in the middle of work. Nothing it holds can be relied on; the process goes on without it."""


class OperandError(QTensorError, ValueError):
    """An operation was called with operands it cannot take. Nothing was written."""
