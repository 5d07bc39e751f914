"""Train the demo model's byte-level BPE: SmolLM3's regex and control tokens, a small vocabulary, unmerged digits."""

from __future__ import annotations

import argparse
from pathlib import Path
from random import Random

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.corpus import sample

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CONTROL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<think>",
    "</think>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    "<|im_start|>",
    "<|im_end|>",
    "<tool_response>",
    "</tool_response>",
    "<tool_call>",
    "</tool_call>",
    "<code>",
    "</code>",
    *(f"<|reserved_special_token_{n}|>" for n in range(11, 24)),
)
VOCABULARY = 3072


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def is_control(token: str) -> bool:
    """Return whether a token is a control token. Tags of thinking, tools and code are user-defined tokens."""
    return token.startswith("<|")


def train(texts: list[str]) -> Tokenizer:
    """Learn merges from texts without control tokens, then append the control tokens."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer(PATTERN.replace(r"\p{N}{1,3}", r"\p{N}"))
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(CONTROL), initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.pre_tokenizer = _pre_tokenizer(PATTERN)
    tokenizer.decoder = decoders.ByteLevel()
    for token in CONTROL:
        tokenizer.add_tokens([AddedToken(token, special=is_control(token), normalized=False)])
    return tokenizer


def main() -> None:
    """Train on sampled conversations and write tokenizer.json."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=15000)
    parser.add_argument("--seed", type=int, default=7)
    options = parser.parse_args()
    rng = Random(options.seed)
    texts: list[str] = []
    for _ in range(options.samples):
        text = sample(rng)[0]
        for token in CONTROL:
            text = text.replace(token, "\0")
        texts += [piece for piece in text.split("\0") if piece]
    tokenizer = train(texts)
    options.out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(options.out))
    print(f"{tokenizer.get_vocab_size()} tokens in {options.out}")


if __name__ == "__main__":
    main()
