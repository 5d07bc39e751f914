"""Count the files to edit for typical changes: `python supply/plant.py [NAME ...]`.

Each change is applied ("planted") to a copy of the tree, the generated documents are updated, and the new feature is
used over HTTP and the command line. Generated documents and new files are not counted. Exits with 1 if a feature does
not work or needs edits in more files than its goal.
"""

from __future__ import annotations

import contextlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = "src/notso"
COPIED = ("src", "tests", "docs", "supply", "native", "CMakeLists.txt", "SECURITY.md")
GENERATED = {
    "docs/commands.md": ("-m", "notso.cli.reference"),
    "docs/compatibility.md": ("-m", "notso.web.api.server.compatibility"),
    "SECURITY.md": ("supply/routes.py",),
}


@dataclass(frozen=True)
class Plant:
    """A change: texts to insert before anchors in existing files, and new files."""

    goal: int
    check: Callable[[], None]
    edits: Mapping[str, tuple[tuple[str, str], ...]]
    new: Mapping[str, str] = field(default_factory=dict)
    is_compiled: bool = False


def helped(*arguments: str) -> str:
    """Run a command and return its output, followed by a line with the exit code."""
    from notso.cli.app import run_command_line

    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = run_command_line(arguments)
    return f"{said.getvalue()}\n{code}"


@contextlib.contextmanager
def served(**settings: Any) -> Iterator[tuple[Any, Any]]:
    """Run a server with a scripted engine; return both."""
    from scripted_engine import ScriptedEngine
    from web.conftest import Running

    from notso.web.values.settings import Settings

    with tempfile.TemporaryDirectory() as folder:
        engine = ScriptedEngine()
        server = Running(lambda: engine, Settings(**{"port": 0, "data_dir": Path(folder)} | settings)).ready()
        try:
            yield server, engine
        finally:
            server.close()


def check_parameter() -> None:
    from notso.smollm3 import Engine

    with served() as (server, engine):
        hello = [{"role": "user", "content": "Hello"}]
        bodies: dict[str, dict[str, Any]] = {
            "/v1/chat/completions": {"messages": hello},
            "/v1/completions": {"prompt": "one"},
            "/v1/responses": {"input": "one"},
            "/v1/messages": {"messages": hello, "max_tokens": 8},
            "/completion": {"prompt": "one"},
            "/api/chat": {"messages": hello, "stream": False},
            "/api/generate": {"prompt": "one", "stream": False},
        }
        for path, body in bodies.items():
            for value, status in ((2.5, 200), (9, 400)):
                planted = {"options": {"planted": value}} if path.startswith("/api/") else {"planted": value}
                answer = server.client.post(path, json=body | planted)
                assert answer.status_code == status, (path, value, answer.text)
                assert status == 200 or "planted must be a number from 0 to 5" in answer.text, answer.text
            assert engine.requests[-1].params.planted == 2.5, path
        page = server.client.get("/settings").text
        assert 'name="planted"' in page and "Planted" in page and "How much is planted." in page
        fragment = {"HX-Request": "true"}
        assert server.client.post("/settings", data={"planted": "9"}, headers=fragment).status_code == 400
        assert server.client.post("/settings", data={"planted": "1.5"}, headers=fragment).status_code == 200
        server.finished(server.ask("one"))
        assert engine.requests[-1].params.planted == 1.5
    assert "--planted 0..5" in helped("run", "--help") and "--planted 0..5" in helped("chat", "--help")
    assert helped("run", "Hi", "--planted", "9").endswith("\n2") and "from 0 to 5" in helped(
        "run", "Hi", "--planted", "9"
    )
    assert helped("run", "Hi", "--planted", "2", "--max-tokens", "4", "--no-think").endswith(("\n0", "\n8"))
    with Engine.load(context_tokens=256, threads=1) as demo:
        assert demo.chat("Hi", planted=2.0, max_tokens=2).usage.completion_tokens
    assert "--planted" in Path("docs/commands.md").read_text("utf-8")
    assert Path("docs/compatibility.md").read_text("utf-8").count("| `planted` | How much is planted") == 9


def check_field() -> None:
    with served() as (server, _):
        body = {"messages": [{"role": "user", "content": "Hello"}], "planted": True}
        answer = server.client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 200 and "planted" not in answer.headers.get("x-notso-ignored", "")
        assert server.client.post("/v1/chat/completions", json=body | {"planted": "x"}).status_code == 400
        assert "planted" in server.client.get("/openapi.json").text
    assert "| `planted` | true: something is planted |" in Path("docs/compatibility.md").read_text("utf-8")


