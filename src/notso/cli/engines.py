"""Select, describe and load the model that a command runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from notso.cli import exit_codes, terminal
from notso.cli.model_files import model_file

if TYPE_CHECKING:
    from notso.qtensor import Backend
    from notso.smollm3.engine.engine import Engine
    from notso.smollm3.engine.memory_plan import EnginePlan
    from notso.smollm3.values.engine_config import EngineConfig, KVChoice
    from notso.smollm3.values.model_info import ModelInfo


def open_engine(
    model: Path | None,
    context_tokens: int | None,
    threads: int | None,
    *,
    kv: KVChoice = "auto",
    device: str = "auto",
    silent: bool = False,
    adapters: Sequence[str] = (),
    chat_template_file: Path | None = None,
    fetch: bool = False,
) -> Engine:
    """Load the selected model (see `model_file`)."""
    path = model_file(model, silent=silent, fetch=fetch)
    with terminal.waiting("loading the model", silent=silent):
        from notso.smollm3.engine.engine import Engine

        prepare_for_a_lost_file()
        engine = Engine.load(
            path,
            context_tokens=context_tokens,
            threads=threads,
            kv=kv,
            device=device,
            adapters=tuple(adapters),
            chat_template_file=chat_template_file,
        )
    if context_tokens is not None and engine.info.context_tokens < context_tokens and not silent:
        terminal.note(f"The context is {engine.info.context_tokens:,} tokens, the maximum of this model.")
    if engine.info.device_note and not silent:
        terminal.note(fallback_notice(engine.info.device_note))
    return engine


def adapter_to_use(adapters: Sequence[str]) -> str | None:
    """Return the last adapter's name. Raises InvalidRequestError."""
    from notso.smollm3.values.engine_config import AdapterSource

    return AdapterSource.parse(adapters[-1]).name if adapters else None


def fallback_notice(note: str) -> str:
    return f"Running on the CPU: {note}"


def prepare_for_a_lost_file() -> None:
    """Exit with a message on SIGBUS from the mapped model file."""
    from notso.qtensor import kernel_choice

    # Truncating a mapped file turns reads into SIGBUS, which would kill the process silently.
    line = "notso: the model file changed or became unreadable while in use. Saved chats are safe; start notso again"
    kernel_choice.end_on_bus_errors(exit_codes.BAD_MODEL, line)


def plan_model(path: Path, asked: EngineConfig) -> tuple[EnginePlan, str, str]:
    """Plan memory and device from a file's headers, checking as loading does.

    Returns the plan, the device, and why the GPU is not used ('' if it is). Raises GGUFError, ModelFileError,
    OutOfMemoryError, InvalidRequestError or DeviceError.
    """
    from notso.qtensor import GGUFFile
    from notso.smollm3.config import SmolLM3Config
    from notso.smollm3.engine.device_choice import on_device, require_same_bits, weights_bytes
    from notso.smollm3.engine.memory_plan import plan_file
    from notso.smollm3.model.weights import SmolLM3Weights

    with GGUFFile.open(path) as file:
        config = SmolLM3Config.from_metadata(file.metadata)
        SmolLM3Weights.from_tensors(file.tensors, config)

        def plan(backend: Backend, note: str) -> tuple[EnginePlan, str, str]:
            need = weights_bytes(file, backend)
            limit = backend.memory(mapped_bytes=need)
            planned = plan_file(file, config, asked, need, limit)
            require_same_bits(file, backend, asked.threads)
            return planned, backend.name, note

        return on_device(asked, plan)


def check_model(path: Path | None) -> None:
    """Check a file's headers; None: the demo. Raises GGUFError, ModelFileError or OSError."""
    from notso.qtensor import GGUFFile
    from notso.smollm3.config import SmolLM3Config
    from notso.smollm3.hub.registry import demo_path
    from notso.smollm3.model.weights import SmolLM3Weights

    with GGUFFile.open(path or demo_path()) as file:
        SmolLM3Weights.from_tensors(file.tensors, SmolLM3Config.from_metadata(file.metadata))


def title(info: ModelInfo) -> str:
    threads = f"{info.threads} thread{'s' if info.threads != 1 else ''}"
    return (
        f"{info.name}, {terminal.gigabytes(info.size_bytes)}, context {info.context_tokens:,} tokens, "
        f"KV cache {info.kv_format}, {info.kernels} kernels on {threads if info.device == 'cpu' else info.device}"
    )


def demo_notice(info: ModelInfo) -> str | None:
    if not info.is_demo:
        return None
    return "Using the tiny built-in demo model; `notso pull` downloads SmolLM3-3B (1.92 GB)."
