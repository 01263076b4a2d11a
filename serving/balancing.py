"""Which replica a request goes to. Pure functions on the schedulers' states.

A new request goes where it brings the least work to wait for, counting what the replica's prefix
cache spares it; but it does not queue while another replica has a free row. A request that never
ran moves on when it is stuck and another replica could start it. One that ran stays: its pages are
there. A request that names its replica goes and stays there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set

from serving import page_table, scheduler
from serving.page_table import KeyChain
from serving.request import Request
from serving.scheduler import Limits, SchedulerState, Waiting

# Tokens of prefill that an open request counts for, since it takes part in many decoding steps.
_REQUEST_TOKENS = 128


def choose(
    states: Sequence[SchedulerState], limits: Limits, chain: KeyChain, request: Request
) -> tuple[int, int]:
    """The replica for a new request, and how many of its tokens need not be computed there."""
    numbers = [
        number for number, state in enumerate(states) if scheduler.has_free_row(state, limits)
    ]
    if request.replica is not None:
        numbers = [request.replica]
    return _cheapest(states, numbers or range(len(states)), chain, len(request.prompt))


def rebalance(
    states: tuple[SchedulerState, ...], limits: Limits, paused: Set[str]
) -> tuple[SchedulerState, ...]:
    """Move requests that never ran from replicas that cannot admit them now to others that can.

    Only replicas where nothing waits receive any, and at most what one prefill step admits. The
    first request of the longest queue moves first.
    """
    if len(states) == 1:
        return states
    queues = [_unpaused(state, limits, paused) for state in states]
    idle = [number for number, queue in enumerate(queues) if not queue]
    if len(idle) == len(states) or not any(
        scheduler.has_free_row(states[number], limits) for number in idle
    ):
        return states
    stuck = {
        number: _stuck(states[number], limits, paused, queue)
        for number, queue in enumerate(queues)
        if queue
    }
    after = list(states)
    for _ in range(limits.max_prefill_rows * len(idle)):
        source = max(stuck, key=lambda number: (len(stuck[number]), -number))
        if not stuck[source]:
            break
        entry = stuck[source].pop(0)
        targets = [number for number in idle if _takes(after[number], limits, paused, entry)]
        if targets:
            known = entry.num_tokens
            target, hit_tokens = _cheapest(after, targets, entry.chain, known)
            after[source] = scheduler.withdraw(after[source], entry)
            after[target] = scheduler.enqueue(
                after[target], entry.request, entry.chain, hit_tokens=hit_tokens
            )
    return tuple(after)


def _cheapest(
    states: Sequence[SchedulerState], numbers: Iterable[int], chain: KeyChain, num_tokens: int
) -> tuple[int, int]:
    """The replica where a request of `num_tokens` waits for the least work, and its hit there. Of
    equals the one with the fewest requests, then the first."""
    costs: list[tuple[int, int, int, int]] = []
    for number in numbers:
        state = states[number]
        hit = page_table.lookup(state.table, chain.keys, num_tokens - 1).tokens
        num_open = len(state.running) + len(state.waiting)
        cost = num_tokens - hit + _backlog(state) + _REQUEST_TOKENS * num_open
        costs.append((cost, num_open, number, hit))
    _, _, number, hit = min(costs)
    return number, hit


def _backlog(state: SchedulerState) -> int:
    """Tokens of open requests that are still to be prefilled."""
    waiting = sum(entry.num_tokens - entry.hit_tokens for entry in state.waiting)
    running = state.running.values()
    return waiting + sum(
        row.prefill_end - row.computed for row in running if row.computed < row.prefill_end
    )


def _stuck(
    state: SchedulerState, limits: Limits, paused: Set[str], queue: Sequence[Waiting]
) -> list[Waiting]:
    """Requests that may move, and could not be admitted now, though it were their turn."""
    stuck = queue[_num_fitting(state, limits, paused, queue) :]
    return [
        entry for entry in stuck if entry.cached_tokens is None and entry.request.replica is None
    ]


def _takes(state: SchedulerState, limits: Limits, paused: Set[str], entry: Waiting) -> bool:
    """Whether a replica could start a request in its next prefill step, with what waits there."""
    queue = [*_unpaused(state, limits, paused), entry]
    return len(queue) <= min(limits.max_prefill_rows, _num_fitting(state, limits, paused, queue))


def _unpaused(state: SchedulerState, limits: Limits, paused: Set[str]) -> list[Waiting]:
    queue = scheduler.waiting_in_order(state, limits)
    return [entry for entry in queue if entry.request.request_id not in paused]


def _num_fitting(
    state: SchedulerState, limits: Limits, paused: Set[str], queue: Sequence[Waiting]
) -> int:
    """How many entries of a queue, from the front, find a row and pages beside the running ones."""
    table = state.table
    num_rows = limits.max_rows - len(state.running)
    num_pages = table.num_free - scheduler.num_spare(state, limits, paused) if num_rows else 0
    for count, entry in enumerate(queue[:num_rows]):
        needed = table.geometry.request_pages(entry.num_tokens)
        if needed > num_pages:
            # Pages of a hit are there already, if somebody holds them.
            hit = page_table.lookup(table, entry.chain.keys, entry.num_tokens - 1)
            needed -= sum(page not in table.idle for page in hit.attention)
        num_pages -= needed
        if num_pages < 0 and (count or state.running):
            return count  # a request that has the replica to itself always fits
    return min(num_rows, len(queue))