def check_button() -> None:
    with served() as (server, _):
        asked = server.ask("one")
        server.finished(asked)
        address = f"/chats/{asked.chat_id}/plant"
        for code in ("en", "de"):
            page = server.client.get(f"/chats/{asked.chat_id}", headers={"Accept-Language": code}).text
            assert "Plant this chat" in page and f'action="{address}"' in page, code
        assert server.client.post(address).status_code == 204
    assert "`POST /chats/{chat_id}/plant` | guarded | Plant a chat" in Path("SECURITY.md").read_text("utf-8")


def check_verb() -> None:
    assert "Plant a word" in helped("--help") and "notso plant tree" in helped("plant", "--help")
    assert "planted tree" in helped("plant", "tree")
    assert "## notso plant" in Path("docs/commands.md").read_text("utf-8")


def check_setting() -> None:
    from notso.web.values.settings import Settings

    assert Settings().planted_seconds == 3.0
    told = helped("serve", "--help")
    assert "--planted-seconds S" in told and "NOTSO_PLANTED_SECONDS" in told and "default: 3.0; 0<=x<=60" in told
    assert "planted-seconds" in helped("serve", "--show-config")
    os.environ["NOTSO_PLANTED_SECONDS"] = "7"
    assert any("7.0" in line and "environment" in line for line in helped("serve", "--show-config").splitlines())
    assert helped("serve", "--planted-seconds", "61").endswith("\n2")
    with contextlib.suppress(ValueError):
        Settings(planted_seconds=61.0)
        raise AssertionError("the range is not checked")
    assert "--planted-seconds" in Path("docs/commands.md").read_text("utf-8")


def check_route() -> None:
    from notso.web.sign_in.issued_keys import KeyManager
    from notso.web.store.sqlite.access import SQLiteAccessStore

    with tempfile.TemporaryDirectory() as folder:
        book = KeyManager(lambda: SQLiteAccessStore(Path(folder)))
        ann, olga = book.add("ann")[0], book.add("olga", is_operator=True)[0]
        with served(data_dir=Path(folder), api_key="the operator's own key") as (server, _):
            asked = [server.client.post("/plant", headers={"Authorization": f"Bearer {key}"}) for key in (ann, olga)]
            assert [each.status_code for each in asked] == [403, 204], [each.text for each in asked]
            actions = [each.action for each in server.on_loop(lambda: server.shared.accounts.store.audit(9))]
            assert "planted something" in actions
    assert "`POST /plant` | operators, audited | Plant something" in Path("SECURITY.md").read_text("utf-8")


