"""Claude Code, Codex and opencode: each reads a file of a scratch repository and writes another from it."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import subprocess
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PLACE = Path(os.environ.get("NOTSO_AGENTS", Path(__file__).parents[3] / "build/npm-agents"))
NOBODY = "http://127.0.0.1:9"
"""Where nobody listens: whatever an agent asks of other hosts is refused at once."""

MODEL = "scripted"

pytestmark = [
    pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed"),
    pytest.mark.skipif(not (PLACE / "node_modules").exists(), reason="npm is not installed, or could not install them"),
]


@dataclass(frozen=True)
class Agent:
    """`program`: what is run, for this system, in node_modules. `arguments`: without the prompt, which it reads.
    `settings` writes what it is told into its home, and gives its environment. `steps`: by its own tools."""

    program: str
    arguments: tuple[str, ...]
    settings: Callable[[str, Path], Mapping[str, str]]
    steps: Callable[[Path], list[dict[str, Any]]]


def claude_code(address: str, home: Path) -> Mapping[str, str]:
    return {
        "ANTHROPIC_BASE_URL": address,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": MODEL,
        "ANTHROPIC_DEFAULT_HAIKU_MODEL": MODEL,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def codex(address: str, home: Path) -> Mapping[str, str]:
    (home / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_provider = "ours"\ncheck_for_update_on_startup = false\n'
        f'[model_providers.ours]\nname = "ours"\nbase_url = "{address}/v1"\nwire_api = "responses"\n'
        "[analytics]\nenabled = false\n"
    )
    return {"CODEX_HOME": str(home)}


def opencode(address: str, home: Path) -> Mapping[str, str]:
    provider = {"npm": "@ai-sdk/openai-compatible", "options": {"baseURL": f"{address}/v1"}, "models": {MODEL: {}}}
    config = {"provider": {"ours": provider}, "model": f"ours/{MODEL}", "autoupdate": False, "share": "disabled"}
    (home / "opencode.json").write_text(json.dumps(config))
    return {"OPENCODE_CONFIG": str(home / "opencode.json"), "OPENCODE_DISABLE_MODELS_FETCH": "1"}


def by_files(read: str, write: str, path: str) -> Callable[[Path], list[dict[str, Any]]]:
    return lambda scratch: [
        {"name": read, "arguments": {path: str(scratch / "census.txt")}},
        {"name": write, "arguments": {path: str(scratch / "answer.txt"), "content": "[[]]\n"}},
    ]


def by_shell(scratch: Path) -> list[dict[str, Any]]:
    commands = ("cat census.txt", "echo '[[]]' > answer.txt")
    return [{"name": "exec_command", "arguments": {"cmd": command}} for command in commands]


AGENTS = {
    "claude-code": Agent(
        "@anthropic-ai/claude-code-*/claude",
        ("-p", "--allowedTools=Read,Write"),
        claude_code,
        by_files("Read", "Write", "file_path"),
    ),
    "codex": Agent(
        "@openai/codex-*/vendor/*/bin/codex",
        ("exec", "--dangerously-bypass-approvals-and-sandbox"),
        codex,
        by_shell,
    ),
    "opencode": Agent("opencode-*/bin/opencode", ("run",), opencode, by_files("read", "write", "filePath")),
}


def refusals(address: str) -> list[str]:
    """What the server counted of requests that it did not answer, but for those before it was ready."""
    with urllib.request.urlopen(f"{address}/metrics") as answer:
        counted = answer.read().decode()
    return re.findall(r'^notso_http_requests_total\{.*route="(?!/health).*status="[45].*', counted, re.MULTILINE)


@pytest.mark.parametrize("name", AGENTS)
def test_a_task_of_two_steps(scripted: str, name: str, tmp_path: Path) -> None:
    agent, home, scratch, temporary = AGENTS[name], tmp_path / "home", tmp_path / "scratch", tmp_path / "tmp"
    program = max((PLACE / "node_modules").glob(agent.program), default=None)  # the one for any CPU is the last
    if program is None:
        pytest.skip(f"{name} has no program for this machine")
    home.mkdir()
    temporary.mkdir()
    subprocess.run(["git", "init", "-q", str(scratch)], check=True)
    inhabitants = str(secrets.randbelow(10**12))
    (scratch / "census.txt").write_text(f"In Vienna live [[{inhabitants}]] people.\n")
    refused = refusals(scripted)
    own = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(temporary)}
    ran = subprocess.run(
        [str(program), *agent.arguments],
        input=f"How many live in Vienna? Steps: {json.dumps(agent.steps(scratch))}",
        cwd=scratch,
        env={**own, "HTTPS_PROXY": NOBODY, "NO_PROXY": "127.0.0.1", **agent.settings(scripted, home)},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (scratch / "answer.txt").read_text() == f"{inhabitants}\n", ran.stdout + ran.stderr
    assert "You said: " in ran.stdout  # with what the second tool answered
    assert refusals(scripted) == refused  # by its defaults: nothing was sent again without what we refuse
