"""Golden files: results of other implementations, reduced to a size that can be committed."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from notso.qtensor.gguf import GGUFFile

FOLDER = Path(__file__).parent
TOP = 5
"""Number of most likely tokens that are stored for each position."""

REMAKE = "python tests/golden/make_goldens.py"

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True, eq=False)
class Golden:
    """Logits of several token lists, joined to P positions, with a vocabulary of V.

    ids (P,), lengths and prompt_lengths (lists,): the token lists; the tokens after a list's prompt are greedy.
    logit_range: largest minus smallest logit of all positions; errors are relative to it.
    rows (N,), logits (N, V): positions whose logits are stored completely. top_ids, top_logits (P, 5): the most likely
    tokens, in descending order.
    noise_top1, noise_top5: agreement of the oracle with itself in another mode (0 if not measured).
    """

    source: str
    model_sha256: str  # of the demo file, or of a random model's weights
    ids: Integers
    lengths: Integers
    prompt_lengths: Integers
    logit_range: float
    rows: Integers
    logits: Floats
    top_ids: Integers
    top_logits: Floats
    noise_top1: float = 0.0
    noise_top5: float = 0.0

    @classmethod
    def of(
        cls,
        source: str,
        model_sha256: str,
        prompts: list[list[int]],
        lists: list[list[int]],
        logits: Floats,
        rows: list[int],
        noise: Floats | None = None,
    ) -> Golden:
        """Reduce `logits` (P, V) to the stored values."""
        top = top_tokens(logits)
        other = top if noise is None else top_tokens(noise)
        return cls(
            source=source,
            model_sha256=model_sha256,
            ids=np.concatenate([np.array(ids, np.uint16) for ids in lists]),
            lengths=np.array([len(ids) for ids in lists], np.uint16),
            prompt_lengths=np.array([len(ids) for ids in prompts], np.uint16),
            logit_range=float(np.ptp(logits)),
            rows=np.array(rows, np.uint16),
            logits=logits[rows],
            top_ids=top.astype(np.uint16),
            top_logits=np.take_along_axis(logits, top, 1),
            noise_top1=0.0 if noise is None else float((top[:, 0] == other[:, 0]).mean()),
            noise_top5=0.0 if noise is None else float(shared(top, other).mean()) / TOP,
        )

    @classmethod
    def load(cls, name: str) -> Golden:
        with np.load(FOLDER / f"{name}.npz", allow_pickle=False) as file:
            return cls(**{key: value.item() if value.ndim == 0 else value for key, value in file.items()})

    def save(self, name: str) -> Path:
        path = FOLDER / f"{name}.npz"
        np.savez_compressed(path, **asdict(self))
        return path

    @property
    def lists(self) -> list[list[int]]:
        return [part.tolist() for part in np.split(self.ids.astype(int), np.cumsum(self.lengths)[:-1])]

    @property
    def starts(self) -> list[int]:
        """Return the first position of each list."""
        return [0, *np.cumsum(self.lengths)[:-1].tolist()]

    @property
    def first_seen(self) -> npt.NDArray[np.bool_]:
        """Return a mask (P,) that is false where an earlier list has the same ids up to here, which count once."""
        seen: set[tuple[int, ...]] = set()
        fresh = []
        for ids in self.lists:
            for end in range(1, len(ids) + 1):
                fresh.append(tuple(ids[:end]) not in seen)
                seen.add(tuple(ids[:end]))
        return np.array(fresh)


def top_tokens(logits: Floats) -> Integers:
    """Return the ids (P, 5) of the most likely tokens, in descending order."""
    return np.argsort(-logits, axis=1, kind="stable")[:, :TOP]


def shared(ours: Integers, theirs: Integers) -> Integers:
    """Return how many of the top 5 tokens both have, (P,)."""
    return np.array([len(set(a) & set(b)) for a, b in zip(ours.tolist(), theirs.tolist(), strict=True)])


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def weights_sha256(path: Path) -> str:
    """Return the SHA-256 of only the tensors, because metadata may change without an effect on results."""
    digest = hashlib.sha256()
    with GGUFFile.open(path) as file:
        for tensor in file.tensors.values():
            digest.update(f"{tensor.name} {tensor.shape} {tensor.format}".encode())
            digest.update(tensor.data)
    return digest.hexdigest()
