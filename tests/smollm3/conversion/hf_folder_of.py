"""Write a random model as a Hugging Face folder, with the weights of its GGUF file."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from golden.random_models import SPECIALS, RandomModel, vocabulary

from notso.smollm3.text.tokenizer_pipeline import LLAMA_3

DTYPES = {"F32": "<f4", "F16": "<f2"}
ROLES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": LLAMA_3}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False},
    ],
}


def hf_name(name: str) -> str:
    parts = name.split(".")
    if parts[0] == "blk":
        return f"model.layers.{parts[1]}.{ROLES[parts[2]]}.weight"
    return {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}[parts[0]] + ".weight"


def hf_rows(name: str, values: np.ndarray, head_dim: int) -> np.ndarray:
    """Reorder rows of queries and keys from pairs to halves: row 2i of a head becomes i, row 2i + 1 half + i."""
    if ".attn_q" not in name and ".attn_k" not in name:
        return values
    out = np.empty_like(values)
    for row in range(len(values)):
        head, within = divmod(row, head_dim)
        out[head * head_dim + within // 2 + within % 2 * (head_dim // 2)] = values[row]
    return out


def as_bytes(values: np.ndarray, dtype: str) -> bytes:
    if dtype == "BF16":  # random weights are truncated to bfloat16, so nothing is rounded
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype(DTYPES[dtype]).tobytes()


def write_safetensors(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], bytes]]) -> None:
    header, at = dict[str, Any](), 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    raw = json.dumps(header | {"__metadata__": {"format": "pt"}}).encode()
    raw += b" " * (-len(raw) % 8)
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(data for _, _, data in tensors.values()))


def write_folder(model: RandomModel, folder: Path, dtype: str = "F32", shards: int = 1, **config: Any) -> Path:
    """Write weights in `shards` files, config.json, tokenizer.json and a chat template."""
    folder.mkdir()
    tensors = {
        hf_name(name): (dtype, values.shape, as_bytes(hf_rows(name, values, model.head_dim), dtype))
        for name, values in model.weights()
    }
    names = sorted(tensors)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        files = [f"model-{n + 1:05}-of-{shards:05}.safetensors" for n in range(shards)]
        for n, file in enumerate(files):
            write_safetensors(folder / file, {name: tensors[name] for name in names[n::shards]})
        placed = {name: files[n % shards] for n, name in enumerate(names)}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    (folder / "config.json").write_text(json.dumps(config_of(model) | config))
    tokens = vocabulary(model.vocab)
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = [
        {"id": tokens.index(text), "content": text, **plain, "special": kind == 3} for text, kind in SPECIALS.items()
    ]
    vocab = {token: index for index, token in enumerate(tokens)}
    content = {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZER,
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b"], "ignore_merges": True},
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    return folder


def config_of(model: RandomModel) -> dict[str, Any]:
    return {
        "architectures": ["SmolLM3ForCausalLM"],
        "model_type": "smollm3",
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab,
        "max_position_embeddings": model.context,
        "rms_norm_eps": model.eps,
        "rope_theta": model.theta,
        "no_rope_layers": [int((layer + 1) % 4 != 0) for layer in range(model.layers)],
        "no_rope_layer_interval": 4,
        "layer_types": ["full_attention"] * model.layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "bos_token_id": None,
        "eos_token_id": vocabulary(model.vocab).index("<|im_end|>"),
        "pad_token_id": None,
        **({} if model.tied else {"tie_word_embeddings": False}),
    }
