"""Layering rules that import-linter cannot check: the native module, third-party libraries, and dynamic imports."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from architecture.syntax import nodes

from notso import qtensor

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
# Runs as a script in the Python of a peer, which has only the peer's packages, and imports only notso.system.
PEER_WORKER = SOURCE / "notso" / "smollm3" / "diagnostics" / "peers" / "worker.py"
MODULES = sorted(set((SOURCE / "notso").rglob("*.py")) - {PEER_WORKER})

# Third-party modules that each layer may use; the CLI may use all of them.
LIBRARIES = {
    "system": set[str](),  # only the standard library
    "qtensor": {"numpy"},
    "smollm3": {
        "numpy", "tokenizers", "llguidance", "jinja2", "huggingface_hub", "httpx2", "platformdirs", "pydantic",
        "torch", "transformers", "trl", "peft", "datasets",  # imported only by tuning, when it runs
    },
    "web": {
        "fastapi", "starlette", "uvicorn", "pydantic", "jinja2", "markupsafe", "markdown_it", "mdit_py_plugins", "nh3",
        "latex2mathml",
        "pygments", "platformdirs", "uuid_utils", "python_multipart", "prometheus_client", "limits",
        "authlib", "joserfc",  # imported by one module, if an OpenID provider is configured
        "mcp", "anyio", "httpx2",  # imported if MCP servers or a provider are configured
        "opentelemetry",  # imported by one module, if its variables set an address for traces
        "valkey",  # imported by two modules, if an address is configured
        "psycopg", "psycopg_pool",  # likewise, if a database is configured
    },
    "cluster": {"starlette", "ray"},  # ray: imported by three modules, only when it is used
    "documents": {"pypdfium2", "python_calamine"},  # imported in the child process, for PDF and spreadsheets
    "plugins": {"numpy"},  # imported in the plugin's process, for logits
    "cli": {"typer", "rich", "prompt_toolkit", "platformdirs"},
}  # fmt: skip

# Import name -> distribution name, if they differ.
DISTRIBUTIONS = {"markdown_it": "markdown-it-py", "opentelemetry": "opentelemetry-sdk"}


def floor(path: Path) -> str:
    """Return the top-level package, such as qtensor or web, or "" for modules of notso itself."""
    parts = path.relative_to(SOURCE / "notso").parts
    return parts[0] if len(parts) > 1 else ""


def imports(path: Path) -> Iterator[tuple[int, str, tuple[str, ...]]]:
    """Yield (line, module, names) for each import statement, including nested ones; no names for `import module`."""
    for node in nodes(path):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: relative imports hide which layer is imported"
            yield node.lineno, node.module or "", tuple(alias.name for alias in node.names)


@cache
def all_imports() -> list[tuple[Path, int, str, tuple[str, ...]]]:
    return [(path, *found) for path in MODULES for found in imports(path)]


def place(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def test_peer_worker_imports_only_peers_and_notso_system() -> None:
    modules = {module.split(".")[0] for _, module, _ in imports(PEER_WORKER)}
    assert modules - set(sys.stdlib_module_names) == {"llama_cpp", "notso", "numpy", "openvino", "openvino_genai"}
    ours = {module for _, module, _ in imports(PEER_WORKER) if module.startswith("notso")}
    assert all(module.startswith("notso.system.") for module in ours)
    users = {path.name for path, _, module, names in all_imports() if "worker" in {*module.split("."), *names}}
    assert not users


def test_native_module_is_imported_by_one_module_per_device() -> None:
    users = {
        path.name
        for path, _, module, names in all_imports()
        if "_native" in module.split(".") or ("_native" in names and module == "notso.qtensor")
    }
    assert users == {"kernel_choice.py", "driver.py"}


def test_native_functions_are_used_only_by_listed_modules() -> None:
    """Other callers would bypass the checks in ops.py; ceilings.py and huge_pages.py call other functions."""
    users = {
        path.name for path, _, module, names in all_imports() if module.endswith(".kernel_choice") and "native" in names
    }
    assert users == {"ops.py", "ceilings.py", "huge_pages.py"}
    wrong = [str(p) for p in MODULES if "kernel_choice.native" in p.read_text("utf-8")]
    assert not wrong


def test_benchmarks_use_only_public_names_of_qtensor() -> None:
    kernels = {("notso.qtensor.backends.cpu", ("ops",)), ("notso.qtensor.reference", ("kv_cache",))}
    wrong = [
        f"{path.relative_to(ROOT)}:{line} imports {module} {names}"
        for path in sorted((ROOT / "benchmarks").rglob("*.py"))
        for line, module, names in imports(path)
        if (module.startswith("notso.qtensor.") and (module, tuple(names)) not in kernels)
        or (module == "notso.qtensor" and set(names) - set(qtensor.__all__))
    ]
    assert not wrong


@pytest.mark.parametrize("name", LIBRARIES)
def test_layer_imports_only_its_allowed_libraries(name: str) -> None:
    wrong = [
        f"{place(path, line)} imports {module}"
        for path, line, module, _ in all_imports()
        if floor(path) == name
        and (top := module.split(".")[0]) not in sys.stdlib_module_names
        and top not in LIBRARIES[name] | {"notso"}
    ]
    assert not wrong


def test_imported_libraries_are_declared_dependencies() -> None:
    """An undeclared module disappears if the library that depends on it drops it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    extras = project["optional-dependencies"]
    lines = [
        *project["dependencies"],
        *(
            line
            for name in ("documents", "mcp", "oidc", "otel", "postgres", "ray", "tune", "valkey")
            for line in extras[name]
        ),
    ]
    declared = {re.split(r"[<>=!~\[; ]", line)[0].replace("_", "-").lower() for line in lines}
    used = {module.split(".")[0] for _, _, module, _ in all_imports()} - set(sys.stdlib_module_names) - {"notso"}
    missing = {name for name in used if DISTRIBUTIONS.get(name, name).replace("_", "-").lower() not in declared}
    assert not missing, f"imported but not in pyproject.toml's dependencies: {missing}"


