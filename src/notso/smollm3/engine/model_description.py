"""Public description of a loaded model."""

from __future__ import annotations

import math

from notso.qtensor import Backend, GGUFFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.engine.memory_plan import EnginePlan
from notso.smollm3.errors import one_line
from notso.smollm3.text.tokenizer import Tokenizer
from notso.smollm3.text.vocabulary import END_KEYS
from notso.smollm3.values.model_info import ModelInfo

# Length limit of the name in the file, which is shown on the page, in the terminal and in API responses.
MAX_NAME_CHARACTERS = 100


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
) -> ModelInfo:
    """Describe a file as an engine runs it."""
    named = file.metadata.get("general.name")
    name = one_line(named if named and isinstance(named, str) else file.path.stem, MAX_NAME_CHARACTERS)
    counts: dict[str, int] = {}
    for tensor in file.tensors.values():
        counts[tensor.format.name] = counts.get(tensor.format.name, 0) + 1
    return ModelInfo(
        name=name,
        path=str(file.path),
        is_demo=is_demo,
        size_bytes=file.size_bytes,
        parameter_count=sum(math.prod(tensor.shape) for tensor in file.tensors.values()),
        context_tokens=plan.context_tokens,
        quantisation=counts,
        device=backend.name,
        device_note=note,
        kernels=backend.kernels,
        threads=backend.threads,
        kv_format=plan.kv_format,
        kv_bytes=kv_bytes,
        max_num_seqs=plan.max_num_seqs,
        num_hidden_layers=config.num_hidden_layers,
        layers_without_rope=config.nope_layers,
        most_prompt_bytes=plan.context_tokens * tokenizer.longest_bytes,
        end_token=tokenizer.token_text(file.metadata.get(END_KEYS[0], min(tokenizer.end_ids))),
        memory=plan.budget,
        chat_template=chat_template,
        template_drops=template_drops,
    )
