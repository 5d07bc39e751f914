"""Downloads from a fake Hugging Face Hub, with all kinds of failures."""

from __future__ import annotations

import dataclasses
import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from notso.smollm3.errors import DownloadError, NoSpaceError
from notso.smollm3.hub import download, registry
from notso.system import files
from notso.system.files import lock


def pull(file: registry.KnownFile, **options: Any) -> download.DownloadedFile:
    return download.pull(file, **{"sleep": lambda _seconds: None, **options})


def part_of(file: registry.KnownFile) -> Path:
    return registry.blob_path(file).with_name(f"{file.sha256}.incomplete")


def test_download_is_stored_in_the_hub_cache_layout(fake_hub: Any, official_file: registry.KnownFile) -> None:
    pulled = pull(official_file)

    assert pulled.path == registry.snapshot_path(official_file)
    assert pulled.path.read_bytes() == fake_hub.content
    assert pulled.path.resolve() == registry.blob_path(official_file)
    assert pulled.downloaded_bytes == official_file.size_bytes
    assert not part_of(official_file).exists()
    assert registry.find_local(official_file) == pulled.path
    assert registry.resolve_model() == pulled.path


def test_huggingface_hub_finds_the_downloaded_file(fake_hub: Any, official_file: registry.KnownFile) -> None:
    from huggingface_hub import try_to_load_from_cache

    pulled = pull(official_file)

    found = try_to_load_from_cache(
        official_file.repository,
        official_file.filename,
        revision=official_file.revision,
        cache_dir=registry.hub_cache(),
    )
    assert found == str(pulled.path)


def test_existing_file_is_not_downloaded_again(fake_hub: Any, official_file: registry.KnownFile) -> None:
    pull(official_file)
    fake_hub.requests.clear()

    again = pull(official_file)

    assert fake_hub.requests == []
    assert again.downloaded_bytes == 0
    assert again.sha256 == official_file.sha256


def test_broken_connection_is_resumed_with_a_range_request(fake_hub: Any, official_file: registry.KnownFile) -> None:
    fake_hub.cuts = [1_000_000, 500_000]

    pulled = pull(official_file)

    assert fake_hub.gets == [None, "bytes=1000000-", "bytes=1500000-"]
    assert pulled.path.read_bytes() == fake_hub.content


def test_next_call_resumes_after_retries_are_exhausted(fake_hub: Any, official_file: registry.KnownFile) -> None:
    fake_hub.cuts = [1_000_000, *[0] * download.RETRIES]
    with pytest.raises(DownloadError, match=r"stopped at 1,000,000 of 3,000,000 bytes.*resumes"):
        pull(official_file)
    assert part_of(official_file).stat().st_size == 1_000_000
    assert registry.find_local(official_file) is None
    fake_hub.requests.clear()

    pulled = pull(official_file)

    assert fake_hub.gets == ["bytes=1000000-"]
    assert pulled.resumed_at_bytes == 1_000_000
    assert pulled.downloaded_bytes == 2_000_000
    assert pulled.path.read_bytes() == fake_hub.content


def test_interrupted_download_keeps_received_bytes(fake_hub: Any, official_file: registry.KnownFile) -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if done > 1_500_000:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull(official_file, progress=interrupt)
    kept = part_of(official_file).stat().st_size
    assert 1_500_000 < kept < official_file.size_bytes

    assert pull(official_file).resumed_at_bytes == kept


def test_progress_never_decreases_and_ends_at_the_file_size(fake_hub: Any, official_file: registry.KnownFile) -> None:
    fake_hub.cuts = [1_200_000]
    seen: list[tuple[str, int, int]] = []

    pull(official_file, progress=lambda *report: seen.append(report))

    assert {what for what, _, _ in seen} == {"downloading"}
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert seen[-1] == ("downloading", official_file.size_bytes, official_file.size_bytes)


def test_wrong_content_is_refused_and_deleted(fake_hub: Any, official_file: registry.KnownFile) -> None:
    fake_hub.content = bytes(len(fake_hub.content))
    fake_hub.offered_etag = official_file.sha256

    with pytest.raises(DownloadError, match=f"expected {official_file.sha256}, got [0-9a-f]{{64}}"):
        pull(official_file)

    assert list(registry.repository_folder(official_file).rglob("*.gguf")) == []
    assert list(registry.blob_path(official_file).parent.iterdir()) == []


