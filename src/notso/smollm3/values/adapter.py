"""Adapters: what to load, and facts about loaded ones."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from notso.smollm3.errors import InvalidRequestError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", re.ASCII)


@dataclass(frozen=True, slots=True)
class AdapterSource:
    """Adapter to load: name, GGUF file or PEFT folder, extra scale. Raises InvalidRequestError."""

    name: str
    path: str
    scale: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or _NAME.fullmatch(self.name) is None:
            raise InvalidRequestError(
                "an adapter's name consists of up to 64 letters, digits, dots, dashes and underscores", param="adapters"
            )
        if not isinstance(self.path, str) or not self.path:
            raise InvalidRequestError(f"adapter {self.name} has no file", param="adapters")
        if not isinstance(self.scale, (int, float)) or not math.isfinite(self.scale):
            raise InvalidRequestError(f"the scale of adapter {self.name} must be a number", param="adapters")

    @classmethod
    def parse(cls, text: str) -> AdapterSource:
        """Parse NAME=FILE[:SCALE]. Raises InvalidRequestError."""
        name, equals, rest = text.partition("=")
        if not equals:
            raise InvalidRequestError(f"{text!r} must be NAME=FILE or NAME=FILE:SCALE", param="adapters")
        path, colon, last = rest.rpartition(":")
        try:
            return cls(name, path, float(last)) if colon else cls(name, rest)
        except ValueError as error:
            if isinstance(error, InvalidRequestError):
                raise
            return cls(name, rest)  # the colon is part of the file name

    def __str__(self) -> str:
        return f"{self.name}={self.path}" + ("" if self.scale == 1.0 else f":{self.scale:g}")


@dataclass(frozen=True, slots=True)
class AdapterInfo:
    """A loaded adapter."""

    name: str
    path: str
    scale: float
    rank: int  # the largest of its matrices
    size_bytes: int
    matrices: int
