"""An MCP server that offers the tools given as JSON in its first argument; each tool returns its own name.

The second argument selects a behavior for prompts: `prompts`, `broken` or `endless`; `only broken` has no tools.
"""

from __future__ import annotations

import json
import sys

kind = sys.argv[2] if len(sys.argv) > 2 else ""
print("Server running on stdio", flush=True)  # some real servers print such a line
for line in sys.stdin:
    asked = json.loads(line)
    result: dict[str, object] = {}
    if asked.get("method") == "initialize":
        version = asked["params"]["protocolVersion"]
        result = {
            "protocolVersion": version,
            "capabilities": {"prompts": {}}
            if kind in ("prompts", "only broken")
            else {"tools": {}, **({"prompts": {}} if kind else {})},
            "serverInfo": {"name": "odd", "version": "1"},
        }
    elif asked.get("method") == "tools/list":
        result = {"tools": json.loads(sys.argv[1]), "nextCursor": None}
    elif asked.get("method") == "tools/call":
        result = {"content": [{"type": "text", "text": asked["params"]["name"]}]}
    elif asked.get("method") == "prompts/list" and kind == "prompts":
        result = {"prompts": [{"name": f"P {at}"} for at in range(100)]}
    elif asked.get("method") == "prompts/list":
        result = {"prompts": 3} if "broken" in kind else {"prompts": [{"name": "p"}], "nextCursor": "on"}
    elif asked.get("method") == "prompts/get":
        result = {"messages": [{"role": "user", "content": {"type": "text", "text": asked["params"]["name"].lower()}}]}
    if "id" in asked:
        print(json.dumps({"jsonrpc": "2.0", "id": asked["id"], "result": result}), flush=True)
