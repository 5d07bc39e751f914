"""The beginning of the next turn is prefilled while the engine is idle: reuse, interruption, and effects on others."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from scripted_tokens import scripted
from smollm3.held_engine import held
from smollm3.two_turns import (
    GREEDY,
    QUESTION,
    SAID,
    SHORT,
    TOOLS,
    before_words,
    counted,
    load,
    second_turn,
    told,
    until,
    wait,
)

from notso.smollm3 import Engine, Grammar, Message, RequestOptions, SamplingParams
from notso.smollm3.engine import prefix_warmup
from notso.smollm3.engine.prefix_warmup import PrefixWarmup
from notso.smollm3.kv.kv_cache import KV_FORMATS, KVFormat
from notso.smollm3.scheduling.block_pool import BlockPool, CacheSalt, block_hash

DAY_LONG = 86_400.0
THOUGHT = "They ask about the sea. " * 30
CALL = '<tool_call>\n{"name": "look", "arguments": {"at": "the sea"}}\n</tool_call>'

Ask = Callable[..., Message]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_warmup, "QUIET_S", 0.02)


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Return a function that submits messages, scripts `said` as the answer, and returns it as in the history."""

    def ask(engine: Engine, messages: Sequence[Message], said: str = SAID, **options: Any) -> Message:
        with monkeypatch.context() as patched:
            script = scripted(patched)
            script.say(*engine.tokenize(f"{said}<|im_end|>", special=True))
            params = SamplingParams(max_tokens=options.pop("max_tokens", None))
            return told(list(engine.generate(messages, params, RequestOptions(**options))))

    return ask


# ---------------------------------------------------------------- reuse


@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("thinking", [False, True])
def test_second_turn_finds_all_but_the_new_words_cached(ask: Ask, kv: KVFormat, thinking: bool) -> None:
    """The answer is the same with and without prefill ahead, which takes several steps for a long answer."""
    said = f"<think>\n{THOUGHT}\n</think>\n{SAID}" if thinking else SAID
    with load(kv) as engine:
        history = [QUESTION, ask(engine, [QUESTION], said, thinking=thinking)]
        assert (history[1].content, bool(history[1].reasoning_content)) == (SAID, thinking)
        wait(engine)
        after, cached = second_turn(engine, history, thinking=thinking)
        assert cached == before_words(engine, history, thinking=thinking) > 400
    with load(kv) as engine:
        assert second_turn(engine, history, thinking=thinking) == (after, 0)


def test_tool_result_turn_finds_the_tool_call_cached(ask: Ask) -> None:
    with load() as engine:
        called = ask(engine, [QUESTION], CALL, thinking=False, tools=TOOLS)
        assert [call.name for call in called.tool_calls] == ["look"]
        wait(engine)
        messages = [QUESTION, called, Message("tool", "It is blue.", tool_call_id=called.tool_calls[0].id)]
        estimate = engine.estimate(messages, RequestOptions(thinking=False, tools=TOOLS))
        assert estimate.cached_tokens == before_words(engine, [QUESTION, called], thinking=False, tools=TOOLS)


def test_warmup_preserves_kept_reasoning(ask: Ask) -> None:
    with load() as engine:
        earlier = [SHORT, Message("assistant", "Hello.", "A greeting.", keep_reasoning=True), QUESTION]
        answer = ask(engine, earlier, f"<think>\n{THOUGHT}\n</think>\n{SAID}", thinking=True)
        assert answer.reasoning_content
        kept = Message("assistant", answer.content, answer.reasoning_content, keep_reasoning=True)
        wait(engine)
        expected = before_words(engine, [*earlier, kept])
        assert engine.estimate([*earlier, kept, SHORT]).cached_tokens == expected


def test_warmed_prefix_is_not_shared_with_another_owner(ask: Ask) -> None:
    with load() as engine:
        history = [QUESTION, ask(engine, [QUESTION], thinking=False, owner="one")]
        wait(engine)
        assert second_turn(engine, history, thinking=False, owner="another")[1] == 0
        assert second_turn(engine, history, thinking=False, owner="one")[1] > 400


def test_warmed_prefix_is_restored_from_disk_after_restart(ask: Ask, tmp_path: Path) -> None:
    with load(folder=tmp_path) as engine:
        history = [QUESTION, ask(engine, [QUESTION], f"<think>\n{THOUGHT}\n</think>\n{SAID}", thinking=True)]
        wait(engine)
        expected = before_words(engine, history)
    with load(folder=tmp_path) as engine:
        assert second_turn(engine, history)[1] == expected


