"""The cost of another question about a fixed prefix: only its last tokens and the question are computed again."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path

import pytest
from golden.random_models import RandomModel

from notso.qtensor import GGUFFile
from notso.smollm3 import (
    ContextLengthError,
    Engine,
    FixedPrefix,
    Grammar,
    InvalidRequestError,
    Message,
    QuoteSource,
    RequestOptions,
    SamplingParams,
    Usage,
)
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.kv.block_file import file_bytes
from notso.smollm3.kv.kv_cache import KVFormat
from notso.smollm3.sampling import quotes
from notso.smollm3.sampling.quote_index import QuoteIndex
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS

READING_DAY = date(2026, 11, 25)
GOAL = 130  # maximum number of tokens that are computed again
FEW = SamplingParams(max_tokens=4, seed=1)
_RNG = random.Random(42)
WORDS = ["".join(_RNG.choices(("an", "be", "cor", "der", "in", "ment", "or", "re", "ter"), k=2)) for _ in range(900)]


def document(name: str, words: int, start: int = 0) -> str:
    return f"--- {name} ---\n{' '.join(WORDS[start : start + words])}\n--- end of {name} ---\n\n"


DOCUMENT = document("a.txt", 300)


def options(
    documents: str = DOCUMENT,
    owner: str = "ann",
    *,
    scope: str | None = "library",
    reading: str | None = "a.txt",
    thinking: bool = False,
    conversation: str | None = None,
) -> RequestOptions:
    prefix = FixedPrefix(0, len(documents), scope, reading)
    return RequestOptions(
        thinking=thinking, date=READING_DAY, owner=owner, conversation=conversation or owner, prefix=prefix
    )


def test_fixed_prefix_requests_use_the_document_context(tmp_path: Path) -> None:
    small = RandomModel(layers=2, hidden=256, ffn=256, heads=2, kv_heads=1, head_dim=128, vocab=400)
    path, template = small.write(tmp_path / "small.gguf", context=16_384), tmp_path / "template.jinja"
    with GGUFFile.open(demo_path()) as demo:
        template.write_text(str(demo.metadata["tokenizer.chat_template"]))
    with Engine.load(path, document_tokens=65_536, threads=1, chat_template_file=template) as engine:
        info, text = engine.info, "x" * 9_000
        assert (info.context_tokens, info.document_tokens) == (8_192, 16_384)
        with_prefix = RequestOptions(prefix=FixedPrefix(0, 8_000))
        assert (info.context_of(with_prefix), info.context_of(RequestOptions())) == (16_384, 8_192)
        with pytest.raises(ContextLengthError, match="the context is 8,192"):
            engine.chat([Message("user", text)], params=FEW)
        touched = engine._runner.cache._touched
        assert touched < 9_000 // BLOCK_TOKENS, "reserved memory must stay untouched"
        used = engine.chat([Message("user", text)], params=FEW, options=with_prefix).usage
        assert used.prompt_tokens > 9_000 and engine._runner.cache._touched >= 9_000 // BLOCK_TOKENS
        assert engine.estimate([Message("user", text)], with_prefix).cached_tokens > 8_900
        with pytest.raises(ContextLengthError, match="the context is 16,384"):
            engine.chat([Message("user", text * 2)], params=FEW, options=with_prefix)


def usage(engine: Engine, question: str, asked: RequestOptions | None = None, documents: str = DOCUMENT) -> Usage:
    found = list(engine.generate([Message("user", documents + question)], FEW, asked or options()))[-2].usage
    assert found is not None
    return found


def read(engine: Engine, question: str, asked: RequestOptions | None = None, documents: str = DOCUMENT) -> int:
    """Return the number of prompt tokens that were computed."""
    found = usage(engine, question, asked, documents)
    return found.prompt_tokens - found.cached_tokens


def load(model: Path | None, folder: Path | None, **settings: int) -> Engine:
    """Load an engine and wait until the model file is identified."""
    engine = Engine.load(model, context_tokens=2048, kv="k8v8", cache_dir=folder, **settings)  # type: ignore[arg-type]
    if engine._identity is not None:
        engine._identity.wait(60)
    return engine


def settle(engine: Engine) -> None:
    """Wait until everything is written to disk."""
    offload = engine._offload
    assert offload is not None
    while engine._core.call(lambda: offload.work() or offload.has_work):
        pass
    for files in offload._stores:
        assert files.flush(60)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Copy the demo model."""
    return Path(shutil.copy(demo_path(), tmp_path / "model.gguf"))


