"""MCP configurations in the forms that programs use, and the expected result of reading each.

A case has a name, the file (objects are written as JSON, bytes unchanged), the accepted servers as formatted by
`spoken`, and for each rejected entry a text that its reason must contain.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

ENVIRONMENT = {
    "CURSOR_TEST_KEY": "ck",
    "GEMINI_TEST_URL": "gu",
    "CRUSH_TEST_PAT": "cp",
    "CODEX_TEST_TOKEN": "ct",
    "KIRO_TEST_TOKEN": "kt",
    "TEST_SET": "set",
    "TEST_EMPTY": "",
    "NOTSO_INPUT_TEST_KEY": "typed",
}
"""Environment variables while a case is read."""


class Case(NamedTuple):
    """A configuration file and the expected result."""

    name: str
    content: Any
    used: dict[str, str]
    left_out: dict[str, str] = {}  # noqa: RUF012 - a named tuple's default
    file: str = "mcp.json"

    @property
    def data(self) -> bytes:
        if isinstance(self.content, bytes):
            return self.content
        return self.content.encode() if isinstance(self.content, str) else json.dumps(self.content).encode()


def spoken(
    command: str, args: tuple[str, ...], env: dict[str, str], cwd: str | None, url: str, headers: dict[str, str]
) -> str:
    """Format a server as one line."""
    named = " ".join(f"{name}={value}" for name, value in (headers if url else env).items())
    return " ".join(filter(None, [url or command, *args, named and f"[{named}]", cwd and f"in {cwd}"]))


def one(entry: Any, used: str, **left_out: str) -> tuple[Any, dict[str, str], dict[str, str]]:
    return (
        {"mcpServers": {"a": entry}},
        {"a": used} if used else {},
        dict.fromkeys(("a",), *left_out.values()) if left_out else {},
    )


X = {"command": "x"}
FAR = "https://t.example/mcp"
ARRAY = {"mcpServers": [{"name": "First one", "command": "x"}, {"url": FAR}, 3]}
LONG = "n" * 100
PAIR = '{"mcpServers": {"a": {"command": "x", "args": ["y"]}}}'
PATH_NAME = "github.com/modelcontextprotocol/servers/tree/main/src/fetch"

CASES = [
    # encodings and notation
    Case("UTF-8 with a mark", b"\xef\xbb\xbf" + PAIR.encode(), {"a": "x y"}),
    Case("UTF-16, little end first", b"\xff\xfe" + PAIR.encode("utf-16-le"), {"a": "x y"}),
    Case("UTF-16, big end first", b"\xfe\xff" + PAIR.encode("utf-16-be"), {"a": "x y"}),
    Case("UTF-16 without a mark", PAIR.encode("utf-16-le"), {"a": "x y"}),
    Case("UTF-32", b"\xff\xfe\0\0" + PAIR.encode("utf-32-le"), {"a": "x y"}),
    Case("CRLF", PAIR.replace(" ", "\r\n").encode(), {"a": "x y"}),
    Case("CR", PAIR.replace(" ", "\r").encode(), {"a": "x y"}),
    Case("padded with NULs", PAIR.encode() + b"\0" * 512, {"a": "x y"}),
    Case("empty file", b"", {}, {"mcp.json": "contains no servers"}),
    Case("blank file", b"\n\n", {}, {"mcp.json": "contains no servers"}),
    Case("empty object", {}, {}, {"mcp.json": "contains no servers"}),
    Case("no servers", {"mcpServers": {}}, {}, {"mcp.json": "contains no servers"}),
    Case("servers null", {"mcpServers": None}, {}, {"mcp.json": "contains no servers"}),
    Case("line comment", '// mine\n{"mcpServers": {"a": {"command": "x"}}} // end', {"a": "x"}),
    Case("line comment with CRLF", '// mine\r\n{"mcpServers": {"a": {"command": "x"}}}', {"a": "x"}),
    Case("block comment", '{/* a "quote */"mcpServers": {"a": {"command": /* b */ "x"}}}', {"a": "x"}),
    Case("trailing commas", '{"mcpServers": {"a": {"command": "x", "args": ["y", ], }, }, }', {"a": "x y"}),
    Case("comma before a comment", '{"mcpServers": {"a": {"command": "x", // last\n } } }', {"a": "x"}),
    Case(
        "URLs are no comments",
        '{"mcpServers": {"a": {"command": "x", "args": ["https://y/*z*/", ",]"]}}}',
        {"a": "x https://y/*z*/ ,]"},
    ),
    Case("commented-out server", '{"mcpServers": {\n// "b": {"command": "z"},\n"a": {"command": "x"}}}', {"a": "x"}),
    Case("escaped quotes", '{"mcpServers": {"a": {"command": "x", "args": ["\\"//\\\\"],}}}', {"a": 'x "//\\'}),
    Case(
        "server named twice",
        '{"mcpServers": {"a": {"command": "x"}, "a": {"command": "z"}}}',
        {"a": "z"},
        {"a": "defined twice"},
    ),
    Case(
        "key named twice",
        '{"mcpServers": {"a": {"command": "x", "command": "z"}}}',
        {"a": "z"},
        {"a": "command is defined twice"},
    ),
    # location of the list of servers
    Case("servers", {"servers": {"a": X}}, {"a": "x"}),
    Case("servers beside inputs", {"inputs": [], "servers": {"a": X}}, {"a": "x"}),
    Case(
        "mcp.servers", {"mcp": {"servers": {"a": X}}, "editor.tabSize": 2}, {"a": "x"}, {"mcp.json": "editor.tabSize"}
    ),
    Case("mcp.servers as one key", {"mcp.servers": {"a": X}}, {"a": "x"}),
    Case("mcp", {"mcp": {"a": X}}, {"a": "x"}),
    Case(
        "mcp beside mcpServers",
        {"mcpServers": {"a": X}, "mcp": {"allowed": ["a"]}},
        {"a": "x"},
        {"mcp.json": "allowed"},
    ),
    Case("a server called servers", {"mcpServers": {"servers": X}}, {"servers": "x"}),
    Case("context_servers", {"context_servers": {"a": X}, "theme": "One"}, {"a": "x"}, {"mcp.json": "theme"}),
    Case("mcp_servers", {"mcp_servers": {"a": X}}, {"a": "x"}),
    Case("amp.mcpServers", {"amp.mcpServers": {"a": X}}, {"a": "x"}),
    Case("bare", {"a": X, "b": {"url": FAR}}, {"a": "x", "b": FAR}),
    Case("a list", ARRAY, {"First one": "x", "server-2": FAR}, {"server-3": "an object with a command or a url"}),
    Case(
        "unknown keys beside",
        {"mcpServers": {"a": X}, "mine": 1, "globalShortcut": ""},
        {"a": "x"},
        {"mcp.json": "ignored: globalShortcut, mine"},
    ),
    Case(
        "many unknown keys",
        {"mcpServers": {"a": X}, **{f"k{n:02}": 1 for n in range(40)}},
        {"a": "x"},
        {"mcp.json": "k11 and 28 more"},
    ),
    Case(
        "TOML",
        '[mcp_servers.a]\ncommand = "x"\nargs = ["y"]\n[mcp_servers.a.env]\nN = 1\n',
        {"a": "x y [N=1]"},
        file="config.toml",
    ),
    Case(
        "TOML, both",
        '[mcp_servers.a]\ncommand = "x"\n[mcp_servers.b]\nurl = "https://t.example/mcp"\n',
        {"a": "x", "b": FAR},
        file="config.toml",
    ),
    # names
    Case("underscore", {"mcpServers": {"my_server": X}}, {"my_server": "x"}),
    Case("blank", {"mcpServers": {"Sequential Thinking": X}}, {"Sequential Thinking": "x"}),
    Case("path", {"mcpServers": {PATH_NAME: X}}, {PATH_NAME: "x"}),
    Case("scope", {"mcpServers": {"@scope/tool-server": X}}, {"@scope/tool-server": "x"}),
    Case("dots", {"mcpServers": {"io.github.someone/tool.v2": X}}, {"io.github.someone/tool.v2": "x"}),
    Case("long", {"mcpServers": {LONG: X}}, {LONG[:80]: "x"}),
    Case("other letters", {"mcpServers": {"高德地图": X, "日历": X}}, {"高德地图": "x", "日历": "x"}),
    Case("emoji", {"mcpServers": {"🔧 tools": X}}, {"🔧 tools": "x"}),
    Case("empty name", {"mcpServers": {"": X}}, {"(without a name)": "x"}),
    Case("names alike", {"mcpServers": {"a b": X, "a_b": X, "a/a b": X}}, {"a b": "x", "a_b": "x", "a/a b": "x"}),
    Case("steering signs", {"mcpServers": {"a\u202eb\n": X}}, {"a b": "x"}),
    # transports
    Case("stdio", *one({"type": "stdio", **X}, "x")),
    Case("STDIO", *one({"type": "STDIO", **X}, "x")),
    Case("local", *one({"type": "local", **X}, "x")),
    Case("transportType", *one({"transportType": "stdio", **X}, "x")),
    Case("transport", *one({"transport": "stdio", **X}, "x")),
    Case("http", *one({"type": "http", "url": FAR}, FAR)),
    Case("streamableHttp", *one({"type": "streamableHttp", "url": FAR}, FAR)),
    Case("streamable-http", *one({"type": "streamable-http", "url": FAR}, FAR)),
    Case("streamable_http", *one({"transport": "streamable_http", "url": FAR}, FAR)),
    Case("StreamableHTTP", *one({"type": "StreamableHTTP", "url": FAR}, FAR)),
    Case("streamable", *one({"type": "streamable", "url": FAR}, FAR)),
    Case("remote", *one({"type": "remote", "url": FAR}, FAR)),
    Case("sse", *one({"type": "sse", "url": "https://t.example/sse"}, "https://t.example/sse")),
    Case("SSE", *one({"transport": "SSE", "url": "https://t.example/sse"}, "https://t.example/sse")),
    Case("no kind, url", *one({"url": FAR}, FAR)),
    Case("serverUrl", *one({"serverUrl": FAR}, FAR)),
    Case("httpUrl", *one({"httpUrl": FAR}, FAR)),
    Case("baseUrl", *one({"type": "streamableHttp", "baseUrl": FAR}, FAR)),
    Case(
        "httpUrl and url",
        *one({"httpUrl": FAR, "url": "https://t.example/sse"}, FAR, note="ignored because httpUrl is set: url"),
    ),
    Case("url with blanks", *one({"url": f" {FAR}\n"}, FAR)),
    Case("url with a fragment", *one({"url": f"{FAR}#top"}, FAR)),
    Case("url null", *one({"command": "x", "url": None}, "x")),
    Case(
        "websocket", *one({"type": "websocket", "url": "wss://t.example"}, "", why='type "websocket" is not supported')
    ),
    Case("kind is a number", *one({"type": 1, **X}, "", why="type 1 is not supported")),
    Case("http without url", *one({"type": "http", **X}, "", why="needs a url")),
    Case("stdio without command", *one({"type": "stdio", "url": FAR}, "", why="needs a command")),
    Case("neither", *one({}, "", why="a command is needed")),
    Case("no object", *one("x", "", why="an object with a command or a url")),
    Case("null", *one(None, "", why="an object with a command or a url")),
    # commands
    Case("command with words", *one({"command": "npx -y 'a server'"}, "npx -y a server")),
    Case("long command", *one({"command": "docker run" + " -e NAME" * 40}, "docker run" + " -e NAME" * 40)),
    Case("command as a list", *one({"type": "local", "command": ["bun", "x", "y"]}, "bun x y")),
    Case("command as an object", *one({"command": {"path": "x", "args": ["y"], "env": {"N": 1}}}, "x y [N=1]")),
    Case("command with blanks around", *one({"command": " x "}, "x")),
    Case("command empty", *one({"command": ""}, "", why="a command is needed")),
    Case("command never closed", *one({"command": "x 'y"}, "", why="cannot be split")),
    Case("args null", *one({**X, "args": None}, "x")),
    Case("numbers in args", *one({**X, "args": ["--port", 8080, True, 0.5]}, "x --port 8080 true 0.5")),
    Case("args is a text", *one({**X, "args": "y"}, "", why="args must be a list")),
    Case("object in args", *one({**X, "args": [{}]}, "", why="args[0] must be a string")),
    Case("cwd", *one({**X, "cwd": "/srv"}, "x in /srv")),
    Case("cwd number", *one({**X, "cwd": {}}, "", why="cwd must be a string")),
    # environment variables
    Case("number in env", *one({**X, "env": {"PORT": 8080}}, "x [PORT=8080]")),
    Case("boolean in env", *one({**X, "env": {"DEBUG": True, "QUIET": False}}, "x [DEBUG=true QUIET=false]")),
    Case("null in env", *one({**X, "env": {"A": None, "B": "b"}}, "x [B=b]")),
    Case("env null", *one({**X, "env": None}, "x")),
    Case("environment", *one({**X, "environment": {"A": "b"}}, "x [A=b]")),
    Case("env is a list", *one({**X, "env": ["A=b"]}, "", why="env must be an object")),
    Case("list in env", *one({**X, "env": {"A": [1]}}, "", why="env.A must be a string")),
    Case("name with =", *one({**X, "env": {"A=B": "c"}}, "", why="not the name of a variable")),
    Case("${env:X}", *one({**X, "env": {"A": "${env:TEST_SET}"}}, "x [A=set]")),
    Case("${X}", *one({**X, "env": {"A": "${TEST_SET}/b"}}, "x [A=set/b]")),
    Case("$X", *one({**X, "env": {"A": "$TEST_SET"}}, "x [A=set]")),
    Case("$X unset stays", *one({**X, "env": {"A": "$TEST_UNSET_NAME"}}, "x [A=$TEST_UNSET_NAME]")),
    Case("a password with $", *one({**X, "env": {"A": "pa$TEST_SET!$"}}, "x [A=pa$TEST_SET!$]")),
    Case("{env:X}", *one({**X, "env": {"A": "{env:TEST_SET}"}}, "x [A=set]")),
    Case(
        "${X:-default}", *one({**X, "env": {"A": "${TEST_UNSET_NAME:-d:e}", "B": "${TEST_EMPTY:-f}"}}, "x [A=d:e B=f]")
    ),
    Case(
        "unset in env",
        *one(
            {**X, "env": {"A": "${env:TEST_UNSET_NAME}", "B": "b"}},
            "x [B=b]",
            note="env.A is left out: the environment variable TEST_UNSET_NAME is not set",
        ),
    ),
    Case("unset in args", *one({**X, "args": ["${env:TEST_UNSET_NAME}"]}, "", why="TEST_UNSET_NAME is not set")),
    Case("set in args", *one({**X, "args": ["--key=${env:TEST_SET}"]}, "x --key=set")),
    Case("set in command", *one({"command": "${TEST_SET}/x"}, "set/x")),
    Case("an unknown form stays", *one({**X, "args": ["${command:pick}"]}, "x ${command:pick}")),
    Case(
        "input given",
        {"inputs": [{"id": "test-key"}], "servers": {"a": {**X, "env": {"K": "${input:test-key}"}}}},
        {"a": "x [K=typed]"},
    ),
    Case(
        "input with a default",
        {"inputs": [{"id": "r", "default": "eu"}], "servers": {"a": {**X, "env": {"R": "${input:r}"}}}},
        {"a": "x [R=eu]"},
    ),
    Case(
        "input missing",
        {"inputs": [{"id": "k"}], "servers": {"a": {"url": FAR, "headers": {"K": "${input:k}"}}}},
        {},
        {"a": "set NOTSO_INPUT_K"},
    ),
    # URLs
    Case(
        "headers",
        *one(
            {"url": FAR, "headers": {"Authorization": "Bearer ${TEST_SET}", "X-N": 1}},
            f"{FAR} [Authorization=Bearer set X-N=1]",
        ),
    ),
    Case("http_headers", *one({"url": FAR, "http_headers": {"X": "y"}}, f"{FAR} [X=y]")),
    Case("requestInit", *one({"url": FAR, "requestInit": {"headers": {"X": "y"}}}, f"{FAR} [X=y]")),
    Case(
        "bearer_token_env_var",
        *one({"url": FAR, "bearer_token_env_var": "TEST_SET"}, f"{FAR} [Authorization=Bearer set]"),
    ),
    Case("headers null", *one({"url": FAR, "headers": None}, FAR)),
    Case("headers is a list", *one({"url": FAR, "headers": ["X: y"]}, "", why="headers must be an object")),
    Case(
        "header of two lines",
        *one({"url": FAR, "headers": {"X": "y\nZ: a"}}, "", why='"X" is not a valid header'),
    ),
    Case("header with a blank", *one({"url": FAR, "headers": {"X Y": "z"}}, "", why='"X Y" is not a valid header')),
    Case("header ends in a line end", *one({"url": FAR, "headers": {"X": "y\n"}}, f"{FAR} [X=y]")),
    Case("variable in the url", *one({"url": "https://${TEST_SET}.example/mcp"}, "https://set.example/mcp")),
    Case("this machine", *one({"url": "http://localhost:3001/sse"}, "http://localhost:3001/sse")),
    Case("this machine, other number", *one({"url": "http://127.0.0.53:1/mcp"}, "http://127.0.0.53:1/mcp")),
    Case("http to a name", *one({"url": "http://mcp-tools:8000/mcp"}, "", why="--mcp-allow-http mcp-tools")),
    Case("http to a network", *one({"url": "http://192.168.1.20:8000/mcp"}, "", why="--mcp-allow-http 192.168.1.20")),
    Case(
        "http to Docker's host",
        *one({"url": "http://host.docker.internal:8811/mcp"}, "", why="--mcp-allow-http host.docker.internal"),
    ),
    Case("user in the url", *one({"url": "https://u:p@t.example/mcp"}, "", why="use headers")),
    Case("no scheme", *one({"url": "t.example/mcp"}, "", why="must begin with https://")),
    Case("file", *one({"url": "file:///etc/passwd"}, "", why="must begin with https://")),
    Case("port beyond", *one({"url": "https://t.example:99999/"}, "", why="is not a URL")),
    Case("url is a number", *one({"url": {}}, "", why="url must be a string")),
    # switches, and keys of other programs
    Case("disabled", *one({**X, "disabled": True}, "", why="disabled in the file")),
    Case("disabled false", *one({**X, "disabled": False}, "x")),
    Case("disabled in words", *one({**X, "disabled": "true"}, "", why="disabled in the file")),
    Case("not disabled in words", *one({**X, "disabled": "false"}, "x")),
    Case("disabled null", *one({**X, "disabled": None}, "x")),
    Case("disabled and otherwise wrong", *one({"disabled": True, "type": "ws"}, "", why="disabled in the file")),
    Case("enabled false", *one({**X, "enabled": False}, "", why="disabled in the file")),
    Case("isActive", *one({**X, "isActive": True}, "x")),
    Case("autoApprove", *one({**X, "autoApprove": []}, "x", note="ignored: autoApprove")),
    Case("alwaysAllow", *one({**X, "alwaysAllow": ["y"], "timeout": 60}, "x", note="ignored: alwaysAllow, timeout")),
    Case("trust", *one({**X, "trust": True}, "x", note="ignored: trust")),
    Case("unknown key with signs", *one({**X, "a\u202eb": 1}, "x", note="ignored: a b")),
    Case("tools", *one({**X, "tools": ["*"]}, "x")),
    Case("disabledTools is a number", *one({**X, "disabledTools": 1}, "", why="disabledTools must be a list")),
    Case(
        "one wrong, one right",
        {"mcpServers": {"bad": {"command": 1}, "good": X}},
        {"good": "x"},
        {"bad": "a command is needed"},
    ),
    Case(
        "nine",
        {"mcpServers": {f"s{n}": X for n in range(9)}},
        {f"s{n}": "x" for n in range(8)},
        {"s8": "at most 8 servers"},
    ),
    Case(
        "nine, one disabled",
        {"mcpServers": {f"s{n}": {**X, "disabled": n == 0} for n in range(9)}},
        {f"s{n}": "x" for n in range(1, 9)},
        {"s0": "disabled in the file"},
    ),
]

_FILES: dict[str, dict[str, dict[str, str]]] = json.loads(
    (Path(__file__).parents[2] / "strangers" / "mcp.json").read_text("utf-8")
)
WHOLE = {name: (each["used"], each["left_out"]) for name, each in _FILES.items()}
"""Files in tests/strangers/mcp -> accepted servers, and texts in the reasons for rejected entries."""
