"""Extract the text of PDF pages, and render pages as images in a sandboxed child process, with PDFium."""

from __future__ import annotations

import re
import struct
import sys
import zlib
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, compress
from operator import itemgetter
from typing import TYPE_CHECKING, Any, BinaryIO, TypeAlias, TypeVar

from notso.documents.formulas import raised
from notso.documents.values import (
    MAX_CHARACTERS,
    MIB,
    UNCONFINED,
    UnreadableError,
    check_pages,
    clean,
    too_many_characters,
)
from notso.system.confinement import ConfinedProcess, ConfinedWorkError, Limits, lacking, serve_confined

if TYPE_CHECKING:
    from pypdfium2 import PdfDocument

T = TypeVar("T")

MARGIN_LINES = 2
"""Number of lines at the top and the bottom of a page that may be a header or a footer."""

# A line counts as a header or footer if it is on at least this many pages and at least this share of the pages with
# text.
MIN_REPEATED_PAGES, MIN_REPEATED_SHARE = 3, 0.6

_HYPHEN = re.compile("([^\\W\\d_])(?:[\u00ad\u0002\ufffe]|-)\r?\n([a-z\u00df-\u00ff])")
_KEPT_HYPHEN = re.compile(
    "(?<=[a-z\u00df-\u00ff])[\u0002\ufffe](?:\r?\n)?(?=[A-Z\u00c0-\u00de])"
)  # as in "pre-Columbian"
_DIGITS = re.compile(r"\d+")
_FROM_THE_RIGHT = re.compile("[\u0591-\u05f4\u0620-\u065f\u066e-\u08ff\ufb1d-\ufdfb\ufe70-\ufefc]{2,}")
# A number, with the line breaks before and after it.
_NUMBER = re.compile(r"(?<=\S)(\r\n)?([-+\u2212]?[0-9]+)(?=(\r\n)?)")
_DENOMINATOR = re.compile("[/\u2044][0-9]+")
# Limits on the height, rise and distance of a superscript, and on the width of a space, relative to the height of the
# character before it. Text beside a drop cap is smaller than a superscript.
MIN_SUPERSCRIPT_HEIGHT, MAX_SUPERSCRIPT_HEIGHT, MIN_RISE, MAX_GAP, MIN_SPACE = 0.45, 0.9, 0.15, 0.35, 0.15
MAX_FIELDS = 1_000  # maximum number of form fields per page
MAX_DISTANCE = 300.0  # maximum distance of a field's value from its label, in points
_PASSWORD, _SECURITY = 4, 5  # FPDF_ERR_PASSWORD, FPDF_ERR_SECURITY

MAX_WIDTH, MAX_HEIGHT = 1240, 1754
"""Maximum size of a page's image in pixels: an A4 page at 150 dpi."""
MAX_SCALE = 150 / 72
DRAWING_LIMITS = Limits(cpu_s=20, memory_bytes=1024 * MIB, wall_s=60, answer_bytes=8 * MIB)
DRAWING_PROGRAM = "from notso.documents.pdf import main; main()"
PNG = b"\x89PNG\r\n\x1a\n"
_PAGE_NUMBER = struct.Struct(">I")


def read_pdf(file: BinaryIO, warnings: list[str], announce: Callable[[int], None]) -> Iterator[str]:
    """Yield the text of each page, without repeated headers or footers. Raises UnreadableError."""
    import pypdfium2

    file.seek(0)
    try:
        document = pypdfium2.PdfDocument(file.read())
    except pypdfium2.PdfiumError as error:
        if error.err_code in (_PASSWORD, _SECURITY):
            raise UnreadableError("is encrypted", "document_encrypted") from None
        raise UnreadableError("is damaged: it is not a complete PDF", "document_damaged") from None
    if document.get_formtype() == pypdfium2.raw.FORMTYPE_XFA_FULL:  # its only page asks the reader to use Acrobat
        raise UnreadableError("is a dynamic XFA form; print it to a PDF file", "document_xfa")
    with suppress(pypdfium2.PdfiumError):
        document.init_forms()
    count = len(document)
    if not count:
        raise UnreadableError("is damaged: it has no pages", "document_damaged")
    check_pages(count)
    announce(count)
    pages: list[str] = []
    unread, empty, left = 0, 0, MAX_CHARACTERS
    for number in range(count):
        try:
            text, characters = _read_page(document, number, left)
            left -= characters
        except pypdfium2.PdfiumError:
            text, unread = "", unread + 1
        empty += not text.strip()
        pages.append(text)
    if unread == count:
        raise UnreadableError("is damaged: none of its pages can be read", "document_damaged")
    if empty == count:
        raise UnreadableError(
            "has no text: it is probably a scan, and text in images is not recognized", "document_scan"
        )
    if unread:
        warnings.append(f"{unread} of {count} pages are damaged and were left out")
    elif empty:
        warnings.append(f"{empty} of {count} pages have no text; they may be scanned")
    yield from remove_margins(pages)


