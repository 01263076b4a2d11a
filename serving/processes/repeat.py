"""The seam: each call of the leader's model goes to all hosts, and is made there too.

The calls are those of `k3jax.paged_model.PagedModel`. All processes make them with equal arrays in
the same order, which is what programs that span processes need (KF-H02).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from jaxtyping import Int32

from k3jax.buckets import Bucket
from k3jax.controls import MASK_ROWS
from serving.processes.channel import Message
from serving.processes.leader import Leader
from serving.processes.messages import (
    Copies,
    Kind,
    Pages,
    pack_lists,
    pack_run,
    unpack_lists,
    unpack_run,
)


class Pending(Protocol):
    """What a device has been asked for."""

    def block_until_ready(self) -> object:
        """Wait until it is there."""
        ...


class Model(Protocol):
    """A model with its pool, as one process holds it; see `PagedModel`."""

    program: Any

    def clear(self, pages: Pages) -> None:
        """Zero pages of each replica."""
        ...

    def copy(self, copies: Copies) -> None:
        """Copy pages of each replica."""
        ...

    def control(self, call: Int32[np.ndarray, "dp n"]) -> None:
        """Set the sampling controls of one row of each replica."""
        ...

    def mask(self, call: Int32[np.ndarray, "dp rows n"]) -> None:
        """Set masks of some rows of each replica."""
        ...

    def run(self, bucket: Bucket, packed: Int32[np.ndarray, "dp n"]) -> Any:
        """Start a step."""
        ...


class SharedModel:
    """A model that all processes hold a part of, as the leader's executor uses it.

    Args:
      model: this process's part.
      buckets: in the order that all processes have.
    """

    def __init__(self, model: Model, leader: Leader, buckets: Sequence[Bucket]):
        self.program = model.program
        self._model, self._leader = model, leader
        self._indices = {bucket: index for index, bucket in enumerate(buckets)}

    def clear(self, pages: Pages) -> None:
        """Zero pages of each replica, everywhere."""
        if any(pages):
            self._leader.send_call(Kind.CLEAR, pack_lists(pages, 1))
            self._model.clear(pages)

    def copy(self, copies: Copies) -> None:
        """Copy pages of each replica, everywhere."""
        if any(copies):
            self._leader.send_call(Kind.COPY, pack_lists(copies, 3))
            self._model.copy(copies)

    def control(self, call: Int32[np.ndarray, "dp n"]) -> None:
        """Set the sampling controls of one row of each replica, everywhere."""
        self._leader.send_call(Kind.CONTROL, pack_run(0, call))
        self._model.control(call)

    def mask(self, call: Int32[np.ndarray, "dp rows n"]) -> None:
        """Set masks of some rows of each replica, everywhere."""
        flat = call.reshape(len(call), -1)
        self._leader.send_call(Kind.MASK, pack_run(0, flat))
        self._model.mask(call)

    def run(self, bucket: Bucket, packed: Int32[np.ndarray, "dp n"]) -> Any:
        """Start a step everywhere, and return this process's result."""
        self._leader.send_call(Kind.RUN, pack_run(self._indices[bucket], packed))
        return self._model.run(bucket, packed)


def make_call(model: Model, buckets: Sequence[Bucket], message: Message) -> Pending | None:
    """Make the call that a message describes; return the result of a step."""
    match message.kind:
        case Kind.CLEAR:
            return model.clear(unpack_lists(message.body, 1))
        case Kind.COPY:
            return model.copy(unpack_lists(message.body, 3))
        case Kind.CONTROL:
            return model.control(unpack_run(message.body)[1])
        case Kind.MASK:
            flat = unpack_run(message.body)[1]
            return model.mask(flat.reshape(len(flat), MASK_ROWS, -1))
        case _:
            bucket_idx, packed = unpack_run(message.body)
            return model.run(buckets[bucket_idx], packed)
