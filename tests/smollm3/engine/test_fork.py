"""In a forked process, which lacks the engine's threads, every use raises immediately; a spawned process works."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import os, sys
from notso import Engine, EngineError, Message
engine = Engine.load(context_tokens=256)
begun = engine.stream("hello", seed=1, max_tokens=60, ignore_eos=True)
ask = [Message("user", "hello")]
uses = {
    "chat": lambda: engine.chat("hello", max_tokens=2),
    "generate": lambda: list(engine.generate(ask)),
    "stream": lambda: engine.stream("hello"),
    "batch": lambda: engine.batch(["hello"]),
    "continue_text": lambda: engine.continue_text("hello"),
    "submit": lambda: engine.submit(ask),
    "logits": lambda: engine.logits([1, 2]),
    "clear_cache": lambda: engine.clear_cache(),
    "begun": lambda: list(begun),
    "result": lambda: begun.result(),
}
child = os.fork()
if not child:
    for name, use in uses.items():
        try:
            use()
        except EngineError as error:
            assert "fork" in str(error)
            print("raised", name, flush=True)
        except Exception as error:
            print("other", name, repr(error), flush=True)
    begun.close()
    engine.close()
    sys.exit(0)  # with the interpreter's own end, finalizers included
assert os.waitpid(child, 0)[1] == 0
print("parent", begun.result().usage.completion_tokens, engine.chat("hello", max_tokens=2).usage.completion_tokens)
print("uses", len(uses))
"""


def test_engine_use_in_forked_child_raises_instead_of_hanging() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert not [line for line in lines if line.startswith("other")], lines
    assert "parent 60 2" in lines
    assert f"uses {sum(line.startswith('raised') for line in lines)}" in lines


def test_forked_child_can_load_another_engine() -> None:
    program = (
        "import os\n"
        "from notso import Engine\n"
        "engine = Engine.load(context_tokens=256)\n"
        "expected = engine.chat('What is 1 + 2?', temperature=0, thinking=False).text\n"
        "child = os.fork()\n"
        "if not child:\n"
        "    with Engine.load(context_tokens=256) as own:\n"
        "        same = own.chat('What is 1 + 2?', temperature=0, thinking=False).text == expected\n"
        "    os._exit(0 if same else 1)\n"
        "assert os.waitpid(child, 0)[1] == 0\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
