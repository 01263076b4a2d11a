"""How many drafts a request is worth: as many as its acceptance pays for, down to none.

With a chance `p` that a draft is taken if those before it were, k drafts give

    1 + p + ... + p^k

tokens a step, for a step that takes `1 + cost * k` times as long as one without. The number with
the most tokens for the time is tried. A request whose drafts do not pay still tries one now and
then, since text changes.
"""

from __future__ import annotations

FIRST_RATE = 0.7  # assumed before anything is known
PROBE_TOKENS = 32  # a request without drafts tries one every so many tokens
_MEMORY = 16.0  # trials that weigh as much as the past


def updated_rate(rate: float, num_drafts: int, num_taken: int) -> float:
    """The chance of a draft after a step that took `num_taken` of `num_drafts`.

    Drafts behind a refused one say nothing.
    """
    trials = min(num_drafts, num_taken + 1)
    return (_MEMORY * rate + num_taken) / (_MEMORY + trials)


def num_drafts(rate: float, position: int, *, most: int, cost: float) -> int:
    """Drafts of the next step.

    Args:
      rate: of the request, see `updated_rate`.
      position: of its newest token.
      most: drafts that a step has room for.
      cost: of a draft, as a share of a step without; 0 always tries all.
    """
    if cost <= 0:
        return most
    best, best_speed, tokens, chance = 0, 1.0, 1.0, 1.0
    for count in range(1, most + 1):
        chance *= rate
        tokens += chance
        speed = tokens / (1 + cost * count)
        if speed > best_speed:
            best, best_speed = count, speed
    if not best and position % PROBE_TOKENS == 0:
        return min(1, most)
    return best
