"""`notso cluster` without Ray, and the Serve configuration that it prints for manual deployment."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from cluster.ray_cluster import HAS_RAY, NO_RAY

from notso.cli import cluster, exit_codes
from notso.cli.app import run_command_line
from notso.cluster.plan import ENVIRONMENT


def test_dry_run_prints_the_serve_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["cluster", "up", "--replicas", "3", "--release", "7", "--allow-host", "chat.example.com", "--dry-run"]
    assert run_command_line(asked) == exit_codes.DONE
    config = json.loads(capsys.readouterr().out)
    [application] = config["applications"]
    assert application["args"]["release"] == "7" and application["deployments"][0]["num_replicas"] == 3
    assert application["args"]["settings"]["allowed_hosts"] == ["chat.example.com"]
    assert config["proxy_location"] == "EveryNode"


def test_several_replicas_require_database_and_valkey(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.delenv("VALKEY_URL", raising=False)
    assert run_command_line(["cluster", "up", "--replicas", "2"])
    assert "several replicas require DATABASE_URL and VALKEY_URL" in capsys.readouterr().err


def test_invalid_settings_of_replicas_are_refused_at_once(capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--allow-host", "bot.example:443"), ("--trust-proxy", "10.0.0.5/8")):
        assert run_command_line(["cluster", "up", option, value, "--dry-run"])
        assert repr(value) in capsys.readouterr().err


@pytest.mark.parametrize("action", ["up", "down", "status"])
def test_missing_ray_is_reported(
    action: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)  # imitate an environment without Ray
    monkeypatch.delitem(sys.modules, "notso.cluster.control", raising=False)
    for name in ("RAY_AUTH_MODE", "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH", "RAY_USAGE_STATS_ENABLED"):
        # The command sets these variables if they are unset; setting them here lets monkeypatch restore them.
        monkeypatch.setenv(name, "")
    assert run_command_line(["cluster", action]) == exit_codes.FAILED
    assert "Ray is not installed: " in capsys.readouterr().err


def test_max_replicas_below_replicas_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command_line(["cluster", "up", "--replicas", "4", "--max-replicas", "2", "--dry-run"])
    assert "max_replicas must not be less than replicas" in capsys.readouterr().err


def test_up_that_is_interrupted_before_replicas_are_ready_exits_with_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def deploy(config: object, is_cancelled: Callable[[], bool]) -> bool:
        signal.raise_signal(signal.SIGINT)
        return not is_cancelled()

    control = SimpleNamespace(ray_connection=lambda *_: contextlib.nullcontext(), deploy=deploy)
    monkeypatch.setattr(cluster, "ray_control", lambda: control)
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    try:
        assert run_command_line(["cluster", "up", "--address", "auto"]) == exit_codes.INTERRUPTED
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
    printed = capsys.readouterr()
    assert printed.out == "" and "Stopped before the replicas were ready" in printed.err


@pytest.mark.skipif(not HAS_RAY, reason=NO_RAY)
@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999", "no-such-host.invalid:6379"])
def test_unreachable_cluster_is_reported_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ENVIRONMENT.items():  # or the command sets them beyond this test
        monkeypatch.setenv(name, value)
    assert run_command_line(["cluster", "status", "--address", address]) == exit_codes.FAILED
    assert "Ray could not be reached or started: " in capsys.readouterr().err
