"""Submit a chat turn: check that it fits in the context, select the chat's tools, store the turn and queue it.

Most functions take a `view` of the branch that ends in the question. An answer consists of one or more engine requests
(runs): each round of tool calls is followed by another run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import partial
from itertools import chain, repeat
from typing import Literal

from notso.documents.values import unreadable
from notso.smollm3 import ContextLengthError, Message, ModelError, Priority, RequestOptions, SamplingParams, WhenFull
from notso.web.chat.chat_view import ChatView, read_branch, read_branch_above
from notso.web.chat.services import ChatServices, ChatUser, engine_and_registry
from notso.web.engine.model_names import (
    DEFAULT_MODEL,
    ModelChoice,
    engine_if_loaded,
    model_id,
    resolve_model_choice,
)
from notso.web.engine.port import Request
from notso.web.engine.running import PreparedRequest, RunningRequest, prepare, submissions_for
from notso.web.store.protocol import (
    AnswerTrace,
    Attachment,
    Chat,
    ChatStore,
    NewMessage,
    NewTurn,
    Orphan,
    SettingValue,
    StoredMessage,
    TurnAccepted,
    TurnRefused,
)
from notso.web.tools.chat_tool import ChatTool, ToolContext
from notso.web.turns.answer_trace import make_replayable, message_before_run, replay_request
from notso.web.turns.chat_settings import (
    MAX_MODEL_NAME_CHARACTERS,
    ChatSettings,
    allowed_digests,
    merge_settings,
    updated_settings,
    with_permission,
    without_permissions,
)
from notso.web.turns.documents import MAX_ATTACHMENTS, PromptDocuments, parse_attachments, prompt_documents
from notso.web.turns.every_part import MAX_PARTS, DocumentPart, build_part_requests
from notso.web.turns.prompt import SUMMARY_REQUEST, continuation_request, prompt_messages, text_size
from notso.web.turns.tool_calls import ToolOffer
from notso.web.turns.turn import Turn
from notso.web.turns.turn_log import NUMBERS_OF_A_LOG, TurnLog
from notso.web.values.durations import current_ms
from notso.web.values.errors import Problem, QuotaError, StorageError, is_thread_shortage
from notso.web.values.ids import is_id, new_generation_id, new_id
from notso.web.values.request_id import request_id
from notso.web.values.wording import number, translated, words

logger = logging.getLogger("notso.web.turns")

Role = Literal["user", "assistant"]
StoreCall = Callable[[], Awaitable[TurnAccepted | TurnRefused]]
Submitted = tuple[TurnAccepted, ChatView]
"""The stored turn, and a view of the branch that ends in its question. For a turn that was stored earlier (`repeated`),
the view is unchanged."""

MAX_TITLE_CHARACTERS = 120
TITLE_WIDTH = 100
_LEADING_MARK = re.compile(r"(#{1,6}|>|[-*+])\s+")
MAX_SUMMARY_TOKENS = 512
RESUME_RETRY_SECONDS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)


async def submit_question(
    user: ChatUser,
    view: ChatView,
    fields: dict[str, str],
    *,
    is_new: bool = False,
    instead_of: StoredMessage | None = None,
    last: str | None = None,
) -> Submitted:
    """Store a question at the end of the view's branch and queue its answer.

    last: id of the last message on the page; '' for an empty page; None for the end of the chosen branch. instead_of:
    the question that was edited, whose attachments are kept unless the form replaces them.
    """
    chat = view.chat
    text = fields.get("text", "").strip("\n")
    limit = user.services.shared.settings.max_message_characters
    with keep_draft(text):
        before = instead_of.attachments if instead_of is not None else ()
        kept = [each for number, each in enumerate(before, start=1) if f"file-{number}-name" not in fields]
        attachments = await _resolve_attachments(user, parse_attachments(fields, limit), kept)
        _check_text(text, limit, may_be_empty=bool(attachments))
        with _admit(user) as running:
            user_message = replace(_create_message(chat, "user", text), attachments=attachments)
            choice = await resolve_model_choice(*engine_and_registry(user.services), view.settings.model)
            question_view = view.with_question(user_message)
            answer = replace(_new_message(chat), model=_model_name(user.services, choice))
            request, _ = await build_request(user, question_view, choice, answer)
            parts = await _build_parts(user, question_view, request) if "every" in fields else ()
            prepared = None if parts else await _prepare_if_possible(user.services, running, request, question_view)
            trace = AnswerTrace((), view.settings.model, every=bool(parts))
            original = instead_of.id if instead_of is not None else None
            turn = NewTurn(user_message, answer, _idempotency_key(fields), original, last, trace)
            store = partial(user.store.add_turn, user.owner, turn, chat if is_new else None)
            accepted, view = await _store_and_start(user, view, choice, answer, trace, store, running, prepared, parts)
        if accepted.repeated and accepted.user_message.content != text:
            # The response to the first request was lost, and the user edited the text before sending it again.
            raise Problem(409, words["error_sent_before"])
    if accepted.user_message.chat_id != chat.id and not is_new:
        raise Problem(400, words["error_form"])  # the idempotency key was used in another chat
    return accepted, view


async def _resolve_attachments(
    user: ChatUser, attachments: Sequence[Attachment], kept: Sequence[Attachment]
) -> tuple[Attachment, ...]:
    # An imported question may exceed the limit, but then no attachments can be added.
    if attachments and len(kept) + len(attachments) > MAX_ATTACHMENTS:
        raise Problem(400, words["error_attachments"].format(limit=MAX_ATTACHMENTS))
    ids = {each.document for each in attachments if each.document}
    kept_ids = {each.document for each in kept if each.document}
    found = await user.store.documents.some(user.owner, sorted(ids | kept_ids))
    # Omit documents of the original question that were deleted or can no longer be read.
    documents = [each for each in found if each.id in ids or each.state != "failed"]
    for each in documents:
        if each.state == "failed":
            raise Problem(
                400, words["document_failed"].format(name=each.name, reason=translated(unreadable(each.reason)))
            )
        if each.state != "ready":
            raise Problem(409, words["document_unready"].format(name=each.name))
    if ids - {each.id for each in documents}:
        raise Problem(400, words["document_unknown"])
    return (
        *(Attachment(each.name, "", each.id) for each in documents),
        *(each for each in (*kept, *attachments) if not each.document),
    )


@contextlib.contextmanager
def keep_draft(text: str) -> Iterator[None]:
    """Attach the user's text to exceptions as `draft`."""
    try:
        yield
    except (Problem, QuotaError, StorageError) as error:
        error.draft = text
        raise


