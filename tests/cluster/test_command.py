"""`notso cluster` without Ray, and the Serve configuration that it prints for manual deployment."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pkgutil import resolve_name
from types import SimpleNamespace

import pytest
from cluster.ray_cluster import HAS_RAY, NO_RAY

import notso.cluster
from notso.cli import cluster, exit_codes, terminal
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


@pytest.fixture
def handlers() -> Iterator[None]:
    """Restore the signal handlers that the command replaces."""
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in before.items():
        signal.signal(each, handler)


@pytest.mark.usefixtures("handlers")
def test_up_that_is_interrupted_before_replicas_are_ready_exits_with_code_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def deploy(config: object, is_cancelled: Callable[[], bool]) -> bool:
        signal.raise_signal(signal.SIGINT)
        return not is_cancelled()

    control = SimpleNamespace(ray_connection=lambda *_: contextlib.nullcontext(), deploy=deploy)
    monkeypatch.setattr(cluster, "ray_control", lambda: control)
    assert run_command_line(["cluster", "up", "--address", "auto"]) == exit_codes.INTERRUPTED
    printed = capsys.readouterr()
    assert printed.out == "" and "Stopped before the replicas were ready" in printed.err


def closed(text: str) -> None:
    raise OSError(errno.EIO, "the terminal is closed")


@pytest.mark.usefixtures("handlers")
def test_closed_terminal_stops_replicas_as_ctrl_c_does(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []

    def deploy(config: object, is_cancelled: Callable[[], bool]) -> bool:
        assert not is_cancelled()
        monkeypatch.setattr(terminal, "note", closed)
        assert signal.getsignal(signal.SIGHUP) is not signal.SIG_DFL, "the signal would end this process"
        signal.raise_signal(signal.SIGHUP)
        return not is_cancelled()

    control = SimpleNamespace(
        ray_connection=lambda *_: contextlib.nullcontext(), deploy=deploy, shut_down=lambda: stopped.append("cleanly")
    )
    monkeypatch.setattr(cluster, "ray_control", lambda: control)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    assert run_command_line(["cluster", "up"]) == exit_codes.DONE
    assert stopped == ["cleanly"]


@pytest.mark.usefixtures("handlers")
def test_ignored_hangup_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    def deploy(config: object, is_cancelled: Callable[[], bool]) -> bool:
        signal.raise_signal(signal.SIGHUP)
        assert not is_cancelled()
        signal.raise_signal(signal.SIGTERM)
        return not is_cancelled()

    control = SimpleNamespace(ray_connection=lambda *_: contextlib.nullcontext(), deploy=deploy)
    monkeypatch.setattr(cluster, "ray_control", lambda: control)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as under nohup
    assert run_command_line(["cluster", "up", "--address", "auto"]) == exit_codes.INTERRUPTED


def test_processes_of_ray_do_not_receive_hangups(monkeypatch: pytest.MonkeyPatch) -> None:
    masks: list[set[int]] = []

    def init(**options: object) -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))  # processes that Ray starts inherit this mask

    ray = SimpleNamespace(init=init, shutdown=lambda: None, serve=None)
    exceptions = SimpleNamespace(RayError=RuntimeError)
    for name, module in (("ray", ray), ("ray.exceptions", exceptions)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "notso.cluster.control", raising=False)
    umask = os.umask(0o077)
    try:
        with resolve_name("notso.cluster.control").ray_connection(None, 1):
            masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    finally:
        os.umask(umask)
        del sys.modules["notso.cluster.control"]
        vars(notso.cluster).pop("control", None)
    assert [signal.SIGHUP in mask for mask in masks] == [True, False]


@pytest.mark.skipif(not HAS_RAY, reason=NO_RAY)
@pytest.mark.parametrize("address", ["127.0.0.1:1", "[::1]:1", "127.0.0.1:99999", "no-such-host.invalid:6379"])
def test_unreachable_cluster_is_reported_at_once(
    address: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in ENVIRONMENT.items():  # or the command sets them beyond this test
        monkeypatch.setenv(name, value)
    assert run_command_line(["cluster", "status", "--address", address]) == exit_codes.FAILED
    assert "Ray could not be reached or started: " in capsys.readouterr().err
