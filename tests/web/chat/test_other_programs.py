"""Imports from other programs: every message, branch, date and model is imported, and everything left out is
counted."""

from __future__ import annotations

import asyncio
import gzip
import io
import json
import os
import random
import threading
import zipfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine, say
from web.chat import other_exports
from web.chat.other_exports import BEGAN, WHOLE, ToldChat, random_chat, zipped

from notso.web.chat.files import documents, import_process, imports, other_programs
from notso.web.chat.files.imports import ImportedChat, ParsedImport, new_messages, validate_chats
from notso.web.chat.routes import transfer
from notso.web.store.protocol import EarlierImport, StoredMessage
from notso.web.store.sqlite.store import SQLiteStore
from notso.web.store.tree import shown_path
from notso.web.values.errors import Problem
from notso.web.values.wording import language

Start = Callable[..., Any]
CHATS = dict.fromkeys(WHOLE, 40) | {"chatgpt zip": 500}
SEED = int(os.environ.get("FUZZ_SEED", "41"))


def told(program: str, count: int) -> list[ToldChat]:
    dice = random.Random(f"{SEED} {program}")
    chats = [random_chat(dice, number, versions_only=program == "lm studio") for number in range(count)]
    for chat in chats:
        for each in chat.messages:
            # Remove fields that the program's export does not contain.
            if program.startswith("claude"):
                each.model = ""
            if program == "lm studio":
                each.second = int(chat.key[:4], 16) / 1000  # type: ignore[assignment]
            if program.startswith(("claude", "llama")) and each.role == "user":
                each.files = [("notes.txt", "some text")]
    return chats


def read(body: bytes) -> ParsedImport:
    return validate_chats(import_process.decode_entries(import_process.encode_entries(body)), str)


def compare(chat: ToldChat, arrived: ImportedChat, program: str) -> None:
    stored, messages = arrived
    assert stored.title == chat.title
    by_text = {message.content: message for message in messages}
    assert len(by_text) == len(messages) == len(chat.messages), "each message is imported once"
    position = {message.id: at for at, message in enumerate(messages)}
    for each in chat.messages:
        message = by_text[each.content]
        parent = chat.messages[each.parent].content if each.parent is not None else None
        above = by_text[parent].id if parent is not None else None
        assert (message.role, message.reasoning, message.parent_id) == (each.role, each.reasoning, above)
        assert message.created_ms == round((BEGAN + each.second) * 1000)
        assert message.model == each.model
        assert [(file.name, file.text) for file in message.attachments] == each.files
        assert above is None or position[above] < position[message.id], "parents come before their replies"
    for at, _ in enumerate([None, *chat.messages]):
        versions = [chat.messages[child].content for child in chat.children(at - 1 if at else None)]
        places = [position[by_text[text].id] for text in versions]
        assert places == sorted(places), "versions keep their order"
    shown = [shown.message.content for shown in shown_path(messages, stored.chosen_root)]
    if program != "librechat":  # LibreChat does not store which version was shown
        assert shown == [chat.messages[at].content for at in chat.line()]
    assert stored.created_ms // 1000 - BEGAN < 100 and stored.updated_ms >= stored.created_ms


@pytest.mark.parametrize("program", WHOLE)
def test_export_of_each_program_is_imported_completely(program: str) -> None:
    chats = told(program, CHATS[program])
    found = read(WHOLE[program](chats))
    assert len(found.chats) == len(chats)
    arrived = {chat.title: (chat, messages) for chat, messages in found.chats}
    for chat in chats:
        compare(chat, arrived[chat.title], program)
    expected = sum((chat.left_out for chat in chats), Counter[str]())
    assert +found.left_out == +expected
    assert expected["pictures"] and expected["tool_calls"], "the test chats contain images and tool calls"


def test_system_prompts_are_imported() -> None:
    chat = random_chat(random.Random(1), 1, versions_only=True)
    for exported in (other_exports.lm_studio(chat), other_exports.librechat(chat, recursive=True)):
        ((arrived, _),) = read(json.dumps(exported).encode()).chats
        assert arrived.settings == {"system_prompt": "Be brief."}


def test_beginning_of_long_system_prompt_is_imported() -> None:
    exported = other_exports.lm_studio(random_chat(random.Random(1), 1, versions_only=True))
    prompt = "".join(map(str, range(9000)))
    ordinary, found = (read(json.dumps(each).encode()) for each in (exported, exported | {"systemPrompt": prompt}))
    assert found.chats[0][0].settings == {"system_prompt": prompt[:20_000]}
    assert found.left_out - ordinary.left_out == Counter(texts=1)


