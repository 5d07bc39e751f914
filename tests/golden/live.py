"""Run `oracle.py` with a Python that has the libraries: this one, or NOTSO_ORACLE_PYTHON."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt

PYTHON_VARIABLE = "NOTSO_ORACLE_PYTHON"
MODULES = {
    "transformers": ("torch", "transformers", "gguf"),
    "llama_cpp": ("llama_cpp",),
    "peft": ("torch", "transformers", "gguf", "peft"),
}
TIMEOUT_S = 900


@dataclass(frozen=True, slots=True, eq=False)
class OracleLogits:
    """`lists` are the token ids, including greedy ones; `logits` are float32 (total length of the lists, V)."""

    lists: list[list[int]]
    logits: npt.NDArray[np.float32]


@cache
def versions(library: str) -> str | None:
    """Return name and version of a library and its dependencies, or None if it is not installed."""
    names = MODULES[library]
    code = f"import {', '.join(names)}; from importlib.metadata import version as v; "
    code += "packages = [name.replace('_cpp', '-cpp-python') for name in " + repr(names) + "]; "
    code += "print(*(f'{name} {v(name)}' for name in packages), sep=', ')"
    done = subprocess.run([_python(), "-c", code], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def why_missing(library: str) -> str:
    """Return a message for a library that is not installed."""
    wanted = ", ".join(MODULES[library])
    return f"{wanted} not installed for {Path(_python()).name}; {PYTHON_VARIABLE} may name another Python"


def ask(library: str, model: Path, lists: Sequence[Sequence[int]], *options: str) -> OracleLogits:
    """Run token lists with a library. `options` are those of `oracle.py`. Raises RuntimeError if it fails."""
    with TemporaryDirectory() as folder:
        job, out = Path(folder, "job.npz"), Path(folder, "out.npz")
        joined = np.concatenate([np.asarray(ids, np.int32) for ids in lists])
        np.savez(job, ids=joined, lengths=np.array([len(ids) for ids in lists], np.int32))
        _run(library, str(model), str(job), str(out), *options)
        with np.load(out) as result:
            parts = np.split(result["ids"], np.cumsum(result["lengths"])[:-1])
            return OracleLogits([part.tolist() for part in parts], result["logits"])


def rope_of_the_3b() -> dict[str, npt.NDArray[np.floating]]:
    """Return the 3B's rotation frequencies in transformers: `plain` and `yarn` (64,), `plain_factor`, `yarn_factor`."""
    with TemporaryDirectory() as folder:
        _run("rope", str(Path(folder, "out.npz")))
        with np.load(Path(folder, "out.npz")) as result:
            return dict(result)


def quantize(model: Path, out: Path, file_type: int, importance: dict[str, npt.NDArray[np.float32]] | None) -> None:
    """Quantize a file with llama.cpp. importance: values by tensor, as llama.cpp's own tool measures them."""
    with TemporaryDirectory() as folder:
        named = Path(folder, "importance.npz")
        if importance is not None:
            np.savez(named, **importance)  # type: ignore[arg-type]
        _run("quantize", str(model), str(out), str(file_type), *([str(named)] if importance is not None else []))


def make_file(model: Path, out: Path, name: str) -> None:
    """Have llama.cpp write `model`, in F32, with all matrices in the named block type. Raises RuntimeError."""
    _run("file", str(model), str(out), name, script="llama_cpp_types.py")


def make_blocks(out: Path, names: Sequence[str]) -> None:
    """Have llama.cpp quantize a few blocks of each type (see `llama_cpp_types.py`). Raises RuntimeError."""
    _run("blocks", str(out), *names, script="llama_cpp_types.py")


def _run(*arguments: str, script: str = "oracle.py") -> None:
    # Use one thread, so that other thread pools do not compete for CPUs and sums have a fixed order.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    command = [_python(), str(Path(__file__).with_name(script)), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(arguments[:2])} failed: {done.stderr.strip()[-2000:]}")


def _python() -> str:
    return os.environ.get(PYTHON_VARIABLE) or sys.executable
