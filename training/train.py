"""Train the demo model with Hugging Face's SmolLM3ForCausalLM on the CPU.

A run ends after `--minutes` of training time, and an interrupted run can be resumed. After a warm-up, the learning rate
is constant; in the last part of the time, it decays to zero.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer
from transformers import SmolLM3Config, SmolLM3ForCausalLM

from training.data import Batch, stream
from training.quantize import quantized_weights

WARMUP_STEPS = 80
MATRIX_RATE = 4e-3  # for Muon, which scales its updates to the size of AdamW's
VECTOR_RATE = 3e-3  # for AdamW, which updates embeddings and norms
AVERAGE_DECAY = 0.995


def make_config(tokenizer: Tokenizer) -> SmolLM3Config:
    """Return the configuration of a small SmolLM3."""
    layers = 8
    return SmolLM3Config(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=2,
        no_rope_layers=[int((i + 1) % 4 != 0) for i in range(layers)],
        no_rope_layer_interval=4,
        max_position_embeddings=4096,
        rope_theta=100000.0,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        rms_norm_eps=1e-6,
        use_sliding_window=False,
        bos_token_id=tokenizer.token_to_id("<|begin_of_text|>"),
        eos_token_id=tokenizer.token_to_id("<|im_end|>"),
        pad_token_id=tokenizer.token_to_id("<|im_end|>"),
    )


class Trainer:
    """The model, its optimizers, the running average of its weights, and the training time."""

    def __init__(self, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
        torch.manual_seed(options.seed)
        self.options = options
        self.model = SmolLM3ForCausalLM(make_config(tokenizer))
        self.average = {name: p.detach().clone() for name, p in self.model.named_parameters()}
        matrices = [p for n, p in self.model.named_parameters() if p.ndim == 2 and "embed" not in n]
        vectors = [p for n, p in self.model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(
                matrices, lr=MATRIX_RATE, weight_decay=0.05, momentum=0.95, adjust_lr_fn="match_rms_adamw"
            ),
            torch.optim.AdamW(vectors, lr=VECTOR_RATE, betas=(0.9, 0.97), weight_decay=0.0),
        ]
        self.rates = [MATRIX_RATE, VECTOR_RATE]
        self.step, self.seconds, self.tokens = 0, 0.0, 0
        self.body = torch.compile(self.model.model, dynamic=False) if options.compile else self.model.model

    def loss(self, batch: Batch) -> torch.Tensor:
        """Return the mean cross-entropy over the learned positions."""
        targets = torch.from_numpy(batch.targets).reshape(-1)
        where = (targets >= 0).nonzero().squeeze(1)
        short = -where.numel() % 256  # few shapes, because a kernel is prepared for each
        where = torch.cat([where, where.new_full((short,), targets.numel() - 1)])  # the last target is -100: ignored
        with torch.autocast("cpu", dtype=torch.bfloat16):
            hidden = self.body(input_ids=torch.from_numpy(batch.ids), use_cache=False).last_hidden_state  # (B, L, C)
            logits = self.model.lm_head(hidden.reshape(-1, hidden.shape[-1])[where])
        return torch.nn.functional.cross_entropy(logits.float(), targets[where])

    def rate_factor(self) -> float:
        """Return the learning rate's factor: 1 after the warm-up, falling to 0 in the last part of the time."""
        progress = self.seconds / (self.options.minutes * 60)
        decay = min(1.0, max(0.0, (1 - progress) / self.options.decay_part))
        return min(1.0, (self.step + 1) / WARMUP_STEPS) * decay

    def train_step(self, batch: Batch) -> float:
        """Update the weights once. With fake quantization, the gradient is that of the quantized weights."""
        factor = self.rate_factor()
        progress = self.seconds / (self.options.minutes * 60)
        with quantized_weights(self.model, enabled=progress >= self.options.quantize_from):
            loss = self.loss(batch)
            loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer, rate in zip(self.optimizers, self.rates, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        decay = min(AVERAGE_DECAY, (self.step + 1) / (self.step + 20))
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                self.average[name].lerp_(parameter, 1 - decay)
        self.step += 1
        self.tokens += batch.ids.size
        return loss.item()

    def save(self, folder: Path) -> None:
        """Write a checkpoint, for resuming and for export."""
        state = {
            "model": self.model.state_dict(),
            "average": self.average,
            "optimizers": [o.state_dict() for o in self.optimizers],
            "step": self.step,
            "seconds": self.seconds,
            "tokens": self.tokens,
        }
        torch.save(state, folder / "checkpoint.tmp")
        (folder / "checkpoint.tmp").rename(folder / "checkpoint.pt")

    def load(self, folder: Path) -> None:
        """Restore a checkpoint."""
        state = torch.load(folder / "checkpoint.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.average = state["average"]
        for optimizer, saved in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.step, self.seconds, self.tokens = state["step"], state["seconds"], state["tokens"]


def main() -> None:
    """Train until the training time is over."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="folder of tokenizer.json, checkpoint and log")
    parser.add_argument("--minutes", type=float, default=75.0)
    parser.add_argument(
        "--decay-part",
        type=float,
        default=0.3,
        help="share of the time, at its end, in which the learning rate falls to zero",
    )
    parser.add_argument(
        "--quantize-from", type=float, default=0.8, help="share of the time after which weights are fake-quantized"
    )
    parser.add_argument("--batch-tokens", type=int, default=6144)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tokenizer = Tokenizer.from_file(str(options.folder / "tokenizer.json"))
    trainer = Trainer(tokenizer, options)
    if options.resume:
        trainer.load(options.folder)
    pad = tokenizer.token_to_id("<|im_end|>")
    losses: list[float] = []
    saved = before = time.monotonic()
    for batch in stream(tokenizer, options.seed * 1_000_003 + trainer.step, options.batch_tokens, pad):
        losses.append(trainer.train_step(batch))
        now = time.monotonic()
        trainer.seconds, before = trainer.seconds + now - before, now
        done = trainer.seconds >= options.minutes * 60
        if trainer.step % 20 == 0 or done:
            line = {
                "step": trainer.step,
                "seconds": round(trainer.seconds),
                "tokens": trainer.tokens,
                "loss": round(sum(losses[-20:]) / len(losses[-20:]), 4),
                "rate": round(trainer.rate_factor(), 3),
            }
            with (options.folder / "log.jsonl").open("a") as log:
                log.write(json.dumps(line) + "\n")
        if done or now - saved > 90:
            trainer.save(options.folder)
            saved = now
        if done:
            return


if __name__ == "__main__":
    main()
