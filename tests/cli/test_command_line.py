"""The command line: help, versions, wrong usage, exit codes, and one-line error messages."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer

from notso.cli import exit_codes
from notso.cli.app import VERBS as ALL_VERBS
from notso.cli.app import _insert_default_command, app
from notso.plugins.errors import PluginError
from notso.qtensor import errors as qtensor
from notso.smollm3 import errors as model
from notso.web.values import errors as web

Run = Callable[..., Any]

VERBS = ["serve", "chat", "run", "pull", "convert", "quantize", "list", "inspect", "verify", "perplexity", "synth"]
VERBS += ["plugin", "keys", "bench", "doctor"]
MOST_IMPORTS = 165  # in addition to those of typer


def test_help_lists_every_command_untruncated(notso: Run) -> None:
    result = notso("--help")

    assert result.code == 0
    for verb in VERBS:
        assert f"\n  {verb} " in result.out
    assert "..." not in result.out.partition("Commands:")[2]


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_command_contains_examples(notso: Run, verb: str) -> None:
    result = notso(verb, "--help")

    assert result.code == 0
    assert result.out.partition("Examples:")[2].count(f"notso {verb}") >= 2
    assert len(result.out.splitlines()) <= 104
    assert max(len(line) for line in result.out.splitlines()) <= 100


@pytest.mark.parametrize("verb", ALL_VERBS)
def test_every_command_accepts_plain_and_debug(notso: Run, verb: str) -> None:
    result = notso(verb, "--help")

    assert "--plain" in result.out and "--debug" in result.out


def test_quantise_is_a_hidden_alias_of_quantize(notso: Run) -> None:
    assert "quantise" not in notso("--help").out
    alias, command = (notso(name, "missing.gguf", "out.gguf") for name in ("quantise", "quantize"))
    assert (alias.code, alias.err.replace("quantise", "quantize")) == (command.code, command.err) != (0, "")


def test_help_imports_few_modules_and_no_heavy_ones() -> None:
    """`--help` should take at most 0.2 s. Imports dominate this time, and counting them is independent of load."""
    code = (
        "import sys\nimport typer\nbefore = set(sys.modules)\nfrom notso.cli import main\ntry:\n    main(['--help'])\n"
        "except SystemExit:\n    pass\nprint(*set(sys.modules) - before, file=sys.stderr)"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = set(run.stderr.split())
    heavy = {
        "numpy",
        "rich",
        "fastapi",
        "pydantic",
        "huggingface_hub",
        "tokenizers",
        "jinja2",
        "prompt_toolkit",
        "uuid_utils",
    }
    assert not heavy & imported
    assert len(imported) <= MOST_IMPORTS, sorted(imported)


def test_version_names_kernels_and_format(notso: Run) -> None:
    result = notso("--version")

    assert result.code == 0
    assert result.out.startswith("notso 0.")
    assert "kernels" in result.out
    assert "GGUF" in result.out


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["run", "--temprature", "1", "x"], "Did you mean --temperature?"),
        (["serve", "--prot", "1"], "Did you mean --port?"),
        (["rnu"], "Did you mean 'run'?"),
        (["run", "--quite-unknown"], "No such option"),
        (["run", "--seed"], "requires an argument"),
        (["run", "--seed", "many", "x"], "--seed"),
        (["inspect"], "Missing argument 'FILE'"),
        (["pull", "llama"], "choices: smollm3-3b:Q4_K_M"),
        (["list", "/no/such/folder"], "not a folder"),
        (["synth", "/no/such/folder/x.gguf"], "folder /no/such/folder does not exist"),
        (["run", "x", "--receipt", "/no/such/folder/x"], "folder /no/such/folder does not exist"),
        (["run", "x", "--receipt", "/"], "/ is a folder"),
        (["bench", "--share", "/no/such/folder/x"], "folder /no/such/folder does not exist"),
        (["bench", "--share", "/"], "/ is a folder"),
        (["tune", "/dev/null", "--out", "/tmp/x", "--merge", "/tmp/./x", "--force"], "already the other output file"),
        (["dataset", "/tmp/x", "--preferences", "/tmp/./x", "--force"], "already the other output file"),
        (["bench", "--prefill", "512@"], "neither TOKENS nor TOKENS@DEPTH"),
        (["bench", "--prefill", "12345678"], "the measurements need 12,345,"),
        (["--quite-unknown"], "No such option"),
        (["--modle", "x"], "Did you mean --model? (`notso serve --help`"),
        (["--versoin"], "Did you mean --version? (`notso --help`"),
        (["--port", "many"], "--port"),
        (["serve", "--port", "99999"], "--port"),
        (["doctor", "--port", "99999"], "--port"),
        (["serve", "--cache-disk", "inf"], "--cache-disk"),
        (["serve", "--engine-url", "http://engine:3000"], "NOTSO_ENGINE_KEY"),
        (["serve", "--engine-api"], "NOTSO_ENGINE_KEY"),
        (["serve", "--engine-url", "http://engine:3000", "--model", "a.gguf"], "--model does not apply to a front end"),
        (["serve", "--engine-url", "http://engine:3000", "--engine-api"], "--engine-api does not apply to a front end"),
        (["serve", "--api-key-file", "/dev/null"], "/dev/null is empty"),
        (["serve", "--api-key-file", "/no/such/file"], "No such file"),
    ],
)
def test_usage_errors_print_one_line_and_exit_with_code_2(notso: Run, arguments: list[str], told: str) -> None:
    result = notso(*arguments)

    assert result.code == 2
    assert result.out == ""
    assert told in result.err
    assert result.err.startswith("notso: ")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    "command", [["synth"], ["dataset"], ["dataset", "rows.jsonl", "--preferences"], ["tune", __file__, "--out"]]
)
def test_special_files_are_not_replaced(notso: Run, tmp_path: Path, command: list[str]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)

    result = notso(*command, str(pipe), "--force")

    assert result.code == 2 and f"{pipe} is not a regular file" in result.err
    assert pipe.is_fifo()


def test_model_file_may_have_a_long_name(notso: Run, tmp_path: Path) -> None:
    path = tmp_path / f"{'模' * 80}.gguf"  # 245 of at most 255 bytes
    small = ("--layers", "1", "--hidden", "256", "--ffn", "256", "--heads", "2", "--kv", "1")

    assert notso("synth", str(path), *small).code == 0 and path.is_file()


def test_bench_prints_results_before_it_writes_them(notso: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notso.smollm3.diagnostics.benchmark.run_benchmark", lambda *_: {"prefill": []})
    result = notso("bench", "--json", "--share", "/dev/full")
    assert result.code == 4 and "/dev/full" not in result.out and json.loads(result.out) == {"prefill": []}


def caused(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


NO_THREAD = os.strerror(errno.EAGAIN)  # as raised by std::thread
FAILURES = [
    (qtensor.KernelChoiceError("NOTSO_KERNELS=mmx is unknown"), 2, "Unset NOTSO_KERNELS"),
    (model.InvalidRequestError("top_p must be above 0", param="top_p"), 2, "See --top-p"),
    (qtensor.GGUFError("is 5, limit 3", field="header", offset=4), 3, "header at byte 4: is 5, limit 3"),
    (qtensor.UnsupportedFormatError("block format Q2_K"), 3, "notso pull"),
    (qtensor.SafetensorsError("model.safetensors: the header is not JSON"), 3, "Download the folder again"),
    (qtensor.DeviceMemoryError("the GPU lacks 9 MiB"), 4, "nvidia-smi"),
    (qtensor.DeviceError("there is no driver"), 1, "nvidia-smi"),
    (model.ModelFileError("no tensor blk.3.attn_q.weight"), 3, "notso list"),
    (model.TemplateError("the template calls foo"), 3, "notso inspect"),
    (model.OutOfMemoryError("needs 9 MiB", needed_bytes=9, available_bytes=1), 4, "--context"),
    (MemoryError(), 4, " MiB (MemoryError). Reduce --context"),
    (caused(qtensor.GGUFError("cannot be mapped"), OSError(errno.ENOMEM, "")), 4, "probably out of memory: "),
    (caused(qtensor.KernelChoiceError(NO_THREAD), RuntimeError(NO_THREAD)), 4, "probably out of memory: "),
    (ImportError("x.so: failed to map segment from shared object"), 4, "probably out of memory: "),
    (RuntimeError("can't start new thread"), 4, "--context"),
    (OSError(errno.ENOSPC, "No space left on device", "out.gguf"), 4, "out.gguf: No space left"),
    (web.DataDirectoryBusyError("in use: choose another with --data-dir"), 5, "another with --data-dir"),
    (web.DataDirectoryNewerError("made by release 9"), 5, "made by release 9. Use another directory with --data-dir"),
    (web.UnsafeBindError("listening on 0.0.0.0 lets others in", setting="host"), 6, "NOTSO_API_KEY"),
    (web.AddressInUseError("cannot listen: --port", host="127.0.0.1", port=3000), 6, "--port"),
    (OSError(errno.EADDRINUSE, "Address already in use"), 6, "--port"),
    (PluginError("no plugin x is installed", plugin="x"), 2, "notso plugin list"),
    (model.NoSpaceError("the disk is full"), 4, "HF_HOME"),
    (model.DownloadError("expected a, got b"), 7, "expected a, got b"),
    (model.ContextLengthError(10, 5), 1, "--context"),
    (model.EngineError("a logit is not finite"), 1, "a logit is not finite"),
    (PermissionError(errno.EACCES, "Permission denied", "x"), 1, "x: Permission denied"),
    (ZeroDivisionError("division by zero"), 1, "--debug"),
    (KeyboardInterrupt(), 130, ""),
]


@pytest.mark.parametrize("home", [None, "", "relative"])
def test_commands_work_without_a_home_directory(home: str | None, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("HOME", "HF_HOME")}
    environment = {name: value for name, value in environment.items() if not name.startswith(("NOTSO_", "XDG_"))}
    folder = tmp_path / "empty"
    folder.mkdir()
    code = (
        "import pwd, sys\npwd.getpwuid = {}.__getitem__\nfrom notso.cli import main\n"
        "codes = [main(['list']), main(['run', '--max-tokens', '1', '--no-think', 'Hi']), main(['doctor'])]\n"
        "sys.exit(str(codes))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment if home is None else {**environment, "HOME": home},
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stderr.splitlines()[-1].startswith("[0, 8, ") and "Traceback" not in done.stderr
    assert "/nonexistent/.local/share/notso" in done.stdout and not any(folder.iterdir())


@pytest.mark.parametrize(("error", "code", "told"), FAILURES, ids=lambda value: type(value).__name__)
def test_errors_map_to_exit_code_and_one_line_advice(error: BaseException, code: int, told: str) -> None:
    got, line = exit_codes.explain(error)

    assert got == code
    assert told in line
    assert "\n" not in line


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ([], {}),
        (["--model", "x.gguf"], {"model": "x.gguf"}),
        (["--model=x.gguf", "--port", "8080"], {"model": "x.gguf", "port": "8080"}),
        (["-mx.gguf"], {"model": "x.gguf"}),
        (["--port", "8080", "--no-access-log"], {"port": "8080", "access_log": "False"}),
        (["--context", "512", "--device", "cpu"], {"context": "512", "device": "cpu"}),
    ],
)
def test_options_without_command_are_passed_to_serve(notso: Run, line: list[str], options: dict[str, str]) -> None:
    result = notso(*line, "--show-config") if line else notso("serve", "--show-config")

    assert result.code == 0
    given = [row.split() for row in result.out.splitlines() if row.endswith("command line")]
    assert {name.replace("-", "_"): value for name, value, *_ in given} == options


def test_empty_command_line_means_serve() -> None:
    assert _insert_default_command(typer.main.get_command(app), []) == ["serve"]


@pytest.mark.parametrize("line", [["--version"], ["--help"], ["-h"]])
def test_top_level_help_and_version_are_not_passed_to_serve(notso: Run, line: list[str]) -> None:
    result = notso(*line)

    assert result.code == 0
    assert "notso serve" not in result.out.partition("\n")[0]


OUT_OF_MEMORY = model.OutOfMemoryError("needs 9 MiB", needed_bytes=9, available_bytes=1)


@pytest.mark.parametrize(
    ("verb", "error", "advised", "unadvised"),
    [
        ("run", OUT_OF_MEMORY, ["--context", "--device cpu"], []),
        ("perplexity", OUT_OF_MEMORY, ["--window"], ["--context"]),
        ("quantize", OUT_OF_MEMORY, ["close other programs"], ["--context", "--device"]),
        ("doctor", OUT_OF_MEMORY, [], ["`notso doctor`"]),
        ("quantize", MemoryError(), ["close other programs"], ["--context"]),
        ("chat", model.ContextLengthError(10, 5), ["/clear"], ["Shorten the prompt"]),
        ("perplexity", model.ContextLengthError(10, 5), ["Shorten the text"], ["--context"]),
        ("inspect", qtensor.GGUFError("x"), ["Check the file"], ["notso pull"]),
        ("quantize", qtensor.UnsupportedFormatError("x"), ["Check the file"], ["notso pull"]),
        ("convert", model.ModelFileError("config.json: rope_type"), [], ["notso pull", "notso list"]),
        ("run", model.AdapterFileError("a.gguf: x"), ["--adapter"], ["notso pull", "notso list"]),
        ("run", model.TemplateError("x"), ["notso inspect", "--chat-template-file"], []),
        ("inspect", model.TemplateError("x"), [], ["notso inspect", "--chat-template-file"]),
        ("plugin", PluginError("x", plugin="x"), [], ["notso plugin list"]),
        ("run", model.InvalidRequestError("x", param="device"), ["--device in `notso run --help`"], []),
        ("pull", model.InvalidRequestError("x", param="name"), [], ["--name"]),
        ("cluster", web.SettingsError("x", setting="port"), ["notso cluster --help"], ["notso serve"]),
        ("doctor", web.StorageError("x"), [], ["notso doctor"]),
        ("pull", OSError(errno.EADDRINUSE, "Address already in use"), [], ["--host", "--port"]),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_advice_fits_the_command_that_failed(
    verb: str, error: BaseException, advised: list[str], unadvised: list[str]
) -> None:
    command = app_command(verb)
    _, line = exit_codes.explain(error, command)

    advice = line.lower()
    assert all(each.lower() in advice for each in advised), line
    assert not any(each.lower() in advice for each in unadvised), line


def app_command(verb: str) -> exit_codes.Command:
    from notso.cli.app import app, command_of

    return command_of(typer.main.get_command(app), [verb])


def test_no_advice_names_an_option_that_the_command_lacks() -> None:
    every_option = {"context", "window", "device", "adapter", "data_dir", "host", "port", "api_key_file"}
    wrong = []
    for verb in VERBS:
        command = app_command(verb)
        assert command.options is not None
        for error, _, _ in FAILURES:
            _, line = exit_codes.explain(error, command)
            advice = line.removeprefix(str(error))
            lacked = [name for name in every_option - command.options if f"--{name.replace('_', '-')}" in advice]
            wrong += [(verb, type(error).__name__, name) for name in lacked if verb != "chat" or name != "context"]

    assert wrong == []


@pytest.mark.parametrize("verb", [["inspect"], ["verify"], ["run", "x", "--model"], ["serve", "--model"]])
def test_model_file_error_names_the_file(notso: Run, tmp_path: Path, verb: list[str]) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(20))

    result = notso(*verb, str(damaged))

    assert result.code == 3
    assert result.err.startswith(f"notso: {damaged}: ")


def test_checkpoint_error_names_the_folder(notso: Run, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text("[]")

    result = notso("convert", str(folder), str(tmp_path / "out.gguf"))

    assert result.code == 3
    assert result.err.startswith(f"notso: {folder}: config.json is not a JSON object")


def test_adapter_error_names_the_adapter_file(notso: Run, small_model: Path, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(b"GGUF" + bytes(20))

    result = notso("run", "x", "--model", str(small_model), "--context", "64", "--adapter", f"mine={damaged}")

    assert result.code == 3
    assert f"notso: {damaged}: " in result.err
    assert result.err.count("damaged.gguf") == 1
    assert str(small_model) not in result.err
    assert "Check --adapter." in result.err


def every_error(root: type[BaseException]) -> list[type[BaseException]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in every_error(child))]


def test_every_error_class_is_covered_by_the_failure_table() -> None:
    told = {type(error) for error, _, _ in FAILURES}
    general = {"NotsoError", "QTensorError", "ModelError", "WebError", "OperandError", "ToolError", "ClusterError"}
    general |= {"TuningError", "QuotaError", "SignInError"}
    ours = [kind for kind in every_error(qtensor.NotsoError) if kind.__module__.startswith("notso.")]
    named = {kind for kind in ours if any(issubclass(kind, row) for row in told)}

    storage = {"StorageError", "StorageDamagedError", "StorageFullError", "SettingsError", "QuotaError"}
    assert {kind.__name__ for kind in ours if kind not in named} <= general | storage


def test_multiline_error_message_is_escaped_to_one_line() -> None:
    _, line = exit_codes.explain(model.ModelFileError("first\n  second\t\x1b[2J"))

    assert line.startswith(r"first\n second\t\x1b[2J.")


def test_printed_error_escapes_control_characters(engine: Any, notso: Run) -> None:
    engine.script = [model.ModelFileError("name \x1b[2J")]

    assert r"name \x1b[2J" in notso("run", "x").err


def test_traceback_is_shown_only_with_debug_option(engine: Any, notso: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.script = [model.EngineError("a logit is not finite")]

    assert "Traceback" not in notso("run", "x").err
    result = notso("run", "x", "--debug")
    assert result.code == 1
    assert "Traceback" in result.err
    assert result.err.splitlines()[-1] == "notso: a logit is not finite"
    monkeypatch.delenv("NOTSO_DEBUG")
    assert "Traceback" not in notso("run", "x").err


def test_logged_warning_is_one_line_and_info_is_hidden(notso: Run, capsys: pytest.CaptureFixture[str]) -> None:
    import logging

    notso("list")
    logger = logging.getLogger("notso.web.turns")
    try:
        raise ValueError("why\nnot\x1b")
    except ValueError:
        logger.warning("two\nlines", exc_info=True)
    logger.info("not worth a line")

    assert capsys.readouterr().err == "notso: two lines (ValueError: why not␛)\n"


def test_package_runs_as_a_module(own_home: Any) -> None:
    run = subprocess.run([sys.executable, "-m", "notso", "--version"], capture_output=True, text=True, check=True)

    assert run.stdout.startswith("notso 0.")


def test_command_reference_page_is_up_to_date() -> None:
    from notso.cli.reference import reference

    page = Path(__file__).parents[2] / "docs" / "commands.md"

    assert page.read_text() == reference(), "run: python -m notso.cli.reference > docs/commands.md"


def test_environment_of_tests_has_no_notso_variables() -> None:
    assert [name for name in os.environ if name.startswith(("NOTSO_", "HF_TOKEN"))] == []


def test_doctor_checks_the_port_of_the_configuration_file(
    notso: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.toml").write_text("[serve]\nport = 0\n")
    monkeypatch.setenv("NOTSO_CONFIG", str(tmp_path / "config.toml"))
    found = json.loads(notso("doctor", "--json").out)
    assert [each["message"] for each in found if each["subject"] == "port"] == ["0 is free"]


def test_port_variable_of_a_kubernetes_service_is_ignored(notso: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NOTSO_PORT", "tcp://10.96.12.7:80")

    assert notso("doctor", "--json").code in (0, 1)

    monkeypatch.setenv("NOTSO_PORT", "many")
    refused = notso("doctor", "--json")
    assert refused.code == 2 and "NOTSO_PORT" in refused.err


def test_loop_of_links_causes_no_unexpected_error(notso: Run, tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to("loop")
    assert "unexpected" not in notso("dataset", str(tmp_path / "x"), "--preferences", str(tmp_path / "loop")).err


def test_path_that_cannot_be_examined_is_reported_with_its_reason(
    engine: Any, notso: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, function in (("exists", os.path.exists), ("is_dir", os.path.isdir), ("is_file", os.path.isfile)):
        monkeypatch.setattr(Path, name, function)  # in Python 3.14, these methods raise no errors either
    path = tmp_path / "x"
    path.symlink_to("a" * 300)
    assert "File name too long" in notso("list", str(path)).err
    assert "File name too long" in notso("dataset", str(path)).err
    assert "File name too long" in notso("chat", stdin=f"/model {path}\n").err
    for variable, value in (("XDG_CONFIG_HOME", "/" + "a" * 300), ("NOTSO_CONFIG", str(path))):
        monkeypatch.setenv(variable, value)
        assert "File name too long" in notso("serve", "--show-config").err
