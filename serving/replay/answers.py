"""What one operation of a trace is answered with: by the recording, and by this scheduler.

Both sides are the same type, so that a comparison is one of fields. Nothing here names a page:
reusable entries are named by content, as (group, earliest request that begins with the prefix,
tokens of the prefix).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

CopyKind = Literal["resume", "preserve"]


class EntryName(NamedTuple):
    """A reusable entry; `group` is an index of the trace's list of groups."""

    group: int
    request_id: str
    tokens: int


class CopyName(NamedTuple):
    """A copy before a forward pass, valid up to `tokens` tokens of the request."""

    group: int
    request_id: str
    kind: CopyKind
    tokens: int


class Reuse(NamedTuple):
    """Result of an admission's lookup, in tokens."""

    hit: int
    junction: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Answers to one operation; None where there is none.

    Attributes:
      scheduled: (request, tokens computed in the step), in scheduling order.
      drafts: draft tokens among them.
      admitted: requests that left the queue.
      preempted: requests pushed back to the queue.
      copies: executed before the step's forward pass.
      held: pages referenced after scheduling, one number a group.
      free_after_schedule, free: free pages after scheduling, and after the operation.
      sampled: tokens appended.
      finished: requests that ended.
      registered, evicted, dropped: entries that came; that went because their page was handed out;
        that went for another reason.
      entries: reusable entries after the operation.
      hit, junction, group_hits: of a probe, in tokens.
      ok: whether a reset was done.
    """

    scheduled: tuple[tuple[str, int], ...] | None = None
    drafts: Mapping[str, int] | None = None
    admitted: Mapping[str, Reuse] | None = None
    preempted: frozenset[str] | None = None
    copies: frozenset[CopyName] | None = None
    held: Mapping[str, tuple[int, ...]] | None = None
    free_after_schedule: int | None = None
    free: int | None = None
    sampled: Mapping[str, int] | None = None
    finished: frozenset[str] | None = None
    registered: frozenset[EntryName] | None = None
    evicted: frozenset[EntryName] | None = None
    dropped: frozenset[EntryName] | None = None
    entries: int | None = None
    hit: int | None = None
    junction: int | None = None
    group_hits: tuple[int, ...] | None = None
    ok: bool | None = None


class Mismatch(NamedTuple):
    """One answer that differs; `op_index` counts the operations of the trace from 0."""

    op_index: int
    field: str
    got: object
    expected: object

    def __str__(self) -> str:
        return (
            f"op {self.op_index}: {self.field} differs: got {_plain(self.got)}; expected "
            f"{_plain(self.expected)}"
        )


def compare(op_index: int, got: Answers, expected: Answers) -> tuple[Mismatch, ...]:
    """Every field that the expectation states and the result does not meet."""
    pairs = (
        (field.name, getattr(got, field.name), getattr(expected, field.name))
        for field in dataclasses.fields(Answers)
    )
    return tuple(
        Mismatch(op_index, name, ours, theirs)
        for name, ours, theirs in pairs
        if theirs is not None and ours != theirs
    )


def _plain(value: object) -> object:
    """The value in a form that reads well and is the same in every run."""
    if isinstance(value, frozenset):
        return sorted(tuple(item) if isinstance(item, tuple) else item for item in value)  # pyright: ignore
    return value
