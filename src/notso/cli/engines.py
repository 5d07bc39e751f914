"""Choosing, naming and loading the model a verb runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from notso.cli import exit_codes, terminal

if TYPE_CHECKING:
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
    silent: bool = False,
) -> Engine:
    """Load the model a person meant (see hub.resolve_model), with a sign of life while it takes long."""
    with terminal.waiting("loading the model", silent=silent):
        from notso.smollm3.engine.engine import Engine
        from notso.smollm3.hub.registry import resolve_model

        prepare_for_a_lost_file()
        return Engine.load(resolve_model(model), context_tokens=context_tokens, threads=threads, kv=kv)


def prepare_for_a_lost_file() -> None:
    """Have the process say why it ends, where a model file is cut short or becomes unreadable under it."""
    from notso.qtensor import kernel_choice

    line = "notso: the model file changed or became unreadable while it was in use; what was saved is safe: start again"
    kernel_choice.end_on_bus_errors(exit_codes.BAD_MODEL, line)


def plan_model(path: Path, asked: EngineConfig) -> EnginePlan:
    """What a model will occupy, from its headers alone: the same checks and the same plan as loading makes.

    Raises GGUFError, ModelFileError, OutOfMemoryError or InvalidRequestError.
    """
    from notso.qtensor import GGUFFile
    from notso.smollm3.config import SmolLM3Config
    from notso.smollm3.engine.memory_plan import plan_engine
    from notso.smollm3.model.weights import SmolLM3Weights

    with GGUFFile.open(path) as file:
        config = SmolLM3Config.from_metadata(file.metadata)
        SmolLM3Weights.from_tensors(file.tensors, config)
        weights_bytes = sum(tensor.nbytes for tensor in file.tensors.values())
        return plan_engine(
            config,
            weights_bytes,
            context_tokens=asked.context_tokens,
            kv=asked.kv,
            max_num_seqs=asked.max_num_seqs,
            mapped_bytes=weights_bytes,
        )


def title(info: ModelInfo) -> str:
    """A model in one phrase: name, size, context, kernels, threads."""
    return (
        f"{info.name}, {terminal.gigabytes(info.size_bytes)}, context {info.context_tokens:,} tokens in "
        f"{info.kv_format}, "
        f"{info.kernels} kernels on {info.threads} thread{'s' if info.threads != 1 else ''}"
    )


def demo_notice(info: ModelInfo) -> str | None:
    """What a person must know when the demo answers in place of the real model."""
    if not info.is_demo:
        return None
    return "The small demo model answers; `notso pull` fetches SmolLM3-3B (1.92 GB)."
