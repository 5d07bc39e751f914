"""Submit a chat turn: check that it fits the context, select the chat's tools, store it and queue it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from typing import Literal

from notso.web.chat.chat_view import ChatView, read_branch
from notso.web.chat.services import ChatServices, models_of
from notso.web.engine.model_names import ModelChoice, chosen_model
from notso.web.engine.port import ContextLengthError, Message, ModelError, Request, RequestOptions, SamplingParams
from notso.web.engine.running import Prepared, RunningRequest, asks, prepare
from notso.web.store.protocol import Chat, NewMessage, NewTurn, SettingValue, StoredMessage, TurnAccepted, TurnRefused
from notso.web.tools.chat_tool import ChatTool, Surroundings
from notso.web.turns.attachments import attachments_from
from notso.web.turns.chat_settings import NO_LIMIT, ChatSettings, settings_from
from notso.web.turns.prompt import SUMMARY_REQUEST, prompt_messages, text_size
from notso.web.turns.tool_calls import ToolOffer
from notso.web.turns.turn import Turn
from notso.web.values.errors import QuotaError, StorageError
from notso.web.values.ids import is_id, new_generation_id, new_id
from notso.web.values.problems import Problem
from notso.web.values.wording import number, words


async def prepared_request(services: ChatServices, request: Request, size: int) -> Prepared | None:
    """The request with its prompt written, of texts of `size` characters. Raises Problem with both numbers where it
    does not fit. None where no model is loaded, or it is refused for another reason: the engine says so in its turn."""
    engine = services.shared.engine.model(request.model).engine
    if engine is None:
        return None
    try:
        return await services.shared.large_work.run(lambda: prepare(engine, request), size, request.options.owner)
    except ContextLengthError as error:
        used = f"{'≥ ' if error.at_least else ''}{number(error.needed_tokens)}"
        sentence = words["limit_over"].format(used=used, total=number(error.context_tokens))
        raise Problem(400, sentence, full=True) from error
    except ModelError:
        return None


logger = logging.getLogger("notso.web.tools")

ALLOWED = "tools_allowed"
"""In a chat's settings: the tools it may use without asking, each as `name=digest`. It is no setting that a file could
bring along."""


async def offer_in(services: ChatServices, owner: str, view: ChatView) -> ToolOffer | None:
    """What the model may call when it answers at the end of a branch; None for nothing."""
    chat, tools = view.chat, services.toolbox.chosen(view.settings.tool_names)
    if not tools:
        return None
    attachments = tuple(each for message in view.line for each in message.attachments)
    if view.above:
        above = await services.shared.store.attachments_above(owner, chat.id, view.line[0].id)
        attachments = (*above, *attachments)

    async def grant(tool: ChatTool) -> None:
        await _grant(services, owner, chat.id, tool)

    return ToolOffer(tools, Surroundings(owner, chat.id, services.shared.store, attachments), allowed_in(chat), grant)


def allowed_in(chat: Chat | None) -> set[str]:
    """The digests of the tools that need no asking in this chat."""
    return {digest for _, digest in _allowed(chat.settings)} if chat is not None else set()


def with_tools(
    settings: Mapping[str, SettingValue], names: Iterable[str], *, ask_again: bool = False
) -> dict[str, SettingValue]:
    """A chat's settings with other tools. Permission goes with a tool that is switched off, or on request."""
    chosen = list(names)
    changed = dict(settings) | {"tools": " ".join(chosen) or NO_LIMIT}
    kept = [] if ask_again else [each for each in _allowed(settings) if each[0] in chosen]
    changed.pop(ALLOWED, None)
    return changed | ({ALLOWED: " ".join(map("=".join, kept))} if kept else {})


def _allowed(settings: Mapping[str, SettingValue]) -> list[tuple[str, str]]:
    """Names and digests. What an older release allowed has no digest, and is asked about again."""
    pairs = (each.rpartition("=") for each in str(settings.get(ALLOWED, "")).split())
    return [(name, digest) for name, _, digest in pairs if name]


