"""`notso doctor --from URL`, a container's health check, and `notso doctor --report`, the text for an issue."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from notso.cli import doctor
from notso.qtensor import kernel_choice
from notso.smollm3.diagnostics import benchmark
from notso.smollm3.hub import registry

Run = Callable[..., Any]
Answers = Callable[[int, bytes], str]


@pytest.fixture
def answers() -> Iterator[Answers]:
    """Run a server that gives the same answer to every request."""
    servers: list[HTTPServer] = []

    def start(status: int, body: bytes, kind: str = "application/json") -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                assert self.path.endswith("/health")
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *_: object) -> None:
                pass

        servers.append(HTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[0].serve_forever, args=(0.01,), daemon=True).start()
        return f"http://127.0.0.1:{servers[0].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "body", "code", "told"),
    [
        (200, b'{"status": "ok", "model": "notso demo"}', 0, "is ready with notso demo"),
        (503, b'{"status": "loading"}', 1, "loading"),
        (200, b"<html>somebody else</html>", 1, "no notso server"),
        (200, b"[]", 1, "no notso server"),
    ],
)
def test_doctor_reports_the_health_of_a_server(
    notso: Run, answers: Answers, status: int, body: bytes, code: int, told: str
) -> None:
    result = notso("doctor", "--json", "--from", answers(status, body) + "/")
    (finding,) = json.loads(result.out)
    assert result.code == code and told in finding["message"]
    assert finding["status"] == ("fail" if code else "ok")


@pytest.mark.parametrize(
    ("kind", "body", "told"),
    [
        ("application/json", b'{"status": "loading"}', "is not ready: loading ->"),
        ("application/json", b'{"error": {"message": "no such\\nhost"}}', "is not ready: no such host ->"),
        ("application/json", b'{"error": "no"}', "is not ready: HTTP Error 503: Service Unavailable ->"),
        ("application/json", b"[" * 4000, "is not ready: HTTP Error 503: Service Unavailable ->"),
        ("text/plain", b"\xff", "is not ready: HTTP Error 503: Service Unavailable ->"),
        ("text/html", b"<html>a proxy</html>", "is not ready: HTTP Error 503: Service Unavailable ->"),
    ],
)
def test_error_of_a_server_is_shown_as_a_sentence(
    notso: Run, answers: Answers, kind: str, body: bytes, told: str
) -> None:
    assert told in notso("doctor", "--from", answers(503, body, kind)).out


def test_proxies_do_not_apply_to_this_machine(
    notso: Run, answers: Answers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("http_proxy", answers(502, b"the proxy", "text/plain"))
    for server in ("http://127.0.0.1:1", "http://localhost:1", "http://[::1]:1"):
        result = notso("doctor", "--from", server)
        assert "no notso server" in result.out and "the proxy" not in result.out
        result = notso("backup", str(tmp_path / "copy.db"), "--from", server)
        assert "returned no backup: " in result.err and "HTTP Error" not in result.err
    result = notso("doctor", "--from", "http://chat.example")
    assert "the proxy" in result.out


@pytest.mark.parametrize("address", ["http://127.0.0.1:1", "nothing", "ftp:///x"])
def test_doctor_fails_for_unreachable_or_invalid_address(notso: Run, address: str) -> None:
    result = notso("doctor", "--from", address)
    assert result.code == 1 and result.out.startswith("fail  server") and result.out.count("\n") == 1


def test_doctor_names_the_limits_if_threads_cannot_start(notso: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def set_thread_count(count: int) -> None:
        raise RuntimeError(os.strerror(errno.EAGAIN))

    native = SimpleNamespace(**vars(kernel_choice.native) | {"set_thread_count": set_thread_count})
    monkeypatch.setattr(kernel_choice, "native", native)
    result = notso("doctor")
    line = next(line for line in result.out.splitlines() if line.startswith("fail  kernels"))
    assert "raise the limits" in line and "NOTSO_KERNELS" not in line


def test_a_report_compares_the_kernel_families(notso: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    families = kernel_choice.available_kernels()[-2:]  # generic and the next simplest family
    monkeypatch.setattr(kernel_choice, "available_kernels", lambda: families)
    monkeypatch.setattr(doctor, "PROMPT_TOKENS", 16)
    monkeypatch.setattr(doctor, "ANSWER_TOKENS", 4)
    monkeypatch.setattr(benchmark, "CALM_SECONDS", 0.0)
    before = kernel_choice.kernels()
    block = notso("doctor", "--report").out
    rows = [line.split() for line in block.splitlines() if line.split()[:1] and line.split()[0] in families]
    assert [row[0] for row in rows] == families and len({row[1] for row in rows}) == 1
    assert block.startswith("```\n") and block.rstrip().endswith("all families agree\n```")
    assert str(Path.home()) not in block and "ok    python:" in block
    assert kernel_choice.kernels() == before


def test_report_shows_differing_and_failed_kernel_families(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter(["1", "2"])

    def measured() -> dict[str, Any]:
        return {"fingerprint": next(results), "prefill": [{"tok_s": 1.0}], "decode": [{"tok_s": 2.0}]}

    monkeypatch.setattr(kernel_choice, "available_kernels", lambda: ["generic"] * 3)
    monkeypatch.setattr(doctor, "_benchmark_demo", measured)
    text, families_agree = doctor.report([])
    lines = text.splitlines()
    assert lines[-2] == "FAILED: the families differ" and any("StopIteration" in line for line in lines)
    assert not families_agree


@pytest.mark.parametrize(("home", "shown"), [("/data", "~/models, 2 tokens/s"), ("/", "/data/models, 2 tokens/s")])
def test_report_shortens_the_home_folder(monkeypatch: pytest.MonkeyPatch, home: str, shown: str) -> None:
    monkeypatch.setenv("HOME", home)
    monkeypatch.setattr(doctor, "_compare_kernel_families", lambda: ([], True))
    assert doctor.report(["/data/models, 2 tokens/s"])[0].splitlines()[1] == shown


def test_report_fails_if_no_kernel_family_runs(notso: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing() -> dict[str, Any]:
        raise RuntimeError("no memory")

    monkeypatch.setattr(doctor, "run_checks", lambda *_: [])
    monkeypatch.setattr(doctor, "_benchmark_demo", failing)
    result = notso("doctor", "--report")
    assert result.code == 1 and result.out.rstrip().endswith("FAILED: not all families ran\n```")


def test_doctor_suggests_another_data_directory(notso: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    monkeypatch.setenv("NOTSO_DATA_DIR", str(file))
    findings = json.loads(notso("doctor", "--json").out)
    (finding,) = (each for each in findings if each["subject"] == "data")
    assert finding["status"] == "fail" and finding["fix"] == "set NOTSO_DATA_DIR to a writable folder"


def test_doctor_checks_the_data_that_the_server_uses(
    notso: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def found(subject: str) -> str:
        findings = json.loads(notso("doctor", "--json").out)
        return next(str(each["message"]) for each in findings if each["subject"] == subject)

    config = tmp_path / "config.toml"
    monkeypatch.setenv("NOTSO_CONFIG", str(config))
    monkeypatch.delenv("NOTSO_DATA_DIR", raising=False)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    config.write_text(f"[serve]\ndata-dir = '{tmp_path}/data'\n")
    assert f"conversations in {tmp_path}/data " in found("data")
    monkeypatch.setenv("NOTSO_DATA_DIR", f"{tmp_path}/other")
    assert f"conversations in {tmp_path}/other " in found("data")
    config.write_text("[serve]\ndatabase-url = 'postgresql://127.0.0.1:1/none'\n")
    assert found("data") == f"prompt cache in {tmp_path}/other, conversations in PostgreSQL"
    assert "not used" not in found("postgresql")


def test_doctor_names_the_missing_disk_space(monkeypatch: pytest.MonkeyPatch) -> None:
    needed = registry.KNOWN_FILES[0].size_bytes
    monkeypatch.setattr(registry, "find_local", lambda _file: None)
    monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=needed - 500_000_000))
    (finding,) = doctor._disk()
    assert finding.status == "warn" and finding.fix.startswith("free up another 500.0 MB, ")
