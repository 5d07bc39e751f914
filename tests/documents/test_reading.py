"""The server's side of reading documents: frames from the child process are not trusted, and the child may end."""

from __future__ import annotations

import json
import struct
from typing import Any

import pytest
from documents.made import chrome_pdf, form_pdf, text_pdf, xlsx

from notso.documents import reading
from notso.documents.reading import DocumentReader, assemble_document, parse_frames
from notso.documents.values import UnreadableError, unreadable
from notso.system.confinement import lacking

END = {"kind": "text", "title": "", "warnings": []}


def framed(*objects: Any) -> bytes:
    texts = [each if isinstance(each, bytes) else json.dumps(each).encode() for each in objects]
    return b"".join(struct.pack(">I", len(text)) + text for text in texts)


def made(*objects: Any) -> reading.Document:
    data = framed(*objects)
    return assemble_document(
        parse_frames(iter([data[at : at + 7] for at in range(0, len(data), 7)])), lambda seconds: None
    )


def test_page_frames_are_joined_with_page_offsets() -> None:
    document = made({"page": "a", "more": True}, {"page": "b", "more": False}, {"page": "c", "more": False}, END)
    assert (document.text, document.pages) == ("ab\n\nc", (0, 4))


def test_time_is_granted_once_for_each_page() -> None:
    granted: list[int] = []
    data = framed({"reading": 100}, {"reading": 50}, {"reading": 10**9}, {"page": "a", "more": False}, END)
    assemble_document(parse_frames(iter([data])), granted.append)
    assert sum(each for each in granted if each > 0) == 2_000


@pytest.mark.parametrize(
    "objects",
    [
        [b"{"],
        [b"[]"],
        [b"[" * 5_000],
        [{"page": 1, "more": False}],
        [{"page": "a"}],
        [END],
        [{"page": "a", "more": False}],
        [{"page": "a", "more": False}] * 10_001 + [END],
        [{"page": "a", "more": False}, {**END, "warnings": "w"}],
        [{"page": "a" * 1_000_000, "more": True}] * 21,
    ],
)
def test_invalid_parser_frames_are_refused(objects: list[Any]) -> None:
    with pytest.raises(UnreadableError, match="its parser"):
        made(*objects)


def test_parser_output_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "MAX_CHARACTERS", 1_000)
    with pytest.raises(UnreadableError, match="its parser exceeded the limits"):
        made({"page": "a" * 30_000, "more": True})


def test_parser_text_is_stripped_of_control_characters() -> None:
    with pytest.raises(UnreadableError, match=r"^is bad evil$") as raised:
        made({"refused": "is\nbad\u202e\x00 evil", "code": "document_pages", "values": {"limit": 3, "name": "<b>"}})
    assert (raised.value.code, raised.value.values) == ("document_pages", {"limit": 3})
    assert made({"page": "a\x00\u202eb", "more": False}, {**END, "title": "a\nb"}).text == "ab"


def test_oversized_frame_is_refused_from_its_header() -> None:
    with pytest.raises(UnreadableError, match="invalid result"):
        next(parse_frames(iter([struct.pack(">I", (1 << 20) + 1)])))


def test_document_is_read_in_a_child_process() -> None:
    document = DocumentReader(text_pdf(["The word is heron."]), "../../\u202efdp.PDF", bool(lacking())).read()
    assert (document.text, document.kind, len(document.pages)) == ("The word is heron.", "PDF", 1)


def test_document_parser_cannot_open_files() -> None:
    program = """
import os
from notso.documents import child
def read(*_):
    try:
        os.open(os.devnull, os.O_RDONLY)
    except OSError:
        raise child.UnreadableError("may open nothing") from None
    raise child.UnreadableError("may open files")
child._write_pages = read
child.main()
"""
    with pytest.raises(UnreadableError, match=r"^may open nothing$"):
        DocumentReader(b"a", "a.txt", program=program).read()