async def _grant(services: ChatServices, owner: str, chat_id: str, tool: ChatTool) -> None:
    try:
        chat = await services.shared.store.chat(owner, chat_id)
        if chat is not None:
            others = (each for each in _allowed(chat.settings) if each[0] != tool.name)
            allowed = " ".join(map("=".join, sorted([*others, (tool.name, tool.digest)])))
            await services.shared.store.set_settings(owner, chat_id, dict(chat.settings) | {ALLOWED: allowed})
    except StorageError as error:
        logger.warning("a permission was not kept: %s", error)


Role = Literal["user", "assistant"]
StoreCall = Callable[[], Awaitable[TurnAccepted | TurnRefused]]
Submitted = tuple[TurnAccepted, ChatView]
"""What was stored, and the branch down to its question."""

MAX_TITLE_CHARACTERS = 120
TITLE_WIDTH = 48
MAX_SUMMARY_TOKENS = 512


async def ask(
    services: ChatServices,
    owner: str,
    view: ChatView,
    fields: dict[str, str],
    *,
    is_new: bool = False,
    instead_of: str | None = None,
    last: str | None = None,
) -> Submitted:
    """Store the question at the end of the view's branch and start its answer; what comes back is on disk. `last` is
    the last message the page shows ('': none, None: the end of the chosen branch); a question `instead_of` another
    follows what that follows. Raises Problem and StorageError, which keep the text."""
    chat = view.chat
    text = fields.get("text", "").strip("\n")
    limit = services.shared.settings.max_message_characters
    with keeping(text):
        attachments = attachments_from(fields, limit)
        _check_text(text, limit, may_be_empty=bool(attachments))
        with _admitted(services, owner) as running:
            user_message = replace(_message(chat, "user", text), attachments=attachments)
            choice = await chosen_model(*models_of(services), view.settings.model)
            asked = view.with_question(user_message)
            request, _ = await _request(services, owner, asked, choice)
            prepared = await prepared_request(services, request, text_size(asked.line))
            if prepared is not None:  # refused before it is stored
                await running.reserve(prepared.engine, asks(request, prepared))
            turn = NewTurn(user_message, _new_message(chat), _key(fields), instead_of, last)
            new = chat if is_new else None
            accepted, view = await _begin(
                *(services, owner, view, turn.assistant_message, running),
                lambda: services.shared.store.add_turn(owner, turn, new),
                choice=choice,
                prepared=prepared,
            )
        if accepted.repeated and accepted.user_message.content != text:
            raise Problem(409, words["error_sent_before"])  # its answer was lost on the way, and the text changed since
    if accepted.user_message.chat_id != chat.id and not is_new:
        raise Problem(400, words["error_form"])  # the key of another chat's message
    return accepted, view


@contextlib.contextmanager
def keeping(text: str) -> Iterator[None]:
    """What is raised within says what a person had written, so that no page loses it."""
    try:
        yield
    except (Problem, QuotaError, StorageError) as error:
        error.draft = text
        raise


async def add_version(
    services: ChatServices, owner: str, view: ChatView, message: StoredMessage, fields: dict[str, str]
) -> Submitted:
    """Another version of an answer, beside it. `view` ends in its question."""
    if message.role != "assistant" or message.kind != "turn" or message.parent_id is None:
        raise Problem(404, words["error_unknown_page"])
    new = NewMessage(_new_message(view.chat), message.parent_id, _key(fields))
    with _admitted(services, owner) as running:
        choice = await chosen_model(*models_of(services), view.settings.model)
        return await _begin(
            *(services, owner, view, new.assistant_message, running),
            lambda: services.shared.store.add_message(owner, new),
            choice=choice,
        )


async def write_on(
    services: ChatServices, owner: str, view: ChatView, message_id: str, *, through: str | None, hurry: bool = False
) -> Submitted:
    """Continue the same answer where it ended, on the branch through `through`; with `hurry`, its unfinished thought is
    closed first. `view` ends in its question."""
    assistant_message = replace(_new_message(view.chat), id=message_id)
    generation_id = assistant_message.generation_id or ""
    with _admitted(services, owner) as running:
        choice = await chosen_model(*models_of(services), view.settings.model)
        return await _begin(
            *(services, owner, view, assistant_message, running),
            lambda: services.shared.store.resume_message(
                owner, view.chat.id, message_id, generation_id, through=through
            ),
            choice=choice,
            hurry=hurry,
        )


