"""Build exports of other programs from known chats: messages, branches, dates, and parts that cannot be imported."""

from __future__ import annotations

import io
import json
import random
import uuid
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

BEGAN = 1_730_000_000
WORDS = ["sort", "Liste", "日本語", "مرحبا", "`code`", "naïve", "x < y & z", "$a^2$", "🙂", "Ωmega"]


@dataclass
class Told:
    """A message as it must be imported. `parent` is an index, or None for a first message."""

    role: str
    content: str
    parent: int | None
    second: int
    model: str = ""
    reasoning: str = ""
    pictures: int = 0
    calls: int = 0
    files: list[tuple[str, str]] = field(default_factory=list)
    key: str = ""


@dataclass
class ToldChat:
    title: str
    key: str
    messages: list[Told]
    current: int  # index of the last message on the branch that the program shows

    @property
    def left_out(self) -> Counter[str]:
        return Counter(
            pictures=sum(each.pictures for each in self.messages), tool_calls=sum(each.calls for each in self.messages)
        )

    def line(self) -> list[int]:
        found: list[int] = []
        at: int | None = self.current
        while at is not None:
            found.insert(0, at)
            at = self.messages[at].parent
        return found

    def children(self, at: int | None) -> list[int]:
        return [number for number, each in enumerate(self.messages) if each.parent == at]


def random_chat(dice: random.Random, number: int, *, versions_only: bool = False) -> ToldChat:
    """Return a chat of one to six turns with edited questions, regenerated answers, tools, images and reasoning.

    `versions_only`: all versions of a message share one continuation, as in LM Studio's files.
    """
    messages: list[Told] = []
    tip: int | None = None
    for turn in range(dice.randint(1, 6)):
        questions, tip_of_line = [], None
        for version in range(1 if dice.random() < 0.8 else 2):
            text = f"question {number}.{turn}.{version} {' '.join(dice.choices(WORDS, k=3))}"
            question = Told("user", text, tip, len(messages), pictures=int(dice.random() < 0.15))
            messages.append(question)
            questions.append(len(messages) - 1)
        asked = dice.choice(questions)
        answers = []
        for parent in questions if not versions_only else [asked]:
            for version in range(1 if dice.random() < 0.7 else 3):
                answer = Told(
                    "assistant", f"answer {number}.{turn}.{version} {' '.join(dice.choices(WORDS, k=5))}", parent, 0
                )
                answer.second, answer.model = len(messages), dice.choice(["gpt-4o", "claude-sonnet-4", "llama3:8b"])
                answer.reasoning = f"thought {turn}" if dice.random() < 0.3 else ""
                answer.calls = int(dice.random() < 0.2)
                messages.append(answer)
                if parent == asked:
                    answers.append(len(messages) - 1)
        tip_of_line = dice.choice(answers)
        tip = tip_of_line
    for each in messages:
        each.key = str(uuid.UUID(int=dice.getrandbits(128)))
    title = f"Chat {number} {dice.choice(WORDS)}"
    return ToldChat(title, str(uuid.UUID(int=dice.getrandbits(128))), messages, tip or 0)


def _parent(chat: ToldChat, at: int, root: str | None) -> str | None:
    parent = chat.messages[at].parent
    return chat.messages[parent].key if parent is not None else root


def chatgpt(chats: Sequence[ToldChat]) -> list[Any]:
    def one(chat: ToldChat) -> dict[str, Any]:
        system = {"author": {"role": "system"}, "content": {"content_type": "text", "parts": [""]}, "metadata": {}}
        mapping: dict[str, Any] = {
            "client-created-root": {"message": None, "parent": None, "children": ["sys"]},
            "sys": {"message": system, "parent": "client-created-root", "children": []},
        }

        def add(key: str, parent: str, message: dict[str, Any]) -> None:
            mapping[key] = {"id": key, "message": message, "parent": parent, "children": []}
            mapping[parent]["children"].append(key)

        tails: dict[int, str] = {}  # message index -> id of the node that its replies attach to
        for at, each in enumerate(chat.messages):
            above = tails[each.parent] if each.parent is not None else "sys"
            common = {"create_time": float(BEGAN + each.second), "status": "finished_successfully"}
            metadata = {"model_slug": each.model} if each.model else {}
            person = {"author": {"role": each.role, "name": None}, "metadata": metadata, "recipient": "all", **common}
            begins = above
            if each.reasoning:
                thoughts = {"content_type": "thoughts", "thoughts": [{"summary": "s", "content": each.reasoning}]}
                add(f"{each.key}-think", begins, {**person, "content": thoughts})
                begins = f"{each.key}-think"
            for call in range(each.calls):
                code = {"content_type": "code", "language": "python", "text": "1+1"}
                add(f"{each.key}-call{call}", begins, {**person, "content": code, "recipient": "python"})
                output = {"content_type": "execution_output", "text": "2"}
                tool = {**common, "author": {"role": "tool", "name": "python"}, "content": output, "metadata": {}}
                add(f"{each.key}-tool{call}", f"{each.key}-call{call}", tool)
                begins = f"{each.key}-tool{call}"
            parts: list[Any] = [each.content]
            kind = "text"
            if each.pictures:
                kind = "multimodal_text"
                parts = [{"content_type": "image_asset_pointer", "asset_pointer": "file-service://x"}, *parts]
            add(each.key, begins, {**person, "content": {"content_type": kind, "parts": parts}})
            tails[at] = each.key
        return {
            "title": chat.title,
            "create_time": BEGAN,
            "update_time": BEGAN + 1000.5,
            "mapping": mapping,
            "current_node": chat.messages[chat.current].key,
            "conversation_id": chat.key,
            "is_archived": False,
        }

    return [one(chat) for chat in chats]


