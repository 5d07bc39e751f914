"""Model names: the default, those that `notso list` shows, adapters, and which model answers a chat."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from notso.smollm3 import EngineStats, ModelInfo, ProcessMemory, official_files, process_memory
from notso.web.engine.host import EngineHost
from notso.web.engine.models import Installed, ModelRegistry, take_inventory
from notso.web.engine.port import ChatEngine
from notso.web.engine.served_model import ServedModel
from notso.web.values.problems import Problem
from notso.web.values.wording import ordinal, words

FAMILY = "smollm3"
"""Whatever the default file is called, this names it, where nothing else is called that: it claims no size."""
LATEST = ":latest"
"""A tag, to Ollama's clients, that means none."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    """What a name stands for: the key of a ServedModel, or None for the default, whichever that is by then; and an
    adapter of it."""

    model: str | None = None
    adapter: str | None = None


DEFAULT_MODEL = ModelChoice()


def model_id(info: ModelInfo) -> str:
    """The model's name as the API has it: in lower case, without blanks."""
    return "-".join(info.name.lower().split())


def adapter_id(info: ModelInfo, adapter: str) -> str:
    """What the model with an adapter is called in the API."""
    return f"{model_id(info)}:{adapter.lower()}"


def names_of(info: ModelInfo) -> frozenset[str]:
    """Every name a request may call the default model by, in lower case."""
    path = Path(info.path)
    official = {file.name for file in official_files() if file.filename == path.name}
    names = {model_id(info), info.name, path.stem, *official, *(name.partition(":")[0] for name in official)}
    return frozenset(name.lower() for name in names if name)


def listed_names(installed: Installed) -> frozenset[str]:
    """The names of an installed file, in lower case: as `notso list` has it, and its file's."""
    names = (installed.model.name, installed.model.path.stem)
    return frozenset("-".join(name.lower().split()) for name in names)


def answering(host: EngineHost, choice: ModelChoice, info: ModelInfo) -> ModelInfo:
    """The info of what answers, by the name that a program is told."""
    served = host.model(choice.model)
    name = info.name if served is host.default or not served.name else served.name
    return replace(info, name=name if choice.adapter is None else f"{name}:{choice.adapter}")


def adapters_of(served: ServedModel) -> list[str]:
    """The adapters it has, or had when it was unloaded."""
    if served.engine is not None:
        return list(served.engine.adapters.infos)
    return [source.name for source in served.adapters or ()]


async def choose(host: EngineHost, registry: ModelRegistry | None, wanted: str | None) -> ModelChoice | None:
    """What a name means, None where nothing is called that. The default model's names come first, then what is
    installed, then the family's; an adapter is named alone, or behind its model and a colon, and stays with the model
    that it has now. One that is called like a model does not answer for it."""
    if wanted is None:
        return ModelChoice()
    name = wanted.lower()
    info = host.default.info
    own = names_of(info) if info is not None else frozenset()
    if name in own or name.removesuffix(LATEST) in own:
        return ModelChoice()
    name = name.removesuffix(LATEST)
    base, colon, last = name.rpartition(":")
    if not colon or base == FAMILY or base in own:
        adapter = _spelt(last, adapters_of(host.default))
        if adapter is not None and name != FAMILY and not await _is_file(host, registry, name):
            return ModelChoice(host.default.key, adapter)
    found = await _among_files(host, registry, name) if registry is not None else None
    return ModelChoice() if found is None and name == FAMILY else found


async def _is_file(host: EngineHost, registry: ModelRegistry | None, name: str) -> bool:
    if registry is None:
        return False
    inventory = await asyncio.to_thread(take_inventory, host.default.info, registry.folder)
    return _called(name, inventory.installed) is not None


async def _among_files(host: EngineHost, registry: ModelRegistry, name: str) -> ModelChoice | None:
    base, colon, last = name.rpartition(":")
    inventory = await asyncio.to_thread(take_inventory, host.default.info, registry.folder)
    found = _called(name, inventory.installed)
    if found is not None:
        return ModelChoice(served_file(host, registry, found).key)
    found = _called(base, inventory.installed) if colon else None
    served = served_file(host, registry, found) if found is not None else None
    adapter = _spelt(last, adapters_of(served)) if served is not None else None
    if served is not None and adapter is not None:
        return ModelChoice(served.key, adapter)
    for each in host.models():  # by the name that its file gives itself, as when it was the default
        names = names_of(each.info) if each.info is not None else frozenset()
        if name in names:
            return ModelChoice(each.key)
        adapter = _spelt(last, adapters_of(each)) if base in names else None
        if adapter is not None:
            return ModelChoice(each.key, adapter)
    return None


def served_file(host: EngineHost, registry: ModelRegistry, installed: Installed) -> ServedModel:
    """The model of an installed file, which is loaded when a request takes it."""
    path, beside = installed.path, registry.load_beside
    name = "-".join(installed.model.name.lower().split())
    return host.add(
        installed.model.path.resolve(),
        name,
        lambda: registry.load(path),
        None if beside is None else lambda occupied: beside(path, occupied),
    )


def other_models(host: EngineHost, registry: ModelRegistry) -> list[Installed]:
    """What is installed beside the default model, each file once; files of other architectures are left out. Looks on
    the disk: not on the loop."""
    inventory = take_inventory(None, registry.folder)
    default = host.default.path
    return [each for each in inventory.installed if each.model.is_smollm3 and each.model.path.resolve() != default]


def _called(name: str, installed: Iterable[Installed]) -> Installed | None:
    """The first of that whole name, else of that name without its tag."""
    listed = list(installed)
    for each in listed:
        if name in listed_names(each) or name == each.key:
            return each
    return next((each for each in listed if name in {n.partition(":")[0] for n in listed_names(each)}), None)


def _spelt(name: str, adapters: Iterable[str]) -> str | None:
    return next((adapter for adapter in adapters if adapter.lower() == name), None)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`info` says what does not change, `stats` and `memory` what does."""

    info: ModelInfo
    stats: EngineStats
    memory: ProcessMemory

    @property
    def layers_without_rope(self) -> str:
        """Counted from 1, in as few words as they allow: `every 4th (9 of 36)`."""
        layers = sorted(layer + 1 for layer in self.info.layers_without_rope)
        steps = {after - before for before, after in itertools.pairwise(layers)}
        named = ", ".join(map(str, layers))
        if len(steps) == 1 and steps == {layers[0]}:
            named = words["model_every"].format(nth=ordinal(layers[0]))
        share = words["model_share"].format(count=len(layers), total=self.info.num_hidden_layers)
        return f"{named} ({share})" if layers else ""

    @property
    def cache_percent(self) -> int:
        """How much of the cache running answers and remembered prompts hold."""
        stats = self.stats
        return 100 * (stats.kv_blocks_used + stats.kv_blocks_cached) // stats.kv_blocks if stats.kv_blocks else 0


def model_facts(engine: EngineHost) -> ModelFacts | None:
    """None while no model is loaded."""
    info, stats = engine.info, engine.stats()
    if info is None or stats is None:
        return None
    return ModelFacts(info, stats, process_memory())


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
