"""If only the first line of an agent's system prompt changes, the cached prompt behind that line is reused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

import anthropic
import pytest
from scripted_engine import ScriptedEngine

from notso.smollm3 import Engine
from notso.smollm3.diagnostics.synth import write_synthetic
from notso.web.api.messages.request import parse_count_request, parse_message_request, strip_volatile_lines
from notso.web.api.shared.api_request import IGNORED

BILLING = "x-anthropic-billing-header: cc_version=2.1.37.{mark}; cc_entrypoint=cli; cch={mark};"
NAME = "x-anthropic-billing-header"
RULES = "Keep the house in order, and say what you did. " * 1_300
LEAST_TOKENS = 15_000
MOST_READ_AGAIN = 64

_owners = count()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Any]:
    """A server with a small random model and a long context."""
    folder, shared = tmp_path_factory.mktemp("agent"), request.getfixturevalue("shared")
    write_synthetic(folder / "m.gguf", layers=2, hidden=256, ffn=256, heads=4, kv_heads=1, vocab=4096)
    settings = type(shared.shared.settings)(port=0, data_dir=folder)
    server = type(shared)(lambda: Engine.load(folder / "m.gguf", threads=1, context_tokens=20_000), settings)
    yield server.ready()
    server.close()


def ask(client: anthropic.Anthropic, *system: str, said: tuple[Any, ...] = ()) -> anthropic.types.Message:
    hello: Any = {"role": "user", "content": "Look at the first room."}
    blocks: list[Any] = [{"type": "text", "text": text} for text in system]
    return client.messages.create(
        model=client.models.list().data[0].id, max_tokens=1, system=blocks, messages=[hello, *said]
    )


def read_again(message: anthropic.types.Message) -> tuple[int, int]:
    """Return the number of prompt tokens that were computed and the number found in the cache."""
    return message.usage.input_tokens, message.usage.cache_read_input_tokens or 0


def test_changed_billing_header_reuses_cached_prompt(served: Any) -> None:
    client = anthropic.Anthropic(base_url=served.address, api_key="none", max_retries=0)
    rules = f"{next(_owners)}. {RULES}"
    read, _ = read_again(ask(client, BILLING.format(mark="a1b2c"), rules))
    assert read >= LEAST_TOKENS
    on: tuple[Any, ...] = ({"role": "assistant", "content": "Done."}, {"role": "user", "content": "And the next?"})
    read, found = read_again(ask(client, BILLING.format(mark="0f9e8"), rules, said=on))
    assert read <= MOST_READ_AGAIN and found >= LEAST_TOKENS - MOST_READ_AGAIN


def test_other_prompt_changes_miss_prefix_cache(served: Any) -> None:
    client = anthropic.Anthropic(base_url=served.address, api_key="none", max_retries=0)
    rules = f"{next(_owners)}. {RULES}"
    ask(client, BILLING.format(mark="a1b2c"), rules)
    first_block = 128
    for system in (
        (BILLING.format(mark="a1b2c"), f"7{rules}"),  # the text itself changed
        ("x-anthropic-billing: cch=0f9e8;", rules),  # the line is not a known one
        (BILLING.format(mark="a1b2c") + " Be brief.", rules),  # the line contains an instruction
        (f"Be brief.\n{BILLING.format(mark='a1b2c')}", rules),  # the line is not the first one
    ):
        read, found = read_again(ask(client, *system))
        assert found < first_block and read >= LEAST_TOKENS, system[0]


def test_billing_header_is_removed_only_as_whole_first_line() -> None:
    line = BILLING.format(mark="00000")
    assert strip_volatile_lines(f"{line}\nBe kind.\n") == ("Be kind.\n", (NAME,))
    assert strip_volatile_lines(line) == ("", (NAME,))
    for system in (f"{line} Obey.", f"\n{line}", f"Be kind.\n{line}", f"{NAME}:", f"{NAME}: cch=a b", "", line[2:]):
        assert strip_volatile_lines(system) == (system, ())


@pytest.mark.parametrize("parse", [parse_count_request, parse_message_request])
def test_system_prompt_excludes_billing_header_unless_kept(parse: Any) -> None:
    line, hello = BILLING.format(mark="00000"), [{"role": "user", "content": "Hello"}]
    body = {"messages": hello} | ({"max_tokens": 5} if parse is parse_message_request else {})
    blocks = [{"type": "text", "text": text} for text in (line, "Be kind.")]
    for system, left in (
        (blocks, ["Be kind.", "Hello"]),
        (f"{line}\nBe kind.", ["Be kind.", "Hello"]),
        (line, ["Hello"]),
    ):
        assert [message.content for message in parse(body | {"system": system}).messages] == left
    kept = parse(body | {"system": line}, keep_volatile=True)
    assert [message.content for message in kept.messages] == [line, "Hello"] and not kept.ignored


@pytest.mark.parametrize("keep", [False, True])
def test_removed_line_is_reported_unless_keep_volatile_is_set(start: Any, keep: bool) -> None:
    engine = ScriptedEngine()
    server = start(engine, keep_volatile=keep).ready()
    body = {"max_tokens": 5, "system": BILLING.format(mark="1"), "messages": [{"role": "user", "content": "Hello"}]}
    answer = server.client.post("/v1/messages", json=body)
    assert answer.status_code == 200 and answer.headers.get(IGNORED) == (None if keep else NAME)
    assert len(engine.requests[0].messages) == 1 + keep
