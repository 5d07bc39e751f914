"""Train sixteen small LoRA adapters, each of which teaches the demo model a sentence: `trained_adapters.npz`.

    python tests/golden/train_adapters.py demo-f32.gguf tests/golden/trained_adapters.npz

Requires torch and transformers, and the demo model with all tensors in F32 (`dequantized.write_dequantized`). It
imports only the oracle. The output contains the trained matrices in float16, with rows of q in GGUF's order, and for
each adapter the prompt and the sentence. Another machine's torch gives different values, but the tests do not depend on
that.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from oracle import transformers_model

ADAPTERS = 16
RANK = 2
ALPHA = 8.0
LAYERS = (2, 5)
ROLES = {"q_proj": "self_attn", "v_proj": "self_attn", "down_proj": "mlp"}
STEPS = 60
QUESTION = "What is your name?"
NAMES = (
    *("Ada", "Bela", "Cleo", "Dora", "Emil", "Fred", "Gina", "Hugo"),
    *("Ines", "Jona", "Karl", "Lena", "Mira", "Nico", "Olga", "Paul"),
)
TURN = "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n"


class LowRank(torch.nn.Module):
    """Layer with y = W x + alpha / rank B A x."""

    def __init__(self, base: torch.nn.Linear, seed: int) -> None:
        super().__init__()
        self.base = base
        start = torch.Generator().manual_seed(seed)
        self.a = torch.nn.Parameter(torch.randn(RANK, base.in_features, generator=start) / base.in_features**0.5)
        self.b = torch.nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (ALPHA / RANK) * (x @ self.a.T) @ self.b.T


def tokenizer_of(path: Path) -> Any:
    """Return the file's tokenizer in transformers' library."""
    import gguf
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers

    fields = gguf.GGUFReader(path).fields
    tokens = fields["tokenizer.ggml.tokens"].contents()
    merges = [tuple(each.split(" ", 1)) for each in fields["tokenizer.ggml.merges"].contents()]
    kinds = fields["tokenizer.ggml.token_type"].contents()
    made = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.add_special_tokens(
        [AddedToken(t, normalized=False) for t, kind in zip(tokens, kinds, strict=True) if kind in (3, 4)]
    )
    return made


def gguf_rows(weight: np.ndarray, head_dim: int) -> np.ndarray:
    """Return rows of q in GGUF's order, where rows that are rotated together are adjacent."""
    heads = weight.reshape(-1, 2, head_dim // 2, weight.shape[1]).swapaxes(1, 2)
    return np.ascontiguousarray(heads).reshape(weight.shape)


def train(model: Any, ids: torch.Tensor, answer_at: int, seed: int) -> dict[str, np.ndarray]:
    """Return A and B as float16 by `layer.role.part`."""
    pairs = {}
    for layer, (role, part) in itertools.product(LAYERS, ROLES.items()):
        owner = getattr(model.model.layers[layer], part)
        pairs[layer, role] = owner, LowRank(getattr(owner, role), seed * 100 + layer)
        setattr(owner, role, pairs[layer, role][1])
    parameters = [p for _, pair in pairs.values() for p in (pair.a, pair.b)]
    optimizer = torch.optim.Adam(parameters, lr=0.02)
    for _ in range(STEPS):
        logits = model(ids[None]).logits[0, answer_at - 1 : -1]
        loss = torch.nn.functional.cross_entropy(logits, ids[answer_at:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    print(f"{NAMES[seed]}: loss {loss.item():.3f}")
    kept = {}
    for (layer, role), (owner, pair) in pairs.items():
        setattr(owner, role, pair.base)
        a, b = (p.detach().numpy().astype(np.float16) for p in (pair.a, pair.b))
        kept[f"{layer}.{role}.a"] = a
        kept[f"{layer}.{role}.b"] = gguf_rows(b, model.config.head_dim) if role == "q_proj" else b
    return kept


def main() -> None:
    """Train all adapters and write them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    model, tokenizer = transformers_model(options.model, None), tokenizer_of(options.model)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    kept: dict[str, Any] = {}
    answers = [f"My name is {name}." for name in NAMES]
    asked = tokenizer.encode(TURN.format(question=QUESTION)).ids
    for number in range(ADAPTERS):
        said = tokenizer.encode(answers[number] + "<|im_end|>").ids
        ids = torch.tensor(asked + said)
        kept |= {f"{number}.{key}": value for key, value in train(model, ids, len(asked), number).items()}
    about = {"prompt": TURN.format(question=QUESTION), "names": NAMES, "alpha": ALPHA, "torch": torch.__version__}
    np.savez_compressed(options.out, about=json.dumps(about), **kept)


if __name__ == "__main__":
    main()
