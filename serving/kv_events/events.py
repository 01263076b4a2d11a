"""Events of the prefix cache: values, and how they are cut to messages of a bounded size."""

from __future__ import annotations

import array
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

# A message of protobuf may have 4 MiB; these are upper bounds of encoded bytes.
_BLOCK_BYTES = 40
_TOKEN_BYTES = 5
_HASH_BYTES = 10


class Block(NamedTuple):
    """One unit of tokens in its place: the prefix that ends with it.

    Attributes:
      block_hash: int64 of the prefix's key; the same in every process.
    """

    block_hash: int
    token_ids: array.array[int]

    @property
    def num_bytes(self) -> int:
        return _BLOCK_BYTES + _TOKEN_BYTES * len(self.token_ids)


class Stored(NamedTuple):
    """Prefixes are held now.

    Attributes:
      parent: hash of the block before the first; None at the start of a sequence.
      blocks: each after the one before it.
    """

    parent: int | None
    blocks: tuple[Block, ...]


class Removed(NamedTuple):
    """Prefixes are not held any more."""

    block_hashes: tuple[int, ...]


class Cleared(NamedTuple):
    """No prefix is held any more."""


Event = Stored | Removed | Cleared


def block_hash(key: bytes) -> int:
    """The int64 of a prefix key."""
    return int.from_bytes(key[:8], "big", signed=True)


def num_bytes(events: Iterable[Event]) -> int:
    """Bytes that events take at most."""
    total = 0
    for event in events:
        match event:
            case Stored():
                total += _BLOCK_BYTES + sum(block.num_bytes for block in event.blocks)
            case Removed():
                total += _BLOCK_BYTES + _HASH_BYTES * len(event.block_hashes)
            case Cleared():
                total += _BLOCK_BYTES
    return total


def split(events: Sequence[Event], max_bytes: int) -> list[tuple[Event, ...]]:
    """Cut events, in order, to parts of at most `max_bytes`; a larger block is a part of its own.

    Returns:
      No part if there is no event.
    """
    parts: list[tuple[Event, ...]] = []
    part: list[Event] = []
    room = max_bytes
    for event in events:
        for piece in _cut(event, max_bytes):
            size = num_bytes((piece,))
            if part and size > room:
                parts.append(tuple(part))
                part, room = [], max_bytes
            part.append(piece)
            room -= size
    return [*parts, tuple(part)] if part else parts


def _cut(event: Event, max_bytes: int) -> Iterator[Event]:
    """Cut one event to pieces of at most a quarter of a part, so that parts are nearly full."""
    size = max_bytes // 4
    match event:
        case Stored():
            parent, blocks = event
            while blocks:
                count = max(1, size // blocks[0].num_bytes)  # all blocks have the same size
                yield Stored(parent, blocks[:count])
                parent, blocks = blocks[:count][-1].block_hash, blocks[count:]
        case Removed():
            count = max(1, size // _HASH_BYTES)
            hashes = event.block_hashes
            for start in range(0, len(hashes), count):
                yield Removed(hashes[start : start + count])
        case Cleared():
            yield event
