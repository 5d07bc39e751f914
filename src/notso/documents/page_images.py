"""Images of the pages of PDF files, rendered in a sandboxed child process."""

from __future__ import annotations

import struct
import sys
import zlib
from typing import TYPE_CHECKING

from notso.documents.values import MIB, UNCONFINED, UnreadableError
from notso.system.confinement import ConfinedProcess, ConfinedWorkError, Limits, lacking, serve_confined

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument

MAX_WIDTH, MAX_HEIGHT = 1240, 1754
"""Maximum size of an image in pixels: an A4 page at 150 dpi."""
MAX_SCALE = 150 / 72
LIMITS = Limits(cpu_s=20, memory_bytes=1024 * MIB, wall_s=60, answer_bytes=8 * MIB)
PROGRAM = "from notso.documents.page_images import main; main()"
PNG = b"\x89PNG\r\n\x1a\n"
_NUMBER = struct.Struct(">I")


class PageDrawer:
    """Draw one page of a PDF file. `draw` blocks; `kill` may be called from another thread."""

    def __init__(self, data: bytes, page: int, unconfined: bool = False) -> None:
        """Start the child for `page`, counted from 1. Raises UnreadableError.

        unconfined: draw even if the system lacks Landlock or seccomp.
        """
        if not unconfined and (missing := lacking()):
            raise UnreadableError(
                f"is not shown as an image, because this system lacks {' and '.join(missing)} (see notso doctor)",
                "document_unconfined",
            )
        try:
            self._child = ConfinedProcess(
                ("-c", PROGRAM, UNCONFINED if unconfined else ""), _NUMBER.pack(page) + data, LIMITS
            )
        except ConfinedWorkError as error:
            raise UnreadableError(f"could not be drawn: {error}", "document_unread") from None

    def draw(self) -> bytes:
        """Return the page as PNG. Raises UnreadableError."""
        try:
            image = self._child.answer()
        except ConfinedWorkError as error:
            raise UnreadableError(f"could not be drawn: {error}", "document_unread") from None
        finally:
            self.kill()
        if not image.startswith(PNG):
            raise UnreadableError("could not be drawn: the page is damaged", "document_unread")
        return image

    def kill(self) -> None:
        self._child.kill()


def main() -> None:
    """Draw a page. Stdin contains its number, followed by the PDF file."""
    from pypdfium2 import PdfDocument, PdfiumError

    def work(request: bytes) -> bytes:
        try:
            return draw_page(PdfDocument(request[_NUMBER.size :]), _NUMBER.unpack_from(request)[0])
        except (PdfiumError, ValueError, IndexError, OverflowError):
            return b""

    if UNCONFINED not in sys.argv[1:] and lacking():
        raise SystemExit(1)
    serve_confined(work, LIMITS)


def draw_page(document: PdfDocument, page: int) -> bytes:
    """Return a page, counted from 1, as PNG. Raises PdfiumError, IndexError, or ValueError (no page size)."""
    document.init_forms()
    if not 1 <= page <= len(document):
        raise IndexError(page)
    pdf_page = document[page - 1]
    width, height = pdf_page.get_size()
    if not (0 < width < float("inf") and 0 < height < float("inf")):
        raise ValueError("the page has no size")
    scale = min(MAX_SCALE, MAX_WIDTH / width, MAX_HEIGHT / height)
    image = pdf_page.render(scale=scale, rev_byteorder=True)
    return png(image.width, image.height, bytes(image.buffer), image.stride, image.n_channels)


def png(width: int, height: int, pixels: bytes, stride: int, channels: int) -> bytes:
    """Encode pixels as PNG. Rows have `stride` bytes. Pixels have 3 or 4 channels; the fourth is ignored."""
    rows = []
    for at in range(0, height * stride, stride):
        row = pixels[at : at + channels * width]
        if channels == 4:
            packed = bytearray(3 * width)
            for channel in range(3):
                packed[channel::3] = row[channel::4]
            row = bytes(packed)
        rows.append(b"\0" + row)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return _NUMBER.pack(len(body)) + kind + body + _NUMBER.pack(zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return PNG + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"".join(rows))) + chunk(b"IEND", b"")