async def regenerate_answer(user: ChatUser, message: StoredMessage, fields: dict[str, str]) -> Submitted:
    """Generate another version of an answer."""
    parent_id = _require_parent(message)
    view, key = await read_branch_above(user, message), _idempotency_key(fields)
    own = _version_settings(view, fields)
    return await _add_answer(user, view.with_settings(own), _new_message(view.chat), parent_id, key, own)


def _version_settings(view: ChatView, fields: dict[str, str]) -> Mapping[str, SettingValue] | None:
    changes = {name: fields[name] for name in ("temperature", "model") if fields.get(name, "").strip()}
    settings, problems = updated_settings(view.chat.settings, changes)
    if problems:
        name, reason = next(iter(problems.items()))
        raise Problem(400, f"{words['set_' + name]}{words['colon']}{reason}")
    return settings if changes else None


def _require_parent(message: StoredMessage) -> str:
    if message.role != "assistant" or message.kind != "turn" or message.parent_id is None:
        raise Problem(404, words["error_unknown_page"])
    return message.parent_id


async def continue_answer(
    user: ChatUser, message: StoredMessage, *, through: str | None, hurry: bool = False
) -> Submitted:
    """Continue an answer on the branch that contains `through`. hurry: end the reasoning first."""
    store, view = user.store, await read_branch_above(user, message)
    answer = replace(_new_message(view.chat), id=message.id)
    with _admit(user) as running:
        stored = await store.trace(user.owner, message.id)
        own = stored.own if stored is not None else None
        model, choice, name = await _continuing_model(user.services, message, view.settings.model)
        view = view.with_settings(own)
        prepared = None
        if all(use.is_final for use in message.tool_uses):  # otherwise pending tool calls run first
            request, _ = await build_request(user, view, choice, answer)
            request = continuation_request(request, message, keep_thinking=view.settings.keep_thinking)
            prepared = await _prepare_if_possible(user.services, running, request, view)
        trace = AnswerTrace((), model, own=own, hurry=hurry)
        ids = view.chat.id, message.id, answer.generation_id or ""
        resume = partial(store.resume_message, user.owner, *ids, through=through, trace=trace, model=name)
        return await _store_and_start(user, view, choice, answer, trace, resume, running, prepared)


