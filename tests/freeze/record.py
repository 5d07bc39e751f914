"""Record behavior that a refactoring must not change, and compare records: `make freeze`.

    python tests/freeze/record.py record FOLDER     write the record of this tree
    python tests/freeze/record.py compare OLD NEW   print each difference; exit with 1 if there is one

A record is a folder of text files: generated documents, the OpenAPI document, routes with their guards, names of
metrics, database schemas, and digests of written model files. It also contains answers of a server: with the scripted
engine, each field of each API with several values, with and without streaming, and every page with a conversation; with
the demo model, greedy and seeded answers. Ids, times, keys and ports are masked. Strings that were reworded on purpose
are in `reworded.tsv` (old, tab, new) and count as equal.

Only HTTP and the command line are used, so that the record does not depend on the structure of the code.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from html import unescape
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tests"))

from scripted_engine import ScriptedEngine  # noqa: E402
from web.conftest import Running  # noqa: E402
from web.store.postgres_server import binaries, postgres_server  # noqa: E402

from notso.smollm3 import Engine  # noqa: E402
from notso.web.values.settings import Settings  # noqa: E402

REWORDED = Path(__file__).with_name("reworded.tsv")
DOCUMENTS = ("docs/compatibility.md", "docs/commands.md", "src/notso/web/static", "tests/golden")
TIMES = r"(?:created|created_at|completed_at|loaded_at|modified_at|[a-z_]*(?:duration|_ms|_per_second|_seconds))"
ID = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
MASKS = tuple(
    (re.compile(pattern), mask)
    for pattern, mask in (
        (ID, "ID"),
        (r"\b(chatcmpl|cmpl|resp|msg|rs|fc|call|toolu|gen|ollama)[-_][0-9A-Za-z]{8,}", r"\1-ID"),
        (r"\b[0-9a-f]{32}\b", "HEX"),
        (r"nonce[-=\"]+[\w-]+", "NONCE"),
        (r"\?v=[0-9a-f]+", "?v=V"),
        (r"/static/[0-9a-f]{16}/", "/static/HASH/"),
        (r"(after=|revision[=\"]*)[\w.:%-]+", r"\1REVISION"),
        (r"127\.0\.0\.1:\d+", "HOST"),
        (r"/tmp/[\w./-]+", "PATH"),
        (r"\d{4}-\d\d-\d\d(T[\d:.]+(Z|\+00:00)?)?", "DATE"),
        (rf'("{TIMES}":\s*)[\d.eE+-]+', r"\1N"),
        (r"\d+(?:[.,]\d+)*\s*(?:GB|MB|kB|ms|s|tok/s|tokens/s|%)(?!\w)", "AMOUNT"),
    )
)  # fmt: skip
VALUES: tuple[Any, ...] = (None, True, 1, 0.5, -1, "x", ["a"], {"a": 1})
TOLD = ("content-type", "x-notso-ignored", "retry-after")
HELLO = [{"role": "user", "content": "What is notso?"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "one two"},
    "/v1/responses": {"input": "What is notso?"},
    "/v1/responses/input_tokens": {"input": "What is notso?"},
    "/v1/messages": {"messages": HELLO, "max_tokens": 64},
    "/v1/messages/count_tokens": {"messages": HELLO},
    "/api/chat": {"model": "smollm3", "messages": HELLO, "stream": False},
    "/api/generate": {"model": "smollm3", "prompt": "What is notso?", "stream": False},
    "/api/show": {"model": "smollm3"},
    "/api/pull": {"model": "smollm3"},
    "/completion": {"prompt": "one two"},
    "/v1/load_lora_adapter": {"lora_name": "a", "lora_path": "a.gguf"},
    "/v1/unload_lora_adapter": {"lora_name": "a"},
    "/tokenize": {"content": "one two"},
    "/detokenize": {"tokens": [1, 2]},
    "/apply-template": {"messages": HELLO},
}
STREAMED = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
TOOL = {"type": "function", "function": {"name": "add", "description": "Add.", "parameters": SCHEMA}}
CALL = "required"
ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", {"messages": HELLO, "temperature": 0, "max_tokens": 32}),
    ("/v1/chat/completions", {"messages": HELLO, "seed": 7, "max_tokens": 32, "logprobs": True, "top_logprobs": 2}),
    ("/v1/chat/completions", {"messages": HELLO, "seed": 7, "max_tokens": 48, "thinking_budget": 8}),
    ("/v1/chat/completions", {"messages": HELLO, "seed": 1, "max_tokens": 40, "tools": [TOOL], "tool_choice": CALL}),
    ("/v1/chat/completions", {"messages": HELLO, "seed": 1, "max_tokens": 40, "stream": True}),
    (
        "/v1/chat/completions",
        {
            **{"messages": HELLO, "seed": 3, "max_tokens": 40},
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}},
        },
    ),
    ("/v1/completions", {"prompt": "The", "seed": 5, "max_tokens": 24, "logprobs": 1, "echo": True}),
    ("/v1/messages", {"messages": HELLO, "max_tokens": 32, "temperature": 0, "stream": True}),
    ("/v1/responses", {"input": "What is notso?", "temperature": 0, "max_output_tokens": 32, "store": False}),
    ("/api/chat", {"model": "smollm3", "messages": HELLO, "options": {"seed": 2, "num_predict": 24}}),
    ("/completion", {"prompt": "The", "seed": 5, "n_predict": 24, "n_probs": 2}),
)  # fmt: skip


def masked(text: str) -> str:
    """Return the text without values that differ from run to run."""
    for pattern, mask in MASKS:
        text = pattern.sub(mask, text)
    return text


def record(folder: Path) -> None:
    """Write the record of this tree to a folder."""
    folder.mkdir(parents=True)
    write(folder, "documents", documents())
    write(folder, "model-files", model_files())
    with running(ScriptedEngine()) as server:
        openapi = server.client.get("/openapi.json").json()
        write(folder, "openapi", [json.dumps(openapi, indent=1, sort_keys=True)])
        write(folder, "routes", routes(server))
        write(folder, "metrics", metric_names(server.client))
        write(folder, "requests", requests(server.client, openapi))
        write(folder, "pages", pages(server))
        schemas = [
            line for database in sorted(server.shared.settings.directory.glob("*.db")) for line in schema(database)
        ]
        write(folder, "schemas", schemas)
    write(folder, "postgres-schema", postgres_schema())
    with running(Engine.load(context_tokens=2048, threads=1)) as server:
        write(folder, "answers", [asked(server.client, "POST", path, body) for path, body in ASKED])


def write(folder: Path, name: str, parts: list[str]) -> None:
    """Write a file of the record."""
    (folder / f"{name}.txt").write_text("\n".join(masked(part) for part in parts) + "\n", "utf-8")
    print(f"{name}: {len(parts):,}", flush=True)


@contextmanager
def running(engine: Any, **settings: Any) -> Iterator[Running]:
    """Run a server with an engine and an empty data directory."""
    with tempfile.TemporaryDirectory() as folder:
        server = Running(lambda: engine, Settings(port=0, data_dir=Path(folder) / "data", **settings)).ready()
        server.client = httpx.Client(  # no keep-alive, because the server closes idle connections
            base_url=server.address, timeout=60, limits=httpx.Limits(max_keepalive_connections=0)
        )
        try:
            yield server
        finally:
            server.close()


def documents() -> list[str]:
    """Return generated documents, and digests of files that are shipped unchanged."""
    parts = []
    for path in (ROOT / each for each in DOCUMENTS):
        if path.is_file():
            parts.append(path.read_text("utf-8"))
        else:
            files = [each for each in sorted(path.rglob("*")) if each.is_file() and each.suffix != ".pyc"]
            parts += [f"{each.relative_to(ROOT)} {digest(each)}" for each in files]
    return parts


def digest(path: Path) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def model_files() -> list[str]:
    """Return digests of written model files: random weights, and quantizations of them."""
    small = ["--layers", "2", "--hidden", "256", "--ffn", "512", "--heads", "4", "--kv", "2", "--vocab", "3072"]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "small.gguf"
        subprocess.run(
            [str(Path(sys.executable).with_name("notso")), "synth", str(made), *small, "--plain"],
            check=True,
            capture_output=True,
        )
        return [f"synth {made.stat().st_size} {digest(made)}"]


def routes(server: Running) -> list[str]:
    """Return every row of the table of routes in SECURITY.md."""
    return re.findall(r"^\| `[A-Z]+ /.*$", (ROOT / "SECURITY.md").read_text("utf-8"), re.MULTILINE)


def metric_names(client: httpx.Client) -> list[str]:
    """Return names and types of metrics, without values."""
    return sorted(re.findall(r"^# TYPE .*$", client.get("/metrics").text, re.MULTILINE))


def schema(database: Path) -> list[str]:
    """Return tables and indexes of a SQLite database."""
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        rows = connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL ORDER BY name").fetchall()
    return [f"-- {database.name}", *(row[0] for row in rows)]


def postgres_schema() -> list[str]:
    """Return columns and indexes of a PostgreSQL database; empty if PostgreSQL is not installed."""
    import psycopg

    if binaries() is None:
        return []
    with postgres_server() as postgres:
        address = postgres.new_database()
        with running(ScriptedEngine(), database_url=address), psycopg.connect(address) as connection:
            columns = connection.execute(
                "SELECT table_name, column_name, data_type, is_nullable, column_default FROM information_schema.columns"
                " WHERE table_schema = 'notso' ORDER BY 1, ordinal_position"
            ).fetchall()
            indexes = connection.execute("SELECT indexdef FROM pg_indexes WHERE schemaname = 'notso' ORDER BY 1")
            return [*(" ".join(map(str, row)) for row in columns), *(row[0] for row in indexes)]


def asked(client: httpx.Client, method: str, path: str, body: Any = None, **headers: str) -> str:
    """Send a request; return it and its response, with the headers that are part of an API."""
    answer = client.request(method, path, json=body, headers=headers) if method == "POST" else client.get(path)
    told = {
        name: answer.headers[name]
        for name in ("content-type", "x-notso-ignored", "retry-after")
        if name in answer.headers
    }
    question = f"{method} {path} {json.dumps(body, ensure_ascii=False)}"
    return f">>> {question}\n{answer.status_code} {json.dumps(told)}\n{answer.text}"


def requests(client: httpx.Client, openapi: dict[str, Any]) -> list[str]:
    """Send each field of each body with values of each type, and some requests with streaming."""
    found = []
    for path, body in BODIES.items():
        content = openapi["paths"][path]["post"].get("requestBody", {}).get("content", {})
        name = content["application/json"]["schema"]["$ref"].rpartition("/")[2]
        fields = sorted(openapi["components"]["schemas"][name]["properties"])
        found.append(asked(client, "POST", path, body))
        found += [
            asked(client, "POST", path, body | {field: value})
            for number, field in enumerate(fields)
            for value in (VALUES[number % 2 :: 2] if path != "/v1/chat/completions" else VALUES)
            if field != "background"
        ]
        if path in STREAMED:
            found.append(asked(client, "POST", path, body | {"stream": True}))
        found.append(asked(client, "POST", path, body | {"not_a_field": 1}))
    return found


def pages(server: Running) -> list[str]:
    """Request every page, with and without htmx, with a chat that has two versions of an answer."""
    first = server.ask("What is **notso**?", thinking=True)
    server.finished(first)
    server.finished(server.ask("And then?", first.chat_id))
    again = server.client.post(
        f"/chats/{first.chat_id}/messages/{first.message_id}/regenerate", data={"key": first.chat_id}
    )
    server.finished(server.last(first.chat_id))
    chat = f"/chats/{first.chat_id}"
    addresses = [
        *("/", "/?start=code", "/settings", "/tools", "/models", "/prompts", "/archive", "/search?q=notso", "/status"),
        *("/status/details", "/chats", "/operator", "/plugins", "/login", "/export", "/livez", "/health", "/nothing"),
        *(
            chat,
            f"{chat}?all=on",
            f"{chat}?at={first.message_id}",
            f"{chat}/turns",
            f"{chat}/settings",
            f"{chat}/tools",
        ),
        *(f"{chat}/export/{kind}" for kind in ("md", "json", "html")),
        *(f"{chat}/messages/{first.message_id}{part}" for part in ("", "/text", "/text?part=all", "/edit")),
        *("/v1/models", "/props", "/slots", "/api/tags", "/api/version", "/tokenizer_info"),
    ]
    shown = [f"regenerate {again.status_code}"]
    for address in addresses:
        for headers in ({}, {"HX-Request": "true"}):
            answer = server.client.get(address, headers=headers)
            text = unescape(re.sub(r"\n\s+", "\n", answer.text))
            shown.append(f">>> {address} {headers}\n{answer.status_code}\n{text}")
    return shown


def compare(old: Path, new: Path) -> int:
    """Print the differences of two records, and return their number."""
    lines = REWORDED.read_text("utf-8").splitlines() if REWORDED.exists() else []
    reworded = [line.split("\t") for line in lines if "\t" in line]
    differences = 0
    for name in sorted({path.name for folder in (old, new) for path in folder.glob("*.txt")}):
        texts = [(folder / name).read_text("utf-8") if (folder / name).exists() else "" for folder in (old, new)]
        olds, news = (text.splitlines() for text in texts)
        unchanged = set(news)
        for number, line in enumerate(olds):
            if line not in unchanged:  # an old text that is part of its new text would be replaced twice
                for before, after in reworded:
                    line = line.replace(before, after)
                olds[number] = line
        lines = list(difflib.unified_diff(olds, news, f"{old}/{name}", f"{new}/{name}", n=1, lineterm=""))
        differences += sum(line[:1] in "+-" for line in lines[2:])
        print("\n".join(lines[:200]), end="\n" if lines else "")
    print(f"{differences:,} lines differ")
    return differences


if __name__ == "__main__":
    if sys.argv[1] == "record":
        record(Path(sys.argv[2]))
    else:
        sys.exit(bool(compare(Path(sys.argv[2]), Path(sys.argv[3]))))
