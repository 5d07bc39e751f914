"""Selection of the branch that a chat shows."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

from notso.web.store.protocol import StoredMessage
from notso.web.store.tree import branch, path_to, shown_path


@dataclass(frozen=True)
class Place:
    id: str
    parent_id: str | None = None
    chosen_child: str | None = None


def ids(places: list[Place]) -> str:
    return "".join(place.id for place in places)


TREE = [Place("a"), Place("b", "a"), Place("c", "b"), Place("d", "a"), Place("e", "d"), Place("f", "c"), Place("g")]


def test_newest_branch_is_shown_without_a_selection() -> None:
    assert ids(branch(TREE, None)) == "g"
    assert ids(branch(TREE[:-1], None)) == "ade"
    assert branch([], None) == []


def test_selected_branch_is_shown() -> None:
    assert ids(branch(TREE, "a")) == "ade"
    chosen = [Place("a", None, "b"), *TREE[1:]]
    assert ids(branch(chosen, "a")) == "abcf"
    assert ids(branch(chosen, "gone")) == "g", "if the chosen message is gone, the newest is shown"


def test_branch_through_a_message_overrides_the_selection() -> None:
    assert ids(branch(TREE, "g", through="c")) == "abcf"
    assert ids(branch(TREE, "g", through="nowhere")) == "g"


def test_line_to_returns_the_path_to_a_message() -> None:
    assert ids(path_to(TREE, "c")) == "abc"
    assert path_to(TREE, "nowhere") == []


def test_shown_messages_link_to_neighboring_versions() -> None:
    messages = [
        StoredMessage(name, "chat", "user", "", "", "done", 0, parent_id=parent)
        for name, parent in (("a", None), ("b", "a"), ("c", "a"), ("d", "a"))
    ]
    first, last = shown_path(messages, None)
    assert (first.versions, first.version, first.previous, first.next) == (("a",), 1, None, None)
    assert (last.message.id, last.version, last.previous, last.next) == ("d", 3, "c", None)
    _, middle = shown_path(messages, None, through="c")
    assert (middle.version, middle.previous, middle.next) == (2, "b", "d")


def test_random_branch_reaches_a_leaf_through_the_requested_message() -> None:
    chance = random.Random(5)
    for _ in range(300):
        places: list[Place] = []
        for number in range(chance.randint(1, 25)):
            parent = chance.choice([None, *(place.id for place in places)])
            places.append(Place(str(number), parent, str(chance.randint(0, 30))))
        wanted = chance.choice(places).id
        found = branch(places, str(chance.randint(0, 30)), through=wanted)
        assert wanted in {place.id for place in found}
        assert found[0].parent_id is None
        assert all(below.parent_id == above.id for above, below in pairwise(found))
        assert found[-1].id not in {place.parent_id for place in places}, "the branch ends at a leaf"
