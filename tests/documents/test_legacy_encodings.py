"""Text files from before Unicode, and files that programs still write in the encoding of their country."""

from __future__ import annotations

import pytest
from documents.test_traps import read_here

from notso.documents.plain import decode_guessing, guess_legacy_encoding
from notso.documents.values import UnreadableError

RUSSIAN = "Имя;Цена\nгруша;2,50\nЭто обычный текст, сохранённый в Блокноте."
JAPANESE = "名前,価格\nりんご,120\nこれは表計算ソフトから notso.csv に保存した簡単なテキストです。"
TEXTS = [
    ("cp1251", "Windows-1251", RUSSIAN),
    ("koi8-r", "KOI8-R", RUSSIAN),
    ("cp866", "IBM866", RUSSIAN),
    ("cp1251", "Windows-1251", "Це звичайний український текст, збережений у Блокноті."),
    ("cp1253", "Windows-1253", "Αυτό είναι ένα απλό ελληνικό κείμενο."),
    ("cp1255", "Windows-1255", "זהו קובץ טקסט פשוט בעברית, עם 3 שורות."),
    ("cp1256", "Windows-1256", "هذا ملف نصي بسيط باللغة العربية، سعره 3 دنانير."),
    ("cp874", "Windows-874", "นี่คือไฟล์ข้อความภาษาไทยอย่างง่าย ราคา 3 บาท"),
    ("gb18030", "GB18030", "姓名,价格\n张三,12.5\n这是一个简单的中文文本文件（token）。"),
    ("big5", "Big5", "姓名,價格\n這是一個簡單的中文文字檔案。"),
    ("cp932", "Shift_JIS", JAPANESE),
    ("euc_jp", "EUC-JP", JAPANESE),
    ("cp932", "Shift_JIS", "鈴木 智也;横浜市保土ケ谷区\n高橋 淳;品川区"),
    ("cp949", "EUC-KR", "이름,가격\n이것은 간단한 한국어 텍스트 파일입니다."),
    ("cp1250", "Windows-1250", "Zażółć gęślą jaźń – to jest zwykły tekst."),
    ("cp1250", "Windows-1250", "Příliš žluťoučký kůň úpěl ďábelské ódy."),
    ("iso8859-2", "ISO-8859-2", "Zażółć gęślą jaźń, ąż ślepy."),
    ("cp1254", "Windows-1254", "Türkçe bir metin dosyası: ğüşiöç İstanbul ışık"),
    ("cp1251", "Windows-1251", "Об’єкт, п’ять, ім’я, з’їзд, об’єм"),
    ("koi8-u", "KOI8-U", "Це звичайний український текст, збережений у Блокноті."),
    ("iso8859-5", "ISO-8859-5", RUSSIAN),
    ("cp1253", "Windows-1253", "Άνθρωποι και Άλογα, Άρης: αυτό είναι ένα απλό ελληνικό κείμενο."),
    ("iso8859-7", "ISO-8859-7", "Άνθρωποι και Άλογα, Άρης: αυτό είναι ένα απλό ελληνικό κείμενο."),
    ("iso8859-6", "ISO-8859-6", "هذا ملف نصي بسيط باللغة العربية، سعره 3 دنانير."),
    ("cp1257", "Windows-1257", "Tai paprastas tekstas, įrašytas „Užrašinėje“, kainuoja šešis eurus."),
    ("cp1257", "Windows-1257", "Šis ir vienkāršs teksts, kas saglabāts piezīmju grāmatiņā ar garumzīmēm."),
    ("iso8859-13", "ISO-8859-13", "Tai paprastas tekstas, įrašytas “Užrašinėje”, kainuoja šešis eurus."),
    ("cp1258", "Windows-1258", "\u0110ây là môt\u0323 v\u0103n ba\u0309n tiê\u0301ng Viê\u0323t \u0111ơn gia\u0309n."),
    ("mac-roman", "macintosh", "Générale à été créée – naïve Müller, ça coûte 5 francs"),
    ("mac-roman", "macintosh", "Die Größe der Füße: schöne Grüße aus Köln"),
    ("cp850", "IBM850", "Générale à été créée, naïve Müller, ça coûte 5 francs"),
    ("cp850", "IBM850", "El código de la función está en español: sí, también aquí."),
    ("cp850", "IBM850", "Die Größe der Füße: schöne Grüße aus Köln"),
    ("cp852", "IBM852", "Zażółć gęślą jaźń, to jest zwykły tekst."),
    ("cp1253", "Windows-1253", "ΣΦΆΛΜΑ: ο φάκελος ΤΡΑΠΈΖΙ ΦΆΚΕΛΟΣ δεν ήταν στον δίσκο"),
    # Western text must not be taken for anything else.
    ("cp1252", "Windows-1252", "Bücher, Käse, Öl, für, schön. " * 20 + "Fjallabyggð"),
    ("cp1252", "Windows-1252", "problème, très, forêt, élève. " * 5 + "São Domingos"),
    ("cp1252", "Windows-1252", "LesOptionsSontÉgalement"),
    ("cp1252", "Windows-1252", "Générale à été créée — “smart quotes” naïve Müller, ça coûte 5 €"),
    ("cp1252", "Windows-1252", "É exibido: ações, avaliação, informações"),
    ("cp1252", "Windows-1252", "They don’t, it’s “theirs” … 20°C and 30°C"),
    ("cp1252", "Windows-1252", "GRÖßE: 5, STRAßE, MÜSLI"),
    ("cp1252", "Windows-1252", "4 m² and 5 cm³ cost £100, nº 5, ½ ± 3 µm"),
    ("cp1252", "Windows-1252", "Smørrebrød på gården, æble"),
    ("cp1252", "Windows-1252", "café"),
    ("cp1252", "Windows-1252", "Það er gott veður, sagði Þórður Guðmundsson"),
    ("cp1252", "Windows-1252", "Guðmundsson"),
    ("cp1252", "Windows-1252", "Eg eri føroyingur og búgvi í Tórshavn, tað er gott"),
    ("cp1252", "Windows-1252", "Tangentbordet har tecknen åäö och ÅÄÖ."),
    *(("cp1252", "Windows-1252", text) for text in ("ÄÄÖÖ", "ÉÈÊË", "ÀÉÈ", "jäääär", "çà et là")),
]
SIGNS = (
    "42 U.S.C. §§ 1983|¶ 12|a ¦ b|± 5|€€€|wait ………|“”‘’|1\xa0000\xa0\xa0|·····|•••••|——————|¬p|report¹ and³|£££|¤¤¤¤|"
    "name¦price¦unit|row¦see§note¬end|don´t|see§note|half­way"
)


