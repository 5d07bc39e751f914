"""Quotations: whatever is sampled between `[[n: ` and `]]` is a part of source n."""

from __future__ import annotations

import itertools
import os
import random
import re
import threading
import unicodedata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from notso.documents.citations import locate_quote, matches_when_folded
from notso.smollm3 import (
    Completion,
    Engine,
    InvalidRequestError,
    Message,
    QuoteSource,
    RequestOptions,
    SamplingParams,
)
from notso.smollm3.sampling import quote_index, quote_index_child
from notso.smollm3.sampling.grammar import GrammarCompiler
from notso.smollm3.sampling.quote_index import QUOTE_BYTES, Interval, QuoteIndex, QuoteLimits, TokenTexts
from notso.smollm3.sampling.quotes import LIKELIEST, LOOKUPS, NARROW, Quotation, QuotedOutput, QuoteManager
from notso.smollm3.sampling.structured_output import structured_output_for
from notso.smollm3.text.tokenizer import Tokenizer
from notso.system.confinement import ConfinedWorkError

# Letters of twelve scripts; the last five are written without spaces.
SCRIPTS = [
    "abcdefghijklmnopqrstuvwxyzäöüß",
    "абвгдежзийклмнопрстуфхцчшщыьэюя",
    "αβγδεζηθικλμνξοπρστυφχψω",
    "אבגדהוזחטיכלמנסעפצקרשת",
    "ابتثجحخدذرزسشصضطظعغفقكلمنهوي",
    "कखगघङचछजझञटठडढणतथदधनपफबभमयरलवशषसह",
    "가나다라마바사아자차카타파하",
    "的一是在不了有和人这中大为上个国我以要他时来用们",
    "あいうえおかきくけこさしすせそたちつてとなにぬねの",
    "กขคงจฉชซญดตถทนบปผฝพฟมยรลวสหอ",
    "ກຂຄງຈສຊຍດຕຖທນບປຜຝພຟມຢຣລວຫອຮ",
    "កខគឃងចឆជឈញដឋឌឍណតថទធនបផពភមយរលវសហឡអ",
]
WITHOUT_BLANKS = 5
MARK = re.compile(r"\[\[(\d+): (.*?)\]\]", re.DOTALL)
WORD_BREAK_TEST = Path(os.environ.get("WORD_BREAK_TEST", "/usr/share/unicode/auxiliary/WordBreakTest.txt"))
# Number of quotations in each long test; the default run uses fewer.
QUOTES = int(os.environ.get("NOTSO_QUOTES", "1000"))


