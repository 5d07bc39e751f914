"""`notso chat`: a conversation, its commands, and its file."""

from __future__ import annotations

import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from notso.cli import engines
from notso.cli.slash_commands import COMMANDS, ChatFileError, write_chat
from notso.smollm3.errors import ContextLengthError, OutOfMemoryError
from notso.smollm3.hub import registry
from notso.smollm3.values.events import Event

Run = Callable[..., Any]


def said(engine: Any, turn: int = -1) -> list[tuple[str, str]]:
    return [(message.role, message.content) for message in engine.asked[turn]]


def test_conversation_history_is_sent_with_each_question(engine: Any, notso: Run) -> None:
    engine.says("Hello.", thinks=["A greeting."])

    result = notso("chat", stdin="hi\nand now?\n")

    assert result.code == 0
    assert result.out == "Hello.\nHello.\n"
    assert said(engine, 0) == [("user", "hi")]
    assert said(engine, 1) == [("user", "hi"), ("assistant", "Hello."), ("user", "and now?")]
    assert engine.asked[1][1].reasoning_content == "A greeting."
    assert "A greeting." in result.err
    assert engine.closed


def test_empty_lines_are_ignored(engine: Any, notso: Run) -> None:
    notso("chat", stdin="\n   \nhi\n\n")

    assert len(engine.asked) == 1


@pytest.mark.parametrize(
    ("typed", "question"),
    [
        ('"""one\ntwo\n\nthree"""\n', "one\ntwo\n\nthree"),
        ('"""\none\n"""\n', "one"),
        ("//not a command\n", "/not a command"),
        ("no newline at the end", "no newline at the end"),
        ('"""\nopen to the end\n of all\n', "open to the end\n of all"),
    ],
)
def test_question_is_parsed_from_typed_input(engine: Any, notso: Run, typed: str, question: str) -> None:
    assert notso("chat", stdin=typed).code == 0
    assert [messages[-1].content for messages in engine.asked] == [question]


def test_invalid_utf8_does_not_end_the_chat(engine: Any, notso: Run) -> None:
    engine.says("Yes.")
    assert notso("chat", stdin=b"caf\xe9\nhello\n").code == 0
    assert said(engine)[-1] == ("user", "hello")


def test_help_lists_every_command(engine: Any, notso: Run) -> None:
    result = notso("chat", stdin="/help\n")

    for command in COMMANDS:
        assert f"/{command.name}" in result.err
    assert result.out == ""


def test_clear_forgets_the_conversation(engine: Any, notso: Run) -> None:
    engine.says("Yes.")
    notso("chat", stdin="one\n/clear\ntwo\n")

    assert said(engine) == [("user", "two")]


@pytest.mark.parametrize(
    ("typed", "thinks"),
    [("/thinking off", False), ("/thinking on", True), ("/thinking", False), ("/think OFF", False)],
)
def test_thinking_command_switches_thinking(engine: Any, notso: Run, typed: str, thinks: bool) -> None:
    notso("chat", stdin=f"{typed}\nx\n")

    assert engine.thinking == [thinks]


def test_thinking_command_sets_a_token_budget(engine: Any, notso: Run) -> None:
    result = notso("chat", stdin="/thinking 256\nx\n/thinking 0\n/thinking ²\n/thinking 99999999999\n")

    assert "Thinking is on, at most 256 tokens." in result.err
    assert engine.thinking == [True]
    assert result.err.count("takes on, off, hide, show or a number of tokens") == 3


def test_thinking_can_be_hidden(engine: Any, notso: Run) -> None:
    engine.says("Yes.", thinks=["secret thought"])

    assert "secret thought" not in notso("chat", stdin="/thinking hide\nx\n").err
    assert engine.thinking == [True]


def test_temp_command_shows_sets_and_validates_temperature(engine: Any, notso: Run) -> None:
    result = notso("chat", stdin="/temp\n/temp 0\nx\n/temp 7\n/temp warm\n/temp nan\ny\n")

    assert "The temperature is 0.6." in result.err
    assert result.err.count("must be a number from 0 to 2") == 3
    assert [params.temperature for params in engine.params] == [0.0, 0.0]


def test_system_command_sets_and_removes_system_prompt(engine: Any, notso: Run) -> None:
    notso("chat", "--system", "Be brief.", stdin="x\n/system Be kind.\ny\n/system -\nz\n")

    assert [messages[0].content for messages in engine.asked] == ["Be brief.", "Be kind.", "x"]


