"""Prompts are compared with templates rendered by plain Jinja2, and invalid conversations are rejected."""

from __future__ import annotations

import functools
import hashlib
import json
import locale
import random
from collections.abc import Iterator, Sequence
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import jinja2
import pytest

from notso.smollm3.errors import InvalidRequestError, ModelFileError, TemplateError
from notso.smollm3.text import chat_template
from notso.smollm3.text.chat_template import KNOWN_TEMPLATES, MAX_TEMPLATE_CHARACTERS, ChatTemplate
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.values.messages import Message, ToolCall
from notso.smollm3.values.model_info import LATER_SYSTEM, OVERRIDDEN_TOOLS

DAY = date(2025, 7, 8)
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather in a city, é",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CLOCK = {"name": "clock", "description": "The time <now>", "parameters": {}}


@functools.cache
def _compiled(source: str) -> jinja2.Template:
    """Compile with plain Jinja2; the tag `generation`, which prints nothing, becomes an `if` that is always true."""
    source = source.replace("{% generation %}", "{% if true %}").replace("{% endgeneration %}", "{% endif %}")
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    return environment.from_string(source)


def plain_jinja(
    source: str,
    messages: Sequence[dict[str, str]],
    thinking: bool = True,
    tools: Sequence[str] = (),
    day: date = DAY,
) -> str:
    """Render the template with plain Jinja2."""
    months = "January February March April May June July August September October November December".split()  # noqa: SIM905

    def strftime_now(pattern: str) -> str:
        assert pattern == "%d %B %Y"
        return f"{day.day:02d} {months[day.month - 1]} {day.year}"

    variables: dict[str, Any] = {"xml_tools": list(tools)} if tools else {}
    return _compiled(source).render(
        messages=messages,
        enable_thinking=thinking,
        add_generation_prompt=True,
        strftime_now=strftime_now,
        **variables,
    )


def conversations() -> Iterator[tuple[list[Message], dict[str, Any]]]:
    """Yield all kinds of ordinary conversations, with and without reasoning, tools and flags; the same in each run."""
    chance = random.Random(7)
    systems = [
        None,
        "",
        "Be brief.",
        "  Two\n\nlines  ",
        "/think",
        "/no_think",
        "Be kind. /no_think please",
        "x /think",
    ]
    systems += ["/system_override", "You are a cat. /system_override", "/no_think A dog. /system_override/think \n"]
    systems += ["see /think/x and /no_think/y", "/th/no_thinkink", "/th/thinkink"]
    words = [
        "hi",
        "What is 2 + 2?",
        "\n\nfoo",
        "é 你好 👩‍👩‍👧",
        "a < b > c",
        "{{ messages }} {% if %}",
        "x\n",
        "",
        " ",
        "1\t2",
    ]
    for system in systems:
        for turns in range(4):
            for thinking in (True, False):
                messages = [Message("system", system)] if system is not None else []
                for _ in range(turns):
                    messages.append(Message("user", chance.choice(words)))
                    messages.append(Message("assistant", chance.choice(words), reasoning_content=chance.choice(words)))
                    if chance.random() < 0.3:
                        messages.append(Message("tool", chance.choice(words), tool_call_id="call_1"))
                messages.append(Message("user", chance.choice(words)))
                if chance.random() < 0.1:
                    messages.append(Message("system", "too late"))
                options = {
                    "thinking": thinking,
                    "tools": chance.choice([None, [], [WEATHER], [WEATHER, CLOCK]]),
                    "date": DAY + timedelta(days=chance.randrange(2000)),
                }
                yield messages, options


