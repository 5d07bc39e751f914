"""Modules that only describe an engine import quickly: values, errors and the store's protocol do not import arrays."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAVY = ("numpy", "notso.qtensor._native", "tokenizers", "jinja2", "huggingface_hub", "llguidance")


def loaded_by(statement: str) -> set[str]:
    """Return the modules that are loaded after a statement in a new interpreter."""
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module",
    ["notso.smollm3", "notso.web.store.protocol", "notso.web.engine.port"],
)
def test_module_imports_no_heavy_dependencies(module: str) -> None:
    assert not loaded_by(f"import {module}") & set(HEAVY)


def test_document_parsers_are_imported_only_by_the_child() -> None:
    assert not loaded_by("import notso.web.chat.files.documents") & {"notso.documents.kinds", "xml.parsers.expat"}
    assert "notso.documents.kinds" in loaded_by("import notso.documents.child")


def test_confined_children_import_no_event_loop_and_no_plugins() -> None:
    """Only the server needs these. They would take three quarters of each child's startup time."""
    rendering = "notso.web.rendering.html_preview, notso.web.rendering.mathml"
    loaded = loaded_by(f"import notso.web.chat.files.import_process, {rendering}, notso.web.tools.page_text")
    assert not loaded & {"asyncio", "notso.plugins.process", "importlib.metadata"}


def test_public_names_are_loaded_lazily() -> None:
    assert "numpy" in loaded_by("from notso.smollm3 import Engine")
    light = loaded_by("from notso.smollm3 import pull, local_models")
    assert "notso.smollm3.hub.download" in light and "numpy" not in light


def test_every_public_name_exists() -> None:
    program = (
        "import notso.smollm3 as model\n"
        "assert all(getattr(model, name) is not None for name in model.__all__)\n"
        "assert not hasattr(model, 'no_such_name')"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
