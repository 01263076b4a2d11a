"""How a request's pages grow by a chunk: what that takes, and taking it."""

from __future__ import annotations

from typing import NamedTuple

from serving.page_table import states as state_columns
from serving.page_table.edit import Edit
from serving.page_table.effects import Chunk, Clear, Effect
from serving.page_table.policy import export_position
from serving.page_table.publishing import keeps
from serving.page_table.states import SCRATCH, Bundle, Columns, Move, column_of
from serving.page_table.table import Allocation, PageTable


class Demand(NamedTuple):
    """What a chunk takes. A kept answer end does not count: it can always be left out.

    Attributes:
      num_attention: attention pages to take.
      export_at: tokens of the state to export, or 0.
    """

    num_attention: int
    states: state_columns.Need
    export_at: int
    num_pages: int


def demand_of(table: PageTable, edit: Edit, allocation: Allocation, chunk: Chunk) -> Demand:
    """What a chunk takes beyond the pages that its request has."""
    export_at = 0
    if table.policy.export_tokens is not None and chunk.may_export:
        export_at = export_position(
            chunk.start,
            chunk.end,
            prefill_end=chunk.prefill_end,
            prompt_tokens=allocation.prompt_tokens,
            junction=allocation.junction,
            page_tokens=table.geometry.page_tokens,
            policy=table.policy,
        )
    last = chunk.end + table.policy.lookahead_slots
    attention = max(0, table.geometry.attention_pages(last) - len(allocation.attention))
    needed = _state_need(table, edit, allocation, chunk, export_at)
    num_pages = attention + needed.num_new * table.geometry.num_state_pages
    return Demand(attention, needed, export_at, num_pages)


def _state_need(
    table: PageTable,
    edit: Edit,
    allocation: Allocation,
    chunk: Chunk,
    export_at: int,
    keep: Bundle | None = None,
) -> state_columns.Need:
    return state_columns.need(
        allocation.states,
        chunk.start,
        chunk.end,
        num_slots=table.policy.num_state_slots,
        has_export=export_at > 0,
        page_tokens=table.column_tokens,
        is_kept=lambda bundle: bundle == keep or edit.is_kept(bundle),
    )


def in_place(table: PageTable, edit: Edit, allocation: Allocation, chunk: Chunk) -> Allocation:
    """Let the state at the chunk's start, if nobody else needs it, be where its end is written."""
    source = state_columns.source_of(allocation.states, chunk.start)
    if source is None or any(edit.num_references(page) > 1 for page in source.pages):
        return allocation
    for page in source.pages:
        edit.forget(page)
    target = column_of(chunk.end, table.column_tokens)
    return allocation._replace(states=state_columns.relabel(allocation.states, source, target))


def grow(
    table: PageTable, edit: Edit, allocation: Allocation, chunk: Chunk, demand: Demand
) -> tuple[Allocation, tuple[Effect, ...]]:
    """Take the pages of a chunk, for which there is room."""
    effects: tuple[Effect, ...] = ()
    attention = allocation.attention
    if demand.num_attention:
        pages = edit.take(demand.num_attention)
        attention += pages
        effects = (Clear(pages),)
    if not table.geometry.num_state_pages:
        return allocation._replace(attention=attention), effects
    columns, move, answer_end = _move_state(table, edit, allocation, chunk, demand)
    allocation = allocation._replace(
        attention=attention, states=columns, running_state=move.target, answer_end=answer_end
    )
    return allocation, (*effects, move)


def _move_state(
    table: PageTable, edit: Edit, allocation: Allocation, chunk: Chunk, demand: Demand
) -> tuple[Columns, Move, tuple[int, Bundle] | None]:
    """Take the bundles of a chunk and say where its states go."""
    needed, old = demand.states, allocation.answer_end
    spare: tuple[Bundle, ...] = ()
    keeping = _need_with_answer_end(table, edit, allocation, chunk, demand)
    if keeping is not None:
        needed, spare = keeping, (old[1],) if old else ()
    num_taken = needed.num_new - len(spare)
    new = (*spare[: needed.num_new], *(edit.take_bundles(num_taken) if num_taken > 0 else ()))
    columns, move = state_columns.advance(
        chunk.start,
        chunk.end,
        needed,
        new,
        num_drafts=chunk.num_drafts,
        num_slots=table.policy.num_state_slots,
        export_at=demand.export_at,
    )
    parted, answer_end = needed.parted, old
    if keeping is not None:
        for bundle in spare[needed.num_new :]:
            edit.release(bundle)
        answer_end = (chunk.start, move.source)
        parted = tuple(bundle for bundle in parted if bundle != move.source)
        columns = columns._replace(
            columns=tuple(c for c in columns.columns if c.pages != move.source)
        )
        edit.reference(move.source)  # it may be shed in this step, which still reads it
        edit.pin(move.source)
    for bundle in parted:
        if allocation.states.running != SCRATCH:  # the request leaves an entry of its own
            edit.part(bundle)
        edit.pin(bundle)
    return columns, move, answer_end


def _need_with_answer_end(
    table: PageTable, edit: Edit, allocation: Allocation, chunk: Chunk, demand: Demand
) -> state_columns.Need | None:
    """What a decoding step needs if the state at its start is kept as the answer's last one; None
    if that is not wanted, or there is no room."""
    policy, source = table.policy, demand.states.source
    if (
        not policy.keep_answer_end
        or chunk.start < chunk.prefill_end
        or chunk.start % policy.unit_tokens
        or source is None
        or edit.is_kept(source.pages)
    ):
        return None
    needed = _state_need(table, edit, allocation, chunk, demand.export_at, source.pages)
    num_taken = needed.num_new - (allocation.answer_end is not None)
    return needed if num_taken * table.geometry.num_state_pages <= edit.num_free else None


def quiet_until(table: PageTable, allocation: Allocation, chunk: Chunk) -> int:
    """Tokens up to which decoding steps only fill the pages that the request has."""
    end, policy = chunk.end, table.policy
    running = allocation.states.running
    has_stale = any(0 <= c.place < running for c in allocation.states.columns)
    if chunk.num_drafts or has_stale or keeps(table, allocation, end):
        return end
    page_tokens = table.geometry.page_tokens
    bounds = [len(allocation.attention) * page_tokens - policy.lookahead_slots]
    if running != SCRATCH and policy.enabled:
        boundary = (running + 1) * page_tokens
        bounds.append(boundary - keeps(table, allocation, boundary))
    if policy.keep_answer_end:
        bounds.append(-(-end // policy.unit_tokens) * policy.unit_tokens)
    return max(end, min(bounds))
