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

from serving.page_table import states as state_columns
from serving.page_table.edit import Edit
from serving.page_table.effects import Chunk, Clear, Copy, Effect
from serving.page_table.growth import demand_of, grow, quiet_until
from serving.page_table.growth import in_place as grow_in_place
from serving.page_table.prefix import Hit
from serving.page_table.publishing import keeps, publish_answer_end, publish_computed
from serving.page_table.states import Column, Columns, column_of
from serving.page_table.table import NEVER, Allocation, OutOfPages, PageTable, PublishedKey, owned
from serving.request import InvariantError


class InUse(Exception):
    """The table cannot be reset, because pages are referenced; it is unchanged."""


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
        key = chunk.keys[hit.tokens // table.policy.unit_tokens - 1]
        edit.add_published(request_id, (PublishedKey(NEVER, key, hit.state[0]),))
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
    demand = demand_of(table, edit, allocation, chunk)
    required = demand.num_pages
    if room_for > chunk.end:
        whole = chunk._replace(end=room_for, num_drafts=0)
        required = max(required, demand_of(table, edit, allocation, whole).num_pages)
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
    allocation, more = grow(table, edit, allocation, chunk, demand)
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
    allocation = owned(table, request_id)
    edit = Edit(table)
    stale, states = state_columns.split_stale(
        allocation.states, chunk.processed, table.column_tokens
    )
    if stale:
        for bundle in stale:
            edit.release(bundle)
        allocation = allocation._replace(states=states)
    if in_place:
        allocation = grow_in_place(table, edit, allocation, chunk)
    demand = demand_of(table, edit, allocation, chunk)
    if demand.num_pages > edit.num_free:
        raise OutOfPages(f"too few free pages: got {edit.num_free}; expected {demand.num_pages}")
    allocation, effects = grow(table, edit, allocation, chunk, demand)
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
    return table._replace(committed=step_id, touched=())


def publish(table: PageTable, request_id: str, computed: int, keys: Sequence[bytes]) -> PageTable:
    """Make reusable what a request has computed, where keys came to be known after the plan.

    Args:
      computed: verified tokens in the cache, of committed steps.
    """
    allocation = owned(table, request_id)
    page_tokens = table.geometry.page_tokens
    boundary = computed // page_tokens * page_tokens
    states = state_columns.settled(allocation.states, computed)
    if states.had_drafts and keeps(table, allocation, boundary):
        states = state_columns.with_boundary(states, boundary, page_tokens)
    allocation = allocation._replace(states=states)
    edit = Edit(table)
    allocation = publish_computed(
        table, edit, request_id, allocation, computed, keys, table.committed
    )
    edit.set_owner(request_id, allocation)
    return edit.finish()


def release(
    table: PageTable,
    request_id: str,
    *,
    computed: int = 0,
    keys: Sequence[bytes] = (),
    is_at_rest: bool = False,
    is_tainted: bool = False,
) -> PageTable:
    """Take all pages of a request back. Releasing a request without pages changes nothing.

    Args:
      computed: tokens that its committed steps have computed: the answer's last state is published
        if it is one of them.
      is_at_rest: whether no step in flight goes on from there.
      is_tainted: what it computed must not be reused, since its logits were not finite (KF-K09).
        What it started from is not reused either: the fault may lie there.
    """
    allocation = table.owners.get(request_id)
    if allocation is None:
        return table
    edit = Edit(table)
    for entry in table.published.get(request_id, ()):
        if is_tainted or entry.step > table.committed:
            edit.withdraw(entry.key, entry.page)
    edit.drop_published(request_id)
    if is_tainted:
        for page in allocation.pages:
            edit.forget(page)
    elif table.policy.keep_answer_end:
        publish_answer_end(
            table, edit, request_id, allocation, computed, keys, is_at_rest=is_at_rest
        )
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


def _set_owner(
    table: PageTable, edit: Edit, request_id: str, allocation: Allocation, chunk: Chunk
) -> None:
    """Publish what the step will have written, and store the allocation."""
    computed = min(chunk.end, chunk.known)
    allocation = publish_computed(
        table, edit, request_id, allocation, computed, chunk.keys, chunk.step_id
    )
    allocation = allocation._replace(quiet_until=quiet_until(table, allocation, chunk))
    edit.set_owner(request_id, allocation)