def test_prompts_match_plain_jinja(template_source: str, small_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(template_source, small_tokenizer.specials)
    count = 0
    for messages, options in conversations():
        expected = plain_jinja(
            template_source,
            [{"role": message.role, "content": message.content} for message in messages],
            options["thinking"],
            [json.dumps(tool, ensure_ascii=False) for tool in options["tools"] or ()],
            options["date"],
        )
        assert template.render(messages, **options) == expected
        runs = template.runs(messages, **options)
        assert "".join(run.text for run in runs) == expected
        count += 1
    assert count >= 100


def test_ids_match_encoding_of_the_whole_prompt(template_source: str, small_tokenizer: Tokenizer) -> None:
    """If the text contains no special tokens, encoding content separately changes nothing."""
    template = ChatTemplate(template_source, small_tokenizer.specials)
    for messages, options in conversations():
        ids = template.encode(small_tokenizer, messages, **options)
        assert ids == small_tokenizer.encode(template.render(messages, **options), control=True)


def test_official_prompts_have_the_published_lengths(official_tokenizer: Tokenizer) -> None:
    """The published lengths of "hi": 249 tokens with reasoning, 69 without."""
    source = Path(__file__).parents[4] / "shared" / "data" / "chat_template.ggml-org-gguf.jinja"
    template = ChatTemplate(source.read_text(), official_tokenizer.specials)
    for thinking, length in ((True, 249), (False, 69)):
        assert len(template.encode(official_tokenizer, [Message("user", "hi")], thinking=thinking, date=DAY)) == length


def test_official_ids_match_encoding_of_the_whole_prompt(template_source: str, official_tokenizer: Tokenizer) -> None:
    template = ChatTemplate(template_source, official_tokenizer.specials)
    for messages, options in list(conversations())[::5]:
        ids = template.encode(official_tokenizer, messages, **options)
        assert ids == official_tokenizer.encode(template.render(messages, **options), control=True)


def test_earlier_tool_calls_are_rendered_in_model_format(template_source: str, small_tokenizer: Tokenizer) -> None:
    calls = (ToolCall("call_1", "get_weather", ' {"city":  "Köln"} '), ToolCall("call_2", 'say "x"', "{}"))
    written = (
        '<tool_call>\n{"name": "get_weather", "arguments": {"city":  "Köln"}}\n</tool_call>\n'
        '<tool_call>\n{"name": "say \\"x\\"", "arguments": {}}\n</tool_call>'
    )
    template = ChatTemplate(template_source, small_tokenizer.specials)
    for content, between in (("", ""), ("Let me look.", "\n"), ("Let me look.\n", "")):
        messages = [Message("user", "hi"), Message("assistant", content, "hm", calls), Message("tool", "rain")]
        expected = [("user", "hi"), ("assistant", f"{content}{between}{written}"), ("tool", "rain")]
        text = template.render(messages, date=DAY)
        assert text == plain_jinja(template_source, [{"role": role, "content": said} for role, said in expected])
        ids = template.encode(small_tokenizer, messages, date=DAY)
        assert ids == small_tokenizer.encode(text, control=True)
        assert ids.count(small_tokenizer.tool_call_open_id) == 2


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ("", "{}"),
        (" \n", "{}"),
        ('{"a": 1', '"{\\"a\\": 1"'),
        ("[]", '"[]"'),
        ('{"a": NaN}', '"{\\"a\\": NaN}"'),
        ('{"a":' * 10**5, json.dumps('{"a":' * 10**5)),
        ("</tool_call><|im_end|>", '"</tool_call><|im_end|>"'),
    ],
    ids=lambda value: value[:20],
)
def test_invalid_call_arguments_are_rendered_as_a_string(
    template_source: str, small_tokenizer: Tokenizer, arguments: str, written: str
) -> None:
    template = ChatTemplate(template_source, small_tokenizer.specials)
    messages = [Message("user", "a"), Message("assistant", "", tool_calls=(ToolCall("i", "f", arguments),))]
    messages += [Message("tool", "error"), Message("user", "b")]
    assert f'<tool_call>\n{{"name": "f", "arguments": {written}}}\n</tool_call>' in template.render(messages)
    ids = template.encode(small_tokenizer, messages)
    assert ids.count(small_tokenizer.tool_call_open_id) == 1


def test_tools_are_rendered_as_json(template_source: str) -> None:
    text = ChatTemplate(template_source).render(
        [Message("user", "hi")], tools=[{"name": "f", "strict": True, "d": None}]
    )
    assert '{"name": "f", "strict": true, "d": null}\n' in text


