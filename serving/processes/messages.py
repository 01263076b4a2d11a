"""What the processes tell each other, and how the calls of a step look as bytes."""

from __future__ import annotations

import enum
import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Int32

Pages = Sequence[Sequence[int]]
Copies = Sequence[Sequence[tuple[int, int, int]]]

_RUN = struct.Struct("<III")
_LENGTH = struct.Struct("<I")
_BEAT = struct.Struct("<QQ")


class Kind(enum.IntEnum):
    """Kinds of messages. L: only host 0 sends it; W: only the others do.

    HELLO (W) tells what must agree, WELCOME (L) that it does. ARRIVED (W) ends a phase of the
    start, PROCEED (L) begins the next. CLEAR, COPY, CONTROL, MASK, RUN (L) are device calls,
    numbered.
    DRAIN (W) asks for the end of the server, STOP (L) ends the receiver, FAILED (W) tells why the
    sender ends. BEAT shows that the sender lives; that of W acknowledges calls and steps.
    """

    HELLO = 1
    WELCOME = 2
    ARRIVED = 3
    PROCEED = 4
    CLEAR = 5
    COPY = 6
    RUN = 7
    DRAIN = 8
    STOP = 9
    FAILED = 10
    BEAT = 11
    CONTROL = 12
    MASK = 13


CALLS = frozenset({Kind.CLEAR, Kind.COPY, Kind.CONTROL, Kind.MASK, Kind.RUN})


def pack_json(value: Any) -> bytes:
    """The body of a message that is not about a step."""
    return json.dumps(value).encode()


def unpack_json(body: bytes) -> Any:
    """The inverse of `pack_json`."""
    return json.loads(body)


def pack_beat(taken: int, finished: int) -> bytes:
    """The body of a worker's BEAT: the last call that it took, the last step that is done."""
    return _BEAT.pack(taken, finished)


def unpack_beat(body: bytes) -> tuple[int, int]:
    """The inverse of `pack_beat`."""
    return _BEAT.unpack(body)


def pack_run(bucket_idx: int, packed: Int32[np.ndarray, "dp n"]) -> bytes:
    """The body of RUN, and of CONTROL and MASK, which have no bucket: 0."""
    return _RUN.pack(bucket_idx, *packed.shape) + packed.tobytes()


def unpack_run(body: bytes) -> tuple[int, Int32[np.ndarray, "dp n"]]:
    """The inverse of `pack_run`; the array is a read-only view of the body."""
    bucket_idx, *shape = _RUN.unpack_from(body)
    return bucket_idx, np.frombuffer(body, np.int32, offset=_RUN.size).reshape(shape)


def pack_lists(lists: Pages | Copies, width: int) -> bytes:
    """The body of CLEAR (`width` 1) and COPY (`width` 3): one list of entries a replica."""
    lengths = np.array([len(entries) for entries in lists], np.int32)
    flat = [np.asarray(entries, np.int32).reshape(-1) for entries in lists]
    return _LENGTH.pack(len(lists)) + np.concatenate([lengths, *flat]).tobytes()


def unpack_lists(body: bytes, width: int) -> list[Any]:
    """The inverse of `pack_lists`: integers, or tuples of `width` integers."""
    (count,) = _LENGTH.unpack_from(body)
    words = np.frombuffer(body, np.int32, offset=_LENGTH.size)
    lists: list[Any] = []
    start = count
    for length in words[:count].tolist():
        part = words[start : start + length * width]
        start += length * width
        rows = part.reshape(length, width).tolist()
        lists.append(part.tolist() if width == 1 else [tuple(row) for row in rows])
    return lists
