"""Claude Code, Codex and opencode: each reads a file of a scratch repository and writes another with its contents."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from recorder import Request, post, recorder

PLACE = Path(os.environ.get("NOTSO_AGENTS", Path(__file__).parents[3] / "build/npm-agents"))
NOBODY = "http://127.0.0.1:9"
"""A port without a listener, so that an agent's requests to other hosts are refused at once."""

MODEL = "scripted"
CONTEXT_TOKENS = 65_536
"""The scripted server's context; without this setting, agents assume a larger one."""

pytestmark = [
    pytest.mark.skipif(shutil.which("git") is None, reason="git is not installed"),
    pytest.mark.skipif(not (PLACE / "node_modules").exists(), reason="npm is not installed, or could not install them"),
]


@dataclass(frozen=True)
class Agent:
    """How to run a coding agent.

    `program`: its path in node_modules for this platform. `arguments`: without the prompt, which it reads from standard
    input. `settings`: writes its configuration into its home and returns its environment. `steps`: calls of its own
    tools.
    """

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
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": str(CONTEXT_TOKENS),
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }


def codex(address: str, home: Path) -> Mapping[str, str]:
    (home / "config.toml").write_text(
        f'model = "{MODEL}"\nmodel_context_window = {CONTEXT_TOKENS}\nmodel_provider = "ours"\n'
        "check_for_update_on_startup = false\n"
        f'[model_providers.ours]\nname = "ours"\nbase_url = "{address}/v1"\nwire_api = "responses"\n'
        "[analytics]\nenabled = false\n"
    )
    return {"CODEX_HOME": str(home)}


def opencode(address: str, home: Path) -> Mapping[str, str]:
    model = {"limit": {"context": CONTEXT_TOKENS, "output": 4096}}
    options = {"baseURL": f"{address}/v1"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": options, "models": {MODEL: model}}
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


def prompt_tokens(told: dict[str, Any]) -> tuple[int, int]:
    """Return the prompt tokens of an answer of any API, and how many of them came from the cache."""
    usage = told["usage"]
    if "cache_read_input_tokens" in usage:
        found = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + found, found
    kind = "input" if "input_tokens" in usage else "prompt"
    return usage[f"{kind}_tokens"], usage[f"{kind}_tokens_details"]["cached_tokens"]


def read_by(address: str, request: Request) -> tuple[int, int]:
    """Send a recorded request to another server, limited to one token; return its prompt tokens as above."""
    limit = "max_output_tokens" if request.path.endswith("/responses") else "max_tokens"
    body = json.loads(request.body) | {"model": "small", "stream": False, "stream_options": None, limit: 1}
    return prompt_tokens(json.loads(post(f"{address}{request.path}", json.dumps(body).encode()).body))


@pytest.mark.parametrize("name", AGENTS)
def test_coding_agent_completes_a_two_step_task(scripted: str, small: str, name: str, tmp_path: Path) -> None:
    agent, home, scratch, temporary = AGENTS[name], tmp_path / "home", tmp_path / "scratch", tmp_path / "tmp"
    # the last match is the program for any CPU
    program = max((PLACE / "node_modules").glob(agent.program), default=None)
    if program is None:
        pytest.skip(f"{name} has no program for this machine")
    home.mkdir()
    temporary.mkdir()
    subprocess.run(["git", "init", "-q", str(scratch)], check=True)
    inhabitants = str(secrets.randbelow(10**12))
    (scratch / "census.txt").write_text(f"In Vienna live [[{inhabitants}]] people.\n")
    own = {"PATH": os.environ["PATH"], "HOME": str(home), "TMPDIR": str(temporary)}
    with recorder(scripted) as (address, requests):
        ran = subprocess.run(
            [str(program), *agent.arguments],
            input=f"How many live in Vienna? Steps: {json.dumps(agent.steps(scratch))}",
            cwd=scratch,
            env={**own, "HTTPS_PROXY": NOBODY, "NO_PROXY": "127.0.0.1", **agent.settings(address, home)},
            capture_output=True,
            text=True,
            timeout=100,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert (scratch / "answer.txt").read_text() == f"{inhabitants}\n", ran.stdout + ran.stderr
    assert "You said: " in ran.stdout  # contains the result of the second tool
    assert {request.status for request in requests} == {200}  # no request was refused and sent again without a field
    turns = [read_by(small, request) for request in requests if json.loads(request.body).get("tools")]
    print(ran.stdout, ran.stderr)
    print(f"{name}: tokens of each prompt, and those that were found: {turns}")
    # only the new part of each prompt is computed
    assert [found for _, found in turns[1:]] == [length for length, _ in turns[:-1]]
