"""Template of a new plugin: a project with one of everything and a passing test."""

from __future__ import annotations

from pathlib import Path

from notso.plugins.errors import PluginError
from notso.plugins.plugin_set import NAME

TEMPLATE = Path(__file__).parent / "template"


def write_plugin(name: str, folder: Path) -> list[Path]:
    """Create `folder` and return the files. Raises PluginError or OSError."""
    if not NAME.fullmatch(name) or name.endswith("-"):
        raise PluginError(
            f"a plugin's name has up to 32 small letters, digits and dashes, not {name[:40]!r}", plugin=name
        )
    module = name.replace("-", "_")
    folder.mkdir(parents=True)
    written = []
    for source in sorted(TEMPLATE.glob("*.txt")):
        target = folder / (f"{module}.py" if source.stem == "plugin.py" else source.stem)
        text = source.read_text("utf-8").replace("@name@", name).replace("@module@", module)
        target.write_text(text, "utf-8")
        written.append(target)
    return written
