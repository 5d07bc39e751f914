"""Manage the blocks of the KV cache, with reference counts and prefix caching.

A block holds the keys and values of 128 positions in every layer. They depend only on the tokens up to the block's end,
so a block is identified by the hash of all earlier tokens (`parent_hash`) and its own tokens. Unreferenced blocks keep
their content until they are evicted in LRU order, so continued chats, shared system prompts and edited messages reuse
cached prefixes.

A block records the conversations that computed or used it. When all of them have been evicted, the block is dropped. A
"reading" is a named prompt prefix, usually documents, whose blocks are pinned: they also record the reading.
Evicting its conversations does not drop such a block. It is dropped when every reading that contains it has been
removed.

With KV formats that have fewer than 8 bits for keys or values, the first block of a sequence and incomplete blocks are
also stored in a more precise format. The memory for such a copy is called a window. There are fewer windows than
blocks. This module assigns windows to blocks; the arrays are in kv_cache.py.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from notso.smollm3.common_prefix import common_length

# Positions per block; a test checks that it equals `notso.qtensor.TILE_POSITIONS`.
BLOCK_TOKENS = 128

HASH_BYTES = 16
CONVERSATION_BYTES = 8

# Conversation digest for requests without a conversation name. Their blocks cannot be evicted by conversation.
ANONYMOUS = bytes(CONVERSATION_BYTES)

# Bit of a digest's first byte: set for readings, clear for conversations.
_READING_BIT = 0x80


@dataclass(frozen=True, slots=True)
class CacheSalt:
    """Salt of a sequence's block hashes: `root` and, from block `shared_blocks` on, `private` (if set)."""

    # A cached block is found only with the salt with which it was stored. Owners with the same root thus share the
    # first `shared_blocks` blocks, but later blocks are found only with the same `private`.

    root: bytes
    private: bytes = b""
    shared_blocks: int = 0

    @property
    def owner(self) -> bytes:
        return self.private or self.root

    def parent_hash(self, index: int, previous: bytes) -> bytes:
        """Return the parent hash of block `index`. `previous`: hash of the block before it, if any."""
        before = previous if index else self.root
        if self.private and index == self.shared_blocks:
            return hashlib.blake2b(before + self.private, digest_size=HASH_BYTES).digest()
        return before


class OutOfBlocksError(Exception):
    """No block or window is free."""


@dataclass(slots=True, eq=False)
class _Block:
    references: int = 0
    parent_hash: bytes | None = None  # None: the content is not registered
    tokens: tuple[int, ...] = ()
    conversations: set[bytes] = field(default_factory=set)


