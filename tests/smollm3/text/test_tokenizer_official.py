"""SmolLM3's tokenizer, if its file exists in ../shared/data: encoding and decoding equal the `tokenizers` library's."""

from __future__ import annotations

import random
import re
import time
import unicodedata
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from long_tests import is_long
from tokenizers import models

from notso.smollm3.text.tokenizer import Tokenizer

ROOT = Path(__file__).parents[3]
STRINGS = 12_000 if is_long("engine") else 3_000

ALPHABETS = [
    "abcdefghij ABC",
    "0123456789 .,-+/:",
    " \t\n\r\x0b\x0c\x1c\x1f\x85\xa0\u2003\u2028\u3000",
    "a\n \r\n\t!?",
    "'sS'tT'reRE'veVE'mM'llLL'dD\u017f’",
    "éèüßñçøåœžšč ÀÉ",
    "e\u0301\u0302\u0327a\u0308\u200d\u200c\ufe0f ",
    "你好世界漢字かなカナ한국어。、 ",
    "приветмир ελληνικά עברית العربية हिन्दी ไทย ",
    "👩👨👧🎉🏳🌈🏿\u200d\ufe0f 🇩🇪 ❤",
    "<|im_end>/thinktool_call{}\"':",
    "①²³½Ⅷ٣४൧𝟙𝔸 ",
    "!@#$%^&*()_+-=[]{}|;:,.<>/?~`\\\n",
]
WORDS = re.findall(
    r"\S+", "the quick brown fox Jumps over 1234 lazy dogs don't we'll I'M def return self.value += 3.14 <div> a://x.y"
)


def _strings() -> Iterator[str]:
    """Yield varied text, the same in each run: words, alphabets, any code points, random bytes, parts of files."""
    chance = random.Random(20260101)
    any_character = [chr(c) for c in range(0x20000) if unicodedata.category(chr(c)) not in ("Cs", "Cn")]
    files = [path.read_text() for path in sorted(ROOT.glob("src/notso/smollm3/*.py"))]
    for number in range(STRINGS):
        length = chance.choice((1, 2, 3, 5, 10, 30, 100))
        match number % 6:
            case 0:
                yield "".join(chance.choices(chance.choice(ALPHABETS), k=length))
            case 1:
                yield "".join("".join(chance.choices(chance.choice(ALPHABETS), k=3)) for _ in range(length // 3 + 1))
            case 2:
                yield chance.choice((" ", "  ", "\n", " \n", "")).join(chance.choices(WORDS, k=length))
            case 3:
                yield "".join(chance.choices(any_character, k=length))
            case 4:
                yield chance.randbytes(length).decode(chance.choice(("latin-1", "utf-8")), "replace")
            case _:
                text = chance.choice(files)
                start = chance.randrange(len(text))
                yield text[start : start + 3 * length]


@pytest.fixture(scope="module")
def strings() -> list[str]:
    found = list(_strings())
    assert len(set(found)) >= 0.8 * STRINGS
    return found


@pytest.mark.parametrize("source", ["metadata", "tokenizer.json"])
def test_official_ids_match_the_library(
    official_metadata: dict[str, Any],
    official_tokenizer: Tokenizer,
    official_oracle: tokenizers.Tokenizer,
    strings: list[str],
    source: str,
) -> None:
    tokenizer = official_tokenizer
    if source == "tokenizer.json":
        tokenizer = Tokenizer.from_gguf(official_metadata, ROOT.parent / "shared" / "data" / "model.gguf")
    expected = [encoding.ids for encoding in official_oracle.encode_batch(strings)]
    assert tokenizer.encode_batch(strings, control=True) == expected
    plain = tokenizer.encode_batch(strings)
    for text, ids, theirs in zip(strings, plain, expected, strict=True):
        assert not tokenizer.special_ids.intersection(ids)
        assert ids == theirs or tokenizer.special_ids.intersection(theirs)
        assert tokenizer.decode(ids) == text


def test_all_256_added_tokens_are_plain_text_in_content(official_tokenizer: Tokenizer) -> None:
    assert len(official_tokenizer.special_ids) == 256
    assert len(official_tokenizer.user_defined_ids) == 8
    text = "".join(f"a{special}\n" for special in official_tokenizer.specials)
    assert not official_tokenizer.special_ids.intersection(official_tokenizer.encode(text))
    with_control = official_tokenizer.encode(text, control=True)
    assert [token for token in with_control if token in official_tokenizer.special_ids] == list(range(128000, 128256))


def test_official_token_ids_match_published_values(official_tokenizer: Tokenizer) -> None:
    tokenizer = official_tokenizer
    assert tokenizer.vocab_size == 128256
    assert tokenizer.end_ids == {128001, 128008, 128009, 128012}
    assert (tokenizer.think_open_id, tokenizer.think_close_id) == (128002, 128003)
    assert (tokenizer.tool_call_open_id, tokenizer.tool_call_close_id) == (128015, 128016)
    assert tokenizer.encode("user\n\nfoo") == [882, 271, 8134]  # one pre-token, not [882, 198, 198, 8134]


def test_entries_unreachable_by_merges_are_single_tokens(
    official_metadata: dict[str, Any], official_tokenizer: Tokenizer
) -> None:
    """ignore_merges: with merges only, 588 of the ordinary entries would be split."""
    ids = {text: token for token, text in enumerate(official_metadata["tokenizer.ggml.tokens"][:128000])}
    merges = [tuple(merge.split(" ")) for merge in official_metadata["tokenizer.ggml.merges"]]
    always_merging = models.BPE(ids, merges)
    split = [token for text, token in ids.items() if len(always_merging.tokenize(text)) > 1]
    assert len(split) == 588
    words = [official_tokenizer.decode([token]) for token in split]
    whole = [official_tokenizer.encode(word) == [token] for word, token in zip(words, split, strict=True)]
    assert all(whole)


def _seconds(work: Callable[[], object]) -> float:
    """Return the minimum CPU time of three runs, including threads."""
    best = float("inf")
    for _ in range(3):
        start = time.process_time()
        work()
        best = min(best, time.process_time() - start)
    return best


def test_tokenizer_loads_about_as_fast_as_the_library(
    official_metadata: dict[str, Any], official_oracle: tokenizers.Tokenizer
) -> None:
    """Measured 0.3 s, and 0.45 s with the library; a slow machine affects both."""
    file = official_oracle.to_str()
    ours = _seconds(lambda: Tokenizer.from_gguf(official_metadata))
    assert ours < 2 * _seconds(lambda: tokenizers.Tokenizer.from_str(file))


def test_official_encoding_time_is_near_linear(official_tokenizer: Tokenizer) -> None:
    """For eight times the text, quadratic time would be 64 times as long."""
    for text in ("a", " ", "e\u0301", "\n "):
        short, long = (
            _seconds(partial(official_tokenizer.encode, text * (size // len(text.encode())))) for size in (2**15, 2**18)
        )
        assert long < 24 * short
