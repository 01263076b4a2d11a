"""Decide the next step: pure, deterministic, and always on behalf of the oldest request first.

A step has one kind. When both kinds have work they alternate, so a long prefill never stops the
decodes. The oldest running request can always go on: it may take the pages of every younger one,
and alone it fits (`check_request`). A younger one that finds no page keeps what it has and waits.
So there is no cycle without progress (KF-C15, KF-C16).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set

from k3jax import buckets
from k3jax.buckets import Kind
from serving import page_table
from serving.page_table import Allocation, Effect
from serving.plan import RowPlan, StepPlan
from serving.scheduler.chunking import chunk_end
from serving.scheduler.limits import Limits
from serving.scheduler.room import extend_running, has_room, reclaim_paused
from serving.scheduler.state import (
    InFlight,
    Running,
    SchedulerState,
    Waiting,
    planned_ends,
)

NO_REQUESTS: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True)
class _Rows:
    """Part of a step: rows, and what must happen to their pages first."""

    rows: tuple[RowPlan, ...] = ()
    effects: tuple[Effect, ...] = ()


def plan(
    state: SchedulerState, limits: Limits, *, paused: Set[str] = NO_REQUESTS
) -> tuple[SchedulerState, StepPlan | None]:
    """Choose the next step; it may be called again before the result of the last one is committed.

    Args:
      paused: requests whose clients do not keep up. They are not scheduled, and keep their pages
        until a request that can use them needs them.

    Returns:
      The state with the step in flight, and the step, or None if no request can go on now.
    """
    order: tuple[Kind, Kind] = (
        ("prefill", "decode") if state.last_kind == "decode" else ("decode", "prefill")
    )
    for kind in order:
        if kind == "prefill":
            state, part = _plan_prefill(state, limits, paused)
        else:
            state, part = _plan_decode(state, paused)
        if part.rows:
            return _launch(state, limits, kind, part)
    return state, None


def _plan_decode(state: SchedulerState, paused: Set[str]) -> tuple[SchedulerState, _Rows]:
    """One token for every running request that has finished its prefill."""
    rows: list[RowPlan] = []
    effects: list[Effect] = []
    page_tokens = state.table.geometry.page_tokens
    ends = planned_ends(state)
    for request_id, row in state.running.items():
        if request_id in paused or request_id not in state.running:
            continue  # the latter: an older row has just preempted it
        start = ends.get(request_id, row.computed)
        if start < row.prefill_end or start >= row.request.max_cached_tokens:
            continue
        allocation = state.table.owners[request_id]
        if start >= len(allocation.attention) * page_tokens:
            extended = extend_running(state, request_id, start + 1, paused)
            if extended is None:
                continue
            state = extended.state
            effects += extended.effects
            allocation = state.table.owners[request_id]
        rows.append(_row_plan(row, allocation, start, start + 1, tokens=None))
    return state, _Rows(tuple(rows), tuple(effects))


def _plan_prefill(
    state: SchedulerState, limits: Limits, paused: Set[str]
) -> tuple[SchedulerState, _Rows]:
    """Next chunks of running requests, then first chunks of waiting ones, within the budget."""
    rows: list[RowPlan] = []
    effects: list[Effect] = []
    budget = limits.max_prefill_tokens
    ends = planned_ends(state)
    for request_id, row in state.running.items():
        if row.computed >= row.prefill_end or request_id in paused:
            continue
        if request_id not in state.running:
            continue  # an older row has just preempted it
        if len(rows) == limits.max_prefill_rows:
            break
        start = ends.get(request_id, row.computed)
        if start >= row.prefill_end:
            continue
        end = _chunk_end(state, limits, start, row.prefill_end, budget)
        if end == start:
            continue
        extended = extend_running(state, request_id, end, paused)
        if extended is None:
            continue
        state = extended.state
        effects += extended.effects
        allocation = state.table.owners[request_id]
        rows.append(_row_plan(row, allocation, start, end, tokens=row.tokens(start, end)))
        budget -= end - start
    state, admitted = _admit(state, limits, paused, budget, limits.max_prefill_rows - len(rows))
    return state, _Rows((*rows, *admitted.rows), (*effects, *admitted.effects))


def _admit(
    state: SchedulerState, limits: Limits, paused: Set[str], budget: int, max_rows: int
) -> tuple[SchedulerState, _Rows]:
    """First chunks of waiting requests, in order.

    A request gets pages for its first chunk, but only once all that it knows fits beside what the
    running ones need
    next: otherwise it would be preempted, or preempt others, before it gives a token.
    """
    rows: list[RowPlan] = []
    effects: list[Effect] = []
    geometry = state.table.geometry
    for entry in state.waiting:
        request_id, num_tokens = entry.request.request_id, entry.num_tokens
        if len(rows) == max_rows:
            break
        if request_id in paused:
            continue
        end = _chunk_end(state, limits, 0, num_tokens, budget)
        if end == 0:
            break
        needed = geometry.request_pages(num_tokens)
        state = reclaim_paused(state, limits, paused, needed)
        if not has_room(state, limits, paused, needed):
            break
        table, cleared = page_table.admit(state.table, request_id, end)
        row = Running(
            request=entry.request,
            output=entry.output,
            slot=_free_slot(state, limits),
            prefill_end=num_tokens,
            computed=0,
        )
        state = dataclasses.replace(
            state,
            table=table,
            waiting=_without(state.waiting, request_id),
            running={**state.running, request_id: row},
        )
        effects += cleared
        allocation = state.table.owners[request_id]
        rows.append(_row_plan(row, allocation, 0, end, tokens=row.tokens(0, end)))
        budget -= end
    return state, _Rows(tuple(rows), tuple(effects))


def _free_slot(state: SchedulerState, limits: Limits) -> int:
    """The smallest slot that no running request has; the caller has checked that there is one."""
    used = {row.slot for row in state.running.values()}
    return next(slot for slot in range(limits.max_rows) if slot not in used)


def _chunk_end(state: SchedulerState, limits: Limits, start: int, end: int, budget: int) -> int:
    return chunk_end(
        start,
        end,
        budget_tokens=budget,
        max_budget_tokens=limits.max_prefill_tokens,
        page_tokens=state.table.geometry.page_tokens,
    )


def _row_plan(
    row: Running, allocation: Allocation, start: int, end: int, *, tokens: tuple[int, ...] | None
) -> RowPlan:
    """Tokens `start` to `end` of one request; without `tokens`, its last token is on the device."""
    request = row.request
    return RowPlan(
        request_id=request.request_id,
        slot=row.slot,
        start=start,
        length=end - start,
        tokens=tokens,
        attention_pages=allocation.attention,
        state_source=allocation.states,
        state_target=allocation.states,
        samples=end >= row.prefill_end,
        sampling=request.sampling,
    )


def _launch(
    state: SchedulerState, limits: Limits, kind: Kind, part: _Rows
) -> tuple[SchedulerState, StepPlan]:
    """Put a step in flight."""
    bucket = buckets.choose(
        limits.buckets,
        kind,
        tokens=sum(row.length for row in part.rows),
        rows=len(part.rows),
        pages=max(len(row.attention_pages) for row in part.rows),
    )
    step = StepPlan(
        step_id=state.next_step_id,
        bucket=bucket,
        rows=part.rows,
        clear_pages=tuple(page for effect in part.effects for page in effect.pages),
    )
    launched = InFlight(
        step_id=step.step_id,
        rows=step.rows,
        live={row.request_id: row.start + row.length for row in step.rows},
    )
    return dataclasses.replace(
        state,
        in_flight=(*state.in_flight, launched),
        next_step_id=state.next_step_id + 1,
        last_kind=kind,
    ), step


def _without(waiting: tuple[Waiting, ...], request_id: str) -> tuple[Waiting, ...]:
    return tuple(entry for entry in waiting if entry.request.request_id != request_id)