def test_status_shows_model_settings_and_context(engine: Any, notso: Run) -> None:
    engine.is_demo = True
    result = notso("chat", "--no-think", stdin="x\n/status\n")

    assert "Scripted, 1.92 GB, context 4,096 tokens, KV cache f16, generic kernels on 2 threads" in result.err
    assert "not thinking | temperature 0.6 | 16 / 4,096 tokens" in result.err
    assert result.err.count("built-in demo model") == 2


def test_regenerate_resends_the_last_question(engine: Any, notso: Run) -> None:
    engine.says("Yes.")
    result = notso("chat", stdin="/regenerate\none\n/regenerate\n")

    assert "no message to regenerate" in result.err
    assert [said(engine, turn) for turn in range(2)] == [[("user", "one")]] * 2
    assert engine.params[0].seed != engine.params[1].seed


def test_failed_regeneration_keeps_the_last_turn(engine: Any, notso: Run) -> None:
    def fail_second() -> None:
        if len(engine.asked) == 2:
            raise ContextLengthError(9120, 8192)

    engine.script = [Event("text", text="Yes."), fail_second]
    notso("chat", stdin="one\n/regenerate\ntwo\n")

    assert said(engine) == [("user", "one"), ("assistant", "Yes."), ("user", "two")]


def test_regenerate_reuses_a_given_seed(engine: Any, notso: Run) -> None:
    notso("chat", "--seed", "5", stdin="one\n/regenerate\n")

    assert [params.seed for params in engine.params] == [5, 5]


def test_thinking_budget_of_thousands_of_digits_is_refused(engine: Any, notso: Run) -> None:
    result = notso("chat", stdin=f"/thinking {'9' * 5000}\none\n")

    assert "/thinking takes" in result.err
    assert len(engine.asked) == 1, "the chat goes on"


@pytest.mark.parametrize(
    ("typed", "near"), [("/hlep", "/help"), ("/tempp 1", "/temp"), ("/thi off", "/thinking"), ("/xyzzy", "/help lists")]
)
def test_an_unknown_command_is_not_sent_to_the_model(engine: Any, notso: Run, typed: str, near: str) -> None:
    result = notso("chat", stdin=f"{typed}\n")

    assert near in result.err
    assert engine.asked == []


@pytest.mark.parametrize("typed", ["/exit\n", "/quit\n", ""])
def test_chat_ends_on_exit_quit_or_end_of_input(engine: Any, notso: Run, typed: str) -> None:
    result = notso("chat", stdin=typed + ("never asked\n" if typed else ""))

    assert result.code == 0
    assert engine.asked == []
    assert engine.closed


def test_failed_turn_leaves_the_conversation_unchanged(engine: Any, notso: Run) -> None:
    def fail_now() -> None:
        engine.script = [Event("text", text="Fine.")]

    engine.script = [fail_now, ContextLengthError(9000, 4096)]
    result = notso("chat", stdin="too long\nshort\n")

    assert result.code == 0
    assert "needs 9,000 tokens" in result.err
    assert result.out == "\nFine.\n"
    assert said(engine) == [("user", "short")]


def test_control_characters_in_answers_are_replaced(engine: Any, notso: Run) -> None:
    engine.says("\x1b[2J")

    assert notso("chat", stdin="x\n").out == "␛[2J\n"


def test_continue_extends_the_last_answer(engine: Any, notso: Run, tmp_path: Path) -> None:
    engine.says("One")
    saved = tmp_path / "chat.json"

    result = notso("chat", stdin=f"/continue\nhi\n/continue\nand\n/save {saved}\n")

    assert "There is no answer to continue." in result.err
    assert [options.continue_last for options in engine.options] == [False, True, False]
    assert said(engine, 1) == [("user", "hi"), ("assistant", "One")]
    assert said(engine, 2) == [("user", "hi"), ("assistant", "OneOne"), ("user", "and")]


def test_truncated_answer_suggests_continue_or_clear(engine: Any, notso: Run) -> None:
    engine.script = [Event("text", text="half"), Event("end", finish_reason="length")]

    assert "maximum length; /continue resumes it." in notso("chat", "--max-tokens", "1", stdin="x\n").err
    assert "maximum length; /clear frees the context." in notso("chat", stdin="x\n").err


