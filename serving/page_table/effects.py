"""What a request computes in a step, and what the device does to pages before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from serving.page_table.states import Move


class Clear(NamedTuple):
    """Set these pages to zero in every layer position."""

    pages: tuple[int, ...]


class Copy(NamedTuple):
    """Make the first `num_tokens` entries of attention page `target` those of `source`."""

    source: int
    target: int
    num_tokens: int


Effect = Clear | Copy | Move


class Chunk(NamedTuple):
    """What a request computes in a step.

    Attributes:
      start, end: tokens in the cache before and after, `num_drafts` unverified ones included.
      prefill_end: tokens up to which the request's chunks are aligned (cache-semantics.md section
        6).
      processed: tokens that committed steps have computed; older states are given up.
      known: tokens of the request whose ids the host has.
      keys: prefix keys of the known tokens.
      may_export: whether a state inside the chunk may be kept as well, if there is one to keep.
    """

    step_id: int
    start: int
    end: int
    prefill_end: int
    processed: int
    known: int
    keys: Sequence[bytes]
    num_drafts: int = 0
    may_export: bool = True
