"""Describe a loaded model for clients."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from notso.qtensor import Backend, GGUFFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.engine.memory_plan import EnginePlan
from notso.smollm3.errors import InvalidRequestError, one_line
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.text.vocabulary import END_KEYS
from notso.smollm3.values.model_info import ModelInfo
from notso.smollm3.values.sampling_params import PARAMETERS, SamplingParams

# Names from model files are cut to this length, because they are shown on the page, in the terminal and in responses.
MAX_NAME_CHARACTERS = 100


logger = logging.getLogger(__name__)


def sampling_defaults(metadata: Mapping[str, Any]) -> dict[str, float]:
    """Return the sampling parameters that a file recommends. Invalid ones are logged and left out."""
    defaults: dict[str, float] = {}
    for name, key in ((name, each.gguf) for name, each in PARAMETERS.items() if each.gguf):
        value = metadata.get(f"general.sampling.{key}")
        if value is None:
            continue
        try:
            if name in ("top_k", "penalty_window"):
                value = max(int(value), 0)  # llama.cpp's -1 (all tokens) is 0 here
            replace(SamplingParams(), **{name: value})  # type: ignore[arg-type]
        except (InvalidRequestError, TypeError, ValueError, OverflowError):
            logger.warning("the model file's general.sampling.%s is ignored: %s", key, one_line(repr(value), 60))
        else:
            defaults[name] = value
    if metadata.get("general.sampling.penalty_last_n") == 0:  # in llama.cpp, 0 disables the penalties
        defaults.pop("repetition_penalty", None)
        defaults.pop("penalty_window", None)
    return defaults


def model_info(
    file: GGUFFile,
    config: SmolLM3Config,
    tokenizer: Tokenizer,
    plan: EnginePlan,
    backend: Backend,
    *,
    note: str,
    kv_bytes: int,
    is_demo: bool,
    chat_template: str,
    template_drops: tuple[str, ...],
    sampling: Mapping[str, float],
    arithmetic: str,
) -> ModelInfo:
    """Describe a loaded model."""
    stored = file.metadata.get("general.name")
    name = one_line(stored if stored and isinstance(stored, str) else file.path.stem, MAX_NAME_CHARACTERS)
    license_name = file.metadata.get("general.license.name", file.metadata.get("general.license"))
    return ModelInfo(
        name=name,
        path=str(file.path),
        is_demo=is_demo,
        size_bytes=file.size_bytes,
        parameter_count=sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        context_tokens=plan.context_tokens,
        document_tokens=plan.document_tokens,
        quantization=dict(Counter(tensor.format.name for tensor in file.tensors.values())),
        device=backend.name,
        device_note=note,
        kernels=backend.kernels,
        threads=backend.threads,
        kv_format=plan.kv_format,
        kv_bytes=kv_bytes,
        max_num_seqs=plan.max_num_seqs,
        num_hidden_layers=config.num_hidden_layers,
        layers_without_rope=config.nope_layers,
        most_prompt_bytes=plan.document_tokens * tokenizer.longest_bytes,
        end_token=tokenizer.token_text(file.metadata.get(END_KEYS[0], min(tokenizer.end_ids))),
        memory=plan.budget,
        chat_template=chat_template,
        template_drops=template_drops,
        sampling=sampling,
        arithmetic=arithmetic,
        license=one_line(license_name, MAX_NAME_CHARACTERS) if isinstance(license_name, str) else "",
    )
