"""How requests take pages, publish what is in them, and give them back. Pure functions.

Each returns the next table; those that hand out pages also return effects, which the device carries
out before the step touches the pages, in the order clear, copy, move. A function that raises leaves
the table as it was.

What a step will have written is published when the step is planned, under the step's id, and is
visible once the step is committed. If its request is gone before that, it vanishes: so nothing is
ever reused that was not computed (KF-C09).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from serving.page_table import states as state_columns
from serving.page_table.policy import (
    export_position,
    is_keyed,
    keeps_state,
)
from serving.page_table.prefix import Hit
from serving.page_table.states import SCRATCH, Bundle, Column, Columns, Move, column_of
from serving.page_table.table import (
    Allocation,
    Edit,
    Entry,
    OutOfPages,
    PageTable,
    PendingKey,
)
from serving.request import InvariantError


class InUse(Exception):
    """The table cannot be reset, because pages are referenced; it is unchanged."""


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


def admit(
    table: PageTable,
    request_id: str,
    hit: Hit,
    chunk: Chunk,
    *,
    prompt_tokens: int,
    room_for: int = 0,
    num_spare: int = 0,
) -> tuple[PageTable, tuple[Effect, ...]]:
    """Give a new request what it reuses, and pages for its first chunk.

    A hit inside a page is made private first: the attention page is copied, and the state moves to
    a bundle of the request's own.

    Args:
      room_for: tokens of the request that must fit in all, though only the chunk's pages are taken.
      num_spare: pages that must stay free beside that.

    Raises:
      OutOfPages: too few pages are free.
      InvariantError: the request already has pages, or the hit is not ready.
    """
    if request_id in table.owners:
        raise InvariantError(f"request {request_id!r} was admitted twice; expected no pages of it")
    if not hit.is_ready or chunk.start != hit.tokens:
        raise InvariantError(
            f"request {request_id!r} cannot start at {chunk.start}: got a hit of {hit.tokens} "
            f"tokens, ready: {hit.is_ready}; expected the same number of tokens, ready"
        )
    page_tokens = table.geometry.page_tokens
    edit = Edit(table)
    edit.reference(hit.attention)
    edit.reference(hit.state)
    columns = Columns()
    if hit.state:
        index = column_of(hit.tokens, table.column_tokens)
        columns = Columns((Column(index, hit.state, hit.tokens),), index + 1)
    allocation = Allocation(
        attention=hit.attention,
        states=columns,
        prompt_tokens=prompt_tokens,
        junction=hit.junction,
        keyed_tokens=hit.tokens // page_tokens * page_tokens,
    )
    is_partial = hit.tokens % page_tokens > 0
    demand = _demand(table, edit, allocation, chunk)
    required = demand.num_pages
    if room_for > chunk.end:
        whole = chunk._replace(end=room_for, num_drafts=0)
        required = max(required, _demand(table, edit, allocation, whole).num_pages)
    required += is_partial + num_spare
    if required > edit.num_free:
        raise OutOfPages(f"too few free pages: got {edit.num_free}; expected {required}")
    effects: list[Effect] = []
    if is_partial:
        source = hit.attention[-1]
        (private,) = edit.take(1)
        edit.pin((source,))
        allocation = allocation._replace(attention=(*hit.attention[:-1], private))
        effects = [Clear((private,)), Copy(source, private, hit.tokens % page_tokens)]
    allocation, more = _grow(table, edit, allocation, chunk, demand)
    _set_owner(table, edit, request_id, allocation, chunk)
    return edit.finish(), (*effects, *more)


def extend(
    table: PageTable, request_id: str, chunk: Chunk, *, in_place: bool = False
) -> tuple[PageTable, tuple[Effect, ...]]:
    """Give a request pages for its next chunk, and take those it needs no more.

    A decoding step that ends at `Allocation.quiet_until` or before needs no call.

    Args:
      in_place: take no pages for states: overwrite the present state even where it was to be kept.

    Raises:
      OutOfPages: too few pages are free.
      InvariantError: the request has no pages.
    """
    allocation = _owned(table, request_id)
    edit = Edit(table)
    stale, states = state_columns.split_stale(
        allocation.states, chunk.processed, table.column_tokens
    )
    if stale:
        for bundle in stale:
            edit.release(bundle)
        allocation = allocation._replace(states=states)
    if in_place:
        allocation = _in_place(table, edit, allocation, chunk)
    demand = _demand(table, edit, allocation, chunk)
    if demand.num_pages > edit.num_free:
        raise OutOfPages(f"too few free pages: got {edit.num_free}; expected {demand.num_pages}")
    allocation, effects = _grow(table, edit, allocation, chunk, demand)
    _set_owner(table, edit, request_id, allocation, chunk)
    return edit.finish(), effects


def settle(table: PageTable) -> PageTable:
    """The step that was planned is complete as a plan: let go of what it copies from.

    A later step may take these pages: the device runs it later.
    """
    if not table.pins:
        return table
    edit = Edit(table)
    edit.unpin()
    return edit.finish()


def commit_step(table: PageTable, step_id: int) -> PageTable:
    """A step has completed: what it wrote is visible."""
    return table._replace(committed=step_id)


def publish(table: PageTable, request_id: str, computed: int, keys: Sequence[bytes]) -> PageTable:
    """Make reusable what a request has computed, where keys came to be known after the plan.

    Args:
      computed: verified tokens in the cache, of committed steps.
    """
    allocation = _owned(table, request_id)
    page_tokens = table.geometry.page_tokens
    boundary = computed // page_tokens * page_tokens
    if allocation.states.had_drafts and _keeps(table, allocation, boundary):
        allocation = allocation._replace(
            states=state_columns.with_boundary(allocation.states, boundary, page_tokens)
        )
    edit = Edit(table)
    allocation = _publish(table, edit, request_id, allocation, computed, keys, table.committed)
    edit.set_owner(request_id, allocation)
    return edit.finish()


def release(
    table: PageTable,
    request_id: str,
    *,
    computed: int = 0,
    keys: Sequence[bytes] = (),
    is_tainted: bool = False,
) -> PageTable:
    """Take all pages of a request back. Releasing a request without pages changes nothing.

    Args:
      computed: tokens that its committed steps have computed: the answer's last state is published
        if it is one of them.
      is_tainted: what it computed must not be reused, since its logits were not finite (KF-K09).
    """
    allocation = table.owners.get(request_id)
    if allocation is None:
        return table
    edit = Edit(table)
    for pending in table.pending.get(request_id, ()):
        if pending.step > table.committed:
            edit.withdraw(pending.key, pending.page)
    edit.set_pending(request_id, ())
    if is_tainted:
        for page in allocation.pages:
            if table.refs[page] == 1:
                edit.forget(page)
    elif allocation.answer_end is not None and allocation.answer_end[0] <= computed:
        _publish_answer_end(table, edit, allocation, keys)
    edit.release(allocation.pages)
    edit.drop_owner(request_id)
    return edit.finish()


def shed(table: PageTable) -> PageTable:
    """Give up the states that answers keep for later, because pages are needed now."""
    kept = [(name, one) for name, one in table.owners.items() if one.answer_end is not None]
    if not kept:
        return table
    edit = Edit(table)
    for request_id, allocation in kept:
        if allocation.answer_end is not None:
            edit.release(allocation.answer_end[1])
        edit.set_owner(request_id, allocation._replace(answer_end=None))
    return edit.finish()


def evict(table: PageTable, pages: Iterable[int]) -> PageTable:
    """Forget all entries of some pages. Requests that hold them go on."""
    edit = Edit(table)
    for page in pages:
        edit.forget(page)
    return edit.finish()


def reset(table: PageTable) -> PageTable:
    """Forget all entries.

    Raises:
      InUse: a page is referenced.
    """
    if table.refs:
        raise InUse(
            f"the cache is in use: got {len(table.refs)} referenced pages; expected none; retry "
            "when no request runs"
        )
    return evict(table, tuple(table.page_keys))


# ---- parts of admit and extend ----


class _Demand(NamedTuple):
    """What a chunk takes. A kept answer end does not count: it can always be left out.

    Attributes:
      num_attention: attention pages to take.
      export_at: tokens of the state to export, or 0.
    """

    num_attention: int
    states: state_columns.Need
    export_at: int
    num_pages: int


def _demand(table: PageTable, edit: Edit, allocation: Allocation, chunk: Chunk) -> _Demand:
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
    return _Demand(attention, needed, export_at, num_pages)


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


def _in_place(table: PageTable, edit: Edit, allocation: Allocation, chunk: Chunk) -> Allocation:
    """Let the state at the chunk's start, if nobody else needs it, be where its end is written."""
    source = state_columns.source_of(allocation.states, chunk.start)
    if source is None or any(edit.num_references(page) > 1 for page in source.pages):
        return allocation
    for page in source.pages:
        edit.forget(page)
    target = column_of(chunk.end, table.column_tokens)
    return allocation._replace(states=state_columns.relabel(allocation.states, source, target))