def test_template_without_tool_support_refuses_tools() -> None:
    template = ChatTemplate("{{ messages[-1].content }}{% for tool in tools or [] %}{{ tool }}{% endfor %}")
    assert template.render([Message("user", "hi")], tools=[]) == "hi"
    with pytest.raises(InvalidRequestError, match="does not support tools") as raised:
        template.render([Message("user", "hi")], tools=[WEATHER])
    assert raised.value.param == "tools"


def test_tools_hidden_by_system_override_are_logged(template_source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[str] = []
    # caplog does not work here, because earlier tests may have changed the propagation of records.
    monkeypatch.setattr(chat_template._log, "warning", lambda text, *values: logged.append(text % values))
    template = ChatTemplate(template_source)
    messages = [Message("system", "A cat. /system_override"), Message("user", "hi")]
    assert "get_weather" not in template.render(messages, tools=[WEATHER])
    assert any("/system_override" in each for each in logged)


def test_date_is_english_in_any_locale(template_source: str) -> None:
    template = ChatTemplate(template_source)
    before = locale.setlocale(locale.LC_TIME)
    try:
        for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "C.UTF-8", "C"):
            try:
                locale.setlocale(locale.LC_TIME, name)
            except locale.Error:
                continue
            for month, spelt in ((3, "March"), (5, "May"), (12, "December")):
                text = template.render([Message("user", "hi")], date=date(2026, month, 4))
                assert f"Today Date: 04 {spelt} 2026\n" in text
    finally:
        locale.setlocale(locale.LC_TIME, before)


def test_default_date_is_today(template_source: str) -> None:
    before = date.today()
    text = ChatTemplate(template_source).render([Message("user", "hi")])
    days = {before, date.today()}
    assert any(f"{day.day:02d} {day:%B} {day.year}" in text for day in days)


def known_template(source: str) -> ChatTemplate:
    """Return a template that runs in this process, which takes a hundredth of the time."""
    return ChatTemplate(source, known=[hashlib.sha256(source.encode()).hexdigest()])


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([], "no message to answer"),
        ([Message("user", None)], "content must be text"),  # type: ignore[arg-type]
        ([Message("user", ["a"])], "content must be text"),  # type: ignore[arg-type]
        ([Message("system", 3)], "content must be text"),  # type: ignore[arg-type]
        ([Message("assistant", "a", 3)], "reasoning_content must be text"),  # type: ignore[arg-type]
        ([Message("assistant", "a", tool_calls=None)], "must be ToolCalls"),  # type: ignore[arg-type]
        ([Message("assistant", "a", tool_calls=({"name": "f"},))], "must be ToolCalls"),  # type: ignore[arg-type]
        ([Message("developer", "x")], "role must be one of"),  # type: ignore[arg-type]
        ([Message("<|im_start|>", "x")], "role must be one of"),  # type: ignore[arg-type]
        ([Message("user", "a\ud800")], "lone surrogate"),
        ([Message("user", "a", tool_calls=(ToolCall("i", "f", "{}"),))], "only an assistant"),
        ([Message("assistant", "a", tool_calls=(ToolCall("i", None, "{}"),))], "needs a name"),  # type: ignore[arg-type]
        ([Message("assistant", "a", tool_calls=(ToolCall("i", "f", None),))], "arguments as a string"),  # type: ignore[arg-type]
    ],
)
def test_invalid_conversations_are_refused(messages: list[Message], said: str) -> None:
    template = known_template("{{ messages[-1].content }}")
    with pytest.raises(InvalidRequestError, match=said) as raised:
        template.render(messages)
    assert raised.value.param == "messages"


@pytest.mark.parametrize("tool", ["f", 3, {"a": {1, 2}}, {"a": float("nan")}, {"a": "\ud800"}, ["x"]])
def test_unserializable_tools_are_refused(tool: Any) -> None:
    template = known_template("{{ messages[-1].content }}{{ xml_tools or 0 }}")
    with pytest.raises(InvalidRequestError) as raised:
        template.render([Message("user", "hi")], tools=[tool])
    assert raised.value.param == "tools"


