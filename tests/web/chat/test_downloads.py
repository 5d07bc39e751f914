"""Downloading a model from the page, from a server that imitates the Hub."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_engine import ScriptedEngine
from web.chat.models_page import named, page, text_of, two_files

from notso.smollm3 import ModelFileError
from notso.smollm3.hub import download, registry
from notso.web.engine.downloads import Download, Downloads
from notso.web.engine.models import ModelRegistry

Start = Callable[..., Any]


def begin(server: Any, file: registry.KnownFile) -> Any:
    return server.client.post("/models/download", data={"name": file.name})


def wait_for(server: Any, *phases: str) -> Download:
    server.wait(lambda: server.chat.downloads.current is not None and server.chat.downloads.current.phase in phases)
    found: Download = server.chat.downloads.current
    return found


def test_model_is_downloaded_from_the_models_page(
    start: Start, fake_hub: Any, official_file: registry.KnownFile
) -> None:
    server = start(ScriptedEngine(), model_registry=ModelRegistry(lambda path: named("x", path or ""))).ready()
    offer = page(server)
    assert "Download</button>" in offer and "needs 70.1 MB" in text_of(offer) and "free in" in text_of(offer)
    assert fake_hub.requests == [], "no request may leave the server before a user asks for it"

    assert begin(server, official_file).headers["location"] == "/models"

    done = wait_for(server, "done")
    assert done.percent == 100 and registry.find_local(official_file) is not None
    shown = text_of(page(server))
    assert "small:Q4_K_M downloaded and verified (SHA-256 matches)." in shown
    assert "small:Q4_K_M Q4_K_M, 3 MB verified" in shown
    assert 'aria-label="Load small:Q4_K_M"' in page(server)
    home = page(server, "/")
    assert "Switch now</button>" in home and 'value="small:Q4_K_M"' in home
    chosen = server.client.post("/models/switch", data={"model": "small:Q4_K_M", "chat": ""})
    assert chosen.headers["location"] == "/"
    server.wait(lambda: server.shared.engine.info is not None and server.shared.engine.info.name == "x")


@pytest.mark.parametrize("beside", [True, False])
def test_downloaded_model_replaces_the_demo_model(
    start: Start, fake_hub: Any, official_file: registry.KnownFile, beside: bool
) -> None:
    loading, go_on = threading.Event(), threading.Event()

    def load(path: Path | None, occupied: int = 0) -> ScriptedEngine:
        if path is not None:
            loading.set()
            assert go_on.wait(60)
        return named(path.stem if path else "demo", path or registry.demo_path())

    models = ModelRegistry(load, load_beside=load if beside else None)
    server = start(lambda: load(None), model_registry=models).ready()
    begin(server, official_file)
    server.wait(loading.is_set)
    wait_for(server, "done")
    host = server.shared.engine
    assert host.is_loading and host.default.info.name == "demo"
    assert 'hx-trigger="every 1s"' in server.client.get("/models/download", headers={"HX-Request": "true"}).text
    if beside:
        assert server.finished(server.ask("Hello")).state == "done", "the demo model stays in use"
        assert "Loading" in text_of(page(server))
    go_on.set()
    server.wait(lambda: not host.is_loading)
    assert host.info is not None and host.info.path.endswith(official_file.filename)
    settled = server.client.get("/status", headers={"HX-Request": "true"})
    assert "Demo model" not in settled.text
    assert ('hx-select=".greeting"' in settled.text) == ('hx-trigger="every 1s"' not in settled.text)
    assert server.finished(server.ask("Hello")).state == "done"


def test_demo_model_stays_if_downloaded_model_cannot_be_loaded(
    start: Start, fake_hub: Any, official_file: registry.KnownFile
) -> None:
    def load(path: Path | None) -> ScriptedEngine:
        if path is not None:
            raise ModelFileError("blk.3.attn_q.weight is missing")
        return named("demo", registry.demo_path())

    server = start(lambda: load(None), model_registry=ModelRegistry(load)).ready()
    begin(server, official_file)
    wait_for(server, "done")
    server.wait(lambda: not server.shared.engine.is_loading and server.shared.engine.state == "ready")
    assert server.shared.engine.info.name == "demo" and "is missing" not in page(server, "/")
    assert server.finished(server.ask("Hello")).state == "done"


def test_download_does_not_replace_a_selected_model(
    start: Start, tmp_path: Path, fake_hub: Any, official_file: registry.KnownFile
) -> None:
    folder = two_files(tmp_path / "models")
    first = folder / "one-Q4_K_M.gguf"
    models = ModelRegistry(lambda path: named("x", path or ""), folder)
    server = start(lambda: named("one", first), model_registry=models).ready()
    begin(server, official_file)
    wait_for(server, "done")
    assert not server.shared.engine.is_loading and server.shared.engine.info.name == "one"


def test_download_shows_progress_rate_and_time_left(
    start: Start, fake_hub: Any, official_file: registry.KnownFile
) -> None:
    fake_hub.bytes_per_second, fake_hub.trickles_from = 800_000, 2_200_000
    server = start(ScriptedEngine()).ready()
    begin(server, official_file)
    server.wait(lambda: (server.chat.downloads.current.bytes_per_s or 0) > 0)
    fragment = server.client.get("/models/download", headers={"HX-Request": "true"}).text
    assert re.search(r"of 3 MB, \d+%, [\d.]+ [kM]B/s, \d+ s left", text_of(fragment)), text_of(fragment)
    assert 'hx-trigger="every 1s"' in fragment and "<html" not in fragment and "/models/download/stop" in fragment
    assert re.search(r'<progress max="3000000" value="[1-9]\d+"', fragment)
    current = server.chat.downloads.current
    assert 10_000 < current.bytes_per_s < 3_000_000  # generous bounds: a busy machine may receive much at once
    assert current.seconds_left == pytest.approx((3_000_000 - current.done_bytes) / current.bytes_per_s)
    assert '<meta http-equiv="refresh"' in page(server), "without scripts the page must still refresh"
    status = server.client.get("/status", headers={"HX-Request": "true"}).text
    assert re.search(r"Downloading small:Q4_K_M: \d+%, \d+ s left", text_of(status)) and "every 1s" in status
    fake_hub.bytes_per_second, fake_hub.trickles_from = 0, None
    wait_for(server, "done")
    assert "hx-trigger" not in server.client.get("/models/download", headers={"HX-Request": "true"}).text


def test_stopped_download_resumes_after_a_restart(
    start: Start, fake_hub: Any, official_file: registry.KnownFile, tmp_path: Path
) -> None:
    fake_hub.trickles_from = 600_000
    server = start(ScriptedEngine()).ready()
    begin(server, official_file)
    server.wait(lambda: download.part_path(official_file).exists() and _kept(official_file) > 500_000)
    fragment = server.client.post("/models/download/stop", headers={"HX-Request": "true"})
    assert fragment.status_code == 200 and ("Stopping" in fragment.text or "Resume</button>" in fragment.text)
    stopped = wait_for(server, "stopped")
    kept = _kept(official_file)
    assert stopped.done_bytes <= kept < 3_000_000 and not stopped.active
    fake_hub.trickles_from = None
    fake_hub.requests.clear()

    other = start(ScriptedEngine(), data_dir=tmp_path / "other").ready()
    shown = page(other)
    assert f"{100 * kept // 3_000_000}% already downloaded" in text_of(shown) and "Resume</button>" in shown
    begin(other, official_file)
    wait_for(other, "done")
    assert fake_hub.gets == [f"bytes={kept}-"]
    assert registry.find_local(official_file).read_bytes() == fake_hub.content  # type: ignore[union-attr]


def _kept(file: registry.KnownFile) -> int:
    return download.part_path(file).stat().st_size


class Held:
    """A transfer that reports progress once for each `go` and finishes in its run number `last`."""

    def __init__(self, last: int) -> None:
        self.runs = 0
        self.began, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self._last = last

    def __call__(self, file: registry.KnownFile, progress: Callable[[str, int, int], None], **_: Any) -> None:
        self.runs += 1
        run = self.runs
        self.began.release()
        assert self.go.acquire(timeout=60)
        if run < self._last:
            progress("downloading", 1, file.size_bytes)
            raise AssertionError("the transfer was not stopped")


def test_resume_during_stop_restarts_the_download(official_file: registry.KnownFile) -> None:
    held, arrived = Held(last=2), []
    downloads = Downloads(held)
    assert downloads.start(official_file, lambda: arrived.append("first"))
    assert held.began.acquire(timeout=60)
    downloads.stop()
    assert downloads.start(official_file, lambda: arrived.append("second"))
    other = dataclasses.replace(official_file, filename="other.gguf")
    assert not downloads.start(other)
    assert downloads.current is not None and downloads.current.phase == "checking"
    held.go.release()
    assert held.began.acquire(timeout=60), "the stopped transfer must resume"
    with downloads._lock:  # the lock ensures that the new thread has been recorded
        thread = downloads._thread
    held.go.release()
    assert thread is not None
    thread.join(60)
    assert (downloads.current.phase, arrived, held.runs) == ("done", ["second"], 2)


def test_second_stop_cancels_a_pending_resume(official_file: registry.KnownFile) -> None:
    held = Held(last=2)
    downloads = Downloads(held)
    downloads.start(official_file)
    assert held.began.acquire(timeout=60)
    downloads.stop()
    assert downloads.start(official_file)
    downloads.stop()
    held.go.release()
    downloads.close(60)
    assert downloads.current is not None and downloads.current.phase == "stopped" and held.runs == 1


def test_failed_thread_start_does_not_block_the_next_download(
    official_file: registry.KnownFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    held = Held(last=1)
    downloads = Downloads(held)
    with monkeypatch.context() as patched, pytest.raises(RuntimeError):
        patched.setattr(threading.Thread, "start", refuse)
        downloads.start(official_file)
    assert downloads.current is None
    assert downloads.start(official_file)
    held.go.release()
    downloads._thread.join(60)  # type: ignore[union-attr]
    assert downloads.current is not None and downloads.current.phase == "done"


def test_server_shutdown_keeps_the_partial_download(
    start: Start, fake_hub: Any, official_file: registry.KnownFile
) -> None:
    fake_hub.trickles_from = 400_000
    server = start(ScriptedEngine()).ready()
    begin(server, official_file)
    server.wait(lambda: download.part_path(official_file).exists() and _kept(official_file) > 300_000)
    server.begin_close()
    wait_for(server, "stopped")
    assert _kept(official_file) >= 300_000


def test_failed_download_shows_the_error_and_can_be_retried(
    start: Start, fake_hub: Any, official_file: registry.KnownFile
) -> None:
    server = start(ScriptedEngine()).ready()
    fake_hub.statuses = [404]
    begin(server, official_file)
    assert wait_for(server, "failed").failure
    assert "HTTP 404" in text_of(page(server)) and "Download</button>" in page(server)
    begin(server, official_file)
    assert wait_for(server, "done")


def test_download_with_wrong_checksum_is_not_installed(
    start: Start, fake_hub: Any, official_file: registry.KnownFile
) -> None:
    server = start(ScriptedEngine()).ready()
    fake_hub.content = bytes(len(fake_hub.content))
    fake_hub.offered_etag = official_file.sha256
    begin(server, official_file)
    assert "does not match its published SHA-256" in wait_for(server, "failed").failure
    assert registry.find_local(official_file) is None and "small:Q4_K_M Q4_K_M" not in text_of(page(server))


def test_download_without_enough_disk_space_sends_no_request(
    start: Start, fake_hub: Any, official_file: registry.KnownFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    huge = dataclasses.replace(official_file, size_bytes=10**16)
    monkeypatch.setattr(registry, "KNOWN_FILES", (huge,))
    server = start(ScriptedEngine()).ready()
    shown = page(server)
    assert "Not enough disk space" in shown and "Download</button>" not in shown
    begin(server, huge)
    assert re.search(r"needs 10000000\.\d+ GB more .* are free", wait_for(server, "failed").failure)
    assert fake_hub.requests == []


def test_offline_mode_disables_downloads(
    start: Start, fake_hub: Any, official_file: registry.KnownFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    server = start(ScriptedEngine()).ready()
    shown = page(server)
    assert "Offline mode is on" in shown and "Download</button>" not in shown
    begin(server, official_file)
    assert "disabled" in wait_for(server, "failed").failure and fake_hub.requests == []


def test_only_one_download_runs_at_a_time(
    start: Start, fake_hub: Any, official_file: registry.KnownFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = dataclasses.replace(official_file, name="other", filename="Other.gguf", sha256="0" * 64)
    monkeypatch.setattr(registry, "KNOWN_FILES", (official_file, other))
    fake_hub.trickles_from = 300_000
    server = start(ScriptedEngine()).ready()
    begin(server, official_file)
    assert begin(server, official_file).status_code == 303, "a second request must not start a second download"
    assert begin(server, other).status_code == 409
    assert begin(server, dataclasses.replace(other, name="../../etc")).status_code == 404
    server.wait(lambda: bool(fake_hub.gets))
    server.client.post("/models/download/stop")
    wait_for(server, "stopped")
    assert fake_hub.gets == [None]


def test_unexpected_exception_marks_the_download_as_failed() -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError

    downloads = Downloads(broken)
    assert downloads.start(registry.official_files()[0])
    downloads.close(10)
    assert downloads.current is not None and downloads.current.phase == "failed" and "log" in downloads.current.failure