def _grow(
    table: PageTable, edit: Edit, allocation: Allocation, chunk: Chunk, demand: _Demand
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
    table: PageTable, edit: Edit, allocation: Allocation, chunk: Chunk, demand: _Demand
) -> tuple[Columns, Move, tuple[int, Bundle] | None]:
    """Take the bundles of a chunk and say where its states go."""
    needed, old = demand.states, allocation.answer_end
    keep = _answer_end(table, edit, allocation, chunk, needed)
    spare: tuple[Bundle, ...] = ()
    if keep is not None:
        needed = _state_need(table, edit, allocation, chunk, demand.export_at, keep)
        spare = (old[1],) if old else ()
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
    if keep is not None:
        for bundle in spare[needed.num_new :]:
            edit.release(bundle)
        columns = columns._replace(columns=tuple(c for c in columns.columns if c.pages != keep))
        edit.reference(keep)  # it may be shed in this step, which still reads it
        edit.pin(keep)
        return columns, move, (chunk.start, keep)
    if move.replaced is not None:
        if allocation.states.running != SCRATCH:  # the request parts from an entry of its own
            edit.part(move.replaced)
        edit.pin(move.replaced)
    return columns, move, old


def _answer_end(
    table: PageTable, edit: Edit, allocation: Allocation, chunk: Chunk, needed: state_columns.Need
) -> Bundle | None:
    """The state at the start of a decoding step, if it is to be kept as the answer's last one."""
    policy, source = table.policy, needed.source
    if (
        not policy.keep_answer_end
        or chunk.start < chunk.prefill_end
        or chunk.start % policy.unit_tokens
        or source is None
        or edit.is_kept(source.pages)
    ):
        return None
    extra = source.place == needed.target and allocation.answer_end is None
    room = edit.num_free - (needed.num_new + extra) * table.geometry.num_state_pages
    return source.pages if room >= 0 else None