def test_omitted_images_and_files_leave_placeholders() -> None:
    parts = [{"content_type": "image_asset_pointer", "asset_pointer": "x"}]
    user = {"author": {"role": "user"}, "content": {"content_type": "multimodal_text", "parts": parts}}
    mapping = {"a": {"message": user | {"metadata": {"attachments": [{"name": "plan.pdf"}]}}, "parent": None}}
    found = read(json.dumps([{"title": "T", "mapping": mapping, "id": "1"}]).encode())
    assert found.chats[0][1][0].content == "[picture] [plan.pdf]"
    assert +found.left_out == Counter(pictures=1, files=1)


def test_search_references_are_removed_from_the_text() -> None:
    answer = {"author": {"role": "assistant"}, "recipient": "all", "metadata": {}}
    text = "It rains.\ue200cite\ue202turn0search0\ue201 Often."
    answer |= {"content": {"content_type": "text", "parts": [text]}}
    found = read(json.dumps([{"mapping": {"a": {"message": answer, "parent": None}}, "id": "1"}]).encode())
    assert found.chats[0][1][0].content == "It rains. Often." and found.left_out["references"] == 1


def test_text_of_librechat_that_is_also_a_part_is_imported_once() -> None:
    answer = {"messageId": "1", "isCreatedByUser": False, "text": "Yes.", "content": [{"type": "text", "text": "Yes."}]}
    found = read(json.dumps({"conversationId": "1", "title": "T", "messages": [answer]}).encode())
    assert found.chats[0][1][0].content == "Yes."


