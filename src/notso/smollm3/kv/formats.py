"""What the formats of the cache under 8 bits have beside them: they are read after a Hadamard rotation and through a
codebook, and the first tile of a sequence and those still being written are kept in k8v8 (performance: attention sinks
and the recent window).
"""

from __future__ import annotations

from notso.qtensor import KV_FORMATS as KV_FORMATS
from notso.qtensor import KVFormat as KVFormat

WINDOW_FORMAT: KVFormat = "k8v8"