def _set_owner(
    table: PageTable, edit: Edit, request_id: str, allocation: Allocation, chunk: Chunk
) -> None:
    """Publish what the step will have written, and store the allocation."""
    computed = min(chunk.end, chunk.known)
    allocation = _publish(table, edit, request_id, allocation, computed, chunk.keys, chunk.step_id)
    quiet_until = _quiet_until(table, allocation, chunk)
    edit.set_owner(request_id, allocation._replace(quiet_until=quiet_until))


def _quiet_until(table: PageTable, allocation: Allocation, chunk: Chunk) -> int:
    """Tokens up to which decoding steps only fill the pages that the request has."""
    end, policy = chunk.end, table.policy
    running = allocation.states.running
    has_stale = any(0 <= c.place < running for c in allocation.states.columns)
    if chunk.num_drafts or has_stale or _keeps(table, allocation, end):
        return end
    page_tokens = table.geometry.page_tokens
    bounds = [len(allocation.attention) * page_tokens - policy.lookahead_slots]
    if running != SCRATCH and policy.enabled:
        boundary = (running + 1) * page_tokens
        bounds.append(boundary - _keeps(table, allocation, boundary))
    if policy.keep_answer_end:
        bounds.append(-(-end // policy.unit_tokens) * policy.unit_tokens)
    return max(end, min(bounds))


def _keeps(
    table: PageTable, allocation: Allocation, position: int, *, junction: int | None = None
) -> bool:
    policy = table.policy
    if not policy.enabled or position % policy.unit_tokens:
        return False
    return keeps_state(
        position,
        prompt_tokens=allocation.prompt_tokens,
        junction=allocation.junction if junction is None else junction,
        page_tokens=table.geometry.page_tokens,
        policy=policy,
    )


def next_key(table: PageTable, request_id: str) -> int:
    """Computed tokens at which `publish` may find something new for a decoding request."""
    allocation = _owned(table, request_id)
    return _first_key(table, allocation)[0]


def _first_key(table: PageTable, allocation: Allocation) -> tuple[int, int]:
    """The next position that may get a key, and the distance of those after it.

    After the prompt only full pages have keys, unless every unit has one.
    """
    unit, keyed = table.policy.unit_tokens, allocation.keyed_tokens
    is_plain = not table.policy.key_every_unit and keyed >= allocation.prompt_tokens
    stride = table.geometry.page_tokens if is_plain else unit
    return (keyed // stride + 1) * stride, stride


def _publish(
    table: PageTable,
    edit: Edit,
    request_id: str,
    allocation: Allocation,
    computed: int,
    keys: Sequence[bytes],
    step: int,
) -> Allocation:
    """Publish full attention pages, the prompt's tail, and the states worth keeping."""
    policy, page_tokens = table.policy, table.geometry.page_tokens
    if not policy.enabled:
        return allocation
    unit = policy.unit_tokens
    limit = min(computed, len(keys) * unit)
    pending: list[PendingKey] = []

    def add(pages: Bundle, tokens: int, *, is_state: bool) -> None:
        key = keys[tokens // unit - 1]
        is_junction = is_state and not _keeps(table, allocation, tokens, junction=0)
        entry = Entry(pages, tokens, step, is_junction)
        is_new = edit.publish(entry, key, is_state=is_state)
        if is_new and step > table.committed:
            pending.append(PendingKey(step, key, pages[0]))

    prompt = allocation.prompt_tokens
    first, stride = _first_key(table, allocation)
    for tokens in range(first, limit + 1, stride):
        if is_keyed(tokens, prompt, page_tokens, policy):
            add((allocation.attention[(tokens - 1) // page_tokens],), tokens, is_state=False)
    for index, pages, tokens in allocation.states.columns:
        # After drafts only a state in its own column is not written again.
        is_final = not allocation.states.had_drafts or index == column_of(tokens, page_tokens)
        if 0 < tokens <= limit and is_final and _keeps(table, allocation, tokens):
            add(pages, tokens, is_state=True)
    if pending:
        old = (one for one in table.pending.get(request_id, ()) if one.step > table.committed)
        edit.set_pending(request_id, (*old, *pending))
    keyed = limit // unit * unit
    return (
        allocation._replace(keyed_tokens=keyed) if keyed > allocation.keyed_tokens else allocation
    )


def _publish_answer_end(
    table: PageTable, edit: Edit, allocation: Allocation, keys: Sequence[bytes]
) -> None:
    """Make the last kept state of an answer reusable, with the attention entries up to it."""
    if allocation.answer_end is None:
        return
    tokens, bundle = allocation.answer_end
    unit, page_tokens = table.policy.unit_tokens, table.geometry.page_tokens
    if tokens > len(keys) * unit:
        return
    key = keys[tokens // unit - 1]
    edit.publish(Entry(bundle, tokens, table.committed), key, is_state=True)
    if tokens % page_tokens:
        page = allocation.attention[tokens // page_tokens]
        edit.publish(Entry((page,), tokens, table.committed), key, is_state=False)


def _owned(table: PageTable, request_id: str) -> Allocation:
    allocation = table.owners.get(request_id)
    if allocation is None:
        raise InvariantError(f"request {request_id!r} has no pages; expected it to be admitted")
    return allocation