@pytest.mark.parametrize(
    ("knob", "value", "told"),
    [("offered_size", 2_999_999, "expected 3,000,000 bytes, got 2,999,999"), ("offered_etag", "0" * 64, "SHA-256")],
)
def test_wrong_size_or_etag_is_refused_before_the_download(
    fake_hub: Any, official_file: registry.KnownFile, knob: str, value: Any, told: str
) -> None:
    setattr(fake_hub, knob, value)

    with pytest.raises(DownloadError, match=told):
        pull(official_file)

    assert fake_hub.gets == []


def test_more_bytes_than_published_are_refused(fake_hub: Any, official_file: registry.KnownFile) -> None:
    fake_hub.extra = b"and more"

    with pytest.raises(DownloadError, match="longer than the published"):
        pull(official_file)

    assert registry.find_local(official_file) is None


def test_insufficient_space_is_reported_before_any_request(fake_hub: Any, official_file: registry.KnownFile) -> None:
    with pytest.raises(DownloadError, match=r"needs 0\.07 GB more .* 0\.05 GB are free"):
        pull(official_file, free_bytes=lambda _folder: 50_000_000)

    assert fake_hub.requests == []


def test_existing_part_needs_no_disk_space(fake_hub: Any, official_file: registry.KnownFile) -> None:
    fake_hub.cuts = [2_900_000, *[0] * download.RETRIES]
    with pytest.raises(DownloadError):
        pull(official_file)

    pulled = pull(official_file, free_bytes=lambda _folder: download.SPARE_BYTES + 100_000)

    assert pulled.resumed_at_bytes == 2_900_000


