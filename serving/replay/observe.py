"""What a planned step answers to the questions of a trace."""

from __future__ import annotations

from collections.abc import Set

from serving import page_table
from serving.page_table import PageTable
from serving.plan import RowPlan, StepPlan
from serving.replay.answers import CopyName, Reuse
from serving.replay.trace import TraceConfig


def scheduled(plan: StepPlan | None) -> tuple[tuple[str, int], ...]:
    """Tokens of each request, in the order of the rows."""
    return tuple((row.request_id, row.length) for row in plan.rows) if plan else ()


def drafts(plan: StepPlan | None) -> dict[str, int]:
    rows = plan.rows if plan else ()
    return {row.request_id: row.num_drafts for row in rows if row.num_drafts}


def admitted(plan: StepPlan | None) -> dict[str, Reuse]:
    news = plan.admitted if plan else ()
    return {one.request_id: Reuse(one.hit_tokens, one.junction) for one in news}


def copies(
    plan: StepPlan | None, config: TraceConfig, state_pages: Set[int]
) -> frozenset[CopyName]:
    """The copies that a design which copies states too would ask for.

    Here a state that must stay is left in its pages and the request goes on in others. So a hit
    inside a page stands for one copy of each recurrent group, and so does a reusable running state
    that the request leaves for other pages of the same column.

    Args:
      state_pages: of reusable states.
    """
    if plan is None:
        return frozenset()
    hits = {one.request_id: one.hit_tokens for one in plan.admitted}
    named: list[CopyName] = []
    for copy in plan.copies:
        owner = next(row for row in plan.rows if copy.target in row.attention_pages)
        request_id = owner.request_id
        tokens = hits.get(request_id, owner.start)
        named.append(CopyName(config.attention_group, request_id, "resume", tokens))
    for row in plan.rows:
        is_new = row.request_id in hits
        if is_new and hits[row.request_id] % config.page_tokens:
            kind = "resume"
        elif not is_new and _leaves_state(row, config.page_tokens, state_pages):
            kind = "preserve"
        else:
            continue
        named += [
            CopyName(group, row.request_id, kind, row.start) for group in config.recurrent_groups
        ]
    return frozenset(named)


def held(table: PageTable, request_ids: tuple[str, ...], config: TraceConfig) -> dict[
    str, tuple[int, ...]
]:  # fmt: skip
    """Pages of each request that has any, one number a group of the trace."""
    order = (config.attention_group, *config.recurrent_groups)
    counts: dict[str, tuple[int, ...]] = {}
    for request_id in request_ids:
        by_group = dict(zip(order, page_table.held(table, request_id), strict=True))
        if any(by_group.values()):
            counts[request_id] = tuple(by_group[group] for group in range(len(order)))
    return counts


def new_pages(plan: StepPlan | None) -> frozenset[int]:
    """Pages that a step takes for something new: they are cleared, or get a state of a row that did
    not have its state there before."""
    if plan is None:
        return frozenset()
    pages = set(plan.clear_pages)
    for row in plan.rows:
        bundles = (row.state_target, *row.draft_states)
        if row.export is not None:
            bundles = (*bundles, row.export.pages)
        old = row.state_source if row.start else ()
        pages.update({page for bundle in bundles for page in bundle} - {*old})
    return frozenset(pages)


def _leaves_state(row: RowPlan, page_tokens: int, state_pages: Set[int]) -> bool:
    end = row.start + row.length
    is_same_page = row.start > 0 and (row.start - 1) // page_tokens == (end - 1) // page_tokens
    has_moved = row.state_source != row.state_target
    return is_same_page and has_moved and not state_pages.isdisjoint(row.state_source)
