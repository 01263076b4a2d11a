"""Find pages for requests, taking them from others where that is fair. Pure functions.

Pages go to the oldest running request first: it may take those of every younger one, and those of
paused ones. A new request takes nobody's pages, except when only paused requests are in its way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from serving import page_table
from serving.page_table import Effect
from serving.scheduler.limits import Limits
from serving.scheduler.state import SchedulerState, planned_ends, preempt


@dataclasses.dataclass(frozen=True, slots=True)
class Extended:
    """A running request has its pages."""

    state: SchedulerState
    effects: tuple[Effect, ...]


def extend_running(
    state: SchedulerState, request_id: str, num_tokens: int, paused: Set[str]
) -> Extended | None:
    """Grow a running request, preempting others if it must.

    Returns:
      None if the request has to wait; nobody is preempted then.
    """
    geometry = state.table.geometry
    held = len(state.table.owners[request_id].attention)
    victims = _victims(state, request_id, geometry.attention_pages(num_tokens) - held, paused)
    if victims is None:
        return None
    for victim in victims:
        state = preempt(state, victim)
    table, effects = page_table.extend(state.table, request_id, num_tokens)
    return Extended(dataclasses.replace(state, table=table), effects)


def _victims(
    state: SchedulerState, request_id: str, num_pages: int, paused: Set[str]
) -> tuple[str, ...] | None:
    """Whom to preempt so that `num_pages` are free: paused requests, then younger ones.

    Returns:
      As few as possible, the youngest of each kind first; None if even all are not enough.
    """
    free = state.table.num_free
    if free >= num_pages:
        return ()
    ids = list(state.running)
    younger = ids[ids.index(request_id) + 1 :]
    candidates = [other for other in ids if other in paused][::-1]
    candidates += [other for other in younger if other not in paused][::-1]
    for count, other in enumerate(candidates, start=1):
        free += len(state.table.owners[other].pages)
        if free >= num_pages:
            return tuple(candidates[:count])
    return None


def has_room(state: SchedulerState, limits: Limits, paused: Set[str], num_pages: int) -> bool:
    """Whether a row is free, and `num_pages` beside what the running requests need next."""
    if len(state.running) >= limits.max_rows:
        return False
    geometry, promised = state.table.geometry, 0
    ends = planned_ends(state)
    for request_id, row in state.running.items():
        if request_id not in paused:
            start = ends.get(request_id, row.computed)
            needed = geometry.attention_pages(max(row.prefill_end, start + 1))
            promised += max(0, needed - len(state.table.owners[request_id].attention))
    return state.table.num_free - promised >= num_pages


def reclaim_paused(
    state: SchedulerState, limits: Limits, paused: Set[str], num_pages: int
) -> SchedulerState:
    """Preempt paused requests for a new one, but only when they alone hold the server up."""
    while (
        state.running
        and state.running.keys() <= paused
        and not has_room(state, limits, paused, num_pages)
    ):
        state = preempt(state, list(state.running)[-1])
    return state