async def summarise(services: ChatServices, owner: str, view: ChatView, fields: dict[str, str]) -> Submitted:
    """A summary at the end of the view's branch; for the model it stands in place of what is above it."""
    chat, settings, shown = view.chat, view.settings, view.line
    said = view.above > 0 or any(message.content for message in shown[1:])
    if not shown or shown[-1].kind == "summary" or not said:
        raise Problem(400, words["error_nothing_to_summarize"])
    assistant_message = replace(_new_message(chat), kind="summary")
    new = NewMessage(assistant_message, shown[-1].id, _key(fields) if "key" in fields else new_id())
    with _admitted(services, owner) as running, services.turns.expecting(assistant_message.generation_id or ""):
        choice = await chosen_model(*models_of(services), settings.model)
        accepted = _accepted(await _once_free(services, lambda: services.shared.store.add_message(owner, new)))
        if accepted.repeated:
            running.close()
            return accepted, view
        view = view.after(accepted) or await read_branch(services, owner, chat.id, accepted.user_message.id)
        messages = (*await _messages(view), Message("user", SUMMARY_REQUEST))
        await services.toolbox.ready(settings.tool_names)
        request = Request(
            messages,
            SamplingParams(temperature=0.0, max_tokens=MAX_SUMMARY_TOKENS, thinking_budget=0),
            RequestOptions(
                thinking=chat.thinking,  # this and the tools as in the chat itself, so that its cached prompt serves
                tools=services.toolbox.definitions(settings.tool_names),
                tool_choice="none",
                date=chat.prompt_date,
                owner=owner,
                conversation=view.first_id,
                when_full="drop_oldest",
                adapter=choice.adapter,
            ),
            choice.model,
        )
        turn = Turn(accepted.assistant_message, request, left_out=view.left_out)
        services.turns.start(turn, running)
    return accepted, view


def new_chat(first_text: str, *, thinking: bool) -> Chat:
    """A chat named after its first line. Its date is today's for good."""
    now = _now_ms()
    return Chat(new_id(), title_of(first_text), thinking, date.today(), now, now)


def branched(chat: Chat, line: Sequence[StoredMessage]) -> tuple[Chat, list[StoredMessage]]:
    """A chat of its own that begins with these messages, which have ids of their own."""
    now, ids = _now_ms(), {message.id: new_id() for message in line}
    title = words["branch_title"].format(title=chat.title)[:MAX_TITLE_CHARACTERS]
    new = replace(
        chat,
        id=new_id(),
        title=title,
        created_ms=now,
        updated_ms=now,
        pinned=False,
        archived=False,
        unread=False,
        chosen_root=None,
    )
    copied = [
        replace(
            message,
            id=ids[message.id],
            chat_id=new.id,
            parent_id=ids.get(message.parent_id or ""),
            chosen_child=None,
            generation_id=new_generation_id() if message.generation_id else None,
        )
        for message in line
    ]
    return new, copied