def written(rng: random.Random, script: int, words: int) -> str:
    letters, is_joined = SCRIPTS[script], script >= len(SCRIPTS) - WITHOUT_BLANKS
    known = ["".join(rng.choices(letters, k=rng.randint(1, 9))) for _ in range(max(6, words // 3))]
    known += ["[1]", "12,5", "don't", "]", "[[2: x]]", "<tool_call>", "<|im_end|>", "\u202e", "e\u0301a"]
    parts = []
    for _ in range(words):
        parts.append(rng.choice(known))
        parts.append(rng.choice(["", "", "。"]) if is_joined else rng.choice([" "] * 6 + [", ", ".\n", " – "]))
    return "".join(parts)


def words_of(text: str) -> tuple[int, int]:
    """Return the number of words, and of characters in scripts without spaces, by definition and without the index."""
    alone = sum(character in "".join(SCRIPTS[-WITHOUT_BLANKS:]) for character in text)
    spaced = "".join(" " if each in "".join(SCRIPTS[-WITHOUT_BLANKS:]) else each for each in text)
    return len(re.findall(r"\w[\w\u0300-\u036f]*(?:['.,]\w+)*", spaced)), alone


@pytest.fixture(scope="module")
def quotes(demo_engine: Engine) -> QuoteManager:
    return QuoteManager(demo_engine.tokenizer)


def draw(
    quotes: QuoteManager, tokenizer: Tokenizer, sources: list[str], number: int, rng: np.random.Generator, sharp: float
) -> str:
    """Sample a quotation of a source from random logits."""
    held = quotes.output([QuoteSource(each) for each in sources], None, f"So [[{number}:")
    assert isinstance(held, QuotedOutput)
    tokens = list[int]()
    for step in range(2 * QUOTE_BYTES):
        logits = (sharp * rng.standard_normal(tokenizer.vocab_size)).astype(np.float32)
        restricted = held.restrict(logits, False)
        if step == 0:  # begin the quotation, because other text is allowed as well
            others = np.setdiff1d(np.arange(tokenizer.vocab_size), quotes.vocabulary.spaced)
            restricted[others] = -np.inf
        token = int(restricted.argmax())
        assert np.isfinite(restricted[token]), "a quotation must have a next token"
        tokens.append(token)
        held.consume(token, False, 10_000)
        if held._open is None:
            break
    found = MARK.match(f"[[{number}:" + b"".join(map(tokenizer.token_bytes, tokens)).decode())
    assert found is not None
    return found[2]


def check(source: str, words: str) -> None:
    places = [at.start() for at in re.finditer(f"(?={re.escape(words)})", source)]
    assert places, "a quotation is a part of its source"
    assert any(not (at and source[at - 1 : at + 1].isalnum()) or words_of(words)[1] for at in places)
    assert "]]" not in words and "<tool_call>" not in words and "<|im_end|>" not in words
    count, alone = words_of(words)
    assert count + alone / 2 >= 3 and count / 60 + alone / 200 <= 1.1  # the last word may be truncated at 64 characters
    assert len(words.encode()) <= QUOTE_BYTES


def quote_many(quotes: QuoteManager, tokenizer: Tokenizer, count: int, seed: int) -> None:
    rng, drawn = random.Random(seed), np.random.default_rng(seed)
    sources = [written(rng, at % len(SCRIPTS), rng.choice([30, 200, 900])) for at in range(40)]
    for at in range(count):
        number = at % len(sources) + 1
        check(sources[number - 1], draw(quotes, tokenizer, sources, number, drawn, rng.choice([0.1, 1, 20])))


def test_every_quotation_is_verbatim(quotes: QuoteManager, demo_engine: Engine) -> None:
    quote_many(quotes, demo_engine.tokenizer, 120, 1)


@pytest.mark.long("quotes")
def test_many_quotations_are_verbatim(quotes: QuoteManager, demo_engine: Engine) -> None:
    quote_many(quotes, demo_engine.tokenizer, QUOTES, 2)


def naive_places(source: str) -> Iterator[tuple[bytes, int]]:
    """Yield the text from each word's beginning."""
    for found in re.finditer(r"\w+", source):
        yield source[found.start() :].encode() + b"\xff", len(source[: found.start()].encode())


def test_index_places_are_sorted_by_text() -> None:
    rng = random.Random(3)
    source = " ".join(rng.choices(["ab", "abc", "b", "ca"], k=3000))
    index = QuoteIndex(source, QuoteLimits(least_words=1))
    expected = [at for _, at in sorted(naive_places(source))]
    assert index.starts.tolist() == expected
    for _ in range(200):
        at = rng.randrange(len(source) - 12)
        part = source[at : at + rng.randint(1, 12)].encode()
        found = index.narrow_interval(index.whole, part)
        begins = [place for text, place in naive_places(source) if text.startswith(part)]
        assert sorted(index.starts[found.low : found.high].tolist()) == begins


def official_boundaries() -> list[tuple[str, list[int]]]:
    """Return texts from the Unicode Character Database, with the positions of word boundaries according to UAX 29."""
    if not WORD_BREAK_TEST.is_file():
        pytest.skip(f"needs {WORD_BREAK_TEST} (Debian: unicode-data), or its path as WORD_BREAK_TEST")
    found = []
    for line in WORD_BREAK_TEST.read_text(encoding="utf-8").splitlines():
        signs = line.partition("#")[0].split()
        if signs:
            text = "".join(chr(int(each, 16)) for each in signs[1::2])
            found.append((text, [at for at, each in enumerate(signs[::2]) if each == "÷"]))
    return found


def word_starts(text: str, boundaries: list[int]) -> list[int]:
    """Return the starts of segments with a letter or digit, and of all characters in scripts without spaces."""
    return [
        at
        for at, end in itertools.pairwise(boundaries)
        if any(unicodedata.category(each) in ("Lu", "Ll", "Lt", "Lm", "Lo", "Nl", "Nd") for each in text[at:end])
    ]


def our_boundaries(text: str) -> list[int]:
    classes = quote_index._classes(np.array([ord(each) for each in text], np.uint32))
    return [*np.flatnonzero(quote_index._word_starts(classes)).tolist(), len(text)]


def test_word_starts_match_unicode_word_break_data() -> None:
    boundaries = official_boundaries()
    assert len(boundaries) > 1_500
    for text, expected in boundaries:
        # Here, each kana is a word, like the other characters of scripts without spaces.
        if "\u3031" not in text:
            assert word_starts(text, our_boundaries(text)) == word_starts(text, expected), ascii(text)


@pytest.mark.parametrize(
    ("text", "starts"),
    [
        ("can't stop 3.5,7 o.k", [0, 6, 11, 17]),
        ('צה"ל של', [0, 5]),
        ("a_b 1_2 _", [0, 4]),
        ("日本 abc カナ", [0, 1, 3, 7, 8]),
        ("e\u0301a \u200dz", [0, 5]),
    ],
)
def test_word_starts_of_selected_texts(text: str, starts: list[int]) -> None:
    assert word_starts(text, our_boundaries(text)) == starts


def test_repetitive_texts_have_few_index_places() -> None:
    index = QuoteIndex("word " * 100_000)
    assert 0 < len(index.starts) < 400
    assert 0 < len(QuoteIndex("x" * 500_000, QuoteLimits(least_words=1)).starts) < 40
    assert not len(QuoteIndex("too short a").starts) and not len(QuoteIndex("").starts)


@pytest.mark.parametrize("escaped", [False, True])
def test_long_text_is_indexed_in_a_child_process(
    quotes: QuoteManager, escaped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from notso.smollm3.sampling import quotes as module

    source = (
        "".join(written(random.Random(7), at, 300) for at in range(len(SCRIPTS))) + '"\\\x01\n four more words here'
    )
    here = quotes.index(source, escaped=escaped)
    monkeypatch.setattr(module, "CHARACTERS_INDEXED_HERE", 1_000)
    there = QuoteManager(quotes._tokenizer).index(source, escaped=escaped)
    assert there.content == here.content and len(here.starts)
    for ours, theirs in zip(here.places, there.places, strict=True):
        assert np.array_equal(ours, theirs) and ours.dtype == theirs.dtype
        assert not theirs.flags.writeable and ours.flags.writeable
    for each in (b"", b"\0" * 16 + b"more", (1 << 40).to_bytes(8, "little") * 2, b"\xff" * 16):
        with pytest.raises(ConfinedWorkError, match="index"):
            quote_index_child.deserialize_places(each, 10)
    monkeypatch.setattr(quote_index_child, "PROGRAM", "raise SystemExit(1)")
    assert np.array_equal(QuoteManager(quotes._tokenizer).index(source, escaped=escaped).starts, here.starts), (
        "built here"
    )


def test_slow_indexing_delays_only_its_own_request(demo_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    from notso.smollm3.sampling import quotes as module

    begun, may_end, compute_places = threading.Event(), threading.Event(), module.compute_places

    def slow(*given: Any, **more: Any) -> Any:
        begun.set()
        may_end.wait()
        return compute_places(*given, **more)

    def ask(source: str) -> str:
        options = RequestOptions(thinking=False, continue_last=True, sources=(QuoteSource(source),))
        messages = [Message("user", "Quote"), Message("assistant", "[[1: ")]
        return demo_engine.submit(messages, SamplingParams(max_tokens=60, stop=("]]",)), options).result().text

    monkeypatch.setattr(module, "CHARACTERS_INDEXED_HERE", 1_000)
    monkeypatch.setattr(module, "compute_places", slow)
    hostile, answers = "word " * 400 + "at the end", list[str]()
    other = threading.Thread(target=lambda: answers.append(ask(hostile)))
    other.start()
    assert begun.wait(60)
    assert ask("one two three four five").startswith(("one two", "two three"))
    assert not answers
    may_end.set()
    other.join()
    assert answers[0] in hostile


def test_wide_and_narrow_intervals_allow_the_same_tokens(
    quotes: QuoteManager, demo_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, drawn = random.Random(4), np.random.default_rng(4)
    source = written(rng, 0, 6_000)
    index = quotes.index(source)
    assert index.whole.high > NARROW
    vocabulary = quotes.vocabulary
    for lead in (b"", b" "):
        from notso.smollm3.sampling import quotes as module

        logits = drawn.standard_normal(vocabulary.size).astype(np.float32)
        monkeypatch.setattr(module, "NARROW", 1 << 30)
        exact = set(module.Quotation(index, vocabulary, lead).allowed_tokens(logits).tolist())
        monkeypatch.setattr(module, "NARROW", 0)
        monkeypatch.setattr(module, "LIKELIEST", 1 << 30)
        assert set(module.Quotation(index, vocabulary, lead).allowed_tokens(logits).tolist()) == exact


def test_mask_is_computed_once_per_token(
    quotes: QuoteManager, demo_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    from notso.smollm3.sampling import quotes as module

    counted = list[int]()
    allowed_tokens = module.Quotation.allowed_tokens

    def count(self: module.Quotation, logits: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        counted.append(1)
        return allowed_tokens(self, logits)

    monkeypatch.setattr(module.Quotation, "allowed_tokens", count)
    options = RequestOptions(thinking=False, continue_last=True, sources=(QuoteSource("one two three four five"),))
    messages = [Message("user", "Quote"), Message("assistant", "Look: [[1: ")]
    answer = demo_engine.submit(messages, SamplingParams(max_tokens=60, temperature=1, seed=5), options).result()
    assert answer.text.startswith(("one two three four", "two three four five"))
    assert answer.usage is not None
    assert 4 <= len(counted) <= answer.usage.completion_tokens


def test_mark_without_a_source_cannot_start_a_quotation(quotes: QuoteManager, demo_engine: Engine) -> None:
    tokenizer = demo_engine.tokenizer
    for started in ("See [[2:", "See [[0:", "See [[1:"):
        held = quotes.output([QuoteSource("a few words that are quoted" * (started == "See [[1:"))], None, started)
        assert held is not None
        allowed = np.flatnonzero(np.isfinite(held.restrict(np.zeros(tokenizer.vocab_size, np.float32), False)))
        spaced = np.intersect1d(allowed, quotes.vocabulary.spaced)
        assert bool(len(spaced)) == (started == "See [[1:")
        assert len(allowed) > len(spaced)  # not a quotation, but an index such as a[[1:2]]
    free = quotes.output([QuoteSource("a few words that are quoted")], None, "See [[none")
    assert free is not None
    assert np.isfinite(free.restrict(np.zeros(tokenizer.vocab_size, np.float32), False)).all()


@pytest.mark.parametrize(
    "words", ["The quick bro", "The quick brown fox", "The quick brown fox]", "no such words", "fox jumps [[ov"]
)
def test_continued_quotation_remains_a_quotation(demo_engine: Engine, words: str) -> None:
    source = "The quick brown fox jumps [[over the lazy dog. Then the slow white cat sleeps under the busy tree."
    options = RequestOptions(thinking=False, continue_last=True, sources=(QuoteSource(source),))
    messages = [Message("user", "Quote"), Message("assistant", f"As in [[1: a]], see [[1: {words}")]
    for seed in range(4):
        answer = demo_engine.submit(messages, SamplingParams(max_tokens=60, temperature=1.5, seed=seed), options)
        quotation, mark, _ = (words + answer.result().text).partition("]]")
        assert words not in source + "]" or (mark and quotation in source)


def test_mark_in_a_continued_call_starts_no_quotation(quotes: QuoteManager, demo_engine: Engine) -> None:
    started = '<tool_call>\n{"name": "note", "arguments": {"text": "[[1: The quick brown'
    options = RequestOptions(tools=[{"type": "function", "function": {"name": "note"}}])
    tokenizer = demo_engine.tokenizer
    calls = structured_output_for(options, tokenizer, GrammarCompiler(tokenizer), may_think=False, started=started)
    output = quotes.output([QuoteSource("The quick brown fox jumps over the lazy dog.")], calls, started)
    assert isinstance(output, QuotedOutput) and output._open is None


def test_invalid_sources_are_refused() -> None:
    with pytest.raises(InvalidRequestError, match="sources"):
        RequestOptions(sources=("text",))  # type: ignore[arg-type]
    with pytest.raises(InvalidRequestError, match="sources"):
        QuoteSource("\ud800")


class CountedLookups(dict[bytes, int]):
    """A dict that counts lookups."""

    count = 0

    def __getitem__(self, text: bytes) -> int:
        self.count += 1
        return super().__getitem__(text)

    def __contains__(self, text: object) -> bool:
        self.count += 1
        return super().__contains__(text)


@pytest.fixture
def examined(quotes: QuoteManager, monkeypatch: pytest.MonkeyPatch) -> dict[str, list[int]]:
    """Record how much each mask examines: places of a narrow interval, tokens of a wide one, and token lookups."""
    found: dict[str, list[int]] = {"places": [], "tokens": [], "lookups": []}
    continuations, matching_tokens, allowed_tokens = (
        QuoteIndex.continuations,
        QuoteIndex.matching_tokens,
        Quotation.allowed_tokens,
    )
    ids = CountedLookups(quotes.vocabulary.ids)

    def count_places(self: QuoteIndex, found_: Interval) -> Any:
        found["places"].append(found_.high - found_.low)
        return continuations(self, found_)

    def count_tokens(self: QuoteIndex, found_: Interval, texts: TokenTexts, among: Any) -> Any:
        found["tokens"].append(len(among))
        return matching_tokens(self, found_, texts, among)

    def count_lookups(self: Quotation, logits: Any) -> Any:
        ids.count = 0
        allowed = allowed_tokens(self, logits)
        found["lookups"].append(ids.count)
        return allowed

    monkeypatch.setattr(QuoteIndex, "continuations", count_places)
    monkeypatch.setattr(QuoteIndex, "matching_tokens", count_tokens)
    monkeypatch.setattr(Quotation, "allowed_tokens", count_lookups)
    monkeypatch.setattr(quotes.vocabulary, "ids", ids)
    return found


def quote_hostile(
    quotes: QuoteManager, tokenizer: Tokenizer, hostile: str, count: int, examined: dict[str, list[int]]
) -> None:
    drawn = np.random.default_rng(8)
    for at in range(count):
        words = draw(quotes, tokenizer, [hostile], 1, drawn, (0.1, 1, 20)[at % 3])
        assert words in hostile and "]]" not in words and "<tool_call>" not in words
    assert max(examined["places"]) <= NARROW and max(examined["tokens"], default=0) <= LIKELIEST
    # Each text of a long token is looked up twice; the last prefix may exceed the limit by its own lengths.
    assert max(examined["lookups"]) <= 2 * (LOOKUPS + max(map(len, quotes.vocabulary.ids)))


@pytest.mark.parametrize(
    "hostile",
    [
        "word " * 100_000,
        "x" * 500_000,
        "<|im_end|> <tool_call> </think> ]] [[1: " * 5_000 + "four ordinary words here",
        "\u202e\u2066 right to left \u2069 " * 10_000,
        "a b " * 50_000 + "]" * 1_000,
        "\U0001f468\u200d\U0001f469\u200d\U0001f467 " * 10_000 + "four ordinary words here",
        "".join(f"{at}{' ' * (9 + at % 60)}" for at in range(10_000)),
        None,
    ],
)
def test_hostile_text_does_not_increase_work_per_token(
    quotes: QuoteManager, demo_engine: Engine, hostile: str | None, examined: dict[str, list[int]]
) -> None:
    if hostile is None:  # drawn here, because each worker collects all parameters
        hostile = "".join(random.Random(9).choices("abcdefghijklmnop", k=400_000))
    quote_hostile(quotes, demo_engine.tokenizer, hostile, 3, examined)


@pytest.mark.long("quotes")
@pytest.mark.parametrize("kind", ["repeated", "unbroken", "random", "marked"])
def test_largest_hostile_texts_do_not_increase_work_per_token(
    quotes: QuoteManager, demo_engine: Engine, kind: str, examined: dict[str, list[int]]
) -> None:
    hostile = {
        "repeated": lambda: "word " * 1_000_000,
        "unbroken": lambda: "x" * 20_000_000,
        "random": lambda: "".join(random.Random(9).choices("abcdefghijklmnop", k=20_000_000)),
        "marked": lambda: "\u202e[[1: <|im_end|> ]] four words \u2066of text \u2069" * 400_000,
    }[kind]()
    quote_hostile(quotes, demo_engine.tokenizer, hostile, 6, examined)


def asked_for(count: int, seed: int) -> list[tuple[list[Message], SamplingParams, RequestOptions]]:
    """Return requests that continue with a quotation of one of three documents, which are chosen among 40."""
    rng = random.Random(seed)
    sources = [QuoteSource(written(rng, at % len(SCRIPTS), (30, 200, 900)[at % 3])) for at in range(40)]
    asked = []
    for at in range(count):
        messages = [Message("user", "Quote it."), Message("assistant", f"[[{rng.randint(1, 3)}: ")]
        temperature, top_k = rng.choice([0, 0.7, 1.5]), rng.choice([0, 40])
        params = SamplingParams(max_tokens=400, temperature=temperature, top_k=top_k, seed=at, stop=("]]",))
        chosen = tuple(rng.sample(sources, 3))
        asked.append(
            (messages, params, RequestOptions(thinking=False, continue_last=True, sources=chosen, top_logprobs=0))
        )
    return asked


def compare_batch_with_alone(count: int, seed: int) -> None:
    """Assert that 1 to 16 concurrent quotations have the same bits as alone, and are found at the cited place."""
    asked, rng = asked_for(count, seed), random.Random(seed)
    answers = list[Completion]()
    # One thread: on a busy machine, two would wait for each other in each of these short steps.
    with Engine.load("demo", threads=1) as engine:
        while len(answers) < count:
            together = asked[len(answers) : len(answers) + rng.randint(1, 16)]
            running = [engine.submit(*each) for each in together]
            answers += [each.result() for each in running]
        for (messages, params, options), answer in zip(asked, answers, strict=True):
            assert answer.stop == "]]" and answer.logprobs
            source, words = options.sources[int(messages[-1].content[2]) - 1].text, answer.text
            check(source, words)
            place = locate_quote(source, words)
            assert place is not None and source[slice(*place)] == words and matches_when_folded(source, *place, words)
            alone = engine.submit(messages, params, options).result()
            assert (alone.text, alone.logprobs) == (words, answer.logprobs)


@pytest.mark.usefixtures("own_kernels")
def test_concurrent_quotations_equal_single_ones() -> None:
    compare_batch_with_alone(20, 6)


@pytest.mark.long("quotes")
@pytest.mark.usefixtures("own_kernels")
def test_many_concurrent_quotations_equal_single_ones() -> None:
    compare_batch_with_alone(QUOTES, 7)
