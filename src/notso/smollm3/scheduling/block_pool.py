"""Which blocks of the key-value cache hold what: reference counts, and contents found again by their tokens.

A block is 128 positions of the cache in every layer. Its content follows from the tokens up to its end alone, so a
block is known by the hash of all tokens before it (`parent_hash`) and its own tokens. Blocks without references keep
their content until their room is needed, the one freed first goes first; a chat that goes on, a shared system prompt
and an edited message find what they have in common without computing it again.

A known block notes which conversations have computed or found it. When all of these are forgotten, its content goes.

Formats under 8 bits keep some blocks in a finer format as well: a high-precision window each for the first block of a
sequence and for those that are not full. There are fewer windows than blocks.

Numbers and digests only; the arrays are in kv_cache.py.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from notso.smollm3.common_prefix import common_length

BLOCK_TOKENS = 128
"""Positions of a sequence in one block; a test ties it to `notso.qtensor.TILE_POSITIONS`."""

HASH_BYTES = 16
CONVERSATION_BYTES = 8

ANONYMOUS = bytes(CONVERSATION_BYTES)
"""The conversation of all requests that name none. Only forgetting everything forgets it."""


class OutOfBlocksError(Exception):
    """No block is free. Never leaves floor 2: the scheduler makes room or waits."""


@dataclass(slots=True, eq=False)
class _Block:
    references: int = 0
    parent_hash: bytes | None = None  # None: its content cannot be found
    tokens: tuple[int, ...] = ()
    conversations: set[bytes] = field(default_factory=set)


class BlockPool:
    """The blocks of one cache, `blocks` of them. Not thread-safe.

    Whoever was given a block refers to it (`allocate`, `touch`); without references it is cached if it was registered,
    else blank. `windows`: how many high-precision windows there are; None where the format has none.
    """

    def __init__(self, blocks: int, windows: int | None = None) -> None:
        self._blocks = [_Block() for _ in range(blocks)]
        self._blank = list(range(blocks - 1, -1, -1))
        self._unreferenced: OrderedDict[int, None] = OrderedDict()  # cached, the one freed first comes first
        self._children: dict[bytes, dict[tuple[int, ...], int]] = {}
        self._has_windows = windows is not None
        self._windows: dict[int, int] = {}
        self._free_windows = list(range(windows or 0))

    @property
    def blocks(self) -> int:
        """All blocks."""
        return len(self._blocks)

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give out."""
        return len(self._blank) + len(self._unreferenced)

    @property
    def blank(self) -> int:
        """Blocks that `allocate` gives out before it evicts any."""
        return len(self._blank)

    @property
    def cached(self) -> int:
        """Blocks kept for their content alone."""
        return len(self._unreferenced)

    def references(self, block: int) -> int:
        """How many refer to a block."""
        return self._blocks[block].references

    def conversations(self, block: int) -> frozenset[bytes]:
        """Those that have computed or found a block's content."""
        return frozenset(self._blocks[block].conversations)

    def allocate(self) -> int:
        """A block for new content, with one reference. Raises OutOfBlocksError."""
        if self._blank:
            block = self._blank.pop()
        elif self._unreferenced:
            block = next(iter(self._unreferenced))
            self._evict(block)
            self._blank.pop()
        else:
            raise OutOfBlocksError
        self._blocks[block].references = 1
        return block

    def touch(self, block: int, conversation: bytes | None = None) -> None:
        """One reference more to a block found by its content, on behalf of a conversation."""
        self._unreferenced.pop(block, None)
        self._blocks[block].references += 1
        self._note(block, conversation)

    def free(self, block: int) -> None:
        """One reference less."""
        entry = self._blocks[block]
        if entry.references < 1:
            raise ValueError(f"block {block} is not in use")
        entry.references -= 1
        if entry.references == 0:
            if entry.parent_hash is None:
                self._free_window(block)
                self._blank.append(block)
            else:
                self._unreferenced[block] = None

    def register(
        self, block: int, parent_hash: bytes, tokens: Sequence[int], conversation: bytes | None = None
    ) -> None:
        """Make a block's content known: `tokens`, up to 128 of them, after `parent_hash`. The first of equals is
        kept."""
        children = self._children.setdefault(parent_hash, {})
        entry, known = self._blocks[block], tuple(tokens)
        equal = children.get(known)
        if equal is not None:
            self._note(equal, conversation)
        elif entry.parent_hash is None:
            children[known] = block
            entry.parent_hash, entry.tokens = parent_hash, known
            self._note(block, conversation)

    def find(self, parent_hash: bytes, tokens: Sequence[int]) -> int | None:
        """The block that holds exactly `tokens` after `parent_hash`."""
        children = self._children.get(parent_hash)
        return children.get(tuple(tokens)) if children else None

    def find_partial(self, parent_hash: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """The block after `parent_hash` that begins most like `tokens`, and how many it has in common (0: none). Only
        blocks of which a part can be used without the rest: where the format has windows, those that have one."""
        best, most = -1, 0
        for held, block in self._children.get(parent_hash, {}).items():
            common = common_length(held, tokens)
            if common > most and (not self._has_windows or block in self._windows):
                best, most = block, common
        return best, most

    def chain(self, salt: bytes, tokens: Sequence[int], *, with_rest: bool = False) -> list[int]:
        """The full blocks that hold `tokens`, from the first of them after `salt`, as far as they are known; and
        `with_rest` the block that holds what is left at the end, and nothing else."""
        blocks, parent_hash = list[int](), salt
        for at in range(0, len(tokens) - (0 if with_rest else BLOCK_TOKENS - 1), BLOCK_TOKENS):
            piece = tokens[at : at + BLOCK_TOKENS]
            block = self.find(parent_hash, piece)
            if block is None:
                break
            blocks.append(block)
            parent_hash = block_hash(parent_hash, piece)
        return blocks

    def deprioritise(self, blocks: Sequence[int]) -> int:
        """When room is needed, evict these first, the last one before all; of how many that is so."""
        cached = [block for block in blocks if block in self._unreferenced]
        for block in cached:
            self._unreferenced.move_to_end(block, last=False)
        return len(cached)

    def claim(self, block: int, length: int) -> bool:
        """Take a cached block to write on behind its first `length` tokens, if nobody refers to it and it has no more.

        Its content is no longer found until it is registered again.
        """
        entry = self._blocks[block]
        if entry.references or len(entry.tokens) != length:
            return False
        del self._unreferenced[block]
        self._unregister(block)
        entry.references = 1
        return True

    def evict_one(self, which: Callable[[int], bool]) -> bool:
        """Evict the block freed first, of those without references that `which` says yes to."""
        block = next((block for block in self._unreferenced if which(block)), None)
        if block is None:
            return False
        self._evict(block)
        return True

    def clear(self) -> None:
        """Evict all blocks without references."""
        for block in list(self._unreferenced):
            self._evict(block)

    def evict(self, conversation: bytes) -> None:
        """Take a conversation out. A block that no other conversation has touched is evicted; one that is referred to
        is no longer found, and blank once it is freed."""
        for block, entry in enumerate(self._blocks):
            if conversation in entry.conversations:
                entry.conversations.discard(conversation)
                if entry.conversations:
                    continue
                if block in self._unreferenced:
                    self._evict(block)
                else:
                    self._unregister(block)

    # Windows

    @property
    def has_windows(self) -> bool:
        """Whether the format has any."""
        return self._has_windows

    @property
    def windows(self) -> Mapping[int, int]:
        """The window of each block that has one, as it changes."""
        return MappingProxyType(self._windows)

    def open_window(self, block: int) -> None:
        """Have a window for a block, where the format has any, at the cost of one without references if need be.

        Raises OutOfBlocksError.
        """
        if not self._has_windows or block in self._windows:
            return
        if not self._free_windows and not self.evict_one(self._windows.__contains__):
            raise OutOfBlocksError
        self._windows[block] = self._free_windows.pop()

    def open_windows(self, blocks: Sequence[int], start: int, rows: int) -> None:
        """A step is to compute `rows` positions from `start` of what lies in `blocks`: have windows for the first block
        and for those written to, and for no other."""
        if not self._has_windows:
            return
        first, last = start // BLOCK_TOKENS, (start + rows - 1) // BLOCK_TOKENS
        for block in blocks[1:first]:
            self._free_window(block)
        for number in {0, *range(first, last + 1)}:
            self.open_window(blocks[number])

    def close_windows(self, blocks: Sequence[int], start: int, count: int) -> None:
        """It has computed `count` of them: of what is full by now, only the first block needs its window."""
        if self._has_windows:
            for block in blocks[max(start // BLOCK_TOKENS, 1) : (start + count) // BLOCK_TOKENS]:
                self._free_window(block)

    def _free_window(self, block: int) -> None:
        window = self._windows.pop(block, None)
        if window is not None:
            self._free_windows.append(window)

    # Contents

    def _note(self, block: int, conversation: bytes | None) -> None:
        if conversation is not None:
            self._blocks[block].conversations.add(conversation)

    def _evict(self, block: int) -> None:
        del self._unreferenced[block]
        self._unregister(block)
        self._free_window(block)
        self._blank.append(block)

    def _unregister(self, block: int) -> None:
        entry = self._blocks[block]
        if entry.parent_hash is None:
            return
        children = self._children[entry.parent_hash]
        del children[entry.tokens]
        if not children:
            del self._children[entry.parent_hash]
        entry.parent_hash, entry.tokens = None, ()
        entry.conversations.clear()


def cache_salt(cache_version: bytes, owner: str) -> bytes:
    """What the first block hash of a conversation of `owner` begins with. Owners find their own content only: timing
    tells them nothing of others'."""
    return hashlib.blake2b(cache_version + owner.encode(), digest_size=HASH_BYTES).digest()


def block_hash(parent_hash: bytes, tokens: Sequence[int]) -> bytes:
    """What stands for all tokens up to and with these."""
    return hashlib.blake2b(parent_hash + array("i", tokens).tobytes(), digest_size=HASH_BYTES).digest()


def conversation_digest(owner: str, conversation: str | None) -> bytes:
    """What stands for a conversation of `owner`, whatever model answers it; None: of those that name none."""
    if conversation is None:
        return ANONYMOUS
    name = f"{len(owner)} {owner} {conversation}".encode()
    return hashlib.blake2b(name, digest_size=CONVERSATION_BYTES).digest()