def test_openai_content_parts_are_imported_as_text() -> None:
    parts = [{"type": "text", "text": "Look:"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    found = read(json.dumps([{"role": "user", "content": parts}]).encode())
    assert found.chats[0][1][0].content == "Look:" and +found.left_out == Counter(pictures=1)


# ---- lists of messages


def spoken(body: Any) -> list[list[tuple[str, str, str]]]:
    """Return the role, text and reasoning of the messages of each chat."""
    found = read(body if isinstance(body, bytes) else json.dumps(body).encode())
    return [[(each.role, each.content, each.reasoning) for each in messages] for _, messages in found.chats]


def lines(*documents: Any) -> bytes:
    return "\n".join(map(json.dumps, documents)).encode()


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": {"value": text, "annotations": []}}


def agi(role: str, *parts: dict[str, Any]) -> dict[str, Any]:
    return {"id": role, "role": role, "fragments": [{"ft": "content", "fId": "1", "part": part} for part in parts]}


ASKED = {"role": "user", "content": "Cats?"}
ANSWERED = {"role": "assistant", "content": "They purr."}
CATS = [("user", "Cats?", ""), ("assistant", "They purr.", "")]
THOUGHT = [CATS[0], ("assistant", "They purr.", "hm")]
MESSAGE_LISTS: dict[str, tuple[Any, list[tuple[str, str, str]]]] = {
    "unknown fields": (
        {"messages": [ASKED | {"id": "1", "timestamp": 1}, ANSWERED | {"refusal": None, "usage": {}}], "source": "x"},
        CATS,
    ),
    "OpenRouter": (
        [ASKED, ANSWERED | {"reasoning": "hm", "reasoning_details": [{"type": "reasoning.text", "text": "hm"}]}],
        THOUGHT,
    ),
    "OpenAI's annotations": ([ASKED, ANSWERED | {"annotations": [{"type": "url_citation"}]}], CATS),
    "Ollama": ({"model": "llama3", "messages": [ASKED, ANSWERED | {"thinking": "hm"}], "options": {}}, THOUGHT),
    "tags of reasoning": ([ASKED, ANSWERED | {"content": "<think>hm</think>\nThey purr."}], THOUGHT),
    "Anthropic": (
        {"messages": [ASKED, {"role": "assistant", "content": [
            {"type": "thinking", "thinking": "hm", "signature": "x"}, {"type": "text", "text": "They purr."}]}]},
        THOUGHT,
    ),
    "Jan": (
        {"title": "T", "exported_at": "2026-01-01", "messages": [
            {"id": "1", "role": "user", "content": [text_part("Cats?")], "created_at": 1},
            {"id": "2", "role": "assistant", "created_at": 2, "metadata": {},
             "content": [text_part("hm") | {"type": "reasoning"}, text_part("They purr.")]}]},
        THOUGHT,
    ),
    "Jan's files": (lines(ASKED | {"object": "thread.message"}, ANSWERED | {"object": "thread.message"}), CATS),
    "big-AGI": (
        {"conversations": [{"id": "1", "autoTitle": "T", "messages": [
            agi("user", {"pt": "text", "text": "Cats?"}),
            agi("assistant", {"pt": "ma", "aText": "hm"}, {"pt": "text", "text": "They purr."})]}]},
        THOUGHT,
    ),
    "TypingMind": (
        {"data": {"chats": [{"chatTitle": "T", "messages": [
            {"uuid": "1", "role": "user", "content": [{"type": "text", "text": "Cats?"}]}, ANSWERED]}]}},
        CATS,
    ),
    "NextChat": ({"chat-next-web-store": {"sessions": [{"topic": "T", "messages": [ASKED, ANSWERED]}]}}, CATS),
    "ShareGPT": (
        [{"conversations": [{"from": "human", "value": "Cats?"}, {"from": "gpt", "value": "They purr."}]}], CATS,
    ),
    "Page Assist": (
        {"chat": [{"messages": [
            ANSWERED | {"history_id": "h", "createdAt": 2}, ASKED | {"history_id": "h", "createdAt": 1}]}]},
        CATS,
    ),
    "SillyTavern": (
        lines({"user_name": "You", "character_name": "Cat", "chat_metadata": {}},
              {"name": "You", "is_user": True, "mes": "Cats?"}, {"name": "Cat", "is_user": False, "mes": "They purr."}),
        CATS,
    ),
    "text as a list": ([ASKED | {"content": ["Cats?"]}, ANSWERED], CATS),
    "a refusal": ([ASKED, {"role": "assistant", "content": None, "refusal": "They purr."}], CATS),
}  # fmt: skip


@pytest.mark.parametrize("name", MESSAGE_LISTS)
def test_lists_of_messages_of_other_programs_are_imported(name: str) -> None:
    body, expected = MESSAGE_LISTS[name]
    assert spoken(body) == [expected]


def test_title_and_system_prompt_of_a_message_list_are_imported() -> None:
    for prompt in ("Be brief.", {"role": "system", "content": "Be brief."}):
        body = {"title": " A  cat ", "systemPrompt": prompt, "messages": [ASKED]}
        ((chat, _),) = read(json.dumps(body).encode()).chats
        assert (chat.title, chat.settings) == ("A cat", {"system_prompt": "Be brief."})
    long = [{"role": "system", "content": "x" * 15_000}] * 2
    found = read(json.dumps([*long, ASKED]).encode())
    assert len(found.chats[0][0].settings["system_prompt"]) == 20_000 and +found.left_out == Counter(texts=1)


def test_unexpected_fields_of_a_message_list_do_not_prevent_import() -> None:
    assert spoken({"system": True, "messages": [ASKED | {"images": 5}, ANSWERED]}) == [CATS]


def call(name: str, arguments: Any, **fields: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": arguments}} | fields


@pytest.mark.parametrize(
    ("calls", "results", "expected", "omitted"),
    [
        ([call("f", "{}", id="a", index=0)], [{"role": "tool", "tool_call_id": "a", "content": "r"}], ["r"], 0),
        ([call("f", {"x": 1})], [{"role": "tool", "tool_name": "f", "content": "r"}], ["r"], 0),
        ([call("f", {}), call("g", {})], [{"role": "tool", "tool_name": n, "content": n} for n in "gf"], ["f", "g"], 0),
        ([call("f", "", id="a")], [{"role": "tool", "content": [{"type": "text", "text": "r"}]}], ["r"], 0),
        ([call("f", '{"x": ', id="a")], [{"role": "tool", "tool_call_id": "a", "content": "r"}], [], 2),
        ([call("", "{}", id="a"), call("f", "[1]", id="b")], [], [], 2),
        ([], [{"role": "tool", "tool_call_id": "a", "content": "r"}], [], 1),
        (5, [], [], 1),
        ({"id": "a"}, [], [], 1),
        ([5, {"function": "f"}, call("f", "{}", id="a")], [], [""], 2),
        ([call("f", "{}", id="a")], [ASKED, {"role": "tool", "tool_call_id": "a", "content": "r"}], [""], 1),
        (
            [call("f", "{}", id="a"), call("g", "{}", id="a")],
            [{"role": "tool", "tool_call_id": "a", "content": each} for each in "fg"],
            ["f"],
            2,
        ),
    ],
)
def test_a_tool_call_that_cannot_be_stored_does_not_prevent_import(
    calls: Any, results: list[Any], expected: list[str], omitted: int
) -> None:
    found = read(json.dumps([ASKED, ANSWERED | {"tool_calls": calls}, *results]).encode())
    uses = [use.result for _, messages in found.chats for message in messages for use in message.tool_uses]
    assert uses == expected and +found.left_out == +Counter(tool_calls=omitted)


def test_unreadable_tool_calls_of_llama_cpp_do_not_prevent_import() -> None:
    asked = {"id": "1", "role": "user", "content": "Cats?"}
    answered = {"id": "2", "parent": "1", "role": "assistant", "content": "Yes.", "toolCalls": '[{"id": '}
    found = read(json.dumps({"conv": {"id": "c", "currNode": "2"}, "messages": [asked, answered]}).encode())
    assert [message.content for message in found.chats[0][1]] == ["Cats?", "Yes."]
    assert +found.left_out == Counter(tool_calls=1)


def test_function_calls_of_older_clients_are_imported() -> None:
    asked = ANSWERED | {"function_call": {"name": "f", "arguments": "{}"}}
    found = read(json.dumps([ASKED, asked, {"role": "function", "name": "f", "content": "r"}]).encode())
    assert [use.result for use in found.chats[0][1][1].tool_uses] == ["r"]


def test_message_lists_of_an_archive_are_separate_chats() -> None:
    dogs = [ASKED | {"content": "Dogs?"}, ANSWERED | {"content": "They bark."}]
    archive = zipped({"a.json": json.dumps([ASKED, ANSWERED]), "b/messages.jsonl": lines(*dogs)})
    assert spoken(archive) == [CATS, [("user", "Dogs?", ""), ("assistant", "They bark.", "")]]


def test_chats_in_a_table_of_messages_are_separate() -> None:
    """LobeChat exports one list of all messages, and Jan's messages name their thread."""

    def row(message: Any, session: str, topic: str | None, second: int) -> Any:
        return message | {"sessionId": session, "topicId": topic, "createdAt": f"2025-01-01T00:00:0{second}Z"}

    dogs = {"role": "user", "content": "Dogs?"}
    rows = [row(ANSWERED, "s", "a", 2), row(dogs, "s", "b", 3), row(ASKED, "s", "a", 1), row(dogs, "t", None, 4)]
    asked = [("user", "Dogs?", "")]
    assert spoken({"exportType": "all", "state": {"messages": rows}}) == [CATS, asked, asked]
    threads = [ASKED | {"thread_id": "1"}, dogs | {"thread_id": "2"}, ANSWERED | {"thread_id": "1"}]
    for body in (lines(*threads), threads, {"messages": threads}):
        assert spoken(body) == [CATS, [("user", "Dogs?", "")]]
    unordered = [ASKED | {"chat_id": "1", "createdAt": 2}, ANSWERED | {"chat_id": "1", "createdAt": {}}]
    assert spoken(unordered) == [CATS]
    mixed = [ASKED | {"session_id": None}, ANSWERED | {"session_id": "1"}, dogs | {"session_id": "2", "createdAt": {}}]
    assert spoken(mixed) == [[*CATS, ("user", "Dogs?", "")]]


@pytest.mark.parametrize(
    ("times", "is_sorted"),
    [
        ((10, 9.5), True),
        (("2025-01-01T00:00:01Z", "2025-01-01T00:00:00.500Z"), True),
        (("2025-01-01T00:00:00.500Z", "2025-01-01T00:00:00Z"), True),
        (("2025-01-01T00:30:00+00:00", "2025-01-01T01:00:00+02:00"), True),
        # Times of unknown or different forms do not change the order.
        (("9:59", "10:01"), False),
        (("Mon, 6 Jan", "Fri, 10 Jan"), False),
        (("2025-01-01T00:00:01Z", "2025-01-01T00:00:00"), False),
        ((2, "1"), False),
        ((2, True), False),
    ],
)
def test_messages_of_a_table_are_sorted_only_by_times_of_known_form(times: tuple[Any, Any], is_sorted: bool) -> None:
    question, answer = ASKED | {"chat_id": "1"}, ANSWERED | {"chat_id": "1"}
    rows = [answer, question] if is_sorted else [question, answer]
    body = json.dumps([row | {"createdAt": time} for row, time in zip(rows, times, strict=True)]).encode()
    assert spoken(json.loads(body)) == [CATS]
    found = validate_chats(asyncio.run(import_process.parse_in_child(body)), str)
    assert [message.content for message in found.chats[0][1]] == ["Cats?", "They purr."]


# ---- unreadable input


def chatgpt_of(mapping: Any) -> bytes:
    return json.dumps([{"title": "T", "id": "1", "mapping": mapping}]).encode()


def circle() -> bytes:
    message = {"author": {"role": "user"}, "content": {"content_type": "text", "parts": ["x"]}}
    return chatgpt_of({"a": {"message": message, "parent": "b"}, "b": {"message": message, "parent": "a"}})


def many_nodes() -> bytes:
    node = '"%d": {"message": {"author": {"role": "user"}, "content": {"content_type": "text", "parts": ["x"]}}}'
    return gzip.compress(
        b'[{"id": "1", "mapping": {' + ",".join(node % at for at in range(1_000_000)).encode() + b"}}]", 1
    )


def bomb() -> bytes:
    target = io.BytesIO()
    archive = zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with archive, archive.open("conversations.json", "w") as file:
        file.write(b"[")
        for _ in range((documents.MAX_UNPACKED_BYTES >> 20) + 2):
            file.write(b" " * (1 << 20))
    return target.getvalue()


def encrypted() -> bytes:
    body = bytearray(zipped({"conversations.json": "[]"}))
    for mark, flags in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        body[body.index(mark) + flags] |= 1
    return bytes(body)


def damaged_archive(method: int = zipfile.ZIP_DEFLATED) -> bytes:
    body = bytearray(zipped({"conversations.json": WHOLE["claude"](told("claude", 3))}, method))
    body[len(body) // 3 : -200] = bytes(byte ^ 0xFF for byte in body[len(body) // 3 : -200])
    return bytes(body)


def long_chat() -> bytes:
    return chatgpt_of({str(at): {} for at in range(200_001)})


ZSTANDARD: int = getattr(zipfile, "ZIP_ZSTANDARD", 0)  # from Python 3.14

HOSTILE: dict[str, tuple[Callable[[], bytes], str]] = {
    "circle": (circle, "they form a cycle"),
    "many nodes": (many_nodes, "more than 1,000,000 objects"),
    "long chat": (long_chat, "more than 200,000 messages"),
    "bomb": (bomb, "268,435,456 bytes when unpacked"),
    "encrypted": (encrypted, "damaged or encrypted"),
    "damaged archive": (damaged_archive, "damaged or encrypted"),
    "damaged bzip2": (lambda: damaged_archive(zipfile.ZIP_BZIP2), "damaged or encrypted"),
    "damaged LZMA": (lambda: damaged_archive(zipfile.ZIP_LZMA), "damaged or encrypted"),
    "damaged names": (lambda: zipped({"ä.json": "[]"}).replace("ä".encode(), b"\xff\xff"), "damaged or encrypted"),
    "half an archive": (lambda: zipped({"a.json": "[]" * 100})[:60], "damaged or encrypted"),
    "half gzip": (lambda: gzip.compress(WHOLE["claude"](told("claude", 9)))[:-20], "damaged or encrypted"),
    "half": (lambda: WHOLE["chatgpt"](told("chatgpt", 3))[:-9000], "not valid JSON: syntax error at character"),
    "deep": (lambda: b'[{"mapping": ' + b'{"a":' * 100_000 + b"}" * 100_001 + b"]", "nested too deep"),
    "deep tree": (
        lambda: (
            b'{"conversationId": "1", "messages": '
            + b'[{"messageId": "1", "children": ' * 60_000
            + b"[]"
            + b"}]" * 60_000
            + b"}"
        ),
        "nested too deep",
    ),
    "no chats": (lambda: zipped({"a.json": '{"b": 1}', "c.png": b"x"}), "No chats found"),
    "empty archive": (lambda: zipped({}), "No chats found"),
    **({"damaged Zstandard": (lambda: damaged_archive(ZSTANDARD), "damaged or encrypted")} if ZSTANDARD else {}),
    "wrong types": (lambda: b'[{"chat_messages": [1, 2]}]', "an unexpected value"),
    "deep content": (
        lambda: b'[{"role": "user", "content": ' + b'{"text": ' * 600 + b'"x"' + b"}" * 601 + b"]",
        "an unexpected value",
    ),
    "wrong mapping": (lambda: chatgpt_of({"a": {"message": {"author": "x", "content": 1}}}), "an unexpected value"),
    "latin-1": (lambda: zipped({"a.json": b'[{"chat_messages": "\xe4"}]'}), "not UTF-8"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_damaged_or_hostile_export_is_rejected_with_one_sentence(name: str) -> None:
    make, sentence = HOSTILE[name]
    with pytest.raises(Problem) as refused:
        read(make())
    assert refused.value.status == 400 and sentence in refused.value.sentence
    assert refused.value.sentence.count("\n") == 0 and len(refused.value.sentence) < 200


def test_unpacked_export_size_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_UNPACKED_BYTES", 10_000)
    for body in (gzip.compress(b"[" + b" " * 10_000 + b"]"), zipped({"a.json": "[" + " " * 10_000 + "]"})):
        with pytest.raises(Problem, match="more than 10,000 bytes when unpacked"):
            read(body)


def test_import_limits_objects_per_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "MAX_OBJECTS", 100)
    with pytest.raises(Problem, match="more than 100 objects in one chat"):
        read(chatgpt_of({str(at): {} for at in range(100)}))


@pytest.fixture
def german() -> Iterator[None]:
    token = language.set("de")
    yield
    language.reset(token)


LIMITED: dict[str, tuple[Any, str, bytes, str]] = {
    "entries": (documents, "MAX_ENTRIES", zipped({"a": "", "b": ""}), "mehr als 1 Einträge im Archiv"),
    "unpacked": (documents, "MAX_UNPACKED_BYTES", gzip.compress(b"[]"), "entpackt mehr als 1 Byte"),
    "objects": (documents, "MAX_OBJECTS", b"[{},{}]", "mehr als 1 Objekte in einem Chat"),
    "branches": (
        other_programs,
        "MAX_NODES",
        b'[{"mapping": {"a": {}, "b": {}}}]',
        "ein Chat mit mehr als 1 Nachrichten",
    ),
    "messages": (other_programs, "MAX_MESSAGES", b"[{},{}]", "mehr als 1 Nachrichten"),
    "chats": (imports, "MAX_CHATS", b'[{"messages": []},{"messages": []}]', "mehr als 1 Chats"),
}


@pytest.mark.parametrize("name", LIMITED)
@pytest.mark.usefixtures("german")
def test_exceeded_import_limit_is_explained_in_the_language_of_the_page(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, limit, body, reason = LIMITED[name]
    monkeypatch.setattr(module, limit, 1)
    with pytest.raises(Problem) as refused:
        read(body)
    sentence = "Diese Datei ist zu groß, um sie auf einmal zu importieren: {}. Teile sie auf."
    assert refused.value.sentence == sentence.format(reason)


SHAPES: dict[str, tuple[Any, str]] = {
    "objects": ({"objects": 3}, "mehr als 3 Objekte in einem Chat"),
    "values": ({"values": 3}, "mehr als 3 Werte in einem Chat"),
    "depth": ({"depth": 3}, "tiefer als 3 Ebenen verschachtelt"),
    "text": ({}, "mehr als 3 Byte Text"),
}


@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.usefixtures("german")
def test_limit_on_a_parsed_chat_is_explained_in_the_language_of_the_page(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, reason = SHAPES[name]
    monkeypatch.setattr(import_process, "SHAPE", replace(import_process.SHAPE, **shape))
    monkeypatch.setattr(import_process, "LIMITS", replace(import_process.LIMITS, answer_bytes=3))
    body = WHOLE["chatgpt"](told("chatgpt", 1))
    with pytest.raises(Problem, match=reason):
        validate_chats(import_process.decode_entries(import_process.encode_entries(body)), str)


BROKEN = {b"\xff": "es ist kein UTF-8-Text", b"{": "Syntaxfehler bei Zeichen 1", b'{"a": 1, "a": 2}': "doppelt"}


@pytest.mark.parametrize("body", BROKEN)
@pytest.mark.usefixtures("german")
def test_invalid_json_is_explained_in_the_language_of_the_page(body: bytes) -> None:
    with pytest.raises(Problem, match=f"kein gültiges JSON: .*{BROKEN[body]}"):
        read(body)


def test_import_over_the_time_limit_of_the_process_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import time; time.sleep(600)"
    monkeypatch.setattr(import_process, "_PROGRAM", program)
    limits = import_process.Limits(cpu_s=1, memory_bytes=1 << 30, wall_s=0.5, answer_bytes=1 << 20)
    monkeypatch.setattr(import_process, "LIMITS", limits)
    with pytest.raises(Problem, match="too much time or memory"):
        validate_chats(asyncio.run(import_process.parse_in_child(b"[]")), str)


def test_unreadable_chat_does_not_prevent_import_of_the_others() -> None:
    chats = other_exports.chatgpt(told("chatgpt", 3))
    body = json.dumps([chats[0], {"title": "Corrupted", "mapping": {"a": 1}}, *chats[1:]]).encode()
    found = read(body)
    assert len(found.chats) == 3 and found.left_out["chats"] == 1


def test_damaged_entry_does_not_prevent_import_of_the_others() -> None:
    body = zipped({"ä.json": "[]", "b.json": '[{"role": "user", "content": "x"}]'})
    found = read(body.replace("ä".encode(), b"\xff\xff", 1))  # the name in the entry's own header
    assert len(found.chats) == 1 and found.left_out["damaged"] == 1


def test_invalid_chat_does_not_prevent_import_of_the_others() -> None:
    chats = told("lm studio", 2)
    empty = json.dumps({"name": "New", "createdAt": 1, "messages": []})
    own = {"format": "notso-chats", "version": 3, "chats": [{"title": "", "prompt_date": "2024-02-30", "messages": []}]}
    members = {f"{at}.json": json.dumps(other_exports.lm_studio(chat)) for at, chat in enumerate(chats)}
    found = read(zipped({"empty.json": empty, "own.json": json.dumps(own), "a.json": '{"messages": 1}'} | members))
    assert len(found.chats) == 2 and found.left_out["chats"] == 3
    with pytest.raises(Problem, match="messages: List should have at least 1 item"):
        read(zipped({"empty.json": empty, "own.json": json.dumps(own)}))


def test_invalid_chats_count_towards_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(imports, "MAX_CHATS", 9)
    with pytest.raises(Problem, match="more than 9 chats"):
        read(json.dumps([{"messages": []}] * 10).encode())


def test_long_answers_separated_by_tool_results_are_not_joined() -> None:
    def node(above: str | None, role: str, text: str) -> Any:
        return {
            "parent": above,
            "message": {"author": {"role": role}, "content": {"content_type": "text", "parts": [text]}},
        }

    texts = ["a" * 700_000, "b" * 700_000]
    tree = {"q": node(None, "user", "x"), "a": node("q", "assistant", texts[0]), "b": node("a", "assistant", texts[1])}
    ((_, messages),) = read(chatgpt_of(tree)).chats
    assert [message.content for message in messages] == ["x", *texts]
    parts = {"author": {"role": "user"}, "content": {"content_type": "text", "parts": texts}}
    found = read(chatgpt_of({"q": {"message": parts}}))
    assert len(found.chats[0][1][0].content) == 1_000_000 and found.left_out["texts"] == 1


def test_open_webui_chat_without_a_tree_is_imported() -> None:
    listed = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}]
    ((chat, messages),) = read(json.dumps([{"id": "1", "title": "T", "chat": {"messages": listed}}]).encode()).chats
    assert chat.title == "T" and [(each.message.content) for each in shown_path(messages, chat.chosen_root)] == [
        "x",
        "y",
    ]


# ---- repeated imports


def messages_of(chats: list[ToldChat]) -> tuple[list[ImportedChat], dict[str, EarlierImport]]:
    found = read(WHOLE["chatgpt"](chats)).chats
    before = {
        chat.source: EarlierImport(chat.id, {message.source: message.id for message in messages})
        for chat, messages in found
    }
    return found, before


def test_repeated_import_yields_only_new_messages() -> None:
    chat = random_chat(random.Random(7), 1)
    ((first, brought),), before = messages_of([chat])
    ((_, again),) = read(WHOLE["chatgpt"]([chat])).chats
    assert new_messages(again, before[first.source]) == []
    chat.messages.append(other_exports.Told("user", "later", chat.current, 500, key="later"))
    chat.messages.append(other_exports.Told("assistant", "yes", len(chat.messages) - 1, 501, key="yes", model="gpt-4o"))
    ((_, newer),) = read(WHOLE["chatgpt"]([chat])).chats
    question, answer = new_messages(newer, before[first.source])
    below = next(message for message in brought if message.content == chat.messages[chat.current].content)
    assert (question.content, question.parent_id, answer.parent_id) == ("later", below.id, question.id)
    assert question.chat_id == answer.chat_id == first.id
    # A message deleted in the meantime is not restored; its replies attach to the message above it.
    gone = {**before[first.source].messages, below.source: None}
    question, _ = new_messages(newer, EarlierImport(first.id, gone))
    assert question.parent_id == below.parent_id


def lm_studio_chat(*texts: str) -> tuple[dict[str, str], list[StoredMessage]]:
    """Import a chat of LM Studio; return its messages' sources by text, and the messages."""
    chat = ToldChat("Cats", "0001", [], 0)
    for at, text in enumerate(texts):
        chat.messages.append(other_exports.Told("assistant" if at % 2 else "user", text, at - 1 if at else None, at))
        chat.current = at
    ((_, messages),) = read(WHOLE["lm studio"]([chat])).chats
    return {message.content: message.source for message in messages}, messages


def test_lm_studio_messages_that_replace_others_are_imported() -> None:
    sources, first = lm_studio_chat("Cats?", "They purr.", "Dogs?", "They bark.")
    before = EarlierImport("chat", {message.source: message.id for message in first})
    assert new_messages(lm_studio_chat(*sources)[1], before) == []
    _, again = lm_studio_chat("Cats?", "They purr.", "Cows?", "They moo.", "Owls?")
    cows, moo, owls = new_messages(again, before)
    assert [each.content for each in (cows, moo, owls)] == ["Cows?", "They moo.", "Owls?"]
    assert (cows.parent_id, moo.parent_id, owls.parent_id) == (first[1].id, cows.id, moo.id)
    _, again = lm_studio_chat("Cats?", "They purr.", "Dogs and wolves?", "They bark.", "Owls?")
    wolves, bark, owls = new_messages(again, before)
    assert (wolves.parent_id, bark.parent_id, owls.parent_id) == (first[1].id, wolves.id, bark.id)


def test_lm_studio_chat_of_an_older_release_is_not_imported_twice() -> None:
    _, messages = lm_studio_chat("Cats?", "They purr.", "Dogs?")
    before = EarlierImport("chat", {"0/0": "question", "1/0": "answer"})
    (dogs,) = new_messages(messages, before)
    assert (dogs.content, dogs.parent_id) == ("Dogs?", "answer")
    assert new_messages(messages[:2], EarlierImport("chat", {"0/0": "question", "1/0": None})) == []


@pytest.fixture
def server(start: Start) -> Any:
    return start(ScriptedEngine(lambda messages, thinking: say("an answer"))).ready()


def send(server: Any, body: bytes, **headers: str) -> Any:
    kind = {"Content-Type": "application/octet-stream", "Accept": "application/json"}
    return server.client.post("/import", content=body, headers=kind | headers)


def stored(server: Any) -> Iterator[tuple[str, list[StoredMessage]]]:
    for chat in server.on_loop(lambda: server.shared.store.chats("local")):
        yield chat.id, server.on_loop(lambda chat=chat: server.shared.store.messages("local", chat.id))


def test_server_imports_only_new_messages_of_a_repeated_export(server: Any) -> None:
    chats = told("chatgpt", 12)
    body = WHOLE["chatgpt zip"](chats)
    total = sum(len(chat.messages) for chat in chats)
    answer = send(server, body)
    report = answer.json()
    assert (answer.status_code, len(report["added"]), report["messages"]) == (200, 12, total)
    said, _, left_out = report["report"].partition(" Left out: ")
    assert said == f"Chats imported: 12. Messages: {total}." and "pictures " in left_out
    before = dict(stored(server))
    assert send(server, body).json()["report"].startswith("Chats imported: 0. Already here: 12.")
    assert dict(stored(server)) == before
    # The chat continues in both programs, and an answer is edited here.
    chat_id = report["chats"][0]
    first = before[chat_id]
    edited = next(message for message in first if message.role == "assistant")
    server.client.post(f"/chats/{chat_id}/messages/{edited.id}/edit", data={"text": "mine"})
    server.finished(server.ask("asked here", chat_id))
    chat = next(chat for chat in chats if chat.messages[0].content == first[0].content)
    chat.messages.append(other_exports.Told("user", "asked there", chat.current, 500, key="there"))
    newer = send(server, WHOLE["chatgpt"](chats)).json()
    assert (newer["extended"], newer["messages"], newer["added"]) == ([chat_id], 1, [])
    now = dict(stored(server))[chat_id]
    texts = [message.content for message in now]
    assert "mine" in texts and "asked here" in texts and texts.count("asked there") == 1
    here, there = (next(each for each in now if each.content == f"asked {where}") for where in ("here", "there"))
    assert here.parent_id == there.parent_id, "the two continuations become versions"


def test_new_messages_of_a_chat_that_is_twice_in_a_file_are_imported_once(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[int] = []
    found = transfer.new_messages
    monkeypatch.setattr(transfer, "new_messages", lambda *given: threads.append(threading.get_ident()) or found(*given))
    (chat,) = told("chatgpt", 1)
    send(server, WHOLE["chatgpt"]([chat]))
    chat.messages.append(other_exports.Told("user", "asked there", chat.current, 500, key="there"))
    report = send(server, WHOLE["chatgpt"]([chat, chat])).json()
    assert (report["messages"], len(report["extended"])) == (1, 1)
    ((_, messages),) = stored(server)
    assert [message.content for message in messages].count("asked there") == 1
    assert threads and server.on_loop(threading.get_ident) not in threads, "the event loop is not blocked"


def test_import_opens_a_single_chat_and_reports_omissions_of_several(server: Any) -> None:
    fragment = {"HX-Request": "true", "Accept": "*/*"}
    one = random_chat(random.Random(3), 3)
    for each in one.messages:
        each.pictures = each.calls = 0
    answer = send(server, WHOLE["claude"]([one]), **fragment)
    assert answer.status_code == 204 and answer.headers["hx-redirect"].startswith("/chats/")
    many = send(server, WHOLE["llama.cpp lines"](told("llama.cpp lines", 5)), **fragment)
    assert many.status_code == 200 and "Left out: " in many.text and 'href="/archive"' in many.text
    page = server.client.get(f"{answer.headers['hx-redirect']}").text
    assert "question 3.0" in page
    whole = server.client.get(answer.headers["hx-redirect"] + "/export/json").json()
    assert whole["chats"][0]["messages"][0]["created_ms"] == BEGAN * 1000


def test_oversized_import_is_rejected(server: Any) -> None:
    def body() -> Iterator[bytes]:
        for _ in range(200):
            yield b" " * (1 << 20)

    answer = send(server, body())  # type: ignore[arg-type]
    assert answer.status_code == 413 and answer.text.count("\n") == 1
    packed = gzip.compress(b"[" + b" " * (200 << 20) + b"]", 1)
    assert send(server, packed).status_code == 400


def test_import_does_not_restore_a_deleted_message(tmp_path: Path) -> None:
    async def work() -> None:
        store = SQLiteStore(tmp_path)
        await store.open()
        ((chat, messages),) = read(WHOLE["claude"]([random_chat(random.Random(5), 5)])).chats
        await store.add_chat("me", chat, messages)
        leaf = messages[-1]
        await store.write(lambda db: db.execute("DELETE FROM messages WHERE id = ?", (leaf.id,)).rowcount)
        before = (await store.earlier_imports("me", [chat.source, "claude:other"]))[chat.source]
        assert before.chat_id == chat.id and before.messages[leaf.source] is None
        assert before.messages[messages[0].source] == messages[0].id
        assert await store.earlier_imports("you", [chat.source]) == {}
        assert new_messages(messages, before) == []
        await store.trash_chat("me", chat.id)
        assert await store.earlier_imports("me", [chat.source]) == {}
        await store.close()

    asyncio.run(work())
