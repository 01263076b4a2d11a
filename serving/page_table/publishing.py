"""What of a request's pages becomes reusable, and under which keys."""

from __future__ import annotations

from collections.abc import Sequence

from serving.page_table.edit import Edit
from serving.page_table.policy import is_keyed, keeps_state
from serving.page_table.states import Bundle, column_of
from serving.page_table.table import Allocation, Entry, PageTable, PublishedKey, owned


def keeps(
    table: PageTable, allocation: Allocation, position: int, *, junction: int | None = None
) -> bool:
    """Whether the request's state at a position is kept for reuse.

    Args:
      junction: default is the request's own.
    """
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
    allocation = owned(table, request_id)
    return _first_key(table, allocation)[0]


def _first_key(table: PageTable, allocation: Allocation) -> tuple[int, int]:
    """The next position that may get a key, and the distance of those after it.

    After the prompt only full pages have keys, unless every unit has one.
    """
    unit, keyed = table.policy.unit_tokens, allocation.keyed_tokens
    is_plain = not table.policy.key_every_unit and keyed >= allocation.prompt_tokens
    stride = table.geometry.page_tokens if is_plain else unit
    return (keyed // stride + 1) * stride, stride


def publish_computed(
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
    published: list[PublishedKey] = []

    def add(pages: Bundle, tokens: int, *, is_state: bool) -> None:
        key = keys[tokens // unit - 1]
        is_junction = is_state and not keeps(table, allocation, tokens, junction=0)
        entry = Entry(pages, tokens, step, is_junction)
        if edit.publish(entry, key, is_state=is_state, owner=request_id):
            published.append(PublishedKey(step, key, pages[0]))

    prompt = allocation.prompt_tokens
    first, stride = _first_key(table, allocation)
    for tokens in range(first, limit + 1, stride):
        if is_keyed(tokens, prompt, page_tokens, policy):
            add((allocation.attention[(tokens - 1) // page_tokens],), tokens, is_state=False)
    for index, pages, tokens in allocation.states.columns:
        # After drafts only a state in its own column is not written again.
        is_final = not allocation.states.had_drafts or index == column_of(tokens, page_tokens)
        if 0 < tokens <= limit and is_final and keeps(table, allocation, tokens):
            add(pages, tokens, is_state=True)
    if published:
        edit.add_published(request_id, published)
    keyed = limit // unit * unit
    return (
        allocation._replace(keyed_tokens=keyed) if keyed > allocation.keyed_tokens else allocation
    )


def publish_answer_end(
    table: PageTable,
    edit: Edit,
    request_id: str,
    allocation: Allocation,
    computed: int,
    keys: Sequence[bytes],
    *,
    is_at_rest: bool,
) -> None:
    """Make the last kept state of a request reusable, with the attention entries up to it.

    Args:
      is_at_rest: whether the running state is that after `computed` tokens.
    """
    unit, page_tokens = table.policy.unit_tokens, table.geometry.page_tokens
    running = allocation.running_state
    answer_end = allocation.answer_end
    is_settled = is_at_rest and not allocation.states.had_drafts
    if is_settled and running and computed % unit == 0 and not edit.is_kept(running):
        answer_end = (computed, running)
    if answer_end is None or not 0 < answer_end[0] <= min(computed, len(keys) * unit):
        return
    tokens, bundle = answer_end
    key = keys[tokens // unit - 1]
    entry = Entry(bundle, tokens, table.committed)
    edit.publish(entry, key, is_state=True, owner=request_id)
    if tokens % page_tokens:
        page = allocation.attention[tokens // page_tokens]
        entry = Entry((page,), tokens, table.committed)
        edit.publish(entry, key, is_state=False, owner=request_id)
