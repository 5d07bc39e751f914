"""What the loaded model is and occupies, at this moment, for people."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from notso.smollm3 import EngineStats, ModelInfo, ProcessMemory, process_memory
from notso.web.engine.host import EngineHost
from notso.web.values.wording import ordinal, words


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """`info` says what does not change, `stats` and `memory` what does."""

    info: ModelInfo
    stats: EngineStats
    memory: ProcessMemory

    @property
    def layers_without_rope(self) -> str:
        """Counted from 1, in as few words as they allow: `every 4th (9 of 36)`."""
        layers = sorted(layer + 1 for layer in self.info.layers_without_rope)
        steps = {after - before for before, after in itertools.pairwise(layers)}
        named = ", ".join(map(str, layers))
        if len(steps) == 1 and steps == {layers[0]}:
            named = words["model_every"].format(nth=ordinal(layers[0]))
        share = words["model_share"].format(count=len(layers), total=self.info.num_hidden_layers)
        return f"{named} ({share})" if layers else ""

    @property
    def cache_percent(self) -> int:
        """How much of the cache running answers and remembered prompts hold."""
        stats = self.stats
        return 100 * (stats.kv_blocks_used + stats.kv_blocks_cached) // stats.kv_blocks if stats.kv_blocks else 0


def model_facts(engine: EngineHost) -> ModelFacts | None:
    """None while no model is loaded."""
    info, stats = engine.info, engine.stats()
    if info is None or stats is None:
        return None
    return ModelFacts(info, stats, process_memory())
