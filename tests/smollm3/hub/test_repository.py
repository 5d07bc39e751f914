"""Any repository: choice of a file, required metadata from the Hub, and verified download."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import FakeHub

from notso.smollm3.errors import DownloadError, InvalidRequestError
from notso.smollm3.hub import registry
from notso.smollm3.hub.download import pull
from notso.smollm3.hub.repository import find_cached, find_hub_file, is_downloadable

COMMIT = "ab" * 20


def entry(name: str, content: bytes, **changed: Any) -> dict[str, Any]:
    lfs = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest(), "pointerSize": 135}
    return {"rfilename": name, "size": len(content), "lfs": lfs | changed}


def listing(*siblings: Any, sha: Any = COMMIT) -> bytes:
    return json.dumps({"id": "somebody/My-GGUF", "sha": sha, "siblings": list(siblings)}).encode()


@pytest.fixture
def files(fake_hub: FakeHub) -> list[dict[str, Any]]:
    there = fake_hub.content
    names = (
        "My-Q4_K_M.gguf",
        "My-Q6_K.gguf",
        "sub/My-UD-IQ2_XXS.gguf",
        "My-BF16-00001-of-00002.gguf",
        "mmproj-F16.gguf",
    )
    return [entry(name, there) for name in names] + [{"rfilename": "README.md", "size": 5}]


@pytest.mark.parametrize(
    ("name", "filename"),
    [
        ("somebody/My-GGUF", "My-Q4_K_M.gguf"),
        ("somebody/My-GGUF:q6_k", "My-Q6_K.gguf"),
        (" somebody/My-GGUF:UD-IQ2_XXS ", "sub/My-UD-IQ2_XXS.gguf"),
    ],
)
def test_file_is_selected_by_quantization_and_downloaded(
    fake_hub: FakeHub, files: list[dict[str, Any]], name: str, filename: str
) -> None:
    fake_hub.listing = listing(*files)
    file = find_hub_file(name)
    assert (file.filename, file.revision, file.size_bytes) == (filename, COMMIT, len(fake_hub.content))
    assert fake_hub.requests == [("LIST", "/api/models/somebody/My-GGUF/revision/main?blobs=true")]
    pulled = pull(file, sleep=lambda _: None)
    assert pulled.path.read_bytes() == fake_hub.content and registry.find_local(file) == pulled.path
    assert pull(file).downloaded_bytes == 0


def test_file_name_selects_among_files_of_equal_type(fake_hub: FakeHub, own_home: Path) -> None:
    names = ("My-Q6_K.gguf", "sub/Other-Q6_K.gguf", "My-Q8_0.gguf")
    fake_hub.listing = listing(*(entry(name, fake_hub.content) for name in names))
    choices = r"choices: somebody/My-GGUF:My-Q6_K.gguf, somebody/My-GGUF:sub/Other-Q6_K.gguf$"
    with pytest.raises(InvalidRequestError, match=choices):
        find_hub_file("somebody/My-GGUF:Q6_K")
    assert find_hub_file("somebody/My-GGUF:Q8_0").filename == "My-Q8_0.gguf"
    for name in names[:2]:
        assert is_downloadable(f"somebody/My-GGUF:{name}")
        file = find_hub_file(f"somebody/My-GGUF:{name.lower()}")
        assert (file.filename, file.name) == (name, f"somebody/My-GGUF:{name}")
        path = cache(own_home, "f" * 40, name, 1000)
        assert find_cached(f"somebody/My-GGUF:{name}") == path
    with pytest.raises(InvalidRequestError, match=choices):
        find_cached("somebody/My-GGUF:Q6_K")
    latest = cache(own_home, "0" * 40, "Renamed-Q6_K.gguf", 2000)
    assert find_cached("somebody/My-GGUF:Q6_K") == latest


def test_official_file_needs_no_hub_request(fake_hub: FakeHub) -> None:
    assert find_hub_file("Q8_0") == registry.known_file("Q8_0") == find_hub_file("ggml-org/SmolLM3-3B-GGUF:Q8_0")
    assert fake_hub.requests == []


def test_single_file_needs_no_quantization_in_the_name(fake_hub: FakeHub) -> None:
    fake_hub.listing = listing(entry("tuned.gguf", fake_hub.content))
    assert find_hub_file("somebody/My-GGUF").filename == "tuned.gguf"


@pytest.mark.parametrize("name", ["somebody/My-GGUF:Q2_K", "somebody/My-GGUF:BF16"])
def test_unavailable_quantization_error_lists_the_choices(
    fake_hub: FakeHub, files: list[dict[str, Any]], name: str
) -> None:
    fake_hub.listing = listing(*files)
    with pytest.raises(InvalidRequestError, match=r"choices: Q4_K_M, Q6_K, UD-IQ2_XXS$"):
        find_hub_file(name)


@pytest.mark.parametrize("name", ["nobody", "a/b/c", "../b", "a/../b:Q8_0", "https://example.org/x", ""])
def test_invalid_repository_name_sends_no_request(fake_hub: FakeHub, name: str) -> None:
    with pytest.raises(InvalidRequestError, match="choices: smollm3-3b"):
        find_hub_file(name)
    assert fake_hub.requests == []


@pytest.mark.parametrize(
    "changed",
    [
        {"rfilename": "../../x.gguf"},
        {"rfilename": "/etc/x.gguf"},
        {"rfilename": "a\\x.gguf"},
        {"rfilename": "a\x1b.gguf"},
        {"rfilename": 7},
        {"lfs": None},
        {"lfs": {"size": 3, "sha256": "short"}},
        {"lfs": {"size": "3", "sha256": "0" * 64}},
        {"lfs": {"size": -3, "sha256": "0" * 64}},
    ],
)
def test_unsafe_or_unverifiable_files_are_not_offered(fake_hub: FakeHub, changed: dict[str, Any]) -> None:
    fake_hub.listing = listing(entry("x.gguf", fake_hub.content) | changed, 3)
    with pytest.raises(InvalidRequestError, match="has no GGUF file that can be downloaded"):
        find_hub_file("somebody/My-GGUF")


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (b"", "has no repository somebody/My-GGUF, or it is private"),
        (b"<html>", "an invalid file list"),
        (b"[]", "an invalid file list"),
        (b"[" * 100_000, "an invalid file list"),
        (listing(sha="main"), "returned no commit"),
        (b" " * ((16 << 20) + 1), "a file list for somebody/My-GGUF that is too long"),
    ],
)
def test_invalid_hub_listing_is_refused(fake_hub: FakeHub, given: bytes, words: str) -> None:
    fake_hub.listing = given
    with pytest.raises(DownloadError, match=words):
        find_hub_file("somebody/My-GGUF")


def test_other_repositories_require_a_network(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DownloadError, match="the network is disabled"):
        find_hub_file("somebody/My-GGUF", offline=True)
    assert find_hub_file("Q8_0", offline=True).filename == "SmolLM3-Q8_0.gguf"
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(DownloadError, match="cannot be reached"):
        find_hub_file("somebody/My-GGUF")


def cache(own_home: Path, commit: str, filename: str, at: int) -> Path:
    """Add a cached file to a snapshot, as a link that was created at a given second."""
    repository = own_home / "hf/hub/models--somebody--My-GGUF"
    blob, link = repository / "blobs" / f"{commit}-{filename}", repository / "snapshots" / commit / filename
    for path in (blob, link):
        path.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(b"GGUF")
    link.symlink_to(blob)
    os.utime(link, (at, at), follow_symlinks=False)
    return link


def test_latest_download_of_a_repository_is_selected(own_home: Path) -> None:
    old, new = cache(own_home, "f" * 40, "My-Q4_K_M.gguf", 1000), cache(own_home, "0" * 40, "My-Q4_K_M.gguf", 2000)
    other = cache(own_home, "f" * 40, "My-Q6_K.gguf", 1000)
    assert find_cached("somebody/My-GGUF") == find_cached("somebody/My-GGUF:q4_k_m") == new
    assert find_cached("somebody/My-GGUF:Q6_K") == other, "only the older revision has this file"

    # huggingface_hub writes this file when the commit of `main` has changed, even if its files were already there.
    main = own_home / "hf/hub/models--somebody--My-GGUF/refs/main"
    main.parent.mkdir()
    main.write_text("f" * 40)
    for at, selected in ((3000, old), (1500, new)):
        os.utime(main, (at, at))
        assert find_cached("somebody/My-GGUF") == selected
    main.write_bytes(b"\xff" * 500)
    assert find_cached("somebody/My-GGUF") == new


def test_library_sends_no_telemetry_when_a_repository_is_listed_first() -> None:
    """The library reads this setting when it is imported, that is, at the first request to the Hub."""
    code = (
        "from notso.smollm3.errors import DownloadError\n"
        "from notso.smollm3.hub.repository import find_hub_file\n"
        "try: find_hub_file('somebody/My-GGUF')\n"
        "except DownloadError: pass\n"
        "from huggingface_hub import constants\n"
        "print(constants.HF_HUB_DISABLE_TELEMETRY)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "HF_HUB_DISABLE_TELEMETRY"}
    environment |= {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    assert done.stdout == "True\n"
