"""Compute logits of token lists with another implementation, transformers or llama.cpp.

    python oracle.py transformers MODEL JOB.npz OUT.npz [--greedy N] [--half-cache] [--yarn-trained N] [--adapter F]
    python oracle.py llama_cpp MODEL JOB.npz OUT.npz [--one-by-one] [--adapter F]
    python oracle.py rope OUT.npz
    python oracle.py quantize MODEL OUT.gguf FILE_TYPE [IMPORTANCE.npz]

Runs in a separate process with a Python that has `torch`, `transformers` and `gguf`, or `llama_cpp`; it imports nothing
from notso. MODEL is a GGUF file; for transformers, it must be unquantized or a Hugging Face folder. F is a GGUF adapter
for llama.cpp, or a PEFT folder for transformers, which requires `peft`.

`quantize` writes a file with llama.cpp, with its number of a file type. IMPORTANCE.npz contains mean squares of the
inputs of tensors, by tensor name.

`rope` writes the 3B's rotation frequencies as computed by transformers, with and without YaRN.

JOB.npz contains ids (int32, all lists joined) and lengths (int32). OUT.npz contains the same, with N greedy tokens
after each list, and logits (float32, one row per id).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

HALVES = {"attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj"}
OTHERS = {
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


def hf_rows(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Return the rows of q or k in Hugging Face's order: for each head, rows 0, 2, 4, ..., then 1, 3, 5, ..."""
    heads = [weight[start : start + head_dim] for start in range(0, len(weight), head_dim)]
    return np.concatenate([np.concatenate([head[0::2], head[1::2]]) for head in heads])


