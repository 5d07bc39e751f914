"""Convert exports of ChatGPT, Claude, Open WebUI, LM Studio, LibreChat and llama.cpp to our export format.

Content that notso cannot store, such as pictures and details of tool calls, is omitted and counted by kind. Like
`documents`, this module imports no third-party packages.
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import chain
from typing import Any, Literal

from notso.web.chat.files.documents import END_OF_FILE, ImportFormatError, JsonDocument, omitted_kind
from notso.web.chat.files.message_lists import (
    MAX_SYSTEM_PROMPT,
    THOUGHTS,
    find_lists,
    is_message,
    separate_chats,
    to_openai,
)
from notso.web.values.durations import current_ms

JSON = dict[str, Any]


_STORED = ("id", "role", "content", "reasoning", "created_ms", "model", "state", "note", "attachments")
"""Fields that a node shares with messages in our export format."""


@dataclass(slots=True)
class MessageNode:
    id: str
    parent: str | None
    # "" for nodes that are not shown, such as system messages and tool results. Their children take their place.
    role: Literal["user", "assistant", ""]
    content: str = ""
    reasoning: str = ""
    created_ms: int = 0  # Unix time, 0 if unknown
    model: str = ""
    state: Literal["done", "interrupted", "failed"] = "done"
    note: str = ""
    attachments: list[JSON] = field(default_factory=list)
    rank: int = 0  # position among siblings


def build_tree(nodes: Sequence[MessageNode], current: str | None) -> tuple[list[JSON], str | None]:
    """Link messages to their nearest shown ancestors and select the branch that ends in `current`.

    Returns the messages in our export format, parents before children, and the root of that branch. A message with an
    unknown parent becomes a root. Consecutive answers are merged unless the path branches between them or the result
    exceeds a limit. Raises ImportFormatError for duplicate ids and cycles.
    """
    by_id = {node.id: node for node in nodes}
    if len(by_id) != len(nodes):
        raise ImportFormatError("import_invalid", place="messages", reason="a duplicate id")
    below: dict[str | None, list[MessageNode]] = {}
    for node in nodes:
        below.setdefault(node.parent if node.parent in by_id else None, []).append(node)
    messages: dict[str, JSON] = {}
    shown: dict[str, str | None] = {}  # node -> the message that contains it, or the nearest message above it
    continues: dict[str, bool] = {}  # node -> whether the path from its message in `shown` to the node is unbranched
    stack = _in_order(below.get(None, ()))
    while stack:
        node = stack.pop()
        parent = node.parent if node.parent in by_id else None
        above = shown[parent] if parent is not None else None
        alone = parent is not None and len(below[parent]) == 1 and continues[parent]
        if not node.role:
            shown[node.id], continues[node.id] = above, alone
        elif node.role == "assistant" and alone and above is not None and _can_append(messages[above], node):
            _append(messages[above], node)
            shown[node.id], continues[node.id] = above, True
        else:
            messages[node.id] = {"parent_id": above} | {name: getattr(node, name) for name in _STORED}
            shown[node.id], continues[node.id] = node.id, True
        stack += _in_order(below.get(node.id, ()))
    if len(shown) != len(nodes):
        raise ImportFormatError("import_invalid", place="messages", reason="they form a cycle")
    return list(messages.values()), _mark_chosen(messages, shown.get(current or ""))


def _in_order(siblings: Sequence[MessageNode]) -> list[MessageNode]:
    return sorted(siblings, key=lambda node: node.rank, reverse=True)  # the stack reverses the order


def _can_append(message: JSON, node: MessageNode) -> bool:
    sizes = (
        len(message[name]) + len(text) + 2 for name, text in (("content", node.content), ("reasoning", node.reasoning))
    )
    attachments = len(message["attachments"]) + len(node.attachments)
    return message["role"] == "assistant" and max(sizes) <= MAX_TEXT and attachments <= MAX_ATTACHMENTS


def _append(message: JSON, node: MessageNode) -> None:
    message["content"] = _paragraphs(message["content"], node.content)
    message["reasoning"] = _paragraphs(message["reasoning"], node.reasoning)
    message["model"] = node.model or message["model"]
    message["state"], message["note"] = node.state, node.note
    message["attachments"] += node.attachments


def _mark_chosen(messages: dict[str, JSON], last: str | None) -> str | None:
    while last is not None:
        parent = messages[last]["parent_id"]
        if parent is None:
            return last
        messages[parent]["chosen_child"] = last
        last = parent
    return None


MAX_MESSAGES = 50_000  # per file
MAX_NODES = 200_000  # per chat; ChatGPT stores several nodes per message
MAX_TEXT = 1_000_000
MAX_ATTACHMENTS = 16
MAX_NAME = 200
OWN_FORMAT = "notso-chats"

Kind = Literal["own", "openai"]

DETAILS, END_OF_DETAILS = '<details type="', "</details>"
_UNFIT = re.compile("[\x00\ud800-\udfff]")
_CITATION = re.compile("\ue200[^\ue200\ue201]*\ue201")  # ChatGPT's references to search results
_UNEXPECTED = (TypeError, ValueError, KeyError, AttributeError, IndexError, OverflowError)
_LLAMA_REASONING = re.compile(
    r"<<<reasoning_content_start>>>((?:(?!<<<reasoning_content_start>>>).)*?)<<<reasoning_content_end>>>\s*", re.DOTALL
)
_LLAMA_CALL = re.compile(
    r"<<<AGENTIC_TOOL_CALL_START>>>(?:(?!<<<AGENTIC_TOOL_CALL_START>>>).)*?<<<AGENTIC_TOOL_CALL_END>>>\s*", re.DOTALL
)


class ExportReader:
    """Converts the documents of one file to chats.

    `left_out` counts omitted content by kind: pictures, files, tool_calls, references, texts (truncated) and chats
    (unreadable).
    """

    def __init__(self, left_out: Counter[str]) -> None:
        self.left_out = left_out
        self._messages = self._unknown = 0
        self._problem: ImportFormatError | None = None

    def chats(self, documents: Iterable[JsonDocument]) -> Iterator[tuple[Kind, JSON]]:
        """Yield chats in our export format ("own") and OpenAI message lists ("openai").

        Raises ImportFormatError if the file is invalid or too large, or has no readable chat.
        """
        found = 0
        for kind, value in self._convert_all(documents):
            self._check_count(len(value["messages"]))
            self._messages += len(value["messages"])
            found += 1
            yield kind, value
        if not found:
            raise self._problem or ImportFormatError("import_unknown")

    def _convert_all(self, documents: Iterable[JsonDocument]) -> Iterator[tuple[Kind, JSON]]:
        listed: list[Any] = []  # messages from a top-level list, or from several lines
        session: JSON | None = None  # a chat of llama.cpp's web UI: one line for the chat, then one for each message
        for value, is_listed in chain(documents, [END_OF_FILE]):
            kind = value.get("type") if isinstance(value, dict) else None
            if session is not None and kind == "message":
                session["messages"].append(value.get("message"))
                self._check_count(len(session["messages"]))
                continue
            if session is not None:
                yield from self._convert(_llama_cpp, session)
                session = None
            if value is None:
                if any(map(is_message, listed)):
                    yield from self._convert_lists(separate_chats({"messages": listed}))
                listed = []
            elif kind == "session":
                session = {"conv": value, "messages": []}
            elif isinstance(value, dict) and (chats := self._chats_of(value)) is not None:
                yield from chats
            elif is_message(value) or (is_listed and (not isinstance(value, dict) or "role" in value)):
                listed.append(value)
                self._check_count(len(listed))
            else:
                self._unknown += 1
                self._check_count(self._unknown)
                yield from self._convert_lists(find_lists(value))

    def _chats_of(self, document: JSON) -> Iterator[tuple[Kind, JSON]] | None:
        # Returns None if the document's format is unknown.
        if document.get("format") == OWN_FORMAT:
            return self._read_own(document)
        if (read := _detect_format(document)) is not None:
            return self._convert(read, document)
        if isinstance(document.get("messages"), list):
            return self._convert_lists(separate_chats(document))
        if "messages" in document:
            self._refuse(ImportFormatError("import_invalid", place="messages", reason="a list is required"))
            return iter(())
        return None

    def _convert_lists(self, chats: Iterable[JSON]) -> Iterator[tuple[Kind, JSON]]:
        for each in chats:
            yield from self._convert(to_openai, each, "openai")

    def _convert(
        self, read: Callable[[JSON, ExportReader], JSON], document: JSON, kind: Kind = "own"
    ) -> Iterator[tuple[Kind, JSON]]:
        # Count an unreadable chat instead of failing, because the file may contain hundreds of other chats.
        if _count_nodes(document) > MAX_NODES:
            raise ImportFormatError("import_too_much", "branches", limit=MAX_NODES)
        before = Counter(self.left_out)
        try:
            chat = read(document, self)
            if not chat["messages"] and kind == "own":
                raise ImportFormatError("import_unknown")
        except (ImportFormatError, RecursionError, *_UNEXPECTED) as error:
            damaged = ImportFormatError("import_invalid", place="messages", reason="an unexpected value")
            self.left_out.clear()
            self.left_out.update(before)
            self._refuse(error if isinstance(error, ImportFormatError) else damaged)
            return
        yield kind, chat

    def _refuse(self, problem: ImportFormatError) -> None:
        self._problem = self._problem or problem
        self.left_out["chats"] += 1

    def _read_own(self, document: JSON) -> Iterator[tuple[Kind, JSON]]:
        version, chats = document.get("version"), document.get("chats")
        if type(version) is not int or not isinstance(chats, list) or not chats:
            raise ImportFormatError(
                "import_invalid", place="chats", reason="a version and a list of chats are required"
            )
        unknown = next((name for name in document if name not in ("format", "version", "chats")), None)
        if unknown is not None:
            raise ImportFormatError("import_invalid", place=unknown[:100], reason="an unknown field")
        for at, chat in enumerate(chats):
            if not isinstance(chat, dict) or not isinstance(chat.get("messages"), list):
                raise ImportFormatError("import_invalid", place=f"chats.{at}.messages", reason="a list is required")
        self._check_count(sum(len(chat["messages"]) for chat in chats))
        for chat in chats:
            yield "own", {"file_version": version, **chat}

    def _check_count(self, further: int) -> None:
        if self._messages + further > MAX_MESSAGES:
            raise ImportFormatError("import_too_much", "messages", limit=MAX_MESSAGES)

    def text(self, value: Any) -> str:
        """Return storable text of at most MAX_TEXT characters, or '' if `value` is not a string."""
        if not isinstance(value, str):
            return ""
        if len(value) > MAX_TEXT:
            self.left_out["texts"] += 1
            value = value[:MAX_TEXT]
        return _UNFIT.sub("\N{REPLACEMENT CHARACTER}", value)

    def line(self, value: Any) -> str:
        """Return a title or name in one line of at most MAX_NAME characters, or '' if `value` is not a string."""
        return " ".join(self.text(value).split())[:MAX_NAME]

    def attach(self, node: MessageNode, name: Any, content: Any = None, *, is_picture: bool = False) -> None:
        """Attach a text file. Pictures, files without text and files beyond MAX_ATTACHMENTS are only counted."""
        text, name = "" if is_picture else self.text(content), self.line(name)
        if text and len(node.attachments) < MAX_ATTACHMENTS:
            node.attachments.append({"name": name or "file", "text": text})
        else:
            self.count_omitted(node, "pictures" if is_picture else omitted_kind(name), name)

    def count_omitted(self, node: MessageNode, kind: str, name: Any = "") -> None:
        """Count an omitted picture or file. A question without text shows the name instead."""
        self.left_out[kind] += 1
        if node.role == "user":
            label = self.line(name) or {"pictures": "picture"}.get(kind, "file")
            node.note = f"{node.note} [{label}]".strip()

    def fail(self, node: MessageNode, error: Any) -> None:
        """Mark the message as failed, with the text of the error as its note."""
        node.state, node.note = "failed", self.text(error)[:1000]

    def finish_node(self, node: MessageNode) -> MessageNode:
        """Separate reasoning from the answer, limit their length, and hide the node if it is empty."""
        if node.role == "assistant" and (thoughts := THOUGHTS.match(node.content)):
            node.content = node.content[thoughts.end() :]
            node.reasoning = _paragraphs(node.reasoning, (thoughts[1] or thoughts[2] or "").strip())
        if node.role == "user":
            node.content, node.note = node.content or node.note, ""
        node.content, node.reasoning = self.text(node.content), self.text(node.reasoning)
        if not (node.content.strip() or node.reasoning or node.attachments or node.note):
            node.role = ""
        return node


def _detect_format(value: JSON) -> Callable[[JSON, ExportReader], JSON] | None:
    messages = value.get("messages")
    first = messages[0] if isinstance(messages, list) and messages else None
    if isinstance(value.get("mapping"), dict):
        return _chatgpt
    if isinstance(value.get("chat_messages"), list):
        return _claude
    if isinstance(value.get("chat"), dict) and value["chat"].keys() & {"history", "messages"}:
        return _open_webui
    if isinstance(value.get("conv"), dict) and isinstance(messages, list):
        return _llama_cpp
    if isinstance(value.get("conversationId"), str) and (isinstance(messages, list) or "messagesTree" in value):
        return _librechat
    if isinstance(first, dict) and isinstance(first.get("versions"), list):
        return _lm_studio
    return None


def _count_nodes(document: JSON) -> int:
    chat = document.get("chat")
    history = chat.get("history") if isinstance(chat, dict) else None
    history = history if isinstance(history, dict) else {}
    places = (document.get("mapping"), document.get("chat_messages"), document.get("messages"), history.get("messages"))
    return max(len(place) if isinstance(place, dict | list) else 0 for place in places)


def _build_chat(
    reader: ExportReader,
    source: str,
    title: Any,
    nodes: list[MessageNode],
    current: Any,
    *,
    created_ms: int = 0,
    updated_ms: int = 0,
    system: str = "",
    pinned: Any = False,
    archived: Any = False,
) -> JSON:
    finished = [reader.finish_node(node) for node in nodes]
    messages, chosen_root = build_tree(finished, current if isinstance(current, str) else None)
    times = [message["created_ms"] for message in messages if message["created_ms"]]
    created = created_ms or min(times, default=0)
    if len(system) > MAX_SYSTEM_PROMPT:
        reader.left_out["texts"] += 1
        system = system[:MAX_SYSTEM_PROMPT]
    return {
        "title": reader.line(title),
        "prompt_date": datetime.fromtimestamp((created or current_ms()) / 1000, UTC).date().isoformat(),
        "created_ms": created,
        "updated_ms": updated_ms or max(times, default=created),
        "pinned": pinned is True,
        "archived": archived is True,
        "settings": {"system_prompt": system} if system.strip() else {},
        "chosen_root": chosen_root,
        "source": source[:MAX_NAME],
        "messages": messages,
    }


def _chatgpt(document: JSON, reader: ExportReader) -> JSON:
    mapping: JSON = document["mapping"]
    default_model = document.get("default_model_slug")
    ranks = _sibling_ranks(each.get("children") for each in mapping.values() if isinstance(each, dict))
    nodes = []
    for at, (key, entry) in enumerate(mapping.items()):
        node = MessageNode(_id(key), _parent(entry.get("parent")), "", rank=ranks.get(key, at))
        message = entry.get("message")
        if isinstance(message, dict):
            _fill_chatgpt(node, message, reader)
            node.created_ms = _to_ms(message.get("create_time"))
            if node.role == "assistant":
                node.model = _name((message.get("metadata") or {}).get("model_slug") or default_model)
        nodes.append(node)
    identity = document.get("conversation_id") or document.get("id")
    return _build_chat(
        reader,
        _source("chatgpt", identity, document),
        document.get("title"),
        nodes,
        _parent(document.get("current_node")),
        created_ms=_to_ms(document.get("create_time")),
        updated_ms=_to_ms(document.get("update_time")),
        pinned=document.get("is_starred"),
        archived=document.get("is_archived"),
    )


def _fill_chatgpt(node: MessageNode, message: JSON, reader: ExportReader) -> None:
    metadata, content = message.get("metadata") or {}, message.get("content") or {}
    node.role = _role((message.get("author") or {}).get("role"))
    if node.role and metadata.get("is_visually_hidden_from_conversation"):
        node.role = ""
    for part in content.get("parts") or []:  # media in hidden messages, such as tool results, are counted, too
        if isinstance(part, dict) and "asset_pointer" in str(part.get("content_type")):
            if "image" in part["content_type"]:
                reader.count_omitted(node, "pictures")
            else:
                reader.count_omitted(node, "files", "recording")
    if content.get("content_type") in ("thoughts", "reasoning_recap"):
        thoughts = [each for each in content.get("thoughts") or [] if isinstance(each, dict)]
        node.reasoning = _paragraphs(*(reader.text(each.get("content")) for each in thoughts))
    elif node.role == "assistant" and message.get("recipient") not in (None, "all"):
        reader.left_out["tool_calls"] += 1
        node.role = ""
    elif node.role:
        for each in metadata.get("attachments") or []:
            if not str(each.get("mime_type")).startswith("image/"):  # images are counted as parts, above
                reader.count_omitted(node, "files", each.get("name"))
        node.content = _chatgpt_text(content, reader)
        if message.get("status") == "in_progress":
            node.state = "interrupted"


def _chatgpt_text(content: JSON, reader: ExportReader) -> str:
    match content.get("content_type"):
        case "code":
            return f"```{_name(content.get('language'))}\n{reader.text(content.get('text'))}\n```"
        case "text" | "multimodal_text":
            texts = (_inner(part, "text") for part in content.get("parts") or [])
            text, references = _CITATION.subn("", _paragraphs(*map(reader.text, texts)))
            reader.left_out["references"] += references
            return text
        case "user_editable_context":
            return ""
    return reader.text(content.get("text"))


def _claude(document: JSON, reader: ExportReader) -> JSON:
    nodes: list[MessageNode] = []
    before: str | None = None
    for at, message in enumerate(document["chat_messages"]):
        role: Literal["user", "assistant"] = "user" if message.get("sender") == "human" else "assistant"
        parent = _parent(message.get("parent_message_uuid")) if "parent_message_uuid" in message else before
        node = MessageNode(_id(message.get("uuid") or str(at)), parent, role, rank=at)
        _fill_parts(node, message.get("content") or [], message.get("text"), reader)
        node.created_ms = _to_ms(message.get("created_at"))
        node.model = _name(document.get("model")) if role == "assistant" else ""
        for each in message.get("attachments") or []:
            reader.attach(node, each.get("file_name"), each.get("extracted_content"))
        for each in message.get("files_v2") or message.get("files") or []:
            reader.attach(node, each.get("file_name"), is_picture=each.get("file_kind") == "image")
        nodes.append(node)
        before = node.id
    return _build_chat(
        reader,
        _source("claude", document.get("uuid"), document),
        document.get("name"),
        nodes,
        _parent(document.get("current_leaf_message_uuid")) or before,
        created_ms=_to_ms(document.get("created_at")),
        updated_ms=_to_ms(document.get("updated_at")),
        pinned=document.get("is_starred"),
    )


def _fill_parts(node: MessageNode, parts: Iterable[JSON], text: Any, reader: ExportReader) -> None:
    # Reads the parts of a Claude or LibreChat message. text: the content if no part has text.
    texts, thoughts = list[str](), list[str]()
    for part in parts:
        match part.get("type"):
            case "text":
                texts.append(reader.text(_inner(part.get("text"), "value")))
            case "thinking" | "think" as name:
                thoughts.append(reader.text(part.get(name)))
            case "tool_use" | "tool_call":
                reader.left_out["tool_calls"] += 1
            case "image" | "image_file" | "image_url":
                reader.count_omitted(node, "pictures")
            case "error":
                reader.fail(node, _inner(part.get("error") or part.get("text"), "value"))
    node.content, node.reasoning = _paragraphs(*texts) or reader.text(text), _paragraphs(*thoughts)


def _open_webui(document: JSON, reader: ExportReader) -> JSON:
    chat = document["chat"]
    history = chat.get("history") or {}
    messages: JSON = history.get("messages") or {}
    if not messages:  # old releases exported a list
        listed = chat.get("messages") or []
        messages = {str(at): {**each, "parentId": str(at - 1) if at else None} for at, each in enumerate(listed)}
        history = {"currentId": str(len(listed) - 1)}
    ranks = _sibling_ranks(each.get("childrenIds") for each in messages.values() if isinstance(each, dict))
    nodes = []
    for at, (key, message) in enumerate(messages.items()):
        node = MessageNode(_id(key), _parent(message.get("parentId")), _role(message.get("role")))
        node.rank, node.created_ms = ranks.get(key, at), _to_ms(message.get("timestamp"))
        _fill_open_webui(node, message, reader)
        nodes.append(node)
    return _build_chat(
        reader,
        _source("open-webui", document.get("id"), document),
        document.get("title") or chat.get("title"),
        nodes,
        _parent(history.get("currentId")),
        created_ms=_to_ms(document.get("created_at")) or _to_ms(chat.get("timestamp"), per_unit=1),
        updated_ms=_to_ms(document.get("updated_at")),
        system=reader.text((chat.get("params") or {}).get("system") or chat.get("system")),
        pinned=document.get("pinned"),
        archived=document.get("archived"),
    )


def _fill_open_webui(node: MessageNode, message: JSON, reader: ExportReader) -> None:
    output = message.get("output")
    if isinstance(output, list) and any(each.get("type") == "message" for each in output):
        _fill_from_output(node, output, reader)
    else:
        node.content = _without_details(node, reader.text(message.get("content")), reader)
    if node.role == "assistant":
        node.model = _name(message.get("model"))
        node.state = "interrupted" if message.get("done") is False else "done"
        if error := message.get("error"):
            reader.fail(node, _inner(error, "content"))
    for each in message.get("files") or []:
        file = each.get("file") or {}
        name, text = each.get("name") or file.get("filename"), (file.get("data") or {}).get("content")
        reader.attach(node, name, text, is_picture=each.get("type") == "image")


def _fill_from_output(node: MessageNode, output: list[JSON], reader: ExportReader) -> None:
    texts: dict[str, list[str]] = {"message": [], "reasoning": []}
    for each in output:
        if each.get("type") in texts:
            texts[each["type"]] += [reader.text(part.get("text")) for part in each.get("content") or []]
        elif each.get("type") == "function_call":
            reader.left_out["tool_calls"] += 1
    node.content, node.reasoning = _paragraphs(*texts["message"]), _paragraphs(*texts["reasoning"])


def _without_details(node: MessageNode, text: str, reader: ExportReader) -> str:
    if node.role != "assistant":
        return text
    pieces, at = [], 0
    while (begin := text.find(DETAILS, at)) >= 0 and (end := text.find(END_OF_DETAILS, begin)) >= 0:
        kind, _, rest = text[begin + len(DETAILS) : end].partition('"')
        body = rest.partition(">")[2].lstrip()
        if body.startswith("<summary>"):
            body = body.partition("</summary>")[2]
        after = end + len(END_OF_DETAILS)
        if kind == "reasoning":
            lines = (line.strip().removeprefix(">").strip() for line in html.unescape(body).splitlines())
            node.reasoning = _paragraphs(node.reasoning, "\n".join(lines).strip())
        elif kind in ("tool_calls", "code_interpreter"):
            reader.left_out["tool_calls"] += 1
        else:
            pieces.append(text[at:after])
            at = after
            continue
        pieces.append(text[at:begin])
        at = after
        while at < len(text) and text[at].isspace():
            at += 1
    return "".join(pieces) + text[at:]


def _lm_studio(document: JSON, reader: ExportReader) -> JSON:
    created = _to_ms(document.get("createdAt"), per_unit=1)
    fields = (document.get("perChatPredictionConfig") or {}).get("fields") or []
    system = document.get("systemPrompt") or next(
        (each.get("value") for each in fields if each.get("key") == "llm.prediction.systemPrompt"), ""
    )
    nodes: list[MessageNode] = []
    before: str | None = None
    for at, message in enumerate(document["messages"]):
        versions: list[MessageNode] = []
        chosen = message.get("currentlySelected") or 0
        for number, version in enumerate(message["versions"]):
            node = MessageNode("", before, _role(version.get("role")), created_ms=created, rank=number)
            for step in version.get("steps") or [version]:
                _add_step(node, step, reader)
            # Messages have no ids, and a position is reused after its message is changed or deleted. The digest depends
            # on the earlier messages, so a changed message and all later messages get new ids.
            digest = hashlib.sha256(f"{before}\n{node.content}".encode()).hexdigest()
            node.id = f"{at}/{number}/{digest[:16]}"
            versions.append(node)
        nodes += versions
        if versions:
            before = versions[chosen if 0 <= chosen < len(versions) else 0].id
    identity = document.get("createdAt")
    return _build_chat(
        reader,
        _source("lm-studio", identity and str(identity), document),
        document.get("name"),
        nodes,
        before,
        created_ms=created,
        updated_ms=max(
            _to_ms(document.get(name), per_unit=1) for name in ("assistantLastMessagedAt", "userLastMessagedAt")
        ),
        system=reader.text(system),
        pinned=document.get("pinned"),
    )


def _add_step(node: MessageNode, step: JSON, reader: ExportReader) -> None:
    if step.get("type") not in ("contentBlock", "singleStep"):
        return
    texts = []
    for part in step.get("content") or []:
        if part.get("type") == "text":
            texts.append(reader.text(part.get("text")))
        elif part.get("type") == "toolCallRequest":
            reader.left_out["tool_calls"] += 1
        elif part.get("type") == "file":
            reader.attach(node, part.get("fileIdentifier"), is_picture=part.get("fileType") == "image")
    text = "\n".join(texts).strip("\n")
    if (step.get("style") or {}).get("type") == "thinking":
        node.reasoning = _paragraphs(node.reasoning, text)
    else:
        node.content = _paragraphs(node.content, text)
    if node.role == "assistant":
        node.model = _name((step.get("genInfo") or {}).get("indexedModelIdentifier")) or node.model


def _librechat(document: JSON, reader: ExportReader) -> JSON:
    options = document.get("options") or {}
    nodes: list[MessageNode] = []
    messages = document.get("messagesTree") or document.get("messages") or []
    stack: list[tuple[JSON, str | None]] = [(each, None) for each in reversed(messages)]  # exports may nest messages
    while stack:
        message, above = stack.pop()
        role: Literal["user", "assistant"] = "user" if message.get("isCreatedByUser") else "assistant"
        parent = above if above is not None else _parent(message.get("parentMessageId"))
        node = MessageNode(_id(message["messageId"]), parent, role, rank=len(nodes))
        _fill_librechat(node, message, reader)
        nodes.append(node)
        stack += [(each, node.id) for each in reversed(message.get("children") or [])]
    return _build_chat(
        reader,
        _source("librechat", document.get("conversationId"), document),
        document.get("title"),
        nodes,
        None,
        system=reader.text(options.get("promptPrefix") or options.get("system")),
    )


def _fill_librechat(node: MessageNode, message: JSON, reader: ExportReader) -> None:
    parts = [each for each in message.get("content") or [] if isinstance(each, dict)]
    _fill_parts(node, parts, message.get("text"), reader)
    node.created_ms = _to_ms(message.get("createdAt"))
    if node.role == "assistant":
        node.model = _name(message.get("model"))
        if message.get("error") is True:
            node.state = "failed"
        elif message.get("unfinished") is True:
            node.state = "interrupted"
    for each in (*(message.get("files") or []), *(message.get("attachments") or [])):
        is_picture = str(each.get("type")).startswith("image/")
        reader.attach(node, each.get("filename") or each.get("name"), each.get("text"), is_picture=is_picture)


def _llama_cpp(document: JSON, reader: ExportReader) -> JSON:
    conversation = document["conv"]
    messages = [each for each in document["messages"] if isinstance(each, dict)]
    ranks = _sibling_ranks(each.get("children") for each in messages)
    nodes = []
    system = ""
    for at, message in enumerate(messages):
        node = MessageNode(_id(message["id"]), _parent(message.get("parent")), "", rank=ranks.get(message["id"], at))
        node.created_ms = _to_ms(message.get("timestamp"), per_unit=1)
        content = reader.text(message.get("content"))
        if message.get("role") == "system":
            system = system or content
        elif message.get("type") != "root":
            node.role, node.content = _role(message.get("role")), content
        if node.role == "assistant":
            _fill_llama_cpp(node, message, reader)
        for each in message.get("extra") or []:
            is_picture = str(each.get("type")).lower().startswith("image")
            reader.attach(node, each.get("name"), each.get("content"), is_picture=is_picture)
        nodes.append(node)
    return _build_chat(
        reader,
        _source("llama.cpp", conversation.get("id"), document),
        conversation.get("name"),
        nodes,
        _parent(conversation.get("currNode")),
        updated_ms=_to_ms(conversation.get("lastModified"), per_unit=1),
        system=system,
        pinned=conversation.get("pinned"),
    )


def _fill_llama_cpp(node: MessageNode, message: JSON, reader: ExportReader) -> None:
    thoughts = [reader.text(message.get("reasoningContent") or message.get("thinking"))]
    thoughts += (found.strip() for found in _LLAMA_REASONING.findall(node.content))
    node.content, calls = _LLAMA_CALL.subn("", _LLAMA_REASONING.sub("", node.content))
    tool_calls = message.get("toolCalls")
    if isinstance(tool_calls, str) and tool_calls:
        try:
            tool_calls = json.loads(tool_calls)
        except (ValueError, RecursionError):
            tool_calls = [tool_calls]
    reader.left_out["tool_calls"] += calls + (len(tool_calls) if isinstance(tool_calls, list) else 0)
    node.reasoning = _paragraphs(*thoughts)
    node.model = _name(message.get("model"))


def _source(program: str, identity: Any, document: JSON) -> str:
    if not isinstance(identity, str) or not identity:
        identity = hashlib.sha256(json.dumps(document, sort_keys=True).encode()).hexdigest()
    return f"{program}:{_id(identity)}"


def _id(value: Any) -> str:
    text = _UNFIT.sub("\N{REPLACEMENT CHARACTER}", str(value))
    return text if len(text) <= 64 else hashlib.sha256(text.encode()).hexdigest()


def _parent(value: Any) -> str | None:
    return _id(value) if value is not None and value != "" else None


def _role(value: Any) -> Literal["user", "assistant", ""]:
    return value if value in ("user", "assistant") else ""


def _paragraphs(*texts: str) -> str:
    return "\n\n".join(filter(None, texts))


def _inner(value: Any, name: str) -> Any:
    # Unwraps a value that some releases of a program store in an object.
    return value.get(name) if isinstance(value, dict) else value


def _name(value: Any) -> str:
    return _UNFIT.sub("", value)[:MAX_NAME] if isinstance(value, str) else ""


def _sibling_ranks(lists: Iterable[Any]) -> dict[str, int]:
    return {each: at for ids in lists if isinstance(ids, list) for at, each in enumerate(ids) if isinstance(each, str)}


def _to_ms(value: Any, *, per_unit: int = 1000) -> int:
    # Returns a time in milliseconds, at most the current time, or 0 if the value is invalid.
    if isinstance(value, str):
        try:
            moment = datetime.fromisoformat(value)
        except ValueError:
            return 0
        value = (moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000
    elif isinstance(value, bool) or not isinstance(value, int | float) or value != value:
        return 0
    else:
        value *= per_unit
    return max(0, min(round(value), current_ms())) if abs(value) < 1e18 else 0
