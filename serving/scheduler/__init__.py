"""The scheduler: pure functions from one immutable state to the next."""

from serving.scheduler.chunking import chunk_end
from serving.scheduler.lifecycle import abort, chain_of_prompt, commit, submit
from serving.scheduler.limits import Limits, check_request, make_limits
from serving.scheduler.planning import plan
from serving.scheduler.state import SchedulerState, check_state, initial_state, is_idle
from serving.scheduler.stats import CacheStats

__all__ = [
    "CacheStats",
    "Limits",
    "SchedulerState",
    "abort",
    "chain_of_prompt",
    "check_request",
    "check_state",
    "chunk_end",
    "commit",
    "initial_state",
    "is_idle",
    "make_limits",
    "plan",
    "submit",
]
