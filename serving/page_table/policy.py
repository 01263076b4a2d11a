"""What is kept for reuse, and at which positions: the one place that decides it.

Scheduler and table ask the functions here, so that a chunk always ends where the table wants to
keep a state (cache-semantics.md sections 3 to 6).
"""

from __future__ import annotations

import dataclasses

from k3jax.config import ConfigError
from serving.page_table.alignment import PageGeometry


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CachePolicy:
    """Reuse of prefixes. All sizes are tokens.

    Attributes:
      unit_tokens: `u`, tokens of a prefix key; hits end on multiples of it. A page is a multiple.
      enabled: False: nothing is reused, and a request's state stays in one page.
      retention_tokens: recurrent states kept at page boundaries: None: all that are reached; 0:
        those where another request can resume, which are the last one in the prompt and the
        junction; `N`: also every `N` tokens.
      tail_drop: EAGLE/MTP drafts: a matched attention prefix loses its last unit.
      hash_lookahead_tokens: tokens after a unit that its key covers as well.
      checkpoint_junctions: also keep the state at a junction inside a page.
      key_every_unit: attention pages can be found at every unit boundary in them, not only at their
        end and at the prompt's tail. A shared prefix that ends inside a page is noticed only so.
      num_state_slots: bundles of a request beyond its running state, for the states after drafts.
      export_tokens: the prefill can export a state at multiples of this from the start of a chunk;
        None: it cannot.
      lookahead_slots: attention entries reserved past the tokens of a step.
      keep_answer_end: keep states for a request that goes on where this one ends: the prompt's
        last state, if it is at a unit boundary, and the answer's last one that is.
    """

    unit_tokens: int
    enabled: bool = True
    retention_tokens: int | None = 0
    tail_drop: bool = False
    hash_lookahead_tokens: int = 0
    checkpoint_junctions: bool = False
    key_every_unit: bool = False
    num_state_slots: int = 0
    export_tokens: int | None = None
    lookahead_slots: int = 0
    keep_answer_end: bool = False


def no_reuse(geometry: PageGeometry) -> CachePolicy:
    """The policy that reuses nothing."""
    return CachePolicy(unit_tokens=geometry.page_tokens, enabled=False)


def check_policy(policy: CachePolicy, geometry: PageGeometry) -> None:
    """Refuse a policy that does not fit the pages (KF-C18).

    Raises:
      ConfigError: naming every field that does not fit.
    """
    page = geometry.page_tokens
    problems = [
        f"{name} is out of range: got {value}; expected >= {least}"
        for name, value, least in (
            ("unit_tokens", policy.unit_tokens, 1),
            ("hash_lookahead_tokens", policy.hash_lookahead_tokens, 0),
            ("num_state_slots", policy.num_state_slots, 0),
            ("lookahead_slots", policy.lookahead_slots, 0),
            ("export_tokens", 1 if policy.export_tokens is None else policy.export_tokens, 1),
        )
        if value < least
    ]
    if policy.unit_tokens >= 1 and page % policy.unit_tokens:
        problems.append(
            f"unit_tokens does not divide the page: got {policy.unit_tokens}; expected a divisor "
            f"of page_tokens = {page}"
        )
    retention = policy.retention_tokens
    if retention is not None and (retention < 0 or retention % page):
        problems.append(
            f"retention_tokens does not fit the page: got {retention}; expected 0 or a multiple of "
            f"page_tokens = {page}"
        )
    if not geometry.num_state_pages and policy.unit_tokens != page:
        problems.append(
            f"unit_tokens needs recurrent layers if it is below the page: got "
            f"{policy.unit_tokens}; expected page_tokens = {page}"
        )
    if problems:
        raise ConfigError(problems)


def boundary_below(num_tokens: int, size: int, policy: CachePolicy) -> int:
    """Last multiple of `size` at which a request of `num_tokens` can be resumed; 0 if none.

    At least one token is left to compute, and those that the key looks ahead to.
    """
    if policy.tail_drop:
        return max(0, num_tokens // size * size - size)
    return max(0, (num_tokens - max(1, policy.hash_lookahead_tokens)) // size * size)


def is_keyed(position: int, prompt_tokens: int, page_tokens: int, policy: CachePolicy) -> bool:
    """Whether the attention entries of the first `position` tokens get a key.

    Args:
      position: a multiple of the unit.
    """
    if policy.key_every_unit or position % page_tokens == 0:
        return True
    if policy.keep_answer_end and position == prompt_tokens:
        return True
    limit = prompt_tokens if policy.tail_drop else prompt_tokens - 1
    limit = min(limit, prompt_tokens - policy.hash_lookahead_tokens)
    return position == limit // policy.unit_tokens * policy.unit_tokens


def keeps_state(
    position: int, *, prompt_tokens: int, junction: int, page_tokens: int, policy: CachePolicy
) -> bool:
    """Whether the state after `position` tokens of a request is kept for reuse."""
    unit, retention = policy.unit_tokens, policy.retention_tokens
    if position <= 0 or position % unit:
        return False
    if position == boundary_below(prompt_tokens, unit, policy):
        return True
    if policy.keep_answer_end and position == prompt_tokens:
        return True
    if position == junction and policy.checkpoint_junctions and position <= prompt_tokens:
        return True
    if position % page_tokens:
        return False
    if retention is None or (retention and position % retention == 0):
        return True
    boundaries = [junction]
    if policy.tail_drop:
        boundaries += [
            junction - page_tokens,
            (prompt_tokens - 1) // page_tokens * page_tokens - page_tokens,
            prompt_tokens // page_tokens * page_tokens - page_tokens,
        ]
    else:
        boundaries.append(prompt_tokens - 1)
    return any(boundary // page_tokens * page_tokens == position for boundary in boundaries)


def export_position(
    start: int,
    end: int,
    *,
    prefill_end: int,
    prompt_tokens: int,
    junction: int,
    page_tokens: int,
    policy: CachePolicy,
) -> int:
    """Where inside the chunk `start` to `end` the prefill exports a state to keep; 0 for nowhere.

    Only the chunk that ends the prefill exports, unless page boundaries are kept anyway. The state
    needs a page column of its own, between those of the chunk's first and last state.
    """
    if policy.export_tokens is None or not policy.enabled:
        return 0
    if policy.retention_tokens == 0 and end < prefill_end:
        return 0
    unit = policy.unit_tokens
    position = boundary_below(end, unit, policy)
    is_possible = (
        start % unit == 0
        and -(-end // page_tokens) - 2 > (start - 1) // page_tokens
        and start + unit <= position < end
        and (position - start) % policy.export_tokens == 0
    )
    if is_possible and keeps_state(
        position,
        prompt_tokens=prompt_tokens,
        junction=junction,
        page_tokens=page_tokens,
        policy=policy,
    ):
        return position
    return 0
