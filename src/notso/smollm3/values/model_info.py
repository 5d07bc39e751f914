"""What may be known of a loaded model and of the engine that runs it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

LATER_SYSTEM, OVERRIDDEN_TOOLS = "later system messages", "tools under /system_override"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """What the model was planned to occupy, and what there was to plan with. `source` names what bounds it. Bytes."""

    weights_bytes: int
    kv_bytes: int
    scratch_bytes: int
    process_bytes: int
    available_bytes: int
    source: str

    @property
    def needed_bytes(self) -> int:
        """All of it."""
        return self.weights_bytes + self.kv_bytes + self.scratch_bytes + self.process_bytes


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a page or a person may know of the loaded model. Sizes in bytes and tokens."""

    name: str
    path: str
    is_demo: bool
    size_bytes: int
    parameter_count: int
    context_tokens: int
    quantisation: Mapping[str, int] = field(default_factory=dict)  # format name -> number of tensors
    device: str = "cpu"  # or cuda:0 (its name)
    device_note: str = ""  # why it is not the GPU
    kernels: str = "generic"
    threads: int = 1
    kv_format: str = "f16"
    kv_bytes: int = 0  # reserved for keys and values
    max_num_seqs: int = 1  # answers that can be written at the same time
    num_hidden_layers: int = 0
    layers_without_rope: tuple[int, ...] = ()  # NoPE
    chat_template: str = field(default="", repr=False)  # its source; empty: the file has none
    template_drops: tuple[str, ...] = ()  # LATER_SYSTEM, OVERRIDDEN_TOOLS: of a conversation
    most_prompt_bytes: int = 0  # a prompt of longer texts never fits into the context; 0: unknown
    sampling: Mapping[str, float] = field(default_factory=dict)  # the file's defaults, named as in SamplingParams
    license: str = ""  # as the file names it
    end_token: str = ""  # the control token that ends an answer, as it is spelt
    memory: MemoryBudget | None = None


@dataclass(frozen=True, slots=True)
class PromptEstimate:
    """What reading a prompt would cost now: its length, how much of it is cached, and the likely time for the rest."""

    prompt_tokens: int
    cached_tokens: int
    seconds: float | None  # None before anything was measured


@dataclass(frozen=True, slots=True)
class EngineStats:
    """The engine at this moment, and totals since it was loaded. Rates are those of the last seconds of work."""

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0  # by running answers; what only the block pool keeps counts as free
    kv_blocks_cached: int = 0
    steps_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    preemptions_total: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
    weight_placement: str = "mmap"


def dropped_parts(drops: Collection[str], roles: Sequence[str], first: str, has_tools: bool) -> Iterator[str]:
    """Yield what of a conversation is left out by a template with these `drops`. first: the first message's text."""
    if LATER_SYSTEM in drops and "system" in roles[1:]:
        yield LATER_SYSTEM
    if OVERRIDDEN_TOOLS in drops and has_tools and list(roles[:1]) == ["system"] and "/system_override" in first:
        yield OVERRIDDEN_TOOLS