def test_fixed_prefix_stays_cached_for_new_questions_and_restarts(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with load(model, folder) as engine:
        first = usage(engine, "What is this?")
        assert first.cached_tokens == 0 and first.prompt_tokens > 6 * BLOCK_TOKENS
        assert read(engine, "Who wrote it?") <= GOAL
        assert read(engine, "Today is 26 November 2026. Who wrote that?") <= GOAL
        assert read(engine, "Be brief. Who has it?") <= GOAL
        thinks = options(thinking=True)
        assert read(engine, "Who read it?", thinks) > GOAL
        assert read(engine, "Who knows it?", thinks) <= GOAL
        assert read(engine, "Who?", options(owner="bob")) <= GOAL
        settle(engine)
    copy = Path(shutil.copy(model, tmp_path / "copy.gguf"))
    for path in (model, model, copy):
        with load(path, folder) as engine:
            assert read(engine, f"Who has {path.name}?") <= GOAL
            assert read(engine, f"Who has {path.name}?", options(owner="carol")) <= GOAL
            assert read(engine, "Who reads it?", options(thinking=True)) <= GOAL
        os.utime(model)  # changes the modification time before the next load


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load(None, None) as made:
        yield made


def test_owners_share_only_the_blocks_of_the_fixed_prefix(engine: Engine) -> None:
    secret = "What would my neighbor say about the garden and the old fence between the two houses? " * 12
    asked = usage(engine, secret)
    again = usage(engine, secret)
    assert again.cached_tokens == asked.prompt_tokens - 1, "the owner must find the whole prompt"
    other = usage(engine, secret, options(owner="bob"))
    shared = other.cached_tokens
    prefix = len(engine.encode_chat([Message("user", DOCUMENT)], options()))
    assert shared % BLOCK_TOKENS == 0 and prefix - BLOCK_TOKENS - 8 < shared < prefix
    assert usage(engine, secret, options(owner="dan", scope="another library")).cached_tokens == 0
    assert usage(engine, secret, options(owner="dan", scope=None)).cached_tokens == 0
    assert usage(engine, secret, RequestOptions(thinking=False, date=READING_DAY, owner="ann")).cached_tokens == 0


@pytest.mark.parametrize("length", range(0, 260, 13))
def test_shared_blocks_do_not_depend_on_the_question(engine: Engine, length: int) -> None:
    """Wherever the prefix ends, its shared tokens are the same for every question."""
    prefix = " ".join(WORDS[:300])[: 900 + length]
    asked = options(prefix, owner=f"first {length}", scope=f"at {length}", reading=None)
    messages = [[Message("user", prefix + rest)] for rest in ("", "apple", "  \n\n b", "12", "é", "<|im_end|>")]
    salt_with_prefix = [
        engine._inputs.salt_with_prefix(engine._salt(asked), engine._prompts.write(each, asked), each, asked)
        for each in messages
    ]
    ids = [engine.encode_chat(each, asked) for each in messages]
    shared = max(salt.shared_blocks for salt in salt_with_prefix) * BLOCK_TOKENS
    assert shared and min(salt.shared_blocks for salt in salt_with_prefix) >= shared // BLOCK_TOKENS - 1
    for salt, tokens in zip(salt_with_prefix, ids, strict=True):
        end = salt.shared_blocks * BLOCK_TOKENS
        assert tokens[:end] == ids[0][:end]
    assert len({salt.parent_hash(salt.shared_blocks, b"x") for salt in salt_with_prefix}) == 1


def test_prefix_tokens_cover_a_later_message_unless_dropped(engine: Engine) -> None:
    words = " ".join(WORDS[:120])
    system, document = Message("system", "Be brief."), Message("user", words)
    history = [system, document, Message("assistant", "Well."), Message("user", "Why?")]
    prefix = FixedPrefix(1, len(words), "library")
    asked = RequestOptions(thinking=False, date=READING_DAY, prefix=prefix)
    prompt = engine._prompts.write(history, asked)
    shared = engine._prompts.prefix_tokens(prompt, history, asked)
    text = engine.detokenize(prompt.ids[:shared])
    content = text[text.index(words[:20]) :]
    assert words.startswith(content) and len(words) - len(content) < 8  # a token that spans the end is not shared
    long = [system, document, Message("assistant", words * 12), Message("user", "Why?")]
    trimmed = RequestOptions(thinking=False, date=READING_DAY, prefix=prefix, when_full="drop_oldest")
    kept = engine._prompts.write_within_context(long, trimmed, context_tokens=2048, reserved_tokens=100)
    assert kept.dropped_messages and not engine._prompts.prefix_tokens(kept, long, trimmed)


@pytest.mark.parametrize("prefix", [FixedPrefix(1, 0), FixedPrefix(0, 6)])
def test_fixed_prefix_beyond_the_messages_is_rejected(engine: Engine, prefix: FixedPrefix) -> None:
    with pytest.raises(InvalidRequestError, match="after the end of the messages") as refused:
        engine.submit([Message("user", "Hello")], FEW, RequestOptions(prefix=prefix))
    assert refused.value.param == "prefix"
    with pytest.raises(InvalidRequestError, match="requires messages"):
        engine.submit([1, 2, 3], FEW, RequestOptions(prefix=prefix))


def test_next_question_and_draft_reuse_the_fixed_prefix(engine: Engine) -> None:
    asked = options(owner="erin", scope="drafts", reading=None)
    assert read(engine, "What is it?", asked) > GOAL
    messages = [Message("user", DOCUMENT + "Who wrote it?")]
    assert engine.estimate(messages, asked).cached_tokens >= 6 * BLOCK_TOKENS
    engine.speculative_prefill(messages, FEW, asked)
    assert read(engine, "Who wrote it?", asked) <= GOAL


# ---------------------------------------------------------------- pinned prefixes


def room_for(engine: Engine, readings: float, blocks: int) -> int:
    return int(readings * blocks * file_bytes(BLOCK_TOKENS, engine._runner.cache.block_bytes))


DOCUMENTS = {name: document(name, 150, start) for start, name in ((0, "a"), (150, "b"), (300, "c"))}


def read_document(engine: Engine, name: str, question: str = "What is it?") -> int:
    return read(engine, question, options(DOCUMENTS[name], reading=name), DOCUMENTS[name])


def blocks(engine: Engine) -> dict[str, int]:
    settle(engine)
    return {name: engine.reading(name, scope="library").blocks for name in DOCUMENTS}


def test_least_recently_used_reading_is_evicted_whole(tmp_path: Path) -> None:
    with load(None, tmp_path) as engine:
        read_document(engine, "a")
        whole = blocks(engine)["a"]
        size = engine.reading("a", scope="library").size_bytes
        assert whole >= 3 and size == room_for(engine, 1, whole)
        two = room_for(engine, 2.5, whole)
    with load(None, tmp_path, library_bytes=two) as engine:
        read_document(engine, "b")
        assert min(blocks(engine)["a"], blocks(engine)["b"]) >= 3
        assert read_document(engine, "a", "Who?") <= GOAL
        settle(engine)
    with load(None, tmp_path, library_bytes=two) as engine:  # the order of use survives a restart
        read_document(engine, "c")
        left = blocks(engine)
        assert left["b"] == 0 and left["a"] == whole and left["c"] >= 3
        assert read_document(engine, "b") > GOAL


def test_conversations_do_not_evict_readings(tmp_path: Path) -> None:
    with load(None, tmp_path, cache_bytes=400_000) as engine:
        read_document(engine, "a")
        whole = blocks(engine)["a"]
        for number in range(12):
            words = " ".join(WORDS[10 * number : 10 * number + 150])
            list(engine.generate([Message("user", words)], FEW, RequestOptions(owner=f"{number}")))
            settle(engine)
        offload = engine._offload
        assert offload is not None and offload._files.used_bytes <= 400_000
        engine.clear_cache("ann", "ann")
        assert blocks(engine)["a"] == whole
    with load(None, tmp_path, cache_bytes=400_000) as engine:
        assert read_document(engine, "a", "Who?") <= GOAL


def test_reading_beyond_library_budget_is_cached_as_conversation(tmp_path: Path) -> None:
    with load(None, tmp_path, library_bytes=1000) as engine:
        read_document(engine, "a")
        assert blocks(engine)["a"] == 0
    with load(None, tmp_path, library_bytes=1000) as engine:
        assert read_document(engine, "a", "Who?") <= GOAL


@pytest.mark.parametrize("restarts", [False, True])
@pytest.mark.parametrize("kv", ["k8v8", "k4v3"])
def test_forgotten_reading_is_removed_from_memory_and_disk(tmp_path: Path, kv: KVFormat, restarts: bool) -> None:
    engine = Engine.load(context_tokens=2048, kv=kv, cache_dir=tmp_path)
    both = DOCUMENTS["a"] + DOCUMENTS["b"]
    try:
        read_document(engine, "a")
        read(engine, "What?", options(DOCUMENTS["a"], owner="bob", reading=None), DOCUMENTS["a"])
        read(engine, "What are they?", options(both, reading="both"), both)
        settle(engine)
        if restarts:
            engine.close()
            engine = Engine.load(context_tokens=2048, kv=kv, cache_dir=tmp_path)
        assert engine.reading("both", scope="library").blocks >= engine.reading("a", scope="library").blocks >= 3
        engine.forget_reading("a", scope="library")
        assert engine.reading("a", scope="library").blocks == 0
        assert read(engine, "Who?", options(both, reading="both"), both) <= GOAL
        engine.forget_reading("both", scope="library")
        engine.clear_cache("ann", "ann")
        engine.clear_cache("bob", "bob")
        settle(engine)
        assert not list(tmp_path.rglob("*.kv*"))
        assert usage(engine, "What?", options(DOCUMENTS["a"], owner="bob"), DOCUMENTS["a"]).cached_tokens == 0
    finally:
        engine.close()


def test_quote_indexes_are_kept_and_deleted_with_their_reading(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quotes, "CHARACTERS_FILED", 100)
    made, find = list[str](), QuoteIndex._find_places
    monkeypatch.setattr(
        QuoteIndex, "_find_places", lambda self, text, *a, **k: made.append(text) or find(self, text, *a, **k)
    )
    pinned, later = DOCUMENT.replace("\n", " "), " ".join(WORDS[500:600])
    asked = replace(options(), sources=(QuoteSource(pinned, "a"), QuoteSource(later, "b")))
    schema = Grammar("json_schema", json.dumps({"type": "string", "x-quote-of": "a", "maxLength": 20}))
    folder = tmp_path / "quotes"
    for restarts in range(2):
        with load(None, tmp_path) as engine:
            read(engine, "Who?", replace(asked, prefix=replace(asked.prefix, reading=None)))
            assert restarts or not folder.exists(), "prefixes that are not pinned must not be kept"
        made.clear()
        with load(None, tmp_path) as engine:
            read(engine, "Who?", asked)
            read(engine, "Who?", replace(asked, grammar=schema))
            assert made == ([later] if restarts else [pinned, later, pinned])
            assert len(list(folder.iterdir())) == 2
    with load(None, tmp_path) as engine:
        engine.forget_reading("other.txt", scope="library")
        assert len(list(folder.iterdir())) == 2
        engine.forget_reading("a.txt", scope="library")
        assert not list(folder.iterdir())


# ---------------------------------------------------------------- equal bits


def answer(engine: Engine, messages: list[Message], asked: RequestOptions) -> list[object]:
    params = SamplingParams(max_tokens=6, temperature=1.2, top_p=1.0, seed=7)
    events = list(engine.generate(messages, params, asked))
    return [(event.kind, event.text, event.logprobs) for event in events if event.kind in ("reasoning", "text", "end")]


def damage(rng: random.Random, folder: Path) -> None:
    files = sorted(path for path in folder.rglob("*.kv*") if path.is_file())
    for path in rng.sample(files, rng.randrange(len(files) // 2 + 1)):
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data[: rng.choice((len(data), rng.randrange(len(data))))])


def compositions(engines: tuple[Engine, Engine], rng: random.Random, count: int) -> None:
    """Compare the answers of both engines for random combinations of documents, members and modes."""
    for number in range(count):
        names = [f"{at}.txt" for at in range(rng.randrange(1, 5))]
        documents = "".join(document(name, 60 + 20 * at, 80 * at) for at, name in enumerate(names))
        asked = RequestOptions(
            thinking=rng.random() < 0.5,
            date=READING_DAY,
            owner=rng.choice("abc"),
            prefix=FixedPrefix(0, len(documents), rng.choice(["library", None]), rng.choice([*names, None])),
            top_logprobs=1,
        )
        messages = [Message("user", documents + rng.choice(["Why?", "What is it?", f"Who has {number}?"]))]
        kept, cold = (answer(engine, messages, asked) for engine in engines)
        assert kept == cold, (number, asked)
        engines[1].clear_cache()


@pytest.mark.parametrize("rounds", [3, pytest.param(25, marks=pytest.mark.long("engine"))])
def test_restored_and_cold_engines_give_identical_answers(tmp_path: Path, rounds: int) -> None:
    rng, reused_tokens = random.Random(rounds), 0
    with load(None, None) as cold:
        for _ in range(rounds):
            with load(None, tmp_path, library_bytes=rng.choice([10**6, 10**7])) as kept:
                compositions((kept, cold), rng, 8)
                settle(kept)
                reused_tokens += kept.stats().cached_tokens_total
            damage(rng, tmp_path)
        assert reused_tokens > 0 == cold.stats().cached_tokens_total