class BlockPool:
    """Blocks of one cache. Not thread-safe."""

    # windows: number of windows, or None if the format needs none. An unreferenced block is cached if it is registered;
    # otherwise, it is blank.
    def __init__(self, blocks: int, windows: int | None = None) -> None:
        self._blocks = [_Block() for _ in range(blocks)]
        self._blank = list(range(blocks - 1, -1, -1))
        self._unreferenced: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently freed first
        self._children: dict[bytes, dict[tuple[int, ...], int]] = {}
        self.has_windows = windows is not None
        self._windows: dict[int, int] = {}
        self._free_windows = list(range(windows or 0))

    @property
    def blocks(self) -> int:
        return len(self._blocks)

    @property
    def available(self) -> int:
        return len(self._blank) + len(self._unreferenced)

    @property
    def blank(self) -> int:
        return len(self._blank)

    @property
    def cached(self) -> int:
        return len(self._unreferenced)

    def references(self, block: int) -> int:
        return self._blocks[block].references

    def conversations(self, block: int) -> frozenset[bytes]:
        return frozenset(self._blocks[block].conversations)

    def allocate(self) -> int:
        """Return a blank block with one reference. Raises OutOfBlocksError."""
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

    def touch(self, block: int, *conversations: bytes | None) -> None:
        self._unreferenced.pop(block, None)
        self._blocks[block].references += 1
        self._record_conversations(block, conversations)

    def free(self, block: int) -> None:
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

    def register(self, block: int, parent_hash: bytes, tokens: Sequence[int], *conversations: bytes | None) -> None:
        """Register a block of up to 128 `tokens`, unless an equal block is already registered."""
        children = self._children.setdefault(parent_hash, {})
        entry, key = self._blocks[block], tuple(tokens)
        equal = children.get(key)
        if equal is not None:
            self._record_conversations(equal, conversations)
        elif entry.parent_hash is None:
            children[key] = block
            entry.parent_hash, entry.tokens = parent_hash, key
            self._record_conversations(block, conversations)

    def find(self, parent_hash: bytes, tokens: Sequence[int]) -> int | None:
        children = self._children.get(parent_hash)
        return children.get(tuple(tokens)) if children else None

    def find_partial(self, parent_hash: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the block after `parent_hash` that shares the most leading `tokens`, and their number, or (-1, 0)."""
        # If the pool has windows, a block can be used in part only from its window.
        best, most = -1, 0
        for candidate, block in self._children.get(parent_hash, {}).items():
            common = common_length(candidate, tokens)
            if common > most and (not self.has_windows or block in self._windows):
                best, most = block, common
        return best, most

    def chain(self, salt: CacheSalt, tokens: Sequence[int], *, with_rest: bool = False) -> list[int]:
        """Return the cached full blocks of `tokens` and, if `with_rest`, the last, partial block."""
        blocks, hash = list[int](), b""
        for at in range(0, len(tokens) - (0 if with_rest else BLOCK_TOKENS - 1), BLOCK_TOKENS):
            piece = tokens[at : at + BLOCK_TOKENS]
            parent_hash = salt.parent_hash(len(blocks), hash)
            block = self.find(parent_hash, piece)
            if block is None:
                break
            blocks.append(block)
            hash = block_hash(parent_hash, piece)
        return blocks

    def deprioritize(self, blocks: Sequence[int]) -> int:
        """Move unreferenced `blocks` to the front of the eviction order; return their number."""
        cached = [block for block in blocks if block in self._unreferenced]
        for block in cached:  # the last of these blocks will be evicted first
            self._unreferenced.move_to_end(block, last=False)
        return len(cached)

    def claim(self, block: int, length: int) -> bool:
        """Acquire a block for appending if it is unreferenced and has `length` tokens. The caller must reregister
        it."""
        entry = self._blocks[block]
        if entry.references or len(entry.tokens) != length:
            return False
        del self._unreferenced[block]
        self._unregister(block)
        entry.references = 1
        return True

    def evict_one(self, which: Callable[[int], bool]) -> bool:
        block = next((block for block in self._unreferenced if which(block)), None)
        if block is None:
            return False
        self._evict(block)
        return True

    def clear(self) -> None:
        for block in list(self._unreferenced):
            self._evict(block)

    def evict(self, conversation: bytes) -> None:
        """Remove a conversation or reading, and its blocks except those that survive (see `survives_eviction`)."""
        for block, entry in enumerate(self._blocks):
            if conversation in entry.conversations:
                entry.conversations.discard(conversation)
                if survives_eviction(entry.conversations, conversation):
                    continue
                if block in self._unreferenced:
                    self._evict(block)
                else:
                    self._unregister(block)  # the block becomes blank once it is freed

    @property
    def windows(self) -> Mapping[int, int]:
        return MappingProxyType(self._windows)

    def open_window(self, block: int) -> None:
        """Assign a window to a block, evicting an unreferenced block if needed. Raises OutOfBlocksError."""
        if not self.has_windows or block in self._windows:
            return
        if not self._free_windows and not self.evict_one(self._windows.__contains__):
            raise OutOfBlocksError
        self._windows[block] = self._free_windows.pop()

    def open_windows(self, blocks: Sequence[int], start: int, rows: int) -> None:
        """Assign windows to the first block and those that a step writes, and free those of the blocks in between."""
        if not self.has_windows:
            return
        first, last = start // BLOCK_TOKENS, (start + rows - 1) // BLOCK_TOKENS
        for block in blocks[1:first]:
            self._free_window(block)
        for number in {0, *range(first, last + 1)}:
            self.open_window(blocks[number])

    def close_windows(self, blocks: Sequence[int], start: int, count: int) -> None:
        """Free the windows of full blocks, except that of the first block."""
        if self.has_windows:
            for block in blocks[max(start // BLOCK_TOKENS, 1) : (start + count) // BLOCK_TOKENS]:
                self._free_window(block)

    def _free_window(self, block: int) -> None:
        window = self._windows.pop(block, None)
        if window is not None:
            self._free_windows.append(window)

    def _record_conversations(self, block: int, conversations: tuple[bytes | None, ...]) -> None:
        self._blocks[block].conversations.update(each for each in conversations if each is not None)

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


NO_SALT = CacheSalt(b"")


def cache_salt(adapter: bytes, owner: str, scope: str | None = None) -> CacheSalt:
    """Return the salt of an owner's prompts. `scope`: see `FixedPrefix`; `adapter`: digest or empty."""
    # Prompts match only blocks of their own owner or scope, so response times reveal nothing about the prompts of
    # others. The length byte separates the adapter's digest from the name of the owner or scope.
    adapter = bytes([len(adapter)]) + adapter
    own = hashlib.blake2b(adapter + owner.encode(), digest_size=HASH_BYTES).digest()
    if scope is None:
        return CacheSalt(own)
    shared = hashlib.blake2b(adapter + scope.encode(), digest_size=HASH_BYTES, person=b"scope").digest()
    return CacheSalt(shared, own)


def block_hash(parent_hash: bytes, tokens: Sequence[int]) -> bytes:
    """Hash a block's tokens and, through `parent_hash`, all earlier ones."""
    return hashlib.blake2b(parent_hash + array("i", tokens).tobytes(), digest_size=HASH_BYTES).digest()


def conversation_digest(owner: str, conversation: str | None) -> bytes:
    """Return the digest of a conversation, or ANONYMOUS."""
    if conversation is None:
        return ANONYMOUS
    return _name_digest(f"{len(owner)} {owner} {conversation}", 0)


def reading_digest(owner: str, scope: str | None, reading: str) -> bytes:
    """Return the digest of a reading. Names are unique per scope or, without a scope, per owner."""
    place = f"o {len(owner)} {owner}" if scope is None else f"s {len(scope)} {scope}"
    return _name_digest(f"{place} {reading}", _READING_BIT)


def survives_eviction(others: Collection[bytes], evicted: bytes) -> bool:
    """Return whether a block is kept when `evicted` is removed. `others`: its other conversations and readings."""
    # A reading's blocks are kept only by other readings, not by conversations that used them.
    return any(map(is_reading, others)) if is_reading(evicted) else bool(others)


def is_reading(digest: bytes) -> bool:
    """Return whether a digest denotes a reading."""
    return bool(digest[0] & _READING_BIT)


def _name_digest(name: str, bit: int) -> bytes:
    digest = hashlib.blake2b(name.encode(), digest_size=CONVERSATION_BYTES).digest()
    return bytes([digest[0] & ~_READING_BIT & 0xFF | bit]) + digest[1:]
