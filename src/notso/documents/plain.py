"""Decode text in any encoding, and extract text from e-mail."""

from __future__ import annotations

import codecs
import re
from binascii import a2b_qp
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from email import policy
from email.errors import MessageError
from email.message import EmailMessage
from email.parser import BytesParser
from itertools import chain, islice
from typing import Any
from unicodedata import category, combining

from notso.documents.markup import html_text
from notso.documents.values import MAX_PAGES, UnreadableError, one_line

_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig", "UTF-8"),
    (codecs.BOM_UTF32_LE, "utf-32", "UTF-32"),
    (codecs.BOM_UTF32_BE, "utf-32", "UTF-32"),
    (codecs.BOM_UTF16_LE, "utf-16", "UTF-16"),
    (codecs.BOM_UTF16_BE, "utf-16", "UTF-16"),
)
# Only these attributes declare the file's encoding. Others, such as `charset` of a <script>, refer to other files.
_DECLARED = re.compile(
    rb"""(?:<meta\s[^<>]*?charset|\A\s*<\?xml\s[^<>]*?encoding)\s*=\s*["']?([A-Za-z0-9_.:-]{2,40})""", re.IGNORECASE
)
# Files often declare an encoding but contain characters of its superset, so the superset is used, as in browsers.
_SUPERSETS = {
    **{"iso8859-1": "cp1252", "iso8859-9": "cp1254", "iso8859-11": "cp874", "tis-620": "cp874", "gb2312": "gb18030"},
    **{"gbk": "gb18030", "shift_jis": "cp932", "euc_kr": "cp949", "big5": "big5hkscs"},
}
_UNKNOWN_LABELS = {  # labels that browsers support but Python does not, by encoding
    "utf-8": "unicode-1-1-utf-8 unicode11utf8 unicode20utf8 x-unicode20utf8",
    "iso8859-6": "iso-8859-6-e iso-8859-6-i csiso88596e csiso88596i",
    "iso8859-7": "sun_eu_greek",
    "iso8859-8": "iso-8859-8-e iso-8859-8-i csiso88598e csiso88598i visual logical",
    "iso8859-15": "csisolatin9",
    "koi8-r": "koi koi8",
    "koi8-u": "koi8-ru",
    "mac-roman": "x-mac-roman csmacintosh mac",
    "mac-cyrillic": "x-mac-cyrillic x-mac-ukrainian",
    "cp874": "windows-874 dos-874",
    "gb18030": "x-gbk csgb2312 gb_2312 gb_2312-80",
    "big5hkscs": "x-x-big5 cn-big5",
    "euc_jp": "x-euc-jp cseucpkdfmtjapanese",
    "cp932": "x-sjis windows-31j",
    "cp949": "windows-949 cseuckr csksc56011987 iso-ir-149 ks_c_5601-1989 ksc_5601",
    **{f"cp{number}": f"x-cp{number}" for number in range(1250, 1259)},
}
_LABELS = {
    **{label: encoding for encoding, labels in _UNKNOWN_LABELS.items() for label in labels.split()},
    **{f"iso8859{part}": f"iso8859-{part}" for part in range(1, 17) if part != 12},
}
_SAMPLE = 1 << 16
_UNTEXTUAL = re.compile("[\x00-\x08\x0e-\x1a\x1c-\x1f]")
MAX_UNTEXTUAL_SHARE = 0.01
MIN_ZEROS = 0.4  # minimum share of zero bytes in UTF-16 text of Western languages
MIN_ASCII_SHARE = 0.005  # minimum share of ASCII characters, such as spaces, in UTF-16 text
# Base64 data, such as images in Markdown and notebooks, on one line or on lines of equal length.
_KINDS_OF_DIGITS = tuple(map(re.compile, ("[a-z]", "[A-Z]", "[0-9]")))
_BASE64 = re.compile(r"(?:[A-Za-z0-9+/]{60,}[ \t]*(?:\\n)?\r?\n?[ \t]*)+(?:[A-Za-z0-9+/]{0,59}={1,2})?")
_FOLD = re.compile(rb"\r?\n[ \t]")
_QUOTED_PRINTABLE = re.compile(
    rb"^(?=[^:\r\n]*;(?:ENCODING=)?QUOTED-PRINTABLE[;:])([^:\r\n]*:)((?:[^\r\n]*=\r?\n)*[^\r\n]*)",
    re.MULTILINE | re.IGNORECASE,
)
MIN_DATA_CHARACTERS = 1_000
MAX_PARTS = 1_000
MANY_MORE_WORDS = 2  # HTML is preferred if it has more than this many times as many words as the other version
_WORD = re.compile(r"\w+")