def _read_page(document: PdfDocument, number: int, max_characters: int) -> tuple[str, int]:
    # Returns the text of a page, and its number of characters before corrections.
    from pypdfium2 import raw

    page = document[number]
    fields = _form_fields(document, page)
    # Text annotations and form field values are part of the page only after it is flattened and loaded again.
    if raw.FPDFPage_Flatten(page, raw.FLAT_NORMALDISPLAY) == raw.FLATTEN_SUCCESS:
        page.close()
        page = document[number]
    text_page = page.get_textpage()
    characters = max(0, text_page.count_chars())
    if characters > max_characters:
        raise too_many_characters()
    text = join_hyphenated(_PageText(text_page).corrected(fields)) if characters else ""
    text_page.close()
    page.close()
    return text, characters


Box: TypeAlias = tuple[float, float, float, float]  # left, bottom, right, top


def _form_fields(document: PdfDocument, page: Any) -> list[tuple[Box, str]]:
    # Returns the boxes of visible form fields, and their marks (empty except for check boxes and radio buttons).
    from pypdfium2 import raw

    found = list[tuple[Box, str]]()
    for number in range(max(0, raw.FPDFPage_GetAnnotCount(page)) if document.formenv is not None else 0):
        annotation = raw.FPDFPage_GetAnnot(page, number)
        kind = raw.FPDFAnnot_GetFormFieldType(document.formenv, annotation)
        rectangle = raw.FS_RECTF()
        if (
            kind > raw.FPDF_FORMFIELD_PUSHBUTTON
            and len(found) < MAX_FIELDS
            and not raw.FPDFAnnot_GetFlags(annotation) & (raw.FPDF_ANNOT_FLAG_HIDDEN | raw.FPDF_ANNOT_FLAG_NOVIEW)
            and raw.FPDFAnnot_GetRect(annotation, rectangle)
        ):
            box = rectangle.left, rectangle.bottom, rectangle.right, rectangle.top
            mark = "\u2612" if raw.FPDFAnnot_IsChecked(document.formenv, annotation) else "\u2610"
            found.append((box, mark * (kind in (raw.FPDF_FORMFIELD_CHECKBOX, raw.FPDF_FORMFIELD_RADIOBUTTON))))
        raw.FPDFPage_CloseAnnot(annotation)
    return found


