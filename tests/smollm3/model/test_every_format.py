"""A model in each block format gives the same tokens and probabilities with every kernel family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from notso.qtensor import FORMATS_BY_NAME
from notso.qtensor.backends.cpu import kernel_choice
from notso.smollm3 import Engine, RequestOptions, SamplingParams
from notso.smollm3.diagnostics.synth import write_synthetic

SIZES = {"layers": 4, "hidden": 256, "ffn": 512, "heads": 4, "kv_heads": 1, "vocab": 1300}
SHORT = ("Q4_K", "Q8_0", "BF16")
LONG = pytest.mark.long("engine", "native")


@pytest.mark.parametrize(
    "name", [each if each in SHORT else pytest.param(each, marks=LONG) for each in FORMATS_BY_NAME]
)
def test_kernel_families_give_identical_answers_in_each_format(
    name: str, tmp_path: Path, small_metadata: dict[str, Any]
) -> None:
    path = tmp_path / f"{name}.gguf"
    write_synthetic(path, **SIZES, formats=name, tokenizer=small_metadata, template="{{ messages[-1].content }}")
    answers = {}
    before = kernel_choice.kernels()
    try:
        for family in kernel_choice.available_kernels():
            kernel_choice.use_kernels(family)
            with Engine.load(path, context_tokens=128) as engine:
                params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
                events = list(
                    engine.generate([5, 6, 7, 8] * 9, params, RequestOptions(top_logprobs=2, prompt_logprobs=2))
                )
                answers[family] = [each for event in events for each in getattr(event, "logprobs", None) or ()]
    finally:
        kernel_choice.use_kernels(before)
    assert len(answers["generic"]) >= 36
    assert len({repr(answer) for answer in answers.values()}) == 1  # repr makes NaN equal
