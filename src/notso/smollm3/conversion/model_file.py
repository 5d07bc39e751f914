"""Atomic creation of a model file, validated before it replaces the target."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from notso.qtensor import GGUFFile, GGUFWriter
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.model.weights import SmolLM3Weights


@contextmanager
def new_model_file(out: Path) -> Iterator[GGUFWriter]:
    """Yield a writer, then validate and publish the file. Raises ModelFileError or OSError."""
    unchecked = out.with_name(f".{out.name}.{os.getpid()}.new")
    writer = GGUFWriter(unchecked)
    try:
        yield writer
        writer.write()
        with GGUFFile.open(unchecked) as made:  # validates as any reader does
            SmolLM3Weights.from_tensors(made.tensors, SmolLM3Config.from_metadata(made.metadata))
        unchecked.replace(out)
    finally:
        unchecked.unlink(missing_ok=True)
