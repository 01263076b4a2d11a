"""The scheduler: pure functions from one immutable state to the next."""

from serving.scheduler.chunking import chunk_end
from serving.scheduler.lifecycle import (
    abort,
    chain_of_prompt,
    check_queue,
    commit,
    enqueue,
    submit,
    withdraw,
)
from serving.scheduler.limits import Limits, check_request, make_limits
from serving.scheduler.planning import plan, turns
from serving.scheduler.room import num_spare
from serving.scheduler.state import (
    SchedulerState,
    Waiting,
    check_state,
    has_free_row,
    initial_state,
    is_idle,
    waiting_in_order,
)
from serving.scheduler.stats import CacheStats

__all__ = [
    "CacheStats",
    "Limits",
    "SchedulerState",
    "Waiting",
    "abort",
    "chain_of_prompt",
    "check_queue",
    "check_request",
    "check_state",
    "chunk_end",
    "commit",
    "enqueue",
    "has_free_row",
    "initial_state",
    "is_idle",
    "make_limits",
    "num_spare",
    "plan",
    "submit",
    "turns",
    "waiting_in_order",
    "withdraw",
]