def _iso(second: int) -> str:
    return datetime.fromtimestamp(BEGAN + second, UTC).strftime("%Y-%m-%dT%H:%M:%S.000000Z")


def claude(chats: Sequence[ToldChat]) -> list[Any]:
    def message(chat: ToldChat, at: int) -> dict[str, Any]:
        each = chat.messages[at]
        content = [{"type": "thinking", "thinking": each.reasoning}] if each.reasoning else []
        for _ in range(each.calls):
            content += [{"type": "tool_use", "name": "repl"}, {"type": "tool_result", "content": []}]
        content.append({"type": "text", "text": each.content})
        return {
            "uuid": each.key,
            "text": each.content,
            "content": content,
            "sender": "human" if each.role == "user" else "assistant",
            "created_at": _iso(each.second),
            "attachments": [{"file_name": name, "extracted_content": text} for name, text in each.files],
            "files": [{"file_name": "cat.png"}] * each.pictures,
            "parent_message_uuid": _parent(chat, at, "00000000-0000-4000-8000-000000000000"),
        }

    return [
        {
            "uuid": chat.key,
            "name": chat.title,
            "created_at": _iso(0),
            "updated_at": _iso(1000),
            "current_leaf_message_uuid": chat.messages[chat.current].key,
            "chat_messages": [message(chat, at) for at in range(len(chat.messages))],
        }
        for chat in chats
    ]


def open_webui(chats: Sequence[ToldChat]) -> list[Any]:
    def message(chat: ToldChat, at: int) -> dict[str, Any]:
        each = chat.messages[at]
        thoughts = f"<summary>Thought for 3 seconds</summary>\n&gt; {each.reasoning}\n"
        folded = (
            f'<details type="reasoning" done="true" duration="3">\n{thoughts}</details>\n' if each.reasoning else ""
        )
        folded += '<details type="tool_calls" done="true">\n<summary>Tool</summary>\n</details>\n' * each.calls
        return {
            "id": each.key,
            "parentId": _parent(chat, at, None),
            "childrenIds": [chat.messages[child].key for child in chat.children(at)],
            "role": each.role,
            "content": folded + each.content,
            "timestamp": BEGAN + each.second,
            "done": True,
            "files": [{"type": "image", "url": "data:image/png;base64,"}] * each.pictures,
            **({"model": each.model} if each.model else {}),
        }

    return [
        {
            "id": chat.key,
            "title": chat.title,
            "chat": {
                "history": {
                    "messages": {each.key: message(chat, at) for at, each in enumerate(chat.messages)},
                    "currentId": chat.messages[chat.current].key,
                },
                "params": {},
            },
            "created_at": BEGAN,
            "updated_at": BEGAN + 1000,
            "archived": False,
            "pinned": False,
        }
        for chat in chats
    ]


def librechat(chat: ToldChat, *, recursive: bool) -> dict[str, Any]:
    def message(at: int) -> dict[str, Any]:
        each = chat.messages[at]
        content: list[Any] = [{"type": "think", "think": each.reasoning}] if each.reasoning else []
        content += [{"type": "tool_call", "tool_call": {"name": "web"}}] * each.calls
        content.append({"type": "text", "text": each.content})
        return {
            "messageId": each.key,
            "parentMessageId": _parent(chat, at, "00000000-0000-0000-0000-000000000000"),
            "isCreatedByUser": each.role == "user",
            "sender": "User",
            "text": "" if each.role == "assistant" else each.content,
            "createdAt": _iso(each.second),
            "model": each.model or None,
            "files": [{"type": "image/png", "filename": "cat.png"}] * each.pictures,
            **({"content": content} if each.role == "assistant" else {}),
        }

    def nested(at: int) -> dict[str, Any]:
        return message(at) | {"children": [nested(child) for child in chat.children(at)]}

    roots = [nested(at) for at in chat.children(None)]
    return {
        "conversationId": chat.key,
        "endpoint": "openAI",
        "title": chat.title,
        "exportAt": "13:18:04 GMT-0400 (Eastern Daylight Time)",
        "branches": True,
        "recursive": recursive,
        "options": {"model": "gpt-4-turbo", "promptPrefix": "Be brief."},
        "messages": roots if recursive else [message(at) for at in range(len(chat.messages))],
    }


