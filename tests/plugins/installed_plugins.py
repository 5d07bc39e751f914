"""Make test plugins appear installed: a folder with modules and the metadata of a distribution."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from notso.plugins.process import Plugins

HERE = Path(__file__).parent
NAMES = {
    **{name: f"hostile_plugin:{name.upper()}" for name in ("kind", "doorman", "raises", "hangs", "spins")},
    **{name: f"hostile_plugin:{name.upper()}" for name in ("prints", "floods", "leaves", "tells", "rows")},
    **{name: f"false_plugin:{name.upper()}" for name in ("mistaken", "forger")},
    "unloadable": "hostile_import:PLUGIN",
    "never-loads": "stuck_import:PLUGIN",
    "no-plugin": "hostile_plugin:NO_PLUGIN",
}


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, names: dict[str, str] = NAMES, modules: Path = HERE) -> None:
    """Make the plugins known to this process and to processes that it starts."""
    metadata = folder / "installed" / "hostile_plugins-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: hostile-plugins\nVersion: 1.0\n")
    rows = "".join(f"{name} = {where}\n" for name, where in names.items())
    (metadata / "entry_points.txt").write_text(f"[notso.plugins]\n{rows}")
    monkeypatch.syspath_prepend(str(metadata.parent))
    paths = [str(metadata.parent), str(modules), os.environ.get("PYTHONPATH", "")]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))


@contextmanager
def running(folder: Path, monkeypatch: pytest.MonkeyPatch, *names: str) -> Iterator[Plugins]:
    """Start the plugins with these names, and wait until each is on or off."""
    install(folder, monkeypatch)
    plugins = Plugins(names)
    plugins.start()
    plugins.wait()
    try:
        yield plugins
    finally:
        plugins.close()
