"""Whether a question fits into the context at all: its prompt is written before it is stored, and then submitted."""

from __future__ import annotations

from notso.web.chat.services import ChatServices
from notso.web.engine.port import ContextLengthError, ModelError, Request
from notso.web.engine.running import Prepared, prepare
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
