"""The result of reading a document, the error if it cannot be read, and limits."""

from __future__ import annotations

import json
import lzma
import re
import zipfile
import zlib
from dataclasses import dataclass

from notso.system.confinement import Limits

MIB = 1 << 20
READER_VERSION = 3
"""Incremented when the readers are improved, so that stored documents are read again at their next use."""
MAX_FILE_BYTES = 64 * MIB
MAX_PAGES = 10_000
MAX_CHARACTERS = 20_000_000
MAX_TITLE_CHARACTERS = 200
MAX_WARNINGS = 20
CPU_S_A_PAGE = 0.2
LIMITS = Limits(
    cpu_s=60,
    more_cpu_s=int(CPU_S_A_PAGE * MAX_PAGES),
    memory_bytes=1024 * MIB,
    wall_s=180,
    answer_bytes=5 * MAX_CHARACTERS,
)
"""Limits of the child process that reads a document."""

CODE = {
    *("py", "js", "mjs", "ts", "tsx", "jsx", "c", "h", "cc", "cpp", "hpp", "rs", "go", "java", "kt", "swift", "rb"),
    *("php", "pl", "r", "cs", "m", "sh", "bash", "ps1", "sql", "css", "scss", "lua", "scala", "toml", "yaml", "yml"),
    *("ini", "cfg"),
}
EXTENSIONS = CODE | {
    *("pdf", "docx", "docm", "pptx", "pptm", "odt", "odp", "epub", "xlsx", "xlsm", "xlsb", "xls", "ods", "html"),
    *("htm", "xhtml", "mht", "mhtml", "csv", "tsv", "md", "markdown", "txt", "log", "json", "jsonl", "xml", "eml"),
    *("mbox", "tex", "rst", "fodt", "fods", "fodp", "fb2"),
}
"""Extensions of the files that are read when a folder is added. Other text files must be added individually."""

UNCONFINED = "unconfined"
"""Command-line argument with which the child runs even if the system lacks Landlock or seccomp."""

ZIP_ERRORS = (
    *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, OSError, EOFError, RuntimeError, NotImplementedError),
    *(ValueError, OverflowError),
    getattr(getattr(zipfile, "zstd", None), "ZstdError", zlib.error),  # since Python 3.14
)
"""Exceptions of zipfile and decompressors for archives or members that are damaged, encrypted or unsupported."""

MAX_FRAME_BYTES = MIB
"""Maximum size of a frame that the child writes."""

_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f\ud800-\udfff\ufdd0-\ufdef\ufffe\uffff]")
# Characters that change the direction of text, and invisible tag characters. They can make the displayed text differ
# from the text that the model reads.
_DECEPTIVE = re.compile("[\u202a-\u202e\u2066-\u2069\U000e0000-\U000e007f]")

_PASSING = {"document_unread", "document_memory", "document_extra", "document_unconfined"}


class UnreadableError(Exception):
    """The document cannot be read. The message follows the document's name, as in `report.pdf is encrypted`.

    `code` selects the message's translation ('': there is none). `values`: the numbers in the message.
    """

    def __init__(self, message: str, code: str = "", /, **values: int) -> None:
        super().__init__(message)
        self.code = code
        self.values = values

    @property
    def is_passing(self) -> bool:
        """Whether reading may succeed later: for example, the parser failed, or memory or a library was missing."""
        return self.code in _PASSING

    def stored(self) -> str:
        """Return a string from which `unreadable` can restore the error."""
        return json.dumps([str(self), self.code, self.values], ensure_ascii=False) if self.code else str(self)


def check_pages(count: int, what: str = "pages") -> None:
    """Raise UnreadableError if a document has more than MAX_PAGES pages."""
    if count > MAX_PAGES:
        raise UnreadableError(f"has more than {MAX_PAGES:,} {what}", "document_pages", limit=MAX_PAGES)


def too_many_characters() -> UnreadableError:
    return UnreadableError(f"has more than {MAX_CHARACTERS:,} characters", "document_characters", limit=MAX_CHARACTERS)


def unreadable(stored: str) -> UnreadableError:
    """Restore an error from a stored string; older releases stored only the message."""
    try:
        message, code, values = json.loads(stored)
        return UnreadableError(str(message), str(code), **{str(name): int(each) for name, each in values.items()})
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError):
        return UnreadableError(stored)


@dataclass(frozen=True, slots=True)
class Document:
    """The text of a document, and the offsets at which its pages begin (the first is 0)."""

    kind: str
    title: str
    text: str
    pages: tuple[int, ...]
    warnings: tuple[str, ...] = ()


def clean(text: str) -> str:
    """Normalize line endings, and remove control and deceptive characters."""
    text = text.replace("\r\n", "\n").replace("\r", "\n").replace("\f", "\n")
    return _DECEPTIVE.sub("", _CONTROL.sub("", text))


def one_line(text: str, characters: int = MAX_TITLE_CHARACTERS) -> str:
    """Return text as one truncated line of printable characters."""
    return " ".join("".join(each if each.isprintable() else " " for each in clean(text)).split())[:characters]