def test_native_parsers_require_a_sandbox() -> None:
    program = "from notso.documents import child; child.lacking = lambda: ['seccomp']; child.main()"
    with pytest.raises(UnreadableError, match=r"this system lacks seccomp \(see notso doctor\)"):
        DocumentReader(text_pdf(["a"]), "a.pdf", program=program).read()
    assert DocumentReader(text_pdf(["a"]), "a.pdf", unconfined=True, program=program).read().text == "a"
    assert DocumentReader(b"a", "a.txt", program=program).read().text == "a"


def test_missing_documents_extra_is_reported() -> None:
    missing = "import sys; sys.modules['pypdfium2'] = None\nfrom notso.documents.child import main; main()"
    with pytest.raises(UnreadableError, match=r"requires libraries that are not installed: .*\[documents\]"):
        DocumentReader(text_pdf(["a"]), "a.pdf", program=missing).read()


def test_killed_reader_raises_unreadable_error() -> None:
    slow = "import time; time.sleep(1000)"
    reader = DocumentReader(b"x", "a.txt", program=slow)
    reader.kill()
    with pytest.raises(UnreadableError, match="could not be read"):
        reader.read()


@pytest.mark.parametrize(
    ("name", "data", "text"),
    [
        ("a.pdf", text_pdf(*([f"Report {n}", word, f"Page {n}"] for n, word in enumerate("abcd"))), "a\n\nb\n\nc\n\nd"),
        ("form.pdf", form_pdf("Jane", "a remark"), "Name: Jane\na remark"),
        ("a.html", b"<meta charset=windows-874><table><tr><td rowspan=2>\xa1<td>2<tr><td>3</table>", "| \u0e01 | 2 |"),
        ("a.csv", b'a;b\n1;"x ""y"""\n', '| 1 | x "y" |'),
        ("gbk.txt", "这是一个简单的中文文本文件。".encode("gbk"), "这是一个简单的中文文本文件。"),
        ("math.html", b"<math><mfrac><mn>1</mn><mn>3</mn></mfrac></math>", "1/3"),
        ("chrome.pdf", chrome_pdf("مرحبا"), "مرحبا"),
        ("a.xlsx", xlsx('<row r="1"><c r="A1"><v>1</v></c><c r="B1"><f>A1</f></c></row>'), "| 1 |"),
        (
            "a.eml",
            b"MIME-Version: 1.0\nContent-Type: multipart/alternative; boundary=b\n\n--b\n\n \n--b\n"
            b"Content-Type: text/html; charset=ibm866\n\n<p>\x80\n--b--\n",
            "\u0410",
        ),
        (
            "cp852.eml",
            b"Subject: =?cp852?q?h=A7?=\nContent-Type: text/plain; charset=cp852\n\n\xa7",
            "h\u017e\n\n\u017e",
        ),
        ("a.htm", b"<meta charset=iso-2022-jp-2><p>\x1b$A0!\x1b(B", "\u554a"),
        ("punycode.eml", b"Content-Type: text/plain; charset=punycode\n\nhello-a", "hello-a"),
    ],
)
def test_nothing_is_imported_in_the_sandbox(name: str, data: bytes, text: str) -> None:
    assert text in DocumentReader(data, name, bool(lacking())).read().text


def test_error_of_a_hostile_parser_can_be_stored() -> None:
    values = {"code": 1, "message": 2, "self": 3, "\ud800": 4, "limit": "x"}
    with pytest.raises(UnreadableError) as caught:
        made({"refused": "is b\ud800ad", "code": "document_\ud800", "values": values})
    stored = caught.value.stored()
    stored.encode()
    restored = unreadable(stored)
    assert (str(restored), restored.code) == ("is bad", "document_")
    assert restored.values == {"code": 1, "message": 2, "self": 3, "": 4}


@pytest.mark.parametrize("stored", ['["a", "b", {"c": Infinity}]', "[" * 100_000, '["a", "b", {"c": []}]', "[]", "5"])
def test_other_stored_errors_are_shown_as_they_are(stored: str) -> None:
    assert str(unreadable(stored)) == stored
