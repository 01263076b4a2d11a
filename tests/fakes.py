"""A device without a model, a clock without time, and a driver for the scheduler.

`FakeExecutor` keeps what a real pool would hold: tokens in attention pages, a running digest in
state pages. The token that it samples depends on every one of them, so a page that is shared, not
cleared, or read before it is written either raises or changes the output, and a request's output
equals `solo_tokens` only if its cache was right at every step.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import threading
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from k3jax.config import EngineConfig
from k3jax.results import TokenLogprobs
from serving import replicas, scheduler
from serving.engine import Executor
from serving.page_table import CachePolicy, PageGeometry, PageTable, empty_table
from serving.plan import GroupPlan, GroupResult, Output, RowPlan, StepPlan, StepResult
from serving.request import Request, RequestError, SamplingParams
from serving.scheduler import Limits

VOCAB_SIZE = 97
EOS = 96  # never sampled unless a test says so
_MODULUS = (1 << 61) - 1


def fake_geometry(*, page_tokens: int = 4, num_state_pages: int = 3) -> PageGeometry:
    """A geometry whose byte sizes do not matter."""
    return PageGeometry(
        page_tokens=page_tokens,
        unit_tokens=page_tokens,
        token_bytes=4,
        state_bytes=4 * page_tokens - 2,
        num_positions=2,
        num_state_pages=num_state_pages,
        num_state_layers=2 * num_state_pages,
    )


def fake_limits(
    geometry: PageGeometry,
    *,
    num_pages: int = 100,
    max_rows: int = 4,
    max_context_tokens: int = 64,
    max_prefill_tokens: int = 16,
    max_prefill_rows: int = 2,
    max_waiting: int = 100,
    max_waiting_tokens: int = 1000,
    **policies: Any,
) -> Limits:
    """Limits of a small server; `policies` are further fields of `Limits`."""
    engine = EngineConfig(
        max_rows=max_rows,
        max_context_tokens=max_context_tokens,
        max_prefill_tokens=max_prefill_tokens,
        max_prefill_rows=max_prefill_rows,
    )
    limits = scheduler.make_limits(
        engine,
        geometry,
        num_pages=num_pages,
        vocab_size=VOCAB_SIZE,
        max_waiting=max_waiting,
        max_waiting_tokens=max_waiting_tokens,
    )
    return dataclasses.replace(limits, **policies)


def group_of_one(plan: StepPlan) -> GroupPlan:
    """A step of a server with a single replica."""
    return GroupPlan(step_id=plan.step_id, bucket=plan.bucket, plans=(plan,))


def fake_request(
    request_id: str = "a",
    prompt: Iterable[int] = (1, 2, 3),
    *,
    max_tokens: int = 4,
    seed: int = 0,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    cache_salt: str = "",
    priority: int = 0,
) -> Request:
    return Request(
        request_id=request_id,
        prompt=tuple(prompt),
        sampling=SamplingParams(
            seed=seed, max_tokens=max_tokens, stop_token_ids=stop_token_ids, ignore_eos=ignore_eos
        ),
        eos_token_ids=(EOS,),
        cache_salt=cache_salt,
        priority=priority,
    )


def solo_tokens(
    request: Request, scripted: Mapping[tuple[str, int], int] | None = None
) -> tuple[int, ...]:
    """What `FakeExecutor` must generate for a request, computed from its tokens alone."""
    known = list(request.prompt)
    while len(known) < len(request.prompt) + request.sampling.max_tokens:
        state = 0
        for token in known:
            state = _advance(state, token)
        position = (request.request_id, len(known))
        token = (scripted or {}).get(position, _sample(state, known, request.sampling.seed))
        known.append(token)
        if request.ends_with(token):
            break
    return tuple(known[len(request.prompt) :])


def fake_logprobs(tokens: Iterable[int], count: int | None) -> tuple[TokenLogprobs, ...]:
    """What `FakeExecutor` tells of tokens to a request that asks for `count` more at each place."""
    if count is None:
        return ()
    top, ids = tuple(-1.0 - i for i in range(count)), tuple(range(count))
    return tuple(TokenLogprobs(-token / 8, top, ids) for token in tokens)


class FakeClock:
    """Seconds that pass only when told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class FakeExecutor:
    """Runs a step at its dispatch; `collect` hands out the result, and can be held back.

    Args:
      geometry, num_pages, max_rows: of the pool and the token buffer.
      scripted: token to sample at (request id, position in prompt plus output).
      not_finite: (request id, position) whose logits are not finite.

    Attributes:
      plans: every step, as dispatched.
      gate: `collect` waits while it is cleared.
      fail_at_step: `dispatch` raises at this step id.
    """

    def __init__(
        self,
        geometry: PageGeometry,
        *,
        num_pages: int = 100,
        max_rows: int = 4,
        scripted: Mapping[tuple[str, int], int] | None = None,
        not_finite: Collection[tuple[str, int]] = (),
    ):
        self.plans: list[StepPlan] = []
        self.gate = threading.Event()
        self.gate.set()
        self.fail_at_step: int | None = None
        self._page_tokens = geometry.page_tokens
        self._scripted = dict(scripted or {})
        self._not_finite = set(not_finite)
        # A page holds whatever its owners put there: tokens by offset, a digest under "state".
        self._pages: list[dict[int | str, int]] = [{"state": -1, 0: -1} for _ in range(num_pages)]
        self._token_buffer = [-1] * max_rows
        self._uncollected: collections.deque[int] = collections.deque()
        self._results: dict[int, StepResult] = {}

    def dispatch(self, plan: StepPlan) -> int:
        if plan.step_id == self.fail_at_step:
            raise RuntimeError("the fake device failed")
        _check_plan(plan)
        self.plans.append(plan)
        for page in plan.clear_pages:
            self._pages[page] = {}
        for source, target, num_tokens in plan.copies:
            copied = self._pages[source]
            self._pages[target] |= {offset: copied[offset] for offset in range(num_tokens)}
        # All rows read the token buffer of the step before.
        inputs = [self._row_tokens(row) for row in plan.rows]
        rows = [self._run_row(row, tokens) for row, tokens in zip(plan.rows, inputs, strict=True)]
        self._results[plan.step_id] = StepResult(
            step_id=plan.step_id,
            tokens=np.array([token for token, _ in rows], np.int32),
            finite=np.array([is_finite for _, is_finite in rows], np.bool_),
            logprobs=tuple(
                fake_logprobs([token], row.sampling.logprobs)
                for row, (token, _) in zip(plan.rows, rows, strict=True)
            ),
            prompt_logprobs=tuple(
                fake_logprobs(
                    [*tokens[1:], row.following],
                    row.sampling.prompt_logprobs if row.scored else None,
                )
                for row, tokens in zip(plan.rows, inputs, strict=True)
            ),
        )
        self._uncollected.append(plan.step_id)
        return plan.step_id

    def collect(self, handle: int) -> StepResult:
        assert self.gate.wait(timeout=30), "the gate stayed shut"
        assert handle == self._uncollected.popleft(), "steps are collected out of order"
        return self._results.pop(handle)

    def peek(self, handle: int) -> StepResult:
        """A step's result, without collecting it."""
        return self._results[handle]

    @property
    def num_uncollected(self) -> int:
        return len(self._uncollected)

    def _row_tokens(self, row: RowPlan) -> tuple[int, ...]:
        return (self._token_buffer[row.slot],) if row.tokens is None else row.tokens

    def _run_row(self, row: RowPlan, tokens: tuple[int, ...]) -> tuple[int, bool]:
        """Write one row's tokens to its pages; returns the sampled token and its finite flag."""
        states = {self._pages[page].get("state") if row.start else 0 for page in row.state_source}
        assert len(states) <= 1, f"{row.request_id}: its state pages differ"
        state = states.pop() if states else 0
        assert state is not None, f"{row.request_id}: its state pages hold no state"
        for position, token in enumerate(tokens, start=row.start):
            cells = self._pages[row.attention_pages[position // self._page_tokens]]
            offset = position % self._page_tokens
            assert "state" not in cells, f"{row.request_id}: an attention page holds a state"
            assert offset not in cells, f"{row.request_id}: position {position} is not clean"
            cells[offset] = token
            state = _advance(state, token)
            if row.export is not None and position + 1 == row.export.position:
                for page in row.export.pages:
                    self._pages[page] = {"state": state}
        for page in row.state_target:
            self._pages[page] = {"state": state}
        if row.goes_on:
            self._token_buffer[row.slot] = row.following
        if not row.samples:
            return -1, True
        end = row.start + row.length
        seen = [
            self._pages[row.attention_pages[position // self._page_tokens]][
                position % self._page_tokens
            ]
            for position in range(end)
        ]
        if not row.state_source:  # a model without recurrent layers
            state = 0
            for token in seen:
                state = _advance(state, token)
        token = self._scripted.get((row.request_id, end), _sample(state, seen, row.sampling.seed))
        self._token_buffer[row.slot] = token
        return token, (row.request_id, end) not in self._not_finite


class FakeDevices:
    """The executor of an engine: one fake device a replica. The load of a rank is what its replica
    computes: a pair for each token.

    Attributes:
      steps: every step, as dispatched.
    """

    def __init__(self, *replicas: FakeExecutor):
        self.replicas = replicas
        self.steps: list[GroupPlan] = []

    def dispatch(self, plan: GroupPlan) -> GroupPlan:
        check_group(plan)
        self.steps.append(plan)
        for replica, step in zip(self.replicas, plan.plans, strict=True):
            if step is not None:
                replica.dispatch(step)
        return plan

    def collect(self, handle: GroupPlan) -> GroupResult:
        return GroupResult(
            step_id=handle.step_id,
            results=tuple(
                step and replica.collect(step.step_id)
                for replica, step in zip(self.replicas, handle.plans, strict=True)
            ),
            expert_load=tuple(
                sum(row.length for row in step.rows) if step else 0 for step in handle.plans
            ),
        )


def check_group(plan: GroupPlan) -> None:
    """All replicas run the same program, and some replica has rows."""
    steps = [step for step in plan.plans if step is not None]
    assert steps
    assert {(step.step_id, step.bucket) for step in steps} == {(plan.step_id, plan.bucket)}


class SchedulerDriver:
    """Runs scheduler operations on a fake device, checking the invariants after each.

    Args:
      policy: of the prefix cache; default is to reuse nothing.

    Attributes:
      state: the scheduler's.
      outputs: of each request since its last submission, in order.
    """

    def __init__(
        self,
        limits: Limits,
        executor: FakeExecutor,
        geometry: PageGeometry,
        pages: int,
        policy: CachePolicy | None = None,
    ):
        self.limits = limits
        self.executor = executor
        self.state = scheduler.initial_state(empty_table(geometry, pages, policy), limits)
        self.outputs: dict[str, list[Output]] = {}
        self.paused: set[str] = set()

    def submit(self, request: Request) -> None:
        scheduler.check_request(request, self.limits)
        self.state = scheduler.submit(self.state, self.limits, request)
        self.outputs[request.request_id] = []
        self._check()

    def abort(self, request_id: str, *, error: RequestError | None = None) -> None:
        self.state, output = scheduler.abort(self.state, request_id, error=error)
        if output is not None:
            self.outputs[request_id].append(output)
        self._check()

    def plan(self) -> StepPlan | None:
        self.state, step = scheduler.plan(self.state, self.limits, paused=self.paused)
        self._check()
        if step is not None:
            self.executor.dispatch(step)
        return step

    def commit(self) -> tuple[Output, ...]:
        result = self.executor.collect(self.state.in_flight[0].step_id)
        self.state, outputs = scheduler.commit(self.state, result)
        for output in outputs:
            self.outputs[output.request_id].append(output)
        self._check()
        return outputs

    def step(self) -> StepPlan | None:
        """One step, without looking ahead."""
        step = self.plan()
        if step is not None:
            self.commit()
        return step

    def finish(self, *, lookahead: int = 1, max_steps: int = 2000) -> None:
        """Run until every request has ended, with up to `lookahead` steps uncommitted at a plan."""
        for _ in range(max_steps):
            step = self.plan()
            if step is None and not self.state.in_flight:
                assert scheduler.is_idle(self.state), "requests are stuck"
                return
            if step is None or len(self.state.in_flight) > lookahead:
                self.commit()
        raise AssertionError(f"not done after {max_steps} steps")

    def tokens(self, request_id: str) -> tuple[int, ...]:
        """All that was emitted."""
        return tuple(token for output in self.outputs[request_id] for token in output.token_ids)

    def finish_reason(self, request_id: str) -> str | None:
        """How the request ended; checks that nothing follows the end."""
        reasons = [output.finish_reason for output in self.outputs[request_id]]
        assert None not in reasons[-1:]
        assert not any(reasons[:-1])
        return reasons[-1] if reasons else None

    def _check(self) -> None:
        scheduler.check_state(self.state, self.limits)


class ReplicasDriver:
    """Runs operations of all replicas on devices, checking the invariants after each.

    Args:
      devices: executor of an engine.
      tables: one a replica.

    Attributes:
      replicas: the schedulers' states.
      outputs: of each request since its last submission, in order.
      steps: handles of the uncommitted ones, oldest first.
    """

    def __init__(self, limits: Limits, devices: Executor[Any], tables: Sequence[PageTable]):
        self.limits, self.devices = limits, devices
        self.replicas = replicas.initial_replicas(tables, limits)
        self.outputs: dict[str, list[Output]] = {}
        self.paused: set[str] = set()
        self.steps: list[Any] = []

    def submit(self, request: Request) -> int:
        """Queue a request; returns its replica."""
        scheduler.check_request(request, self.limits)
        self.replicas = replicas.submit(self.replicas, self.limits, request)
        self.outputs[request.request_id] = []
        self._check()
        return self.place_of(request.request_id)

    def abort(self, request_id: str) -> Output | None:
        self.replicas, output = replicas.abort(self.replicas, request_id)
        if output is not None:
            self.outputs[request_id].append(output)
        self._check()
        return output

    def plan(self) -> GroupPlan | None:
        self.replicas, step = replicas.plan(self.replicas, self.limits, paused=self.paused)
        self._check()
        if step is not None:
            self.steps.append(self.devices.dispatch(step))
        return step

    def commit(self) -> None:
        result = self.devices.collect(self.steps.pop(0))
        self.replicas, outputs = replicas.commit(self.replicas, result)
        for output in itertools.chain.from_iterable(outputs):
            self.outputs[output.request_id].append(output)
        self._check()

    def step(self) -> GroupPlan:
        """One step, without looking ahead."""
        step = self.plan()
        assert step is not None, "no request can go on"
        self.commit()
        return step

    def finish(self, *, max_steps: int = 2000) -> None:
        """Run until every request has ended, one step ahead."""
        for _ in range(max_steps):
            step = self.plan()
            if self.steps and (step is None or len(self.steps) > 1):
                self.commit()
            elif step is None:
                assert replicas.is_idle(self.replicas), "requests are stuck"
                return
        raise AssertionError(f"not done after {max_steps} steps")

    def place_of(self, request_id: str) -> int:
        """The replica that has a live request."""
        for number, state in enumerate(self.replicas):
            waiting = {entry.request.request_id for entry in state.waiting}
            if request_id in waiting | state.running.keys():
                return number
        raise AssertionError(f"{request_id} is not live")

    def tokens(self, request_id: str) -> tuple[int, ...]:
        """All that was emitted."""
        return tuple(token for output in self.outputs[request_id] for token in output.token_ids)

    def _check(self) -> None:
        replicas.check_replicas(self.replicas, self.limits)


def make_driver(
    *,
    page_tokens: int = 4,
    num_state_pages: int = 3,
    num_pages: int = 100,
    max_rows: int = 4,
    scripted: Mapping[tuple[str, int], int] | None = None,
    not_finite: Collection[tuple[str, int]] = (),
    policy: CachePolicy | None = None,
    **limits: Any,
) -> SchedulerDriver:
    """A driver of a small server; `limits` are those of `fake_limits`."""
    geometry = fake_geometry(page_tokens=page_tokens, num_state_pages=num_state_pages)
    executor = FakeExecutor(
        geometry,
        num_pages=num_pages,
        max_rows=max_rows,
        scripted=scripted,
        not_finite=not_finite,
    )
    bounds = fake_limits(geometry, num_pages=num_pages, max_rows=max_rows, **limits)
    return SchedulerDriver(bounds, executor, geometry, num_pages, policy)


def make_replicas(
    num_replicas: int,
    *,
    geometry: PageGeometry | None = None,
    policy: CachePolicy | None = None,
    scripted: Mapping[tuple[str, int], int] | None = None,
    num_pages: int = 100,
    max_rows: int = 4,
    **limits: Any,
) -> ReplicasDriver:
    """A driver of small replicas on fake devices, with a pool of `num_pages` each; `limits` are
    those of `fake_limits`."""
    geometry = geometry or fake_geometry()
    fakes = [
        FakeExecutor(geometry, num_pages=num_pages, max_rows=max_rows, scripted=scripted)
        for _ in range(num_replicas)
    ]
    return ReplicasDriver(
        fake_limits(geometry, num_pages=num_pages, max_rows=max_rows, **limits),
        FakeDevices(*fakes),
        [empty_table(geometry, num_pages, policy)] * num_replicas,
    )


def _check_plan(plan: StepPlan) -> None:
    """A plan must fit its bucket, and no request or page may occur in it twice."""
    bucket, rows = plan.bucket, plan.rows
    assert 0 < len(rows) <= bucket.rows
    assert sum(row.length for row in rows) <= bucket.tokens
    assert max(len(row.attention_pages) for row in rows) <= bucket.pages
    assert len({row.request_id for row in rows}) == len(rows)
    assert len({row.slot for row in rows}) == len(rows)
    assert len(set(plan.clear_pages)) == len(plan.clear_pages)
    assert 0 not in plan.clear_pages
    for row in rows:
        assert row.length >= 1
        if row.tokens is None:
            assert row.length == 1
        else:
            assert len(row.tokens) == row.length
        if bucket.kind == "decode":
            assert row.length == 1


def _advance(state: int, token: int) -> int:
    return (state * 1_000_003 + token + 1) % _MODULUS


def _sample(state: int, seen: Sequence[int], seed: int) -> int:
    """A token below `EOS` that depends on all its arguments."""
    attended = sum(position * token for position, token in enumerate(seen, start=1))
    return (state * 31 + attended * 17 + seed * 7 + len(seen)) % _MODULUS % EOS