def test_conversation_is_saved_and_loaded(engine: Any, notso: Run, tmp_path: Path) -> None:
    saved = tmp_path / "chat.json"
    engine.says("Grün.", thinks=["Hm."])

    first = notso("chat", "--system", "Be brief.", stdin=f"/save {saved}\nx\n/save {saved}\ny\n/save\n")
    assert "There are no messages to write." in first.err
    assert [f"Wrote {n} messages to {saved}." in first.err for n in (2, 4)] == [True, True]
    assert saved.stat().st_mode & 0o777 == 0o600

    second = notso("chat", stdin=f"/load {saved}\nz\n/save {saved}\n")
    assert f"Loaded 4 messages from {saved}." in second.err
    turns = [("user", "x"), ("assistant", "Grün."), ("user", "y"), ("assistant", "Grün.")]
    assert said(engine) == [("system", "Be brief."), *turns, ("user", "z")]
    assert engine.asked[-1][2].reasoning_content == "Hm."
    assert f"Not written: {saved} already exists" in second.err


def test_names_of_files_may_begin_with_a_tilde(
    engine: Any, notso: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    result = notso("chat", stdin="x\n/save ~draft\n/load ~draft\n/export ~draft.md\n/load ~no-user/draft\n/model ~m\n")
    assert "Loaded 2 messages from ~draft." in result.err and Path("~draft.md").is_file()
    assert "Not loaded: ~no-user/draft: No such file" in result.err and "No model is named '~m'" in result.err


class FullDisk(io.StringIO):
    def write(self, text: str, /) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_failed_save_keeps_the_previous_file_and_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = tmp_path / "chat.json"
    write_chat(saved, "first")

    def open_full(descriptor: int, *_: Any, **__: Any) -> FullDisk:
        os.close(descriptor)
        return FullDisk()

    monkeypatch.setattr(os, "fdopen", open_full)
    for path, replace in ((saved, True), (tmp_path / "new.json", False)):
        with pytest.raises(ChatFileError, match=f"{path.name}: No space left"):
            write_chat(path, "second", replace=replace)

    assert saved.read_text() == "first" and {each.name for each in tmp_path.iterdir()} <= {"chat.json", "home"}


def test_web_import_reads_a_saved_conversation(engine: Any, notso: Run, tmp_path: Path) -> None:
    from notso.web.chat.files.imports import read_chats

    engine.says("Yes.")
    notso("chat", "--system", "Be brief.", stdin=f"x\n/save {tmp_path / 'chat.json'}\n")

    ((chat, messages),) = read_chats((tmp_path / "chat.json").read_bytes(), lambda text: text)
    assert chat.settings["system_prompt"] == "Be brief."
    assert [(each.role, each.content) for each in messages] == [("user", "x"), ("assistant", "Yes.")]


def test_load_uses_the_selected_branch_of_a_web_export(engine: Any, notso: Run, tmp_path: Path) -> None:
    def message(id: str, role: str, content: str, above: str | None, below: str | None = None) -> dict[str, Any]:
        return {"id": id, "role": role, "content": content, "parent_id": above, "chosen_child": below}

    messages = [message("a", "user", "old", None, "b"), message("b", "assistant", "Old.", "a")]
    messages += [message("c", "user", "new", None, "d"), message("d", "assistant", "First.", "c")]
    messages += [message("e", "assistant", "Second.", "c")]
    for each in messages:
        each |= {"reasoning": "", "state": "done", "created_ms": 1}
    chat = {"title": "x", "thinking": False, "prompt_date": "2026-01-01", "created_ms": 1, "updated_ms": 1}
    chat |= {"pinned": False, "settings": {}, "chosen_root": "c", "messages": messages}
    exported = tmp_path / "notso-chats.json"
    exported.write_text(json.dumps({"format": "notso-chats", "version": 2, "chats": [chat]}))

    result = notso("chat", stdin=f"/load {exported}\nz\n")

    assert "Loaded 2 messages" in result.err, result.err
    assert said(engine) == [("user", "new"), ("assistant", "First."), ("user", "z")]


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "No such file"), ("not JSON", "chat.json: "), ("{}", "chat.json: "), ('{"messages": []}', "chat.json: ")],
)
def test_invalid_chat_file_is_not_loaded(
    engine: Any, notso: Run, tmp_path: Path, content: str | None, told: str
) -> None:
    path = tmp_path / "chat.json"
    if content is not None:
        path.write_text(content)

    result = notso("chat", stdin=f"x\n/load {path}\ny\n")

    assert "Not loaded: " in result.err and told in result.err
    assert said(engine)[0] == ("user", "x")