async def _continuing_model(
    services: ChatServices, message: StoredMessage, setting: str | None
) -> tuple[str | None, ModelChoice, str]:
    # Use the model that generated the answer if it is loaded, or else the model selected in the chat's settings. The
    # last value returned is the answer's new model name ('': unchanged).
    host, registry = engine_and_registry(services)
    engine, choice = None, DEFAULT_MODEL
    if message.model and host.loaded():  # otherwise, resolving the name would wait for the first load
        engine, choice = await engine_if_loaded(host, registry, message.model)
    if engine is not None:
        return message.model, choice, ""
    choice = await resolve_model_choice(host, registry, setting)
    return setting, choice, _model_name(services, choice)


async def fork(
    user: ChatUser,
    message: StoredMessage,
    trace: AnswerTrace,
    place: tuple[int, int],
    replacement: tuple[int, ...],
    fields: dict[str, str],
) -> Submitted:
    """Generate another version of an answer from the tokens before `place` (run, token), followed by `replacement`.

    Raises Problem, for example 409 if the conversation or the model has changed.
    """
    parent_id = _require_parent(message)
    number, at = place
    run = trace.runs[number]
    closed_at = tuple(each for each in run.closed_at if each < at)
    run = replace(run, ids=(*run.ids[:at], *replacement), closed_at=closed_at, tokens=0, reasoning_tokens=0, finish="")
    prefix, key = message_before_run(run, message), _idempotency_key(fields)
    view = (await read_branch_above(user, message)).with_settings(trace.own)
    with _admit(user) as running:
        choice = await resolve_model_choice(*engine_and_registry(user.services), trace.model)
        await user.services.toolbox.ready(view.settings.tool_names)
        forked = AnswerTrace((*trace.runs[:number], run), trace.model, own=trace.own)
        answer = replace(
            _new_message(view.chat),
            model=message.model,
            content=prefix.content,
            reasoning=prefix.reasoning,
            tool_uses=prefix.tool_uses,
        )
        request, _ = await build_request(user, view, choice, answer)
        request = replay_request(run, request, message, keep_thinking=view.settings.keep_thinking)
        try:
            await _prepare(user.services, running, request, view)
        except ModelError as error:
            raise Problem(409, words["error_fork"]) from error
        store = partial(user.store.add_message, user.owner, NewMessage(answer, parent_id, key, forked))
        return await _store_and_start(user, view, choice, answer, forked, store, running)


async def add_summary(user: ChatUser, view: ChatView, fields: dict[str, str]) -> Submitted:
    """Append a summary that replaces the messages before it in prompts."""
    line = view.line
    has_text = view.above > 0 or any(message.content for message in line[1:])
    if not line or line[-1].kind == "summary" or not has_text:
        raise Problem(400, words["error_nothing_to_summarize"])
    key = _idempotency_key(fields) if "key" in fields else new_id()
    return await _add_answer(user, view, new_summary(view.chat), line[-1].id, key)


