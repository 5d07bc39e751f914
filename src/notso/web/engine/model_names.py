"""Resolve the names of models and adapters in requests and chats, and list the available names."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from notso.smollm3 import EngineStats, ModelInfo, ProcessMemory, official_files, process_memory
from notso.web.engine.host import EngineHost, ServedModel
from notso.web.engine.models import InstalledModel, ModelRegistry, scan_models
from notso.web.engine.port import ChatEngine
from notso.web.values.errors import Problem
from notso.web.values.wording import ordinal, translated, words

FAMILY = "smollm3"
"""Name that selects the default model, whatever its size, unless an installed file has this name."""
# Other names that select the default model. huggingface_hub's InferenceClient sends `dummy` if it was created with only
# a URL, as its documentation shows for local servers. TGI's documentation uses `tgi` with all clients.
PLACEHOLDERS = frozenset({"dummy", "tgi"})
LATEST = ":latest"
"""Tag that Ollama's clients append to names without a tag."""


@dataclass(frozen=True, slots=True)
class ModelChoice:
    model: str | None = None  # key of a ServedModel, or None for the model that is the default at the time of use
    adapter: str | None = None


DEFAULT_MODEL = ModelChoice()


def model_id(info: ModelInfo) -> str:
    return "-".join(info.name.lower().split())


def adapter_id(info: ModelInfo, adapter: str) -> str:
    return f"{model_id(info)}:{adapter.lower()}"


def accepted_names(info: ModelInfo) -> frozenset[str]:
    path = Path(info.path)
    official = {file.name for file in official_files() if file.filename == path.name}
    names = {model_id(info), info.name, path.stem, *official, *(name.partition(":")[0] for name in official)}
    return frozenset(name.lower() for name in names if name)


def listed_names(installed: InstalledModel) -> frozenset[str]:
    """Return an installed model's normalized names: the listed one, and the stem of its file."""
    names = (installed.model.name, installed.model.path.stem)
    return frozenset("-".join(name.lower().split()) for name in names)


def reported_model_info(host: EngineHost, choice: ModelChoice, info: ModelInfo) -> ModelInfo:
    served = host.model(choice.model)
    name = info.name if served is host.default or not served.name else served.name
    return replace(info, name=name if choice.adapter is None else f"{name}:{choice.adapter}")


def adapter_names(served: ServedModel) -> list[str]:
    """Return the names of a model's adapters, even while the model is unloaded. Thread-safe."""
    if (engine := served.engine) is not None:  # read once, because the event loop may unload the model meanwhile
        return list(engine.adapters.infos)
    return [source.name for source in served.adapters or ()]


async def find_model(host: EngineHost, registry: ModelRegistry | None, requested: str | None) -> ModelChoice | None:
    """Resolve a name of the form `model`, `adapter` or `model:adapter`. Return None if unknown."""
    # Candidates are tried in this order: the default model, its adapters, installed files and their adapters, former
    # default models and their adapters, the family name and the placeholders. However, if an installed file and an
    # adapter of the default model have the same name, the file is selected.
    if not requested:  # some programs send an empty name if none is configured
        return ModelChoice()
    name = requested.lower()
    info = host.default.info
    default_names = accepted_names(info) if info is not None else frozenset()
    if name in default_names or name.removesuffix(LATEST) in default_names:
        return ModelChoice()
    name = name.removesuffix(LATEST)
    base, colon, last = name.rpartition(":")
    if not colon or base == FAMILY or base in default_names:
        adapter = _match_adapter(last, adapter_names(host.default))
        if adapter is not None and name != FAMILY and not await _is_installed(host, registry, name):
            # Return the model's key: None would refer to a different model after the default has changed.
            return ModelChoice(host.default.key, adapter)
    found = await _find_installed(host, registry, name) if registry is not None else None
    return ModelChoice() if found is None and name in {FAMILY, *PLACEHOLDERS} else found


async def _is_installed(host: EngineHost, registry: ModelRegistry | None, name: str) -> bool:
    if registry is None:
        return False
    inventory = await asyncio.to_thread(scan_models, host.default.info, registry.folder)
    return _find_by_name(name, inventory.installed) is not None


async def _find_installed(host: EngineHost, registry: ModelRegistry, name: str) -> ModelChoice | None:
    base, colon, last = name.rpartition(":")
    inventory = await asyncio.to_thread(scan_models, host.default.info, registry.folder)
    found = _find_by_name(name, inventory.installed)
    if found is not None:
        return ModelChoice(register_installed(host, registry, found).key)
    found = _find_by_name(base, inventory.installed) if colon else None
    served = register_installed(host, registry, found) if found is not None else None
    adapter = _match_adapter(last, adapter_names(served)) if served is not None else None
    if served is not None and adapter is not None:
        return ModelChoice(served.key, adapter)
    # A former default model was listed under the name in its file's metadata, which clients may still use.
    for each in host.models():
        names = accepted_names(each.info) if each.info is not None else frozenset()
        if name in names:
            return ModelChoice(each.key)
        adapter = _match_adapter(last, adapter_names(each)) if base in names else None
        if adapter is not None:
            return ModelChoice(each.key, adapter)
    return None