class _PageText:
    # The text of a page, and the boxes of its characters. The highest and the lowest character of the font determine
    # the height of all boxes.
    def __init__(self, text_page: Any) -> None:
        import pypdfium2

        self.text: str = text_page.get_text_range()
        self._page = text_page
        # PDFium counts UTF-16 code units: two for some characters.
        units = [0, *accumulate(1 + (each > "\uffff") for each in self.text)]
        self._units: Sequence[int] = units if units[-1] > len(self.text) else range(len(self.text) + 1)
        self._index = pypdfium2.raw.FPDFText_GetCharIndexFromTextIndex
        self._error = pypdfium2.PdfiumError

    def box(self, at: int) -> Box:
        with suppress(self._error):  # a character without a box
            left, bottom, right, top = self._page.get_charbox(self._index(self._page, self._units[at]), loose=True)
            return left, bottom, right, top
        return 0, 0, 0, 0

    def corrected(self, fields: Sequence[tuple[Box, str]]) -> str:
        changes = list(self._field_values(fields)) if fields else []
        moved = {begin for begin, end, _ in changes if begin < end}
        changes += [
            each
            for each in (*self._words_from_the_right(), *self._superscripts())
            if moved.isdisjoint(range(*each[:2]))
        ]
        at, pieces = 0, list[str]()
        for begin, end, text in sorted(changes, key=itemgetter(0, 1)):
            pieces += [self.text[at:begin], text]
            at = max(at, end)
        return "".join([*pieces, self.text[at:]])

    def _words_from_the_right(self) -> Iterator[tuple[int, int, str]]:
        # In Chrome's PDF files, PDFium returns right-to-left words from left to right, because Chrome declares the text
        # of each letter separately.
        for word in _FROM_THE_RIGHT.finditer(self.text):
            letters = [(sum(self.box(at)[::2]), letter) for at, letter in enumerate(word[0], start=word.start())]
            if letters[0][0] < letters[-1][0]:
                letters.sort(key=lambda each: -each[0])  # stable, because letters of a ligature share a position
                yield *word.span(), "".join(letter for _, letter in letters)

    def _field_values(self, fields: Sequence[tuple[Box, str]]) -> Iterator[tuple[int, int, str]]:
        # Moves the values of form fields, which PDFium returns after the other text, to the nearest text on the same
        # line.
        boxes = ((at, self.box(at)) for at, letter in enumerate(self.text) if not letter.isspace())
        letters = sorted(((box[1] + box[3]) / 2, at, box) for at, box in boxes)

        def line_of(box: Box) -> Sequence[tuple[float, int, Box]]:
            start, end = (
                bisect_right(letters, box[1], key=itemgetter(0)),
                bisect_left(letters, box[3], key=itemgetter(0)),
            )
            return letters[start:end]

        values, taken = list[list[int]](), set[int]()  # a letter belongs to one field, even if fields overlap
        for box, _ in fields:
            within = (at for _, at, letter in line_of(box) if box[0] < (letter[0] + letter[2]) / 2 < box[2])
            values.append(sorted(at for at in within if at not in taken))
            taken.update(values[-1])
        for (box, mark), places in sorted(zip(fields, values, strict=True)):
            beside = [
                (max(letter[0] - box[2], box[0] - letter[2]), letter[2] < box[2], at)
                for _, at, letter in line_of(box)
                if at not in taken
            ]
            distance, is_left, at = min(beside, default=(MAX_DISTANCE, True, len(self.text) - 1))
            start, end = (places[0], places[-1] + 1) if places else (0, 0)
            value = mark or " ".join(self.text[start:end].split())
            is_whole = len(value.replace(" ", "")) == len(places)  # without other text in between
            if mark or (places and is_whole and distance < MAX_DISTANCE):
                end += self.text[end : end + 1] == " "
                yield from ((each, each + 1, "") for each in (places if mark else range(start, end)))
                yield (at + 1, at + 1, f" {value}") if is_left else (at, at, f"{value} ")

    def _superscripts(self) -> Iterator[tuple[int, int, str]]:
        # Without marks, the text of 10 to the 6th would be 106. PDFium may put a superscript or subscript on a line of
        # its own, or end a line after it.
        for number in _NUMBER.finditer(self.text):
            (begin, end), base = number.span(2), self.box(number.start() - 1)
            sizes = [_height(box) for box in (base, self.box(begin), self.box(end - 1))]
            if min(sizes) > MAX_SUPERSCRIPT_HEIGHT * max(sizes):
                continue
            for at in range(begin, end):
                box = self.box(at)
                is_raised = _is_superscript(box, base)
                if is_raised or _is_subscript(box, base):
                    larger = _height(box) / MAX_SUPERSCRIPT_HEIGHT
                    end = next((each for each in range(at + 1, end) if _height(self.box(each)) > larger), end)
                    first, last, space = number.start() if at == begin else at, end, ""
                    if number[3] and end == number.end() and end + 2 < len(self.text):
                        after, gap = self.box(end + 2), MIN_SPACE * _height(base)
                        if _is_in_line(after, base) and after[0] >= box[0]:
                            last, space = end + 2, " " * (after[0] - self.box(end - 1)[2] > gap)
                    before = self.text[(number.start() if at == begin else at) - 1]
                    text = self.text[at:end] if not before.isdecimal() else f"_{self.text[at:end]}"
                    slash, last = last, max(last, self._denominator_end(last, box) if is_raised else 0)
                    if last > slash and self.box(slash + 1)[1] < box[1] - MIN_RISE * _height(box):
                        text, last = text.replace("_", " "), slash  # a mixed fraction
                    elif is_raised:
                        text = raised(self.text[at:end] + self.text[slash:last])
                    yield first, last, text + (" " if self.text[last : last + 1].isdecimal() else space)
                    break
                base = box

    def _denominator_end(self, at: int, numerator: Box) -> int:
        # Returns the end of the number if a slash and a digit of the same size follow, otherwise 0.
        if (number := _DENOMINATOR.match(self.text, at)) is None:
            return 0
        sizes = _height(numerator), _height(self.box(at + 1))
        return number.end() if min(sizes) > MAX_SUPERSCRIPT_HEIGHT * max(sizes) else 0


def _height(box: Box) -> float:
    return box[3] - box[1]


def _is_in_line(box: Box, base: Box) -> bool:
    return abs(box[1] + box[3] - base[1] - base[3]) < 0.5 * _height(base)


def _is_superscript(box: Box, base: Box) -> bool:
    height = _height(base)
    return (
        0 < MIN_SUPERSCRIPT_HEIGHT * height <= _height(box) <= MAX_SUPERSCRIPT_HEIGHT * height
        and base[1] + MIN_RISE * height <= box[1] < base[3]
        and abs(box[0] - base[2]) <= MAX_GAP * height
    )