def test_export_writes_markdown_or_json_without_overwriting(engine: Any, notso: Run, tmp_path: Path) -> None:
    engine.says("Yes.", thinks=["secret thought"])
    markdown, listed = tmp_path / "chat.md", tmp_path / "chat.json"

    result = notso("chat", stdin=f"x\n/export\n/export {markdown}\n/export {listed}\n/export {markdown}\n")

    assert markdown.read_text() == "## You\n\nx\n\n## Assistant\n\nYes.\n"
    assert [each["role"] for each in json.loads(listed.read_text())["messages"]] == ["user", "assistant"]
    assert "/export requires the name of a file" in result.err
    assert f"Not written: {markdown} already exists" in result.err


def test_model_command_switches_model_and_keeps_conversation(engine: Any, notso: Run, small_model: Path) -> None:
    result = notso("chat", "--context", "512", stdin=f"x\n/model\n/model {small_model}\ny\n")

    assert "Using Scripted. Models:" in result.err and "demo" in result.err
    assert engine.opened_with == (small_model, 512, None)
    assert said(engine)[0] == ("user", "x")


def test_model_command_refuses_a_name_of_several_files(
    engine: Any, notso: Run, own_home: Path, small_model: Path
) -> None:
    for owner in ("first", "second"):
        path = registry.hub_cache() / f"models--{owner}--Tuned/snapshots/{'a' * 40}/SmolLM3-Tuned.gguf"
        path.parent.mkdir(parents=True)
        path.write_bytes(owner.encode())
    (path.parent / "SmolLM3-Other.gguf").symlink_to(small_model)
    result = notso("chat", stdin="/model tuned\n/model smollm3-other\ny\n")
    assert "several files are named SmolLM3-Tuned; specify the path" in result.err
    assert engine.opened_with[0] == path.parent / "SmolLM3-Other.gguf"


@pytest.mark.parametrize("name", ["/no/such/file.gguf", "no-such-name"])
def test_missing_model_leaves_the_current_model(engine: Any, notso: Run, name: str) -> None:
    result = notso("chat", stdin=f"/model {name}\ny\n")

    assert f"No model is named {name!r}; /model lists them." in result.err
    assert engine.opened_with[0] is None
    assert len(engine.asked) == 1


def test_damaged_model_leaves_the_current_model(engine: Any, notso: Run, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(20))

    result = notso("chat", stdin=f"/model {damaged}\ny\n")

    assert f"notso: {damaged}: " in result.err
    assert engine.opened_with[0] is None
    assert len(engine.asked) == 1


def test_failed_model_load_reopens_the_previous_model(
    engine: Any, notso: Run, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Path | None] = []

    def open_engine(model: Path | None, *_: Any, **__: Any) -> Any:
        opened.append(model)
        if model == small_model:
            raise OutOfMemoryError("needs 9 MiB", needed_bytes=9, available_bytes=1)
        return engine

    monkeypatch.setattr(engines, "open_engine", open_engine)
    result = notso("chat", stdin=f"/model {small_model}\ny\n")

    assert opened == [None, small_model, Path("/nowhere/scripted.gguf")]
    assert "needs 9 MiB" in result.err
    assert len(engine.asked) == 1


def test_adapter_is_kept_on_failed_model_switch_and_dropped_on_success(
    engine: Any, notso: Run, small_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[list[str]] = []

    def open_engine(*_: Any, adapters: Any = (), **__: Any) -> Any:
        opened.append(list(adapters))
        if len(opened) == 2:
            raise OutOfMemoryError("needs 9 MiB", needed_bytes=9, available_bytes=1)
        return engine

    monkeypatch.setattr(engines, "open_engine", open_engine)
    result = notso("chat", "--adapter", "tone=a.gguf", stdin=f"/model {small_model}\nx\n/model {small_model}\ny\n")

    assert opened == [["tone=a.gguf"], [], ["tone=a.gguf"], []]
    assert [each.adapter for each in engine.options] == ["tone", None]
    assert "adapter tone belongs to the previous model" in result.err + result.out


def test_loop_of_links_is_reported_or_replaced(tmp_path: Path) -> None:
    path = tmp_path / "loop"
    path.symlink_to("loop")
    with pytest.raises(ChatFileError, match="loop"):
        write_chat(path, "x")
    write_chat(path, "x", replace=True)
    assert path.read_text() == "x"
