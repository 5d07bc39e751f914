"""The library as programs use it: models by name, typed settings, errors that name the file, and short reprs."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import platformdirs
import pytest
from golden.random_models import RANDOM
from smollm3.conversion.hf_folder_of import write_folder

import notso
from notso import Engine, EngineConfig, InvalidRequestError, ModelFileError, NotsoError, UnknownOptionError
from notso.smollm3.hub.registry import demo_path
from notso.smollm3.values.engine_config import EngineSettings
from notso.smollm3.values.events import Event

ROOT = Path(__file__).parents[3]


def test_all_exported_names_exist() -> None:
    assert all(getattr(notso, name) is not None for name in notso.__all__)
    assert set(notso.__all__) <= set(dir(notso))
    assert {"NotsoError", "EngineConfig", "Generation", "Completion"} <= set(notso.__all__)
    assert not hasattr(notso, "no_such_name")


@pytest.mark.parametrize("name", [None, "demo", "Demo"])
def test_demo_model_loads_by_name(own_home: Path, name: str | None) -> None:
    with Engine.load(name, context_tokens=256) as engine:
        assert engine.info.is_demo and engine.info.path == str(demo_path())


def test_installed_model_loads_by_name(own_home: Path) -> None:
    there = own_home / "hf" / "hub" / "models--a--b" / "snapshots" / ("0" * 40) / "SmolLM3-tiny.gguf"
    there.parent.mkdir(parents=True)
    shutil.copy(demo_path(), there)
    with Engine.load("smollm3-tiny", context_tokens=256) as engine:
        assert engine.info.path == str(there) and not engine.info.is_demo


def test_tilde_in_model_path_is_expanded(own_home: Path) -> None:
    shutil.copy(demo_path(), own_home / "own.gguf")
    with Engine.load("~/own.gguf", context_tokens=256) as engine:
        assert engine.info.path == str(own_home / "own.gguf")


def test_model_folder_with_a_long_name_is_converted_once(own_home: Path) -> None:
    model = replace(RANDOM, layers=4, hidden=256, ffn=512, heads=4, kv_heads=2, head_dim=64)
    folder = write_folder(model, own_home / ("ä" * 120))
    paths = []
    for _ in range(2):
        with Engine.load(folder, context_tokens=64) as engine:
            paths.append((engine.info.path, Path(engine.info.path).stat().st_mtime_ns))
    assert paths[0] == paths[1] and str(own_home) in paths[0][0]


def test_load_error_names_the_file(own_home: Path) -> None:
    cut, text, empty = (own_home / name for name in ("cut.gguf", "text.gguf", "folder"))
    cut.write_bytes(demo_path().read_bytes()[:100_000])
    text.write_text("no model")
    empty.mkdir()
    for path in (cut, text, empty, own_home / "missing.gguf", Path("/dev/null")):
        with pytest.raises(NotsoError) as caught:
            Engine.load(path)
        error = caught.value
        assert str(error).count(str(path)) == 1 or (error.path == str(path) and error.__notes__ == [f"in {path}"])
    for name in ("", "no-such-model"):
        with pytest.raises(NotsoError, match=r"neither a model file nor the name of an installed model|is empty"):
            Engine.load(name)


def test_load_error_names_a_path_that_cannot_be_read(own_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, function in (("exists", os.path.exists), ("is_dir", os.path.isdir), ("is_file", os.path.isfile)):
        monkeypatch.setattr(Path, name, function)  # in Python 3.14, these methods raise no errors either
    folder = own_home / "folder"
    folder.mkdir()
    for path, reason in ((own_home / ("a" * 300), "cannot be read: File name"), (folder, "cannot be used: File name")):
        (folder / "config.json").unlink(missing_ok=True)
        (folder / "config.json").symlink_to("a" * 300)
        with pytest.raises(ModelFileError, match=f"{path} {reason}"):
            Engine.load(path)
    real = os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if not os.path.isabs(path):  # noqa: PTH117
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, **options)

    monkeypatch.setattr(os, "stat", refuse)  # the current folder cannot be searched
    with Engine.load("demo", context_tokens=256) as engine:
        assert engine.info.is_demo
    with pytest.raises(ModelFileError, match=r"secret/model\.gguf cannot be read: Permission denied"):
        Engine.load("secret/model.gguf")


def test_failure_to_write_a_conversion_does_not_blame_the_folder(
    own_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_folder(RANDOM, own_home / "folder")
    cache = own_home / "full"

    def refuse(path: Path, *_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(platformdirs, "user_cache_path", lambda _: cache)
    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(OSError, match=f"No space left on device: '{cache}"):
        Engine.load(folder)


def test_unknown_setting_suggests_the_closest_name() -> None:
    with pytest.raises(TypeError, match="'contxt'; did you mean 'context_tokens'") as caught:
        Engine.load(contxt=5)  # type: ignore[call-arg]
    assert isinstance(caught.value, UnknownOptionError) and isinstance(caught.value, InvalidRequestError)
    assert caught.value.param == "contxt"


def test_engine_settings_cover_all_config_fields() -> None:
    assert set(EngineSettings.__annotations__) == {each.name for each in fields(EngineConfig)} - {"model"}


@pytest.mark.long("engine", "plants")
def test_mypy_reports_unknown_and_mistyped_settings(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "from notso import Engine\n"
        "engine = Engine.load('demo', contxt=5)\n"
        "answer = engine.chat('x', max_tokns=5)\n"
        "engine.chat([{'role': 'user', 'content': 'x'}], max_tokens='5')\n"
        "total: int = engine.chat('x', max_tokens=5, stop='.').usage.total_tokens\n"
    )
    line = [sys.executable, "-m", "mypy", "--strict", "--config-file", "", str(program)]
    done = subprocess.run(line, cwd=ROOT / "src", capture_output=True, text=True, timeout=600)
    assert [each.split(":")[1] for each in done.stdout.splitlines() if "program.py" in each and "error" in each] == [
        "2",
        "3",
        "4",
    ], done.stdout + done.stderr
    assert '"contxt"' in done.stdout and '"max_tokns"' in done.stdout


def test_reprs_are_short() -> None:
    engine = Engine.load(context_tokens=256)
    with engine:
        assert repr(engine) == "<Engine 'notso demo': 256 tokens of context, on cpu>" or "on cuda" in repr(engine)
        stream = engine.stream("hello", max_tokens=1)
        stream.result()
        generation = stream.generation
        assert repr(generation).startswith(f"<Generation {generation.id[:8]}: finished, ")
        assert repr(stream) == f"<AnswerStream of {generation!r}>"
    assert repr(engine).endswith("closed>")
    assert repr(Event("text", "a", tokens=3)) == "Event('text', text='a', tokens=3)"
