"""Random lives of requests on small pools: the invariants hold after every operation, every request
ends, and its output is the one it has when it is alone."""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from serving import scheduler
from serving.page_table import PageTable
from serving.plan import StepPlan, StepResult
from serving.request import Request, RequestError
from serving.scheduler import SchedulerState
from tests.fakes import EOS, SchedulerDriver, fake_request, make_driver, solo_tokens

REQUEST_IDS = tuple("abcdefgh")


@dataclasses.dataclass(frozen=True)
class Event:
    """One call of the scheduler with its arguments."""

    name: str
    argument: Any = None


class SchedulerMachine(RuleBasedStateMachine):
    """The scheduler on a fake device, which raises when a page is not what its reader expects."""

    @initialize(
        page_tokens=st.sampled_from([1, 3, 4]),
        num_state_pages=st.integers(0, 3),
        num_pages=st.integers(8, 16),
        max_rows=st.integers(1, 4),
        max_prefill_tokens=st.sampled_from([2, 6, 16]),
        stops=st.sets(st.tuples(st.sampled_from(REQUEST_IDS), st.integers(1, 20)), max_size=6),
        broken=st.sets(st.tuples(st.sampled_from(REQUEST_IDS), st.integers(1, 20)), max_size=2),
    )
    def start(
        self, stops: set[tuple[str, int]], broken: set[tuple[str, int]], **sizes: int
    ) -> None:
        self.scripted = dict.fromkeys(stops, EOS)
        self.broken = broken
        self.sizes = sizes
        self.driver = self._fresh_driver()
        self.empty = self.driver.state
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()
        self.events: list[Event] = []
        self.plans: list[StepPlan | None] = []

    @rule(
        request_id=st.sampled_from(REQUEST_IDS),
        prompt=st.lists(st.integers(0, EOS - 1), min_size=1, max_size=20),
        max_tokens=st.integers(1, 12),
        seed=st.integers(0, 3),
        ignore_eos=st.booleans(),
    )
    def submit(self, request_id: str, prompt: list[int], **sampling: Any) -> None:
        request = fake_request(request_id, prompt, **sampling)
        try:
            self.driver.submit(request)
        except RequestError:  # the id is live, or the pool too small
            return
        self.requests[request_id] = request
        self.aborted.discard(request_id)
        self.events.append(Event("submit", request))

    @rule(request_id=st.sampled_from(REQUEST_IDS))
    def abort(self, request_id: str) -> None:
        before = self.driver.state
        self.driver.abort(request_id)
        if self.driver.state is not before:
            self.aborted.add(request_id)
        self.driver.paused.discard(request_id)
        self.events.append(Event("abort", request_id))

    @precondition(lambda self: len(self.driver.state.in_flight) < 3)
    @rule()
    def plan(self) -> None:
        self.events.append(Event("plan", frozenset(self.driver.paused)))
        plan = self.driver.plan()
        self.plans.append(plan)
        if plan is not None and plan.bucket.kind == "prefill":
            self._check_chunks(plan)

    @precondition(lambda self: self.driver.state.in_flight)
    @rule()
    def commit(self) -> None:
        self._commit()

    @rule(request_id=st.sampled_from(REQUEST_IDS), is_paused=st.booleans())
    def pause_or_resume(self, request_id: str, is_paused: bool) -> None:
        if is_paused:
            self.driver.paused.add(request_id)
        else:
            self.driver.paused.discard(request_id)

    @invariant()
    def emitted_tokens_are_those_of_the_solo_run(self) -> None:
        for request_id, request in getattr(self, "requests", {}).items():
            expected = solo_tokens(request, self.scripted)
            emitted = self.driver.tokens(request_id)
            assert emitted == expected[: len(emitted)]

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.paused.clear()
        for _ in range(2000):
            self.plan()
            if self.driver.state.in_flight:
                self._commit()
            elif self.plans[-1] is None:
                break
        assert scheduler.is_idle(self.driver.state), "requests are stuck"
        self._check_pages(self.driver.state.table)
        for request_id, request in self.requests.items():
            self._check_end(request_id, request)
        self._check_replay()

    def _fresh_driver(self) -> SchedulerDriver:
        return make_driver(
            scripted=self.scripted,
            not_finite=self.broken,
            max_prefill_rows=min(2, self.sizes["max_rows"]),
            max_context_tokens=40,
            **self.sizes,
        )

    def _check_pages(self, table: PageTable) -> None:
        assert table.free_bits == self.empty.table.free_bits, "pages are lost"

    def _commit(self) -> None:
        step_id = self.driver.state.in_flight[0].step_id
        result = self.driver.executor.peek(step_id)
        self.driver.commit()
        self.events.append(Event("commit", result))

    def _check_chunks(self, plan: StepPlan) -> None:
        page_tokens = self.sizes["page_tokens"]
        for row in plan.rows:
            end = row.start + row.length
            # A request that was preempted may also stop before the last token that it knew.
            is_inside = end < self.driver.state.running[row.request_id].split_end
            if is_inside and page_tokens <= self.sizes["max_prefill_tokens"]:
                assert end % page_tokens == 0
            if row.start % page_tokens:
                assert end <= -(-row.start // page_tokens) * page_tokens

    def _check_end(self, request_id: str, request: Request) -> None:
        reason = self.driver.finish_reason(request_id)
        expected = solo_tokens(request, self.scripted)
        emitted = self.driver.tokens(request_id)
        broken_at = [
            position
            for broken_id, position in self.broken
            if broken_id == request_id and position >= len(request.prompt)
        ]
        if request_id in self.aborted:
            assert reason == "abort"
        elif broken_at and min(broken_at) < len(request.prompt) + len(expected):
            assert reason == "error"
            assert emitted == expected[: min(broken_at) - len(request.prompt)]
        else:
            assert reason == ("stop" if request.ends_with(expected[-1]) else "length")
            assert emitted == expected

    def _check_replay(self) -> None:
        """Every process that sees the same events makes the same plans."""
        state, plans = self.empty, []
        for event in self.events:
            state, plan = self._replay(state, event)
            plans += plan
        assert plans == self.plans
        assert state == self.driver.state

    def _replay(
        self, state: SchedulerState, event: Event
    ) -> tuple[SchedulerState, list[StepPlan | None]]:
        match event:
            case Event("submit", Request() as request):
                return scheduler.submit(state, self.driver.limits, request), []
            case Event("abort", str(request_id)):
                return scheduler.abort(state, request_id)[0], []
            case Event("commit", StepResult() as result):
                return scheduler.commit(state, result)[0], []
            case _:
                state, plan = scheduler.plan(state, self.driver.limits, paused=event.argument)
                return state, [plan]


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
