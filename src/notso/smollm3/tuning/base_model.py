"""Load a base model as a transformers module, from a GGUF file or a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from notso.qtensor import GGUFFile, QTensor
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.errors import ModelFileError
from notso.smollm3.model.weights import TENSOR_NAMES, SmolLM3Weights, module_name

Floats = npt.NDArray[np.float32]


def load(source: Path, dtype: Any) -> Any:
    """Return a transformers model on the CPU. Raises GGUFError, ModelFileError or OSError."""
    from transformers import SmolLM3ForCausalLM

    if source.is_dir():
        return SmolLM3ForCausalLM.from_pretrained(
            source, dtype=dtype, attn_implementation="sdpa", local_files_only=True
        )
    return _from_gguf(source, dtype)


def count_parameters(base: Path) -> int:
    """Return the number of parameters in a GGUF file."""
    with GGUFFile.open(base) as file:
        return sum(tensor.rows * tensor.cols for tensor in file.tensors.values())


def _from_gguf(source: Path, dtype: Any) -> Any:
    import torch
    from transformers import SmolLM3Config as TheirConfig
    from transformers import SmolLM3ForCausalLM

    with GGUFFile.open(source) as file:
        config = SmolLM3Config.from_metadata(file.metadata)
        if "smollm3.rope.scaling.type" in file.metadata:
            raise ModelFileError(
                f"{source.name} uses YaRN, which cannot be trained from a GGUF file: use its Hugging Face folder"
            )
        weights = SmolLM3Weights.from_tensors(file.tensors, config)
        model = SmolLM3ForCausalLM(
            TheirConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_hidden_layers,
                num_attention_heads=config.num_attention_heads,
                num_key_value_heads=config.num_key_value_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rms_norm_eps=config.rms_norm_eps,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                no_rope_layers=None,
                no_rope_layer_interval=4,
                tie_word_embeddings=weights.lm_head is weights.embed_tokens,
                use_sliding_window=False,
                pad_token_id=None,
                bos_token_id=None,
                eos_token_id=None,
                attn_implementation="sdpa",
            )
        ).to(dtype)
        places = dict(model.named_parameters())

        def put(name: str, values: Floats) -> None:
            with torch.no_grad():
                places.pop(f"{name}.weight").copy_(torch.from_numpy(np.array(values)))

        put("model.embed_tokens", weights.embed_tokens.dequantize())
        put("model.norm", weights.norm)
        if weights.lm_head is not weights.embed_tokens:
            put("lm_head", weights.lm_head.dequantize())
        for index in range(config.num_hidden_layers):
            for role, name in TENSOR_NAMES.items():
                tensor = file.tensors[f"blk.{index}.{name}.weight"]
                put(f"model.layers.{index}.{module_name(role)}", hf_rows(tensor, role, config.head_dim))
    return model


def hf_rows(tensor: QTensor, role: str, head_dim: int) -> Floats:
    """Return a tensor's values in the row order of transformers."""
    values = tensor.dequantize().reshape(tensor.shape)
    if role not in ("q_proj", "k_proj"):
        return values
    # In transformers, each head of q and k consists of the even rows in the GGUF tensor, followed by the odd rows.
    pairs = values.reshape(-1, head_dim // 2, 2, values.shape[1])
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(values.shape)
