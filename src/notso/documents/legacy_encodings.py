"""Guess of the encoding of text from before Unicode, from the frequencies of letters and characters."""

from __future__ import annotations

import codecs
import re
from collections.abc import Collection

_SAMPLE = 1 << 15
MIN_SCORE = 0.55
MAX_LETTER_SCORE = 0.8  # approximately
MIN_FREQUENT = 0.85
MIN_KANA = 0.15
_FOREIGN = re.compile("[^\0-\x7f]")
# In other scripts, letters form words of their own. In Western text, they are within words of ASCII letters, where two
# bytes may look like a Chinese character.
_RUNS = re.compile("([A-Za-z]?)([^\0-\x7f]+)([A-Za-z]?)")
MIN_IN_WORDS, MAX_BESIDE_LATIN = 0.6, 0.4
_KANA = re.compile("[\u3041-\u30fe]")
# Signs that are letters in other encodings: m³, £5, ½.
_MEASURES = re.compile(r"\b[a-zµ]{0,2}[¹²³](?!\w)|[£¥¢±×](?=\W?\d)|(?<![^\W\d])[¼½¾](?![^\W\d])|µ")
_MARKS = frozenset("\xa0«»‘’‚“”„†•…–—€§©®°·º")

_CYRILLIC = "оеаинтсрвлкмдпуяыьгзбчйхжіїшюцщэфєъёґ"
# Encoding, name shown to users, and the letters of the language by decreasing frequency.
_LETTERS = (
    ("cp1251", "Windows-1251", _CYRILLIC),
    ("koi8-r", "KOI8-R", _CYRILLIC),
    ("cp866", "IBM866", _CYRILLIC),
    ("cp1253", "Windows-1253", "αοιετσνηυρπκμλςωγδόίθχάέήύφξβώζψ"),
    ("cp1255", "Windows-1255", "יוהלאתמרשבנםחדקעפכטגןצסזץףך"),
    ("cp1256", "Windows-1256", "اليمونرتبةعدسفهكحقجأشصطخىضذزثئغإءظؤآپچژگ"),
    ("cp874", "Windows-874", "านรอกเงม่ยลวดท้ีัคตสบปะิ์ชหแำไขพจุโึ็ถซผณศธษูใภ"),
)
# Encoding, name, and the first bytes of frequent characters.
_FIRST_BYTES = (
    ("cp949", "EUC-KR", frozenset({0xA1, 0xA3, *range(0xB0, 0xC9)})),
    ("gb18030", "GB18030", frozenset({0xA1, 0xA3, *range(0xB0, 0xD8)})),
    ("big5hkscs", "Big5", frozenset({0xA1, *range(0xA4, 0xC7)})),
    ("cp932", "Shift_JIS", frozenset({0x81, 0x82, 0x83, *range(0x88, 0x99)})),
)
# Encoding, name, and the letters of each language besides ASCII.
_LATIN = (
    (
        *("cp1252", "Windows-1252"),
        ("àâçéèêëîïôœùûüæ", "äöüßé", "áéíóúüñ¿¡ª", "áâãàçéêíóôõúüª", "àèéìòùî", "éëïóöüè", "åäöé", "æøåé"),
    ),
    ("cp1250", "Windows-1250", ("ąćęłńóśźż", "áčďéěíňóřšťúůýžäôĺľŕ", "áéíóöőúüű", "čćđšž", "ăâîşţ")),
    ("iso8859-2", "ISO-8859-2", ("ąćęłńóśźż", "áčďéěíňóřšťúůýžäôĺľŕ", "áéíóöőúüű", "čćđšž", "ăâîşţ")),
    ("cp1254", "Windows-1254", ("çğıöşüâîû\u0307",)),
)  # fmt: skip


def guess_legacy_encoding(data: bytes) -> tuple[str, str]:
    """Return the codec and the name of the most probable encoding of text that is not UTF-8 or UTF-16."""
    first = re.search(b"[\x80-\xff]", data)
    start = max(0, first.start() - 16) if first else 0  # the characters before it are ASCII
    sample = data[start : start + _SAMPLE]
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
    shares = [
        (max(_share(_decoded(sample, codec), letters) for letters in languages), codec, name)
        for codec, name, languages in _LATIN
    ]
    share, codec, name = max(shares, key=lambda each: each[0])  # the first one of equals
    return (codec, name) if share >= MIN_SCORE else _LATIN[0][:2]


def _decoded(data: bytes, codec: str) -> str:
    try:
        # A sample may end within a character.
        return codecs.getincrementaldecoder(codec)().decode(data, final=len(data) < _SAMPLE)
    except UnicodeDecodeError:
        return ""


def _words(data: bytes, codec: str) -> str:
    # Returns the text if it is valid and most characters outside ASCII form words of their own.
    text = _decoded(data, codec)
    runs = _RUNS.findall(text)
    letters = sum(len(run) for _, run, _ in runs)
    in_words = sum(len(run) for _, run, _ in runs if len(run) > 1)
    beside_latin = sum(len(run) for before, run, after in runs if len(run) <= 2 and (before or after))
    return text if in_words >= max(1, MIN_IN_WORDS * letters) and beside_latin <= MAX_BESIDE_LATIN * letters else ""


def _share(text: str, letters: Collection[str]) -> float:
    foreign = _FOREIGN.findall(_MEASURES.sub("", text.lower()))
    return (1 + sum(each in letters or each in _MARKS for each in foreign)) / (1 + len(foreign)) if text else 0


def _letter_score(data: bytes, codec: str, letters: str) -> float:
    text = _words(data, codec)
    words = [run for _, run, _ in _RUNS.findall(text)]
    if sum(word in (word.lower(), word.upper(), word.capitalize()) for word in words) < 0.8 * len(words):
        return 0  # capital letters within words
    weights = {letter: 1 - at / len(letters) for at, letter in enumerate(letters)}
    foreign = [each for each in _FOREIGN.findall(text.lower()) if each not in _MARKS]
    likelihood = 0.8 if letters[0] != letters[0].upper() and all(map(str.isupper, words)) else 1  # capital letters only
    return likelihood * sum(weights.get(each, -0.5) for each in foreign) / len(foreign) if foreign else 0


def _east_asian_score(data: bytes, codec: str, first_bytes: Collection[int]) -> float:
    characters = [each.encode(codec) for each in _FOREIGN.findall(_words(data, codec))]
    frequent = sum(len(each) == 2 and each[0] in first_bytes for each in characters)
    return MAX_LETTER_SCORE * frequent / len(characters) if frequent > MIN_FREQUENT * len(characters) else 0
