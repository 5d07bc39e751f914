"""Import chats from untrusted files: our own export, OpenAI message lists, and exports of other programs.

Chats and messages get new ids, so an import cannot overwrite stored data. `documents` and `other_programs` parse the
file (on a server, in a child process); this module validates their output. All functions block.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from datetime import date
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError

from notso.plugins.json_shape import JsonShapeError, check_shape
from notso.web.chat.files.documents import refuse_constant
from notso.web.chat.files.export import ARGUMENTS_LIMITS, FORMAT_VERSION
from notso.web.chat.files.import_process import Entry, entries
from notso.web.chat.files.other_programs import MAX_MESSAGES
from notso.web.store.protocol import (
    AnswerStats,
    Attachment,
    Chat,
    EarlierImport,
    MessageState,
    Rating,
    StoredMessage,
    ToolUse,
)
from notso.web.turns.chat_settings import form_values, updated_settings
from notso.web.values.durations import current_ms
from notso.web.values.errors import Problem
from notso.web.values.ids import new_generation_id, new_id, new_tool_use_id
from notso.web.values.strict_fields import StrictFields, limit_entries
from notso.web.values.wording import words

MAX_CHATS = 5_000
MAX_TEXT = 1_000_000
MAX_TOOL_USES = 200
MAX_SETTINGS = 100

_UNFIT = re.compile("[\x00\ud800-\udfff]")

ImportedChat = tuple[Chat, list[StoredMessage]]
TitleOf = Callable[[str], str]

M = TypeVar("M", bound=StrictFields)


_Text = Annotated[str, Field(max_length=MAX_TEXT)]
_Name = Annotated[str, Field(max_length=200)]
_NonemptyName = Annotated[str, Field(min_length=1, max_length=200)]
_Count = Annotated[int, Field(ge=0, le=1 << 31)]
_Position = Annotated[int, Field(ge=0, le=MAX_TEXT)]  # index in the answer or its reasoning
_UnixTime = Annotated[int, Field(ge=0, le=1 << 60)]  # in milliseconds
_Milliseconds = Annotated[float, Field(ge=0, le=1e12, allow_inf_nan=False)]


class _Attachment(StrictFields):
    name: _Name
    text: _Text


class _AnswerStats(StrictFields):
    prompt_tokens: _Count = 0
    cached_tokens: _Count = 0
    completion_tokens: _Count = 0
    reasoning_tokens: _Count = 0
    prompt_ms: _Milliseconds = 0
    completion_ms: _Milliseconds = 0
    thinking_ms: _Milliseconds = 0
    queue_ms: _Milliseconds = 0
    first_token_ms: _Milliseconds = 0


def _require_object(text: str) -> str:
    try:
        check_shape(text.encode(), ARGUMENTS_LIMITS)
    except JsonShapeError as error:
        raise ValueError(str(error)) from None
    if not isinstance(json.loads(text, parse_constant=refuse_constant), dict):
        raise ValueError("not a JSON object")
    return text


_Arguments = Annotated[_Text, AfterValidator(_require_object)]


class _ToolUse(StrictFields):
    id: str = Field(max_length=100)
    name: _NonemptyName
    arguments: _Arguments
    state: Literal["waiting", "running", "done", "failed", "denied", "interrupted"]
    round: int = Field(default=0, ge=0, le=1000)
    result: _Text = ""
    duration_ms: _Milliseconds = 0
    content_at: _Position = 0
    reasoning_at: _Position = 0
    round_end: _Position = 0


class _Message(StrictFields):
    id: str = Field(max_length=100)
    parent_id: str | None = Field(max_length=100)
    chosen_child: str | None = None
    role: Literal["user", "assistant"]
    kind: Literal["turn", "summary"] = "turn"
    content: _Text
    reasoning: _Text = ""
    state: Literal["queued", "running", "done", "stopped", "failed", "interrupted"] = "done"
    note: str = Field(default="", max_length=1000)
    edited: bool = False
    attachments: list[_Attachment] = Field(default=[], max_length=16, fail_fast=True)
    tool_uses: list[_ToolUse] = Field(default=[], max_length=MAX_TOOL_USES, fail_fast=True)
    dropped_messages: _Count = 0
    created_ms: _UnixTime = 0
    model: _Name = ""
    rating: Rating = 0
    numbers: _AnswerStats = Field(default_factory=_AnswerStats)


class _Chat(StrictFields):
    file_version: int | None = None  # set only in our export format
    source: _Name = ""  # set only in exports of other programs
    title: _Name
    thinking: bool = True
    prompt_date: str = Field(pattern=r"^\d{4}-\d\d-\d\d$")
    created_ms: _UnixTime = 0
    updated_ms: _UnixTime = 0
    pinned: bool = False
    archived: bool = False
    settings: Annotated[dict[str, str | int | float | bool], limit_entries(MAX_SETTINGS)] = Field(
        default={}, max_length=MAX_SETTINGS
    )
    chosen_root: str | None = None
    messages: list[_Message] = Field(max_length=MAX_MESSAGES, fail_fast=True)


class _Function(StrictFields):
    name: _NonemptyName
    arguments: _Arguments


class _Call(StrictFields):
    id: _NonemptyName
    type: Literal["function"] = "function"
    function: _Function


class _PromptMessage(StrictFields):
    role: Literal["system", "developer", "user"]
    content: _Text
    name: _Name | None = None


class _AssistantMessage(StrictFields):
    role: Literal["assistant"]
    content: _Text | None = None
    reasoning_content: _Text | None = None
    name: _Name | None = None
    tool_calls: list[_Call] | None = Field(default=None, max_length=MAX_TOOL_USES, fail_fast=True)


class _ToolResult(StrictFields):
    role: Literal["tool"]
    content: _Text
    name: _Name | None = None
    tool_call_id: _NonemptyName


_OpenAIMessage = Annotated[_PromptMessage | _AssistantMessage | _ToolResult, Field(discriminator="role")]


class _OpenAIList(StrictFields):
    messages: list[_OpenAIMessage] = Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)
    title: _Name = ""


@dataclass(frozen=True, slots=True)
class ParsedImport:
    """Chats of a file, and counts of omitted content by kind."""

    chats: list[ImportedChat]
    left_out: Counter[str] = field(default_factory=Counter)


def read_chats(body: bytes, derive_title: TitleOf) -> list[ImportedChat]:
    """Parse chats and assign new ids. Raises Problem."""
    return validate_chats(entries(body), derive_title).chats


def validate_chats(parsed: Iterable[Entry], derive_title: TitleOf) -> ParsedImport:
    """Validate chats, assign new ids, and count invalid chats.

    Raises Problem if no chat is valid, there are too many chats, or the file was rejected.
    """
    chats: list[ImportedChat] = []
    problem: Problem | None = None
    invalid = 0
    left_out = Counter[str]()
    for kind, value in parsed:
        if kind == "refused":
            raise _refusal(*value)
        if kind == "left_out":
            left_out.update(value)
        else:
            try:
                _check_text(value)
                chats.append(
                    _validate_own_chat(value, len(chats) + invalid, derive_title)
                    if kind == "own"
                    else _from_openai(value, derive_title)
                )
            except Problem as error:
                problem, invalid = problem or error, invalid + 1
        if len(chats) + invalid > MAX_CHATS:
            raise _refusal("import_too_much", "chats", {"limit": MAX_CHATS})
    if problem is not None and not chats:
        raise problem
    if invalid:
        left_out["chats"] += invalid
    return ParsedImport(chats, left_out)


def new_messages(messages: Sequence[StoredMessage], earlier: EarlierImport) -> list[StoredMessage]:
    """Return the messages that an earlier import of the same chat did not contain, linked to the stored ones.

    Stored messages that were edited keep their text, and deleted ones are not imported again.
    """
    new_ids: dict[str, str | None] = {}  # id in this import -> id of the stored or new message that represents it
    new = []
    for message in messages:
        parent = new_ids[message.parent_id] if message.parent_id is not None else None
        # In older releases, the source of an LM Studio message was its position, without a digest of its content.
        former = message.source.rpartition("/")[0]
        if message.source in earlier.messages or former in earlier.messages:
            stored_id = earlier.messages.get(message.source) or earlier.messages.get(former)
            new_ids[message.id] = stored_id if stored_id is not None else parent
            continue
        new_ids[message.id] = message.id
        new.append(replace(message, chat_id=earlier.chat_id, parent_id=parent, chosen_child=None))
    return new


def _validate_own_chat(value: Any, at: int, derive_title: TitleOf) -> ImportedChat:
    version = value.get("file_version")
    if isinstance(version, int) and version > FORMAT_VERSION:
        raise Problem(400, words["import_newer"].format(version=version))
    checked = _validate(_Chat, value, f"chats.{at}.")
    if not checked.title and checked.source:
        first = next((each.content for each in checked.messages if each.role == "user"), "")
        checked.title = derive_title(first)[:200]
    elif not checked.title:
        raise _invalid(f"chats.{at}.title", "a title is required")
    return _to_stored_chat(checked)


def _to_stored_chat(source: _Chat) -> ImportedChat:
    now = current_ms()
    new_ids: dict[str, str] = {}
    for message in source.messages:
        if message.id in new_ids:
            raise _invalid("messages", "a duplicate id")
        if message.parent_id is not None and message.parent_id not in new_ids:
            raise _invalid("messages", "a parent is missing")
        new_ids[message.id] = new_id()
    try:
        day = date.fromisoformat(source.prompt_date)
    except ValueError:
        raise _invalid("prompt_date", "invalid date") from None
    form = {k: v for k, v in form_values(source.settings).items() if v}
    form.pop("tools", None)  # only the user, not an imported file, may enable tools
    settings, problems = updated_settings({}, form)
    if problems:
        place, reason = next(iter(problems.items()))
        raise _invalid(f"settings.{place}", reason)
    chat = Chat(
        id=new_id(),
        title=" ".join(source.title.split()) or words["new_chat"],
        thinking=source.thinking,
        prompt_date=day,
        created_ms=min(source.created_ms or now, now),
        updated_ms=min(source.updated_ms or now, now),  # a future time would keep the chat at the top
        pinned=source.pinned,
        settings=settings,
        chosen_root=new_ids.get(source.chosen_root or ""),
        archived=source.archived,
        source=source.source or (f"notso:{source.messages[0].id}" if source.messages else ""),
    )
    return chat, [_to_stored_message(chat.id, message, new_ids) for message in source.messages]


def _to_stored_message(chat_id: str, source: _Message, new_ids: dict[str, str]) -> StoredMessage:
    state: MessageState = "interrupted" if source.state in ("queued", "running") else source.state
    answer = source.role == "assistant"
    return StoredMessage(
        id=new_ids[source.id],
        chat_id=chat_id,
        role=source.role,
        content=source.content,
        reasoning=source.reasoning if answer else "",
        state=state if answer else "done",
        created_ms=source.created_ms,
        generation_id=new_generation_id() if answer else None,
        note=source.note if answer else "",
        numbers=AnswerStats(**source.numbers.model_dump()),
        parent_id=new_ids.get(source.parent_id or ""),
        kind=source.kind if answer else "turn",
        chosen_child=new_ids.get(source.chosen_child or ""),
        edited=source.edited,
        attachments=tuple(Attachment(each.name, each.text) for each in source.attachments),
        dropped_messages=source.dropped_messages,
        tool_uses=_to_tool_uses(source) if answer else (),
        model=source.model if answer else "",
        rating=source.rating if answer else 0,
        source=source.id,
    )


def _to_tool_uses(source: _Message) -> tuple[ToolUse, ...]:
    uses: list[ToolUse] = []
    # The text is split at these positions, so rounds and positions must not decrease, even if they do in the file.
    number = content_at = reasoning_at = 0
    for each in source.tool_uses:
        number = max(number, each.round)
        content_at = max(content_at, min(each.content_at, len(source.content)))
        reasoning_at = max(reasoning_at, min(each.reasoning_at, len(source.reasoning)))
        use = ToolUse(new_tool_use_id(), each.name, each.arguments, each.state, number, each.result, each.duration_ms)
        end = min(each.round_end, len(source.content))
        uses.append(replace(use, content_at=content_at, reasoning_at=reasoning_at, round_end=end))
    return tuple(uses)


def _from_openai(value: Any, derive_title: TitleOf) -> ImportedChat:
    source = _validate(_OpenAIList, value)
    now = current_ms()
    instructions = [each for each in source.messages if isinstance(each, _PromptMessage)]
    system = "\n\n".join(each.content for each in instructions if each.role != "user")
    settings, problems = updated_settings({}, {"system_prompt": system})
    if problems:
        raise _invalid("messages", problems["system_prompt"].rstrip("."))
    thinking = any(each.reasoning_content for each in source.messages if isinstance(each, _AssistantMessage))
    title = source.title or derive_title(next((each.content for each in instructions if each.role == "user"), ""))
    # A message list has no id: identify the chat by the digest of its messages.
    identity = hashlib.sha256(json.dumps(value["messages"], sort_keys=True).encode()).hexdigest()
    chat = Chat(new_id(), title, thinking, date.today(), now, now, settings=settings, source=f"openai:{identity}")
    messages: list[StoredMessage] = []
    continues = False  # whether the last answer ends with tool calls, so that an assistant message continues it
    unanswered: dict[str, int] = {}  # tool calls of the newest answer that have no result yet: id -> index

    def add(role: Literal["user", "assistant"], content: str) -> None:
        follows = messages[-1].id if messages else None
        number = str(len(messages))
        messages.append(
            StoredMessage(new_id(), chat.id, role, content, "", "done", now, parent_id=follows, source=number)
        )

    for number, each in enumerate(source.messages):
        if isinstance(each, _ToolResult):
            if each.tool_call_id not in unanswered:
                raise _invalid(f"messages.{number}.tool_call_id", "no call with that id is waiting for a result")
            uses = list(messages[-1].tool_uses)
            at = unanswered.pop(each.tool_call_id)
            uses[at] = replace(uses[at], state="done", result=each.content)
            messages[-1] = replace(messages[-1], tool_uses=tuple(uses))
        elif isinstance(each, _AssistantMessage):
            if not continues:
                add("assistant", "")
            continues = bool(each.tool_calls)
            before = len(messages[-1].tool_uses)
            messages[-1] = _extend_answer(messages[-1], each)
            unanswered = {call.id: at for at, call in enumerate(each.tool_calls or (), start=before)}
        elif each.role == "user":
            add("user", each.content)
            continues, unanswered = False, {}
    if not messages:
        raise Problem(400, words["import_unknown"])
    return chat, messages


def _extend_answer(answer: StoredMessage, message: _AssistantMessage) -> StoredMessage:
    content = "\n\n".join(filter(None, (answer.content, message.content)))
    reasoning = "\n\n".join(filter(None, (answer.reasoning, message.reasoning_content)))
    number = answer.tool_uses[-1].round + 1 if answer.tool_uses else 0
    calls = [
        ToolUse(
            new_tool_use_id(),
            call.function.name,
            call.function.arguments,
            "interrupted",  # until the result is found in the file
            number,
            content_at=len(content),
            reasoning_at=len(reasoning),
            round_end=len(content),
        )
        for call in message.tool_calls or ()
    ]
    if len(answer.tool_uses) + len(calls) > MAX_TOOL_USES:
        raise _invalid("messages", f"a response with more than {MAX_TOOL_USES} calls")
    return replace(
        answer,
        content=content,
        reasoning=reasoning,
        generation_id=answer.generation_id or new_generation_id(),
        tool_uses=(*answer.tool_uses, *calls),
    )


def _refusal(key: str, detail: str, params: dict[str, str | int]) -> Problem:
    inserted = {"detail": words[f"{key}_{detail}"].format(**params)} if detail else {}
    return Problem(400, words[key].format(**params, **inserted))


def _invalid(place: str, reason: str) -> Problem:
    return Problem(400, words["import_invalid"].format(place=place, reason=reason))


def _check_text(data: Any) -> None:
    stack = [data]
    while stack:
        value = stack.pop()
        if isinstance(value, str) and _UNFIT.search(value):
            raise Problem(400, words["error_text"])
        if isinstance(value, dict):
            stack += [*value.keys(), *value.values()]
        elif isinstance(value, list):
            stack += value


def _validate(model: type[M], data: Any, prefix: str = "") -> M:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = (prefix + ".".join(map(str, first["loc"])))[:100]
        no_role = first["type"].startswith("union_tag")
        reason = "a role must be system, developer, user, assistant or tool" if no_role else first["msg"]
        raise _invalid(place, reason) from None
