"""Only the assistant's tokens of a conversation are trained, in the form that the template requests."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from notso.qtensor import GGUFFile
from notso.smollm3 import InvalidRequestError, TemplateError
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.text.chat_template import ChatTemplate
from notso.smollm3.text.prompt import PromptWriter
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.tuning.training_rows import NOT_LEARNED, RowWriter, TrainingRow, split

DAY = date(2027, 5, 17)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    with GGUFFile.open(demo_path()) as file:
        return Tokenizer.from_gguf(file.metadata)


@pytest.fixture(scope="module")
def writer() -> RowWriter:
    return RowWriter.of(demo_path(), 1024, DAY)


def said(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def row(*messages: dict[str, Any], thinking: bool = False) -> dict[str, Any]:
    return {"messages": list(messages), "chat_template_kwargs": {"enable_thinking": thinking}}


def learned(made: TrainingRow, tokenizer: Tokenizer) -> str:
    assert len(made.ids) == len(made.labels)
    assert all(label in (NOT_LEARNED, token) for token, label in zip(made.ids, made.labels, strict=True))
    return tokenizer.decode([label for label in made.labels if label != NOT_LEARNED], skip_control=False)


def test_each_answer_and_its_end_token_are_trained(writer: RowWriter, tokenizer: Tokenizer) -> None:
    made = writer.row(row(said("user", "Hi"), said("assistant", "Ho"), said("user", "Yes?"), said("assistant", "No")))
    assert learned(made, tokenizer) == "Ho<|im_end|>No<|im_end|>"
    text = tokenizer.decode(made.ids, skip_control=False)
    assert "Today Date: 17 May 2027" in text and "Reasoning Mode: /no_think" in text
    assert text.endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\nHo<|im_end|>\n"
        "<|im_start|>user\nYes?<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\nNo<|im_end|>"
    )


def test_reasoning_is_trained_and_answers_without_reasoning_are_not(writer: RowWriter, tokenizer: Tokenizer) -> None:
    thoughtful = said("assistant", "<think>\nhm\n</think>\nFour")
    made = writer.row(row(said("user", "2 + 2?"), thoughtful, thinking=True))
    assert learned(made, tokenizer) == "<think>\nhm\n</think>\nFour<|im_end|>"
    plain = said("assistant", "<think>\n\n</think>\nWelcome")
    both = row(said("user", "2 + 2?"), thoughtful, said("user", "Thanks"), plain, thinking=True)
    assert learned(writer.row(both), tokenizer) == "<think>\nhm\n</think>\nFour<|im_end|>"


@pytest.mark.parametrize(
    "answer",
    [
        said("assistant", "<think>hm</think>Four"),
        said("assistant", "\n<think>\nhm\n</think>\nFour"),
        *(said("assistant", "Four") | {key: "hm"} for key in ("reasoning_content", "reasoning", "thinking")),
    ],
)
def test_reasoning_in_the_forms_of_other_programs_is_trained(
    writer: RowWriter, tokenizer: Tokenizer, answer: dict[str, Any]
) -> None:
    expected = writer.row(row(said("user", "2 + 2?"), said("assistant", "<think>\nhm\n</think>\nFour"), thinking=True))
    assert writer.row(row(said("user", "2 + 2?"), answer, thinking=True)) == expected
    assert tokenizer.think_close_id in expected.labels


def test_reasoning_that_mentions_its_tag_is_not_cut(writer: RowWriter, tokenizer: Tokenizer) -> None:
    answer = "<think>\nThe </think> tag.\n</think>\nFour"
    found = writer.row(row(said("user", "2 + 2?"), said("assistant", answer), thinking=True))
    assert learned(found, tokenizer) == f"{answer}<|im_end|>" and found.labels.count(tokenizer.think_close_id) == 1


def test_weight_of_an_answer_in_a_prompt_is_not_refused(writer: RowWriter) -> None:
    prompt, completion = [said("user", "a"), said("assistant", "b"), said("user", "c")], [said("assistant", "d")]
    plain = writer.row({"prompt": prompt, "completion": completion})
    prompt[1]["weight"] = 0  # as it is applied to all of them
    assert writer.row({"prompt": prompt, "completion": completion}) == plain


def test_calls_at_the_end_of_a_text_are_trained_as_calls(writer: RowWriter, tokenizer: Tokenizer) -> None:
    written = '<tool_call>\n{"name": "add", "arguments": {"x": 2}}\n</tool_call>'
    call = {"function": {"name": "add", "arguments": {"x": 2}}}
    expected = writer.row(row(said("user", "2?"), said("assistant", "Yes.") | {"tool_calls": [call]}))
    assert writer.row(row(said("user", "2?"), said("assistant", f"Yes.\n{written}"))) == expected
    assert tokenizer.tool_call_open_id in expected.labels
    example = writer.row(row(said("user", "How?"), said("assistant", f"So:\n{written}\nis a call. <tool_call>")))
    assert tokenizer.tool_call_open_id not in example.labels


def test_row_content_never_becomes_a_control_token(writer: RowWriter, tokenizer: Tokenizer) -> None:
    plain, marked = (
        writer.row(row(said("user", words), said("assistant", words))).ids for words in ("end", "<|im_end|>")
    )
    end = next(iter(tokenizer.encode("<|im_end|>", control=True)))
    assert plain.count(end) == marked.count(end)


def test_only_the_completion_of_a_prompt_is_trained(writer: RowWriter, tokenizer: Tokenizer) -> None:
    given = {
        "prompt": [said("user", "Hi"), said("assistant", "Ho"), said("user", "Yes?")],
        "completion": [said("assistant", "No")],
        "chat_template_kwargs": {"enable_thinking": False},
    }
    assert learned(writer.row(given), tokenizer) == "No<|im_end|>"


def test_tool_calls_are_trained_and_tools_are_rendered(writer: RowWriter, tokenizer: Tokenizer) -> None:
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"x": "2*3"}}}
    made = writer.row(
        row(
            said("user", "2*3?"),
            said("assistant", "") | {"tool_calls": [call]},
            said("tool", "6"),
            said("assistant", "6"),
        )
    )
    tool = {"type": "function", "function": {"name": "calculator", "description": "works out", "parameters": {}}}
    offered = writer.row(row(said("user", "Hi"), said("assistant", "Ho")) | {"tools": [tool]})
    assert '"description": "works out"' in tokenizer.decode(offered.ids, skip_control=False)
    text = learned(made, tokenizer)
    assert '"name": "calculator"' in text and '"x": "2*3"' in text and text.endswith("6<|im_end|>")


def test_long_rows_are_truncated_and_refused_if_no_answer_is_left(tokenizer: Tokenizer) -> None:
    given = row(said("user", "Hi"), said("assistant", "word " * 200))
    whole = RowWriter.of(demo_path(), 1024, DAY).row(given)
    cut = RowWriter.of(demo_path(), 150, DAY).row(given)
    assert cut.ids == whole.ids[:150] and len(whole.ids) > 150
    with pytest.raises(ValueError, match="no answer to train on within 20 tokens"):
        RowWriter.of(demo_path(), 20, DAY).row(given)


def test_lines_end_only_at_newlines(writer: RowWriter, tmp_path: Path) -> None:
    given = [row(said("user", f"Hi{end}you"), said("assistant", f"Ho{end}you")) for end in "\u2028\u2029\x85\x0c"]
    path = tmp_path / "rows.jsonl"
    path.write_bytes("\r\n".join(json.dumps(each, ensure_ascii=False) for each in given).encode())
    assert writer.read(path) == [writer.row(each) for each in given]


def test_template_without_an_end_token_is_refused(tokenizer: Tokenizer) -> None:
    writer = RowWriter.of(demo_path(), 1024, DAY)
    writer._ends = frozenset()
    with pytest.raises(ValueError, match="no end token"):
        writer.row(row(said("user", "Hi"), said("assistant", "Ho")))


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2"),
        ("[]", "line 2: a row must be an object"),
        ('{"text": "x"}', "line 2: a row needs messages, or a prompt and a completion"),
        ('{"messages": []}', "line 2: messages must be a list of messages"),
        ('{"messages": [{"role": "robot", "content": "x"}]}', "an invalid role"),
        ('{"messages": [{"role": "user", "content": 7}]}', "an invalid role or content"),
        ('{"messages": [{"role": "user", "content": "x"}]}', "there is no answer to train on"),
        ('{"messages": [{"role": "assistant", "content": "x", "tool_calls": [7]}]}', "a tool call needs a function"),
        ('{"messages": [{"role": "assistant", "content": "x", "tool_calls": 7}]}', "tool_calls must be a list"),
        ('{"messages": [{"role": "user", "content": "x"}], "tools": 1}', "tools must be a list of objects"),
        ('{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": 1}', "must be an object"),
        ('{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"xml_tools": [1]}}', "'xml_tools'"),
        ('{"messages": [{"role": "user", "content": "x"}], "chat_template_kwargs": {"enable_thinking": 0}}', "true or"),
        ('{"messages": [{"role": "assistant", "function_call": {"name": "f"}}]}', "function_call"),
        ('{"messages": [{"role": "assistant", "content": "x", "weight": 0}]}', "weight"),
        ('{"messages": [{"role": "assistant", "content": "<think>x"}]}', "</think> is missing"),
        (r'{"messages": [{"role": "assistant", "content": "x\n</think>\ny"}]}', ", but <think> is missing"),
    ],
)
def test_invalid_row_is_refused_by_line(writer: RowWriter, tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row(said("user", "Hi"), said("assistant", "Ho"))) + "\n" + line + "\n")
    with pytest.raises(InvalidRequestError, match=f"rows.jsonl.*{words}"):
        writer.read(path)


def test_row_that_the_template_rejects_is_named(tokenizer: Tokenizer, tmp_path: Path) -> None:
    source = (
        "{% for message in messages %}"
        "{% if message.content == 'Bye' %}{{ raise_exception('no goodbyes') }}{% endif %}"
        "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    writer = RowWriter(
        PromptWriter(ChatTemplate(source, ("<|im_start|>", "<|im_end|>")), tokenizer), tokenizer, 1024, DAY
    )
    path = tmp_path / "rows.jsonl"
    given = [row(said("user", words), said("assistant", "Ho")) for words in ("Hi", "Bye")]
    path.write_text("\n".join(map(json.dumps, given)))
    with pytest.raises(TemplateError, match=r"^rows\.jsonl, line 2: the model's chat template says: .*no goodbyes"):
        writer.read(path)


def test_file_without_rows_is_refused(writer: RowWriter, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("\n\n")
    with pytest.raises(InvalidRequestError, match=r"rows.jsonl has no rows"):
        writer.read(tmp_path / "rows.jsonl")


def test_held_out_rows_are_chosen_by_seed() -> None:
    rows = [TrainingRow([number], [number]) for number in range(40)]
    learned, held_out = split(rows, 0.1, 1)
    assert len(held_out) == 4 and sorted(each.ids[0] for each in learned + held_out) == list(range(40))
    assert split(rows, 0.1, 1) == (learned, held_out) and split(rows, 0.1, 2)[1] != held_out
    assert split(rows[:9], 0.5, 1) == (rows[:9], []), "too few rows for a split"
    assert len(split(rows[:12], 0.01, 1)[1]) == 1 and split(rows, 0.0, 1) == (rows, [])


def test_only_regular_files_are_read(writer: RowWriter) -> None:
    with pytest.raises(OSError, match="regular"):
        writer.read(Path("/dev/null"))  # a pipe or /dev/zero would never end
