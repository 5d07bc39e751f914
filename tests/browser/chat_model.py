"""A model of chats as trees of messages, and a scripted engine whose answers all differ, for random operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripted_engine import ScriptedEngine, say

from notso.smollm3 import Event, Message


class Talker:
    """A scripted engine whose answers all differ and can be held in the middle."""

    def __init__(self) -> None:
        self.engine = ScriptedEngine(self.script, slots=4, is_demo=False)
        self.said: dict[str, list[str]] = {}
        self.held = False

    def script(self, messages: Sequence[Message], thinking: bool) -> Iterator[Event]:
        asked = next(each.content for each in reversed(messages) if each.role == "user")
        if "Suggest three short questions" in asked:
            return
        texts = self.said.setdefault(asked, [])
        texts.append(f"a{sum(map(len, self.said.values()))}z answers with some words of its own.")
        for number, event in enumerate(say(texts[-1])):
            if self.held and number == 4:
                self.engine.gate.clear()
            yield event

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False
        self.engine.gate.set()


@dataclass(eq=False)
class Node:
    """A message of the model. `content` is None until the answer has ended."""

    role: str
    content: str | None
    parent: Node | None
    state: str = "done"
    files: list[str] = field(default_factory=list)
    rating: int = 0
    children: list[Node] = field(default_factory=list)
    chosen: Node | None = None

    def tree(self) -> list[Any]:
        below = [child.tree() for child in self.children]
        return [self.role, self.state, self.content, self.files, self.rating, below]


@dataclass(eq=False)
class Chat:
    id: str
    title: str
    root: Node = field(default_factory=lambda: Node("", "", None))
    pinned: bool = False
    archived: bool = False
    project: bool = False
    prompt: str = ""

    @property
    def path(self) -> str:
        return f"/chats/{self.id}"

    def line(self) -> list[Node]:
        """Return the chosen branch; below the last choice, the newest messages."""
        found, node = [], self.root
        while node.children:
            node = node.chosen if node.chosen in node.children else node.children[-1]
            found.append(node)
        return found

    def running(self) -> Node | None:
        return next((node for node in self.nodes() if node.content is None), None)

    def nodes(self) -> list[Node]:
        found, open_nodes = [], [*self.root.children]
        while open_nodes:
            node = open_nodes.pop()
            found.append(node)
            open_nodes += node.children
        return found

    def add(self, above: Node, role: str, content: str | None, **facts: Any) -> Node:
        node = Node(role, content, above, **facts)
        above.children.append(node)
        while node.parent is not None:
            node.parent.chosen = node
            node = node.parent
        return above.children[-1]