def check_format() -> None:
    """Check that all kernel families give the same products with the planted format, close to the reference's."""
    import numpy as np

    from notso.qtensor import CPU, FORMATS_BY_NAME, QTensor, kernel_choice
    from notso.qtensor.reference.ops import matmul_q8k

    format, random = FORMATS_BY_NAME["PLANTED"], np.random.default_rng(1)
    rows, columns = 40, 512
    blocks = random.integers(0, 256, (rows * columns // 256, format.block_bytes), np.uint8)
    blocks[:, :2] = random.uniform(0.001, 0.01, (len(blocks), 1)).astype(np.float16).view(np.uint8)
    weight = QTensor("w", format, (rows, columns), blocks.reshape(-1))
    ids, x, ops = np.array([rows - 1, 0], np.int32), random.standard_normal((20, columns), np.float32), CPU()
    found = {}
    for family in kernel_choice.available_kernels():
        kernel_choice.use_kernels(family)
        for m in (1, 3, 20):
            found[family, m] = ops.empty(m, rows)
            ops.matmul(x[:m], weight, found[family, m])
            assert np.allclose(found[family, m], matmul_q8k(x[:m], weight), rtol=1e-4, atol=1e-4), (family, m)
            assert np.array_equal(found[family, m], found[kernel_choice.available_kernels()[0], m]), (family, m)
    taken = ops.empty(2, columns)
    ops.embed_rows(weight, ids, taken)
    assert np.abs(taken).max() > 0.1 and np.array_equal(taken, weight.dequantize()[ids])


def check_column() -> None:
    import asyncio
    from dataclasses import replace

    from web.store.postgres_server import binaries, postgres_server

    from notso.web.store.copy import copy_database
    from notso.web.store.opening import create_store
    from notso.web.store.sql.store import SQLStore

    async def use(store: SQLStore, *, is_new: bool) -> None:
        await store.open()
        if is_new:
            await store.add_chat("ann", replace(CHAT, planted=True), [])
            chat = await store.chat("ann", "c" * 32)
            assert chat is not None and chat.planted is True
            await store.update_chat("ann", "c" * 32, planted=False)
            await store.update_chat("ann", "c" * 32, planted=True, title="Two")
        listed = await store.chats("ann")
        assert [(chat.title, chat.planted) for chat in listed] == [("Two", True)]
        await store.close()

    from datetime import date

    from notso.web.store.protocol import Chat

    CHAT = Chat("c" * 32, "One", True, date(2026, 1, 1), 1, 1)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as closing:
        asyncio.run(use(create_store(Path(folder), None), is_new=True))
        targets = [f"{folder}/copy"]
        if binaries() is not None:
            targets.append(closing.enter_context(postgres_server()).new_database())
        for target in targets:
            copy_database(folder, target)
            is_url = target.startswith("postgres")
            asyncio.run(
                use(create_store(Path(folder) if is_url else Path(target), target if is_url else None), is_new=False)
            )


PARAMETER = """\
    planted: float = _parameter(
        1.0,
        help="How much is planted.",
        high=5,
        page=OnPage(label="Planted", hint="How much is planted."),
    )
"""
COLUMN = '''\
    """
    ALTER TABLE chats ADD COLUMN planted {kind} NOT NULL DEFAULT {default};
    """,
'''
SETTING = """\
    planted_seconds: float = _setting(
        3.0, help="Time to plant.", metavar="S", variable="NOTSO_PLANTED_SECONDS", low=0, high=60
    )
"""
BUTTON = """\
    <li><form method="post" action="/chats/{{ chat.id }}/plant"><button>{{ words.plant }}</button></form></li>
"""
STRUCT = """\
struct BlockPlanted {
  half d;
  int8_t qs[256];
};
"""
UNPACK = """\
QTENSOR_INLINE void unpack(const BlockPlanted& w, Unpacked256& out) {
  for (int l = 0; l < 256; l++) out.q[l] = w.qs[l];
  plain_scales(out.scales);
  out.d = w.d;
}

"""
UNPACK_REFERENCE = """\
def _planted(b: Bytes) -> Unpacked256:
    return _without_minimum(read_half(b, 0), np.ones((len(b), 16), np.int32), b[:, 2:].view(np.int8).astype(np.int32))


"""
ROUTE = '''\
@router.post("/plant", dependencies=[operator_only(audit="planted something")])
async def plant() -> Response:
    """Plant something."""
    return Response(status_code=204)


'''
VERB = '''\
"""`notso plant`: a planted verb."""

EXAMPLES = "  notso plant tree"


def plant(word: str) -> None:
    """Plant a word."""
    print("planted", word)
'''
PLANTS = {
    "parameter": Plant(
        2,
        check_parameter,
        {
            f"{SOURCE}/smollm3/values/sampling_params.py": (
                ("    given: tuple[str, ...]", PARAMETER),
                ("\n\ndef _check(", "    planted: float\n"),
            ),
            f"{SOURCE}/smollm3/sampling/sampler.py": (
                ("        self.seed = seed", "        self._planted = params.planted\n"),
            ),
        },
    ),
    "field": Plant(
        1,
        check_field,
        {
            f"{SOURCE}/web/api/chat_completions/fields.py": (
                ("    store: Annotated", "    planted: bool | None = None\n"),
                ('    "include_reasoning": works(', '    "planted": works("true: something is planted"),\n'),
            )
        },
    ),
    "button": Plant(
        3,
        check_button,
        {
            f"{SOURCE}/web/templates/_chat_menu.html": (('    <li class="export">', BUTTON),),
            f"{SOURCE}/web/languages/en.toml": (("archive_put = ", 'plant = "Plant this chat"\n'),),
            f"{SOURCE}/web/chat/routes/chats.py": (
                (
                    '@router.post("/chats/{chat_id}/keep"',
                    '@router.post("/chats/{chat_id}/plant", dependencies=[GUARDED])\n'
                    "async def plant(chat_id: str) -> Response:\n"
                    '    """Plant a chat."""\n    return Response(status_code=204)\n\n\n',
                ),
            ),
        },
    ),
    "column": Plant(
        3,
        check_column,
        {
            f"{SOURCE}/web/store/protocol.py": (
                ("\n\n@dataclass(frozen=True, slots=True)\nclass Memory", "    planted: bool = False\n"),
            ),
            f"{SOURCE}/web/store/sqlite/migrations.py": (
                (")\n\nSCHEMA_VERSION", COLUMN.format(kind="INTEGER", default=0)),
            ),
            f"{SOURCE}/web/store/postgres/migrations.py": (
                (")\n\nREINDEXES", COLUMN.format(kind="BOOLEAN", default="FALSE")),
            ),
        },
    ),
    "verb": Plant(
        1,
        check_verb,
        {f"{SOURCE}/cli/app.py": (("    plugin,\n", "    plant,\n"), ('    "keys": ', '    "plant": plant.plant,\n'))},
        {f"{SOURCE}/cli/plant.py": VERB},
    ),
    "setting": Plant(
        1, check_setting, {f"{SOURCE}/web/values/settings.py": (("    api_key: str | None = field(", SETTING),)}
    ),
    "format": Plant(
        5,
        check_format,
        {
            "native/blocks.h": (("  MXFP4 = 39\n", "  PLANTED = 99,\n"), ("#pragma pack(pop)", STRUCT)),
            "native/kernels/portable/unpacked_blocks.h": (
                ("// ---- the formats ----", UNPACK),
                (
                    "    case Format::TQ1_0:\n      return use(Format256",
                    "    case Format::PLANTED:\n      return use(Format256<BlockPlanted>{});\n",
                ),
            ),
            f"{SOURCE}/qtensor/formats.py": (
                ("\nFORMATS: dict", 'PLANTED = Format("PLANTED", 99, 256, 258)\n'),
                ("F32, F16, Q4_0, Q4_1", "PLANTED, "),
            ),
            f"{SOURCE}/qtensor/reference/unpacked_blocks.py": (
                ("    Q2_K,\n", "    PLANTED,\n"),
                ("UNPACK_256: dict[Format", UNPACK_REFERENCE),
                ("    Q2_K: _q2_k,\n", "    PLANTED: _planted,\n"),
            ),
        },
        is_compiled=True,
    ),
    "route": Plant(
        1,
        check_route,
        {f"{SOURCE}/web/chat/routes/operator.py": (("async def _accounts(", ROUTE),)},
    ),
}


def planted(name: str, folder: Path) -> int:
    """Apply a change to a copy of the tree, check it, and return the number of edited files."""
    plant = PLANTS[name]
    for each in COPIED:
        if (ROOT / each).is_dir():
            shutil.copytree(ROOT / each, folder / each, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / each, folder / each)
    if not plant.is_compiled:
        from notso.qtensor import _native  # type: ignore[attr-defined]

        native = Path(_native.__file__)
        (folder / SOURCE / "qtensor" / native.name).symlink_to(native)
    for path, edits in plant.edits.items():
        text = (folder / path).read_text("utf-8")
        for anchor, added in edits:
            assert text.count(anchor) == 1, f"{path} has {anchor!r} {text.count(anchor)} times"
            text = text.replace(anchor, added + anchor)
        (folder / path).write_text(text, "utf-8")
    for path, text in plant.new.items():
        (folder / path).write_text(text, "utf-8")
    if plant.is_compiled:
        compile_module(folder)
    for path, command in GENERATED.items():
        made = run(folder, *command)
        if made:
            (folder / path).write_text(made, "utf-8")
    run(folder, "supply/plant.py", "--check", name)
    return len(plant.edits)


def compile_module(folder: Path) -> None:
    """Build the native module of the copy, without optimization and GPU code."""
    tools = Path(sys.executable).parent
    made = folder / "made"
    options = ("-DQTENSOR_OPTIMIZE=-O0", "-DQTENSOR_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}")
    for command in (
        [tools / "cmake", "-S", folder, "-B", made, "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tools / 'ninja'}", *options],
        [tools / "ninja", "-C", made, "_native"],
    ):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{done.stdout[-4000:]}{done.stderr[-2000:]}")
    (module,) = made.glob("_native.*")
    shutil.copy(module, folder / SOURCE / "qtensor" / module.name)


def run(folder: Path, *arguments: str) -> str:
    """Run Python in the copy and return its output. Raises RuntimeError with its stderr."""
    # -S disables the editable install, which would import this tree; PYTHONPATH gives the other packages.
    packages = [path for path in sys.path if path.endswith("site-packages")]
    paths = [str(folder / "src"), str(folder / "tests"), *packages]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "NOTSO_CONFIG": ""}
    done = subprocess.run(
        [sys.executable, "-S", *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return done.stdout


def main(names: list[str]) -> int:
    """Print a line for each change, and return the exit code."""
    if names[:1] == ["--check"]:
        PLANTS[names[1]].check()
        return 0
    if unknown := [name for name in names if name not in PLANTS]:
        raise SystemExit(f"unknown change: {', '.join(unknown)}; the changes are {', '.join(PLANTS)}")
    worst = 0
    for name in names or PLANTS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                count = planted(name, Path(folder).resolve())
            except RuntimeError as error:
                print(f"{name:10} does not work\n{error}")
                worst = 1
                continue
        print(f"{name:10} {count} files, goal: at most {PLANTS[name].goal}", flush=True)
        worst |= count > PLANTS[name].goal
    return worst


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
