"""What other threads see of the engine: counts of a moment, made of the replicas' states."""

from __future__ import annotations

import dataclasses
import operator
from typing import NamedTuple

from serving.replicas import Replicas
from serving.scheduler import CacheStats, SchedulerState


class Totals(NamedTuple):
    """What the replicas' states do not count: numbers since the start, which never fall.

    Attributes:
      generated_tokens: of each replica.
      expert_load: of each rank; empty until a step has counted it.
    """

    generated_tokens: tuple[int, ...]
    steps: int = 0
    prompt_tokens: int = 0
    expert_load: tuple[int, ...] = ()

    def with_step(self, generated_tokens: tuple[int, ...], expert_load: tuple[int, ...]) -> Totals:
        """Add a step."""
        return self._replace(
            generated_tokens=tuple(map(operator.add, self.generated_tokens, generated_tokens)),
            steps=self.steps + 1,
            expert_load=tuple(map(operator.add, self.expert_load, expert_load))
            if self.expert_load
            else expert_load,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaCounts:
    """Of one replica.

    Attributes:
      running, waiting, free_pages, total_pages, cache: as of `Counts`.
      idle_pages: those of the free pages that hold reusable entries.
      pending_prompt_tokens: of the requests that have no token yet.
      generated_tokens: since the start.
    """

    running: int
    waiting: int
    free_pages: int
    idle_pages: int
    total_pages: int
    pending_prompt_tokens: int
    generated_tokens: int
    cache: CacheStats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """A snapshot of the engine, never older than the outputs that a client has seen.

    Attributes:
      running, waiting, free_pages, total_pages: now. The null page is not counted.
      steps, prompt_tokens, generated_tokens, preemptions: since the start; they never fall. A
        prompt is counted once, when its request is accepted (KF-V06).
      evictions: reusable entries whose page was handed out, since the start.
      cache: of the prefix cache, since the start.
      expert_load: (token, expert) pairs that each rank's experts computed, since the start; empty
        until a step has counted them.
      replicas: the parts of each replica.
    """

    running: int
    waiting: int
    free_pages: int
    total_pages: int
    steps: int
    prompt_tokens: int
    generated_tokens: int
    preemptions: int
    evictions: int
    cache: CacheStats
    expert_load: tuple[int, ...]
    replicas: tuple[ReplicaCounts, ...]


def count(replicas: Replicas, totals: Totals) -> Counts:
    """The counts of a moment."""
    parts = tuple(map(_count_replica, replicas, totals.generated_tokens))
    columns = zip(*(part.cache for part in parts), strict=True)
    return Counts(
        running=sum(part.running for part in parts),
        waiting=sum(part.waiting for part in parts),
        free_pages=sum(part.free_pages for part in parts),
        total_pages=sum(part.total_pages for part in parts),
        steps=totals.steps,
        prompt_tokens=totals.prompt_tokens,
        generated_tokens=sum(totals.generated_tokens),
        preemptions=sum(state.num_preemptions for state in replicas),
        evictions=sum(state.table.num_evicted for state in replicas),
        cache=CacheStats(*map(sum, columns)),
        expert_load=totals.expert_load,
        replicas=parts,
    )


def _count_replica(state: SchedulerState, generated_tokens: int) -> ReplicaCounts:
    requests = (*state.waiting, *state.running.values())
    return ReplicaCounts(
        running=len(state.running),
        waiting=len(state.waiting),
        free_pages=state.table.num_free,
        idle_pages=len(state.table.idle),
        total_pages=state.table.num_usable,
        pending_prompt_tokens=sum(
            len(one.request.prompt) for one in requests if not one.output.num_tokens
        ),
        generated_tokens=generated_tokens,
        cache=state.stats,
    )