def test_qtensor_does_not_import_the_notso_package() -> None:
    """`import notso` loads the model layer through lazy names, which the import graph does not contain."""
    wrong = [
        place(path, line) for path, line, module, _ in all_imports() if floor(path) == "qtensor" and module == "notso"
    ]
    assert not wrong


def test_reference_imports_only_basic_qtensor_modules() -> None:
    allowed = re.compile(r"notso\.qtensor\.(reference|errors|formats|tensor|kv_formats)\b")
    wrong = [
        f"{place(path, line)} imports {module}"
        for path, line, module, _ in all_imports()
        if "reference" in path.parts and module.startswith("notso") and not allowed.match(module)
    ]
    assert not wrong


def test_only_web_cluster_and_async_engine_import_asyncio() -> None:
    users = {path for path, _, module, _ in all_imports() if module.split(".")[0] in ("asyncio", "anyio")}
    strangers = [str(p) for p in users if floor(p) not in ("web", "cluster") and p.name != "async_engine.py"]
    assert not strangers


DYNAMIC = {"__import__", "exec", "eval", "compile"}
LOADS_PLUGINS = SOURCE / "notso" / "plugins" / "loading.py"


def test_no_dynamic_imports_or_code_evaluation() -> None:
    """They would bypass the import contracts, and could execute text from files or requests."""
    wrong = []
    for path in MODULES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in DYNAMIC:
                wrong.append(place(path, node.lineno))
        for line, module, names in imports(path):
            full = {module, *(f"{module}.{name}" for name in names)}
            if path != LOADS_PLUGINS and any(
                name.startswith("importlib.metadata.") and "ntry" in name for name in full
            ):
                wrong.append(place(path, line))
            if full & {"importlib.import_module", "importlib.util", "importlib.machinery", "runpy", "imp", "pickle"}:
                wrong.append(place(path, line))
    assert not wrong


