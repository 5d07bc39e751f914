"""What all steps of an engine came to so far."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepTotals:
    """Fields of `EngineStats`, counted in place: every answer of every step counts, and copies would be felt."""

    steps_total: int = 0
    prompt_tokens_total: int = 0
    cached_tokens_total: int = 0
    generated_tokens_total: int = 0
    drafted_tokens_total: int = 0
    accepted_tokens_total: int = 0
    prefill_tokens_per_s: float = 0.0
    decode_tokens_per_s: float = 0.0