def _is_subscript(box: Box, base: Box) -> bool:
    # Smaller text extends below the larger text before it only if it is lowered.
    height = _height(base)
    return (
        0 < MIN_SUPERSCRIPT_HEIGHT * height <= _height(box) <= MAX_SUPERSCRIPT_HEIGHT * height
        and box[1] < base[1] <= box[3] - MIN_RISE * height
        and abs(box[0] - base[2]) <= MAX_GAP * height
    )


def pdf_title(file: BinaryIO) -> str:
    import pypdfium2

    file.seek(0)
    try:
        return str(pypdfium2.PdfDocument(file.read()).get_metadata_value("Title"))
    except (pypdfium2.PdfiumError, UnicodeError):
        return ""


def join_hyphenated(text: str) -> str:
    return clean(_HYPHEN.sub(r"\1\2", _KEPT_HYPHEN.sub("-", text)))


def remove_margins(pages: Sequence[str]) -> list[str]:
    """Return pages without headers and footers (lines that are the same on most pages, except for page numbers)."""
    split = [page.strip("\n").split("\n") for page in pages]
    places: dict[tuple[bool, str], list[tuple[int, str]]] = {}  # (top, line without numbers) -> pages and lines
    for page, lines in enumerate(split):
        for top in (True, False):
            for line in lines[:MARGIN_LINES] if top else lines[-MARGIN_LINES:]:
                places.setdefault((top, _DIGITS.sub("\0", " ".join(line.split()))), []).append((page, line))
    needed = max(MIN_REPEATED_PAGES, MIN_REPEATED_SHARE * sum(any(map(str.strip, lines)) for lines in split))
    repeated = set[tuple[int, bool, str]]()
    for (top, _), found in places.items():
        alike = _numbered_alike(found) if len(found) >= needed else []
        if len({page for page, _ in alike}) >= needed:
            repeated |= {(page, top, line) for page, line in alike}
    return ["\n".join(_strip_margins(page, lines, repeated) or lines).strip("\n") for page, lines in enumerate(split)]


def _numbered_alike(lines: Sequence[tuple[int, str]]) -> list[tuple[int, str]]:
    # Returns the lines whose numbers follow the pattern of most lines: constant, or increasing with the page number.
    # Other lines, such as the totals at the end of bills, are part of the text.
    numbers = [_DIGITS.findall(line) for _, line in lines]
    alike = [True] * len(lines)
    for values in zip(*numbers, strict=True):
        distances = [int(each[:9]) - page for each, (page, _) in zip(values, lines, strict=True)]
        (value, constant), (distance, counting) = (_most_frequent(each) for each in (values, distances))
        for at, each in enumerate(values):
            alike[at] &= each == value if constant >= counting else distances[at] == distance
    return list(compress(lines, alike))


def _most_frequent(values: Iterable[T]) -> tuple[T, int]:
    # Counter.most_common imports a module, and the sandbox prevents imports.
    return max(Counter(values).items(), key=lambda each: each[1])


def _strip_margins(page: int, lines: Sequence[str], repeated: set[tuple[int, bool, str]]) -> Sequence[str]:
    first, last = 0, len(lines)
    while first < min(MARGIN_LINES, last) and (page, True, lines[first]) in repeated:
        first += 1
    while last > max(first, len(lines) - MARGIN_LINES) and (page, False, lines[last - 1]) in repeated:
        last -= 1
    return lines[first:last]


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
                ("-c", DRAWING_PROGRAM, UNCONFINED if unconfined else ""),
                _PAGE_NUMBER.pack(page) + data,
                DRAWING_LIMITS,
            )
        except ConfinedWorkError as error:
            raise UnreadableError(f"could not be drawn: {error}", "document_unread") from None

    def draw(self) -> bytes:
        """Return the page as a PNG image. Raises UnreadableError."""
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
    """Draw a page. Stdin contains the page number, followed by the PDF file."""
    from pypdfium2 import PdfDocument, PdfiumError

    def work(request: bytes) -> bytes:
        try:
            return draw_page(PdfDocument(request[_PAGE_NUMBER.size :]), _PAGE_NUMBER.unpack_from(request)[0])
        except (PdfiumError, ValueError, IndexError, OverflowError):
            return b""

    if UNCONFINED not in sys.argv[1:] and lacking():
        raise SystemExit(1)
    serve_confined(work, DRAWING_LIMITS)


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
    """Encode pixels as PNG. A row has `stride` bytes, and a pixel 3 or 4 channels; the fourth is ignored."""
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
        return _PAGE_NUMBER.pack(len(body)) + kind + body + _PAGE_NUMBER.pack(zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return PNG + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"".join(rows))) + chunk(b"IEND", b"")
