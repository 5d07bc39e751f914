"""`notso doctor`: what this machine has, what will be used, and what to mend."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import sqlite3
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from notso.cli import exit_codes, options, terminal

EXAMPLES = """\
  notso doctor
  notso doctor --json
  notso doctor --from http://127.0.0.1:3000"""

WHOLE_MODEL_BYTES = 2_600_000_000  # SmolLM3-3B Q4_K_M with 4,096 tokens of context and the process around it
SAFE_SQLITE = (3, 51, 3)  # older ones can damage a WAL file that several connections write
LIBRARIES = ("numpy", "tokenizers", "jinja2", "fastapi", "starlette", "uvicorn", "huggingface_hub", "typer", "rich")
_MARKS: dict[str, terminal.Style] = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report. `fix` says what to do about a warning or failure."""

    status: Literal["ok", "warn", "fail"]
    subject: str
    message: str
    fix: str = ""


def doctor(
    port: Annotated[
        int,
        typer.Option(
            *("--port", "-p"), envvar="NOTSO_PORT", metavar="PORT", min=0, max=65535, help="The port `serve` would use."
        ),
    ] = 3000,
    server: Annotated[
        str | None,
        typer.Option("--from", metavar="URL", help="Ask a server that is running whether it can answer; nothing else."),
    ] = None,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Check this machine; each line says ok, warn or fail.

    Python, CPU, kernels, GPU, memory, pages, models, disk, port, SQLite, PostgreSQL, plugins, network, versions; a
    warning comes with a fix. Exit code 1 if a line is fail.
    """
    findings = [_answering(server)] if server else examine(port)
    if as_json:
        terminal.say_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            mark = terminal.styled(f"{finding.status:4}", _MARKS[finding.status], sys.stdout)
            fix = f" -> {finding.fix}" if finding.fix else ""
            print(f"{mark}  {terminal.harmless(f'{finding.subject}: {finding.message}{fix}')}", flush=True)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(exit_codes.FAILED)


def _answering(server: str) -> Finding:
    """What `/health` says: for service managers and containers, whose check is a command."""
    import json
    from http.client import HTTPException
    from urllib.error import HTTPError
    from urllib.request import urlopen

    try:
        with urlopen(server.rstrip("/") + "/health", timeout=10) as answer:
            return Finding("ok", "server", f"{server} answers with {json.load(answer)['model']}")
    except HTTPError as error:
        with error:
            status = error.read(200).decode("utf-8", "replace")
        return Finding("fail", "server", f"{server} cannot answer: {status}", "its page says why, under Models")
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        return Finding("fail", "server", f"{server} is no server of ours that runs: {error}", "notso serve starts one")


def examine(port: int) -> list[Finding]:
    """Every check; one that breaks is reported as failed and does not stop the others."""
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("python", _python),
        ("cpu", _cpu),
        ("kernels", _kernels),
        ("gpu", _gpu),
        ("memory", _memory),
        ("pages", _pages),
        ("models", _models),
        ("disk", _disk),
        ("data", _data),
        ("port", lambda: _port(port)),
        ("sqlite", _sqlite),
        ("postgresql", _postgres),
        ("plugins", _plugins),
        ("network", _network),
        ("versions", _versions),
    )
    findings: list[Finding] = []
    for subject, check in checks:
        try:
            findings += check()
        except Exception as error:  # the report must come to its end on a broken machine above all
            findings.append(Finding("fail", subject, f"{type(error).__name__}: {error}", "report this to the project"))
    return findings


def _python() -> Iterator[Finding]:
    yield Finding("ok", "python", f"{platform.python_version()} on {platform.system()} {platform.release()}")
    if platform.system() != "Linux":
        yield Finding("warn", "system", f"{platform.system()} is not tested", "use Linux where it matters")


def _cpu() -> Iterator[Finding]:
    from notso.qtensor import kernel_choice
    from notso.smollm3.diagnostics.machine import cpu_name

    features = ", ".join(kernel_choice.cpu_features()) or "none that matter"
    yield Finding("ok", "cpu", f"{cpu_name()}, {len(os.sched_getaffinity(0))} cores usable; {features}")


def _kernels() -> Iterator[Finding]:
    from notso.qtensor import KernelChoiceError, kernel_choice

    forced = os.environ.get(kernel_choice.KERNELS_VARIABLE, "").strip()
    try:
        kernel_choice.configure()
    except KernelChoiceError as error:
        yield Finding("fail", "kernels", str(error), "unset NOTSO_KERNELS and NOTSO_ATTENTION to let notso choose")
        return
    chosen = kernel_choice.kernels()
    why = f"forced by NOTSO_KERNELS={forced}" if forced else "the fastest this CPU can run"
    choices = ", ".join(kernel_choice.available_kernels())
    yield Finding("ok", "kernels", f"{chosen}, {why}, on {kernel_choice.threads()} threads; this CPU runs {choices}")
    if kernel_choice.available_kernels() == ["generic"]:
        yield Finding("warn", "speed", "this CPU has no AVX2: answers will be slow", "use a CPU made after 2015")


def _gpu() -> Iterator[Finding]:
    from notso.qtensor import CPU, CUDA, FORMATS_BY_NAME, DeviceError, differing_operations, has_cuda_driver

    if not has_cuda_driver():
        yield Finding("ok", "gpu", "no NVIDIA driver: the CPU computes")
        return
    try:
        gpu = CUDA()
        found = differing_operations(
            gpu, CPU.configured(), [FORMATS_BY_NAME[name] for name in ("Q4_K", "Q6_K", "Q8_0")]
        )
    except DeviceError as error:
        yield Finding("warn", "gpu", f"{error}: the CPU computes", "`nvidia-smi` shows whether GPU and driver work")
        return
    what = f"{gpu.name}, {terminal.gigabytes(gpu.memory().available_bytes)} free, {gpu.kernels}"
    if found:
        message = f"{what}: other bits than the CPU's in {', '.join(found)}; the CPU computes"
        yield Finding("warn", "gpu", message, "report this to the project")
    else:
        yield Finding("ok", "gpu", f"{what}: the CPU's bits; never timed by the project")


