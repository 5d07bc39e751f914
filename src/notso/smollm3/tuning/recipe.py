"""Training hyperparameters."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.model.lora import MAX_RANK


@dataclass(frozen=True, slots=True)
class Recipe:
    """Hyperparameters of LoRA on all matrices with AdamW. Raises InvalidRequestError."""

    # The adapter is alpha / rank times B A.
    rank: int = 16
    alpha: float = 32.0
    learning_rate: float = 2e-4
    # Repetitions of each training row.
    epochs: int = 3
    # Repetitions of each earlier answer of the model.
    rehearsals: int = 2
    batch_rows: int = 8
    # Longer rows are truncated.
    max_tokens: int = 1024
    # Share of rows held out for evaluation.
    holdout: float = 0.1
    checkpoint_steps: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least, most in (
            ("rank", 1, MAX_RANK),
            ("alpha", 1e-3, 1e6),
            ("learning_rate", 1e-7, 1.0),
            ("epochs", 1, 10_000),
            ("rehearsals", 1, 10_000),
            ("batch_rows", 1, 4096),
            ("max_tokens", 16, 131_072),
            ("holdout", 0.0, 0.9),
            ("checkpoint_steps", 1, 1_000_000),
            ("seed", 0, 2**32 - 1),
        ):
            value = getattr(self, name)
            if not least <= value <= most:  # NaN fails too
                raise InvalidRequestError(f"{name} is {value}, must be {least:g} to {most:g}", param=name)

    def digest(self, *more: bytes) -> str:
        """Hash everything that determines the result."""
        found = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode())
        for part in more:
            found.update(hashlib.sha256(part).digest())
        return found.hexdigest()
