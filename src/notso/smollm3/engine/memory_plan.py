"""Plan an engine's memory before allocation: context length, KV format and concurrency.

Sizes are in bytes, contexts in tokens. `plan_engine` makes all choices, for engines and for commands that predict
memory use.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from notso.qtensor import MIB, GGUFFile, MemoryLimit, reserved_blocks
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.errors import OutOfMemoryError, Sentence
from notso.smollm3.kv.kv_cache import (
    KV_FORMATS,
    WINDOW_FORMAT,
    KVFormat,
    has_fine_weights,
    load_kv_format,
    store_kv_format,
)
from notso.smollm3.scheduling.block_pool import BLOCK_TOKENS
from notso.smollm3.scheduling.sequence import MAX_ROWS, MAX_SAMPLED
from notso.smollm3.values.engine_config import EngineConfig
from notso.smollm3.values.model_info import MemoryBudget

# The cache for this context length fits on almost every machine that has enough memory for the weights.
DEFAULT_CONTEXT_TOKENS = 8192

# Number of concurrent sequences, unless memory requires fewer.
DEFAULT_SEQUENCES = 16

# Usual size, in tokens, of the cache that all sequences share: room for four chats of the default context.
SHARED_TOKENS = 32_768

# Windows (additional k8v8 blocks, see block_pool) that a sequence needs with low-bit formats: for its first, current
# and next block.
WINDOW_BLOCKS = 3

# Additional windows, for the blocks to which a step writes prompt tokens.
STEP_WINDOW_BLOCKS = 1 + MAX_ROWS // BLOCK_TOKENS

# Memory of the interpreter, the tokenizer, the web server and its streams.
PROCESS_BYTES = 256 * MIB

# Part of PROCESS_BYTES that the process may already be using when an engine is planned. If it were counted twice, a
# model for which there is room when the server starts would no longer fit when the server loads it.
OWN_BYTES = PROCESS_BYTES // 2

# Caches of at least this size use large pages, and are touched while the engine is idle so that the system allocates
# them. The demo model's cache is smaller; on large pages, it would take 20 MB more than needed.
LARGE_CACHE_BYTES = 64 * MIB

CONTEXT_STEP_TOKENS = 1024  # automatically chosen contexts are multiples of this
CONTEXT_FLOOR_TOKENS = 2048  # smallest automatically chosen context
K8V8_UP_TO_TOKENS = 32_768  # longest context for which "auto" prefers 8 bits, or f16 with weights of at least 8 bits
_QUANTIZED_ROW = 292 / 256  # bytes per activation after quantization for the integer kernels
_LADDER: tuple[KVFormat, ...] = ("k8v8", "k8v4", "k4v4", "k4v3")
_FINE_LADDER: tuple[KVFormat, KVFormat] = ("f16", "k8v8")


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """Planned memory of an engine."""

    context_tokens: int
    document_tokens: int  # context of prompts with a fixed prefix, such as documents
    kv_format: KVFormat
    max_num_seqs: int
    kv_blocks: int  # shared by all sequences and cached prefixes
    window_blocks: int
    weights_bytes: int
    kv_bytes: int
    scratch_bytes: int
    limit: MemoryLimit
    reduced: bool  # the default context did not fit

    @property
    def needed_bytes(self) -> int:
        return self.weights_bytes + self.kv_bytes + self.scratch_bytes + PROCESS_BYTES

    @property
    def budget(self) -> MemoryBudget:
        limit = self.limit
        return MemoryBudget(
            self.weights_bytes, self.kv_bytes, self.scratch_bytes, PROCESS_BYTES, limit.available_bytes, limit.source
        )


def kv_bytes_per_token(config: SmolLM3Config, kv_format: KVFormat) -> int:
    """Return the cache's size in bytes per token, over all layers."""
    pair = KV_FORMATS[kv_format].pair_bytes(config.head_dim)
    return config.num_hidden_layers * config.num_key_value_heads * pair


def step_rows(config: SmolLM3Config, context_tokens: int) -> int:
    """Return the maximum number of rows of a step."""
    # With contexts beyond the trained length, memory is scarce. Smaller steps need less of it and are hardly slower,
    # because attention takes most of the time.
    return MAX_ROWS // (1 if context_tokens <= config.max_position_embeddings else 4)


def scratch_bytes(config: SmolLM3Config, context_tokens: int) -> int:
    """Return the bytes of temporary memory that the largest step needs."""
    rows = step_rows(config, context_tokens)
    heads = config.head_dim * (config.num_attention_heads + config.num_key_value_heads)
    row = 4 * (config.hidden_size + config.head_dim + 2 * heads + config.intermediate_size)
    row += math.ceil(_QUANTIZED_ROW * max(config.intermediate_size, config.hidden_size))
    sampled = 4 * MAX_SAMPLED * (config.hidden_size + config.vocab_size)
    return rows * row + sampled