async def _add_answer(
    user: ChatUser,
    view: ChatView,
    answer: StoredMessage,
    parent_id: str,
    key: str,
    own: Mapping[str, SettingValue] | None = None,
) -> Submitted:
    trace = AnswerTrace((), view.settings.model, own=own)
    with _admit(user) as running:
        choice = await resolve_model_choice(*engine_and_registry(user.services), view.settings.model)
        await user.services.toolbox.ready(view.settings.tool_names)
        if answer.kind == "turn":
            answer = replace(answer, model=_model_name(user.services, choice))
        request, _ = await build_request(user, view, choice, answer)
        prepared = await _prepare_if_possible(user.services, running, request, view)
        store = partial(user.store.add_message, user.owner, NewMessage(answer, parent_id, key, trace))
        return await _store_and_start(user, view, choice, answer, trace, store, running, prepared)


def new_chat(first_text: str, *, thinking: bool) -> Chat:
    now = current_ms()
    return Chat(new_id(), derive_title(first_text), thinking, date.today(), now, now)


def copy_branch(chat: Chat, line: Sequence[StoredMessage]) -> tuple[Chat, list[StoredMessage]]:
    now, ids = current_ms(), {message.id: new_id() for message in line}
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
        settings=without_permissions(chat.settings),
        source="",  # importing the file again must not add messages to the copy
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


