"""Control a peer's process."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeAlias

from notso.smollm3.errors import EngineError, InvalidRequestError

PYTHON_VARIABLE = "NOTSO_PEER_PYTHON"
MODEL_VARIABLE = "NOTSO_OPENVINO_MODEL"

PEERS = {"llama.cpp": "llama_cpp", "openvino": "openvino_genai"}

_PACKAGES = {"llama.cpp": "llama-cpp-python", "openvino": "openvino-genai"}
_WORKER = Path(__file__).with_name("worker.py")

SHORT_S = 2.0

# ("prefill", tokens, depth), ("decode", tokens, depth) or ("batch", tokens, sequences). depth: number of tokens that
# are already in the context.
Task: TypeAlias = tuple[str, int, int]


class PeerProcess:
    """A peer with a loaded model. Each task runs in the fastest configuration that `tune` found for it."""

    def __init__(self, name: str, model: Path, context_tokens: int, threads: int) -> None:
        """Load `model` (openvino: the folder in NOTSO_OPENVINO_MODEL). Raises InvalidRequestError or EngineError."""
        if name not in PEERS:
            raise InvalidRequestError(f"engine {name!r} is not supported; choices: {', '.join(PEERS)}", param="compare")
        self.name = name
        python = os.environ.get(PYTHON_VARIABLE) or sys.executable
        _require_module(python, name)
        if name == "openvino":
            model = _openvino_folder()
        command = [python, str(_WORKER), name, str(model), str(context_tokens), str(threads)]
        # The worker exits when its standard input closes, so it does not outlive this process.
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            greeting = self._read_result()
        except BaseException:
            self.close()
            raise
        self.version = str(greeting["version"])
        self.load_s = float(greeting["load_s"])
        self.configurations = [str(name) for name in greeting["configurations"]]
        self._chosen: dict[Task, int] = {}

    def tune(self, tasks: Iterable[Task]) -> None:
        """Choose each task's fastest configuration. Raises EngineError if a task fails in all configurations."""
        tasks = list(tasks)
        best: dict[Task, float] = {}
        for configuration in range(len(self.configurations)):
            for task in tasks:
                try:
                    seconds = self._best_time(task, configuration)
                except _TaskRejectedError:
                    continue
                if seconds < best.get(task, float("inf")):
                    best[task], self._chosen[task] = seconds, configuration
            if configuration not in self._chosen.values():
                self._send_task({"task": "clear", "configuration": configuration})
        for configuration in set(range(len(self.configurations))) - set(self._chosen.values()):
            self._send_task({"task": "clear", "configuration": configuration})
        if failed := set(tasks) - set(self._chosen):
            raise EngineError(f"{self.name} could not run: {', '.join(kind for kind, _, _ in sorted(failed))}")

    def measure(self, task: Task) -> list[float]:
        """Return the duration of each step in seconds. Raises EngineError."""
        return self._measure(task, self._chosen.get(task, 0))

    def configuration(self, task: Task) -> str:
        return self.configurations[self._chosen.get(task, 0)]

    @property
    def pid(self) -> int:
        return self._process.pid

    def resident_mb(self) -> float:
        return float(self._send_task({"task": "memory"})["rss_mb"])

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):  # `close` fails if a task in the buffer cannot be sent
                    stream.close()

    def __enter__(self) -> PeerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _best_time(self, task: Task, configuration: int) -> float:
        seconds = sum(self._measure(task, configuration))
        # Short tasks run twice, because an interruption could distort a single run.
        return seconds if seconds > SHORT_S else min(seconds, sum(self._measure(task, configuration)))

    def _measure(self, task: Task, configuration: int) -> list[float]:
        kind, tokens, last = task
        size = {"sequences": last} if kind == "batch" else {"depth": last}
        result = self._send_task({"task": kind, "tokens": tokens, "configuration": configuration, **size})
        return [float(seconds) for seconds in result["seconds"]]

    def _send_task(self, task: dict[str, Any]) -> dict[str, Any]:
        tasks = self._process.stdin
        if tasks is None:
            raise EngineError(f"{self.name} is not running")
        try:
            tasks.write(json.dumps(task) + "\n")
            tasks.flush()
        except OSError as error:
            raise EngineError(f"{self.name} exited unexpectedly") from error
        return self._read_result()

    def _read_result(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            self.close()
            raise EngineError(
                f"{self.name} exited unexpectedly; it may not have enough memory for this model, or may not support it"
            )
        result: dict[str, Any] = json.loads(line)
        if "error" in result:
            raise _TaskRejectedError(f"{self.name}: {result['error']}")
        return result


class _TaskRejectedError(EngineError):
    pass


def _require_module(python: str, name: str) -> None:
    probe = [python, "-c", f"import {PEERS[name]}"]
    try:
        found = subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except OSError:
        found = False
    if not found:
        raise InvalidRequestError(
            f"{_PACKAGES[name]} is not installed; install it, or set {PYTHON_VARIABLE} to a Python interpreter that "
            "has it",
            param="compare",
        )


def _openvino_folder() -> Path:
    folder = Path(os.environ.get(MODEL_VARIABLE, ""))
    if not (folder / "openvino_model.xml").is_file():
        raise InvalidRequestError(
            f"OpenVINO cannot read GGUF files; set {MODEL_VARIABLE} to a folder from benchmarks/openvino_model.py",
            param="compare",
        )
    return folder
