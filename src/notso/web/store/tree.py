"""Find the shown branch in the tree of a chat's messages, and the versions of each message."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from notso.web.store.protocol import MOST_SHOWN, MOST_SHOWN_CHARACTERS, ShownMessage, StoredMessage


class Node(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def parent_id(self) -> str | None: ...

    @property
    def chosen_child(self) -> str | None: ...


N = TypeVar("N", bound=Node)


def shown_path(
    messages: Sequence[StoredMessage], chosen_root: str | None, through: str | None = None
) -> list[ShownMessage]:
    """Return the branch that contains the message `through`, or the chosen or newest branch if it is None."""
    children = _children(messages)
    line = branch(messages, chosen_root, through)
    before, after = _previous_user_messages(line), reversed([*_previous_user_messages(reversed(line))])
    return [
        ShownMessage(message, tuple(other.id for other in children[message.parent_id]), above, below)
        for message, above, below in zip(line, before, after, strict=True)
    ]


def branch_end(path: list[ShownMessage], limit: int, first: str | None = None) -> tuple[list[ShownMessage], int]:
    """Return the end of a branch (see ChatStore.shown_chat) and the number of messages before it."""
    newest = path[-MOST_SHOWN:]
    since_first = next((len(newest) - at for at, each in enumerate(newest) if each.message.id == first), 0)
    messages = (each.message for each in reversed(path))
    sizes = ((each.role, len(each.content) + len(each.reasoning)) for each in messages)
    begin = len(path) - count_shown(sizes, max(limit, since_first))
    return path[begin:], begin


def count_shown(newest_first: Iterable[tuple[str, int]], limit: int) -> int:
    """Return how many of the messages, given as (role, size), to show.

    `limit` is rounded up to whole turns. The total exceeds MOST_SHOWN_CHARACTERS only if the newest turn does.
    """
    count = whole = characters = 0
    for role, size in newest_first:
        characters += size
        if whole and characters > MOST_SHOWN_CHARACTERS:
            return whole
        count += 1
        if role == "user":
            whole = count
            if count >= limit:
                break
    return count


def _previous_user_messages(line: Iterable[StoredMessage]) -> Iterator[str | None]:
    user_message = None
    for message in line:
        yield user_message
        user_message = message.id if message.role == "user" else user_message


def branch(nodes: Iterable[N], chosen_root: str | None, through: str | None = None) -> list[N]:
    """Return a branch (see shown_path) from root to leaf. `nodes` must be sorted, oldest first."""
    nodes = list(nodes)
    children = _children(nodes)
    path_ids = _ids_on_path(nodes, through)
    found: list[N] = []
    siblings, choice = children.get(None, []), chosen_root
    while siblings:
        node = next((node for node in siblings if node.id in path_ids), None)
        node = node or next((node for node in siblings if node.id == choice), siblings[-1])
        found.append(node)
        siblings, choice = children.get(node.id, []), node.chosen_child
    return found


def path_to(nodes: Iterable[N], node_id: str) -> list[N]:
    """Return the path from the root to this node."""
    nodes = list(nodes)
    path_ids = _ids_on_path(nodes, node_id)
    return [node for node in nodes if node.id in path_ids]


def _ids_on_path(nodes: Sequence[N], node_id: str | None) -> set[str]:
    by_id = {node.id: node for node in nodes}
    line: set[str] = set()
    # Stop at a cycle, which damaged data may contain.
    while node_id in by_id and node_id not in line:
        line.add(node_id)
        node_id = by_id[node_id].parent_id
    return line


def _children(nodes: Iterable[N]) -> dict[str | None, list[N]]:
    nodes = list(nodes)
    # A message whose parent is missing becomes a root.
    ids = {node.id for node in nodes}
    children: dict[str | None, list[N]] = {}
    for node in nodes:
        children.setdefault(node.parent_id if node.parent_id in ids else None, []).append(node)
    return children
