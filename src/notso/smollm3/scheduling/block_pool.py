"""Which blocks of the key-value cache hold what: reference counts, and contents found again by their tokens.

A block is 128 positions of the cache in every layer. Its content follows from the tokens up to its end alone, so a
block is known by the chain of tokens before it (a digest, `parent`) and its own tokens. Blocks nobody refers to keep
their content until their room is needed, the one that was let go of first goes first; a chat that goes on, a shared
system prompt and an edited message find what they have in common without computing it again.

Numbers and digests only; the arrays are in kv_cache.py.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from notso.smollm3.common_prefix import common_length

BLOCK_TOKENS = 128
KEY_BYTES = 16


class OutOfBlocksError(Exception):
    """No block is free. Never leaves floor 2: the scheduler makes room or waits."""


@dataclass(slots=True, eq=False)
class _Block:
    references: int = 0
    parent: bytes | None = None  # None: its content cannot be found
    tokens: tuple[int, ...] = ()


class PrefixCache:
    """The blocks of one cache, `blocks` of them. Not thread-safe.

    A block is referred to by those that were given it (`take`, `share`); without references it is cached if it was
    registered, else blank. `on_forget` is told of every block whose content is gone for good.
    """

    def __init__(self, blocks: int, on_forget: Callable[[int], None] = lambda _: None) -> None:
        self._on_forget = on_forget
        self._blocks = [_Block() for _ in range(blocks)]
        self._blank = list(range(blocks - 1, -1, -1))
        self._unreferenced: OrderedDict[int, None] = OrderedDict()  # cached, the first let go of first
        self._children: dict[bytes, dict[tuple[int, ...], int]] = {}

    @property
    def blocks(self) -> int:
        """All blocks."""
        return len(self._blocks)

    @property
    def available(self) -> int:
        """Blocks that `take` can give out."""
        return len(self._blank) + len(self._unreferenced)

    @property
    def blank(self) -> int:
        """Blocks that `take` gives out before it forgets anything."""
        return len(self._blank)

    @property
    def cached(self) -> int:
        """Blocks kept for their content alone."""
        return len(self._unreferenced)

    def references(self, block: int) -> int:
        """How many refer to a block."""
        return self._blocks[block].references

    def take(self) -> int:
        """A block for new content, with one reference. Raises OutOfBlocksError."""
        if self._blank:
            block = self._blank.pop()
        elif self._unreferenced:
            block = next(iter(self._unreferenced))
            self._drop(block)
            self._blank.pop()
        else:
            raise OutOfBlocksError
        self._blocks[block].references = 1
        return block

    def share(self, block: int) -> None:
        """One reference more to a block found by its content."""
        self._unreferenced.pop(block, None)
        self._blocks[block].references += 1

    def release(self, block: int) -> None:
        """One reference less."""
        entry = self._blocks[block]
        if entry.references < 1:
            raise ValueError(f"block {block} is not in use")
        entry.references -= 1
        if entry.references == 0:
            if entry.parent is None:
                self._on_forget(block)
                self._blank.append(block)
            else:
                self._unreferenced[block] = None

    def register(self, block: int, parent: bytes, tokens: Sequence[int]) -> None:
        """Make a block's content known: `tokens`, up to 128 of them, after `parent`. The first of equals is kept."""
        children = self._children.setdefault(parent, {})
        entry, known = self._blocks[block], tuple(tokens)
        if known in children or entry.parent is not None:
            return
        children[known] = block
        entry.parent, entry.tokens = parent, known

    def find(self, parent: bytes, tokens: Sequence[int]) -> int | None:
        """The block that holds exactly `tokens` after `parent`."""
        children = self._children.get(parent)
        return children.get(tuple(tokens)) if children else None

    def find_beginning(
        self, parent: bytes, tokens: Sequence[int], usable: Callable[[int], bool] = lambda _: True
    ) -> tuple[int, int]:
        """The usable block after `parent` that begins most like `tokens`, and how many it has in common (0: none)."""
        best, most = -1, 0
        for held, block in self._children.get(parent, {}).items():
            common = common_length(held, tokens)
            if common > most and usable(block):
                best, most = block, common
        return best, most

    def chain(self, root: bytes, tokens: Sequence[int], *, with_rest: bool = False) -> list[int]:
        """The full blocks that hold `tokens`, from the first of them after `root`, as far as they are known; and
        `with_rest` the block that holds what is left at the end, and nothing else."""
        blocks, parent = list[int](), root
        for at in range(0, len(tokens) - (0 if with_rest else BLOCK_TOKENS - 1), BLOCK_TOKENS):
            piece = tokens[at : at + BLOCK_TOKENS]
            block = self.find(parent, piece)
            if block is None:
                break
            blocks.append(block)
            parent = block_key(parent, piece)
        return blocks

    def let_go_first(self, blocks: Sequence[int]) -> int:
        """When room is needed, let go of these first, the last one before all; of how many that is so."""
        cached = [block for block in blocks if block in self._unreferenced]
        for block in cached:
            self._unreferenced.move_to_end(block, last=False)
        return len(cached)

    def take_over(self, block: int, length: int) -> bool:
        """Take a cached block to write on behind its first `length` tokens, if nobody refers to it and it has no more.

        Its content is no longer found until it is registered again.
        """
        entry = self._blocks[block]
        if entry.references or len(entry.tokens) != length:
            return False
        del self._unreferenced[block]
        self._forget(block)
        entry.references = 1
        return True

    def drop_one(self, which: Callable[[int], bool]) -> bool:
        """Forget the block of those nobody refers to that was let go of first, of those that `which` says yes to."""
        block = next((block for block in self._unreferenced if which(block)), None)
        if block is None:
            return False
        self._drop(block)
        return True

    def clear(self) -> None:
        """Forget all content nobody refers to."""
        for block in list(self._unreferenced):
            self._drop(block)

    def _drop(self, block: int) -> None:
        del self._unreferenced[block]
        self._forget(block)
        self._on_forget(block)
        self._blank.append(block)

    def _forget(self, block: int) -> None:
        entry = self._blocks[block]
        if entry.parent is None:
            return
        children = self._children[entry.parent]
        del children[entry.tokens]
        if not children:
            del self._children[entry.parent]
        entry.parent, entry.tokens = None, ()


def root_key(fingerprint: bytes, owner: str) -> bytes:
    """What a conversation of `owner` begins after. Owners find their own content only: timing tells them nothing of
    others'."""
    return hashlib.blake2b(fingerprint + owner.encode(), digest_size=KEY_BYTES).digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """What stands for all tokens up to and with these."""
    return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=KEY_BYTES).digest()
