"""Random lives of requests on three replicas: every request ends once with its own tokens, no page
is lost, and all replicas take the same steps."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from serving import replicas
from serving.page_table import CachePolicy
from serving.request import Request, RequestError
from tests.fakes import EOS, fake_geometry, fake_request, make_replicas, solo_tokens

REQUEST_IDS = tuple("abcdefghijkl")
PREFIXES = ((), tuple(range(8)), tuple(range(8, 20)))


class ReplicasMachine(RuleBasedStateMachine):
    """The driver checks every replica, and that they are in step, after each operation; the fake
    devices check the plans and the pages."""

    @initialize(
        num_state_pages=st.integers(1, 2),
        num_pages=st.integers(10, 20),
        max_rows=st.integers(1, 3),
        max_prefill_tokens=st.sampled_from([4, 16]),
        unit_tokens=st.sampled_from([0, 2, 4]),
        max_waiting=st.sampled_from([2, 100]),
        batching=st.sampled_from(["alternate", "alternate", "mixed"]),
        stops=st.sets(st.tuples(st.sampled_from(REQUEST_IDS), st.integers(1, 20)), max_size=6),
    )
    def start(
        self,
        num_state_pages: int,
        max_rows: int,
        unit_tokens: int,
        stops: set[tuple[str, int]],
        **limits: Any,
    ) -> None:
        self.scripted = dict.fromkeys(stops, EOS)
        self.driver = make_replicas(
            3,
            geometry=fake_geometry(num_state_pages=num_state_pages),
            policy=CachePolicy(unit_tokens=unit_tokens) if unit_tokens else None,
            scripted=self.scripted,
            max_rows=max_rows,
            max_prefill_rows=max_rows if limits["batching"] == "mixed" else min(2, max_rows),
            max_context_tokens=40,
            **limits,
        )
        self.num_usable = self.driver.replicas[0].table.num_usable
        self.requests: dict[str, Request] = {}
        self.aborted: set[str] = set()

    @rule(
        request_id=st.sampled_from(REQUEST_IDS),
        prefix=st.sampled_from(PREFIXES),
        rest=st.lists(st.integers(0, EOS - 1), min_size=1, max_size=8),
        max_tokens=st.integers(1, 12),
        seed=st.integers(0, 3),
    )
    def submit(
        self, request_id: str, prefix: tuple[int, ...], rest: list[int], **sampling: int
    ) -> None:
        request = fake_request(request_id, (*prefix, *rest), **sampling)
        rows = self.driver.limits.max_rows
        has_free_row = any(
            len(state.running) + len(state.waiting) < rows for state in self.driver.replicas
        )
        try:
            self.driver.submit(request)
        except RequestError as error:
            is_full = error.status == "RESOURCE_EXHAUSTED"
        else:
            is_full = False
            self._accepted(request)
        assert not (is_full and has_free_row)

    def _accepted(self, request: Request) -> None:
        self.requests[request.request_id] = request
        self.aborted.discard(request.request_id)

    @rule(request_id=st.sampled_from(REQUEST_IDS))
    def abort(self, request_id: str) -> None:
        if self.driver.abort(request_id) is not None:
            self.aborted.add(request_id)
        self.driver.paused.discard(request_id)

    @precondition(lambda self: len(self.driver.steps) < 3)
    @rule()
    def plan(self) -> None:
        self.driver.plan()

    @precondition(lambda self: self.driver.steps)
    @rule()
    def commit(self) -> None:
        self.driver.commit()

    @rule(request_id=st.sampled_from(REQUEST_IDS), is_paused=st.booleans())
    def pause_or_resume(self, request_id: str, is_paused: bool) -> None:
        if is_paused:
            self.driver.paused.add(request_id)
        else:
            self.driver.paused.discard(request_id)

    def teardown(self) -> None:
        if not hasattr(self, "driver"):
            return
        self.driver.paused.clear()
        self.driver.finish()
        for state in replicas.reset(self.driver.replicas):  # raises if a page is still held
            assert state.table.free_bits.bit_count() == self.num_usable
        for request_id, request in self.requests.items():
            outputs, emitted = self.driver.outputs[request_id], self.driver.tokens(request_id)
            expected = solo_tokens(request, self.scripted)
            reasons = [one.finish_reason for one in outputs if one.finish_reason is not None]
            assert reasons == [outputs[-1].finish_reason]
            if request_id in self.aborted:
                assert reasons == ["abort"]
                assert emitted == expected[: len(emitted)]
            else:
                assert reasons == ["stop" if request.ends_with(expected[-1]) else "length"]
                assert emitted == expected


TestReplicas = ReplicasMachine.TestCase
TestReplicas.settings = settings(
    max_examples=150,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
