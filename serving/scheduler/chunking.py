"""Where the chunks of a prefill end (cache-semantics.md section 6)."""

from __future__ import annotations


def chunk_end(
    start: int, end: int, *, budget_tokens: int, max_budget_tokens: int, page_tokens: int
) -> int:
    """Where the next chunk of a prefill ends (cache-semantics.md section 6, rule 1 and page stop of
    rule 2).

    A chunk that does not end the prefill ends on a page boundary, and a chunk that starts inside a
    page goes no further than its end, because only there the state in a page belongs to a known
    place. A page that is wider than a whole step is filled in private pieces.

    Args:
      start, end: tokens computed, and tokens to compute in all.
      budget_tokens: left in this step.
      max_budget_tokens: of an empty step.

    Returns:
      Tokens computed after the chunk; `start` if the request must wait for a step with more room.
    """
    stop = min(end, start + budget_tokens)
    if stop < end:
        boundary = stop - stop % page_tokens
        if boundary > start:
            stop = boundary
        elif page_tokens <= max_budget_tokens:
            return start
    if start % page_tokens:
        stop = min(stop, start - start % page_tokens + page_tokens)
    return stop
