"""Export a training checkpoint to a Hugging Face folder, an F32 GGUF file and a Q4_K_M GGUF file (the shipped one).

Tensor names and layouts are those of the official SmolLM3 files: the rows of q and k are permuted so that RoPE rotates
adjacent pairs. The Q4_K_M mix is created by llama.cpp, through llama-cpp-python.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import shutil
from collections import Counter
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Tokenizer
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from training.corpus import TEMPLATE_FILE
from training.tokenizer import CONTROL, is_control

Q4_K_M = 15  # file type in llama.cpp
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name: str) -> str:
    """Map `model.layers.3.mlp.up_proj.weight` to `blk.3.ffn_up.weight`."""
    if name == "model.embed_tokens.weight":
        return "token_embd.weight"
    if name == "model.norm.weight":
        return "output_norm.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{NAMES[rest.removesuffix('.weight')]}.weight"


def permute(weight: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    """Move rows i and i + D/2 of each head to 2i and 2i + 1. Shape: (heads * D, C)."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def load_model(folder: Path, average: bool) -> SmolLM3ForCausalLM:
    """Load a checkpoint with its last weights, or with their running average."""
    from training.train import make_config

    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = SmolLM3ForCausalLM(make_config(tokenizer))
    weights = dict(state["model"])
    if average:
        weights.update(state["average"])
    model.load_state_dict(weights)
    model.tie_weights()
    print(f"step {state['step']}, {state['tokens']} tokens, {state['seconds']:.0f} s")
    return model.eval()


def write_hf(model: SmolLM3ForCausalLM, tokenizer_file: Path, folder: Path) -> None:
    """Write model, tokenizer and chat template to a folder for transformers."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    shutil.copy(tokenizer_file, folder / "tokenizer.json")
    shutil.copy(TEMPLATE_FILE, folder / "chat_template.jinja")
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "eos_token": "<|im_end|>",
                "pad_token": "<|im_end|>",
                "model_max_length": 4096,
                "clean_up_tokenization_spaces": False,
            },
            indent=1,
        )
    )


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer_file: Path) -> None:
    model = json.loads(tokenizer_file.read_text(encoding="utf-8"))["model"]
    ids = model["vocab"]
    tokens = sorted(ids, key=lambda token: ids[token]) + list(CONTROL)
    types = [gguf.TokenType.NORMAL] * len(ids)
    types += [gguf.TokenType.CONTROL if is_control(token) else gguf.TokenType.USER_DEFINED for token in CONTROL]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smaug-bpe")
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(tokens.index("<|begin_of_text|>"))
    writer.add_eos_token_id(tokens.index("<|im_end|>"))
    writer.add_pad_token_id(tokens.index("<|im_end|>"))
    writer.add_chat_template(TEMPLATE_FILE.read_text(encoding="utf-8"))


def write_gguf(model: SmolLM3ForCausalLM, tokenizer_file: Path, out: Path) -> None:
    """Write a GGUF file with all tensors in F32."""
    config: SmolLM3Config = model.config
    writer = gguf.GGUFWriter(out, "smollm3")
    writer.add_type("model")
    writer.add_name("notso demo")
    writer.add_description(
        "The demo model of notso-smollm3-bot: SmolLM3's architecture made small, trained on text of the project."
    )
    writer.add_size_label(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f}M")
    writer.add_license("apache-2.0")
    writer.add_languages(["en"])
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    _add_tokenizer(writer, tokenizer_file)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue  # tied to the embedding
        array = tensor.detach().float().numpy()
        if ".q_proj." in name:
            array = permute(array, config.num_attention_heads)
        elif ".k_proj." in name:
            array = permute(array, config.num_key_value_heads)
        writer.add_tensor(gguf_name(name), np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(source: Path, out: Path) -> None:
    """Quantize a GGUF file to the Q4_K_M mix with llama.cpp."""
    import llama_cpp

    parameters = llama_cpp.llama_model_quantize_default_params()
    parameters.ftype = Q4_K_M
    parameters.nthread = 2
    status = llama_cpp.llama_model_quantize(str(source).encode(), str(out).encode(), ctypes.byref(parameters))
    if status != 0:
        raise SystemExit(f"llama_model_quantize failed with {status}")


def check(path: Path, layers: int) -> None:
    """Check that the file has the tensor types of the official mix and no output.weight. Raises SystemExit if not."""
    tensors = gguf.GGUFReader(path).tensors
    types = {t.name: t.tensor_type.name for t in tensors}
    print(path.name, path.stat().st_size, "bytes", dict(Counter(types.values())))
    if (
        types["token_embd.weight"] != "Q6_K"
        or "output.weight" in types
        or set(types.values()) != {"Q4_K", "Q6_K", "F32"}
    ):
        raise SystemExit("the tensor types are not those of the official mix")
    if len(types) != 2 + 9 * layers:
        raise SystemExit(f"the file has {len(types)} tensors instead of {2 + 9 * layers}")


def main() -> None:
    """Export a checkpoint."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder with checkpoint.pt and tokenizer.json")
    parser.add_argument("--hf", type=Path, required=True, help="folder for transformers")
    parser.add_argument("--f32", type=Path, required=True, help="unquantized GGUF file")
    parser.add_argument("--out", type=Path, required=True, help="quantized GGUF file")
    parser.add_argument(
        "--average",
        action="store_true",
        help="export the running average of the weights (better before the learning rate has decayed)",
    )
    options = parser.parse_args()
    model = load_model(options.folder, options.average)
    write_hf(model, options.folder / "tokenizer.json", options.hf)
    write_gguf(model, options.folder / "tokenizer.json", options.f32)
    quantize(options.f32, options.out)
    check(options.out, model.config.num_hidden_layers)


if __name__ == "__main__":
    main()
