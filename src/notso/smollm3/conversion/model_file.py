"""A model file that appears whole, once it opens as any other does, or not at all."""

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
    """A writer for entries and tensors; what it was given is written at the end, and takes `out`'s place.

    Raises ModelFileError where it is no SmolLM3, and OSError where writing fails.
    """
    unchecked = out.with_name(f".{out.name}.{os.getpid()}.new")
    writer = GGUFWriter(unchecked)
    try:
        yield writer
        writer.write()
        with GGUFFile.open(unchecked) as made:  # as anybody will
            SmolLM3Weights.from_tensors(made.tensors, SmolLM3Config.from_metadata(made.metadata))
        unchecked.replace(out)
    finally:
        unchecked.unlink(missing_ok=True)