# Constants of `guess_legacy_encoding`, which compares the frequencies of letters and characters.
_GUESS_SAMPLE = 1 << 15
MIN_SCORE = 0.55
MAX_LETTER_SCORE = 0.8  # approximately the highest `_letter_score` of real text
MIN_MISPLACED = 2  # two different signs within words suggest another encoding; a single one may be a separator
MIN_FREQUENT = 0.85
MIN_KANA = 0.15
_FOREIGN = re.compile("[^\0-\x7f]")
_AFTER_SMALL = re.compile("([a-z])([^\0-\x7f])(?=([a-z]?))")
_WITHIN_WORDS = frozenset("\xa0\xad·‘’–—´¦¬\u200b")
_APOSTROPHE = re.compile(r"(?<![a-zα-ώ])’(?=[Ά-ώ])")  # the byte that is ’ in ISO-8859-7 is Ά in Windows-1253
# In other scripts, whole words consist of non-ASCII letters. In Western text, non-ASCII letters occur within words of
# ASCII letters, and two bytes of such a word may look like a Chinese character.
_RUNS = re.compile("([A-Za-z]?)([^\0-\x7f]+)([A-Za-z]?)")
MIN_IN_WORDS, MAX_BESIDE_LATIN = 0.6, 0.4
_KANA = re.compile("[\u3041-\u30fe]")
# Signs with bytes that are letters in other encodings, as in m³, £5 and ½.
_MEASURES = re.compile(r"\b[a-zµ]{0,2}[¹²³](?!\w)|[£¥¢±×](?=\W?\d)|(?<![^\W\d])[¼½¾](?![^\W\d])|µ")
_PUNCTUATION = frozenset("\xa0«»‘’‚“”„†•…–—€§©®°·º")

_CYRILLIC = "оеаинтсрвлкмдпуяыьгзбчйхжіїшюцщэфєъёґ"
_GREEK = "αοιετσνηυρπκμλςωγδόίθχάέήύφξβώζψ"
_ARABIC = "اليمونرتبةعدسفهكحقجأشصطخىضذزثئغإءظؤآپچژگ"
# Encoding, name shown to users, and the letters of the language in order of decreasing frequency.
_LETTERS = (
    ("cp1251", "Windows-1251", _CYRILLIC),
    ("koi8-r", "KOI8-R", _CYRILLIC),
    ("koi8-u", "KOI8-U", _CYRILLIC),
    ("cp866", "IBM866", _CYRILLIC),
    ("iso8859-5", "ISO-8859-5", _CYRILLIC),
    ("cp1253", "Windows-1253", _GREEK),
    ("iso8859-7", "ISO-8859-7", _GREEK),
    ("cp1255", "Windows-1255", "יוהלאתמרשבנםחדקעפכטגןצסזץףך"),
    ("cp1256", "Windows-1256", _ARABIC),
    ("iso8859-6", "ISO-8859-6", _ARABIC),
    ("cp874", "Windows-874", "านรอกเงม่ยลวดท้ีัคตสบปะิ์ชหแำไขพจุโึ็ถซผณศธษูใภ"),
)
# Encoding, name, and the first bytes of frequent characters.
_FIRST_BYTES = (
    ("cp949", "EUC-KR", frozenset({0xA1, 0xA3, *range(0xB0, 0xC9)})),
    ("gb18030", "GB18030", frozenset({0xA1, 0xA3, *range(0xB0, 0xD8)})),
    ("big5hkscs", "Big5", frozenset({0xA1, *range(0xA4, 0xC7)})),
    ("cp932", "Shift_JIS", frozenset({0x81, 0x82, 0x83, *range(0x88, 0x99)})),
)
# The non-ASCII letters of each language.
_WESTERN = (
    *("àâçéèêëîïôœùûüæ", "äöüßé", "áéíóúüñ¿¡ª", "áâãàçéêíóôõúüª", "àèéìòùî", "éëïóöüè", "åäöé", "æøåé"),
    *("áéíóúýþæöð", "áíóúýæøð", "äåõöüšž"),
)
_CENTRAL = ("ąćęłńóśźż", "áčďéěíňóřšťúůýžäôĺľŕ", "áéíóöőúüű", "čćđšž", "ăâîşţ")
_BALTIC = ("ąčęėįšųūž", "āčēģīķļņšūž", "äåõöüšž")
# Encoding, name, and languages.
_LATIN = (
    ("cp1252", "Windows-1252", _WESTERN),
    ("cp1250", "Windows-1250", _CENTRAL),
    ("iso8859-2", "ISO-8859-2", _CENTRAL),
    ("cp1254", "Windows-1254", ("çğıöşüâîû\u0307",)),
    ("cp1257", "Windows-1257", _BALTIC),
    ("iso8859-13", "ISO-8859-13", _BALTIC),
    ("cp1258", "Windows-1258", ("àáâăãèéêìíĩòóôơùúũưýđ\u0300\u0301\u0303\u0309\u0323",)),
    ("mac-roman", "macintosh", _WESTERN),
    ("cp850", "IBM850", _WESTERN),
    ("cp852", "IBM852", _CENTRAL),
    ("cp437", "IBM437", _WESTERN),
)
# Subtracted from the shares of the encodings for Vietnamese and Baltic languages, because a list of names from several
# Western languages may contain the same letters.
_DOUBTS = {"cp1257": 0.015, "iso8859-13": 0.015, "cp1258": 0.15}


