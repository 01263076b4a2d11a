"""Find pages for requests, taking them from others where that is fair. Pure functions.

Pages go to the most important running request first: it may take those of every less important one,
and those of paused ones. A new request takes nobody's pages, except when only paused requests are
in its way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Set

from serving import page_table
from serving.page_table import Chunk, Effect, OutOfPages
from serving.scheduler.limits import Limits
from serving.scheduler.state import SchedulerState, Waiting, in_order, planned_ends, preempt


def extend_running(
    state: SchedulerState, limits: Limits, request_id: str, chunk: Chunk, paused: Set[str]
) -> tuple[SchedulerState, tuple[Effect, ...] | None]:
    """Give a running request pages for its next chunk, preempting others if it must.

    States that are only kept for later go first, then others' pages; at last the request overwrites
    its own state, even if that was kept for reuse.

    Returns:
      The state and the effects; None if the request has to wait or was itself sent back to the
      queue. Nobody else is preempted then.
    """
    for candidate in _with_fewer(state, limits, request_id, paused):
        try:
            table, effects = page_table.extend(candidate.table, request_id, chunk)
        except OutOfPages:
            continue
        return dataclasses.replace(candidate, table=table), effects
    if limits.preempts_itself and len(state.running) > 1:
        return preempt(state, request_id), None
    chunk = chunk._replace(may_export=False)
    for candidate in _with_fewer(state, limits, request_id, paused):
        try:
            table, effects = page_table.extend(candidate.table, request_id, chunk, in_place=True)
        except OutOfPages:
            continue
        return dataclasses.replace(candidate, table=table), effects
    return _shed(state), None


def _with_fewer(
    state: SchedulerState, limits: Limits, request_id: str, paused: Set[str]
) -> Iterator[SchedulerState]:
    """The state with ever more free pages: paused requests go first, then less important ones."""
    yield state
    state = _shed(state)
    yield state
    ids = [other for other, _ in in_order(state.running, limits)]
    later = ids[ids.index(request_id) + 1 :]
    victims = [other for other in ids if other in paused][::-1]
    victims += [other for other in later if other not in paused][::-1]
    for victim in victims:
        state = preempt(state, victim)
        yield state


def _shed(state: SchedulerState) -> SchedulerState:
    return dataclasses.replace(state, table=page_table.shed(state.table))


def num_promised(state: SchedulerState, paused: Set[str]) -> int:
    """Pages that the running requests need next."""
    geometry, promised = state.table.geometry, 0
    ends = planned_ends(state)
    for request_id, row in state.running.items():
        if request_id not in paused:
            start = ends.get(request_id, row.computed)
            needed = geometry.attention_pages(max(row.prefill_end, start + 1))
            promised += max(0, needed - len(state.table.owners[request_id].attention))
    return promised


def num_spare(state: SchedulerState, limits: Limits, paused: Set[str]) -> int:
    """Pages that must stay free when a request is admitted."""
    pages = 0 if state.running.keys() <= paused else limits.watermark_pages
    return pages + num_promised(state, paused) if limits.reserve_running else pages


def reclaim_paused(
    state: SchedulerState, limits: Limits, paused: Set[str], entry: Waiting
) -> SchedulerState:
    """Preempt paused requests for a new one, but only when they alone hold the server up."""
    needed = state.table.geometry.request_pages(entry.num_tokens)
    while (
        state.running
        and state.running.keys() <= paused
        and (len(state.running) >= limits.max_rows or state.table.num_free < needed)
    ):
        state = preempt(state, list(state.running)[-1])
    return state
