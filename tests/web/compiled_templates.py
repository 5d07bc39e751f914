"""The pages' templates compiled once per process: compiling them anew for each server takes longer than most tests."""

from __future__ import annotations

from functools import partial
from types import CodeType

from jinja2 import Environment
from jinja2.bccache import Bucket, BytecodeCache

from notso.web.chat import templates


class _Compiled(BytecodeCache):
    def __init__(self) -> None:
        self._codes: dict[tuple[str, str], CodeType] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        bucket.code = self._codes.get((bucket.key, bucket.checksum))

    def dump_bytecode(self, bucket: Bucket) -> None:
        assert bucket.code is not None
        self._codes[bucket.key, bucket.checksum] = bucket.code


def share_compiled_templates() -> None:
    """Let all servers of this process share them."""
    templates.Environment = partial(Environment, bytecode_cache=_Compiled())  # type: ignore[misc,assignment]