def derive_title(text: str) -> str:
    lines = (line.strip() for line in text.splitlines())
    line = " ".join(next((line for line in lines if line and not line.startswith("```")), "").split())
    line = _LEADING_MARK.sub("", line, count=1) if _LEADING_MARK.match(line) else line
    if len(line) <= TITLE_WIDTH:
        return line or words["new_chat"]
    # Cut between words, unless that would drop more than half of the title.
    cut = line[:TITLE_WIDTH]
    return (cut.rpartition(" ")[0] if " " in cut[TITLE_WIDTH // 2 :] else cut) + "…"


async def load_settings(user: ChatUser, chat: Chat | None) -> ChatSettings:
    base = await user.store.chat_base(user.owner, chat.project if chat is not None else "")
    return merge_settings(base.defaults, chat.settings if chat is not None else {})


@contextlib.contextmanager
def _admit(user: ChatUser) -> Iterator[RunningRequest]:
    _check_admission(user.services)
    # The request stays open until its turn ends or the `with` block raises.
    running = user.services.shared.requests.admit(user.owner)
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


async def _store_and_start(
    user: ChatUser,
    view: ChatView,
    choice: ModelChoice,
    new_answer: StoredMessage,
    trace: AnswerTrace,
    store: StoreCall,
    running: RunningRequest,
    prepared: PreparedRequest | None = None,
    parts: tuple[DocumentPart, ...] = (),
) -> Submitted:
    _check_admission(user.services)  # again, because the state may have changed in the meantime
    with user.services.turns.expecting(new_answer.generation_id or "", user.owner, new_answer.chat_id) as expected:
        accepted = _require_accepted(await _store_once_unlocked(user, store))
        expected.is_stored = True
        if accepted.repeated:
            running.close()
        else:
            question = accepted.user_message
            view = view.with_accepted(accepted) or await read_branch(user, question.chat_id, question.id)
            view = view.with_settings(trace.own)
            turn = await _build_turn(user, view, choice, accepted.assistant_message, trace)
            if parts:
                _ask_about_parts(turn, parts)
            user.services.turns.start(turn, running, prepared)
    return accepted, view


async def _build_turn(
    user: ChatUser, view: ChatView, choice: ModelChoice, answer: StoredMessage, trace: AnswerTrace
) -> Turn:
    await user.services.toolbox.ready(view.settings.tool_names)
    request, offer = await build_request(user, view, choice, answer)
    is_reasoning = bool(answer.reasoning) and not answer.content
    hurry = trace.runs[-1].hurry if trace.runs else trace.hurry and is_reasoning
    settings = view.settings
    return Turn(answer, request, trace, offer, settings.keep_thinking, hurry=hurry, omitted_messages=view.left_out)


def _ask_about_parts(turn: Turn, parts: tuple[DocumentPart, ...]) -> None:
    turn.parts = parts
    turn.request = replace(turn.request, options=replace(turn.request.options, token_ids=False))


async def resume_orphan(services: ChatServices, orphan: Orphan) -> None:
    """Continue an answer that was left unfinished by another process or before a restart.

    An answer that cannot be continued is marked as interrupted.
    """
    turns = services.turns
    if not turns.is_unknown(orphan.generation_id):  # this process is generating the answer, or failed to save it
        if (turn := turns.find(orphan.generation_id)) is not None and turn.log.finished:
            with contextlib.suppress(StorageError):  # if this fails, the next heartbeat reports the answer again
                await _save_ended_turn(ChatUser(services, orphan.owner), turn)
        return
    request_id.set(orphan.generation_id)  # for log records; the id of the original request is not stored
    pauses = chain(RESUME_RETRY_SECONDS, repeat(RESUME_RETRY_SECONDS[-1]))
    with turns.expecting(orphan.generation_id, orphan.owner, orphan.chat_id, is_stored=True):
        while not services.shared.stopping:
            try:
                return await _try_resume(services, orphan)
            except Exception as error:
                if not isinstance(error, StorageError) and not is_thread_shortage(error):
                    raise
                logger.warning("an answer could not be continued: %s", error)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(next(pauses)):
                    await turns.closing.wait()


async def _try_resume(services: ChatServices, orphan: Orphan) -> None:
    user = ChatUser(services, orphan.owner)
    message = await user.store.message(user.owner, orphan.chat_id, orphan.message_id)
    if message is None or not message.active or message.generation_id != orphan.generation_id:
        return
    turn = None
    try:
        turn = await _build_resumed_turn(user, message)
    except (Problem, ModelError) as error:
        logger.warning("an answer cannot be continued: %s", error)
    except Exception as error:  # a bug must not leave the answer unfinished forever
        if isinstance(error, StorageError) or is_thread_shortage(error):
            raise
        logger.exception("an answer cannot be continued")
    if services.shared.stopping:
        return
    if turn is None:
        await user.store.save_message(replace(message, state="interrupted"), user.owner)
        return
    # Store the increased number of tries first, so that an answer that crashes the process is not retried forever.
    await user.store.save_message(replace(message, state="running", renderer=0), user.owner, turn.trace)
    services.turns.start(turn, services.shared.requests.open(user.owner))


async def _build_resumed_turn(user: ChatUser, message: StoredMessage) -> Turn | None:
    trace = await user.store.trace(user.owner, message.id)
    if trace is None:
        return None
    view = (await read_branch_above(user, message)).with_settings(trace.own)
    choice = await resolve_model_choice(*engine_and_registry(user.services), trace.model)
    counted = replace(trace, resumes=trace.resumes + 1, tries=trace.tries + 1)
    turn = await _build_turn(user, view, choice, message, counted)
    if trace.every and not trace.runs:  # a question about every part of a document starts over, with the same seeds
        _ask_about_parts(turn, await _build_parts(user, view, turn.request))
        turn.message = replace(message, content="", reasoning="")
    turn.log, turn.is_taken_over = TurnLog(counted.resumes * NUMBERS_OF_A_LOG), True
    return turn


async def load_branch_documents(
    user: ChatUser, view: ChatView, choice: ModelChoice, draft: StoredMessage | None = None
) -> PromptDocuments:
    """Return what documents add to the prompt of a branch followed by `draft`."""
    store, line = user.store, (*view.line, draft) if draft is not None else view.line
    above: list[Attachment] = []
    if view.above and view.line:
        above = await store.earlier_attachments(user.owner, view.chat.id, view.line[0].id)
    engine = user.services.shared.engine.model(choice.model).engine
    return await prompt_documents(store, user.owner, view.chat.prompt_date, line, above, engine, view.base.project)


async def build_request(
    user: ChatUser, view: ChatView, choice: ModelChoice, answer: StoredMessage
) -> tuple[Request, ToolOffer | None]:
    """Return (request, offered tools) for an answer or summary that follows the branch. The request is replayable."""
    if answer.kind == "summary":
        request, offer = await summary_request(user, view, choice), None
    else:
        settings, offer = view.settings, await build_tool_offer(user, view)
        definitions = offer.definitions if offer is not None else None
        options = RequestOptions(tools=definitions, when_full=settings.when_full)
        request = await _branch_request(user, view, choice, settings.sampling, options)
    return make_replayable(request, answer.generation_id), offer


async def build_tool_offer(user: ChatUser, view: ChatView) -> ToolOffer | None:
    chat, tools = view.chat, user.services.toolbox.chosen(view.settings.tool_names)
    if not tools:
        return None
    attachments = tuple(each for message in view.line for each in message.attachments)
    if view.above:
        above = await user.store.earlier_attachments(user.owner, chat.id, view.line[0].id)
        attachments = (*above, *attachments)
    context = ToolContext(user.owner, chat.id, user.store, attachments)
    return ToolOffer(tools, context, allowed_digests(chat), partial(_grant, user.store, user.owner, chat.id))


async def _grant(store: ChatStore, owner: str, chat_id: str, tool: ChatTool) -> None:
    try:
        await store.change_settings(owner, chat_id, partial(with_permission, tool=tool.name, digest=tool.digest))
    except StorageError as error:
        logger.warning("a tool permission was not stored: %s", error)


async def _branch_request(
    user: ChatUser,
    view: ChatView,
    choice: ModelChoice,
    params: SamplingParams,
    options: RequestOptions,
    *following: Message,
) -> Request:
    # `following`: messages after the branch. `options`: options that depend on the request's purpose.
    documents = await load_branch_documents(user, view, choice)
    messages = (*await asyncio.to_thread(prompt_messages, view.line, view.settings, documents), *following)
    options = replace(
        options,
        owner=user.owner,
        thinking=view.chat.thinking,
        date=view.chat.prompt_date,
        conversation=view.first_id,
        adapter=choice.adapter,
    )
    return Request(messages, params, documents.options(messages, options), choice.model)


async def _build_parts(user: ChatUser, view: ChatView, request: Request) -> tuple[DocumentPart, ...]:
    question = view.line[-1]
    store = user.store
    documents = await store.documents.some(
        user.owner, [each.document for each in question.attachments if each.document]
    )
    today = f"Today is {view.chat.prompt_date.isoformat()}."
    instructions = view.base.project.instructions if view.base.project is not None else ""
    context = [each for each in (today, instructions, view.settings.system_prompt.strip(), question.content) if each]
    engine = user.services.shared.engine.model(request.model).engine
    parts = await build_part_requests(store, user.owner, documents, context, request, engine)
    if not 0 < len(parts) <= MAX_PARTS:
        raise Problem(400, words["error_parts"].format(limit=MAX_PARTS))
    return tuple(parts)


async def follow_up_request(
    user: ChatUser,
    view: ChatView,
    choice: ModelChoice,
    text: str,
    params: SamplingParams,
    *,
    priority: Priority = "background",
    when_full: WhenFull = "stop",
) -> Request:
    """Return a request that appends a message to the branch, for example to ask for a title."""
    # Thinking and tools are as in the chat, so that the chat's cached prompt can be reused.
    tools = user.services.toolbox.definitions(view.settings.tool_names)
    options = RequestOptions(tools=tools, tool_choice="none", priority=priority, when_full=when_full)
    return await _branch_request(user, view, choice, params, options, Message("user", text))


async def summary_request(
    user: ChatUser, view: ChatView, choice: ModelChoice, *, priority: Priority = "interactive"
) -> Request:
    params = SamplingParams(temperature=0.0, max_tokens=MAX_SUMMARY_TOKENS, thinking_budget=0)
    return await follow_up_request(
        user, view, choice, SUMMARY_REQUEST, params, priority=priority, when_full="drop_oldest"
    )


async def _prepare_if_possible(
    services: ChatServices, running: RunningRequest, request: Request, view: ChatView
) -> PreparedRequest | None:
    # Like `_prepare`, but raises Problem if the prompt does not fit in the context. Returns None for other errors,
    # because the engine reports them again when the request is submitted.
    try:
        return await _prepare(services, running, request, view)
    except ContextLengthError as error:
        used = f"{'≥ ' if error.at_least else ''}{number(error.needed_tokens)}"
        sentence = words["limit_over"].format(used=used, total=number(error.context_tokens))
        raise Problem(400, sentence, full=True) from error
    except ModelError:
        return None


async def _prepare(
    services: ChatServices, running: RunningRequest, request: Request, view: ChatView
) -> PreparedRequest | None:
    # Renders the prompt and reserves quota. Returns None if the model is not loaded. Raises ModelError or QuotaError.
    engine, size = services.shared.engine.model(request.model).engine, text_size(view.line)
    if engine is None:
        return None
    prepared = await services.shared.large_work.run(lambda: prepare(engine, request), size, request.options.owner)
    await running.reserve(prepared.engine, submissions_for(request, prepared))
    return prepared


async def _store_once_unlocked(user: ChatUser, store: StoreCall) -> TurnAccepted | TurnRefused:
    outcome = await store()
    if isinstance(outcome, TurnRefused) and outcome.running is not None and outcome.is_generated_here:
        # A turn of this process locks the chat. It may have ended without unlocking the chat, if its last save failed.
        await _finish_lost_turn(user, outcome.running)
        outcome = await store()
    return outcome


async def finish_if_lost(user: ChatUser, message: StoredMessage) -> bool:
    """Finish an answer that has ended, but is stored as unfinished because its last save failed.

    Return whether this call finished the answer. Raises StorageError.
    """
    if not message.active or user.services.shared.stopping:  # at shutdown, another process will continue the answer
        return False
    generation_id = message.generation_id or ""
    turn = user.services.turns.find(generation_id)
    # With a shared database, another server may be generating an answer that is unknown here. If that server stops,
    # its lease expires, and another server takes over or interrupts the answer.
    is_lost = user.services.turns.is_unknown(generation_id) and not user.store.is_shared
    if is_lost or (turn is not None and turn.is_unsaved):
        await _finish_lost_turn(user, message)
        return True
    return False


async def _finish_lost_turn(user: ChatUser, assistant_message: StoredMessage) -> None:
    generation_id = assistant_message.generation_id or ""
    # A turn whose last save failed is still stored as running and would lock its chat forever.
    turn = user.services.turns.find(generation_id)
    if turn is not None and turn.log.finished:
        await _save_ended_turn(user, turn)
    elif user.services.turns.is_unknown(generation_id):
        await user.store.save_message(replace(assistant_message, state="interrupted"), user.owner)


async def _save_ended_turn(user: ChatUser, turn: Turn) -> None:
    await user.store.save_message(turn.message, user.owner, turn.trace)
    turn.is_unsaved = False


def _require_accepted(outcome: TurnAccepted | TurnRefused) -> TurnAccepted:
    if isinstance(outcome, TurnAccepted):
        return outcome
    if outcome.moved:
        raise Problem(409, words["error_moved"], moved=True)
    if outcome.running is None:
        raise Problem(404, words["error_unknown_chat"])
    raise Problem(409, words["error_running"])


def _idempotency_key(fields: dict[str, str]) -> str:
    key = fields.get("key", "")
    if not is_id(key):
        raise Problem(400, words["error_form"])
    return key


def _create_message(chat: Chat, role: Role, text: str) -> StoredMessage:
    return StoredMessage(new_id(), chat.id, role, text, "", "done", current_ms())


def new_summary(chat: Chat) -> StoredMessage:
    return replace(_new_message(chat), kind="summary")


def _new_message(chat: Chat) -> StoredMessage:
    return replace(_create_message(chat, "assistant", ""), state="queued", generation_id=new_generation_id())


def _model_name(services: ChatServices, choice: ModelChoice) -> str:
    host = services.shared.engine
    served = host.model(choice.model)
    name = served.name if served is not host.default else ""
    if not name and (info := host.info if served is host.default else served.info) is not None:
        name = model_id(info)
    return (f"{name}:{choice.adapter}" if choice.adapter else name)[:MAX_MODEL_NAME_CHARACTERS]


def _check_text(text: str, limit: int, *, may_be_empty: bool) -> None:
    if not text.strip() and not may_be_empty:
        raise Problem(400, words["error_empty"])
    if len(text) > limit:
        raise Problem(400, words["error_too_long"].format(length=number(len(text)), limit=number(limit)))
