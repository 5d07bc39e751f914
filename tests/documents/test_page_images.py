"""Images of PDF pages have a limited size and are rendered by a sandboxed child process."""

from __future__ import annotations

import random
import struct
import zlib

import pytest
from documents.made import form_pdf, pdf, stream, text_operators, text_pdf

import notso.documents.pdf
from notso.documents.pdf import MAX_HEIGHT, MAX_WIDTH, PNG, PageDrawer, draw_page, png
from notso.documents.values import UnreadableError


def pixels_of(image: bytes) -> tuple[int, int, list[bytes]]:
    """Return width, height and the RGB rows of a PNG without filters, according to the specification."""
    assert image.startswith(PNG)
    at, chunks = len(PNG), dict[bytes, bytes]()
    while at < len(image):
        (length,) = struct.unpack_from(">I", image, at)
        kind, body = image[at + 4 : at + 8], image[at + 8 : at + 8 + length]
        assert struct.unpack_from(">I", image, at + 8 + length)[0] == zlib.crc32(kind + body)
        chunks[kind], at = body, at + 12 + length
    width, height, *rest = struct.unpack(">IIBBBBB", chunks[b"IHDR"])
    assert rest == [8, 2, 0, 0, 0] and list(chunks) == [b"IHDR", b"IDAT", b"IEND"]
    rows, line = zlib.decompress(chunks[b"IDAT"]), 1 + 3 * width
    assert len(rows) == height * line and not any(rows[::line])
    return width, height, [rows[start + 1 : start + line] for start in range(0, len(rows), line)]


@pytest.mark.parametrize("channels", [3, 4])
def test_png_contains_the_given_pixels(channels: int) -> None:
    rng, width, height = random.Random(7), 5, 3
    stride = channels * width + 6
    given = rng.randbytes(height * stride)
    found = pixels_of(png(width, height, given, stride, channels))
    for y, row in enumerate(found[2]):
        for x in range(width):
            at = y * stride + channels * x
            assert row[3 * x : 3 * x + 3] == given[at : at + 3]
    assert found[:2] == (width, height)


def test_page_is_rendered_in_a_child_process() -> None:
    data = text_pdf(["first"], ["The heron stands in the reeds."])
    width, height, rows = pixels_of(PageDrawer(data, 2).draw())
    assert width <= MAX_WIDTH and height <= MAX_HEIGHT and max(width, height) > 1000
    dark = sum(row.count(b"\x00\x00\x00") for row in rows)
    assert 100 < dark < 0.2 * width * height, "the page is mostly white, with some text"
    assert PageDrawer(data, 1).draw() != PageDrawer(data, 2).draw()


def test_values_of_form_fields_are_rendered() -> None:
    assert PageDrawer(form_pdf("Jane", ""), 1).draw() != PageDrawer(form_pdf("", ""), 1).draw()


@pytest.mark.parametrize("data, page", [(text_pdf(["x"]), 2), (text_pdf(["x"]), 0), (b"%PDF-1.7", 1), (b"", 1)])
def test_missing_or_damaged_page_is_an_error(data: bytes, page: int) -> None:
    with pytest.raises(UnreadableError, match="could not be drawn: the page is damaged"):
        PageDrawer(data, page).draw()


def test_giant_page_is_rendered_within_size_limits() -> None:
    from pypdfium2 import PdfDocument

    data = pdf([stream(text_operators(["x"]))]).replace(b"612 792", b"9e6 9e6")
    assert b"9e6 9e6" in data
    width, height, _ = pixels_of(draw_page(PdfDocument(data), 1))
    assert width <= MAX_WIDTH + 1 and height <= MAX_HEIGHT + 1


def test_rendering_without_sandbox_must_be_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notso.documents.pdf, "lacking", lambda: ["Landlock"])
    with pytest.raises(UnreadableError, match="this system lacks Landlock"):
        PageDrawer(text_pdf(["x"]), 1)
    assert PageDrawer(text_pdf(["x"]), 1, unconfined=True).draw().startswith(PNG)
