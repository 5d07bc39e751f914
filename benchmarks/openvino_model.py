"""Create a model with random weights in SmolLM3-3B's shapes for OpenVINO: symmetric int4 weights in groups of 64, with
an int8 head.

    python benchmarks/openvino_model.py build/openvino-3b

Run it with a Python that has `optimum-intel`, `nncf`, `openvino-genai`, `torch` and `transformers`; it imports nothing
from notso. It takes several minutes, and about three times the memory of the bfloat16 weights (18 GB at full size). Set
NOTSO_OPENVINO_MODEL to the folder for `notso bench --compare openvino`.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

LIBRARIES = ("openvino", "openvino-genai", "optimum-intel", "nncf", "torch", "transformers")


def random_model(layers: int, seed: int) -> Any:
    """Return a SmolLM3 with random bfloat16 weights, as initialized by transformers."""
    import torch
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    config = SmolLM3Config(
        vocab_size=128256,
        hidden_size=2048,
        intermediate_size=11008,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=65536,
        rope_theta=5_000_000.0,
        tie_word_embeddings=True,
        no_rope_layer_interval=4,
        pad_token_id=128004,
        bos_token_id=None,
        eos_token_id=128012,
    )
    torch.manual_seed(seed)
    torch.set_default_dtype(torch.bfloat16)
    return SmolLM3ForCausalLM(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="folder to write the model to")
    parser.add_argument("--layers", type=int, default=36, help="number of layers; use fewer for a trial")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    missing = [name for name in LIBRARIES if not _version(name)]
    if missing:
        sys.exit(f"not installed in this Python: {', '.join(missing)}")

    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    started = time.perf_counter()
    given.folder.mkdir(parents=True, exist_ok=True)
    torch_folder = given.folder / "torch"
    random_model(given.layers, given.seed).save_pretrained(torch_folder)
    print(f"weights written, {time.perf_counter() - started:.0f} s", file=sys.stderr)
    int4 = OVWeightQuantizationConfig(bits=4, sym=True, group_size=64, ratio=1.0)
    model = OVModelForCausalLM.from_pretrained(torch_folder, export=True, compile=False, quantization_config=int4)
    model.save_pretrained(given.folder)
    for left in sorted(torch_folder.iterdir()):
        left.unlink()
    torch_folder.rmdir()
    about = {
        "weights": "int4 symmetric, groups of 64; embedding and head int8",
        "layers": given.layers,
        "seed": given.seed,
        "bytes": (given.folder / "openvino_model.bin").stat().st_size,
        "versions": {name: _version(name) for name in LIBRARIES},
    }
    (given.folder / "about.json").write_text(json.dumps(about, indent=1))
    print(f"{given.folder}: {about['bytes'] / 1e9:.2f} GB, {time.perf_counter() - started:.0f} s")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
