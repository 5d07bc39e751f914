"""Prompts that continue a conversation, and prompts that are shortened to fit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from notso.smollm3 import ContextLengthError, Engine, InvalidRequestError, Message, RequestOptions, SamplingParams
from notso.smollm3.text.tokenizer import COUNTED_TIMES

ASKED = [Message("system", "Be brief."), Message("user", "hello")]
GREEDY = SamplingParams(max_tokens=120, temperature=0)


def said(engine: Engine, messages: list[Message], **options: object) -> tuple[str, str]:
    """Return reasoning and text."""
    events = list(engine.generate(messages, GREEDY, RequestOptions(**options)))  # type: ignore[arg-type]
    return tuple("".join(e.text for e in events if e.kind == kind) for kind in ("reasoning", "text"))  # type: ignore[return-value]


@pytest.mark.parametrize("thinking", [True, False])
def test_truncated_answer_is_continued_exactly(demo_engine: Engine, thinking: bool) -> None:
    reasoning, text = said(demo_engine, ASKED, thinking=thinking)
    assert len(text) > 6
    started = Message("assistant", text[:5], reasoning_content=reasoning or None)
    rest = said(demo_engine, [*ASKED, started], thinking=thinking, continue_last=True)
    assert rest == ("", text[5:])


def test_truncated_reasoning_is_continued_exactly(demo_engine: Engine) -> None:
    reasoning, text = said(demo_engine, ASKED)
    cut = reasoning.index(" ")
    started = Message("assistant", "", reasoning_content=reasoning[:cut])
    assert said(demo_engine, [*ASKED, started], continue_last=True) == (reasoning[cut:], text)


def test_continuing_an_empty_answer_equals_a_new_answer(demo_engine: Engine) -> None:
    assert said(demo_engine, [*ASKED, Message("assistant", "")], continue_last=True) == said(demo_engine, ASKED)


def test_newlines_at_the_start_of_a_continuation_are_kept(demo_engine: Engine) -> None:
    """They would be removed at the beginning of an answer."""
    from notso.smollm3.output.output_processor import OutputProcessor

    tokenizer = demo_engine.tokenizer
    for goes_on, expected in ((True, "\n\nb"), (False, "b")):
        answer = OutputProcessor(tokenizer, [1], (), False, goes_on)
        events = [event for token in tokenizer.encode("\n\nb") for event in answer.push(token)]
        assert "".join(event.text for event in [*events, *answer.finish("length")]) == expected


@pytest.mark.parametrize("last", [Message("user", "hi"), Message("system", "hi")])
def test_only_assistant_messages_can_be_continued(demo_engine: Engine, last: Message) -> None:
    with pytest.raises(InvalidRequestError, match="continued"):
        demo_engine.submit([Message("user", "a"), last], options=RequestOptions(continue_last=True))


@pytest.mark.parametrize("last", [Message("assistant", None), Message("assistant", "a", 5)])  # type: ignore[arg-type]
def test_continued_messages_must_be_valid(demo_engine: Engine, last: Message) -> None:
    with pytest.raises(InvalidRequestError, match="content must be text"):
        demo_engine.submit([Message("user", "a"), last], options=RequestOptions(continue_last=True))


@pytest.mark.parametrize("continue_last", [False, True])
def test_empty_conversation_is_refused(demo_engine: Engine, continue_last: bool) -> None:
    options = RequestOptions(continue_last=continue_last)
    for use in (demo_engine.submit, demo_engine.count_tokens, demo_engine.estimate):
        with pytest.raises(InvalidRequestError, match="message"):
            use([], options=options)


def conversation(turns: int) -> list[Message]:
    messages = [Message("system", "Be brief.")]
    for number in range(turns):
        messages += [Message("user", f"What is {number} + 1?"), Message("assistant", f"It is {number + 1}. " * 30)]
    return [*messages, Message("user", "hello")]


def test_too_long_conversation_is_refused_or_loses_oldest_turns() -> None:
    with Engine.load(context_tokens=1024) as engine:
        messages = conversation(20)
        with pytest.raises(ContextLengthError):
            engine.submit(messages)
        events = list(engine.generate(messages, GREEDY, RequestOptions(when_full="drop_oldest")))
        assert events[0].kind == "trimmed"
        dropped = events[0].dropped_messages
        usage = events[-2].usage
        assert usage is not None
        assert dropped % 2 == 0
        assert usage.prompt_tokens <= 1024 - 120
        kept = [messages[0], *messages[1 + dropped :]]
        assert usage.prompt_tokens == engine.count_tokens(kept)
        one_more = [messages[0], *messages[1 + dropped - 2 :]]
        assert engine.count_tokens(one_more) > 1024 - 120


def test_conversation_that_fits_is_not_trimmed() -> None:
    with Engine.load(context_tokens=1024) as engine:
        kinds = [event.kind for event in engine.generate(ASKED, GREEDY, RequestOptions(when_full="drop_oldest"))]
        assert "trimmed" not in kinds


def test_too_long_last_message_is_refused_with_drop_oldest() -> None:
    with Engine.load(context_tokens=256) as engine, pytest.raises(ContextLengthError):
        engine.submit(
            [*conversation(3)[:-1], Message("user", "a b c d " * 300)], options=RequestOptions(when_full="drop_oldest")
        )


def test_drop_oldest_accepts_a_last_message_that_barely_fits() -> None:
    """The last message leaves little room for an answer without a requested length; errors name the cause."""
    with Engine.load(context_tokens=256) as engine:
        last = Message("user", "a b c d " * 38)
        whole = engine.count_tokens([last])
        assert 192 < whole < 256
        for messages, dropped in (([last], 0), ([*conversation(3)[1:-1], last], 6)):
            events = list(
                engine.generate(messages, SamplingParams(temperature=0), RequestOptions(when_full="drop_oldest"))
            )
            assert sum(event.dropped_messages for event in events) == dropped
            assert events[-2].usage is not None and events[-2].usage.prompt_tokens == whole
        full = [Message("user", "a b c d " * 60)]
        with pytest.raises(ContextLengthError) as caught:
            engine.submit(full, SamplingParams(max_tokens=200), RequestOptions(when_full="drop_oldest"))
        assert (caught.value.needed_tokens, caught.value.context_tokens) == (engine.count_tokens(full) + 1, 256)


@pytest.mark.parametrize("most", [1 << 20, 1024, 600])
def test_large_max_tokens_leaves_half_of_the_context_to_the_prompt(most: int) -> None:
    with Engine.load(context_tokens=1024) as engine:
        messages, params = conversation(20), SamplingParams(temperature=0, max_tokens=most)
        events = list(engine.generate(messages, params, RequestOptions(when_full="drop_oldest")))
        dropped, usage = events[0].dropped_messages, events[-2].usage
        assert usage is not None and usage.prompt_tokens <= 512
        assert engine.count_tokens([messages[0], *messages[1 + dropped - 2 :]]) > 512


def test_prompt_too_long_in_bytes_is_refused_before_encoding(
    demo_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, context = demo_engine.tokenizer, demo_engine.info.context_tokens
    ordinary = set(range(tokenizer.vocab_size)) - tokenizer.special_ids - tokenizer.unused_ids
    assert tokenizer.longest_bytes == max(len(tokenizer.token_bytes(token)) for token in ordinary)
    most = context * tokenizer.longest_bytes
    tokenizer.check_length(["x" * (most - 2), "é"], context)
    with pytest.raises(ContextLengthError, match=f"at least {context + 1:,} tokens"):
        tokenizer.check_length(["x" * (most - 1), "é"], context)
    encoded: list[int] = []
    monkeypatch.setattr(tokenizer, "encode_runs", lambda runs: encoded.append(len(runs)) or [])
    for asked in ([Message("user", "x" * most)], "x" * (most + 1)):
        with pytest.raises(ContextLengthError, match="at least"):
            demo_engine.submit(asked)
    too_long = [Message("user", "x" * most), Message("assistant", "x"), Message("user", "x" * most)]
    with pytest.raises(ContextLengthError, match="at least"):
        demo_engine.submit(too_long, options=RequestOptions(when_full="drop_oldest"))
    begun = [Message("user", "x"), Message("assistant", "", "x" * (most + 1))]
    monkeypatch.setattr(tokenizer, "encode", lambda text: encoded.append(len(text)) or [])
    monkeypatch.setattr(tokenizer, "encode_runs", lambda *_: [])
    with pytest.raises(ContextLengthError, match="at least"):
        demo_engine.submit(begun, options=RequestOptions(continue_last=True))
    assert not encoded


def test_too_long_old_turn_is_dropped(demo_engine: Engine) -> None:
    old = Message("user", "x" * demo_engine.info.context_tokens * demo_engine.tokenizer.longest_bytes)
    messages = [old, Message("assistant", "y"), Message("user", "hello")]
    events = list(demo_engine.generate(messages, SamplingParams(max_tokens=2), RequestOptions(when_full="drop_oldest")))
    assert sum(event.dropped_messages for event in events) == 2


def test_unknown_option_values_are_refused_by_name(demo_engine: Engine) -> None:
    for option, value in (("when_full", "explode"), ("priority", "urgent")):
        with pytest.raises(InvalidRequestError) as caught:
            demo_engine.submit(ASKED, options=RequestOptions(**{option: value}))
        assert caught.value.param == option


def test_estimate_counts_cached_tokens(demo_engine: Engine) -> None:
    messages = [Message("system", "Estimates."), *conversation(6)[1:]]
    before = demo_engine.estimate(messages)
    assert before.prompt_tokens == demo_engine.count_tokens(messages)
    list(demo_engine.generate(messages, SamplingParams(max_tokens=1)))
    after = demo_engine.estimate(messages)
    assert after.cached_tokens >= before.prompt_tokens - 1 > before.cached_tokens
    assert after.seconds is not None
    assert after.seconds <= 0.1
    assert demo_engine.estimate(messages, RequestOptions(owner="somebody else")).cached_tokens == 0


def test_prompt_far_beyond_the_context_is_not_fully_encoded(
    demo_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer, context = demo_engine.tokenizer, demo_engine.info.context_tokens
    near = [Message("user", "1 " * context)]
    assert context < demo_engine.estimate(near).prompt_tokens < COUNTED_TIMES * context
    encoded: list[int] = []
    encode = tokenizer.encode_batch

    def encode_batch(texts: Sequence[str], control: bool = False) -> list[list[int]]:
        encoded.append(sum(map(len, texts)))
        return encode(texts, control)

    monkeypatch.setattr(tokenizer, "encode_batch", encode_batch)
    monkeypatch.setattr("notso.smollm3.text.tokenizer.BATCH_CHARACTERS", context)
    texts = ("".join(str((at + number) % 10) for number in range(400)) for at in range(context // 40))
    messages = [Message("user" if at % 2 == 0 else "assistant", text) for at, text in enumerate(texts)]
    tokenizer.check_length([each.content for each in messages], context)  # not rejected because of its number of bytes
    for ask in (demo_engine.estimate, demo_engine.submit):
        encoded.clear()
        with pytest.raises(ContextLengthError, match="at least") as caught:
            ask(messages)
        assert caught.value.needed_tokens > COUNTED_TIMES * context
        assert sum(encoded) < 400 * len(messages) and max(encoded) < 2 * context