@pytest.mark.parametrize("known", [True, False], ids=["here", "apart"])
def test_template_receives_bos_and_eos_tokens_of_the_file(small_metadata: dict[str, Any], known: bool) -> None:
    """As in transformers; other names are errors when the file is opened."""
    tokenizer = Tokenizer.from_gguf(small_metadata)
    bos = small_metadata["tokenizer.ggml.tokens"].index("<|begin_of_text|>")
    source = "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}"
    sums = [hashlib.sha256(source.encode()).hexdigest()] if known else []
    ends = {"eos_token": "<|im_end|>"}
    template = ChatTemplate(source, tokenizer.specials, known=sums, bos_token="<|begin_of_text|>", **ends)
    assert template.is_known == known
    assert template.render([Message("user", "a<|im_end|>")]) == "<|begin_of_text|>a<|im_end|><|im_end|>"
    ids = template.encode(tokenizer, [Message("user", "a<|im_end|>")])
    assert ids[0] == bos and ids.count(tokenizer.id_of("<|im_end|>") or -1) == 1, "content is never a control token"
    assert ChatTemplate(source, tokenizer.specials, known=sums, **ends).render([Message("user", "a")]) == "a<|im_end|>"
    entries = small_metadata | {"tokenizer.chat_template": source, "tokenizer.ggml.bos_token_id": bos}
    of_file = ChatTemplate.from_gguf(entries, tokenizer)
    assert of_file is not None and of_file.render([Message("user", "a")]) == "<|begin_of_text|>a<|im_end|>"
    with pytest.raises(ModelFileError, match=r"tokenizer.ggml.bos_token_id must be 0..1199, not 100000"):
        ChatTemplate.from_gguf(entries | {"tokenizer.ggml.bos_token_id": 100_000}, tokenizer)
    with pytest.raises(TemplateError, match="'pad_token' is undefined"):
        ChatTemplate(source + "{{ pad_token }}", tokenizer.specials)


def test_undefined_tools_and_documents_are_none_in_templates() -> None:
    """Templates of Mistral and Llama test for this name; an undefined name would not be equal to none."""
    source = "{% if tools is not none or documents is not none %}TOOLS{% endif %}{{ messages[-1].content }}"
    assert ChatTemplate(source).render([Message("user", "a")]) == "a"


def test_raise_exception_message_is_quoted_and_escaped() -> None:
    source = (
        "{% if messages[-1].content == 'no' %}{{ raise_exception('not \\x1b[31m that: ' ~ 'x' * 999) }}{% endif %}"
        "{{ messages[-1].content }}"
    )
    template = ChatTemplate(source)
    assert template.render([Message("user", "yes")]) == "yes"
    with pytest.raises(TemplateError, match=r"says: not \\x1b\[31m that: x+$") as raised:
        template.render([Message("user", "no")])
    assert len(str(raised.value)) < 300


@pytest.mark.parametrize("source", ["{% if %}", "{{ nothing.at.all }}", "{% endfor %}", "{{ 1 / 0 }}", "{{ 'a' + 1 }}"])
def test_template_that_cannot_render_is_refused_at_load(source: str) -> None:
    with pytest.raises(TemplateError, match="chat template says"):
        ChatTemplate(source)


def test_too_long_or_invalid_unicode_template_is_refused() -> None:
    with pytest.raises(TemplateError, match="longer than"):
        ChatTemplate(" " * (MAX_TEMPLATE_CHARACTERS + 1))
    with pytest.raises(TemplateError, match="not valid Unicode"):
        ChatTemplate("\ud800")


def test_special_tokens_must_begin_with_an_angle_bracket() -> None:
    with pytest.raises(ModelFileError, match=r"'\[INST\]' does not begin"):
        ChatTemplate("x", ["<s>", "[INST]"])


