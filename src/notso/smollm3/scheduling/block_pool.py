"""Block pool of the KV cache: reference counts and prefix caching.

A block is 128 positions of the cache in every layer. Its content depends only on the tokens up to its end, so it is
identified by the hash of all earlier tokens (`parent_hash`) and its own tokens. Unreferenced blocks keep their content
until they are evicted in LRU order; continued chats, shared system prompts and edited messages reuse common prefixes. A
block records the conversations that computed or used it, and is dropped when all of them are evicted. Blocks of a
pinned reading record it as well: they outlive their conversations, and are dropped with their last reading.

Formats under 8 bits also keep some blocks in a finer format, in windows: a sequence's first block and incomplete ones.
There are fewer windows than blocks. Arrays are in kv_cache.py.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

from notso.smollm3.common_prefix import common_length

# Positions per block; a test ties it to `notso.qtensor.TILE_POSITIONS`.
BLOCK_TOKENS = 128

HASH_BYTES = 16
CONVERSATION_BYTES = 8

# Conversation of requests that name none; only a full clear evicts it.
ANONYMOUS = bytes(CONVERSATION_BYTES)

# Set in the first byte of a reading's digest, clear in a conversation's.
_READING_BIT = 0x80


@dataclass(frozen=True, slots=True)
class CacheSalt:
    """Start of a sequence's block hashes: `root`, joined by `private` from block `shared_blocks` on.

    Equal tokens are found again only behind equal salts. Several owners may share a root; what follows the shared
    blocks is found by the owner of `private` only. Without `private`, all blocks follow `root`.
    """

    root: bytes
    private: bytes = b""
    shared_blocks: int = 0

    @property
    def owner(self) -> bytes:
        return self.private or self.root

    def parent_hash(self, index: int, previous: bytes) -> bytes:
        """Return what block `index` is hashed after; `previous`: hash of the block before it, if any."""
        before = previous if index else self.root
        if self.private and index == self.shared_blocks:
            return hashlib.blake2b(before + self.private, digest_size=HASH_BYTES).digest()
        return before


class OutOfBlocksError(Exception):
    """No block is free; handled by the scheduler."""


@dataclass(slots=True, eq=False)
class _Block:
    references: int = 0
    parent_hash: bytes | None = None  # None: the content is not registered
    tokens: tuple[int, ...] = ()
    conversations: set[bytes] = field(default_factory=set)


class BlockPool:
    """Blocks of one cache. Not thread-safe."""

    # `windows` is None if the format has none. Unreferenced blocks are cached if registered, else blank.
    def __init__(self, blocks: int, windows: int | None = None) -> None:
        self._blocks = [_Block() for _ in range(blocks)]
        self._blank = list(range(blocks - 1, -1, -1))
        self._unreferenced: OrderedDict[int, None] = OrderedDict()  # cached blocks, least recently freed first
        self._children: dict[bytes, dict[tuple[int, ...], int]] = {}
        self._has_windows = windows is not None
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
        """Return a blank block, referenced once. Raises OutOfBlocksError."""
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
        self._note(block, conversations)

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
        """Make a block's `tokens`, up to 128, findable after `parent_hash`; the first of equal blocks is kept."""
        children = self._children.setdefault(parent_hash, {})
        entry, known = self._blocks[block], tuple(tokens)
        equal = children.get(known)
        if equal is not None:
            self._note(equal, conversations)
        elif entry.parent_hash is None:
            children[known] = block
            entry.parent_hash, entry.tokens = parent_hash, known
            self._note(block, conversations)

    def find(self, parent_hash: bytes, tokens: Sequence[int]) -> int | None:
        children = self._children.get(parent_hash)
        return children.get(tuple(tokens)) if children else None

    def find_partial(self, parent_hash: bytes, tokens: Sequence[int]) -> tuple[int, int]:
        """Return the block after `parent_hash` with the longest common prefix, and its length."""
        # With windows, only blocks that have one can be used in part.
        best, most = -1, 0
        for held, block in self._children.get(parent_hash, {}).items():
            common = common_length(held, tokens)
            if common > most and (not self._has_windows or block in self._windows):
                best, most = block, common
        return best, most

    def chain(self, salt: CacheSalt, tokens: Sequence[int], *, with_rest: bool = False) -> list[int]:
        """Return the known full blocks of `tokens`; `with_rest` adds the remainder's."""
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

    def deprioritise(self, blocks: Sequence[int]) -> int:
        """Move blocks to the front of the eviction order, the last one foremost; return their number."""
        cached = [block for block in blocks if block in self._unreferenced]
        for block in cached:
            self._unreferenced.move_to_end(block, last=False)
        return len(cached)

    def claim(self, block: int, length: int) -> bool:
        """Take an unreferenced block of `length` tokens for appending; register it again afterwards."""
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
        """Remove a conversation or reading, and the blocks that only it kept."""
        for block, entry in enumerate(self._blocks):
            if conversation in entry.conversations:
                entry.conversations.discard(conversation)
                if outlives(entry.conversations, conversation):
                    continue
                if block in self._unreferenced:
                    self._evict(block)
                # A referenced block becomes blank once it is freed.
                else:
                    self._unregister(block)

    # Windows

    @property
    def has_windows(self) -> bool:
        return self._has_windows

    @property
    def windows(self) -> Mapping[int, int]:
        return MappingProxyType(self._windows)

    def open_window(self, block: int) -> None:
        """Assign a window, evicting an unreferenced block if needed. Raises OutOfBlocksError."""
        if not self._has_windows or block in self._windows:
            return
        if not self._free_windows and not self.evict_one(self._windows.__contains__):
            raise OutOfBlocksError
        self._windows[block] = self._free_windows.pop()

    def open_windows(self, blocks: Sequence[int], start: int, rows: int) -> None:
        """Open windows for the first block and those a step writes, no others."""
        if not self._has_windows:
            return
        first, last = start // BLOCK_TOKENS, (start + rows - 1) // BLOCK_TOKENS
        for block in blocks[1:first]:
            self._free_window(block)
        for number in {0, *range(first, last + 1)}:
            self.open_window(blocks[number])

    def close_windows(self, blocks: Sequence[int], start: int, count: int) -> None:
        """Close windows of filled blocks except the first."""
        if self._has_windows:
            for block in blocks[max(start // BLOCK_TOKENS, 1) : (start + count) // BLOCK_TOKENS]:
                self._free_window(block)

    def _free_window(self, block: int) -> None:
        window = self._windows.pop(block, None)
        if window is not None:
            self._free_windows.append(window)

    def _note(self, block: int, conversations: tuple[bytes | None, ...]) -> None:
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
    """Return the salt of an owner's prompts, which start with what `scope` shares; `adapter`: digest, or empty."""
    # Owners only find their own content, so timing reveals nothing about others. The length keeps an owner's name from
    # continuing as the digest of an adapter.
    adapter = bytes([len(adapter)]) + adapter
    own = hashlib.blake2b(adapter + owner.encode(), digest_size=HASH_BYTES).digest()
    if scope is None:
        return CacheSalt(own)
    shared = hashlib.blake2b(adapter + scope.encode(), digest_size=HASH_BYTES, person=b"scope").digest()
    return CacheSalt(shared, own)


def block_hash(parent_hash: bytes, tokens: Sequence[int]) -> bytes:
    """Hash all tokens up to these."""
    return hashlib.blake2b(parent_hash + array("i", tokens).tobytes(), digest_size=HASH_BYTES).digest()


def conversation_digest(owner: str, conversation: str | None) -> bytes:
    """Return a conversation's digest; None: unnamed ones."""
    if conversation is None:
        return ANONYMOUS
    return _name_digest(f"{len(owner)} {owner} {conversation}", 0)


def reading_digest(owner: str, scope: str | None, reading: str) -> bytes:
    """Return the digest of a pinned reading, whose name is unique within its scope, or owner if there is none."""
    place = f"o {len(owner)} {owner}" if scope is None else f"s {len(scope)} {scope}"
    return _name_digest(f"{place} {reading}", _READING_BIT)


def outlives(left: Collection[bytes], evicted: bytes) -> bool:
    """Return whether a block stays without `evicted`, given the conversations and readings that are left."""
    # A forgotten reading takes its blocks along, whichever conversations used them.
    return any(map(is_reading, left)) if is_reading(evicted) else bool(left)


def is_reading(digest: bytes) -> bool:
    """Return whether a digest is that of a reading, not of a conversation."""
    return bool(digest[0] & _READING_BIT)


def _name_digest(name: str, bit: int) -> bytes:
    digest = hashlib.blake2b(name.encode(), digest_size=CONVERSATION_BYTES).digest()
    return bytes([digest[0] & ~_READING_BIT & 0xFF | bit]) + digest[1:]