def transformers_model(path: Path, yarn_trained: int | None) -> Any:
    import torch
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    torch.set_num_threads(1)
    if path.is_dir():
        return SmolLM3ForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    import gguf

    reader = gguf.GGUFReader(path)

    def entry(key: str, default: Any = None) -> Any:
        field = reader.fields.get(f"smollm3.{key}")
        return field.contents() if field is not None else default

    hidden, heads, layers = entry("embedding_length"), entry("attention.head_count"), entry("block_count")
    head_dim = entry("attention.key_length", hidden // heads)
    names = {tensor.name for tensor in reader.tensors}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": float(entry("rope.freq_base"))}
    positions = entry("context_length")
    if yarn_trained is not None:
        rope |= {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": yarn_trained}
        positions = 2 * yarn_trained
    config = SmolLM3Config(
        vocab_size=len(reader.fields["tokenizer.ggml.tokens"].contents()),
        hidden_size=hidden,
        intermediate_size=entry("feed_forward_length"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=entry("attention.head_count_kv"),
        head_dim=head_dim,
        max_position_embeddings=positions,
        rms_norm_eps=float(entry("attention.layer_norm_rms_epsilon")),
        rope_parameters=rope,
        no_rope_layers=None,  # the class computes it from the interval, as for the released model
        no_rope_layer_interval=4,
        tie_word_embeddings="output.weight" not in names,
        use_sliding_window=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
        attn_implementation="eager",
    )
    state = {}
    for tensor in reader.tensors:
        if tensor.tensor_type != gguf.GGMLQuantizationType.F32:
            raise SystemExit(f"{path.name}: {tensor.name} is {tensor.tensor_type.name}; transformers gets F32 only")
        values = np.array(tensor.data, np.float32).reshape(tuple(reversed(tensor.shape.tolist())))
        role = tensor.name.removesuffix(".weight")
        if role in OUTER:
            name = OUTER[role]
        else:
            _, layer, role = role.split(".")
            values = hf_rows(values, head_dim) if role in HALVES else values
            name = f"model.layers.{layer}.{(HALVES | OTHERS)[role]}"
        state[f"{name}.weight"] = torch.from_numpy(values)
    model = SmolLM3ForCausalLM(config)
    missing, unexpected = model.load_state_dict(state, strict=False)
    if unexpected or set(missing) - ({"lm_head.weight"} if config.tie_word_embeddings else set()):
        raise SystemExit(f"{path.name}: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model.float().eval()


def half_cache() -> Any:
    """Return a cache that rounds keys and values to half precision, as ours does, to exclude this difference."""
    import torch
    from transformers import DynamicCache

    class HalfCache(DynamicCache):
        def update(self, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
            rounded = (part.to(torch.float16).to(torch.float32) for part in (keys, values))
            return super().update(*rounded, *args, **kwargs)

    return HalfCache()


def run_transformers(
    path: Path, lists: list[list[int]], greedy: int, half: bool, yarn_trained: int | None, adapter: Path | None
) -> tuple[list[list[int]], np.ndarray]:
    import torch

    model = transformers_model(path, yarn_trained)
    if adapter is not None:
        from peft import PeftModel

        model = PeftModel.from_pretrained(model, str(adapter)).eval()
    logits = []
    with torch.no_grad():
        for ids in lists:
            cache, new = None, list(ids)
            for _ in range(greedy):  # a loop, so that the library's generation settings have no effect
                result = model(torch.tensor([new]), past_key_values=cache, use_cache=True)
                cache, new = result.past_key_values, [int(result.logits[0, -1].argmax())]
                ids.extend(new)
            cache = half_cache() if half else None
            logits.append(model(torch.tensor([ids]), past_key_values=cache, use_cache=half).logits[0].numpy())
    return lists, np.concatenate(logits)


def run_llama_cpp(
    path: Path, lists: list[list[int]], one_by_one: bool, adapter: Path | None
) -> tuple[list[list[int]], np.ndarray]:
    import llama_cpp

    batch: dict[str, Any] = {"n_batch": 1, "n_ubatch": 1} if one_by_one else {}
    if adapter is not None:
        batch["lora_path"] = str(adapter)
    longest = max(map(len, lists))
    model = llama_cpp.Llama(
        str(path), n_ctx=longest, logits_all=True, n_threads=1, n_threads_batch=1, verbose=False, **batch
    )
    logits = []
    for ids in lists:
        model.reset()
        model.eval(ids)
        logits.append(np.array(model.scores[: len(ids)], np.float32))
    return lists, np.concatenate(logits)


def quantize(path: Path, out: Path, file_type: int, importance: Path | None) -> None:
    import ctypes

    from llama_cpp import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype, parameters.nthread = file_type, 1
    found = dict(np.load(importance)) if importance is not None else {}
    entries = (llama_cpp.llama_model_imatrix_data * (len(found) + 1))()  # an empty entry terminates the array
    for entry, (name, values) in zip(entries, found.items(), strict=False):
        entry.name, entry.size = name.encode(), values.size
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    if found:
        parameters.imatrix = ctypes.cast(entries, ctypes.POINTER(llama_cpp.llama_model_imatrix_data))
    status = llama_cpp.llama_model_quantize(str(path).encode(), str(out).encode(), ctypes.byref(parameters))
    if status:
        raise SystemExit(f"llama_model_quantize ended with {status}")


def write_rope(out: Path) -> None:
    """Write inv_freq (64,) float32 and the attention factor of the released configuration and of its YaRN variant."""
    from transformers import SmolLM3Config
    from transformers.models.smollm3.modeling_smollm3 import SmolLM3RotaryEmbedding

    yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 65536}
    arrays = {}
    for name, extra, positions in (("plain", {"rope_type": "default"}, 65536), ("yarn", yarn, 131072)):
        config = SmolLM3Config(
            hidden_size=2048,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=positions,
            rope_parameters={"rope_theta": 5e6, **extra},
        )
        rotation = SmolLM3RotaryEmbedding(config)
        arrays[name] = rotation.inv_freq.numpy()
        arrays[f"{name}_factor"] = np.float64(rotation.attention_scaling)
    np.savez(out, **arrays)


def main() -> None:
    parser = argparse.ArgumentParser(description="Logits of token id lists by transformers or llama.cpp.")
    commands = parser.add_subparsers(dest="library", required=True)
    for library in ("transformers", "llama_cpp"):
        command = commands.add_parser(library)
        command.add_argument("model", type=Path)
        command.add_argument("job", type=Path)
        command.add_argument("out", type=Path)
        if library == "transformers":
            command.add_argument("--greedy", type=int, default=0)
            command.add_argument("--half-cache", action="store_true", help="round keys and values to half precision")
            command.add_argument("--adapter", type=Path, help="a folder of PEFT's")
            command.add_argument("--yarn-trained", type=int, help="trained context; YaRN doubles it")
        else:
            command.add_argument("--one-by-one", action="store_true", help="a batch for each token")
            command.add_argument("--adapter", type=Path, help="a GGUF adapter")
    commands.add_parser("rope").add_argument("out", type=Path)
    command = commands.add_parser("quantize")
    command.add_argument("model", type=Path)
    command.add_argument("out", type=Path)
    command.add_argument("file_type", type=int)
    command.add_argument("importance", type=Path, nargs="?")
    options = parser.parse_args()
    if options.library == "quantize":
        quantize(options.model, options.out, options.file_type, options.importance)
        return
    if options.library == "rope":
        write_rope(options.out)
        return
    with np.load(options.job) as job:
        lists = [part.tolist() for part in np.split(job["ids"], np.cumsum(job["lengths"])[:-1])]
    if options.library == "transformers":
        lists, logits = run_transformers(
            options.model, lists, options.greedy, options.half_cache, options.yarn_trained, options.adapter
        )
    else:
        lists, logits = run_llama_cpp(options.model, lists, options.one_by_one, options.adapter)
    np.savez(
        options.out,
        ids=np.concatenate([np.array(ids, np.int32) for ids in lists]),
        lengths=np.array([len(ids) for ids in lists], np.int32),
        logits=logits,
    )


if __name__ == "__main__":
    main()
