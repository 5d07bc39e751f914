"""A model file is identified by its content: copied, touched or replaced, it finds exactly its own blocks."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from notso.qtensor.gguf import GGUFFile
from notso.smollm3 import Engine, RequestOptions, SamplingParams
from notso.smollm3.engine.receipts import ModelDigest
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.kv import model_identity
from notso.smollm3.kv.model_identity import FILE, MAX_ENTRIES, IdentityWorker, ModelIdentity

PROMPT = [1 + 7 * at % 700 for at in range(400)]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """Copy the demo model."""
    return Path(shutil.copy(demo_path(), tmp_path / "model.gguf"))


def changed(path: Path) -> None:
    """Flip a bit that no sample covers; keep size and modification time."""
    status = path.stat()
    with GGUFFile.open(path) as file:
        largest = max(file.tensors.values(), key=lambda tensor: tensor.nbytes)
        content = path.read_bytes()
        at = content.index(largest.data.tobytes()) + largest.nbytes // 2
    with path.open("r+b") as raw:
        raw.seek(at)
        raw.write(bytes([content[at] ^ 1]))
    is_new = False
    while not is_new:  # file timestamps have a low resolution
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
        is_new = path.stat().st_ctime_ns != status.st_ctime_ns


def identified(path: Path, folder: Path) -> tuple[ModelIdentity, ModelIdentity]:
    """Return the identity at loading, and the one after the digest is known."""
    with GGUFFile.open(path) as file:
        worker = IdentityWorker(file, folder)
        at_first = worker.identity
        worker.start(lambda: True, lambda _: None)
        worker.wait(60)
        return at_first, worker.identity


def test_copied_or_touched_file_has_the_same_identity(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    sampled, known = identified(model, folder)
    assert known.current != sampled.current and known.earlier == (sampled.current,)
    assert identified(model, folder) == (known, known), "the digest must be remembered"
    other = Path(shutil.copy(model, tmp_path / "other.gguf"))
    os.utime(model, ns=(1, 2))
    for path in (model, other):
        at_first, again = identified(path, folder)
        assert at_first.current not in (known.current, sampled.current), "until then, it must have a separate identity"
        assert again.current == known.current and {at_first.current, sampled.current} <= set(again.earlier)


@pytest.mark.parametrize("act", ["written", "replaced"])
def test_changed_content_has_a_new_identity_despite_equal_samples(model: Path, tmp_path: Path, act: str) -> None:
    folder = tmp_path / "kv"
    sampled, known = identified(model, folder)
    if act == "replaced":
        Path(shutil.copy2(model, tmp_path / "other.gguf")).replace(model)
    changed(model)
    at_first, now = identified(model, folder)
    assert {at_first.current, now.current}.isdisjoint({sampled.current, known.current})
    assert now.earlier == (at_first.current,), "the files must not share blocks"


def test_damaged_identity_record_is_ignored(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    _, known = identified(model, folder)
    whole = (folder / FILE).read_bytes()
    entry = json.loads(whole)[0]
    for content in (
        b"",
        whole[:-9],
        b"{}",
        b"[1, null]",
        json.dumps([entry | {"sampled": 1}]).encode(),
        json.dumps([entry | {"sha256": "zz"}]).encode(),
        json.dumps([{"sampled": entry["sampled"]}]).encode(),
    ):
        (folder / FILE).write_bytes(content)
        at_first, now = identified(model, folder)
        assert at_first.current != known.current and now == known, content


def test_identity_record_is_limited_to_max_entries(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    for number in range(MAX_ENTRIES + 3):
        os.utime(model, ns=(number, number))
        identified(model, folder)
    assert len(json.loads((folder / FILE).read_text())) == MAX_ENTRIES
    assert not [path for path in folder.iterdir() if path.name != FILE]


def test_replaced_file_is_not_identified_as_the_open_file(model: Path, tmp_path: Path) -> None:
    with GGUFFile.open(model) as file:
        worker, digests = IdentityWorker(file, tmp_path / "kv"), list[object]()
        other = Path(shutil.copy2(model, tmp_path / "other.gguf"))
        other.replace(model)
        worker.start(lambda: True, digests.append)
        worker.wait(60)
        assert not digests and not worker.identity.earlier and not (tmp_path / "kv" / FILE).exists()


def test_identity_worker_pauses_while_busy_and_can_be_stopped(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_identity, "READ_BYTES", 1 << 16)
    asked = threading.Event()

    def busy() -> bool:
        asked.set()
        return False

    with GGUFFile.open(model) as file:
        worker, digests = IdentityWorker(file, tmp_path / "kv"), list[object]()
        worker.start(busy, digests.append)
        assert asked.wait(60)
        worker.stop()
        assert not digests and not worker.identity.earlier


def read_again(engine: Engine, owner: str = "") -> int:
    usage = list(engine.generate(PROMPT, SamplingParams(max_tokens=2, seed=1), RequestOptions(owner=owner)))[-2].usage
    assert usage is not None
    return usage.prompt_tokens - usage.cached_tokens


def written(engine: Engine) -> None:
    """Wait until all finished prompts are written to disk."""
    offload = engine._offload
    assert offload is not None
    while engine._core.call(lambda: offload.work() or offload.has_work):
        pass
    assert offload._files.flush(60)


def settled(path: Path, folder: Path) -> Engine:
    """Load an engine, and wait until its model file is identified."""
    engine = Engine.load(path, context_tokens=1024, cache_dir=folder)
    assert engine._identity is not None
    engine._identity.wait(60)
    return engine


@pytest.mark.parametrize("act", ["nothing", "touched", "copied", "renamed"])
def test_cached_prompt_survives_touch_copy_and_rename(model: Path, tmp_path: Path, act: str) -> None:
    folder = tmp_path / "kv"
    with settled(model, folder) as engine:
        assert read_again(engine) == len(PROMPT)
        written(engine)
    if act == "touched":
        os.utime(model)
    elif act == "copied":
        model = Path(shutil.copy(model, tmp_path / "other.gguf"))
    elif act == "renamed":
        model = model.rename(tmp_path / "other.gguf")
    with settled(model, folder) as engine:
        assert read_again(engine) == 1  # the last token, for its logits


def test_receipt_uses_known_digest(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: ModelDigest) -> str:
        raise AssertionError("the file was read again")

    monkeypatch.setattr(ModelDigest, "compute", refuse)
    sha256 = hashlib.sha256(model.read_bytes()).hexdigest()
    for _ in range(2):  # computed, then stored
        with settled(model, tmp_path / "kv") as engine:
            assert engine._facts(None)["model"]["sha256"] == sha256


def test_blocks_written_before_the_digest_are_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "kv"
    with monkeypatch.context() as patch:
        patch.setattr(IdentityWorker, "start", lambda *_: None)
        with Engine.load(model, context_tokens=1024, cache_dir=folder) as engine:
            assert read_again(engine) == len(PROMPT)
            written(engine)
    with settled(model, folder) as engine:
        assert read_again(engine) == 1
    os.utime(model)
    with settled(model, folder) as engine:
        assert read_again(engine) == 1


@pytest.mark.parametrize("is_known", [True, False])
def test_cache_of_different_model_content_is_not_used(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    folder = tmp_path / "kv"
    with monkeypatch.context() as patch:
        if not is_known:
            patch.setattr(IdentityWorker, "start", lambda *_: None)
        with settled(model, folder) as engine:
            read_again(engine)
            written(engine)
        changed(model)
        with settled(model, folder) as engine:
            assert read_again(engine) == len(PROMPT)
            written(engine)
    changed(model)  # restores the first content
    with settled(model, folder) as engine:
        assert read_again(engine) == (1 if is_known else len(PROMPT))


def test_blocks_of_prompt_running_at_digest_arrival_are_found(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks written before are found in the same run; running prompts are written with the new identity."""
    folder = tmp_path / "kv"
    go_on = threading.Event()
    digest = IdentityWorker._digest

    def later(self: IdentityWorker, is_idle: Callable[[], bool]) -> str | None:
        go_on.wait(60)
        return digest(self, lambda: True)

    monkeypatch.setattr(IdentityWorker, "_digest", later)
    with Engine.load(model, context_tokens=1024, cache_dir=folder) as engine:
        assert engine._identity is not None
        assert read_again(engine, "before") == len(PROMPT)
        written(engine)
        events = engine.generate(PROMPT, SamplingParams(max_tokens=40, seed=1), RequestOptions(owner="during"))
        next(events)
        go_on.set()
        engine._identity.wait(60)
        assert list(events)
        written(engine)
        engine._core.call(engine._pool.clear)
        assert read_again(engine, "before") == 1
    os.utime(model)
    with settled(model, folder) as engine:
        assert read_again(engine, "before") == read_again(engine, "during") == 1