def register_installed(host: EngineHost, registry: ModelRegistry, installed: InstalledModel) -> ServedModel:
    """Register an installed file's model, without loading it."""
    path, load_beside = installed.path, registry.load_beside
    name = "-".join(installed.model.name.lower().split())
    return host.add(
        installed.model.path.resolve(),
        name,
        lambda: registry.load(path),
        None if load_beside is None else lambda occupied: load_beside(path, occupied),
    )


def other_installed_models(host: EngineHost, registry: ModelRegistry) -> list[InstalledModel]:
    """List the installed SmolLM3 files, except the default model's file. Blocks."""
    inventory = scan_models(None, registry.folder)
    default = host.default.path
    return [each for each in inventory.installed if each.model.is_smollm3 and each.model.path.resolve() != default]


def _find_by_name(name: str, installed: Iterable[InstalledModel]) -> InstalledModel | None:
    # A full name takes precedence over a name without its tag (the part after the colon).
    listed = list(installed)
    for each in listed:
        if name in listed_names(each) or name == each.key:
            return each
    return next((each for each in listed if name in {n.partition(":")[0] for n in listed_names(each)}), None)


def _match_adapter(name: str, adapters: Iterable[str]) -> str | None:
    return next((adapter for adapter in adapters if adapter.lower() == name), None)


@dataclass(frozen=True, slots=True)
class ModelFacts:
    info: ModelInfo
    stats: EngineStats
    memory: ProcessMemory

    @property
    def layers_without_rope(self) -> str:
        """List the layers, counted from 1: `every 4th (9 of 36)` or, if unevenly spaced, `2, 3, 7 (3 of 36)`."""
        layers = sorted(layer + 1 for layer in self.info.layers_without_rope)
        steps = {after - before for before, after in itertools.pairwise(layers)}
        numbers = ", ".join(map(str, layers))
        if len(steps) == 1 and steps == {layers[0]}:
            numbers = words["model_every"].format(nth=ordinal(layers[0]))
        share = words["model_share"].format(count=len(layers), total=self.info.num_hidden_layers)
        return f"{numbers} ({share})" if layers else ""

    @property
    def cache_percent(self) -> int:
        """Percentage of the KV cache that running answers and cached prompts occupy."""
        stats = self.stats
        return 100 * (stats.kv_blocks_used + stats.kv_blocks_cached) // stats.kv_blocks if stats.kv_blocks else 0


def model_facts(engine: EngineHost) -> ModelFacts | None:
    """Return properties and statistics of the default model, or None while it is not loaded."""
    info, stats = engine.info, engine.stats()
    if info is None or stats is None:
        return None
    return ModelFacts(info, stats, process_memory())


async def resolve_model_choice(host: EngineHost, registry: ModelRegistry | None, name: str | None) -> ModelChoice:
    """Resolve a chat's model name. Raises Problem if it is unknown or if the selected default model failed to load."""
    if name is not None:
        await host.wait_for_first_load()
    choice = await find_model(host, registry, name)
    if choice is None:
        raise Problem(400, words["error_model_gone"].format(name=name))
    if host.model(choice.model) is host.default and host.state in ("failed", "stopped"):
        raise Problem(503, words["error_not_loaded"].format(reason=translated(host.failure)))
    return choice


async def engine_if_loaded(
    host: EngineHost, registry: ModelRegistry | None, name: str | None
) -> tuple[ChatEngine | None, ModelChoice]:
    """Return the engine (None if the model is unknown or not loaded) and the resolved choice."""
    # For callers that skip their work if it would require loading a model.
    try:
        choice = await resolve_model_choice(host, registry, name)
    except Problem:
        return None, DEFAULT_MODEL
    return host.model(choice.model).engine, choice


async def available_model_names(host: EngineHost, registry: ModelRegistry | None) -> list[str]:
    """Return the names of the default model, other installed models, and their adapters."""
    names: list[str] = []
    if host.info is not None:
        names = [model_id(host.info), *(adapter_id(host.info, each) for each in adapter_names(host.default))]
    if registry is not None:
        for installed in await asyncio.to_thread(other_installed_models, host, registry):
            served = register_installed(host, registry, installed)
            names += [served.name, *(f"{served.name}:{each.lower()}" for each in adapter_names(served))]
    return names