def test_full_disk_ends_the_download_and_keeps_the_part(
    fake_hub: Any, official_file: registry.KnownFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    append = download._Part.append

    def full(self: Any, chunk: bytes) -> None:
        if self.size > 1_000_000:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(self, chunk)

    monkeypatch.setattr(download._Part, "append", full)
    with pytest.raises(NoSpaceError, match="disk is full"):
        pull(official_file)

    assert part_of(official_file).stat().st_size > 1_000_000


def test_download_succeeds_if_the_server_ignores_ranges(fake_hub: Any, official_file: registry.KnownFile) -> None:
    fake_hub.knows_ranges = False
    fake_hub.cuts = [1_000_000]

    assert pull(official_file).path.read_bytes() == fake_hub.content


def test_download_ends_if_every_attempt_starts_over(fake_hub: Any, official_file: registry.KnownFile) -> None:
    fake_hub.knows_ranges = False
    fake_hub.cuts = [1_000_000] * (download.RETRIES + 2)

    with pytest.raises(DownloadError, match="stopped at 1,000,000 of 3,000,000 bytes"):
        pull(official_file)

    assert len(fake_hub.gets) == download.RETRIES + 1


def test_growth_after_one_restart_is_progress(fake_hub: Any, official_file: registry.KnownFile) -> None:
    fake_hub.cuts = [2_000_000, 100_000, *[200_000] * (download.RETRIES + 3)]

    def only_second_ignores_range(_seconds: float) -> None:
        fake_hub.knows_ranges = len(fake_hub.gets) != 1

    assert pull(official_file, sleep=only_second_ignores_range).path.read_bytes() == fake_hub.content
    assert fake_hub.gets[1:3] == ["bytes=2000000-", "bytes=100000-"]


def test_download_ends_if_every_progress_is_followed_by_a_restart(
    fake_hub: Any, official_file: registry.KnownFile
) -> None:
    fake_hub.cuts = [100_000] * 100

    def every_other_ignores_range(_seconds: float) -> None:
        fake_hub.knows_ranges = len(fake_hub.gets) % 2 == 1

    with pytest.raises(DownloadError, match="stopped at 100,000 of 3,000,000 bytes"):
        pull(official_file, sleep=every_other_ignores_range)
    assert len(fake_hub.gets) == 2 * (download.RETRIES + 1) + 1


@pytest.mark.parametrize("size", [3_000_001, 5_000_000])
def test_part_longer_than_the_file_is_discarded(fake_hub: Any, official_file: registry.KnownFile, size: int) -> None:
    part_of(official_file).parent.mkdir(parents=True)
    part_of(official_file).write_bytes(bytes(size))

    pulled = pull(official_file)

    assert pulled.resumed_at_bytes == 0
    assert pulled.path.read_bytes() == fake_hub.content


def test_complete_part_with_wrong_content_is_deleted(fake_hub: Any, official_file: registry.KnownFile) -> None:
    part_of(official_file).parent.mkdir(parents=True)
    part_of(official_file).write_bytes(bytes(official_file.size_bytes))

    with pytest.raises(DownloadError, match="has been deleted"):
        pull(official_file)

    assert pull(official_file).path.read_bytes() == fake_hub.content


def test_busy_server_is_retried_with_backoff(fake_hub: Any, official_file: registry.KnownFile) -> None:
    fake_hub.statuses = [503, 429]
    waits: list[float] = []

    pull(official_file, sleep=waits.append)

    assert len(fake_hub.gets) == 3
    assert waits == [1.0, 2.0]


def test_forbidden_download_is_not_retried(fake_hub: Any, official_file: registry.KnownFile) -> None:
    fake_hub.statuses = [403]

    with pytest.raises(DownloadError, match="403"):
        pull(official_file)

    assert len(fake_hub.gets) == 1


def test_offline_mode_sends_no_requests(
    fake_hub: Any, official_file: registry.KnownFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DownloadError, match="network is disabled"):
        pull(official_file, offline=True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(DownloadError, match="network is disabled"):
        pull(official_file)
    assert fake_hub.requests == []


def test_offline_mode_verifies_an_existing_file(fake_hub: Any, official_file: registry.KnownFile) -> None:
    pull(official_file)

    assert pull(official_file, offline=True).sha256 == official_file.sha256


def test_damaged_file_is_detected_and_replaced_with_force(fake_hub: Any, official_file: registry.KnownFile) -> None:
    path = pull(official_file).path
    path.resolve().write_bytes(bytes(official_file.size_bytes))

    with pytest.raises(DownloadError, match="--force"):
        pull(official_file)

    assert pull(official_file, force=True).path.read_bytes() == fake_hub.content


def test_unreachable_hub_is_reported_in_one_line(
    official_file: registry.KnownFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")

    with pytest.raises(DownloadError, match=r"^http://127\.0\.0\.1:9 cannot be reached: [^\n]+$"):
        pull(official_file)


def test_plain_http_is_refused(official_file: registry.KnownFile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://mirror.example")

    with pytest.raises(DownloadError, match="https only"):
        pull(official_file)


def test_token_is_not_sent_to_a_redirect_target(
    fake_hub: Any, other_host: Any, official_file: registry.KnownFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_of_no_use")
    fake_hub.redirect_to = other_host.url.replace("127.0.0.1", "localhost")

    assert pull(official_file).path.read_bytes() == fake_hub.content

    assert fake_hub.tokens == ["Bearer hf_of_no_use"]
    assert other_host.tokens == [None]


def test_download_locked_by_another_process_is_refused(fake_hub: Any, official_file: registry.KnownFile) -> None:
    folder = registry.hub_cache() / ".locks" / registry.repository_folder(official_file).name
    folder.mkdir(parents=True)
    with (folder / f"{official_file.sha256}.lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DownloadError, match="another process"):
            pull(official_file)


def test_finished_download_is_not_locked_by_a_forked_child(
    fake_hub: Any, official_file: registry.KnownFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    inherited: list[int] = []
    with monkeypatch.context() as patch:
        patch.setattr(files, "lock", lambda descriptor: (inherited.append(os.dup(descriptor)), lock(descriptor)))
        pull(official_file)

    try:
        assert pull(official_file, force=True).downloaded_bytes == official_file.size_bytes
    finally:
        os.close(*inherited)


def test_unwritable_cache_is_reported(fake_hub: Any, official_file: registry.KnownFile, own_home: Path) -> None:
    (own_home / "hf").write_text("a file where a folder should be")

    with pytest.raises(DownloadError, match="cannot be stored"):
        pull(official_file)


def test_known_files_match_published_sizes_and_hashes() -> None:
    sizes = {file.filename: (file.size_bytes, file.sha256[:8]) for file in registry.KNOWN_FILES}

    assert sizes == {
        "SmolLM3-Q4_K_M.gguf": (1_915_305_312, "8334b850"),
        "SmolLM3-Q8_0.gguf": (3_275_574_624, "8aa8cc74"),
    }
    assert all(len(file.sha256) == 64 and len(file.revision) == 40 for file in registry.KNOWN_FILES)
    assert len({dataclasses.astuple(file) for file in registry.KNOWN_FILES}) == 2


def test_cached_file_that_vanishes_while_it_is_verified_is_reported(
    fake_hub: Any, official_file: registry.KnownFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pull(official_file).path
    for name in ("stored_hash", "sha256_of"):
        with monkeypatch.context() as patched:
            if name == "sha256_of":
                patched.setattr(registry, "stored_hash", lambda path: None)
            patched.setattr(registry, name, lambda path, *_: path.with_name("removed").read_bytes())
            with pytest.raises(DownloadError, match="cannot be read: No such file"):
                pull(official_file)
    assert path.exists()
