"""The values of a trace: configuration, operations, answers (format: `tests/data/cache/README.md`).

Token ids are not in a trace. A sequence is a list of segments of streams; `token_ids` spells it
out. Two streams differ at every equal index.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal, NamedTuple

from serving.replay.answers import Answers

VOCAB_SIZE = 50021
_STREAM_STRIDE, _TOKEN_STRIDE, _OFFSET = 7919, 104729, 17

GroupKind = Literal["full", "recurrent"]
Policy = Literal["fcfs", "priority"]
Tier = Literal["core", "policy"]


class Segment(NamedTuple):
    """Tokens `start` to `end` of a stream."""

    stream: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Layers that share a page table.

    Attributes:
      spec_slots: extra state pages a request for draft positions.
      can_export: the backend can store one state strictly inside a chunk.
      export_align_tokens: the stored position minus the chunk start is a multiple of it.
    """

    kind: GroupKind
    spec_slots: int = 0
    can_export: bool = False
    export_align_tokens: int = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """How steps are filled.

    Attributes:
      max_step_tokens: token budget of a step.
      max_running: requests that run at once.
      long_prefill_cap_tokens: of one request in a step while there are others; 0 is none.
      reserve_full_prompt: a request is admitted only if its whole sequence would fit.
      watermark: fraction of all pages kept free when admitting while others run.
      policy: with `priority`, smaller numbers are more important, ties go by arrival.
      async_depth: steps that may be open when the next is scheduled, plus one.
    """

    max_step_tokens: int
    max_running: int
    long_prefill_cap_tokens: int = 0
    reserve_full_prompt: bool = True
    watermark: float = 0.0
    policy: Policy = "fcfs"
    async_depth: int = 1
    max_model_tokens: int = 100000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpecConfig:
    """Draft tokens and what they ask of the cache.

    Attributes:
      draft_tokens: drafts of a decoding request in a step.
      lookahead_slots: attention slots reserved past the scheduled tokens.
      tail_drop: the matched attention prefix loses its last unit.
      shared_prefix_checkpoint: also keep the state of a junction inside a page.
      hash_lookahead_tokens: tokens after the unit that each key also covers.
    """

    draft_tokens: int = 0
    lookahead_slots: int = 0
    tail_drop: bool = False
    shared_prefix_checkpoint: bool = False
    hash_lookahead_tokens: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceConfig:
    """The cache and scheduler that a trace is for.

    Attributes:
      usable_pages: without the null page.
      page_tokens: of a page, the same for every group.
      unit_tokens: of a prefix key; divides `page_tokens`.
      groups: one `full` one and any number of `recurrent` ones that are alike. An index in this
        list is the group number of answers.
      retention_tokens: states kept for reuse: None every page boundary reached, 0 only semantic
        ones, N also every N tokens.
      caching: false: no reuse at all.
    """

    usable_pages: int
    page_tokens: int
    unit_tokens: int
    groups: tuple[Group, ...]
    retention_tokens: int | None
    caching: bool
    scheduler: SchedulerConfig
    spec: SpecConfig

    @property
    def attention_group(self) -> int:
        return next(i for i, group in enumerate(self.groups) if group.kind == "full")

    @property
    def recurrent_groups(self) -> tuple[int, ...]:
        return tuple(i for i, group in enumerate(self.groups) if group.kind == "recurrent")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Add:
    """A request joins the queue.

    Attributes:
      output: tokens that the device will emit; at least `max_new`.
      max_new: output tokens after which the request stops.
    """

    request_id: str
    prompt: tuple[Segment, ...]
    max_new: int
    output: tuple[Segment, ...]
    salt: str = ""
    priority: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """Schedule a step and apply its result. `accept`: drafts that the device takes, by request."""

    accept: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])


@dataclasses.dataclass(frozen=True, slots=True)
class Schedule:
    """Schedule a step and leave it open."""


@dataclasses.dataclass(frozen=True, slots=True)
class Complete:
    """Apply the result of the oldest open step. `accept`: drafts that the device takes."""

    accept: Mapping[str, int] = dataclasses.field(default_factory=dict[str, int])


@dataclasses.dataclass(frozen=True, slots=True)
class Abort:
    """The client drops a request."""

    request_id: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reset:
    """Forget all reusable entries; only when no request is open."""


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """What a request with this prompt would reuse now. Changes nothing."""

    prompt: tuple[Segment, ...]
    salt: str = ""


Op = Add | Step | Schedule | Complete | Abort | Reset | Probe


@dataclasses.dataclass(frozen=True, slots=True)
class TraceItem:
    """An operation, and its recorded answers if there are any."""

    op: Op
    expect: Answers | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """A script of operations.

    Attributes:
      tier: `core` answers do not depend on eviction order, `policy` answers do.
    """

    name: str
    config: TraceConfig
    items: tuple[TraceItem, ...]
    tier: Tier = "core"


def token_ids(segments: tuple[Segment, ...]) -> tuple[int, ...]:
    """Spell a sequence out; ids are below `VOCAB_SIZE`."""
    return tuple(
        (segment.stream * _STREAM_STRIDE + i * _TOKEN_STRIDE + _OFFSET) % VOCAB_SIZE
        for segment in segments
        for i in range(segment.start, segment.end)
    )


def num_tokens(segments: tuple[Segment, ...]) -> int:
    return sum(segment.end - segment.start for segment in segments)
