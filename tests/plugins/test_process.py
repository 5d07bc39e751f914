"""A plugin in a separate process: its results arrive, and its errors switch off only this plugin, with its name."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from plugins.installed_plugins import install

from notso.plugins import process as process_module
from notso.plugins import wire
from notso.plugins.errors import PluginError, PluginRefusalError
from notso.plugins.process import START_SECONDS, PluginProcess, _timeout_message

Started = Callable[[str], PluginProcess]
CALLED_IN = {"owner": "local", "chat_id": "c", "attachments": {"a.txt": "text"}}


def tool(process: PluginProcess, name: str, seconds: float = 30.0, **arguments: Any) -> Any:
    given = {"name": name, "arguments": arguments, "called_in": CALLED_IN}
    return process.call("tool", given, f"tool {name}", seconds)


def pid(process: PluginProcess) -> int:
    assert process._process is not None
    return process._process.pid


def is_gone(process: PluginProcess) -> bool:
    assert process._process is not None
    return process._process.wait(30) != 0


def test_plugin_offer_and_results_are_received(started: Started) -> None:
    process = started("kind")
    assert process.state == "on" and process.failure == ""
    assert [each["name"] for each in process.offer["tools"]] == ["echo", "refuse"]
    assert [each["path"] for each in process.offer["pages"]] == ["", "raw"]
    assert not process.offer["signs_in"]
    assert tool(process, "echo", text="hé\ud800") == "hé\ud800|local|['a.txt']"
    assert process.call("command", {"name": "shout", "argument": "a"}, "command", 30) == "A"


def test_refusal_does_not_disable_the_plugin(started: Started) -> None:
    process = started("kind")
    with pytest.raises(PluginRefusalError, match=r"^not today nor tomorrow$"):
        tool(process, "refuse")
    assert process.state == "on" and tool(process, "echo", text="x").startswith("x|")


@pytest.mark.parametrize(
    ("name", "seconds", "why"),
    [
        ("raises", 30.0, "tool raises raised ZeroDivisionError: boom [2J and more"),
        ("hangs", 0.2, "tool hangs took longer than 0.2 s"),
        ("spins", 0.2, "tool spins took longer than 0.2 s"),
        ("floods", 30.0, "it printed too much"),
        ("leaves", 30.0, "its process has ended"),
    ],
)
def test_plugin_error_disables_the_plugin(
    started: Started, caplog: pytest.LogCaptureFixture, name: str, seconds: float, why: str
) -> None:
    process = started(name)
    with pytest.raises(PluginError, match=f"the plugin {name} ") as failure:
        tool(process, name, seconds)
    assert failure.value.plugin == name and "\n" not in str(failure.value) and "\x1b" not in str(failure.value)
    assert is_gone(process)
    assert (process.state, process.failure) == ("off", why)
    assert f"the plugin {name} was disabled: {why}" in caplog.text
    with pytest.raises(PluginError, match="disabled"):
        tool(process, name)


def test_pending_calls_fail_when_the_plugin_is_disabled(started: Started) -> None:
    process = started("hangs")
    given = {"name": "hangs", "arguments": {}, "called_in": CALLED_IN}
    long: Future[Any] = process.ask("tool", given, "tool long", 3600.0)
    process.ask("tool", given, "tool short", 0.2)
    with pytest.raises(PluginError, match="tool short took longer"):
        long.result(60)


def test_disabled_plugin_can_be_restarted(started: Started) -> None:
    process = started("raises")
    first = pid(process)
    with pytest.raises(PluginError):
        tool(process, "raises")
    assert is_gone(process)
    process.start()
    process.ready.wait(START_SECONDS)
    assert process.state == "on" and process.failure == "" and pid(process) != first


def test_printed_lines_are_logged_up_to_a_limit(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "notso.plugins")
    caplog.handler.filters.clear()  # a server in this process may have limited repeated records
    process = started("prints")
    assert tool(process, "prints") == "printed"
    for _ in range(20):  # the lines arrive independently of the answer
        assert tool(process, "prints") == "printed"
    process.close()
    said = caplog.text
    assert "the plugin prints printed: hello from the plugin" in said and "and on stderr" in said and "raw [2J" in said
    assert said.count("printed: ") <= process_module.MAX_PRINTED_LINES


def test_last_words_of_a_process_are_logged(started: Started, caplog: pytest.LogCaptureFixture) -> None:
    caplog.handler.filters.clear()  # a server in this process may have limited repeated records
    process = started("leaves")
    with pytest.raises(PluginError):
        tool(process, "leaves")
    for thread in threading.enumerate():
        if thread.name == "notso-plugin-leaves":
            thread.join(60)
    assert "the plugin leaves printed: out of memory" in caplog.text
    assert "the plugin leaves printed: and luck" in caplog.text


def test_every_printed_line_is_counted() -> None:
    process = SimpleNamespace(name="prints", printed_lines=0)
    printed = process_module._OutputLogger(cast(PluginProcess, process))
    assert printed.log_output(b"line\n" * 3_000 + b"unfinished")
    assert process.printed_lines == 3_000


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("unloadable", "it cannot be loaded: RuntimeError: no import for you"),
        ("no-plugin", "it cannot be loaded: TypeError: hostile_plugin:NO_PLUGIN is not a notso.plugins.Plugin"),
        ("nobody", "it cannot be loaded: LookupError: no plugin nobody is installed"),
    ],
)
def test_plugin_that_fails_to_load_is_off(started: Started, name: str, why: str) -> None:
    process = started(name)
    assert (process.state, process.failure) == ("off", why)


def test_plugin_that_never_loads_is_terminated(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "START_SECONDS", 0.5)
    process = PluginProcess("never-loads")
    process.start()
    process.ready.wait(60)
    assert (process.state, process.failure) == ("off", _timeout_message("loading it", 0.5)) and is_gone(process)


def test_plugin_environment_contains_no_server_secrets(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NOTSO_API_KEY", "NOTSO_DATA_DIR", "DATABASE_URL", "NOTSO_PLUGIN_COLOUR"):
        monkeypatch.setenv(name, "x")
    assert tool(started("tells"), "tells") == "NOTSO_PLUGIN_COLOUR"


def test_close_ends_the_plugin_process(started: Started) -> None:
    process = started("kind")
    process.close()
    with pytest.raises(ProcessLookupError):
        os.kill(pid(process), 0)


def test_unserializable_arguments_do_not_disable_the_plugin(started: Started) -> None:
    process = started("kind")
    with pytest.raises(PluginError, match="cannot receive this value"):
        tool(process, "echo", text=object())
    with pytest.raises(PluginError, match="cannot receive this value"):
        tool(process, "echo", text=float("nan"))
    assert process.state == "on"


def test_calls_beyond_the_limit_are_refused(started: Started, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_module, "MAX_CALLS", 2)
    process = started("hangs")
    given = {"name": "hangs", "arguments": {}, "called_in": CALLED_IN}
    for _ in range(2):
        process.ask("tool", given, "tool hangs", 3600.0)
    with pytest.raises(PluginError, match="is overloaded"):
        process.ask("tool", given, "tool hangs", 3600.0)
    assert process.state == "on"


def row_of(process: PluginProcess, name: str, tokens: Any, logits: Any) -> Any:
    changed = process.process_logits(name, tokens.data.cast("B"), logits.data.cast("B"))
    return np.frombuffer(changed, np.float32)


def test_logits_processor_changes_only_its_tokens(started: Started) -> None:
    process = started("kind")
    logits = np.random.default_rng(1).normal(size=49_152).astype(np.float32)
    changed = row_of(process, "ban_1000", np.arange(7, dtype=np.int32), logits)
    assert np.isneginf(changed[1000])
    assert np.delete(changed, 1000).tobytes() == np.delete(logits, 1000).tobytes()
    counted = row_of(process, "only_by_length", np.arange(7, dtype=np.int32), logits)
    assert np.flatnonzero(np.isfinite(counted)).tolist() == [1007]


@pytest.mark.parametrize("name", ["hang_row", "raise_row", "short_row"])
def test_failing_logits_processor_disables_the_plugin(
    started: Started, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(process_module, "ROW_SECONDS", 0.3)
    process = started("rows")
    with pytest.raises(PluginError, match=f"the plugin rows .*{name}"):
        row_of(process, name, np.zeros(3, np.int32), np.zeros(64, np.float32))
    assert is_gone(process) and process.state == "off"


def test_slow_logits_processor_disables_the_plugin(started: Started) -> None:
    process = started("rows")
    process._wait_updated = 0.0
    process._record_wait("logits processor slow", 0.0, 4.0)  # the calls took all of four seconds
    assert process.state == "on"
    process._record_wait("logits processor slow", 104.0, 107.0)  # idle time compensates for earlier calls
    assert process.state == "on"
    for began in range(107, 112):
        process._record_wait("logits processor slow", float(began), began + 1.0)
    assert process.state == "on"  # a fifth of the time was idle
    for began in range(112, 140):
        process._record_wait("logits processor slow", float(began), began + 1.0)
    assert (process.state, process.failure) == ("off", "logits processor slow delays all responses")


def test_logits_beyond_the_vocabulary_limit_are_refused(started: Started) -> None:
    process = started("kind")
    with pytest.raises(PluginError, match="this many tokens"):
        row_of(process, "ban_1000", np.zeros(1, np.int32), np.zeros(wire.MAX_VOCAB + 1, np.float32))
    assert process.state == "on"


def open_descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def refuse(*arguments: Any, **options: Any) -> Any:
    raise OSError(errno.EMFILE, "too many open files")


def refuse_thread(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("where", "refused", "reason"),
    [
        ("socket.socketpair", refuse, "too many open files"),
        ("notso.plugins.wire.create_shared_file", refuse, "too many open files"),
        ("os.ftruncate", refuse, "too many open files"),
        ("mmap.mmap", refuse, "too many open files"),
        ("subprocess.Popen", refuse, "too many open files"),
        ("threading.Thread.start", refuse_thread, "can't start new thread"),
        ("selectors.DefaultSelector", refuse, "too many open files"),
    ],
)
def test_start_without_resources_fails_cleanly_and_can_be_retried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, refused: Callable[..., Any], reason: str
) -> None:
    install(tmp_path, monkeypatch)
    process, before = PluginProcess("kind"), open_descriptors()
    with monkeypatch.context() as patched:
        patched.setattr(where, refused)
        process.start()
        process.ready.wait(0.0 if where != "selectors.DefaultSelector" else 30.0)
    assert process.state == "off" and process.failure.startswith("it could not be started: ")
    assert process.failure.endswith(reason)
    if where != "selectors.DefaultSelector":  # the thread may still be closing descriptors
        assert open_descriptors() == before
    process.start()
    process.ready.wait(START_SECONDS)
    assert process.state == "on"
    process.close()
