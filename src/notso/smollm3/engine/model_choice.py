"""Choice of the model file that a program names."""

from __future__ import annotations

from pathlib import Path

from notso.smollm3.errors import ModelFileError
from notso.smollm3.hub.registry import demo_path, resolve_model

DEMO = "demo"


def model_path(model: str | None) -> Path:
    """Return the file of a path, a name of `notso list` or a Hugging Face folder; None: the demo.

    A folder is converted once and kept in the user's cache folder. Raises ModelFileError for an unknown
    name, and what `convert` raises.
    """
    if model is None:
        return demo_path()
    if not model:
        raise ModelFileError("the name of the model is empty")
    path = Path(model).expanduser()
    if (path / "config.json").is_file():
        from notso.smollm3.conversion.kept_conversion import kept_conversion  # loaded for folders only

        return kept_conversion(path)
    if path.exists() or path.is_absolute() or path.suffix == ".gguf":
        return path  # a path rather than a name: opening it tells what is wrong
    return resolve_model(model) or demo_path()


def is_demo(model: str | None) -> bool:
    """Return whether the bundled model is named."""
    return model is None or (model.lower() == DEMO and not Path(model).exists())
