"""Text files from users are read in any Unicode encoding and with any line endings, as editors write them."""

from __future__ import annotations

import codecs
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from notso.cli import config_file, options
from notso.cli.batch_run import BatchInput
from notso.text_file import NotTextError, decode_text, utf8_stream
from notso.web.api.request_fields.fields import parse_object
from notso.web.chat.files.imports import read_chats
from notso.web.edge.errors import ApiError
from notso.web.values.errors import SettingsError
from notso.web.values.sign_in import OidcSettings, read_sign_in

Run = Callable[..., Any]
KEY = "a key of twenty letters"

WRITTEN: dict[str, Callable[[str], bytes]] = {
    "UTF-8": str.encode,
    "UTF-8 with a mark": lambda text: codecs.BOM_UTF8 + text.encode(),
    "UTF-16, little end first": lambda text: codecs.BOM_UTF16_LE + text.encode("utf-16-le"),
    "UTF-16, big end first": lambda text: codecs.BOM_UTF16_BE + text.encode("utf-16-be"),
    "UTF-16 without a mark": lambda text: text.encode("utf-16-le"),
    "UTF-16 without a mark, big end first": lambda text: text.encode("utf-16-be"),
    "UTF-32": lambda text: codecs.BOM_UTF32_LE + text.encode("utf-32-le"),
    "CRLF": lambda text: text.replace("\n", "\r\n").encode(),
    "CRLF and UTF-16": lambda text: codecs.BOM_UTF16_LE + text.replace("\n", "\r\n").encode("utf-16-le"),
    "padded with NULs": lambda text: text.encode() + b"\0" * 100,
}


@pytest.fixture(params=WRITTEN)
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        path = tmp_path / "given"
        path.write_bytes(WRITTEN[request.param](text))
        return path

    return write


def test_text_files_are_decoded_in_any_encoding(write: Callable[[str], Path]) -> None:
    assert options.read_text(write("one\nzwei ä\n"), "TEXT") == "one\nzwei ä\n"
    assert options.api_key(write(KEY + "\n")) == KEY
    secret = OidcSettings(issuer="https://a", public_url="https://b", client_id="c", client_secret_file=str(write(KEY)))
    assert secret.secret() == KEY
    assert read_sign_in(write('require_key = true\noperators = ["ä"]\n')).operators == ("ä",)


def test_configuration_file_is_decoded_in_any_encoding(
    notso: Run, write: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTSO_CONFIG", str(write("[serve]\n# für später\nport = 8080\n")))
    result = notso("serve", "--show-config")
    assert result.code == 0 and "8080" in result.out


def test_prompts_and_schemas_are_decoded_in_any_encoding(
    engine: Any, notso: Run, write: Callable[[str], Path], tmp_path: Path
) -> None:
    data = write('Say "hällo"\ntwice\n').read_bytes()
    assert notso("run", "-", stdin=data).code == 0
    assert engine.asked[0][-1].content == 'Say "hällo"\ntwice'
    assert notso("run", "x", "--schema", str(write('{"type": "object",\n"title": "Grüße"}'))).code == 0


def test_piped_chat_is_decoded_in_any_encoding(engine: Any, notso: Run, write: Callable[[str], Path]) -> None:
    assert notso("chat", stdin=write("Grüße\nand now?\n").read_bytes()).code == 0
    assert [messages[-1].content for messages in engine.asked] == ["Grüße", "and now?"]


def test_request_bodies_and_imports_are_decoded_in_any_encoding(write: Callable[[str], Path]) -> None:
    body = write('{"messages": [{"role": "user",\n "content": "Grüße"}]}').read_bytes()
    assert parse_object(body)["messages"][0]["content"] == "Grüße"
    assert read_chats(body, str)[0][1][0].content == "Grüße"


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"one\ntwo\xff\n", "is not UTF-8 text (byte 7) in line 2"),
        (b"one\ntwo \0 three\n", "line 2 contains a NUL"),
        (b"\xff\xfea\0\x00\xd8b\0", "is not UTF-16 text"),
        (b"\xef\xbb\xbf\xffa", "is not UTF-8 text (byte 3) in line 1"),
        (codecs.BOM_UTF16_LE + "\u0a0a\n".encode("utf-16-le") + b"\0\xd8a\0", "is not UTF-16 text (byte 6) in line 2"),
        (b"one\rtwo\r\n\xff", "is not UTF-8 text (byte 9) in line 3"),
    ],
)
def test_undecodable_text_is_refused_with_file_and_line(
    notso: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: bytes, reason: str
) -> None:
    path = tmp_path / "given"
    path.write_bytes(data)
    for read in (options.api_key, lambda each: options.read_text(each, "TEXT")):
        with pytest.raises(typer.BadParameter) as caught:
            read(path)
        assert str(path) in str(caught.value) and reason in str(caught.value)
    with pytest.raises(SettingsError) as refused:
        read_sign_in(path)
    assert str(path) in str(refused.value) and reason in str(refused.value)
    with pytest.raises(SettingsError, match="given"):
        OidcSettings(issuer="https://a", public_url="https://b", client_id="c", client_secret_file=str(path)).secret()
    monkeypatch.setenv("NOTSO_CONFIG", str(path))
    with pytest.raises(typer.BadParameter) as wrong:
        config_file.read_config(None)
    assert reason in str(wrong.value)
    monkeypatch.delenv("NOTSO_CONFIG")
    for arguments in (["run", "-"], ["run", "x", "--schema", str(path)]):
        result = notso(*arguments, stdin=data)
        assert result.code == 2 and reason in result.err and result.err.count("\n") == 1
    with pytest.raises(ApiError):
        parse_object(data)


@pytest.mark.parametrize("data", [b"key\0", b"ab\0\0", b"\0", b"a\0\0\0", "\u4e00\u0100".encode() + b"\0"])
def test_trailing_nul_does_not_change_detected_encoding(data: bytes) -> None:
    assert decode_text(data) == data.decode().rstrip("\0")


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig", "utf-8"])
@pytest.mark.parametrize("size", [0, 1, 65_535, 65_536, 200_000])
def test_utf8_stream_converts_any_encoding(encoding: str, size: int) -> None:
    text = ("ä🙂b\n" * size)[:size]
    assert utf8_stream(io.BytesIO(text.encode(encoding))).read() == text.encode()


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32", "utf-8-sig"])
def test_batch_input_with_byte_order_mark_is_decoded(tmp_path: Path, encoding: str) -> None:
    lines = [{"custom_id": "one", "x": "ä" * 40_000}, {"custom_id": "two"}]
    text = "".join(json.dumps(each, ensure_ascii=False) + "\r\n" for each in lines)
    (tmp_path / "in.jsonl").write_bytes(text.encode(encoding))
    assert [each.custom_id for each in BatchInput(tmp_path / "in.jsonl").lines()] == ["one", "two"]


def test_stream_truncated_within_a_character_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NotTextError, match="is not UTF-16 text"):
        utf8_stream(io.BytesIO(codecs.BOM_UTF16_LE + b"a\0b")).read()
    (tmp_path / "in.jsonl").write_bytes(codecs.BOM_UTF16_LE + b"a\0b")
    with pytest.raises(typer.BadParameter, match=r"in\.jsonl is not UTF-16 text") as caught:
        BatchInput(tmp_path / "in.jsonl")
    assert caught.value.param_hint == "IN"
