"""Select, describe and load the model that a command runs.

--model can be a path, the name of an installed or downloadable model, or a Hugging Face folder, which is converted.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import typer

from notso.cli import exit_codes, terminal

if TYPE_CHECKING:
    from notso.qtensor import Backend
    from notso.smollm3.engine.engine import Engine
    from notso.smollm3.engine.memory_plan import EnginePlan
    from notso.smollm3.hub.download import DownloadedFile
    from notso.smollm3.hub.registry import KnownFile
    from notso.smollm3.values.engine_config import EngineConfig, EngineSettings
    from notso.smollm3.values.model_info import ModelInfo


def installed_model(model: Path | None = None) -> Path | None:
    """Return the GGUF file or Hugging Face folder to run, or None for the demo model, without using the network.

    Raises ModelFileError or InvalidRequestError.
    """
    from notso.smollm3.errors import ModelFileError
    from notso.smollm3.hub.registry import resolve_model
    from notso.smollm3.hub.repository import find_cached, is_downloadable
    from notso.smollm3.values.engine_config import expand_home

    name = str(model or os.environ.get("NOTSO_MODEL") or "")
    if name and os.path.isdir(folder := Path(expand_home(name))):  # noqa: PTH112 - raises no error
        return folder
    try:
        return resolve_model(model)
    except ModelFileError:
        cached = find_cached(name) if is_downloadable(name) else None
        if cached is None:
            raise
        return cached


def model_file(model: Path | None, *, silent: bool = False, fetch: bool = False) -> Path | None:
    """Return the GGUF file to run, or None for the demo model.

    A model that is not installed is downloaded from the Hugging Face Hub if `fetch` is set or the user agrees. Raises
    the same errors as `installed_model`, `find_hub_file`, `pull` and `cached_conversion`.
    """
    from notso.smollm3.errors import ModelFileError
    from notso.smollm3.hub.repository import is_downloadable

    try:
        found = installed_model(model)
    except ModelFileError as error:
        name = str(model or os.environ.get("NOTSO_MODEL") or "")
        if error.__cause__ is not None or not is_downloadable(name):  # the error has a cause if the path cannot be read
            raise
        return _download_missing(name, silent=silent, fetch=fetch, missing=error)
    if found is None or not found.is_dir():
        return found
    from notso.smollm3.conversion.converter import MIX, cached_conversion

    @contextmanager
    def announce(folder: Path, target: Path) -> Iterator[Callable[[int, int], None]]:
        if not silent:
            terminal.note(
                f"Converting {folder} to {MIX} (takes minutes for the 3B model; the result is cached): {target}"
            )
        with terminal.progress(in_bytes=True, as_json=silent) as report:
            yield lambda done, total: report("writing", done, total)

    return cached_conversion(found, announce)


def download(file: KnownFile, *, offline: bool = False, force: bool = False, silent: bool = False) -> DownloadedFile:
    """Download a file and show the progress. Raises DownloadError."""
    from notso.smollm3.hub import download, registry

    if not silent and registry.find_local(file) is None and not offline:
        plan = download.plan_download(file)
        free = terminal.gigabytes(plan.free_bytes)
        terminal.note(f"{file.filename}, {terminal.gigabytes(file.size_bytes)}, to {plan.folder} ({free} free)")
    try:
        with terminal.progress(in_bytes=True, as_json=silent) as report:
            return download.pull(file, offline=offline, force=force, progress=report)
    except KeyboardInterrupt:
        terminal.note("Stopped. Run the same command again to continue.")
        raise


def _download_missing(name: str, *, silent: bool, fetch: bool, missing: Exception) -> Path:
    from notso.smollm3.errors import ModelFileError
    from notso.smollm3.hub.download import is_offline
    from notso.smollm3.hub.registry import official_file
    from notso.smollm3.hub.repository import find_hub_file

    can_ask = not silent and terminal.is_terminal(sys.stdin) and terminal.is_terminal(sys.stderr)
    if is_offline():
        message = f"{name} is not installed, and model downloads are disabled (HF_HUB_OFFLINE)"
        raise ModelFileError(message) from missing
    if not (fetch or can_ask):
        raise ModelFileError(f"{name} is not installed; use `--fetch` to download it") from missing
    # Ask first: the look-up sends the name to the Hub, and the name may be a mistyped path.
    question = f"{name} is not installed. Look for it on the Hugging Face Hub?"
    if not (fetch or official_file(name) or typer.confirm(question, default=True, err=True)):
        raise missing
    file = find_hub_file(name)
    if not fetch:
        question = f"{file.name} ({terminal.gigabytes(file.size_bytes)}) is not installed. Download it now?"
        if not typer.confirm(question, default=True, err=True):
            raise ModelFileError(f"{name} is not installed") from missing
    return download(file, silent=silent).path


def open_engine(
    model: Path | None, *, silent: bool = False, fetch: bool = False, **settings: Unpack[EngineSettings]
) -> Engine:
    path = model_file(model, silent=silent, fetch=fetch)
    with terminal.waiting("loading the model", silent=silent):
        from notso.smollm3.engine.engine import Engine

        exit_on_lost_model_file()
        engine = Engine.load(path, **settings)
    context_tokens = settings.get("context_tokens")
    if context_tokens is not None and engine.info.context_tokens < context_tokens and not silent:
        terminal.note(f"The context length is {engine.info.context_tokens:,} tokens, the maximum of this model.")
    if engine.info.device_note and not silent:
        terminal.note(f"Running on the CPU: {engine.info.device_note}")
    return engine


def active_adapter(adapters: Sequence[str]) -> str | None:
    """Return the name of the active adapter, the last one. Raises InvalidRequestError."""
    from notso.smollm3.values.engine_config import AdapterSource

    return AdapterSource.parse(adapters[-1]).name if adapters else None


def exit_on_lost_model_file() -> None:
    """Make the process exit with a message if reading the mapped model file fails (SIGBUS)."""
    from notso.qtensor import kernel_choice

    # Reading beyond the end of a truncated mapped file raises SIGBUS, which would kill the process silently.
    line = "notso: the model file changed or became unreadable while in use. Saved chats are safe; start notso again"
    kernel_choice.end_on_bus_errors(exit_codes.BAD_MODEL, line)


def plan_model(path: Path, engine_config: EngineConfig) -> tuple[EnginePlan, str, str]:
    """Plan memory and choose the device from a file's headers, with the same checks as loading.

    Returns the plan, the device, and why the GPU cannot be used (or ''). Raises NotsoError.
    """
    from notso.qtensor import GGUFFile
    from notso.smollm3.config import SmolLM3Config
    from notso.smollm3.engine.device_choice import require_equal_results, run_on_selected_device, weights_bytes
    from notso.smollm3.engine.memory_plan import plan_file
    from notso.smollm3.model.weights import SmolLM3Weights

    with GGUFFile.open(path) as file:
        config = SmolLM3Config.from_metadata(file.metadata)
        SmolLM3Weights.from_tensors(file.tensors, config)

        def plan(backend: Backend, note: str) -> tuple[EnginePlan, str, str]:
            need = weights_bytes(file, backend)
            limit = backend.memory(mapped_bytes=need)
            planned = plan_file(file, config, engine_config, need, limit)
            require_equal_results(file, backend, engine_config.threads)
            return planned, backend.name, note

        return run_on_selected_device(engine_config, plan)


def check_model(path: Path | None) -> None:
    """Check the headers of a file (None: the demo model), or the configuration of a Hugging Face folder.

    Raises GGUFError, ModelFileError or OSError.
    """
    from notso.qtensor import GGUFFile
    from notso.smollm3.config import SmolLM3Config
    from notso.smollm3.conversion.hf_config import CONFIG, config_entries, read_object
    from notso.smollm3.hub.registry import demo_path
    from notso.smollm3.model.weights import SmolLM3Weights

    if path is not None and path.is_dir():
        config_entries(read_object(path, CONFIG))
        return
    with GGUFFile.open(path or demo_path()) as file:
        SmolLM3Weights.from_tensors(file.tensors, SmolLM3Config.from_metadata(file.metadata))


def context_with_yarn(path: Path | None, context_tokens: int) -> int:
    """Return the smallest context of at least `context_tokens` tokens to which YaRN applies.

    Raises GGUFError or ModelFileError.
    """
    from notso.qtensor import GGUFFile
    from notso.smollm3.config import SmolLM3Config
    from notso.smollm3.hub.registry import demo_path

    with GGUFFile.open(path or demo_path()) as file:
        config = SmolLM3Config.from_metadata(file.metadata)
    return context_tokens if config.uses_yarn(context_tokens) else config.max_position_embeddings + 1


def describe_model(info: ModelInfo) -> str:
    threads = f"{info.threads} thread{'s' if info.threads != 1 else ''}"
    return (
        f"{info.name}, {terminal.gigabytes(info.size_bytes)}, context {info.context_tokens:,} tokens, "
        f"KV cache {info.kv_format}, {info.kernels} kernels on {threads if info.device == 'cpu' else info.device}"
    )


def demo_notice(info: ModelInfo) -> str | None:
    if not info.is_demo:
        return None
    return "Using the tiny built-in demo model; `notso pull` downloads SmolLM3-3B (1.92 GB)."
