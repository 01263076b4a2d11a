"""Random lives of requests that reuse prefixes, on larger tables and with all policies.

The machine is that of the scheduler's test: invariants after every operation, outputs as if alone,
equal plans when the same events come again. Here prompts continue or share earlier ones, and the
table is also changed from outside.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, precondition, rule

from serving import page_table
from serving.page_table import CachePolicy, InUse, PageTable
from serving.plan import StepPlan
from serving.request import RequestError
from serving.scheduler import SchedulerState
from tests.fakes import EOS, SchedulerDriver, fake_request, make_driver
from tests.property.test_scheduler import Event, SchedulerMachine

REQUEST_IDS = tuple("abcdef")
MAX_CONTEXT = 48
SHARED = tuple(range(20, 60))  # prompts without a parent begin with a part of it


@st.composite
def sizes_and_policies(draw: st.DrawFn) -> tuple[dict[str, Any], CachePolicy]:
    """Arguments of `make_driver`, and a policy that fits them."""
    page_tokens = draw(st.sampled_from([2, 3, 4, 4]))
    num_state_pages = draw(st.integers(1, 3))
    units = [unit for unit in (1, 2, 4, 8) if page_tokens % unit == 0] + [page_tokens]
    policy = CachePolicy(
        unit_tokens=draw(st.sampled_from(units)),
        retention_tokens=draw(st.sampled_from([None, 0, 0, page_tokens, 3 * page_tokens])),
        tail_drop=draw(st.sampled_from([False, False, True])),
        hash_lookahead_tokens=draw(st.sampled_from([0, 0, 1])),
        checkpoint_junctions=draw(st.booleans()),
        key_every_unit=draw(st.booleans()),
        export_tokens=draw(st.sampled_from([None, None, 1, page_tokens])),
        keep_answer_end=draw(st.booleans()),
    )
    sizes = {
        "page_tokens": page_tokens,
        "num_state_pages": num_state_pages,
        "num_pages": draw(st.integers(20, 60)),
        "max_rows": draw(st.integers(1, 6)),
        "max_prefill_tokens": draw(st.sampled_from([page_tokens, 8, 16, 40])),
        "batching": draw(st.sampled_from(["alternate", "mixed"])),
        "reserve_full_prompt": draw(st.booleans()),
        "reserve_running": draw(st.booleans()),
        "preempts_itself": draw(st.booleans()),
        "watermark_pages": draw(st.sampled_from([0, 0, 2])),
    }
    return sizes, policy


class PageTableMachine(SchedulerMachine):
    """A scheduler that reuses prefixes."""

    @initialize(
        chosen=sizes_and_policies(),
        stops=st.sets(st.tuples(st.sampled_from(REQUEST_IDS), st.integers(1, 30)), max_size=4),
        broken=st.sets(st.tuples(st.sampled_from(REQUEST_IDS), st.integers(1, 30)), max_size=1),
    )
    def start(
        self,
        chosen: tuple[dict[str, Any], CachePolicy],
        stops: set[tuple[str, int]],
        broken: set[tuple[str, int]],
    ) -> None:
        sizes, self.policy = chosen
        super().start(stops, broken, **sizes)

    @rule(
        request_id=st.sampled_from(REQUEST_IDS),
        parent=st.sampled_from([None, *REQUEST_IDS]),
        num_kept=st.integers(0, MAX_CONTEXT),
        suffix=st.lists(st.integers(0, 2), max_size=8),
        max_tokens=st.integers(1, 12),
        salt=st.sampled_from(["", "", "", "salt"]),
    )
    def submit(
        self,
        request_id: str,
        parent: str | None,
        num_kept: int,
        suffix: list[int],
        max_tokens: int,
        salt: str,
    ) -> None:
        """A prompt that goes on after a part of another request's prompt and answer."""
        known = SHARED
        if parent in self.requests:
            known = self.requests[parent].prompt + self.driver.tokens(parent)
        request = fake_request(
            request_id,
            [*known[:num_kept], *suffix],
            max_tokens=max_tokens,
            cache_salt=salt,
            ignore_eos=EOS in known,
        )
        try:
            self.driver.submit(request)
        except RequestError:  # the id is live, or the prompt is empty or too long
            return
        self.requests[request_id] = request
        self.aborted.discard(request_id)
        self.events.append(Event("submit", request))

    @rule(num_steps=st.integers(1, 8))
    def run(self, num_steps: int) -> None:
        """Some steps with one in flight, as in the server's loop."""
        for _ in range(num_steps):
            if len(self.driver.state.in_flight) < 2:
                self.plan()
            if self.driver.state.in_flight:
                self.commit()

    @precondition(lambda self: self.driver.state.table.idle)
    @rule(choice=st.integers(0, 100))
    def evict(self, choice: int) -> None:
        idle = sorted(self.driver.state.table.idle)
        self._change(Event("evict", (idle[choice % len(idle)],)))

    @rule()
    def reset(self) -> None:
        before = self.driver.state.table
        try:
            self._change(Event("reset"))
        except InUse:
            assert before.refs
            assert self.driver.state.table is before
            return
        assert not list(page_table.entries(self.driver.state.table))

    def _change(self, event: Event) -> None:
        """Change the table from outside."""
        self.driver.state = _changed(self.driver.state, event)
        page_table.check(self.driver.state.table)
        self.events.append(event)

    def _replay(
        self, state: SchedulerState, event: Event
    ) -> tuple[SchedulerState, list[StepPlan | None]]:
        if event.name in ("evict", "reset"):
            return _changed(state, event), []
        return super()._replay(state, event)

    def _fresh_driver(self) -> SchedulerDriver:
        return make_driver(
            policy=self.policy,
            scripted=self.scripted,
            not_finite=self.broken,
            max_prefill_rows=self.sizes["max_rows"],
            max_context_tokens=MAX_CONTEXT,
            **self.sizes,
        )

    def _check_chunks(self, plan: StepPlan) -> None:
        """Hits are whole units and leave a token; chunks end where a state may be kept."""
        unit, page_tokens = self.policy.unit_tokens, self.sizes["page_tokens"]
        for admission in plan.admitted:
            row = next(row for row in plan.rows if row.request_id == admission.request_id)
            request = self.driver.state.running[row.request_id]
            assert row.start == admission.hit_tokens <= request.known - 1
            assert row.start % unit == 0
        for row in plan.rows:
            end = row.start + row.length
            if not row.samples and page_tokens <= self.sizes["max_prefill_tokens"]:
                assert end % unit == 0
            if row.start % page_tokens and self.policy.export_tokens is None:
                assert end <= -(-row.start // page_tokens) * page_tokens

    def _check_pages(self, table: PageTable) -> None:
        """Every page is free, or idle and can be found."""
        assert not table.refs
        assert not table.pins
        assert table.num_free == table.num_usable, "pages are lost"


def _changed(state: SchedulerState, event: Event) -> SchedulerState:
    table = (
        page_table.reset(state.table)
        if event.name == "reset"
        else page_table.evict(state.table, event.argument)
    )
    return dataclasses.replace(state, table=table)


TestPageTable = PageTableMachine.TestCase
TestPageTable.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
