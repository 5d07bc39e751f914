"""Create a new plugin from a template with examples and a passing test."""

from __future__ import annotations

import keyword
import pkgutil
import sys
from pathlib import Path

from notso.plugins.errors import PluginError
from notso.plugins.loading import list_installed
from notso.plugins.offers import NAME

TEMPLATE = Path(__file__).parent / "template"


def write_plugin(name: str, folder: Path) -> list[Path]:
    """Create `folder` with a new plugin; return its files. Raises PluginError or OSError."""
    # The plugin's name becomes part of a distribution's name, in which pip would replace underscores and repeated
    # dashes.
    if not NAME.fullmatch(name) or "_" in name or name.endswith("-") or "--" in name:
        raise PluginError(
            f"a plugin's name must begin with a letter and consist of up to 32 lowercase letters, digits and single "
            f"dashes, not {name[:40]!r}",
            plugin=name,
        )
    module = name.replace("-", "_")
    if (reason := _name_conflict(name, module)) is not None:
        raise PluginError(f"a plugin cannot be named {name!r}: {reason}; choose another name", plugin=name)
    folder.mkdir(parents=True)
    written = []
    for source in sorted(TEMPLATE.glob("*.txt")):
        target = folder / (f"{module}.py" if source.stem == "plugin.py" else source.stem)
        text = source.read_text("utf-8").replace("@name@", name).replace("@module@", module)
        target.write_text(text, "utf-8")
        written.append(target)
    return written


def _name_conflict(name: str, module: str) -> str | None:
    if keyword.iskeyword(module):
        return "it is a Python keyword"
    if name in {each.name for each in list_installed()}:
        return "a plugin of that name is already installed"
    if (
        module in sys.stdlib_module_names
        or module in _TAKEN
        or module in {each.name for each in pkgutil.iter_modules()}
    ):
        return "it would hide an existing module of that name"
    return None


# Modules that the new project or its tests use. A plugin's module cannot have such a name, even if none is installed.
_TAKEN = frozenset({"notso", "pytest", "test_plugin", "setup", "conftest"})
