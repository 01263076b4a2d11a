"""Decide the next step: pure, deterministic, and always on behalf of the most important request
first, which is the oldest unless requests have priorities.

Unless rows are mixed, a step has one kind; when both kinds have work they alternate, so a long
prefill never stops the decodes. The first running request can always go on: it may take the pages
of every later one, and alone it fits (`check_request`). So there is no cycle without progress
(KF-C15, KF-C16).
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence, Set

from k3jax import buckets
from k3jax.buckets import Kind
from k3jax.controls import RowControls
from serving import page_table
from serving.page_table import MISS, Allocation, Chunk, Effect, Hit, Move, OutOfPages
from serving.plan import Admission, PageCopy, RowPlan, StateExport, StepPlan
from serving.scheduler import drafting, ngram
from serving.scheduler.chunking import chunk_end
from serving.scheduler.limits import Limits
from serving.scheduler.room import extend_running, num_spare, reclaim_paused
from serving.scheduler.state import (
    InFlight,
    Running,
    SchedulerState,
    Waiting,
    in_order,
    planned_ends,
    waiting_in_order,
)

NO_REQUESTS: frozenset[str] = frozenset()


@dataclasses.dataclass(slots=True)
class _Draft:
    """A step in the making. Mutable, and never leaves `plan`.

    Attributes:
      kind: of the rows it may take; None for both.
      budget: tokens left.
      max_rows: rows left.
    """

    kind: Kind | None
    budget: int
    max_rows: int
    rows: list[RowPlan] = dataclasses.field(default_factory=list[RowPlan])
    effects: list[Effect] = dataclasses.field(default_factory=list[Effect])
    admitted: list[Admission] = dataclasses.field(default_factory=list[Admission])
    controls: list[RowControls] = dataclasses.field(default_factory=list[RowControls])

    def add(self, row: RowPlan, effects: tuple[Effect, ...] = ()) -> None:
        self.rows.append(row)
        if effects:
            self.effects += effects
        self.budget -= row.length
        self.max_rows -= 1


def turns(state: SchedulerState, limits: Limits) -> tuple[Kind | None, ...]:
    """Kinds of step to try, in order; None is both at once."""
    if limits.batching == "mixed":
        return (None,)
    return ("prefill", "decode") if state.last_kind == "decode" else ("decode", "prefill")


def plan(
    state: SchedulerState,
    limits: Limits,
    *,
    paused: Set[str] = NO_REQUESTS,
    kinds: Sequence[Kind | None] | None = None,
) -> tuple[SchedulerState, StepPlan | None]:
    """Choose the next step; it may be called again before the result of the last one is committed.

    Args:
      paused: requests whose clients do not keep up. They are not scheduled, and keep their pages
        until a request that can use them needs them.
      kinds: of step to try, in order; default is `turns`.

    Returns:
      The state with the step in flight, and the step, or None if no request can go on now.
    """
    for kind in turns(state, limits) if kinds is None else kinds:
        if kind == "prefill" and not _has_prefill(state):
            continue
        draft = _draft(kind, limits)
        num_preemptions = state.num_preemptions
        state = _plan_running(state, limits, paused, draft)
        if kind != "decode" and state.num_preemptions == num_preemptions:
            state = _admit(state, limits, paused, draft)
        if draft.rows:
            return _launch(state, limits, draft)
    return state, None


def _has_prefill(state: SchedulerState) -> bool:
    running = state.running.values()
    return bool(state.waiting) or any(row.computed < row.prefill_end for row in running)


def _draft(kind: Kind | None, limits: Limits) -> _Draft:
    if kind == "prefill":
        return _Draft(kind, limits.max_prefill_tokens, limits.max_prefill_rows)
    if kind == "decode":
        return _Draft(kind, limits.max_rows * (1 + limits.num_drafts), limits.max_rows)
    return _Draft(kind, limits.max_prefill_tokens, limits.max_rows)


def _plan_running(
    state: SchedulerState, limits: Limits, paused: Set[str], draft: _Draft
) -> SchedulerState:
    """Next chunks and tokens of the running requests."""
    ends = planned_ends(state)
    cap = _chunk_cap(state, limits)
    owners, num_drafts, kind = state.table.owners, limits.num_drafts, draft.kind
    for request_id, row in in_order(state.running, limits):
        if not draft.budget or not draft.max_rows:
            break
        if request_id in paused or request_id not in state.running:
            continue  # the latter: a more important row has just preempted it
        start, drafts = ends.get(request_id, row.computed), None
        if start < row.prefill_end:
            if kind == "decode":
                continue
            junction = owners[request_id].junction
            end = _chunk_end(state, limits, row, start, junction, draft.budget, cap)
            if end == start:
                continue
        else:
            if kind == "prefill" or start >= row.request.max_cached_tokens:
                continue
            has_grammar = row.request.sampling.grammar is not None
            if has_grammar and request_id in ends:
                continue  # the next mask depends on the token that is in flight
            if not num_drafts:
                allocation = owners[request_id]
                if start < allocation.quiet_until:  # by far the most steps
                    draft.add(_quiet_row(row, allocation, start))
                    continue
            elif request_id in ends:
                continue  # what was accepted decides where it goes on
            wanted = 0
            if not has_grammar:
                wanted = drafting.num_drafts(
                    row.draft_rate, start, most=num_drafts, cost=limits.draft_cost
                )
            # Drafts end with the context: no bucket has pages for more, and the pool may have none.
            end = min(start + min(1 + wanted, draft.budget), limits.max_request_tokens - 1)
            if num_drafts and limits.drafter == "ngram" and not has_grammar:
                room = min(end, row.request.max_cached_tokens) - start - 1
                drafts = ngram.propose(
                    row.tokens(max(0, row.known - ngram.WINDOW_TOKENS), row.known), room
                )
                end = start + 1 + len(drafts)
        chunk = _chunk(state, row, start, end)
        state, effects = extend_running(state, limits, request_id, chunk, paused)
        owners = state.table.owners
        if effects is not None:
            draft.add(_row_plan(row, owners[request_id], chunk, effects, drafts), effects)
    return state


def _admit(
    state: SchedulerState, limits: Limits, paused: Set[str], draft: _Draft
) -> SchedulerState:
    """First chunks of waiting requests, in order.

    A request gets pages for its first chunk, but only once all that it knows fits beside what the
    running ones need next: otherwise it would be preempted, or preempt others, before it gives a
    token. One that would reuse what a step in flight computes waits for that step.
    """
    for entry in waiting_in_order(state, limits):
        if not draft.budget or not draft.max_rows:
            break
        request_id = entry.request.request_id
        if request_id in paused:
            continue
        hit = MISS
        if not entry.wants_prompt_logprobs:
            hit = page_table.lookup(state.table, entry.chain.keys, entry.prefill_end(limits) - 1)
        if not hit.is_ready:
            break
        state = reclaim_paused(state, limits, paused, entry)
        if len(state.running) >= limits.max_rows:
            break
        admitted = _try_admit(state, limits, paused, entry, hit, draft)
        if admitted is None and state.running.keys() <= paused:
            # What is kept for reuse is in its way: without that it fits.
            hit = MISS
            admitted = _try_admit(state, limits, paused, entry, hit, draft, may_export=False)
        if admitted is None:
            break
        state, row, effects = admitted
        draft.add(row, effects)
        draft.admitted.append(Admission(request_id, hit.tokens, hit.junction))
        draft.controls += _controls(entry, row.slot)
    return state


def _try_admit(
    state: SchedulerState,
    limits: Limits,
    paused: Set[str],
    entry: Waiting,
    hit: Hit,
    draft: _Draft,
    *,
    may_export: bool = True,
) -> tuple[SchedulerState, RowPlan, tuple[Effect, ...]] | None:
    """Admit one request with a hit; None if there is no room for it now."""
    request = entry.request
    known = entry.num_tokens
    row = Running(
        request=request,
        output=entry.output,
        slot=_free_slot(state, limits),
        prefill_end=entry.prefill_end(limits),
        computed=hit.tokens,
        chain=entry.chain,
        arrival=entry.arrival,
        cached_tokens=hit.tokens if entry.cached_tokens is None else entry.cached_tokens,
        draft_rate=entry.draft_rate,
    )
    cap = _chunk_cap(state, limits)
    end = _chunk_end(state, limits, row, hit.tokens, hit.junction, draft.budget, cap)
    if end == hit.tokens:
        return None
    chunk = _chunk(state, row, hit.tokens, end)._replace(may_export=may_export)
    try:
        table, effects = page_table.admit(
            state.table,
            request.request_id,
            hit,
            chunk,
            prompt_tokens=len(request.prompt),
            room_for=known if limits.reserve_full_prompt else 0,
            num_spare=num_spare(state, limits, paused),
        )
    except OutOfPages:
        return None
    stats = state.stats
    if entry.cached_tokens is None:
        stats = stats.with_hit(hit, known, table.geometry.page_tokens)
    state = dataclasses.replace(
        state,
        table=table,
        waiting=tuple(other for other in state.waiting if other is not entry),
        running={**state.running, request.request_id: row},
        stats=stats,
    )
    return state, _row_plan(row, table.owners[request.request_id], chunk, effects), effects


def _controls(entry: Waiting, slot: int) -> tuple[RowControls, ...]:
    """What the device has to know of a request that is admitted, besides its tokens."""
    request = entry.request
    if request.sampling.has_penalties:
        return (RowControls(slot, request.prompt, entry.output.tokens(), request.biases),)
    if request.sampling.has_biases:
        return (RowControls(slot, (), (), request.biases),)
    return ()


def _free_slot(state: SchedulerState, limits: Limits) -> int:
    """The smallest slot that no running request has; the caller has checked that there is one."""
    used = {row.slot for row in state.running.values()}
    return next(slot for slot in range(limits.max_rows) if slot not in used)


def _chunk_cap(state: SchedulerState, limits: Limits) -> int:
    """Tokens of one request's chunk at most."""
    is_alone = len(state.running) + len(state.waiting) <= 1
    return limits.max_prefill_tokens if is_alone else _widest_chunk(limits)