def llama_cpp(chat: ToldChat) -> dict[str, Any]:
    root = f"{chat.key}-root"
    first = {"id": root, "type": "root", "role": "system", "content": "", "parent": None, "timestamp": BEGAN * 1000}
    messages: list[dict[str, Any]] = [first | {"children": [chat.messages[at].key for at in chat.children(None)]}]
    for at, each in enumerate(chat.messages):
        calls = [{"id": "c", "type": "function", "function": {"name": "clock", "arguments": "{}"}}] * each.calls
        messages.append(
            {
                "id": each.key,
                "convId": chat.key,
                "type": "text",
                "role": each.role,
                "content": each.content,
                "timestamp": (BEGAN + each.second) * 1000,
                "parent": _parent(chat, at, root),
                "children": [chat.messages[child].key for child in chat.children(at)],
                "extra": [{"type": "IMAGE", "name": "cat.png", "base64Url": ""}] * each.pictures
                + [{"type": "TEXT", "name": name, "content": text} for name, text in each.files],
                **({"reasoningContent": each.reasoning} if each.reasoning else {}),
                **({"toolCalls": json.dumps(calls)} if calls else {}),
                **({"model": each.model} if each.model else {}),
            }
        )
    conversation = {"id": chat.key, "name": chat.title, "lastModified": (BEGAN + 1000) * 1000}
    return {"conv": conversation | {"currNode": chat.messages[chat.current].key}, "messages": messages}


def llama_cpp_lines(chat: ToldChat) -> str:
    """Return a chat as JSON lines: one for the chat, then one for each message."""
    exported = llama_cpp(chat)
    lines = [{"type": "session", "harness": "llama.cpp", **exported["conv"]}]
    for message in exported["messages"]:
        calls = message.pop("toolCalls", "")
        lines.append({"type": "message", "message": message | ({"toolCalls": json.loads(calls)} if calls else {})})
    return "\n".join(json.dumps(line) for line in lines)


def lm_studio(chat: ToldChat) -> dict[str, Any]:
    """Return LM Studio's form of a chat that `random_chat` created with `versions_only`."""

    def version(each: Told) -> dict[str, Any]:
        picture = [{"type": "file", "fileIdentifier": "1.png", "fileType": "image"}] * each.pictures
        if each.role == "user":
            return {"type": "singleStep", "role": "user", "content": [{"type": "text", "text": each.content}, *picture]}
        steps: list[Any] = []
        if each.reasoning:
            thought = [{"type": "text", "text": each.reasoning}]
            steps.append({"type": "contentBlock", "content": thought, "style": {"type": "thinking"}})
        steps += [{"type": "contentBlock", "content": [{"type": "toolCallRequest", "name": "js"}]}] * each.calls
        info = {"indexedModelIdentifier": each.model}
        steps.append({"type": "contentBlock", "content": [{"type": "text", "text": each.content}], "genInfo": info})
        return {"type": "multiStep", "role": "assistant", "steps": steps}

    messages, parent, line = [], None, set(chat.line())
    while versions := chat.children(parent):
        chosen = next(at for at, each in enumerate(versions) if each in line)
        messages.append({"versions": [version(chat.messages[at]) for at in versions], "currentlySelected": chosen})
        parent = versions[chosen]
    created = BEGAN * 1000 + int(chat.key[:4], 16)
    return {"name": chat.title, "createdAt": created, "systemPrompt": "Be brief.", "messages": messages}


def zipped(files: dict[str, str | bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    target = io.BytesIO()
    with zipfile.ZipFile(target, "w", method) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return target.getvalue()


Whole = Callable[[Sequence[ToldChat]], bytes]

WHOLE: dict[str, Whole] = {
    "chatgpt": lambda chats: json.dumps(chatgpt(chats)).encode(),
    "chatgpt zip": lambda chats: zipped(
        {
            "conversations-000.json": json.dumps(chatgpt(chats[: len(chats) // 2])),
            "conversations-001.json": json.dumps(chatgpt(chats[len(chats) // 2 :])),
            "user.json": '{"id": "user-1", "email": "someone@example.com"}',
            "shared_conversations.json": "[]",
            "chat.html": "<html></html>",
        }
    ),
    "claude": lambda chats: json.dumps(claude(chats), ensure_ascii=False).encode(),
    "claude zip": lambda chats: zipped(
        {"conversations.json": json.dumps(claude(chats)), "users.json": '[{"uuid": "1"}]', "projects.json": "[]"}
    ),
    "open webui": lambda chats: json.dumps(open_webui(chats), indent=1).encode(),
    "librechat": lambda chats: zipped(
        {f"{chat.key}.json": json.dumps(librechat(chat, recursive=at % 2 == 0)) for at, chat in enumerate(chats)}
    ),
    "llama.cpp": lambda chats: json.dumps([llama_cpp(chat) for chat in chats]).encode(),
    "llama.cpp lines": lambda chats: "\n".join(map(llama_cpp_lines, chats)).encode(),
    "llama.cpp zip": lambda chats: zipped({f"{chat.key}.jsonl": llama_cpp_lines(chat) for chat in chats}),
    "lm studio": lambda chats: zipped({f"{chat.key}.conversation.json": json.dumps(lm_studio(chat)) for chat in chats}),
}
"""A complete export of each program, in each of its formats."""