@pytest.mark.parametrize("words", ["And?", "  two spaces", "<|im_end|>", "é", "🎉", "12", "(x)", "don't", "\tx"])
def test_warmed_prefix_matches_for_any_next_message(demo_engine: Engine, words: str) -> None:
    history = [Message("system", "Be brief."), QUESTION, Message("assistant", "Well."), Message("user", words)]
    for thinking in (False, True):
        options = RequestOptions(thinking=thinking, tools=TOOLS)
        known = demo_engine._prompts.beginning(history[:-1], options)
        assert demo_engine.encode_chat(history, options)[: len(known)] == known
        assert demo_engine.detokenize(known).endswith("Well.<|im_end|>\n<|im_start|>user\n")


# ---------------------------------------------------------------- exclusions


def test_only_continuable_answers_are_noted_for_warmup(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_warmup, "QUIET_S", DAY_LONG)
    with load() as engine:
        notes = engine._core.background.prefix_warmup._pending
        ask(engine, "Once upon a time")
        ask(engine, [10, 20, 30])
        ask(engine, [SHORT], max_tokens=4)  # ended by its length
        ask(engine, [SHORT], priority="background")
        ask(engine, [SHORT, Message("assistant", "Well")], continue_last=True)
        guided = list(engine.generate([SHORT], GREEDY, RequestOptions(thinking=False, grammar=Grammar("regex", "ab"))))
        assert guided[-1].finish_reason == "stop"
        generation = engine.submit([SHORT], SamplingParams(logit_bias={40: 100.0}))
        generation.stop()
        list(generation.events())
        assert not notes
        ask(engine, [SHORT], "Well.")
        assert len(notes) == 1
        ask(engine, [SHORT], "Another answer.")
        assert len(notes) == 1, "a regenerated answer must replace the note"
        for number in range(2 * prefix_warmup.MOST_PENDING):
            ask(engine, [Message("user", str(number))], "Well.")
        assert len(notes) == prefix_warmup.MOST_PENDING
        engine.clear_cache()
        assert not notes


def test_full_conversation_is_not_warmed_up(ask: Ask) -> None:
    with load(context=512) as engine:
        reads = counted(engine)
        ask(engine, [QUESTION], "Well. " * 100, thinking=False, when_full="drop_oldest")
        ask(engine, [SHORT], "Well. " * 180, thinking=False)
        wait(engine)
        assert not reads