def plan_engine(
    config: SmolLM3Config,
    weights_bytes: int,
    settings: EngineConfig,
    limit: MemoryLimit,
    *,
    fine_weights: bool = False,
    stored: KVFormat | None = None,
) -> EnginePlan:
    """Choose the unset settings so that the plan fits in memory. Explicit settings are not reduced.

    The default context is 8,192 tokens, or the trained context if shorter. If needed, it is reduced in steps of
    1,024, to at least 2,048. `document_tokens`, chosen last, takes at most half of the remaining memory. If
    `beside_bytes` is set, defaults are not reduced.
    kv "auto": k8v8 up to 32,768 tokens, k8v4 beyond, fewer bits only if memory requires it. With `fine_weights` (floats
    or 8 bits): f16 up to 32,768 tokens, k8v8 beyond. stored: KV format chosen earlier, tried first.

    Raises OutOfMemoryError.
    """
    context_tokens, most_document_tokens = settings.context_tokens, 0
    if context_tokens is None:
        most_document_tokens = min(settings.document_tokens, config.max_position_embeddings)
    else:
        context_tokens = min(context_tokens, config.max_context_tokens)
    if settings.beside_bytes is not None:
        remaining = max(0, limit.available_bytes - settings.beside_bytes)
        limit = MemoryLimit(f"{limit.source}, next to the loaded models,", remaining)
    planner = _Planner(config, weights_bytes, limit)
    usual = min(config.max_position_embeddings, DEFAULT_CONTEXT_TOKENS)
    candidates = kv_format_candidates(context_tokens or usual, fine_weights, stored)
    formats = candidates if settings.kv == "auto" else (settings.kv,)
    counts = [settings.max_num_seqs] if settings.max_num_seqs is not None else _halvings(DEFAULT_SEQUENCES)
    if settings.beside_bytes is not None:
        formats, counts = formats[:1], counts[:1]
        context_tokens = context_tokens or usual
    for kv_format in formats:
        context = context_tokens or planner.fitting_context(usual, kv_format, counts[-1])
        for sequences in counts:
            plan = planner.plan(context, kv_format, sequences, reduced=context_tokens is None and context < usual)
            if plan.needed_bytes <= plan.limit.available_bytes:
                return planner.with_documents(planner.with_shared_blocks(plan), most_document_tokens)
    raise planner.out_of_memory_error(context_tokens or min(usual, CONTEXT_FLOOR_TOKENS), formats, counts[-1])


def largest_context(config: SmolLM3Config, weights_bytes: int, kv_format: KVFormat, limit: MemoryLimit) -> int:
    """Return the longest context that fits, for one sequence: the model's maximum, a multiple of 1,024 tokens, or 0."""
    return _Planner(config, weights_bytes, limit).largest_context(kv_format, 1)


