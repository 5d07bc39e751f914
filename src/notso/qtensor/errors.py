"""Errors of the tensor layer, and the root of all errors.

    NotsoError
    └── QTensorError
        ├── GGUFError                an invalid GGUF file
        │   └── UnsupportedFormatError   an unsupported block format or container version
        ├── SafetensorsError         an invalid safetensors file
        ├── KernelChoiceError        a forced kernel family is unknown or unsupported by this CPU
        ├── DeviceError              the requested GPU is unusable
        │   ├── DeviceMemoryError    its memory is insufficient
        │   └── DeviceLostError      it failed during computation; its contents are lost
        └── OperandError             wrong shape, dtype, stride or range

All errors of the project derive from `NotsoError`; each layer translates errors at its boundary.
"""

from __future__ import annotations

from collections.abc import Mapping

# A few lines on a screen; quoted file contents may be megabytes.
MAX_MESSAGE_CHARACTERS = 600

# Per quoted value, so that the message itself remains visible.
MAX_QUOTED_CHARACTERS = 80


def one_line(text: str, limit: int = MAX_MESSAGE_CHARACTERS) -> str:
    """Return `text` truncated to `limit` characters, with control characters escaped."""
    shown = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text[: limit + 1])
    return shown if len(shown) <= limit else shown[: limit - 3] + "..."


def quoted(value: object) -> str:
    """Shorten a file's value for a message."""
    if isinstance(value, str) and len(value) > MAX_QUOTED_CHARACTERS:
        value = value[: MAX_QUOTED_CHARACTERS - 3] + "..."
    return repr(value) if isinstance(value, str) else one_line(repr(value), MAX_QUOTED_CHARACTERS)


class Sentence(str):
    """An error's English sentence that pages translate: `code` identifies it, and `values` are the figures in it."""

    code: str
    values: Mapping[str, str | int]

    def __new__(cls, english: str, code: str, **values: str | int) -> Sentence:
        made = super().__new__(cls, english)
        made.code, made.values = code, values
        return made


class NotsoError(Exception):
    """Root of the package's errors; `str(error)` is one printable line. `path`: the file at fault, if known.

    `sentence` is the message, a Sentence if it can be translated.
    """

    is_about_a_file = False
    path: str | None = None

    def __init__(self, message: str = "") -> None:
        super().__init__(one_line(message))
        self.sentence: str = str(self)
        if isinstance(message, Sentence):
            self.sentence = Sentence(str(self), message.code, **message.values)


def name_file(error: BaseException | None, path: object) -> None:
    """Set an error's `path`, if the error is about a file and names none yet."""
    if isinstance(error, NotsoError) and error.is_about_a_file and error.path is None:
        error.path = str(path)
        error.add_note(f"in {path}")  # shown by tracebacks; messages may reach users and contain no paths


class QTensorError(NotsoError):
    """Error about a tensor, its file or an operation."""


class GGUFError(QTensorError):
    """An invalid GGUF file, or one beyond our limits; `offset`: byte position of `field`."""

    is_about_a_file = True

    def __init__(self, message: str, *, field: str = "file", offset: int | None = None) -> None:
        where = f"{field} at byte {offset}" if offset is not None else field
        super().__init__(f"{where}: {message}")
        self.field = field
        self.offset = offset


class UnsupportedFormatError(GGUFError):
    """An unsupported version or block format."""


class SafetensorsError(QTensorError):
    """An invalid safetensors file, or one beyond our limits."""

    is_about_a_file = True


class KernelChoiceError(QTensorError):
    """`NOTSO_KERNELS` or `NOTSO_ATTENTION` is unknown or unsupported by this CPU."""


class DeviceError(QTensorError):
    """Unusable GPU: driver missing or old, no such device, no machine code."""


class DeviceMemoryError(DeviceError):
    """Insufficient GPU memory."""


class DeviceLostError(DeviceError):
    """The GPU failed during computation; its contents are lost."""


class OperandError(QTensorError, ValueError):
    """Invalid operands. Nothing was written."""