def test_plugins_are_loaded_by_one_module_in_their_own_process() -> None:
    """Only `notso.plugins.child`, in the plugin's process, calls `load`, which executes another distribution's code."""
    loads = [path for path in MODULES if re.search(r"\b(point|entry\w*)\.load\(", path.read_text("utf-8"))]
    assert loads == [LOADS_PLUGINS]
    users = {
        path.relative_to(SOURCE / "notso").as_posix()
        for path, _, module, names in all_imports()
        if module.startswith("notso.plugins")
        and ("loading" in names or (module.endswith("loading") and "load" in names))
    }
    assert users == {"plugins/child.py"}
    child = {
        path.name for path, _, module, names in all_imports() if "child" in names or module.endswith("plugins.child")
    }
    assert not child  # it is run as a program, never imported
    wrong = [p.name for p in MODULES if p != LOADS_PLUGINS and "metadata.entry_points" in p.read_text("utf-8")]
    assert not wrong


def test_source_contains_no_assert_statements() -> None:
    """`python -O` removes assert statements, so errors are raised instead."""
    wrong = [place(path, node.lineno) for path in MODULES for node in nodes(path) if isinstance(node, ast.Assert)]
    assert not wrong


def test_library_layers_do_not_print() -> None:
    wrong = [
        place(path, node.lineno)
        for path in MODULES
        if floor(path) in ("qtensor", "smollm3", "plugins", "web")
        for node in nodes(path)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print"
    ]
    assert not wrong


def test_only_native_bindings_include_python_headers() -> None:
    users = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "native").rglob("*")
        if path.is_file() and re.search(r"#include\s*[<\"](nanobind|Python\.h|pybind)", path.read_text("utf-8"))
    }
    assert users == {f"native/bindings/{name}" for name in ("cpu.cpp", "cuda.cpp", "cuda.h")}


def test_kernels_include_no_library_headers() -> None:
    """Kernel files use neither the STL nor the C library: inlined code is compiled for a single instruction set."""
    allowed = re.compile(r"immintrin\.h|arm_neon\.h|cstdint|cstddef|stdint\.h|stddef\.h")
    wrong = [
        f"{path.relative_to(ROOT)} includes <{header}>"
        for path in (ROOT / "native" / "kernels").rglob("*")
        if path.is_file()
        for header in re.findall(r"#include\s*<([^>]+)>", path.read_text("utf-8"))
        if not allowed.fullmatch(header)
    ]
    assert not wrong


def test_llguidance_is_imported_by_one_module_on_demand() -> None:
    """It is imported only when needed, because most users never use grammars."""
    found = {path.name for path, _, module, _ in all_imports() if module.split(".")[0] == "llguidance"}
    assert found == {"grammar.py"}
    code = "import sys, notso.smollm3; sys.exit('llguidance' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_training_libraries_are_imported_by_two_modules_on_demand() -> None:
    """They are imported only for tuning, because they belong to an extra."""
    libraries = {"torch", "transformers", "trl", "peft", "datasets"}
    found = {path.name for path, _, module, _ in all_imports() if module.split(".")[0] in libraries}
    assert found == {"base_model.py", "trainer.py"}
    code = f"import sys, notso.cli.tune; sys.exit(bool({libraries} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_ray_is_imported_by_three_modules_on_demand() -> None:
    """The command imports them only when needed, because they belong to an extra."""
    found = {path.name for path, _, module, _ in all_imports() if module.split(".")[0] == "ray"}
    assert found == {"batch_pool.py", "control.py", "replica.py"}
    code = "import sys, notso.cli.app, notso.cluster.plan; sys.exit('ray' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_no_possessive_group_ends_with_a_lookaround() -> None:
    """Python 3.11.2, which Debian 12 has, matches such groups wrongly."""
    looks = re.compile(r"\(\?<?[=!](?:[^()\\]|\\.)*\)\)[*+?]\+")
    assert looks.search(r"/\*(?:[^*]|\*(?!/))*+")
    assert not [path.name for path in MODULES if looks.search(path.read_text("utf-8"))]
