"""Files and batches, through OpenAI's client and through plain HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import anthropic
import httpx
import openai
import pytest
from architecture.test_growth import check_growth
from scripted_engine import ScriptedEngine, say
from starlette.responses import JSONResponse

from notso.smollm3 import EngineLostError, Event, Message
from notso.web.api.batches import files
from notso.web.api.batches.runner import _Run
from notso.web.api.shared.background import MAX_FAILURES, Repetition
from notso.web.edge.errors import ApiError
from notso.web.store.records import StoredBatch, StoredFile
from notso.web.store.sql.records import SQLRecords
from notso.web.values.errors import EngineUnavailableError

Start = Callable[..., Any]
CHAT = "/v1/chat/completions"


def entry(number: int, url: str = CHAT, **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": f"question {number}"}]} if url == CHAT else {}
    return {"custom_id": f"r{number}", "method": "POST", "url": url, "body": asked | body}


def jsonl(entries: Sequence[Any]) -> bytes:
    return b"".join(json.dumps(each).encode() + b"\n" for each in entries)


def client_of(server: Any, **options: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", max_retries=0, **({"api_key": "none"} | options))


def echo(messages: Sequence[Message], thinking: bool) -> list[Event]:
    return say(f"answer to {messages[-1].content}")


class QuotaCheck:
    """An engine that answers the first `open` requests at once and the others after `go` is set."""

    def __init__(self, open: int = 0) -> None:
        self.go = threading.Event()
        self.asked = 0
        self._open = open

    def __call__(self, messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        self.asked += 1
        if self.asked > self._open:
            assert self.go.wait(60)
        yield from echo(messages, thinking)


def begun(client: openai.OpenAI, content: bytes, endpoint: Any = CHAT, **fields: Any) -> Any:
    file = client.files.create(file=("in.jsonl", content), purpose="batch")
    return client.batches.create(input_file_id=file.id, endpoint=endpoint, completion_window="24h", **fields)


def ended(server: Any, client: openai.OpenAI, batch: Any) -> Any:
    server.wait(lambda: client.batches.retrieve(batch.id).status in ("completed", "failed", "cancelled", "expired"))
    return client.batches.retrieve(batch.id)


def lines_of(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(line) for line in client.files.content(file_id or "").text.splitlines()]


def test_expired_files_are_not_listed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    async def keep(*_: object) -> None:
        pass

    monkeypatch.setattr(SQLRecords, "purge", keep)
    server = start(ScriptedEngine()).ready()
    for file in (StoredFile("file-old", "a", "batch", 1, 1, 2), StoredFile("file-new", "b", "batch", 1, 1, 0)):
        server.on_loop(partial(server.shared.store.records.add_file, "local", file, b"x"))
    assert [each["id"] for each in server.client.get("/v1/files").json()["data"]] == ["file-new"]
    assert server.client.get("/v1/files/file-old").status_code == 404


def test_uploaded_file_can_be_read_listed_and_deleted(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    client = client_of(server)
    content = bytes(range(256)) * 2000 + b"--boundary\r\n\r\nend\r\n"
    after: Any = {"anchor": "created_at", "seconds": 3600}
    file = client.files.create(file=("../a \u00e9.jsonl", content), purpose="batch", expires_after=after)
    assert file.filename == "a \u00e9.jsonl" and file.bytes == len(content) and file.status == "processed"
    assert file.expires_at == file.created_at + 3600
    assert client.files.content(file.id).read() == content
    assert client.files.retrieve(file.id) == file
    others = [client.files.create(file=b"x", purpose="batch") for _ in range(3)]
    listed = client.files.list(limit=2)
    assert [each.id for each in listed.data] == [others[2].id, others[1].id] and listed.has_more
    assert [each.id for each in client.files.list(order="asc")] == [file.id, *(each.id for each in others)]
    newest_first = [*(each.id for each in reversed(others)), file.id]
    other_client = anthropic.Anthropic(base_url=server.address, api_key="none", max_retries=0)
    assert [each.id for each in itertools.islice(other_client.beta.files.list(limit=2), 9)] == newest_first
    for cursor, expected, more in (
        ({"after_id": newest_first[1]}, newest_first[2:], False),
        ({"before_id": file.id}, newest_first[1:3], True),
        ({"before_id": newest_first[1]}, newest_first[:1], False),
        ({"after_id": newest_first[0], "before_id": file.id}, newest_first[1:3], False),
        ({"after_id": file.id, "before_id": newest_first[1]}, [], False),
    ):
        page = server.client.get("/v1/files", params={"limit": 2} | cursor).json()
        assert ([each["id"] for each in page["data"]], page["has_more"]) == (expected, more)
    for wrong in (
        {"after_id": "x"},
        {"before_id": "x"},
        {"page": "page_x"},
        {"after_id": file.id, "after": others[0].id},
    ):
        answer = server.client.get("/v1/files", params=wrong)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wrong)))
    version = {"anthropic-version": "2023-06-01"}
    page = server.client.get("/v1/files", headers=version).json()
    assert page.keys() == {"data", "first_id", "last_id", "has_more", "next_page"}, "not `object`"
    for each in page["data"]:
        shown = server.client.get(f"/v1/files/{each['id']}", headers=version).json()
        assert shown == each and (each["expires_at"] or "Z").endswith("Z") and "object" not in each
        assert (each["expires_at"] is None) == (each["id"] != file.id)
    assert client.files.list(purpose="batch_output").data == []
    assert client.files.delete(file.id).deleted
    for call in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            call(file.id)


def test_invalid_upload_is_rejected(start: Start) -> None:
    server = start(ScriptedEngine()).ready()
    post = server.client.post
    file = {"file": ("a.jsonl", b"x")}
    answers = [
        (post("/v1/files", json={}), 415, None),
        (post("/v1/files", content=b"", headers={"Content-Type": "multipart/form-data"}), 400, "file"),
        (post("/v1/files", files={"purpose": (None, "batch")}), 400, "file"),
        (post("/v1/files", files=file), 400, "purpose"),
        (post("/v1/files", files=file, data={"purpose": "vision"}), 400, "purpose"),
        (
            post("/v1/files", files=file, data={"purpose": "batch", "expires_after[anchor]": "created_at"}),
            400,
            "expires_after.seconds",
        ),
    ]
    for answer, status, param in answers:
        assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    # Older Pythons cannot parse the second name; newer ones do, and then the purpose is missing.
    for name, params in ((b"filename*=\x00''a", ("file",)), (b"filename*=a; filename*0*=b", ("file", "purpose"))):
        hostile = b"--b\r\nContent-Disposition: form-data; name=file; " + name + b"\r\n\r\nx\r\n--b--"
        answer = post("/v1/files", content=hostile, headers={"Content-Type": "multipart/form-data; boundary=b"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] in params
    taken = post("/v1/files", files=file, data={"purpose": "batch", "colour": "red"})
    assert taken.status_code == 200 and taken.headers["x-notso-ignored"] == "colour"


@pytest.mark.parametrize(
    ("before", "pump"),
    [
        (b'Content-Disposition: form-data; name="file"\r\n\r\n', b"\n"),
        (b"", b"--b\r\n\r\n\r\n"),
        (b"", b"Content-Type: multipart/mixed; boundary=b\r\n\r\n--b\r\n"),
        (b'Content-Disposition: form-data; name="', b"a"),
        (b'Content-Disposition: form-data; name="file"; filename=', b"("),
    ],
)
def test_hostile_multipart_form_is_parsed_in_linear_time(before: bytes, pump: bytes) -> None:
    def read(text: str) -> object:
        with contextlib.suppress(ApiError):
            files._read_upload("multipart/form-data; boundary=b", text.encode(), 0, "")
        return None

    # just within the size limit of a part's headers
    read("--b\r\n" + (before + pump * (7900 // len(pump))).decode() + "\r\n\r\nx\r\n--b--\r\n")

    def made(size: int) -> str:
        return (b"--b\r\n" + before + pump * (size // len(pump))).decode() + "\r\n--b--\r\n"

    check_growth(read, made, (65_536, 262_144, 1 << 20, 1 << 22), budget_s=0.05)


def test_upload_beyond_file_limits_is_rejected(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(ScriptedEngine()).ready()
    client = client_of(server)
    monkeypatch.setattr("notso.web.store.sql.records.MAX_FILES", 2)
    monkeypatch.setattr("notso.web.store.sql.records.MAX_FILE_BYTES_OF_OWNER", 10)
    client.files.create(file=b"12345678", purpose="batch")
    with pytest.raises(openai.APIStatusError) as full:
        client.files.create(file=b"123", purpose="batch")
    assert full.value.status_code == 507
    client.files.create(file=b"1", purpose="batch")
    with pytest.raises(openai.APIStatusError):
        client.files.create(file=b"1", purpose="batch")


def test_batch_writes_output_and_error_files(start: Start) -> None:
    server = start(ScriptedEngine(echo)).ready()
    client = client_of(server)
    entries = [entry(1), entry(2, temperature=9), entry(3, unknown=1) | {"note": "x"}, entry(4, stream=False)]
    batch = begun(client, jsonl(entries).replace(b"\n", b"\r\n\n"), metadata={"a": "b"})
    assert batch.status == "validating" and batch.metadata == {"a": "b"}
    batch = ended(server, client, batch)
    assert batch.status == "completed" and batch.completed_at and batch.in_progress_at and batch.finalizing_at
    assert batch.request_counts.to_dict() == {"total": 4, "completed": 3, "failed": 1}
    answers = {each["custom_id"]: each for each in lines_of(client, batch.output_file_id)}
    assert sorted(answers) == ["r1", "r3", "r4"]
    first = answers["r1"]
    assert first["response"]["body"]["choices"][0]["message"]["content"] == "answer to question 1"
    assert first["response"]["status_code"] == 200 and first["response"]["request_id"] and first["error"] is None
    (failed,) = lines_of(client, batch.error_file_id)
    assert failed["custom_id"] == "r2" and failed["response"]["status_code"] == 400
    assert failed["response"]["body"]["error"]["param"] == "temperature"
    assert [each.id for each in client.batches.list()] == [batch.id]
    assert {each.purpose for each in client.files.list()} == {"batch", "batch_output"}
    assert client.files.retrieve(batch.output_file_id or "").bytes == len(
        client.files.content(batch.output_file_id).read()
    )
    assert client.batches.cancel(batch.id).status == "completed"


@pytest.mark.parametrize(
    ("endpoint", "body", "read"),
    [
        ("/v1/completions", {"prompt": "x"}, lambda body: body["choices"][0]["text"]),
        ("/v1/responses", {"input": "x"}, lambda body: body["output"][-1]["content"][0]["text"]),
    ],
)
def test_batch_of_completions_or_responses_returns_answer(
    start: Start, endpoint: str, body: Any, read: Callable[[Any], str]
) -> None:
    server = start(ScriptedEngine(echo)).ready()
    client = client_of(server)
    batch = ended(server, client, begun(client, jsonl([entry(1, endpoint, **body)]), endpoint))
    (answer,) = lines_of(client, batch.output_file_id)
    assert read(answer["response"]["body"]) == "answer to x"


def test_batch_errors_name_invalid_input_lines(start: Start) -> None:
    server = start(ScriptedEngine(echo)).ready()
    client = client_of(server)
    bad: list[Any] = [
        entry(1),
        entry(1),
        entry(2) | {"method": "GET"},
        entry(3, "/v1/embeddings"),
        entry(4, "/v1/completions"),
        entry(5) | {"body": []},
        entry(6, stream=True),
        entry(7) | {"custom_id": ""},
        [],
    ]
    content = jsonl(bad) + b"{\n" + b'{"custom_id": "%s"}\n' % (b"x" * 80)
    batch = ended(server, client, begun(client, content))
    assert batch.status == "failed" and batch.failed_at and batch.output_file_id is None
    assert batch.errors and batch.errors.data
    assert [each.line for each in batch.errors.data] == list(range(2, 12))
    assert batch.errors.data[0].code == "duplicate_custom_id"
    for content, code in ((b"\n \n", "empty_file"), (b"\xff\xfe\x00", "invalid_file")):
        batch = ended(server, client, begun(client, content))
        assert batch.errors and batch.errors.data and batch.errors.data[0].code == code
    for fields, param in (
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"input_file_id": "file-0"}, "input_file_id"),
        ({"input_file_id": None}, "input_file_id"),
    ):
        asked = {"input_file_id": "file-0", "endpoint": CHAT, "completion_window": "24h"} | fields
        answer = server.client.post("/v1/batches", json=asked)
        assert answer.status_code in (400, 404) and answer.json()["error"]["param"] == param


def test_cancelled_batch_keeps_finished_results(start: Start) -> None:
    gate = QuotaCheck(open=2)
    server = start(ScriptedEngine(gate)).ready()
    client = client_of(server)
    batch = begun(client, jsonl([entry(number) for number in range(20)]))
    server.wait(lambda: client.batches.retrieve(batch.id).request_counts.completed == 2)
    assert [each.request_counts.completed for each in client.batches.list()] == [2]
    cancelling = client.batches.cancel(batch.id)
    assert cancelling.status in ("cancelling", "cancelled") and cancelling.cancelling_at
    batch = ended(server, client, batch)
    assert batch.status == "cancelled" and batch.cancelled_at and batch.error_file_id is None
    assert batch.request_counts.to_dict() == {"total": 20, "completed": 2, "failed": 0}
    assert len(lines_of(client, batch.output_file_id)) == 2


def test_batch_resumes_after_restart(start: Start) -> None:
    gate = QuotaCheck(open=3)
    server = start(ScriptedEngine(gate)).ready()
    client = client_of(server)
    batch = begun(client, jsonl([entry(number) for number in range(10)]))
    server.wait(lambda: client.batches.retrieve(batch.id).request_counts.completed == 3)
    gate.go.clear()
    server.close()
    asked: list[str] = []

    def recorded(messages: Sequence[Message], thinking: bool) -> list[Event]:
        asked.append(messages[-1].content)
        return echo(messages, thinking)

    server = start(ScriptedEngine(recorded)).ready()
    client = client_of(server)
    batch = ended(server, client, batch)
    answers = lines_of(client, batch.output_file_id)
    assert batch.status == "completed" and len(asked) == len(set(asked)) == 7
    assert sorted(each["custom_id"] for each in answers) == sorted(f"r{number}" for number in range(10))


def test_expired_batch_lists_unfinished_requests(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notso.web.api.batches.routes.WINDOW_SECONDS", 0)
    server = start(ScriptedEngine(echo)).ready()
    client = client_of(server)
    batch = ended(server, client, begun(client, jsonl([entry(1), entry(2)])))
    assert batch.status == "expired" and batch.expired_at
    for each in lines_of(client, batch.error_file_id):
        assert each["response"] is None and each["error"]["code"] == "batch_expired"


def test_batch_requests_have_background_priority(start: Start) -> None:
    gate = QuotaCheck()
    engine = ScriptedEngine(gate)
    server = start(engine).ready()
    client = client_of(server)
    batch = begun(client, jsonl([entry(1), entry(2)]))
    server.wait(lambda: gate.asked == 1)
    assert engine.requests[0].options.priority == "background"
    gate.go.set()
    assert server.client.post(CHAT, json=entry(3)["body"]).status_code == 200
    assert ended(server, client, batch).request_counts.completed == 2


def test_batch_retries_requests_when_queue_is_full(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notso.web.api.shared.background.LONGEST_RETRY_SECONDS", 0)
    server = start(ScriptedEngine(echo), max_waiting_turns=1).ready()
    client = client_of(server)
    batch = ended(server, client, begun(client, jsonl([entry(number) for number in range(30)])))
    assert batch.request_counts.to_dict() == {"total": 30, "completed": 30, "failed": 0}


def test_batch_stops_repeating_a_request_that_loses_the_engine(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("notso.web.api.shared.background.LONGEST_PAUSE_SECONDS", 0)
    monkeypatch.setattr("notso.web.api.shared.background.LONGEST_RETRY_SECONDS", 0)
    asked = list[str]()

    def answer(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        text = messages[-1].content
        asked.append(text)
        if text == "question 1" or asked.count(text) <= MAX_FAILURES:  # the first request makes the other one fail
            yield Event("error", error=EngineLostError("the GPU failed"))
        else:
            yield from echo(messages, thinking)

    server = start(ScriptedEngine(answer)).ready()
    client = client_of(server)
    batch = ended(server, client, begun(client, jsonl([entry(1), entry(2)])))
    assert batch.request_counts.to_dict() == {"total": 2, "completed": 1, "failed": 1}
    (failed,) = lines_of(client, batch.error_file_id)
    assert failed["custom_id"] == "r1" and failed["response"]["status_code"] == 503
    assert failed["response"]["body"]["error"]["code"] == "engine_lost"
    assert sorted(asked) == ["question 1"] * (MAX_FAILURES + 1) + ["question 2"] * (MAX_FAILURES + 1)


def test_request_is_left_to_the_next_process_if_the_server_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    answered = list[None]()

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        answered.append(None)
        shared.stopping = len(answered) == MAX_FAILURES
        await JSONResponse({}, 503)(scope, receive, send)

    async def with_current_key(caller: object) -> object:
        return caller

    monkeypatch.setattr("notso.web.api.shared.background.LONGEST_PAUSE_SECONDS", 0)
    monkeypatch.setattr("notso.web.api.shared.background.LONGEST_RETRY_SECONDS", 0)
    shared: Any = SimpleNamespace(stopping=False, store=SimpleNamespace(records=None))
    runner: Any = SimpleNamespace(
        services=SimpleNamespace(shared=shared, inner_app=answer),
        ring=SimpleNamespace(with_current_key=with_current_key),
        app=None,
    )
    batch = StoredBatch("batch_1", "local", 1, {}, {"caller": ["local", ""]})

    async def send() -> None:
        await _Run(runner, batch, asyncio.Event())._send_request(CHAT, b"{}", Repetition())

    with pytest.raises(EngineUnavailableError, match="the server is stopping"):
        asyncio.run(send())
    assert len(answered) == MAX_FAILURES


def test_pauses_before_repetitions_grow(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses, sleep, thread = list[float](), asyncio.sleep, threading.current_thread()

    async def note(seconds: float) -> None:
        if threading.current_thread() is not thread:
            return await sleep(seconds)  # a server of another test is still running
        pauses.append(seconds)

    async def repeat(*statuses: int) -> list[bool]:
        repetition = Repetition()
        return [await repetition.wait(status, {"retry-after": "20"}) for status in statuses]

    monkeypatch.setattr(asyncio, "sleep", note)
    assert asyncio.run(repeat(*[503] * MAX_FAILURES)) == [True] * (MAX_FAILURES - 1) + [False]
    assert pauses == [20, 20, 20, 40, 80, 160, 300]
    assert asyncio.run(repeat(*[429] * 50)) == [True] * 50, "repeated until a limit or quota is reset"
    assert asyncio.run(repeat(*[503] * MAX_FAILURES, 429, 503))[-3:] == [False, True, False]


def test_batch_begun_while_the_model_is_loading_uses_all_slots(start: Start) -> None:
    loaded, together = threading.Event(), threading.Barrier(3)

    def answer(messages: Sequence[Message], thinking: bool) -> list[Event]:
        together.wait(60)
        return echo(messages, thinking)

    def load() -> ScriptedEngine:
        assert loaded.wait(60)
        return ScriptedEngine(answer, slots=3)

    server = start(load)
    client = client_of(server)
    batch = begun(client, jsonl([entry(number) for number in range(3)]))
    server.wait(lambda: client.batches.retrieve(batch.id).status == "in_progress")
    loaded.set()
    assert ended(server, client, batch).request_counts.to_dict() == {"total": 3, "completed": 3, "failed": 0}


def test_only_requests_that_fail_twice_count_as_failed(start: Start) -> None:
    asked = list[str]()

    def fail(messages: Sequence[Message], thinking: bool) -> list[Event]:
        text = messages[-1].content
        asked.append(text)
        if text.endswith("3") or (text.endswith(("4", "5")) and asked.count(text) == 1):
            raise ValueError("the engine failed")
        return echo(messages, thinking)

    server = start(ScriptedEngine(fail)).ready()
    client = client_of(server)
    batch = ended(server, client, begun(client, jsonl([entry(number) for number in range(8)])))
    assert batch.request_counts.to_dict() == {"total": 8, "completed": 7, "failed": 1}
    (failed,) = lines_of(client, batch.error_file_id)
    assert failed["custom_id"] == "r3" and failed["response"]["status_code"] == 500
    assert sorted(asked.count(f"question {number}") for number in range(8)) == [1] * 5 + [2] * 3


def test_no_request_starts_while_one_is_repeated(start: Start) -> None:
    asked, repeated, go = list[str](), threading.Event(), threading.Event()
    first = threading.Barrier(4)

    def answer(messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        text = messages[-1].content
        asked.append(text)
        if asked.count(text) == 2:
            repeated.set()
            assert go.wait(60)
        elif int(text.split()[-1]) < 4:
            first.wait(60)
            if text == "question 0":
                raise ValueError("the engine failed")
            assert repeated.wait(60)
        yield from echo(messages, thinking)

    server = start(ScriptedEngine(answer, slots=4)).ready()
    client = client_of(server)
    batch = begun(client, jsonl([entry(number) for number in range(12)]))
    server.wait(lambda: client.batches.retrieve(batch.id).request_counts.completed >= 3)
    started = len(asked)
    go.set()
    assert ended(server, client, batch).request_counts.to_dict() == {"total": 12, "completed": 12, "failed": 0}
    assert started == 5 and len(asked) == 13


def test_files_and_batches_are_hidden_from_other_owners(start: Start) -> None:
    server = start(ScriptedEngine(echo), api_key="a long secret key").ready()
    mine = client_of(server, api_key="a long secret key")
    batch = ended(server, mine, begun(mine, jsonl([entry(1)])))
    records = server.shared.store.records
    for read in (records.batch, records.file):
        for id in (batch.id, batch.input_file_id, batch.output_file_id):
            assert server.on_loop(lambda read=read, id=id: read("another", id)) is None
    assert server.on_loop(lambda: records.files("another")) == server.on_loop(lambda: records.batches("another")) == []
    assert not server.on_loop(lambda: records.delete_file("another", batch.input_file_id))
    with httpx.Client(base_url=server.address) as stranger:
        for path in (
            "/v1/files",
            "/v1/batches",
            f"/v1/batches/{batch.id}",
            f"/v1/files/{batch.output_file_id}/content",
        ):
            assert stranger.get(path).status_code == 401
