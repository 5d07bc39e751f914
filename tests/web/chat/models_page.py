"""Helpers for tests of the models page: reading the page, and engines with a given name."""

from __future__ import annotations

import dataclasses
import re
from html import unescape
from pathlib import Path
from typing import Any

from scripted_engine import ScriptedEngine


def text_of(html: str) -> str:
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", html)).split())


def two_files(folder: Path) -> Path:
    """Create the folder with two files that look like models."""
    folder.mkdir()
    for name in ("one-Q4_K_M.gguf", "two-Q8_0.gguf"):
        (folder / name).write_bytes(b"GGUF" + name.encode())
    return folder


def page(server: Any, path: str = "/models") -> str:
    answer = server.client.get(path)
    assert answer.status_code == 200
    return str(answer.text)


def named(name: str, path: Path | str = "") -> ScriptedEngine:
    engine = ScriptedEngine(is_demo=not path)
    engine.info = dataclasses.replace(engine.info, name=name, path=str(path))
    return engine
