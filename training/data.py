"""Batches of tokenized conversations of similar length, to limit padding."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from training.corpus import sample

BUCKETS = (128, 192, 256, 352, 512, 720, 1024)  # row lengths; few, because the model is compiled for each shape


@dataclass(frozen=True)
class Row:
    """A conversation: token ids, and whether the loss covers each of them."""

    ids: list[int]
    learn: list[bool]


@dataclass(frozen=True)
class Batch:
    """Ids and targets, both of shape (B, L). The loss ignores targets of -100."""

    ids: npt.NDArray[np.int64]
    targets: npt.NDArray[np.int64]


def make_row(tokenizer: Tokenizer, rng: Random) -> Row:
    """Sample and tokenize a conversation."""
    text, spans = sample(rng)
    encoding = tokenizer.encode(text, add_special_tokens=False)
    learn = [False] * len(encoding.ids)
    span = 0
    for index, (start, _) in enumerate(encoding.offsets):
        while span < len(spans) and start >= spans[span][1]:
            span += 1
        learn[index] = span < len(spans) and start >= spans[span][0]
    return Row(encoding.ids, learn)


def make_batch(rows: list[Row], length: int, pad: int) -> Batch:
    """Pad rows to a length. The target of a position is the next id."""
    ids = np.full((len(rows), length), pad, dtype=np.int64)
    targets = np.full((len(rows), length), -100, dtype=np.int64)
    for index, row in enumerate(rows):
        count = len(row.ids)
        ids[index, :count] = row.ids
        learned = [token if keep else -100 for token, keep in zip(row.ids[1:], row.learn[1:], strict=True)]
        targets[index, : count - 1] = learned
    return Batch(ids, targets)


def stream(tokenizer: Tokenizer, seed: int, batch_tokens: int, pad: int) -> Iterator[Batch]:
    """Yield batches of about `batch_tokens` ids, without end; the rows of a batch have the length of one bucket."""
    rng = Random(seed)
    waiting: dict[int, list[Row]] = {length: [] for length in BUCKETS}
    while True:
        row = make_row(tokenizer, rng)
        length = next((b for b in BUCKETS if len(row.ids) <= b), None)
        if length is None:
            continue
        waiting[length].append(row)
        if len(waiting[length]) == batch_tokens // length:
            yield make_batch(waiting[length], length, pad)
            waiting[length] = []