def test_conversation_with_unknown_template_is_not_warmed_up(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    with load() as engine:
        reads = counted(engine)
        monkeypatch.setattr(engine._prompts.template, "is_known", False)
        ask(engine, [SHORT], "Well.")
        wait(engine)
        assert not reads


def test_warmup_does_not_evict_other_conversations(ask: Ask) -> None:
    """Without blank blocks, the reasoning's blocks are evicted for the answer, not those of other conversations."""
    with load(context=1024) as engine:
        cache = engine._pool
        other = [QUESTION, ask(engine, [QUESTION], SAID, thinking=False)]
        wait(engine)
        taken = engine._core.call(lambda: [cache.allocate() for _ in range(cache.blank - 8)])
        found = engine.estimate([*other, SHORT], RequestOptions(thinking=False)).cached_tokens
        said = f"<think>\n{THOUGHT}\n</think>\n{SAID}"
        history = [SHORT, ask(engine, [SHORT], said, thinking=True)]
        assert cache.blank < 3
        wait(engine)
        assert engine.estimate([*history, SHORT]).cached_tokens == before_words(engine, history)
        assert engine.estimate([*other, SHORT], RequestOptions(thinking=False)).cached_tokens == found
        engine._core.call(lambda: [cache.free(block) for block in taken])


def test_warmup_is_not_counted_in_statistics(ask: Ask) -> None:
    with load() as engine:
        seen, run = [], engine._core.runner.run

        def watched(chunks: Any, go_on: Any, *, once: bool = False) -> Any:
            if once:
                seen.append(engine.stats())
            return run(chunks, go_on, once=once)

        engine._core.runner.run = watched  # type: ignore[method-assign]
        history = [QUESTION, ask(engine, [QUESTION], f"<think>\n{THOUGHT}\n</think>\n{SAID}", thinking=True)]
        before = engine.stats()
        wait(engine)
        after = engine.stats()
        assert len(seen) > 1 and {(stats.running, stats.waiting) for stats in seen} == {(0, 0)}
        for name in ("prompt_tokens_total", "cached_tokens_total", "generated_tokens_total", "preemptions_total"):
            assert getattr(after, name) == getattr(before, name)
        assert after.kv_blocks_used == 0
        second_turn(engine, history)


# ---------------------------------------------------------------- requests during prefill ahead


def test_warmup_step_yields_to_an_arriving_request(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request arrives in the second layer of a step that prefills ahead; no further layer is computed before it."""
    monkeypatch.setattr(prefix_warmup, "QUIET_S", DAY_LONG)
    with load() as engine:
        history = [QUESTION, ask(engine, [QUESTION], thinking=False)]
        asked, layers, run = [], [], engine._core.runner.run

        def meanwhile(chunks: Any, go_on: Any, *, once: bool = False) -> Any:
            def at(layer: int) -> bool:
                if once and not asked and layer == 1:
                    asked.append(engine.submit([SHORT], GREEDY, RequestOptions(thinking=False)))
                layers.append((once, layer))
                return bool(go_on(layer))

            return run(chunks, at, once=once)

        engine._core.runner.run = meanwhile  # type: ignore[method-assign]
        monkeypatch.setattr(prefix_warmup, "QUIET_S", 0.02)
        engine._core._signal.wake()
        until(lambda: bool(asked))
        events = list(asked[0].events())
        assert layers[:2] == [(True, 0), (True, 1)]
        assert layers[2:3] != [(True, 2)]
        assert events[-1].kind == "end"
        wait(engine)
        assert engine.stats().kv_blocks_used == 0
        assert second_turn(engine, history, thinking=False)[1] == before_words(engine, history, thinking=False)


def test_warmup_stops_after_repeated_interruptions(ask: Ask, monkeypatch: pytest.MonkeyPatch) -> None:
    with load() as engine:
        tries, run = [], engine._core.runner.run

        def given_up(chunks: Any, go_on: Any, *, once: bool = False) -> Any:
            tries.append(once)
            return None if once else run(chunks, go_on)

        engine._core.runner.run = given_up  # type: ignore[method-assign]
        history = [QUESTION, ask(engine, [QUESTION], thinking=False)]
        wait(engine)
        assert tries.count(True) == prefix_warmup.MOST_TRIES
        assert engine.stats().kv_blocks_used == 0
        assert second_turn(engine, history, thinking=False)[1] > 400


def test_failed_warmup_is_not_retried(ask: Ask) -> None:
    with load() as engine:
        run, tries = engine._core.runner.run, []

        def failing(chunks: Any, go_on: Any, *, once: bool = False) -> Any:
            if once:
                tries.append(1)
                raise MemoryError
            return run(chunks, go_on)

        engine._core.runner.run = failing  # type: ignore[method-assign]
        history = [QUESTION, ask(engine, [QUESTION], thinking=False)]
        wait(engine)
        assert len(tries) == 1 and engine.stats().kv_blocks_used == 0
        assert second_turn(engine, history, thinking=False)[1] > 400


def test_close_interrupts_warmup(ask: Ask) -> None:
    engine = load()
    reads, run = threading.Event(), engine._core.runner.run

    def meanwhile(chunks: Any, go_on: Any, *, once: bool = False) -> Any:
        def at(layer: int) -> bool:
            if once:
                reads.set()
                until(lambda: engine._core._closing)
            return bool(go_on(layer))

        return run(chunks, at, once=once)

    engine._core.runner.run = meanwhile  # type: ignore[method-assign]
    ask(engine, [QUESTION], thinking=False)
    assert reads.wait(30)
    engine.close()
    assert not engine._core._thread.is_alive()


def test_conversations_that_end_together_are_all_warmed_up(ask: Ask) -> None:
    with load() as engine:
        questions = [Message("user", f"{number} {QUESTION.content}") for number in range(4)]
        with held(engine):
            generations = [engine.submit([each], GREEDY, RequestOptions(thinking=False)) for each in questions]
        answers = [told(list(generation.events())) for generation in generations]
        ended = [generation.read()[-1].finish_reason for generation in generations]
        wait(engine)
        for question, answer, reason in zip(questions, answers, ended, strict=True):
            history = [question, answer]
            cached = engine.estimate([*history, SHORT], RequestOptions(thinking=False)).cached_tokens
            assert cached == before_words(engine, history, thinking=False) or reason != "stop"
        assert "stop" in ended


@pytest.mark.parametrize("kv", ["k8v8", pytest.param("k4v3", marks=pytest.mark.long("engine"))])
def test_concurrent_chats_with_warmup_give_the_same_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kv: KVFormat
) -> None:
    """Conversations with several turns, with pauses for prefill ahead."""
    monkeypatch.setattr(prefix_warmup, "QUIET_S", 0.0)
    params = SamplingParams(max_tokens=60, temperature=1.2, seed=3)

    def chat(engine: Engine, number: int, pause_s: float) -> list[Message]:
        history, rng = list[Message](), random.Random(number)
        for turn in range(4):
            history.append(Message("user", f"{number} {turn} {QUESTION.content[: rng.randrange(400)]}"))
            answer = told(list(engine.generate(history, params, RequestOptions(thinking=number % 2 == 0))))
            history.append(Message("assistant", answer.content, answer.reasoning_content))
            time.sleep(pause_s * rng.random())
        return history

    with Engine.load(context_tokens=1024, kv=kv, max_num_seqs=2, cache_dir=tmp_path) as engine:
        reads = counted(engine)
        with ThreadPoolExecutor(3) as threads:
            together = list(threads.map(lambda number: chat(engine, number, 0.2), range(6)))
        wait(engine)
        stats = engine.stats()
        assert reads and (stats.running, stats.waiting, stats.kv_blocks_used) == (0, 0, 0)
    monkeypatch.setattr(prefix_warmup, "QUIET_S", DAY_LONG)
    for number, history in enumerate(together):
        with Engine.load(context_tokens=1024, kv=kv) as engine:
            assert chat(engine, number, 0.0) == history


# ---------------------------------------------------------------- blocks


def test_deprioritized_chain_blocks_are_evicted_first() -> None:
    cache, tokens = BlockPool(4), list(range(400))
    parent_hash, blocks = b"", []
    for at in (0, 128, 256):
        blocks.append(cache.allocate())
        cache.register(blocks[-1], parent_hash, tokens[at : at + 128])
        parent_hash = block_hash(parent_hash, tokens[at : at + 128])
    assert cache.chain(CacheSalt(b""), tokens) == cache.chain(CacheSalt(b""), tokens[:384]) == blocks
    assert cache.chain(CacheSalt(b""), tokens[:383]) == blocks[:2]
    assert cache.chain(CacheSalt(os.urandom(4)), tokens) == []
    for block in (blocks[1], blocks[0]):
        cache.free(block)
    assert (cache.blank, cache.available) == (1, 3)
    assert cache.deprioritize(blocks) == 2, "a block in use is not moved"
    assert [cache.allocate() for _ in range(3)][1:] == [blocks[1], blocks[0]]


def test_warmup_notes_and_drafts_are_fair_between_owners() -> None:
    """Many answers of one owner neither evict nor delay what was noted for another owner."""
    nothing: Any = None
    warmup = PrefixWarmup(nothing, nothing, nothing, nothing)

    def ended(owner: bytes, number: int) -> None:
        sequence = SimpleNamespace(
            salt=CacheSalt(owner), adapter=None, conversation=owner, tokens=[number], prompt=[number], is_evicted=False
        )
        output = SimpleNamespace(finish_reason="stop")
        request: Any = SimpleNamespace(sequence=sequence, next_ids=list, output=output, generation=None)
        warmup.schedule(request)

    ended(b"modest", 0)
    for number in range(1, 100):
        ended(b"greedy", number)
    order = [(note.salt.root, note.spent[0]) for note in (warmup._next_pending() for _ in range(3))]
    assert order == [(b"greedy", 99), (b"modest", 0), (b"greedy", 99)]
    assert len(warmup._pending) == prefix_warmup.MOST_PENDING
    for owner in (b"modest", b"greedy"):
        warmup.draft(CacheSalt(owner), None, None, [1, 2], 0)
    drafts = []
    for _ in range(4):  # the greedy owner keeps typing
        drafts.append(warmup._next_pending().salt.root)
        warmup.draft(CacheSalt(b"greedy"), None, None, [1, 2], 0)
    assert drafts[:2] in ([b"modest", b"greedy"], [b"greedy", b"modest"])
