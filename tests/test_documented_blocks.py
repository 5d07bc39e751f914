"""Every fenced block in README and docs runs as written, with free ports instead of the documented ones."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from golden.adapters import random_pairs, write_gguf, write_peft
from golden.random_models import RandomModel
from smollm3.conversion.hf_folder_of import write_folder

from notso.qtensor import GGUFFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.model.weights import MATRICES
from notso.web.tools.mcp_config import read_mcp_config
from notso.web.values.sign_in import read_sign_in

ROOT = Path(__file__).parents[1]
MOST_NOT_RUN = 10
LONG = pytest.mark.long("docs")
PORTS = ("3000", "3001", "11434")
BLOCK = re.compile(r"^(?:<!-- not run: ([^\n]+) -->\n)?```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SERVER = re.compile(r"^(?:\w+=\S+ )*(?:notso(?: serve\b.*)?|make run)\s*(?:#.*)?$")


@dataclass(frozen=True)
class Block:
    page: str
    line: int
    language: str
    body: str
    missing: str | None  # a requirement that is not available in tests

    @property
    def name(self) -> str:
        return f"{self.page}:{self.line}"


def blocks() -> list[Block]:
    found = []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        text = path.read_text("utf-8")
        for match in BLOCK.finditer(text):
            missing, language, body = match.groups()
            page = str(path.relative_to(ROOT))
            found.append(Block(page, text.count("\n", 0, match.start()) + 1, language, body, missing))
    return found


BLOCKS = blocks()


def runnable(*languages: str) -> list[Any]:
    chosen = [each for each in BLOCKS if each.language in languages and each.missing is None]
    return [pytest.param(each, id=each.name) for each in chosen]


def shell_blocks() -> list[Any]:
    """Return the blocks. Those of other pages than README start programs, and run only after changes to the
    documentation or the commands."""
    chosen = [each for each in BLOCKS if each.language == "sh" and each.missing is None]
    return [pytest.param(each, id=each.name, marks=[] if each.page == "README.md" else [LONG]) for each in chosen]


def test_every_block_has_a_test() -> None:
    """Blocks marked "text" are output or formulas; all others run below."""
    assert {each.language for each in BLOCKS} <= {"sh", "python", "json", "toml", "text", ""}
    assert len([each for each in BLOCKS if each.missing]) <= MOST_NOT_RUN
    fences = sum(path.read_text("utf-8").count("\n```") for path in {ROOT / each.page for each in BLOCKS})
    assert fences == 2 * len(BLOCKS), "all fences must be recognized"


SHIM = """\
#!{python}
import os, sys
from notso.cli import main
from notso.smollm3.hub import registry
if "DOCUMENTED_FILE" in os.environ:
    registry.KNOWN_FILES = (registry.KnownFile(**__import__("json").loads(os.environ["DOCUMENTED_FILE"])),)
if not sys.argv[1:] or sys.argv[1] == "serve":
    print("pid", os.getpid(), flush=True)
