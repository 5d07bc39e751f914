"""Low-rank adapters: y = W x + B (A x), with W unchanged.

Adapters are not merged, so that the base stays quantized and steps can mix adapters.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from notso.qtensor import Backend, Weight

MAX_RANK = 512  # bounds the preallocated memory of a step


@dataclass(frozen=True, slots=True)
class LowRank:
    """Float update of a matrix: a (rank, inputs), scaled; b (outputs, rank)."""

    a: Weight
    b: Weight
    rank: int  # a multiple of adapter_file.RANK_STEP


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter; `digest` covers all values."""

    name: str
    digest: bytes
    nbytes: int
    rank: int  # largest rank in the file
    layers: tuple[Mapping[str, LowRank], ...]  # per layer, by name in `LayerWeights`

    def on(self, backend: Backend) -> Adapter:
        """Copy to a backend."""
        layers = tuple(
            {role: replace(pair, a=backend.weight(pair.a), b=backend.weight(pair.b)) for role, pair in layer.items()}
            for layer in self.layers
        )
        return replace(self, layers=layers)


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Rows [begin, end), sampled rows [first, last) with an adapter."""

    adapter: Adapter
    begin: int
    end: int
    first: int
    last: int

    def sampled(self) -> AdaptedRows:
        return AdaptedRows(self.adapter, self.first, self.last, self.first, self.last)
