"""Hostile MCP servers: `python hostile_mcp_server.py CASE`. Each case speaks MCP until it misbehaves."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

MEGABYTE = b"a" * 2**20
TOOL: dict[str, Any] = {"name": "poke", "description": "Poke it.", "inputSchema": {"type": "object"}}


SCHEMA: dict[str, Any] = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
ASKED: dict[str, dict[str, Any]] = {
    "asks": {"message": "Who?\x1b[2J\u202e <b>", "requestedSchema": SCHEMA},
    "asks for ever": {"message": "Who?", "requestedSchema": SCHEMA},
    "asks for a nest": {"message": "Who?", "requestedSchema": {"type": "object", "properties": {"a": SCHEMA}}},
    "asks much": {"message": "Who?" * 1_000, "requestedSchema": SCHEMA},
    "sends away": {"message": "Go", "mode": "url", "url": "https://example.org", "elicitationId": "1"},
    "asks and ends": {"message": "Who?", "requestedSchema": SCHEMA},
    "asks and forgets": {"message": "Who?", "requestedSchema": SCHEMA},
    "asks twice": {"message": "Who?", "requestedSchema": SCHEMA},
}
CALLS: list[Any] = []
OFFERED: list[Any] = []


def write(data: bytes) -> None:
    while data:
        data = data[os.write(1, data) :]


def send(**message: Any) -> None:
    write(json.dumps({"jsonrpc": "2.0", **message}).encode() + b"\n")


def for_ever(work: Callable[[], Any]) -> None:
    def repeat() -> None:
        while True:
            work()

    threading.Thread(target=repeat, daemon=True).start()


def nested(depth: int) -> bytes:
    return b'{"a":' * depth + b"{}" + b"}" * depth


def listed(case: str, asked: dict[str, Any]) -> None:
    """Answer `tools/list`."""
    number, tools = asked["id"], [TOOL]
    if case == "gigabyte":
        write(f'{{"jsonrpc":"2.0","id":{number},"result":{{"tools":[{{"name":"'.encode())
        for _ in range(1024):
            write(MEGABYTE)
    elif case == "wrong ids":
        send(id=-number, result={"tools": tools})
        for_ever(lambda: send(id=time.time(), result={"tools": tools}))
        return
    elif case == "many tools":
        tools = [TOOL | {"name": f"poke{n}"} for n in range(100_000)]
    elif case == "same name":
        tools = [TOOL] * 1_000
    elif case == "odd names":
        odd = [
            "po\nke",
            "po\x1b[2Jke",
            "<script>alert(1)</script>",
            "\u202eekop",
            "../../poke",
            "",
            "a" * 100_000,
            "\x00",
        ]
        tools = [TOOL | {"name": name, "description": f"{name}</textarea>\x1b]0;x\x07", "title": name} for name in odd]
    elif case == "deep schema":
        write(f'{{"jsonrpc":"2.0","id":{number},"result":{{"tools":[{{"name":"poke","inputSchema":'.encode())
        write(nested(1000) + b"}]}}\n")
        return
    elif case == "schema of 150":
        tools = [TOOL | {"inputSchema": {"type": "object", "properties": json.loads(nested(150))}}]
    elif case == "crooked schema":
        schema = {"type": "object", "properties": {"x": {"type": "poke", "pattern": "(a+)+$", "$ref": "#/nowhere"}}}
        tools = [TOOL | {"inputSchema": schema}]
    elif case == "costly pattern":
        shape = {"type": "object", "properties": {"x": {"type": "string", "pattern": "^(a+)+$"}}, "required": ["x"]}
        tools = [TOOL | {"outputSchema": shape}]
    elif case == "endless pages":
        send(id=number, result={"tools": [TOOL | {"name": f"poke{number}"}], "nextCursor": "more"})
        return
    elif case == "trickle":
        for byte in json.dumps({"jsonrpc": "2.0", "id": number, "result": {"tools": tools}}).encode():
            write(bytes([byte]))
            time.sleep(0.5)
    send(id=number, result={"tools": tools})
    if case == "notifications":
        line = json.dumps({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": 1}})
        for_ever(lambda: write(1000 * (line.encode() + b"\n")))
    elif case == "progress":
        for_ever(lambda: send(method="notifications/progress", params={"progressToken": number + 1, "progress": 1}))
    elif case == "rubbish":
        for_ever(lambda: write(1000 * b'{"jsonrpc": "2.0", nonsense\n'))
    elif case == "requests":
        ask = {"method": "sampling/createMessage", "params": {"messages": [], "maxTokens": 1}}
        for_ever(lambda: send(id=time.time_ns(), **ask))
        for_ever(lambda: send(id=time.time_ns(), method="roots/list"))
        time.sleep(1e6)  # and never read the responses
    elif case == "deaf":
        time.sleep(1e6)


def called(case: str, asked: dict[str, Any]) -> None:
    """Answer `tools/call`."""
    number, result = asked["id"], {"content": [{"type": "text", "text": "poked"}]}
    if case == "endless line":
        for_ever(lambda: write(MEGABYTE))
        return
    elif case == "no result":
        result["content"] = 5  # type: ignore[assignment]
    elif case == "loud":
        result["content"] = [{"type": "text", "text": "la " * 30_000_000}]
    elif case == "dense":
        write(f'{{"jsonrpc":"2.0","id":{number},"result":{{"content":[],"structuredContent":{{"a":['.encode())
        write(b"[]," * 2_500_000 + b"[]]}}}\n")
        return
    elif case == "thick":
        send(id=number, result={"content": [], "structuredContent": {"a": [[]] * 30_000}})
        return
    elif case == "costly pattern":
        result["structuredContent"] = {"x": "a" * 60 + "!"}  # type: ignore[assignment]
    elif case == "error":
        send(id=number, error={"code": -1, "message": "\x1b[2J<script>" * 100_000})
        return
    elif case == "crash":
        os._exit(3)
    elif case == "silent":
        return
    elif case in ASKED:
        CALLS.append(number)
        if case != "asks twice" or len(CALLS) == 2:  # with "asks twice", only after both calls have arrived
            for at in range(len(CALLS)):
                send(id=f"q{at}", method="elicitation/create", params=ASKED[case])
        if case != "asks and ends":
            return
    send(id=number, result=result)


def told(case: str, answer: dict[str, Any]) -> None:
    """Return the reply to the question, and the client's capabilities, as the tool's result."""
    if case == "asks for ever" and answer["result"]["action"] != "cancel":
        send(id="q", method="elicitation/create", params=ASKED[case])
        return
    if case == "asks and forgets" and len(CALLS) == 1:  # the first call is never answered
        return
    text = json.dumps([answer.get("result", answer.get("error")), OFFERED[0]])
    send(id=CALLS.pop(), result={"content": [{"type": "text", "text": text}]})


def main(case: str) -> None:
    if case == "crash at once":
        os._exit(3)
    if case in ("mute", "stubborn"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if case == "mute":
        time.sleep(1e6)
    if case == "endless start":
        for_ever(lambda: write(MEGABYTE))
    if case == "stderr":
        for_ever(lambda: os.write(2, MEGABYTE))
    if case == "forks":
        for _ in range(20):
            if os.fork() == 0:  # each child keeps the pipes open
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                time.sleep(1e6)
    for line in sys.stdin:
        asked = json.loads(line)
        if asked.get("method") == "initialize":
            offered = {"tools": {"listChanged": True}}
            version = asked["params"]["protocolVersion"]
            OFFERED.append(asked["params"]["capabilities"])
            info = {"name": "hostile", "version": "1"}
            send(id=asked["id"], result={"protocolVersion": version, "capabilities": offered, "serverInfo": info})
        elif asked.get("method") == "tools/list":
            listed(case, asked)
        elif asked.get("method") == "tools/call":
            called(case, asked)
        elif "method" not in asked and CALLS:
            told(case, asked)
        elif "id" in asked and "method" in asked:
            send(id=asked["id"], error={"code": -32601, "message": "no such method"})
    if case == "stubborn":
        time.sleep(1e6)


main(sys.argv[1])