sys.exit(main())
"""

PIP = """\
#!{python}
# Stands in for pip, which would ask an index for build tools: registers the plugin's entry points.
import pathlib, sys, tomllib
assert sys.argv[1:3] == ["install", "-e"]
project = tomllib.loads(pathlib.Path(sys.argv[3], "pyproject.toml").read_text())["project"]
about = pathlib.Path({site!r}, project["name"].replace("-", "_") + "-0.1.0.dist-info")
about.mkdir()
(about / "METADATA").write_text("Metadata-Version: 2.1\\nName: " + project["name"] + "\\nVersion: 0.1.0\\n")
rows = "".join(f"{{key}} = {{value}}\\n" for key, value in project["entry-points"]["notso.plugins"].items())
(about / "entry_points.txt").write_text("[notso.plugins]\\n" + rows)
"""


def free_ports() -> dict[str, str]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in PORTS]
    ports = {documented: str(each.getsockname()[1]) for documented, each in zip(PORTS, sockets, strict=True)}
    for each in sockets:
        each.close()
    return ports


class Shell:
    """Runs a block in an isolated home folder. A server in the foreground is stopped once it listens."""

    def __init__(self, folder: Path, ports: dict[str, str]) -> None:
        self.folder, self.ports = folder, ports
        self.bin, self.site = folder / "bin", folder / "site"
        for each in (self.bin, self.site, folder / "home" / ".local" / "bin"):
            each.mkdir(parents=True, exist_ok=True)
        self.write("notso", SHIM.format(python=sys.executable))
        self.write("pip", PIP.format(python=sys.executable, site=str(self.site)))
        home = folder / "home"
        kept = {name: os.environ[name] for name in ("LANG", "LD_LIBRARY_PATH") if name in os.environ}
        self.environment = kept | {
            "PATH": f"{self.bin}:{home / '.local' / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": f"{self.site}:{folder / 'word-counter'}",
            "HOME": str(home),
            "NOTSO_PORT": ports["3000"],
            "HF_HUB_OFFLINE": "1",
            "PYTHON_COLORS": "0",
        }

    def write(self, name: str, text: str) -> None:
        path = self.bin / name
        path.write_text(text)
        path.chmod(0o755)

    def with_ports(self, body: str) -> str:
        return re.sub(r"\b(3000|3001|11434)\b", lambda match: self.ports[match[0]], body)

    def run(self, body: str) -> str:
        servers = sum(bool(SERVER.match(line.removesuffix(" &"))) for line in body.splitlines())
        in_background = any(line.endswith("&") for line in body.splitlines())
        script = f"set -e; trap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n{self.with_ports(body)}"
        errors = self.folder / "stderr"
        with errors.open("w") as stderr:
            shell = subprocess.Popen(
                ["bash", "-c", script],
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
            )
            assert shell.stdout is not None
            printed, started, opened = "", list[int](), 0
            try:
                for line in shell.stdout:
                    printed += line
                    if line.startswith("pid "):
                        started.append(int(line.split()[1]))
                    elif line.startswith("open "):
                        opened += 1
                        if not in_background or opened == servers:
                            while started:
                                os.kill(started.pop(), signal.SIGTERM)
            finally:
                for pid in started:
                    os.kill(pid, signal.SIGTERM)
        assert shell.wait() == 0, f"{printed}\n{errors.read_text()}"
        assert opened == servers
        return printed


@pytest.fixture
def shell(tmp_path: Path) -> Shell:
    return Shell(tmp_path, free_ports())


@dataclass(frozen=True)
class Served:
    ports: dict[str, str]
    log: Path

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.ports['3000']}"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Run a server with the demo model for all blocks that need one."""
    shell = Shell(tmp_path_factory.mktemp("served"), free_ports())
    log = shell.folder / "log"
    with log.open("w") as stderr:
        server = subprocess.Popen(
            [shell.bin / "notso", "serve", "--no-browser", "--access-log"],
            env=shell.environment,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert server.stdout is not None
    assert any(line.startswith("open ") for line in server.stdout), log.read_text()
    running = Served(shell.ports, log)
    while not is_healthy(running.address):
        time.sleep(0.02)  # the model is still loading
    yield running
    server.terminate()
    assert server.wait() == 0


def is_healthy(address: str) -> bool:
    try:
        return bool(urllib.request.urlopen(f"{address}/health").status == 200)
    except urllib.error.HTTPError:
        return False


@pytest.mark.parametrize("block", shell_blocks())
def test_shell_block_runs_without_errors(block: Block, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for program in ("curl", "make"):
        if re.search(rf"^{program} ", block.body, re.MULTILINE) and shutil.which(program) is None:
            pytest.skip(f"{program} is not installed")
    needs_server = "127.0.0.1:3000" in block.body and not any(map(SERVER.match, block.body.splitlines()))
    shell = Shell(tmp_path / "shell", request.getfixturevalue("served").ports if needs_server else free_ports())
    if "make " in block.body:
        as_a_clone(shell, request.getfixturevalue("fake_hub"))
    for name, write in FILES.items():
        if name in block.body:
            write(shell.folder / name)
    if "notso dataset" in block.body and needs_server:
        import_a_chat(request.getfixturevalue("served").address)
        shell.run('mkdir -p "$HOME/.local/share/notso"; notso backup "$_/notso.db" --from http://127.0.0.1:3000')
    printed = shell.run(block.body)
    for refused in ('"error": *[{"]', "Traceback"):  # a response may contain a null error
        assert not re.search(refused, printed)


def import_a_chat(address: str) -> None:
    messages = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hello!"}]
    body = json.dumps({"messages": messages}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{address}/import", body, {"content-type": "application/json"}))


def as_a_clone(shell: Shell, hub: Any) -> None:
    """Prepare a clone in which everything is built for `make run`; `notso` is on PATH only after `make link`."""
    for name in ("Makefile", "CMakeLists.txt", "pyproject.toml", "supply/build.txt", "supply/run.txt"):
        (shell.folder / name).parent.mkdir(exist_ok=True)
        shutil.copyfile(ROOT / name, shell.folder / name)
    (shell.folder / ".venv" / "bin").mkdir(parents=True)
    shutil.move(shell.bin / "notso", shell.folder / ".venv" / "bin" / "notso")
    for name in ("bin/python", ".build-tools", ".run"):
        (shell.folder / ".venv" / name).touch()
    content = demo_path().read_bytes()
    hub.content = content
    file = {
        "name": "smollm3-3b:Q4_K_M",
        "repository": "somebody/Small-GGUF",
        "revision": "0123456789" * 4,
        "filename": "SmolLM3-Q4_K_M.gguf",
        "size_bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    del shell.environment["HF_HUB_OFFLINE"]
    shell.environment |= {"HF_ENDPOINT": hub.url, "DOCUMENTED_FILE": json.dumps(file)}


def write_schema(path: Path) -> None:
    path.write_text('{"type": "object", "properties": {"name": {"enum": ["red", "blue"]}}, "required": ["name"]}')


def write_adapter(path: Path) -> None:
    with GGUFFile.open(demo_path()) as demo:
        config = SmolLM3Config.from_metadata(demo.metadata)
    pairs = random_pairs(config, 31, rank=2, size=0.02)
    if path.suffix:
        write_gguf(path, pairs)
    else:
        write_peft(path, pairs, config.head_dim, target_modules=list(MATRICES))


SMALL = RandomModel(layers=4, hidden=256, ffn=256, heads=2, kv_heads=1, head_dim=128, vocab=400)
FILES: dict[str, Callable[[Path], Any]] = {
    "color.json": write_schema,
    "samples.txt": lambda path: path.write_text("The sum of 27 and 48 is 75. " * 200),
    "handbook.txt": lambda path: path.write_text(
        "".join(f"The plants of room {at} are watered by the gardener on Mondays. " for at in range(40))
    ),
    "SmolLM3-F16.gguf": lambda path: SMALL.write(path),
    "my-finetune": lambda path: write_folder(SMALL, path),
    "support.gguf": write_adapter,
    "legal-peft": write_adapter,
}
"""User files that the blocks refer to."""


@pytest.mark.parametrize("block", runnable("python"))
def test_python_block_runs_and_prints_output(
    block: Block, served: Served, capsys: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    exec(compile(block.body.replace("http://127.0.0.1:3000", served.address), block.name, "exec"), {})  # noqa: S102
    assert len(capsys.readouterr().out.strip()) > 5
    assert not [each for each in recwarn.list if each.filename == block.name or "notso" in each.filename]


@pytest.mark.parametrize("block", runnable("json"))
def test_json_block_is_a_valid_mcp_configuration(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "1")
    path = tmp_path / "mcp.json"
    path.write_text(block.body)
    read = read_mcp_config(path)
    assert len(read.entries) == len(json.loads(block.body)["mcpServers"]) and not read.left_out


@pytest.mark.parametrize("block", runnable("toml"))
def test_toml_block_is_a_valid_configuration(block: Block, shell: Shell) -> None:
    path = shell.folder / "file.toml"
    if "serve" in tomllib.loads(block.body):
        path.write_text(block.body)
        shell.environment["NOTSO_CONFIG"] = str(path)
        del shell.environment["NOTSO_PORT"]
        assert re.search(r"^port +8080 +file$", shell.run("notso serve --show-config | cat"), re.MULTILINE)
    else:
        (shell.folder / "oidc-secret").write_text("secret")
        placeholders = {'"ISSUER"': '"https://login.example.org"', '"ADDRESS"': '"https://chat.example.org"'}
        text = re.sub("|".join(placeholders), lambda match: placeholders[match[0]], block.body)
        path.write_text(text)
        read = read_sign_in(path)
        assert read.proxy is not None and read.oidc is not None and read.require_key
