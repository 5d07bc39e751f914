"""Whether a question fits into the context at all, asked before it is stored: one that does not only goes back."""

from __future__ import annotations

from collections.abc import Sequence

from notso.web.chat.chat_view import ChatView
from notso.web.chat.services import ChatServices
from notso.web.engine.port import ChatEngine, ModelError, RequestOptions, Tool
from notso.web.store.protocol import Chat, StoredMessage
from notso.web.turns.chat_settings import ChatSettings
from notso.web.turns.prompt import prompt_messages, text_size
from notso.web.values.problems import Problem
from notso.web.values.wording import words


async def check_fits(services: ChatServices, view: ChatView, question: StoredMessage, instead_of: str | None) -> None:
    """Raises Problem with both numbers. While no model is loaded nothing can be said, and the engine will say it."""
    engine = services.shared.engine.engine
    if engine is None:
        return
    chat, settings = view.chat, view.settings
    try:
        tools = services.toolbox.definitions(settings.tool_names)
        line = [*view.line(instead_of), question]
        used = await services.shared.large_work.run(
            lambda: _count(engine, line, settings, chat, tools), text_size(line)
        )
    except ModelError:
        return  # the engine is just going away
    kept, total = settings.max_tokens or 1, engine.info.context_tokens
    if used + kept > total:
        sentence = words["limit_over"] if settings.max_tokens is None else words["error_over_answer"]
        sentence = sentence.format(used=f"{used + kept:,}", kept=f"{kept:,}", total=f"{total:,}")
        raise Problem(400, sentence)


def _count(
    engine: ChatEngine, line: Sequence[StoredMessage], settings: ChatSettings, chat: Chat, tools: Sequence[Tool] | None
) -> int:
    messages = prompt_messages(line, settings.system_prompt, keep_thinking=settings.keep_thinking)
    if settings.when_full == "drop_oldest":  # what is older may go
        messages = (*(message for message in messages[:1] if message.role == "system"), messages[-1])
    return engine.count_tokens(messages, RequestOptions(thinking=chat.thinking, tools=tools, date=chat.prompt_date))
