"""Where the chunks of a prefill end (cache-semantics.md section 6)."""

from __future__ import annotations

from serving.page_table.policy import CachePolicy, boundary_below, export_position


def chunk_end(
    start: int,
    known: int,
    *,
    prompt_tokens: int,
    junction: int,
    budget_tokens: int,
    max_budget_tokens: int,
    page_tokens: int,
    policy: CachePolicy,
) -> int:
    """Where the next chunk of a prefill ends.

    A chunk that does not end the prefill ends on a page boundary, because only there the state in a
    page belongs to a known place; one that starts inside a page goes no further than its end. A
    page that is wider than a whole step is filled in private pieces. Chunks also stop where a state
    is kept for reuse: at the last page boundary, at the prompt's tail (unless the prefill can
    export that state from within the chunk), and at the junction.

    Args:
      start, known: tokens computed, and tokens whose ids are known.
      budget_tokens: left in this step.
      max_budget_tokens: of an empty step.

    Returns:
      Tokens computed after the chunk; `start` if the request must wait for a step with more room.
    """
    end = min(known, start + budget_tokens)
    prefill_end = max(prompt_tokens, known - 1)
    if start >= prefill_end:
        return end
    exports = end >= prefill_end and export_position(
        start,
        end,
        prefill_end=prefill_end,
        prompt_tokens=prompt_tokens,
        junction=junction,
        page_tokens=page_tokens,
        policy=policy,
    )
    if end < prefill_end:
        boundary = end - end % page_tokens
        if boundary > start or page_tokens <= max_budget_tokens:
            end = boundary
    stops: list[int] = []
    if not exports:
        if start % page_tokens:
            stops.append(start - start % page_tokens + page_tokens)
        if policy.enabled:
            last_page = boundary_below(known, page_tokens, policy)
            tail = boundary_below(prompt_tokens, policy.unit_tokens, policy)
            stops += [last_page, tail if last_page < tail < prompt_tokens else 0]
    if start < junction < end:
        whole_pages = (junction - start) // page_tokens * page_tokens
        is_inside = policy.checkpoint_junctions and junction <= prompt_tokens
        stops.append(junction if is_inside else start + whole_pages)
    return max(start, min((stop for stop in stops if start < stop < end), default=end))
