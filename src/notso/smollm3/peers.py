"""Another engine on the same file, measured in turns with ours: llama.cpp, where llama-cpp-python is installed.

The peer runs in a process of its own, kept loaded between measurements, under whatever interpreter has it. It is never
needed to run or test this project.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from notso.smollm3.errors import EngineError, InvalidRequestError

PEER_PYTHON_VARIABLE = "NOTSO_PEER_PYTHON"
PEERS = ("llama.cpp",)

# Speaks JSON lines: {"prefill": tokens} or {"decode": count, "depth": tokens} in, {"seconds": s} out.
_WORKER = """
import json, random, sys, time
import llama_cpp
path, context, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
model = llama_cpp.Llama(path, n_ctx=context, n_batch=512, n_ubatch=512, n_threads=threads, n_threads_batch=threads,
                        verbose=False)
limit = model.n_vocab() - 512
draw = lambda n: [random.randrange(limit) for _ in range(n)]
def timed(ids):
    started = time.perf_counter()
    model.eval(ids)
    return time.perf_counter() - started
timed(draw(8))
print(json.dumps({"version": llama_cpp.__version__}), flush=True)
for line in sys.stdin:
    task = json.loads(line)
    model.reset()
    if "prefill" in task:
        seconds = timed(draw(task["prefill"]))
    else:
        timed(draw(max(task["depth"], 8)))
        seconds = sum(timed(draw(1)) for _ in range(task["decode"]))
    print(json.dumps({"seconds": seconds}), flush=True)
"""


class LlamaCpp:
    """llama.cpp with a model loaded. Its AMX and repacked paths are its own choice, as its build decides."""

    name = "llama.cpp"

    def __init__(self, path: Path, context_tokens: int, threads: int) -> None:
        """Load `path`. Raises InvalidRequestError where no interpreter has llama_cpp, EngineError if loading fails."""
        python = os.environ.get(PEER_PYTHON_VARIABLE) or sys.executable
        probe = [python, "-c", "import llama_cpp"]
        try:
            found = subprocess.run(probe, capture_output=True, check=False).returncode == 0
        except OSError:
            found = False
        if not found:
            raise InvalidRequestError(
                f"llama-cpp-python is not installed here; install it, or set {PEER_PYTHON_VARIABLE} to an interpreter "
                "that has it",
                param="compare",
            )
        command = [python, "-c", _WORKER, str(path), str(context_tokens), str(threads)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        self.version = str(self._answer()["version"])

    def prefill_seconds(self, tokens: int) -> float:
        """Seconds to read a random prompt of `tokens`."""
        return float(self._ask({"prefill": tokens})["seconds"])

    def decode_seconds(self, count: int, depth: int) -> float:
        """Seconds for `count` single-token steps after `depth` tokens."""
        return float(self._ask({"decode": count, "depth": depth})["seconds"])

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _ask(self, task: dict[str, int]) -> dict[str, Any]:
        requests = self._process.stdin
        if requests is None:
            raise EngineError("the peer is not running")
        try:
            requests.write(json.dumps(task) + "\n")
            requests.flush()
        except OSError as error:
            raise EngineError("the peer ended before it answered") from error
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            self.close()
            raise EngineError("the peer ended before it answered; it may lack memory or not know this model")
        answer: dict[str, Any] = json.loads(line)
        return answer
