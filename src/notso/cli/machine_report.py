"""`notso doctor --report`: what a report about this machine needs, as one block of Markdown to paste."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from notso.cli import terminal

PROMPT_TOKENS, ANSWER_TOKENS = 512, 32


def report(checks: Sequence[str]) -> str:
    """Return the checks, and fingerprint and throughput of the demo model on every kernel family of this CPU."""
    block = "\n".join(["```", *map(terminal.harmless, (*checks, "", *_families())), "```"])
    return block.replace(str(Path.home()), "~")


def _families() -> Iterator[str]:
    from notso.qtensor import kernel_choice

    chosen, rows, fingerprints = kernel_choice.kernels(), [["kernels", "fingerprint", "prompt", "answer"]], set()
    try:
        for family in kernel_choice.available_kernels():
            try:
                kernel_choice.use_kernels(family)
                result = _measured()
            except Exception as error:  # what fails is what the report is for
                rows.append([family, f"{type(error).__name__}: {error}", "", ""])
                fingerprints.add("")
                continue
            fingerprints.add(result["fingerprint"])
            speeds = [f"{result[kind][0]['tok_s']:,.0f} tokens/s" for kind in ("prefill", "decode")]
            rows.append([family, result["fingerprint"], *speeds])
    finally:
        kernel_choice.use_kernels(chosen)
    yield from terminal.columns(rows, right=(2, 3))
    yield "the families agree" if len(fingerprints) == 1 else "FAILED: the families differ"


def _measured() -> dict[str, Any]:
    from notso.smollm3.diagnostics.benchmark import BenchmarkPlan, run_benchmark

    plan = BenchmarkPlan(
        ((PROMPT_TOKENS, 0),), batches=(), decode_tokens=ANSWER_TOKENS, repeats=1, kv="f16", probe_bytes=64 << 20
    )
    return run_benchmark(None, plan)
