"""Pipes, devices, directories and endless files in place of models, adapters and configurations: each reader raises an
error immediately, without waiting for a writer or filling memory."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from golden.adapters import random_pairs, write_peft
from golden.random_models import RandomModel
from smollm3.conversion.hf_folder_of import write_folder

from notso.cli import config_file, options
from notso.qtensor import GGUFFile, NotsoError, SafetensorsFile
from notso.smollm3.config import SmolLM3Config
from notso.smollm3.conversion.converter import convert
from notso.smollm3.hub.registry import is_smollm3, sha256_of
from notso.smollm3.model.lora import read_adapter
from notso.smollm3.text.tokenizer import Tokenizer
from notso.text_file import open_regular, read_regular
from notso.web.tools.mcp_config import read_mcp_config
from notso.web.values.errors import SettingsError
from notso.web.values.sign_in import OidcSettings, read_sign_in

SMALL = RandomModel(layers=1, hidden=64, ffn=64, heads=2, kv_heads=1, head_dim=32, vocab=300)
HOLE_BYTES = 1 << 40


def _socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as made:
        here = Path.cwd()
        os.chdir(path.parent)  # paths of sockets are limited to about a hundred characters
        made.bind(path.name)
        os.chdir(here)


def _hole(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(HOLE_BYTES)


KINDS: dict[str, Callable[[Path], Any]] = {
    "FIFO": os.mkfifo,
    "socket": _socket,
    "folder": Path.mkdir,
    "endless device": lambda path: path.symlink_to("/dev/zero"),
    "terminal": lambda path: path.symlink_to("/dev/ptmx"),
    "link to itself": lambda path: path.symlink_to(path),
}


@pytest.fixture(params=KINDS)
def place(request: pytest.FixtureRequest) -> Iterator[Callable[[Path], Path]]:
    """Return a function that replaces a file with such an object."""

    def put(path: Path) -> Path:
        path.unlink(missing_ok=True)
        KINDS[request.param](path)
        return path

    yield put


def test_special_files_are_not_opened(tmp_path: Path, place: Callable[[Path], Path]) -> None:
    path = place(tmp_path / "it")
    for read in (open_regular, lambda path: read_regular(path, 10)):
        with pytest.raises(OSError) as raised:
            read(path)
        assert raised.value.strerror and raised.value.filename == str(path)
    with pytest.raises(NotsoError):
        GGUFFile.open(path)
    with pytest.raises(OSError):
        SafetensorsFile(path)
    with pytest.raises(OSError):
        sha256_of(path)
    assert not is_smollm3(path)


def test_read_regular_enforces_its_size_limit(tmp_path: Path) -> None:
    _hole(tmp_path / "hole")
    with pytest.raises(OSError, match="it is larger than 1 KiB"):
        read_regular(tmp_path / "hole", 1024)
    (tmp_path / "whole").write_bytes(b"x" * 1024)
    assert read_regular(tmp_path / "whole", 1024) == b"x" * 1024
    without_size = Path("/proc/self/maps")
    if without_size.exists():
        with pytest.raises(OSError, match="it is larger than 10 bytes"):
            read_regular(without_size, 10)
    with pytest.raises(OSError, match="not a valid file name"):
        open_regular(Path("a\0b"))


ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
FOLDER_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"),
    "model.safetensors",
)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> SmolLM3Config:
    with GGUFFile.open(SMALL.write(tmp_path_factory.mktemp("base") / "base.gguf")) as file:
        return SmolLM3Config.from_metadata(file.metadata)


@pytest.mark.parametrize("name", ["alone.gguf", *ADAPTER_FILES])
def test_special_files_in_adapters_are_refused(
    tmp_path: Path, config: SmolLM3Config, place: Callable[[Path], Path], name: str
) -> None:
    folder = write_peft(tmp_path / "a", random_pairs(config, 1), config.head_dim)
    path = place(folder / name)
    with pytest.raises(NotsoError) as raised:
        read_adapter("a", path if name == "alone.gguf" else folder, config)
    assert name in str(raised.value)


@pytest.mark.parametrize("name", [*FOLDER_FILES, "model.safetensors.index.json"])
def test_special_files_in_model_folders_are_refused(tmp_path: Path, place: Callable[[Path], Path], name: str) -> None:
    folder = write_folder(SMALL, tmp_path / "folder", shards=2 if name.endswith("index.json") else 1)
    place(folder / name)
    with pytest.raises((NotsoError, OSError)):
        convert(folder, tmp_path / "made.gguf", "F32")


@pytest.mark.parametrize("name", [name for name in FOLDER_FILES if name != "model.safetensors"])
def test_huge_sparse_files_in_model_folders_are_refused(tmp_path: Path, name: str) -> None:
    folder = write_folder(SMALL, tmp_path / "folder")
    _hole(folder / name)
    with pytest.raises(NotsoError, match="larger than"):
        convert(folder, tmp_path / "made.gguf", "F32")


def test_special_file_as_tokenizer_json_is_refused(
    tmp_path: Path, small_metadata: Any, place: Callable[[Path], Path]
) -> None:
    place(tmp_path / "tokenizer.json")
    with pytest.raises(NotsoError, match=r"tokenizer\.json does not match the model file"):
        Tokenizer.from_gguf(small_metadata, tmp_path / "model.gguf")


def test_special_files_as_configurations_are_refused(
    tmp_path: Path, place: Callable[[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place(tmp_path / "it")
    for read in (read_mcp_config, read_sign_in):
        with pytest.raises(SettingsError, match="cannot be read"):
            read(path)
    address = "https://a.example"
    secret = OidcSettings(issuer=address, public_url=address, client_id="b", client_secret_file=str(path))
    with pytest.raises(SettingsError, match="cannot be read"):
        secret.secret()
    monkeypatch.setenv("NOTSO_CONFIG", str(path))
    with pytest.raises(typer.BadParameter):
        config_file.read_config(None)


def test_api_key_and_text_files_are_read_with_a_size_limit(tmp_path: Path) -> None:
    """The file may be a pipe of the user's shell."""
    endless = Path("/dev/zero")
    with pytest.raises(typer.BadParameter, match="larger than 64 KiB"):
        options.api_key(endless)
    (tmp_path / "key").write_text("a key\r\n")
    assert options.api_key(tmp_path / "key") == "a key"
    (tmp_path / "text").write_bytes(b"a\r\nb\r")
    assert options.read_text(tmp_path / "text", "TEXT") == "a\nb\n"