def decode_guessing(data: bytes, is_markup: bool = False) -> tuple[str, str]:
    """Return the text and, if it was guessed, the encoding. is_markup: use an encoding that HTML or XML declares.

    Raises UnreadableError.
    """
    for mark, encoding, label in _MARKS:
        if data.startswith(mark):
            try:
                return _require_text(data.decode(encoding)), ""
            except UnicodeDecodeError:
                raise UnreadableError(
                    f"is damaged: it begins with the {label} byte order mark, but is not valid {label}",
                    "document_damaged",
                ) from None
    declared = _DECLARED.search(data[:4096]) if is_markup else None
    # Ignore a declaration of UTF-16 or UTF-32: it was read as ASCII, so the file has another encoding. Some programs
    # declare UTF-16 but write UTF-8.
    if declared is not None and not declared[1].lower().startswith((b"utf-16", b"utf-32")):
        try:
            return _require_text(_decode(data, declared[1].decode("ascii"))), ""
        except (LookupError, UnicodeError, ValueError):
            pass  # an unknown or wrong encoding
    if b"\x1b$" in data[:_SAMPLE] and data.isascii():  # escape sequences that select Japanese characters
        with suppress(UnicodeDecodeError):
            return _require_text(data.decode("iso2022_jp_ext")), "ISO-2022-JP"
    if (utf16 := _guess_utf16(data[:_SAMPLE])) is not None:
        return _require_text(data.decode(utf16, "replace")), utf16.upper()
    try:
        return _require_text(data.decode("utf-8")), ""
    except UnicodeDecodeError:
        pass
    text = data.decode("utf-8", "replace")
    if 10 * text.count("\ufffd") < len(text) - len(text.encode("ascii", "ignore")):  # mostly valid UTF-8
        return _require_text(text), "UTF-8"
    codec, name = guess_legacy_encoding(data)
    try:
        return _require_text(data.decode(codec)), name
    except UnicodeDecodeError:
        if codec != "cp1252":
            return _require_text(data.decode(codec, "replace")), name
        return _require_text(data.decode("latin-1")), "ISO-8859-1"


