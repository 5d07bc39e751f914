"""Describe a loaded model and its engine."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from notso.smollm3.values.request_options import RequestOptions

LATER_SYSTEM, OVERRIDDEN_TOOLS = "later system messages", "tools disabled by /system_override"


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Planned memory in bytes. `source` describes the limit of `available_bytes`."""

    weights_bytes: int
    kv_bytes: int
    scratch_bytes: int
    process_bytes: int
    available_bytes: int
    source: str

    @property
    def needed_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.scratch_bytes + self.process_bytes


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a loaded model."""

    name: str
    path: str
    is_demo: bool
    size_bytes: int
    parameter_count: int
    context_tokens: int
    quantization: Mapping[str, int] = field(default_factory=dict)  # format name -> number of tensors
    device: str = "cpu"  # "cpu" or, for example, "cuda:0 (name)"
    device_note: str = ""  # if the CPU is used instead of a GPU, the GPU's error
    kernels: str = "generic"
    threads: int = 1
    kv_format: str = "f16"
    kv_bytes: int = 0  # memory reserved for keys and values
    max_num_seqs: int = 1
    num_hidden_layers: int = 0
    layers_without_rope: tuple[int, ...] = ()  # layers without rotary position embeddings (NoPE)
    chat_template: str = field(default="", repr=False)  # empty if the file has none
    template_drops: tuple[str, ...] = ()  # parts that the template omits: LATER_SYSTEM, OVERRIDDEN_TOOLS
    most_prompt_bytes: int = 0  # prompts with more bytes never fit in the context; 0: unknown
    sampling: Mapping[str, float] = field(default_factory=dict)  # the file's defaults; names as in SamplingParams
    license: str = ""  # license name given in the file
    end_token: str = ""  # text of the control token that ends an answer
    memory: MemoryBudget | None = None
    arithmetic: str = ""  # engines with the same `arithmetic` compute the same logits, bit for bit; "": unknown
    document_tokens: int = 0  # context for prompts with a fixed prefix; 0: as for other prompts

    def context_of(self, options: RequestOptions) -> int:
        """Return the maximum total number of prompt and answer tokens."""
        return max(self.document_tokens, self.context_tokens) if options.prefix is not None else self.context_tokens


@dataclass(frozen=True, slots=True)
class StoredReading:
    """KV cache blocks on disk of a named prompt prefix."""

    blocks: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class PromptEstimate:
    """Expected cost of a prompt."""

    prompt_tokens: int
    cached_tokens: int
    seconds: float | None  # None until measured


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Current state, totals since loading, and mean rates over the last ten seconds of work."""

    running: int = 0
    waiting: int = 0
    kv_blocks: int = 0
    kv_blocks_used: int = 0  # number of blocks of running answers; cached blocks count as free
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
    """Yield the parts of a conversation that a template with these `drops` omits."""
    if LATER_SYSTEM in drops and "system" in roles[1:]:
        yield LATER_SYSTEM
    if OVERRIDDEN_TOOLS in drops and has_tools and list(roles[:1]) == ["system"] and "/system_override" in first:
        yield OVERRIDDEN_TOOLS