def _memory() -> Iterator[Finding]:
    from notso.qtensor import available_memory, memory_limits

    least = available_memory()
    bounds = "; ".join(f"{bound.source} {terminal.gigabytes(bound.available_bytes)}" for bound in memory_limits())
    if least.available_bytes < WHOLE_MODEL_BYTES:
        needed = terminal.gigabytes(WHOLE_MODEL_BYTES)
        yield Finding(
            "warn", "memory", f"{bounds} left; SmolLM3-3B wants {needed}", "close programs or raise the limit"
        )
    else:
        yield Finding("ok", "memory", f"{bounds} left")


def _pages() -> Iterator[Finding]:
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    try:
        setting = huge.read_text()
        chosen = setting[setting.index("[") + 1 : setting.index("]")]
    except (OSError, ValueError):
        chosen = "not offered"
    message = f"{os.sysconf('SC_PAGE_SIZE')} bytes; transparent huge pages: {chosen}"
    if chosen == "never":
        yield Finding("warn", "pages", message, f"as root: echo madvise > {huge}")
    else:
        yield Finding("ok", "pages", message)


def _models() -> Iterator[Finding]:
    from notso.smollm3.errors import ModelFileError
    from notso.smollm3.hub import registry

    try:
        chosen = registry.resolve_model()
    except ModelFileError as error:
        yield Finding("fail", "model", str(error), "unset NOTSO_MODEL or let it name a GGUF file")
        return
    if chosen is not None:
        yield Finding("ok", "model", f"{chosen} ({terminal.gigabytes(chosen.stat().st_size)})")
    elif registry.demo_path().is_file():
        yield Finding("warn", "model", "only the built-in demo is here", "notso pull fetches SmolLM3-3B (1.92 GB)")
    else:
        yield Finding("fail", "model", "the built-in demo is missing", "install notso again")


def _disk() -> Iterator[Finding]:
    from notso.smollm3.hub import registry

    folder = registry.hub_cache()
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    needed = registry.KNOWN_FILES[0].size_bytes
    message = f"{terminal.gigabytes(free)} free for models in {folder}"
    if not os.access(existing, os.W_OK):
        yield Finding("warn", "disk", f"{folder} cannot be written", "set HF_HOME to a folder of yours")
    elif free < needed and registry.find_local(registry.KNOWN_FILES[0]) is None:
        yield Finding("warn", "disk", message, f"make room for {terminal.gigabytes(needed)}, or set HF_HOME")
    else:
        yield Finding("ok", "disk", message)


def _data() -> Iterator[Finding]:
    from notso.web.values.settings import default_data_dir

    folder = Path(os.environ.get("NOTSO_DATA_DIR") or default_data_dir())
    existing = next(parent for parent in (folder, *folder.parents) if parent.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield Finding("fail", "data", f"{folder} cannot be written", "serve with --data-dir, a folder of yours")
        return
    size = sum(path.stat().st_size for path in folder.glob("*") if path.is_file())
    if os.environ.get("DATABASE_URL"):
        yield Finding("ok", "data", f"{folder} keeps computed prompts; conversations are in PostgreSQL")
        return
    yield Finding("ok", "data", f"conversations are kept in {folder} ({terminal.gigabytes(size)})")


def _port(port: int) -> Iterator[Finding]:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            yield Finding("warn", "port", f"{port}: {error.strerror}", "stop what uses it, or serve with --port")
            return
    yield Finding("ok", "port", f"{port} is free")


def _sqlite() -> Iterator[Finding]:
    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < SAFE_SQLITE:
        yield Finding("ok", "sqlite", f"{version}; one connection writes, so its WAL fault cannot strike")
    else:
        yield Finding("ok", "sqlite", version)


def _postgres() -> Iterator[Finding]:
    url = os.environ.get("DATABASE_URL")
    if not url:
        yield Finding("ok", "postgresql", "not used: DATABASE_URL names no database")
        return
    from notso.web.store.opening import database_facts
    from notso.web.values.errors import WebError

    try:
        facts = database_facts(url)
    except WebError as error:
        yield Finding("fail", "postgresql", str(error), "check DATABASE_URL, and that the database runs")
        return
    message = f"{facts.version}, {facts.connections} connections at most; pg_dump makes backups"
    if facts.loses:
        yield Finding(
            "warn", "postgresql", f"{message}; {facts.loses} is off", f"set {facts.loses} = on, or lose chats"
        )
    else:
        yield Finding("ok", "postgresql", message)


def _plugins() -> Iterator[Finding]:
    from notso.plugins.loading import installed
    from notso.web.tools.built_in import BuiltInTools

    tools = ", ".join(tool.name for tool in BuiltInTools.TOOLS)
    yield Finding("ok", "plugins", f"built in: {tools}")
    for each in installed():
        yield Finding(
            "ok", "plugin", f"{each.name} of {each.distribution} {each.version}: `serve --plugin {each.name}`"
        )


def _network() -> Iterator[Finding]:
    from notso.smollm3.hub.download import is_offline

    state = "forbidden (HF_HUB_OFFLINE); all but `pull` works" if is_offline() else "used by `pull` only"
    yield Finding("ok", "network", state)


def _versions() -> Iterator[Finding]:
    found = []
    for name in ("notso-smollm3-bot", *LIBRARIES):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding("fail", "versions", f"{name} is not installed", "install notso again")
    yield Finding("ok", "versions", ", ".join(found))
