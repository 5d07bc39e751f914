"""What is read from PDF files: form fields, text from right to left, hyphens and margins."""

from __future__ import annotations

import pytest
from documents.made import (
    WORDS,
    annotated_pdf,
    appearance,
    chrome_pdf,
    form_pdf,
    text_operators,
    text_pdf,
)
from documents.test_traps import read_here

from notso.documents.pdf import _PageText, join_hyphenated, remove_margins


def test_values_of_pdf_forms_are_read_beside_their_labels() -> None:
    """PDFium returns them after the other text, in the order of the fields."""
    values = {(120, 736): b"200 EUR", (120, 750): b"100 EUR", (310, 750): b"2024", (50, 500): b"apart"}
    widgets, appearances = {}, {}
    for number, ((left, bottom), value) in enumerate(values.items()):
        widgets[20 + number] = (
            b"<< /Type /Annot /Subtype /Widget /FT /Tx /T (f%d) /V (%s) /F 4 /P 10 0 R /Rect [%d %d %d %d]"
            b" /AP << /N %d 0 R >> >>" % (number, value, left, bottom - 3, left + 100, bottom + 10, 40 + number)
        )
        appearances[40 + number] = appearance(b"BT /F1 12 Tf 0 3 Td (%s) Tj ET" % value, 100, 13)
    made = annotated_pdf(text_operators([f"Wages:{' ' * 55}Year:", "Tax:", "More text"]), widgets, appearances)
    lines = [" ".join(each.split()) for each in read_here(made, "a.pdf").text.split("\n")]
    assert [each for each in lines if each] == ["Wages: 100 EUR Year: 2024", "Tax: 200 EUR", "More text", "apart"]


def test_text_in_many_overlapping_fields_of_a_pdf_is_moved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_PageText, "box", lambda page, at: (at, 0, at + 1, 1))
    page = _PageText.__new__(_PageText)
    page.text = "label value"
    assert [text for _, _, text in page._field_values([((5, -1, 11, 2), "")] * 9) if text] == [" value"]


def test_check_boxes_of_pdf_forms_are_read_beside_their_labels() -> None:
    """The appearance of the first box is a letter of a font with symbols, as in files of Acrobat."""
    at_right, at_left = [(130, 745), (200, 745)], [(40, 730), (40, 716), (40, 702)]
    widgets = {}
    for number, (left, bottom) in enumerate([*at_right, *at_left]):
        kind = b"/Ff 32768" if number > 3 else b"/Ff 0"
        state = b"/Yes" if number in (0, 3) else b"/Off"
        widgets[20 + number] = (
            b"<< /Type /Annot /Subtype /Widget /FT /Btn %s /T (f%d) /F %d /P 10 0 R /V %s /AS %s"
            b" /Rect [%d %d %d %d] /AP << /N << /Yes 30 0 R >> >> >>"
            % (kind, number, 2 if number == 2 else 4, state, state, left, bottom, left + 9, bottom + 12)
        )
    text = text_operators(["Agree (now):             No:", "a hidden box", "checked", "radio"]).replace(
        b"50 750", b"60 750"
    )
    made = annotated_pdf(text, widgets, {30: appearance(b"BT /F1 12 Tf 1 1 Td (4) Tj ET", 9, 12)})
    assert read_here(made, "a.pdf").text.split("\n") == [
        "Agree (now): \u2612 No: \u2610",
        "a hidden box",
        "\u2612 checked",
        "\u2610 radio",
    ]


def test_pdf_pages_are_read_without_headers_and_footers() -> None:
    document = read_here(text_pdf(*([f"Report {n}", word, f"Page {n}"] for n, word in enumerate(WORDS))), "a.pdf")
    assert document.text == "heron\n\nstork\n\ncrane\n\negret"
    assert [document.text[at : at + 5] for at in document.pages] == WORDS
    half = read_here(text_pdf(["some text"], []), "a.pdf")
    assert half.warnings == ("1 of 2 pages have no text; they may be scanned",)


def test_values_of_pdf_form_fields_and_text_annotations_are_read() -> None:
    assert read_here(form_pdf("Jane", "a remark"), "a.pdf").text == "Name: Jane\na remark"


def test_letters_of_words_from_right_to_left_are_in_reading_order() -> None:
    assert read_here(chrome_pdf("مرحبا"), "a.pdf").text == "مرحبا"
    assert read_here(chrome_pdf("שלום"), "a.pdf").text == "שלום"


def test_hyphenated_words_are_joined() -> None:
    assert join_hyphenated(
        "a hyphen-\r\nated word, hyphen\ufffe\r\nated; Anglo-\r\nSaxon, 1-\r\n2 pre\ufffeColumbian"
    ) == ("a hyphenated word, hyphenated; Anglo-\nSaxon, 1-\n2 pre-Columbian")


def test_margin_lines_shared_by_most_pages_are_removed() -> None:
    assert remove_margins(["T 1\na", "T 2\nb", "c"]) == ["T 1\na", "T 2\nb", "c"]
    assert remove_margins(["T\na\nb", "T\nc\nd", "T\ne\nf"]) == ["a\nb", "c\nd", "e\nf"]
    bills = [f"Bill 2024-{n}\n{word}\nTotal: {n * n * 137}.50" for n, word in enumerate(WORDS, start=7)]
    assert remove_margins(bills) == [f"{word}\nTotal: {n * n * 137}.50" for n, word in enumerate(WORDS, start=7)]
    lines = [f"{word}\n{n * n}\n{n}" for n, word in enumerate(WORDS, start=7)]
    assert remove_margins(lines) == [f"{word}\n{n * n}" for n, word in enumerate(WORDS, start=7)]
    assert remove_margins(["# 5\na", "3 5\nb", "3 5\nc", "3 5\nd"]) == ["# 5\na", "b", "c", "d"]
    assert remove_margins(["1" * 5_000 + f"\n{n}" for n in "abc"]) == ["a", "b", "c"]
    assert remove_margins(["Slide 1", "Slide 2", "Slide 3"]) == ["Slide 1", "Slide 2", "Slide 3"]