@pytest.mark.parametrize(
    ("codec", "name", "text"), TEXTS, ids=[f"{name} {at}" for at, (_, name, _) in enumerate(TEXTS)]
)
def test_the_encoding_of_legacy_text_is_guessed(codec: str, name: str, text: str) -> None:
    document = read_here(("a" * 40_000 + "\n" + text).encode(codec), "a.txt")
    assert document.text.partition("\n")[2] == text
    assert document.warnings == (f"its encoding was guessed: {name}",)


@pytest.mark.parametrize("text", SIGNS.split("|"))
def test_signs_alone_are_read_as_windows_1252(text: str) -> None:
    data = text.encode("cp1252")
    assert decode_guessing(data) == (text, "Windows-1252")


def test_a_damaged_character_does_not_change_the_encoding() -> None:
    data = (JAPANESE * 1_000).encode("cp932")
    assert read_here(data + b"\x81", "a.txt").text == JAPANESE * 1_000 + "\ufffd"
    assert guess_legacy_encoding(data[:-1])[1] == "Shift_JIS"


def test_a_null_character_after_the_sample_of_encodings_is_found() -> None:
    with pytest.raises(UnreadableError):
        decode_guessing(b"a" * 40_000 + b"\0")


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
@pytest.mark.parametrize(
    "text",
    [RUSSIAN, JAPANESE, "hello", "a", "Αυτό είναι ένα απλό κείμενο.", "姓名 价格\n张三 简单的文本文件", "بسيط\n"],
)
def test_utf_16_without_a_mark_is_recognized(codec: str, text: str) -> None:
    assert decode_guessing(text.encode(codec)) == (text, codec.upper())


def test_iso_2022_jp_is_recognized() -> None:
    assert decode_guessing(JAPANESE.encode("iso-2022-jp")) == (JAPANESE, "ISO-2022-JP")
    assert decode_guessing(b"\x1b$ is an escape sequence")[0] == "\x1b$ is an escape sequence"
    assert decode_guessing("\x1b[1mcafé \x1b$0 x".encode())[0] == "\x1b[1mcafé \x1b$0 x"


@pytest.mark.parametrize(
    "data",
    [
        bytes(range(256)) * 40,
        b"\1\0\2\0\3\0 \0" * 99,
        b"\0" * 999,
        b"\xff\xff \0" * 99,
        b"one word\0",
        "Слово\0".encode(),
    ],
)
def test_binary_data_is_not_taken_for_utf_16(data: bytes) -> None:
    with pytest.raises(UnreadableError):
        decode_guessing(data)