def _widest_chunk(limits: Limits) -> int:
    """Tokens of a chunk beside other requests, in an empty step."""
    return min(
        limits.long_prefill_cap_tokens or limits.max_prefill_tokens, limits.max_prefill_tokens
    )


def _chunk_end(
    state: SchedulerState,
    limits: Limits,
    row: Running,
    start: int,
    junction: int,
    budget: int,
    cap: int,
) -> int:
    return chunk_end(
        start,
        row.prefill_end,
        prompt_tokens=len(row.request.prompt),
        junction=junction,
        budget_tokens=min(budget, cap),
        max_budget_tokens=_widest_chunk(limits),
        page_tokens=state.table.geometry.page_tokens,
        policy=state.table.policy,
    )


def _chunk(state: SchedulerState, row: Running, start: int, end: int) -> Chunk:
    return Chunk(
        step_id=state.next_step_id,
        start=start,
        end=end,
        prefill_end=row.split_end,
        processed=row.computed,
        known=row.known,
        keys=row.chain.keys,
        num_drafts=end - start - 1 if start >= row.prefill_end else 0,
    )


def _quiet_row(row: Running, allocation: Allocation, start: int) -> RowPlan:
    """The next token of a request whose pages stay as they are."""
    request, state = row.request, allocation.running_state
    return RowPlan._make(  # every step makes hundreds, and the constructor is slower
        (
            request.request_id, row.slot, start, 1, None, allocation.attention, state, state, True,
            request.sampling, None, 0, (), False, 0, False,
        )
    )  # fmt: skip