def _guess_utf16(sample: bytes) -> str | None:
    # In UTF-16, spaces and line breaks contain a zero byte, which does not occur in other encodings. With the wrong
    # byte order, ASCII characters become other characters, some of which are unassigned.
    zeros = sample.count(0)
    if not zeros or (zeros < MIN_ZEROS * len(sample) and _is_utf8_text(sample.replace(b"\0", b""))):
        return None
    found = []
    for encoding in ("utf-16-le", "utf-16-be"):
        text = sample[: len(sample) // 2 * 2].decode(encoding, "replace")
        unfit = text.count("\ufffd") + sum(category(each) in ("Cn", "Co", "Cs") for each in text)
        in_ascii = len(text.encode("ascii", "ignore"))
        if unfit <= MAX_UNTEXTUAL_SHARE * len(text) and in_ascii > MIN_ASCII_SHARE * len(text):
            found.append((in_ascii, encoding))
    return max(found)[1] if found else None


def _is_utf8_text(sample: bytes) -> bool:
    try:
        text = codecs.getincrementaldecoder("utf-8")().decode(sample)  # the sample may end within a character
    except UnicodeDecodeError:
        return False
    return len(_UNTEXTUAL.findall(text)) <= MAX_UNTEXTUAL_SHARE * len(text)


def _decode(data: bytes, label: str) -> str:
    encoding = codecs.lookup(_LABELS.get(label.lower(), label)).name
    with suppress(UnicodeDecodeError):  # a few characters may be undefined in the superset
        return data.decode(_SUPERSETS.get(encoding, encoding))
    return data.decode(encoding)


def _require_text(text: str) -> str:
    sample = text[:_SAMPLE]
    if "\0" in sample or len(_UNTEXTUAL.findall(sample)) > MAX_UNTEXTUAL_SHARE * len(sample):
        raise UnreadableError("is neither text nor any other kind of file that can be read", "document_not_text")
    return text


def omit_data(text: str) -> tuple[str, int]:
    """Return the text without Base64 data, and the number of omitted pieces."""
    omitted = 0

    def shortened(found: re.Match[str]) -> str:
        nonlocal omitted
        data = found[0]
        if len(data) < MIN_DATA_CHARACTERS or not all(each.search(data) for each in _KINDS_OF_DIGITS):
            return data  # too short, or not Base64: amino acids or hexadecimal digits, for example
        omitted += 1
        return "[data left out]" + data[len(data.rstrip()) :]

    return _BASE64.sub(shortened, text), omitted


def unfold_lines(data: bytes) -> bytes:
    """Join the folded lines of a calendar or an address card, and decode quoted-printable values."""

    def decoded(found: re.Match[bytes]) -> bytes:
        return found[1] + re.sub(rb"\r?\n", rb"\\n", a2b_qp(found[2]))

    # Lines are joined before decoding, because a character may be split across two lines.
    return _QUOTED_PRINTABLE.sub(decoded, _FOLD.sub(b"", data))


def email_text(data: bytes) -> tuple[str, str, list[str]]:
    """Return a message's subject, text and warnings; attachments are listed but not read. Raises UnreadableError."""
    with _parsed_message(data) as message:
        attached: list[str] = []
        lines, texts = _header_lines(message), _texts(message, attached)
    if attached:
        lines.append(f"Attachments: {', '.join(attached)}")
    warnings = [f"attachments not read: {len(attached)}"] if attached else []
    return str(message["Subject"] or ""), "\n".join([*lines, "", *texts]), warnings


def mailbox_texts(data: bytes, warnings: list[str]) -> Iterator[str]:
    """Yield the messages of an mbox file, in at most MAX_PAGES pages. Raises UnreadableError if none can be read."""
    messages = re.split(rb"(?:\A\s*|\n\r?\n)From (?=[^\r\n]*[0-9]:[0-9])[^\r\n]*+\r?\n(?=[!-9;-~]{1,99}:)", data)[1:]
    if not messages:
        raise UnreadableError("is damaged: it has no messages", "document_damaged")
    problems, at_once = list[UnreadableError](), -(-len(messages) // MAX_PAGES)
    for at in range(0, len(messages), at_once):
        texts = list[str]()
        for each in messages[at : at + at_once]:
            try:
                texts.append(email_text(re.sub(rb"(?m)^>(>*From )", rb"\1", each))[1].rstrip())
            except UnreadableError as error:
                problems.append(error)
        if texts:
            yield "\n\n".join(texts)
    if len(problems) == len(messages):
        raise problems[0]
    if problems:
        warnings.append(f"{len(problems)} of {len(messages)} messages cannot be read and were left out")


def web_archive_text(data: bytes) -> tuple[str, str]:
    """Return the title and visible text of the page in an MHTML file. Raises UnreadableError."""
    with _parsed_message(data) as message:
        pages = (each for each in message.walk() if each.get_content_type() in ("text/html", "application/xhtml+xml"))
        content = next(map(_content, pages), "")
    return html_text(content)


def chunk_text(data: bytes) -> str:
    """Return the text of a file embedded in a document: HTML, MHTML, or plain text. Raises UnreadableError."""
    if re.match(rb"\s*\{\\rtf", data):
        raise UnreadableError("is an RTF document; save it as DOCX", "document_rtf")
    if re.search(rb"^MIME-Version:", data[:2000], re.IGNORECASE | re.MULTILINE):
        return web_archive_text(data)[1]
    text = decode_guessing(data, is_markup=True)[0]
    return html_text(text)[1] if text.lstrip().startswith("<") else text


@contextmanager
def _parsed_message(data: bytes) -> Iterator[EmailMessage]:
    # The standard library may raise the exceptions below for malformed headers, some only when a header is read.
    try:
        message = BytesParser(_class=EmailMessage, policy=policy.default).parsebytes(
            data.removeprefix(codecs.BOM_UTF8).lstrip()  # otherwise, the headers would be parsed as text
        )
        if sum(1 for _ in islice(message.walk(), MAX_PARTS + 2)) > MAX_PARTS + 1:
            raise UnreadableError(f"has more than {MAX_PARTS:,} parts")
        yield message
    except (MessageError, LookupError, ValueError, TypeError, AttributeError, IndexError):
        raise UnreadableError("is damaged: its headers are malformed", "document_damaged") from None


def _header_lines(message: EmailMessage) -> list[str]:
    names = ("From", "To", "Cc", "Date", "Subject")
    return [f"{name}: {one_line(str(message[name]), 1000)}" for name in names if message[name]]


def _texts(part: EmailMessage, attached: list[str]) -> list[str]:
    # Returns the texts of a part, and adds the names (or types) of its attachments to `attached`.
    if part.is_multipart():
        parts: Any = part.get_payload()
        texts = [_texts(each, attached) for each in parts]
        if part.get_content_subtype() == "alternative":
            return _best_alternative(parts, texts)
        if part.get_content_type() == "message/rfc822":  # a forwarded message
            texts = [[*_header_lines(each), "", *own] for each, own in zip(parts, texts, strict=True)]
        return list(chain.from_iterable(texts))
    if part.is_attachment() or part.get_content_maintype() != "text":
        attached.append(one_line(part.get_filename() or part.get_content_type(), 120))
        return []
    return [html_text(_content(part))[1] if part.get_content_subtype() == "html" else _content(part)]


def _best_alternative(parts: Sequence[EmailMessage], texts: Sequence[list[str]]) -> list[str]:
    # Plain text usually comes first, but may only say that another program is needed to read the message. A longer part
    # is preferred only if it is HTML or multipart: others, such as calendars, have many words that are not shown.
    words = [len(_WORD.findall(" ".join(each))) for each in texts]
    best = next((at for at, count in enumerate(words) if count), 0)
    for at, part in enumerate(parts):
        is_page = part.is_multipart() or part.get_content_subtype() == "html"
        best = at if is_page and words[at] > MANY_MORE_WORDS * words[best] else best
    return texts[best] if texts else []


def _content(part: EmailMessage) -> str:
    data = part.get_payload(decode=True)
    if not isinstance(data, bytes):
        return ""
    charset, is_page = part.get_content_charset(), part.get_content_subtype() in ("html", "xhtml+xml")
    if charset is not None or not is_page:  # otherwise, the page may declare its encoding itself
        with suppress(LookupError, UnicodeError):
            return _decode(data, charset or "utf-8")
    return decode_guessing(data, is_markup=is_page)[0]


def guess_legacy_encoding(data: bytes) -> tuple[str, str]:
    """Return the codec and the name of the most probable encoding of text that is not UTF-8 or UTF-16."""
    first = re.search(b"[\x80-\xff]", data)
    start = max(0, first.start() - 16) if first else 0  # all characters before the first are ASCII
    sample = data[start : start + _GUESS_SAMPLE]
    western = _decoded(sample, "cp1252")
    if western and not any(map(str.isalpha, _FOREIGN.findall(western))):
        misplaced = {sign for sign, marked in zip(western, _mark_misplaced(western), strict=True) if sign != marked}
        if len(misplaced) < MIN_MISPLACED:
            return _LATIN[0][:2]  # only signs that occur in text in any language, such as §§, € and “”
    shares = [(_largest_share(_decoded(sample, codec), languages), codec, name) for codec, name, languages in _LATIN]
    if shares[0][0] == 1:
        return _LATIN[0][:2]  # all letters belong to one Western language, as in a listing of its alphabet
    for codec, name in (("euc_jp", "EUC-JP"), ("cp932", "Shift_JIS")):
        text = _words(sample, codec)
        if text and len(_KANA.findall(text)) >= MIN_KANA * len(_FOREIGN.findall(text)):
            return codec, name
    scores = [
        *((_east_asian_score(sample, codec, first_bytes), codec, name) for codec, name, first_bytes in _FIRST_BYTES),
        *((_letter_score(sample, codec, letters), codec, name) for codec, name, letters in _LETTERS),
    ]
    score, codec, name = max(scores, key=lambda each: each[0])
    if score >= MIN_SCORE:
        return codec, name
    share, codec, name = max(shares, key=lambda each: each[0] - _DOUBTS.get(each[1], 0))  # ties go to the first codec
    return (codec, name) if share >= MIN_SCORE else _LATIN[0][:2]


def _decoded(data: bytes, codec: str) -> str:
    try:
        # The sample may end in the middle of a character.
        return codecs.getincrementaldecoder(codec)().decode(data, final=len(data) < _GUESS_SAMPLE)
    except UnicodeDecodeError:
        return ""


def _words(data: bytes, codec: str) -> str:
    # Returns the text if it is valid and most of its non-ASCII characters form whole words; otherwise, an empty string.
    text = _decoded(data, codec)
    runs = _RUNS.findall(text)
    letters = sum(len(run) for _, run, _ in runs)
    in_words = sum(len(run) for _, run, _ in runs if len(run) > 1)
    beside_latin = sum(len(run) for before, run, after in runs if len(run) <= 2 and (before or after))
    return text if in_words >= max(1, MIN_IN_WORDS * letters) and beside_latin <= MAX_BESIDE_LATIN * letters else ""


def _mark_misplaced(text: str) -> str:
    # Replaces capital letters after small letters, and signs between small letters, with U+FFFD.
    def mark(found: re.Match[str]) -> str:
        before, each, after = found.groups()
        is_sign = (not each.isalpha() or each in "ªº") and not combining(each) and each not in _WITHIN_WORDS
        return f"{before}\ufffd" if each.isupper() or (is_sign and after) else found[0]

    return _AFTER_SMALL.sub(mark, text)


def _largest_share(text: str, languages: Iterable[Collection[str]]) -> float:
    # For the language that fits best, returns the share of non-ASCII characters that are its letters or punctuation.
    foreign = Counter(_FOREIGN.findall(_MEASURES.sub("", _mark_misplaced(text).lower())))
    signs = sum(count for each, count in foreign.items() if each in _PUNCTUATION)
    found = max(sum(foreign[each] for each in letters) for letters in languages)
    return (1 + signs + found) / (1 + foreign.total()) if text else 0


def _letter_score(data: bytes, codec: str, letters: str) -> float:
    text = _words(data, codec)
    words = [run for _, run, _ in _RUNS.findall(text)]
    if sum(word in (word.lower(), word.upper(), word.capitalize()) for word in words) < 0.8 * len(words):
        return 0  # too many words mix capital and small letters
    weights = {letter: 1 - at / len(letters) for at, letter in enumerate(letters)}
    foreign = [each for each in _FOREIGN.findall(text.lower()) if each not in _PUNCTUATION]
    likelihood = 0.8 if letters[0] != letters[0].upper() and all(map(str.isupper, words)) else 1  # capital letters only
    foreign += _APOSTROPHE.findall(text)
    return likelihood * sum(weights.get(each, -0.5) for each in foreign) / len(foreign) if foreign else 0


def _east_asian_score(data: bytes, codec: str, first_bytes: Collection[int]) -> float:
    characters = [each.encode(codec) for each in _FOREIGN.findall(_words(data, codec))]
    frequent = sum(len(each) == 2 and each[0] in first_bytes for each in characters)
    return MAX_LETTER_SCORE * frequent / len(characters) if frequent > MIN_FREQUENT * len(characters) else 0
