"""Low-rank adapters beside a model's weights: y = W x + B (A x), with W as the file has it.

Nothing is merged, so that the base stays quantised and many adapters share it, also within one step.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from notso.qtensor import Backend, Weight

MAX_RANK = 512
"""Memory of a step is made for it."""


@dataclass(frozen=True, slots=True)
class LowRank:
    """What is added to one matrix (outputs, inputs): a (rank, inputs), which has the scale in it, and b (outputs,
    rank). Both are floats."""

    a: Weight
    b: Weight
    rank: int  # a multiple of adapter_file.RANK_STEP


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter as it is multiplied with. `digest`: of all its numbers. `layers`: of each layer the matrices that it
    changes, by their names in `LayerWeights`."""

    name: str
    digest: bytes
    nbytes: int
    rank: int  # the largest that its file has
    layers: tuple[Mapping[str, LowRank], ...]

    def on(self, backend: Backend) -> Adapter:
        """The same where this backend reads it."""
        layers = tuple(
            {role: replace(pair, a=backend.weight(pair.a), b=backend.weight(pair.b)) for role, pair in layer.items()}
            for layer in self.layers
        )
        return replace(self, layers=layers)


@dataclass(frozen=True, slots=True)
class AdaptedRows:
    """Rows [begin, end) of a step are computed with an adapter; of the sampled ones those in [first, last)."""

    adapter: Adapter
    begin: int
    end: int
    first: int
    last: int

    def sampled(self) -> AdaptedRows:
        """The same of a step that is nothing but the sampled rows."""
        return AdaptedRows(self.adapter, self.first, self.last, self.first, self.last)
