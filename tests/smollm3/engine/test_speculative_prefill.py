"""A draft is prefilled while a user types: reused when it is sent, private, and without effect on other requests."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from smollm3.held_engine import held
from smollm3.two_turns import GREEDY, QUESTION, SAID, SHORT, TOOLS, counted, load, second_turn, until, wait

from notso.smollm3 import ContextLengthError, Engine, Event, InvalidRequestError, Message, SamplingParams
from notso.smollm3.engine import prefix_warmup
from notso.smollm3.kv.kv_cache import KV_FORMATS, KVFormat
from notso.smollm3.scheduling.block_pool import NO_SALT
from notso.smollm3.values.request_options import RequestOptions

TYPED = Message("user", "And the land, what lives there, and who named it? " * 8)


def draft(text: str) -> list[Message]:
    return [QUESTION, Message("assistant", SAID), Message("user", text)]


def typed(engine: Engine, messages: Sequence[Message], **options: Any) -> None:
    engine.speculative_prefill(messages, options=RequestOptions(**options))
    wait(engine)


def sent(engine: Engine, messages: Sequence[Message], **options: Any) -> tuple[list[Event], int]:
    return second_turn(engine, messages[:-1], messages[-1].content, **options)


@pytest.mark.parametrize("kv", KV_FORMATS)
@pytest.mark.parametrize("thinking", [False, True])
def test_sent_draft_is_fully_cached_for_one_owner(kv: KVFormat, thinking: bool) -> None:
    messages, options = draft(TYPED.content), {"thinking": thinking, "tools": TOOLS, "owner": "me"}
    with load(kv) as engine:
        typed(engine, draft(TYPED.content[:99]), **options)
        typed(engine, messages, **options)
        prompt = engine.encode_chat(messages, RequestOptions(thinking=thinking, tools=TOOLS))
        assert engine.estimate(messages, RequestOptions(thinking=thinking, tools=TOOLS)).cached_tokens == 0, (
            "another owner's"
        )
        after, cached = sent(engine, messages, **options)
        assert cached == len(prompt) - 1
    with load(kv) as engine:
        assert sent(engine, messages, **options) == (after, 0)


def test_draft_of_the_first_question_is_fully_cached() -> None:
    with load() as engine:
        typed(engine, [Message("system", "Be brief."), QUESTION])
        prompt = engine.encode_chat([Message("system", "Be brief."), QUESTION])
        assert sent(engine, [Message("system", "Be brief."), QUESTION])[1] == len(prompt) - 1


@pytest.mark.parametrize("kv", ["k8v8", "k4v3"])
@pytest.mark.parametrize("more", ["", "5 more", ", and more?", "\u0301", "<|im_end|>"])
def test_message_extending_a_draft_reuses_the_cached_prefix(kv: KVFormat, more: str) -> None:
    messages = draft(f"{TYPED.content}2{more}")
    with load(kv) as engine:
        typed(engine, draft(f"{TYPED.content}2"))
        after, cached = sent(engine, messages)
        assert len(engine.encode_chat(messages)) - cached < 40
    with load(kv) as engine:
        assert sent(engine, messages) == (after, 0)


def test_draft_reports_the_start_of_the_last_turn(demo_engine: Engine) -> None:
    for messages in (draft("And?"), [SHORT], [Message("system", "Be brief."), SHORT]):
        asked = RequestOptions(tools=TOOLS)
        ids, turn_at, salt = demo_engine._inputs.draft(messages, SamplingParams(), asked, NO_SALT)
        assert ids == demo_engine.encode_chat(messages, asked) and salt == NO_SALT
        assert demo_engine.detokenize(ids[turn_at:]).startswith(f"user\n{messages[-1].content}<|im_end|>\n")


def test_draft_drops_old_turns_like_the_sent_message() -> None:
    turns = [Message(role, f"{number} word " * 60) for number in range(6) for role in ("user", "assistant")]
    with load(context=1024) as engine:
        for params in (SamplingParams(), SamplingParams(max_tokens=400)):
            options: dict[str, Any] = {"when_full": "drop_oldest", "thinking": False}
            engine.speculative_prefill([*turns, TYPED], params, RequestOptions(**options))
            wait(engine)
            events = list(engine.generate([*turns, TYPED], params, RequestOptions(**options)))
            usage = events[-2].usage
            assert usage is not None and events[0].kind == "trimmed"
            assert usage.prompt_tokens - usage.cached_tokens == 1


def test_newer_draft_replaces_the_previous_draft() -> None:
    with load() as engine:
        turns = engine._core.background.prefix_warmup
        with held(engine):
            for text in ("One thing. ", "Another thing. "):
                engine.speculative_prefill(draft(text * 40))
            for number in range(2 * prefix_warmup.MOST_PENDING):
                engine.speculative_prefill(draft(text * 40), options=RequestOptions(owner=str(number)))
            engine._core.post(lambda: seen.append((len(turns._drafts), len(turns._last_drafts))))
            seen: list[tuple[int, int]] = []
        wait(engine)
        assert seen == [(prefix_warmup.MOST_PENDING, prefix_warmup.MOST_PENDING)]
        with held(engine):
            for text in ("One thing. ", "Another thing. "):
                engine.speculative_prefill(draft(text * 40))
        wait(engine)
        first, second = (engine.estimate(draft(text * 40)).cached_tokens for text in ("One thing. ", "Another thing. "))
        assert second > first + 100


def test_request_or_clear_cache_drops_a_pending_draft() -> None:
    with load() as engine:
        reads, turns = counted(engine), engine._core.background.prefix_warmup
        with held(engine):
            engine.speculative_prefill(draft(TYPED.content))
            generation = engine.submit([SHORT], GREEDY, RequestOptions(thinking=False))
        list(generation.events())
        assert not (turns._drafts or turns._last_drafts)
        forgetting = threading.Thread(target=engine.clear_cache)
        with held(engine):
            engine.speculative_prefill(draft(TYPED.content))
            forgetting.start()
            until(lambda: len(engine._core._inbox) == 2)
        forgetting.join()
        assert not (turns._drafts or turns._last_drafts)
        assert not reads
        with held(engine):
            engine.speculative_prefill(draft(TYPED.content))
            background = engine.submit([SHORT], GREEDY, RequestOptions(thinking=False, priority="background"))
        list(background.events())
        wait(engine)
        assert reads, "background requests must not replace the draft"


def test_invalid_draft_is_rejected() -> None:
    with load(context=512) as engine:
        bad: list[tuple[Any, dict[str, Any], type[Exception]]] = [
            ([], {}, InvalidRequestError),
            ("text", {}, InvalidRequestError),
            ([1, 2], {}, InvalidRequestError),
            ([QUESTION, Message("assistant", "Well")], {"continue_last": True}, InvalidRequestError),
            ([QUESTION, Message("assistant", "Well")], {}, InvalidRequestError),
            ([Message("user", "\ud800")], {}, InvalidRequestError),
            ([SHORT], {"tools": "all"}, InvalidRequestError),
            ([SHORT], {"owner": "\ud800"}, InvalidRequestError),
            ([SHORT], {"when_full": "explode"}, InvalidRequestError),
            ([Message("user", "word " * 600)], {}, ContextLengthError),
        ]
        for messages, options, error in bad:
            params = options.pop("params", None)
            with pytest.raises(error):
                engine.speculative_prefill(messages, params, RequestOptions(**options))
        assert not engine._core.background.prefix_warmup._drafts
    with pytest.raises(InvalidRequestError):
        engine.speculative_prefill([SHORT])


def test_draft_blocks_are_not_written_to_disk(tmp_path: Path) -> None:
    with load(folder=tmp_path) as engine:
        typed(engine, draft(TYPED.content))
        assert engine.estimate(draft(TYPED.content)).cached_tokens > 400
    with load(folder=tmp_path) as engine:
        assert engine.estimate(draft(TYPED.content)).cached_tokens == 0


def test_changed_drafts_reuse_their_own_blocks_in_a_full_cache() -> None:
    """Without blank blocks, repeated changes of a draft reuse only the draft's own blocks."""
    with load(context=1024) as engine:
        cache = engine._pool
        others = [Message("user", f"{number} {QUESTION.content}") for number in range(3)]
        for other in others:
            list(engine.generate([other], SamplingParams(max_tokens=1), RequestOptions(thinking=False)))
        typed(engine, draft("Something. " * 30), thinking=False)
        taken = engine._core.call(lambda: [cache.allocate() for _ in range(cache.blank)])
        found = [engine.estimate([other], RequestOptions(thinking=False)).cached_tokens for other in others]
        for number in range(12):
            words = f"{number} fish. " * 30
            typed(engine, draft(words), thinking=False)
            assert engine.estimate(draft(words), RequestOptions(thinking=False)).cached_tokens > 300
        now = [engine.estimate([other], RequestOptions(thinking=False)).cached_tokens for other in others]
        assert sum(found) - sum(now) <= 2 * 128
        engine._core.call(lambda: [cache.free(block) for block in taken])


def test_draft_prefill_yields_to_an_arriving_request() -> None:
    with load() as engine:
        asked, layers, run = [], [], engine._core.runner.run

        def meanwhile(chunks: Any, go_on: Any, *, once: bool = False) -> Any:
            def at(layer: int) -> bool:
                if once and not asked and layer == 1:
                    asked.append(engine.submit([SHORT], GREEDY, RequestOptions(thinking=False, priority="background")))
                layers.append((once, layer))
                return bool(go_on(layer))

            return run(chunks, at, once=once)

        engine._core.runner.run = meanwhile  # type: ignore[method-assign]
        engine.speculative_prefill(draft(TYPED.content))
        until(lambda: bool(asked))
        assert list(asked[0].events())[-1].kind == "end"
        assert layers[:2] == [(True, 0), (True, 1)]
        assert layers[2:3] != [(True, 2)]
        wait(engine)
        assert engine.stats().kv_blocks_used == 0
        assert engine.estimate(draft(TYPED.content)).cached_tokens > 400