class _Planner:
    def __init__(self, config: SmolLM3Config, weights_bytes: int, limit: MemoryLimit) -> None:
        self.config = config
        self.weights_bytes = weights_bytes
        self.limit = MemoryLimit(limit.source, limit.available_bytes + min(limit.own_bytes, OWN_BYTES))

    def plan(
        self, context: int, kv_format: KVFormat, sequences: int, *, blocks: int = 0, reduced: bool = False
    ) -> EnginePlan:
        # There must be room for at least one sequence of the full context.
        blocks = max(blocks, -(-context // BLOCK_TOKENS))
        windows = WINDOW_BLOCKS * sequences + STEP_WINDOW_BLOCKS if KV_FORMATS[kv_format].is_low_bit else 0
        return EnginePlan(
            context_tokens=context,
            document_tokens=context,
            kv_format=kv_format,
            max_num_seqs=sequences,
            kv_blocks=blocks,
            window_blocks=windows,
            weights_bytes=self.weights_bytes,
            kv_bytes=reserved_blocks(blocks) * self._block_bytes(kv_format)
            + windows * self._block_bytes(WINDOW_FORMAT),
            scratch_bytes=scratch_bytes(self.config, context),
            limit=self.limit,
            reduced=reduced,
        )

    def with_shared_blocks(self, plan: EnginePlan) -> EnginePlan:
        return self._with_blocks(plan, min(plan.max_num_seqs * plan.kv_blocks, SHARED_TOKENS // BLOCK_TOKENS))

    def with_documents(self, plan: EnginePlan, most_tokens: int) -> EnginePlan:
        minimal = self.plan(plan.context_tokens, plan.kv_format, plan.max_num_seqs, reduced=plan.reduced)
        larger = self._with_blocks(minimal, max(plan.kv_blocks, most_tokens // BLOCK_TOKENS))
        tokens = min(most_tokens, larger.kv_blocks * BLOCK_TOKENS) // CONTEXT_STEP_TOKENS * CONTEXT_STEP_TOKENS
        return replace(larger, document_tokens=tokens) if tokens > plan.context_tokens else plan

    def _with_blocks(self, plan: EnginePlan, blocks: int) -> EnginePlan:
        # Uses at most half of the remaining memory, and leaves the rest for other programs.
        remaining = plan.limit.available_bytes - plan.needed_bytes
        room = reserved_blocks(plan.kv_blocks) + remaining // 2 // self._block_bytes(plan.kv_format)
        blocks = min(blocks, room)
        while reserved_blocks(blocks) > room:
            blocks -= 1
        if blocks <= plan.kv_blocks:
            return plan
        return self.plan(plan.context_tokens, plan.kv_format, plan.max_num_seqs, blocks=blocks, reduced=plan.reduced)

    def fitting_context(self, usual: int, kv_format: KVFormat, sequences: int) -> int:
        fits = min(usual, self.largest_context(kv_format, sequences))
        return fits if fits == usual else max(fits, min(CONTEXT_FLOOR_TOKENS, usual))

    def largest_context(self, kv_format: KVFormat, sequences: int) -> int:
        longest = self.config.max_context_tokens
        if self._fits(longest, kv_format, sequences):
            return longest
        shorter = range(CONTEXT_STEP_TOKENS, longest, CONTEXT_STEP_TOKENS)
        fitting = bisect_left(shorter, True, key=lambda context: not self._fits(context, kv_format, sequences))
        return fitting * CONTEXT_STEP_TOKENS

    def out_of_memory_error(self, context: int, formats: Sequence[KVFormat], sequences: int) -> OutOfMemoryError:
        plan = self.plan(context, formats[-1], sequences)
        sizes = {kv_format: self.largest_context(kv_format, sequences) for kv_format in (*formats, *_LADDER)}
        best = max(formats, key=lambda kv_format: sizes[kv_format])
        smaller = max(sizes, key=lambda kv_format: sizes[kv_format])
        fits, small = sizes[best], sizes[smaller]
        if fits >= CONTEXT_FLOOR_TOKENS:
            advice = f"{fits:,} tokens would fit in {best}"
            if small > fits:
                advice += f", {small:,} in {smaller}"
        elif small >= CONTEXT_FLOOR_TOKENS:
            advice = f"{small:,} tokens would fit in {smaller}"
        elif self.weights_bytes + PROCESS_BYTES > self.limit.available_bytes:
            advice = f"the weights alone are {self.weights_bytes // MIB:,} MiB"
        else:
            advice = "no useful context would fit"
        return OutOfMemoryError(
            Sentence(
                f"a context of {context:,} tokens in {plan.kv_format} needs {plan.needed_bytes // MIB:,} MiB, "
                f"but {self.limit.source} leaves {self.limit.available_bytes // MIB:,} MiB; {advice}",
                "engine_memory",
                context=context,
                needed=plan.needed_bytes // MIB,
                available=self.limit.available_bytes // MIB,
            ),
            needed_bytes=plan.needed_bytes,
            available_bytes=self.limit.available_bytes,
        )

    def _fits(self, context: int, kv_format: KVFormat, sequences: int) -> bool:
        return self.plan(context, kv_format, sequences).needed_bytes <= self.limit.available_bytes

    def _block_bytes(self, kv_format: KVFormat) -> int:
        return BLOCK_TOKENS * kv_bytes_per_token(self.config, kv_format)


def kv_format_candidates(context: int, fine_weights: bool, stored: KVFormat | None) -> tuple[KVFormat, ...]:
    """Return the KV formats that "auto" tries, best first."""
    is_long = context > K8V8_UP_TO_TOKENS
    if fine_weights:
        return (stored or _FINE_LADDER[is_long],)
    usual = _LADDER[is_long:]
    return (stored, *(each for each in usual if each != stored)) if stored is not None else usual


def plan_file(
    file: GGUFFile, config: SmolLM3Config, settings: EngineConfig, weights_bytes: int, limit: MemoryLimit
) -> EnginePlan:
    """Plan the engine of a model file, reusing its stored KV format. Raises OutOfMemoryError."""
    folder = Path(settings.cache_dir) if settings.cache_dir is not None and settings.kv == "auto" else None
    fine_weights = has_fine_weights(file.tensors.values())
    stored = load_kv_format(folder, file, settings.context_tokens) if folder is not None else None
    return plan_engine(config, weights_bytes, settings, limit, fine_weights=fine_weights, stored=stored)


def store_kv_format_choice(file: GGUFFile, config: SmolLM3Config, settings: EngineConfig, plan: EnginePlan) -> None:
    """Store the chosen KV format, unless it was chosen because memory was short."""
    if settings.cache_dir is None or settings.kv != "auto":
        return
    usual = min(config.max_position_embeddings, DEFAULT_CONTEXT_TOKENS)
    fine_weights = has_fine_weights(file.tensors.values())
    if plan.kv_format == kv_format_candidates(settings.context_tokens or usual, fine_weights, None)[0]:
        store_kv_format(Path(settings.cache_dir), file, settings.context_tokens, plan.kv_format)


def _halvings(count: int) -> list[int]:
    return [count >> shift for shift in range(count.bit_length())]
