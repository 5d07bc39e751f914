"""Migrate the weights, layer by layer, from the memory-mapped file to huge pages, which are faster to read.

A background thread copies each layer and, if requested, packs the copy (rearranges it for the kernels). Between
steps, the engine replaces the layer with its copy and releases its mapped pages, so that at most one layer is in memory
twice. Results do not change.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from notso.qtensor import Backend, GGUFFile, QTensorError, Weight, WeightArena
from notso.smollm3.errors import InvalidRequestError
from notso.smollm3.model.weights import MATRICES, READ_TOGETHER, LayerWeights, SmolLM3Weights

# "auto" leaves smaller files mapped, because they stay in CPU caches or are read quickly.
WORTHWHILE_BYTES = 256 << 20

# Memory that must remain free if "auto" copies the weights: a layer's mapped pages and its copy are both in memory
# until the pages are released.
SPARE_BYTES = 1 << 30

_log = logging.getLogger(__name__)

_HEAD = -1  # layer index that stands for the embeddings and a tied output head


class WeightPlacement:
    """Copies weight matrices in the background."""

    def __init__(
        self,
        file: GGUFFile,
        weights: SmolLM3Weights,
        wake: Callable[[], None],
        backend: Backend,
        *,
        requested: str,
    ) -> None:
        """Raises InvalidRequestError for an unsupported placement."""
        # wake: called by the copying thread when a copy is ready to be adopted.
        self._is_requested = requested in ("packed", "hugepages")
        if self._is_requested and not backend.has_weight_arena:
            message = "huge pages are not available on this system or GPU; use weights=mmap"
            raise InvalidRequestError(message, param="weights")
        self._file = file
        self._wake = wake
        self._backend = backend
        self._layout = "hugepages"
        self._ready: deque[tuple[int, LayerWeights | Weight]] = deque()
        self._stopping = threading.Event()
        self._copy_adopted = threading.Event()
        self._total = len(weights.layers) + 1
        self._adopted = 0
        self.finished = threading.Event()
        self._thread: threading.Thread | None = None
        size = sum(tensor.nbytes for tensor in file.tensors.values())
        if requested == "mmap" or (requested == "auto" and not _is_copy_worthwhile(size, backend)):
            self.finished.set()
            return
        self._thread = threading.Thread(
            target=self._copy_all, args=(weights, size, len(file.tensors)), name="notso-weights", daemon=True
        )

    def start(self) -> None:
        if self._thread is not None:
            self._thread.start()

    @property
    def state(self) -> str:
        """Current placement: "mmap", "40 % copied to huge pages", "packed", or "hugepages" (in the file's layout)."""
        if self._adopted == self._total:
            return self._layout
        if self.finished.is_set():
            return "mmap"
        return f"{100 * self._adopted // self._total} % copied to huge pages"

    def stop(self) -> None:
        """Stop copying; adopted layers stay in use."""
        self._stopping.set()
        if self._thread is not None and self._thread.ident is not None:
            self._thread.join()
        self.finished.set()

    def adopt(self, weights: SmolLM3Weights) -> SmolLM3Weights | None:
        """Return `weights` with newly copied layers, or None if there are none. Must be called between steps."""
        if not self._ready:
            return None
        layers = list(weights.layers)
        while self._ready:
            index, copy = self._ready.popleft()
            if isinstance(copy, LayerWeights):
                old = [getattr(layers[index], name) for name in MATRICES]
                layers[index] = copy
            else:
                old = [weights.embed_tokens]
                tied = weights.lm_head is weights.embed_tokens
                weights = replace(weights, embed_tokens=copy, lm_head=copy if tied else weights.lm_head)
            for weight in old:
                self._file.release(self._file.tensors[weight.name])
            self._adopted += 1
        self._copy_adopted.set()
        if self._adopted == self._total:
            self.finished.set()
        return replace(weights, layers=tuple(layers))

    def _copy_all(self, weights: SmolLM3Weights, size: int, count: int) -> None:
        try:
            arena = self._backend.weight_arena(size, count, is_requested=self._is_requested)
            if arena is None:
                self.finished.set()
                return
            for index, layer in enumerate(weights.layers):
                if self._stopping.is_set():
                    return
                self._publish_copy(index, _copy_layer(layer, arena))
            (embed_tokens,) = arena.copy(weights.embed_tokens)
            self._layout = arena.layout
            self._publish_copy(_HEAD, embed_tokens)
        except (QTensorError, MemoryError) as error:
            _log.warning("weights stay in the mapped file: %s", error)
            self.finished.set()

    def _publish_copy(self, index: int, copy: LayerWeights | Weight) -> None:
        # Waits until the copy is adopted: the memory plan has room for the copy of only one layer at a time.
        self._ready.append((index, copy))
        self._wake()
        while self._ready and not self._stopping.is_set():
            self._copy_adopted.wait(0.05)
            self._copy_adopted.clear()
            self._wake()


def _copy_layer(layer: LayerWeights, arena: WeightArena) -> LayerWeights:
    # The norms, a few kilobytes, are not copied. Matrices are placed in the order in which a step reads them.
    copies = [copy for names in READ_TOGETHER for copy in arena.copy(*(getattr(layer, name) for name in names))]
    return replace(layer, **dict(zip(MATRICES, copies, strict=True)))


def _is_copy_worthwhile(size_bytes: int, backend: Backend) -> bool:
    enough = backend.memory().available_bytes >= size_bytes + SPARE_BYTES
    return size_bytes >= WORTHWHILE_BYTES and backend.has_weight_arena and enough
