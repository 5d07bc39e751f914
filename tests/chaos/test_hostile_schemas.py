"""Schemas and grammars of a megabyte made to be expensive: refused or accepted, without delaying other users."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from chaos.ledger import LONG, Ledger
from chaos.victim import DEMO, Victim, Witness

ROUNDS = 10 if LONG else 1
AT_ONCE = 4


def hostile_schemas() -> dict[str, dict[str, Any]]:
    return {
        "names with patterns": {"properties": {f"p{n}": {"pattern": "^[a-z]{1,30}$"} for n in range(20_000)}},
        "every minimum with every maximum": {
            "allOf": [{"anyOf": [{kind: n} for n in range(18_000)]} for kind in ("minLength", "maxLength")]
        },
        "values after names": {
            "properties": {f"p{n}": {} for n in range(25_000)},
            "anyOf": [{"const": n} for n in range(30_000)],
        },
        "objects that exclude one another": {
            "oneOf": [{"required": ["k"], "properties": {"k": {"const": n}}} for n in range(15_000)]
        },
        "names that are required": {"required": [f"p{n}" for n in range(80_000)]},
        "names that require others": {"dependentRequired": {f"p{n}": [f"q{n}"] for n in range(20_000)}},
        "values": {"enum": [f"v{n}" for n in range(80_000)]},
        "a chain of references": {
            "$defs": {f"d{n}": {"items": {"$ref": f"#/$defs/d{n + 1}"}} for n in range(2_000)} | {"d2000": {}},
            "$ref": "#/$defs/d0",
        },
    }


def test_expensive_schemas_do_not_block_other_requests(ledger: Ledger, victim: Callable[..., Victim]) -> None:
    """Each request is refused for its own error or answered, and the server's pages stay available."""
    attacked = victim(DEMO)
    asked = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "reasoning_effort": "none"}
    schemas = hostile_schemas()
    bodies = [json.dumps(asked | {"json_schema": schema}) for schema in schemas.values()]
    bodies.append(json.dumps(asked | {"grammar": 'root ::= "' + "a" * 260_000 + '"'}))
    bodies.append(json.dumps(asked | {"grammar": "\n".join(f"x{n} ::= x{n + 1}" for n in range(40_000))}))

    def ask(body: str) -> int:
        headers = {"content-type": "application/json"}
        return attacked.client.post("/v1/chat/completions", content=body, headers=headers).status_code

    with Witness(attacked) as witness, ThreadPoolExecutor(AT_ONCE) as pool:
        statuses = list(pool.map(ask, bodies * ROUNDS))
    failed = sum(status not in (200, 400) for status in statuses)
    failed += witness.page.failed + witness.livez.failed + (attacked.process.poll() is not None)
    ledger.note(
        "clients",
        f"expensive schemas of up to 1 MB, and grammars of up to 0.25 MB: {', '.join(schemas)}",
        f"{len(statuses)} of them, {AT_ONCE} at once; {statuses.count(400)} refused",
        failed,
        witness.figures,
    )
