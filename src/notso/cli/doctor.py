"""`notso doctor`: check this machine, suggest fixes, and print a report for issues."""

from __future__ import annotations

import errno
import importlib.metadata
import os
import shutil
import socket
import sqlite3
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from notso.cli import engines, exit_codes, options, terminal

EXAMPLES = """\
  notso doctor
  notso doctor --json
  notso doctor --report
  notso doctor --from http://127.0.0.1:3000"""

WHOLE_MODEL_BYTES = 2_600_000_000  # memory for SmolLM3-3B in Q4_K_M, a context of 4,096 tokens and the process itself
SAFE_SQLITE = (3, 51, 3)  # earlier versions can corrupt a write-ahead log to which several connections write
LIBRARIES = ("numpy", "tokenizers", "jinja2", "fastapi", "starlette", "uvicorn", "huggingface_hub", "typer", "rich")
_MARKS: dict[str, terminal.Style] = {"ok": "green", "warn": "yellow", "fail": "red"}


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report, with the suggested fix."""

    status: Literal["ok", "warn", "fail"]
    subject: str
    message: str
    fix: str = ""


def doctor(
    context: typer.Context,
    port: Annotated[
        int | None,
        typer.Option(
            "--port",
            "-p",
            envvar="NOTSO_PORT",
            metavar="PORT",
            min=0,
            max=65535,
            help="Port to check [default: that of serve; env: NOTSO_PORT].",
            show_envvar=False,
        ),
    ] = None,
    server: Annotated[
        str | None, typer.Option("--from", metavar="URL", help="Only check whether the server at this URL is ready.")
    ] = None,
    as_report: Annotated[
        bool, typer.Option("--report", help="Measure every kernel family, and print a report to paste into an issue.")
    ] = False,
    as_json: options.Json = False,
    plain: options.Plain = False,
    debug: options.Debug = False,
) -> None:
    """Check this machine and suggest fixes.

    Checks Python, sandboxing of child processes, CPU, kernels, GPU, memory, huge pages, models, disk, data directory,
    port, SQLite, PostgreSQL, plugins, network and versions. Without --json, each result is a line that begins with ok,
    warn or fail. The exit code is 1 if a check fails.
    """
    server_config = (context.find_root().default_map or {}).get("serve", {})
    findings = [_check_server(server)] if server else run_checks(port, server_config)
    if as_report:
        with terminal.waiting("measuring the demo model"):
            block, families_agree = report([f"{each.status:4}  {each.subject}: {each.message}" for each in findings])
        print(block)
        if not families_agree:
            raise typer.Exit(exit_codes.FAILED)
    elif as_json:
        terminal.print_json([asdict(finding) for finding in findings])
    else:
        for finding in findings:
            mark = terminal.styled(f"{finding.status:4}", _MARKS[finding.status], sys.stdout)
            fix = f" -> {finding.fix}" if finding.fix else ""
            print(f"{mark}  {terminal.escape_control(f'{finding.subject}: {finding.message}{fix}')}", flush=True)
    if any(finding.status == "fail" for finding in findings):
        raise typer.Exit(exit_codes.FAILED)


def _check_server(server: str) -> Finding:
    import json
    from http.client import HTTPException
    from urllib.error import HTTPError

    from notso.cli.backup import error_sentence, open_url

    # Service managers and containers run `notso doctor --from` as a health check.
    try:
        with open_url(server.rstrip("/") + "/health", 10, {}) as answer:
            return Finding("ok", "server", f"{server} is ready with {json.load(answer)['model']}")
    except HTTPError as error:
        message = f"{server} is not ready: {error_sentence(error)}"
        return Finding("fail", "server", message, "open the server's Models page to see the reason")
    except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
        return Finding("fail", "server", f"no notso server at {server}: {error}", "start one with notso serve")


def run_checks(port: int | None, server_config: Mapping[str, Any]) -> list[Finding]:
    """Run all checks. A check that raises an exception is reported as failed."""
    # server_config: the table [serve] of the configuration file.
    checks: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
        ("python", _python),
        ("confinement", _confinement),
        ("cpu", _cpu),
        ("kernels", _kernels),
        ("gpu", _gpu),
        ("memory", _memory),
        ("pages", _pages),
        ("models", _models),
        ("disk", _disk),
        ("data", lambda: _data(server_config)),
        ("port", lambda: _port(port, server_config)),
        ("sqlite", _sqlite),
        ("postgresql", lambda: _postgres(server_config)),
        ("plugins", _plugins),
        ("network", _network),
        ("versions", _versions),
    )
    findings: list[Finding] = []
    for subject, check in checks:
        try:
            findings += check()
        except Exception as error:  # the remaining checks must run even if this one raises
            findings.append(Finding("fail", subject, f"{type(error).__name__}: {error}", "please report this"))
    return findings


def _python() -> Iterator[Finding]:
    from notso.system.processors import system_name

    yield Finding("ok", "python", f"{sys.version.split()[0]} on {system_name()}")


def _confinement() -> Iterator[Finding]:
    from notso.system.confinement import lacking, unenforced_limits

    if unlimited := unenforced_limits():
        fix = "use Linux 6.12 or newer if you open files, templates or plugins that you do not trust"
        if lacking():
            fix += "; on this system, PDF files and spreadsheets are refused"
        yield Finding("warn", "confinement", f"this system does not limit {'; '.join(unlimited)}", fix)
    else:
        message = "Landlock and seccomp confine the child processes that read documents and templates"
        yield Finding("ok", "confinement", message)


def _cpu() -> Iterator[Finding]:
    from notso.qtensor import kernel_choice
    from notso.smollm3.diagnostics.benchmark import cpu_name
    from notso.system.processors import usable_processors

    features = ", ".join(kernel_choice.cpu_features()) or "none that notso uses"
    message = f"{cpu_name()}, {usable_processors()} logical processors usable; instruction sets: {features}"
    yield Finding("ok", "cpu", message)


def _kernels() -> Iterator[Finding]:
    from notso.qtensor import FORMATS_BY_NAME, KernelChoiceError, kernel_choice
    from notso.system.memory import is_memory_shortage

    forced = os.environ.get(kernel_choice.KERNELS_VARIABLE, "").strip()
    try:
        kernel_choice.configure()
    except KernelChoiceError as error:
        advice = "unset NOTSO_KERNELS and NOTSO_ATTENTION to let notso choose"
        if is_memory_shortage(error):
            advice = "close programs or raise the limits on memory and processes"
        yield Finding("fail", "kernels", str(error), advice)
        return
    chosen = kernel_choice.kernels()
    reason = f"forced by NOTSO_KERNELS={forced}" if forced else "the fastest kernels for this CPU"
    choices = ", ".join(kernel_choice.available_kernels())
    packed = ", ".join(name for name, format in FORMATS_BY_NAME.items() if kernel_choice.is_packed(format)) or "none"
    if packed != "none" and not kernel_choice.packs_by_default():
        packed += " (only with --weights packed)"
    yield Finding(
        "ok",
        "kernels",
        f"{chosen} ({reason}) on {kernel_choice.threads()} threads; supported on this CPU: {choices}; "
        f"formats repacked in memory: {packed}",
    )
    if kernel_choice.available_kernels() == ["generic"]:
        yield Finding(
            "warn",
            "speed",
            "no optimized kernels for this CPU: answers will be slow",
            "use an x86 CPU with AVX2 (most since 2015 have it) or a 64-bit ARM CPU",
        )


def _gpu() -> Iterator[Finding]:
    from notso.qtensor import CPU, CUDA, FORMATS_BY_NAME, DeviceError, differing_operations, has_cuda_driver

    if not has_cuda_driver():
        yield Finding("ok", "gpu", "no NVIDIA driver; using the CPU")
        return
    try:
        gpu = CUDA()
        found = differing_operations(
            gpu, CPU.configured(), [FORMATS_BY_NAME[name] for name in ("Q4_K", "Q6_K", "Q8_0")]
        )
    except DeviceError as error:
        yield Finding("warn", "gpu", f"{error}; using the CPU", "check the GPU and its driver with `nvidia-smi`")
        return
    what = f"{gpu.name}, {terminal.gigabytes(gpu.memory().available_bytes)} free, {gpu.kernels}"
    if found:
        message = f"{what}: results differ from the CPU's in {', '.join(found)}; using the CPU"
        yield Finding("warn", "gpu", message, "please report this")
    else:
        yield Finding("ok", "gpu", f"{what}: results identical to the CPU's")


def _memory() -> Iterator[Finding]:
    from notso.qtensor import available_memory, memory_limits

    lowest = available_memory()
    limits = ", ".join(f"{terminal.gigabytes(limit.available_bytes)} ({limit.source})" for limit in memory_limits())
    if lowest.available_bytes < WHOLE_MODEL_BYTES:
        needed = terminal.gigabytes(WHOLE_MODEL_BYTES)
        yield Finding(
            "warn", "memory", f"available: {limits}; SmolLM3-3B needs {needed}", "close programs or raise the limit"
        )
    else:
        yield Finding("ok", "memory", f"available: {limits}")


def _pages() -> Iterator[Finding]:
    from notso.system.memory import HUGE_PAGE_SETTING, huge_page_policy

    chosen = huge_page_policy() or "not available"
    message = f"page size {os.sysconf('SC_PAGE_SIZE')} bytes; transparent huge pages: {chosen}"
    if chosen == "never":
        yield Finding("warn", "pages", message, f"as root: echo madvise > {HUGE_PAGE_SETTING}")
    else:
        yield Finding("ok", "pages", message)


def _models() -> Iterator[Finding]:
    from notso.smollm3.errors import NotsoError
    from notso.smollm3.hub import registry

    try:
        chosen = engines.installed_model()
    except NotsoError as error:
        yield Finding("fail", "model", str(error), "unset NOTSO_MODEL or set it to a GGUF file")
        return
    if chosen is not None:
        try:
            engines.check_model(chosen)
            files = chosen.iterdir() if chosen.is_dir() else [chosen]
            size = sum(each.stat().st_size for each in files)
        except (NotsoError, OSError) as error:
            yield Finding("fail", "model", f"{chosen} cannot be used: {error}", "set NOTSO_MODEL to another file")
            return
        yield Finding("ok", "model", f"{chosen} ({terminal.gigabytes(size)})")
    elif registry.demo_path().is_file():
        yield Finding(
            "warn", "model", "only the built-in demo is installed", "download SmolLM3-3B (1.92 GB) with notso pull"
        )
    else:
        yield Finding("fail", "model", "the built-in demo is missing", "reinstall notso")


def _disk() -> Iterator[Finding]:
    from notso.smollm3.hub import registry

    folder = registry.hub_cache()
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))  # noqa: PTH110 - raises no error
    free = shutil.disk_usage(existing).free
    needed = registry.KNOWN_FILES[0].size_bytes
    message = f"{terminal.gigabytes(free)} free for models in {folder}"
    if not os.access(existing, os.W_OK):
        yield Finding("warn", "disk", f"{folder} is not writable", "set HF_HOME to a writable folder")
    elif free < needed and registry.find_local(registry.KNOWN_FILES[0]) is None:
        missing = terminal.gigabytes(needed - free)
        yield Finding(
            "warn", "disk", message, f"free up another {missing}, or set HF_HOME to a folder on a larger disk"
        )
    else:
        yield Finding("ok", "disk", message)


def _server_option(server_config: Mapping[str, Any], variable: str, name: str) -> str | None:
    return os.environ.get(variable) or server_config.get(name)


def _data(server_config: Mapping[str, Any]) -> Iterator[Finding]:
    from notso.web.values.settings import default_data_dir

    folder = Path(_server_option(server_config, "NOTSO_DATA_DIR", "data_dir") or default_data_dir())
    existing = next(parent for parent in (folder, *folder.parents) if os.path.exists(parent))  # noqa: PTH110 - raises no error
    if not existing.is_dir() or not os.access(existing, os.W_OK):
        yield Finding("fail", "data", f"{folder} is not writable", "set NOTSO_DATA_DIR to a writable folder")
        return
    size = sum(path.stat().st_size for path in folder.glob("*") if path.is_file())
    if _server_option(server_config, "DATABASE_URL", "database_url"):
        yield Finding("ok", "data", f"prompt cache in {folder}, conversations in PostgreSQL")
        return
    yield Finding("ok", "data", f"conversations in {folder} ({terminal.gigabytes(size)})")


def _port(port: int | None, server_config: Mapping[str, Any]) -> Iterator[Finding]:
    from notso.web.values.settings import DEFAULT_PORT

    if port is None:
        port = int(server_config.get("port", DEFAULT_PORT))
    with socket.socket() as probe:
        # With this option, which the server also sets, a port in TIME_WAIT counts as free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            stop = "stop the program that uses it, or " if error.errno == errno.EADDRINUSE else ""
            yield Finding("warn", "port", f"{port}: {error.strerror}", f"{stop}choose another --port")
            return
    yield Finding("ok", "port", f"{port} is free")


def _sqlite() -> Iterator[Finding]:
    version = sqlite3.sqlite_version
    if sqlite3.sqlite_version_info < SAFE_SQLITE:
        yield Finding("ok", "sqlite", f"{version}; its WAL bug has no effect, because only one connection writes")
    else:
        yield Finding("ok", "sqlite", version)


def _postgres(server_config: Mapping[str, Any]) -> Iterator[Finding]:
    url = _server_option(server_config, "DATABASE_URL", "database_url")
    if not url:
        yield Finding("ok", "postgresql", "not used: DATABASE_URL is not set")
        return
    from notso.web.store.opening import query_database_info
    from notso.web.values.errors import WebError

    try:
        facts = query_database_info(url)
    except WebError as error:
        yield Finding("fail", "postgresql", str(error), "check that DATABASE_URL is valid and the database is running")
        return
    message = f"{facts.version}, at most {facts.connections} connections; back up with pg_dump"
    if facts.loses:
        yield Finding(
            "warn", "postgresql", f"{message}; {facts.loses} is off", f"set {facts.loses} = on to avoid losing chats"
        )
    else:
        yield Finding("ok", "postgresql", message)


def _plugins() -> Iterator[Finding]:
    from notso.plugins.loading import list_installed
    from notso.web.tools.built_in import BUILT_IN_TOOLS

    tools = ", ".join(tool.name for tool in BUILT_IN_TOOLS)
    yield Finding("ok", "plugins", f"built in: {tools}")
    for each in list_installed():
        yield Finding(
            "ok", "plugin", f"{each.name} of {each.distribution} {each.version}: `serve --plugin {each.name}`"
        )


def _network() -> Iterator[Finding]:
    from notso.smollm3.hub.download import is_offline

    downloads = "model downloads are disabled (HF_HUB_OFFLINE)" if is_offline() else "used to download models"
    yield Finding("ok", "network", f"{downloads}; enabled tools such as fetch_page may use the network")


def _versions() -> Iterator[Finding]:
    found = []
    for name in ("notso-smollm3-bot", *LIBRARIES):
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            yield Finding("fail", "versions", f"{name} is not installed", "reinstall notso")
    yield Finding("ok", "versions", ", ".join(found))


PROMPT_TOKENS, ANSWER_TOKENS = 512, 32


def report(checks: Sequence[str]) -> tuple[str, bool]:
    """Return a report with the demo model's results for each kernel family, and whether all families agree."""
    lines, families_agree = _compare_kernel_families()
    block = "\n".join(["```", *map(terminal.escape_control, (*checks, "", *lines)), "```"])
    home = str(Path.home())  # in containers, it may be "/"
    return block.replace(home, "~") if home != "/" else block, families_agree


