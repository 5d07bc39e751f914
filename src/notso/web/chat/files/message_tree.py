"""Message trees of other programs, brought into the form of our own export.

Only the standard library is imported, so that the child process that reads imports starts quickly.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from notso.web.chat.files.documents import Unreadable

JSON = dict[str, Any]


@dataclass(slots=True)
class Node:
    """One message as another program stores it. Times are milliseconds since 1970, 0 if unknown.

    `role` is "" for what is not shown, such as system messages and results of tools; its children take its place.
    `rank` orders siblings.
    """

    id: str
    parent: str | None
    role: Literal["user", "assistant", ""]
    content: str = ""
    reasoning: str = ""
    created_ms: int = 0
    model: str = ""
    state: Literal["done", "interrupted", "failed"] = "done"
    note: str = ""
    attachments: list[JSON] = field(default_factory=list)
    rank: int = 0


@dataclass(frozen=True, slots=True)
class Tree:
    """Messages in the form of our export, parents first, and the first one of the shown branch."""

    messages: list[JSON]
    chosen_root: str | None


def tree_of(nodes: Sequence[Node], current: str | None) -> Tree:
    """Link messages to their nearest shown ancestor and choose the branch that ends in `current`.

    A message with an unknown parent becomes a root. Answers that only results of tools separate become one. Raises
    Unreadable if ids are repeated or messages form a circle. Takes time proportional to the number of nodes.
    """
    by_id = {node.id: node for node in nodes}
    if len(by_id) != len(nodes):
        raise Unreadable("import_invalid", place="messages", reason="a duplicate id")
    below: dict[str | None, list[Node]] = {}
    for node in nodes:
        below.setdefault(node.parent if node.parent in by_id else None, []).append(node)
    messages: dict[str, JSON] = {}
    shown: dict[str, str | None] = {}  # node -> the message that holds it, or the nearest one above
    continues: dict[str, bool] = {}  # whether nothing but results of tools is between the node and that message
    stack = _in_order(below.get(None, ()))
    while stack:
        node = stack.pop()
        parent = node.parent if node.parent in by_id else None
        above = shown[parent] if parent is not None else None
        alone = parent is not None and len(below[parent]) == 1 and continues[parent]
        if not node.role:
            shown[node.id], continues[node.id] = above, alone
        elif node.role == "assistant" and alone and above is not None and messages[above]["role"] == "assistant":
            _append(messages[above], node)
            shown[node.id], continues[node.id] = above, True
        else:
            messages[node.id] = _message(node, above)
            shown[node.id], continues[node.id] = node.id, True
        stack += _in_order(below.get(node.id, ()))
    if len(shown) != len(nodes):
        raise Unreadable("import_invalid", place="messages", reason="they form a circle")
    return Tree(list(messages.values()), _choose(messages, shown.get(current or "")))


def _in_order(siblings: Sequence[Node]) -> list[Node]:
    return sorted(siblings, key=lambda node: node.rank, reverse=True)  # the stack turns the order round


def _message(node: Node, parent: str | None) -> JSON:
    return {
        "id": node.id,
        "parent_id": parent,
        "role": node.role,
        "content": node.content,
        "reasoning": node.reasoning,
        "created_ms": node.created_ms,
        "model": node.model,
        "state": node.state,
        "note": node.note,
        "attachments": node.attachments,
    }


def _append(message: JSON, node: Node) -> None:
    for name, text in (("content", node.content), ("reasoning", node.reasoning)):
        message[name] = "\n\n".join(filter(None, (message[name], text)))
    message["model"] = node.model or message["model"]
    message["state"], message["note"] = node.state, node.note
    message["attachments"] += node.attachments


def _choose(messages: dict[str, JSON], last: str | None) -> str | None:
    """Make every message on the line to `last` choose the next one; return the first."""
    while last is not None:
        parent = messages[last]["parent_id"]
        if parent is None:
            return last
        messages[parent]["chosen_child"] = last
        last = parent
    return None
