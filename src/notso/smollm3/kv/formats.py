"""KV formats; those under 8 bits are read through a Hadamard rotation and a codebook.

Beside a low-bit format, the first tile of a sequence (attention sinks) and the tiles being written are kept in k8v8.
"""

from __future__ import annotations

from notso.qtensor import KV_FORMATS as KV_FORMATS
from notso.qtensor import KVFormat as KVFormat

WINDOW_FORMAT: KVFormat = "k8v8"