def _compare_kernel_families() -> tuple[list[str], bool]:
    from notso.qtensor import kernel_choice

    chosen, rows = kernel_choice.kernels(), [["kernels", "fingerprint", "prompt", "answer"]]
    fingerprints: set[str] = set()
    all_ran = True
    try:
        for family in kernel_choice.available_kernels():
            try:
                kernel_choice.use_kernels(family)
                result = _benchmark_demo()
            except Exception as error:  # a failure is part of the report
                rows.append([family, f"{type(error).__name__}: {error}", "", ""])
                all_ran = False
                continue
            fingerprints.add(result["fingerprint"])
            speeds = [f"{result[kind][0]['tok_s']:,.0f} tokens/s" for kind in ("prefill", "decode")]
            rows.append([family, result["fingerprint"], *speeds])
    finally:
        kernel_choice.use_kernels(chosen)
    if len(fingerprints) > 1:
        verdict = "FAILED: the families differ"
    else:
        verdict = "all families agree" if all_ran else "FAILED: not all families ran"
    return [*terminal.columns(rows, right=(2, 3)), verdict], all_ran and len(fingerprints) == 1


def _benchmark_demo() -> dict[str, Any]:
    from notso.smollm3.diagnostics.benchmark import BenchmarkPlan, run_benchmark

    plan = BenchmarkPlan(
        ((PROMPT_TOKENS, 0),), batches=(), decode_tokens=ANSWER_TOKENS, repeats=1, kv="f16", probe_bytes=64 << 20
    )
    return run_benchmark(None, plan)