def test_known_and_unknown_templates_render_equally(
    template_source: str, small_tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    here = ChatTemplate(template_source, small_tokenizer.specials)
    assert here.is_known, f"add {here.sha256} to KNOWN_TEMPLATES, once the template has been read"
    assert here.sha256 in KNOWN_TEMPLATES
    assert not caplog.text
    apart = ChatTemplate(template_source, small_tokenizer.specials, known=())
    assert not apart.is_known and apart.sha256 in caplog.text
    messages = [Message("system", "a <think> b"), Message("user", "é <|im_end|> 👩"), Message("assistant", "x")]
    for tools in (None, [WEATHER, CLOCK]):
        assert apart.render(messages, date=DAY, tools=tools) == here.render(messages, date=DAY, tools=tools)
        ids = apart.encode(small_tokenizer, messages, date=DAY, tools=tools)
        assert ids == here.encode(small_tokenizer, messages, date=DAY, tools=tools)


def test_demo_template_equals_the_training_template() -> None:
    gguf = Path(__file__).parents[3] / "src/notso/demo/demo.gguf"
    if not gguf.is_file():
        pytest.skip("the demo model does not exist")
    source = (Path(__file__).parents[3] / "training/chat_template.jinja").read_text()
    with gguf.open("rb") as file:
        assert source.rstrip("\n").encode() in file.read(8 * 2**20)


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("", "prints nothing"),
        (" \n{# a comment #}", "prints nothing"),
        ("{% if enable_thinking %}{{ messages[-1].content }}{% endif %}", "prints nothing"),
        ("always the same", "omits the user's message"),
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "omits the user's message"),
        ("{{ messages[0].content }}", "omits the user's message"),  # reads only the first question of a chat
        ("{{ messages[-1].content[:5] }}", "omits the user's message"),
        ("{% if messages|length > 1 %}{{ 1 / 0 }}{% endif %}{{ messages[0].content }}", "ZeroDivisionError"),
    ],
)
def test_template_that_omits_the_question_is_refused_at_load(source: str, told: str) -> None:
    with pytest.raises(TemplateError, match=told):
        ChatTemplate(source)


def test_omissions_of_a_template_are_detected(template_source: str) -> None:
    drops = ChatTemplate(template_source).drops
    assert (LATER_SYSTEM in drops) == ('role == "system"' not in template_source.split("for message in messages")[1])
    assert OVERRIDDEN_TOOLS in drops
    keeps = "{% for message in messages %}{{ message.role ~ message.content }}{% endfor %}"
    keeps += "{% if xml_tools is defined %}{{ xml_tools | join }}{% endif %}"
    assert ChatTemplate(keeps).drops == ()
    refuses = keeps.replace("{{ message.role", "{{ raise_exception('no') if message.role == 'system' }}{{ message.role")
    assert ChatTemplate(refuses).drops == ()


def test_control_token_without_bracket_is_refused_only_if_the_template_can_print_it(
    small_metadata: dict[str, Any],
) -> None:
    tokens, kinds = small_metadata["tokenizer.ggml.tokens"], small_metadata["tokenizer.ggml.token_type"]
    entries = small_metadata | {
        "tokenizer.ggml.tokens": [*tokens, "[PAD]"],
        "tokenizer.ggml.token_type": [*kinds, 3],
        "tokenizer.chat_template": "{{ messages[-1].content }}<|im_end|>",
    }
    tokenizer = Tokenizer.from_gguf(entries)
    template = ChatTemplate.from_gguf(entries, tokenizer)
    assert template is not None
    ids = template.encode(tokenizer, [Message("user", "[PAD]")])
    assert len(tokens) not in ids and tokenizer.decode(ids) == "[PAD]"
    for change in (
        {"tokenizer.chat_template": "[PAD]{{ messages[-1].content }}"},
        {"tokenizer.ggml.bos_token_id": len(tokens)},
        {"tokenizer.ggml.token_type": [*kinds, 4]},  # ordinary text of the fine-tuned model can contain it
    ):
        with pytest.raises(ModelFileError, match="does not begin with '<'"):
            ChatTemplate.from_gguf(entries | change, Tokenizer.from_gguf(entries | change))