def _row_plan(
    row: Running,
    allocation: Allocation,
    chunk: Chunk,
    effects: tuple[Effect, ...],
    drafts: tuple[int, ...] | None = None,
) -> RowPlan:
    """One chunk of a request. The token of a decoding row is on the device, and so are its drafts
    unless they are given."""
    move = next((effect for effect in effects if isinstance(effect, Move)), Move((), ()))
    is_decode = chunk.start >= row.prefill_end
    prompt, is_end = row.request.prompt, chunk.end >= row.prefill_end
    goes_on = is_end and not is_decode and chunk.end < row.known
    following = row.tokens(chunk.end, chunk.end + 1) if not is_decode else ()
    return RowPlan(
        request_id=row.request.request_id,
        slot=row.slot,
        start=chunk.start,
        length=chunk.end - chunk.start,
        tokens=_tokens(row, chunk, drafts) if drafts or not is_decode else None,
        attention_pages=allocation.attention,
        state_source=move.source,
        state_target=move.target,
        samples=is_end and not goes_on,
        sampling=row.request.sampling,
        export=StateExport(move.export_at, move.export) if move.export is not None else None,
        num_drafts=chunk.num_drafts,
        draft_states=move.draft_states,
        scored=row.wants_prompt_logprobs and chunk.start < len(prompt),
        following=following[0] if following else 0,
        goes_on=goes_on,
    )


def _tokens(row: Running, chunk: Chunk, drafts: tuple[int, ...] | None) -> tuple[int, ...]:
    """Known tokens of a chunk, then its drafts."""
    return row.tokens(chunk.start, chunk.end - chunk.num_drafts) + (drafts or ())


def _launch(
    state: SchedulerState, limits: Limits, draft: _Draft
) -> tuple[SchedulerState, StepPlan]:
    """Put a step in flight."""
    ids, _, starts, lengths, tokens, pages, *_ = zip(*draft.rows, strict=True)
    num_tokens = sum(lengths)
    kind = draft.kind or ("decode" if tokens.count(None) == len(tokens) else "prefill")
    bucket = buckets.choose(
        limits.buckets,
        kind,
        tokens=num_tokens,
        rows=len(draft.rows),
        pages=max(map(len, pages)),
    )
    clears = (effect.pages for effect in draft.effects if isinstance(effect, page_table.Clear))
    step = StepPlan(
        step_id=state.next_step_id,
        bucket=bucket,
        rows=tuple(draft.rows),
        clear_pages=tuple(page for pages in clears for page in pages),
        copies=tuple(
            PageCopy(*effect) for effect in draft.effects if isinstance(effect, page_table.Copy)
        ),
        admitted=tuple(draft.admitted),
        controls=tuple(draft.controls),
    )
    ends = map(operator.add, starts, lengths)
    if limits.num_drafts:
        ends = map(operator.sub, ends, [row.num_drafts for row in draft.rows])
    live: Mapping[str, int] = dict(zip(ids, ends, strict=True))
    stats = state.stats
    return dataclasses.replace(
        state,
        table=page_table.settle(state.table),
        in_flight=(*state.in_flight, InFlight(step_id=step.step_id, rows=step.rows, live=live)),
        next_step_id=state.next_step_id + 1,
        last_kind=kind,
        stats=stats._replace(
            copied_pages=stats.copied_pages + len(step.copies),
            cleared_pages=stats.cleared_pages + len(step.clear_pages),
            padding_tokens=stats.padding_tokens + bucket.tokens - num_tokens,
        ),
    ), step
