"""Which model and adapter answer a chat: by the name that its settings have, None for the default model."""

from __future__ import annotations

import asyncio

from notso.web.engine.host import EngineHost
from notso.web.engine.model_names import (
    DEFAULT_MODEL,
    ModelChoice,
    adapter_id,
    adapters_of,
    choose,
    model_id,
    other_models,
    served_file,
)
from notso.web.engine.models import ModelRegistry
from notso.web.engine.port import ChatEngine
from notso.web.values.problems import Problem
from notso.web.values.wording import words


async def chosen_model(host: EngineHost, registry: ModelRegistry | None, name: str | None) -> ModelChoice:
    """What a name means. Raises Problem: it is not here any more, or cannot be loaded."""
    choice = DEFAULT_MODEL
    if name is not None:
        await host.settled()
        found = await choose(host, registry, name)
        if found is None:
            raise Problem(400, words["error_model_gone"].format(name=name))
        choice = found
    if host.model(choice.model) is host.default and host.state in ("failed", "stopped"):
        raise Problem(503, words["error_not_loaded"].format(reason=host.failure))
    return choice


async def loaded_engine(
    host: EngineHost, registry: ModelRegistry | None, name: str | None
) -> tuple[ChatEngine | None, ModelChoice]:
    """The engine of that name, where it is loaded now, for what is not worth loading it; and what was chosen."""
    try:
        choice = await chosen_model(host, registry, name)
    except Problem:
        return None, DEFAULT_MODEL
    return host.model(choice.model).engine, choice


async def choosable_names(host: EngineHost, registry: ModelRegistry | None) -> list[str]:
    """The default model and its adapters, what else is installed, and the adapters of each."""
    names: list[str] = []
    if host.info is not None:
        names = [model_id(host.info), *(adapter_id(host.info, each) for each in adapters_of(host.default))]
    for installed in await asyncio.to_thread(other_models, host, registry) if registry is not None else ():
        served = served_file(host, registry, installed) if registry is not None else host.default
        names += [served.name, *(f"{served.name}:{each.lower()}" for each in adapters_of(served))]
    return names
