"""An executor whose waits and errors may be the end of another host."""

from __future__ import annotations

from serving.engine import Executor
from serving.plan import GroupPlan, GroupResult
from serving.processes.leader import Leader


class GuardedExecutor[Handle]:
    """Runs steps; if one fails because a host is lost, its error does not count as the engine's.

    The streams then end with UNAVAILABLE, which the server sends, and not with INTERNAL.
    """

    def __init__(self, executor: Executor[Handle], leader: Leader):
        self._executor, self._leader = executor, leader

    def dispatch(self, plan: GroupPlan) -> Handle:
        """Start a step."""
        with self._leader.device_call():
            return self._executor.dispatch(plan)

    def collect(self, handle: Handle) -> GroupResult:
        """Wait for a step's result."""
        with self._leader.device_call():
            return self._executor.collect(handle)