def title_of(text: str) -> str:
    """The first line that says something, cut at a word."""
    lines = (line.strip() for line in text.splitlines())
    line = " ".join(next((line for line in lines if line and not line.startswith("```")), "").split())
    if len(line) <= TITLE_WIDTH:
        return line or words["new_chat"]
    cut = line[:TITLE_WIDTH]
    return (cut.rpartition(" ")[0] if " " in cut[TITLE_WIDTH // 2 :] else cut) + "…"


async def settings_of(services: ChatServices, owner: str, chat: Chat | None) -> ChatSettings:
    """What counts in a chat, or in a new one."""
    return settings_from(await services.shared.store.defaults(owner), chat.settings if chat is not None else {})


@contextlib.contextmanager
def _admitted(services: ChatServices, owner: str) -> Iterator[RunningRequest]:
    """One turn more that waits, until it is started and ends, or this is left by an error. Raises Problem."""
    _check_admission(services)
    running = services.shared.requests.admit(owner)
    if running is None:
        raise Problem(429, words["error_busy"], retry_after_seconds=10)
    try:
        yield running
    except BaseException:
        running.close()
        raise


def _check_admission(services: ChatServices) -> None:
    if services.shared.stopping:
        raise Problem(503, words["error_stopping"], retry_after_seconds=15)
    if services.shared.store.read_only:
        raise Problem(503, words["read_only" if services.shared.store.damage == "unsound" else "read_only_lost"])


async def _begin(
    services: ChatServices,
    owner: str,
    view: ChatView,
    assistant_message: StoredMessage,
    running: RunningRequest,
    store: StoreCall,
    *,
    choice: ModelChoice,
    prepared: Prepared | None = None,
    hurry: bool = False,
) -> Submitted:
    """Store a turn and start it, unless it was there already. Raises Problem."""
    _check_admission(services)  # once more: much may have happened while it was measured
    with services.turns.expecting(assistant_message.generation_id or ""):
        accepted = _accepted(await _once_free(services, store))
        if accepted.repeated:
            running.close()
        else:
            question = accepted.user_message
            view = view.after(accepted) or await read_branch(services, owner, question.chat_id, question.id)
            await services.toolbox.ready(view.settings.tool_names)
            request, offer = await _request(services, owner, view, choice)
            in_reasoning = bool(accepted.assistant_message.reasoning) and not accepted.assistant_message.content
            turn = Turn(
                *(accepted.assistant_message, request, offer, view.settings.keep_thinking, hurry and in_reasoning),
                left_out=view.left_out,
            )
            services.turns.start(turn, running, prepared)
    return accepted, view


async def _messages(view: ChatView) -> tuple[Message, ...]:
    """What the model reads of the branch."""
    settings = view.settings
    return await asyncio.to_thread(
        prompt_messages, view.line, settings.system_prompt, keep_thinking=settings.keep_thinking
    )


async def _request(
    services: ChatServices, owner: str, view: ChatView, choice: ModelChoice
) -> tuple[Request, ToolOffer | None]:
    """What is asked of the model at the end of the branch, and what it may call."""
    chat, settings = view.chat, view.settings
    offer = await offer_in(services, owner, view)
    request = Request(
        await _messages(view),
        settings.sampling,
        RequestOptions(
            thinking=chat.thinking,
            tools=offer.definitions if offer is not None else None,
            date=chat.prompt_date,
            owner=owner,
            conversation=view.first_id,
            when_full=settings.when_full,
            adapter=choice.adapter,
        ),
        choice.model,
    )
    return request, offer


async def _once_free(services: ChatServices, store: StoreCall) -> TurnAccepted | TurnRefused:
    """Store, once more if the chat was held by a turn of this process that nobody runs."""
    outcome = await store()
    if isinstance(outcome, TurnRefused) and outcome.running is not None and outcome.held_here:
        await _end_lost(services, outcome.running)
        outcome = await store()
    return outcome


async def _end_lost(services: ChatServices, assistant_message: StoredMessage) -> None:
    """A turn marked running that nobody runs (its last save failed) must not lock its chat for ever."""
    generation_id = assistant_message.generation_id or ""
    turn = services.turns.find(generation_id)
    if turn is not None and turn.log.finished:
        await services.shared.store.save_message(turn.message)
    elif services.turns.lost(generation_id):
        await services.shared.store.save_message(replace(assistant_message, state="interrupted"))


def _accepted(outcome: TurnAccepted | TurnRefused) -> TurnAccepted:
    if isinstance(outcome, TurnAccepted):
        return outcome
    if outcome.moved:
        raise Problem(409, words["error_moved"], moved=True)
    if outcome.running is None:
        raise Problem(404, words["error_unknown_chat"])
    raise Problem(409, words["error_running"])


def _key(fields: dict[str, str]) -> str:
    key = fields.get("key", "")
    if not is_id(key):
        raise Problem(400, words["error_form"])
    return key


def _message(chat: Chat, role: Role, text: str) -> StoredMessage:
    return StoredMessage(new_id(), chat.id, role, text, "", "done", _now_ms())


def _new_message(chat: Chat) -> StoredMessage:
    return replace(_message(chat, "assistant", ""), state="queued", generation_id=new_generation_id())


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


def _check_text(text: str, limit: int, *, may_be_empty: bool) -> None:
    if not text.strip() and not may_be_empty:
        raise Problem(400, words["error_empty"])
    if len(text) > limit:
        raise Problem(400, words["error_too_long"].format(length=number(len(text)), limit=number(limit)))
