"""An MCP server by hand, with the tools of its first argument as they are; each says its own name."""

from __future__ import annotations

import json
import sys

print("Server running on stdio", flush=True)  # as some do
for line in sys.stdin:
    asked = json.loads(line)
    result: dict[str, object] = {}
    if asked.get("method") == "initialize":
        version = asked["params"]["protocolVersion"]
        result = {
            "protocolVersion": version,
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "odd", "version": "1"},
        }
    elif asked.get("method") == "tools/list":
        result = {"tools": json.loads(sys.argv[1]), "nextCursor": None}
    elif asked.get("method") == "tools/call":
        result = {"content": [{"type": "text", "text": asked["params"]["name"]}]}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
