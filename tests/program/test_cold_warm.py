"""Cold equals warm: whatever is reused, the logits are those of a run that reuses nothing.

The scheduler, the page table and the real model together, in float32, with NaN in every page that
is free when a step is planned (KF-C01 to KF-C20).
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from k3jax.cache_spec import cache_spec
from k3jax.config import EngineConfig
from k3jax.inputs import EXPORT_TOKENS
from k3jax.paged_model import PagedModel
from serving import page_table, scheduler
from serving.packing import pack_group
from serving.page_table import CachePolicy
from serving.page_table.alignment import PageGeometry, align
from serving.plan import Output, StepPlan, StepResult
from serving.request import Request, SamplingParams
from serving.scheduler import make_limits
from serving.scheduler.state import preempt
from tests import tiny
from tests.fakes import SchedulerDriver, group_of_one
from tests.models import (
    ALONE,
    BATCH,
    DECODE,
    SHARED_PAGE_TOKENS,
    SHARED_PAGES,
    Row,
    StepExecutor,
    open_model,
    program_of,
    relative_error,
    run_rows,
)

CFG = tiny.tiny_config()
UNIT = 8
CHUNK = 128
MAX_TOKENS = 160
NUM_PAGES = SHARED_PAGES
TOLERANCE = 2e-5  # float32 sums in another order
NAN_WORD = 0xFFFF  # a NaN in bfloat16, and in both halves of a float32
BUCKETS = (BATCH, DECODE)
BASE = np.random.default_rng(7).integers(0, CFG.vocab_size, MAX_TOKENS)


@functools.cache
def geometry() -> PageGeometry:
    """Pages of 40 tokens."""
    return align(cache_spec(CFG, tp=1, dtype="float32"), unit_tokens=UNIT, kernel_tokens=8)


PAGE = SHARED_PAGE_TOKENS
POLICY = CachePolicy(
    unit_tokens=UNIT,
    keep_answer_end=True,
    key_every_unit=True,
    checkpoint_junctions=True,
    export_tokens=EXPORT_TOKENS,
)
POLICIES = {
    "server": POLICY,
    "plain": CachePolicy(unit_tokens=UNIT),
    "dense": dataclasses.replace(POLICY, retention_tokens=None, export_tokens=None),
    "pages": CachePolicy(unit_tokens=PAGE, keep_answer_end=True),
}


@functools.cache
def model() -> PagedModel:
    assert geometry().page_tokens == PAGE
    program = program_of(CFG, page_tokens=PAGE, num_pages=NUM_PAGES)
    return open_model(program, [*BUCKETS, ALONE])


@functools.partial(jax.jit, donate_argnums=0)
def _poison(pool: jax.Array, is_free: jax.Array) -> jax.Array:
    return jnp.where(is_free[None, None, :, None, None], jnp.uint16(NAN_WORD), pool)


@functools.cache
def cold(tokens: tuple[int, ...]) -> np.ndarray:
    """Logits of every token of a sequence, computed at once on fresh pages."""
    states = tuple(range(5, 5 + geometry().num_state_pages))
    row = Row(np.array(tokens, np.int32), attention=(1, 2, 3, 4), states=states)
    model().pool = jnp.zeros_like(model().pool)
    (logits,) = run_rows(model(), ALONE, [(row, 0, len(tokens))])
    return logits


class LogitsExecutor(StepExecutor):
    """Runs steps with the program that returns all logits, and samples greedily from them.

    Attributes:
      logits: of each request and position that was computed, the last time that it was.
      num_tokens: computed in all.
    """

    def __init__(self, model: PagedModel):
        super().__init__(model)
        self.logits: dict[tuple[str, int], np.ndarray] = {}
        self.num_tokens = 0
        self._last_token: dict[int, int] = {}
        self._results: dict[int, StepResult] = {}

    def dispatch(self, plan: StepPlan) -> int:
        known = tuple(
            row._replace(tokens=(self._last_token[row.slot],)) if row.tokens is None else row
            for row in plan.rows
        )
        self.model.clear([plan.clear_pages])
        self.model.copy([plan.copies])
        step = group_of_one(dataclasses.replace(plan, rows=known))
        program = self.model.program
        packed = pack_group(step, program.num_recurrent_groups, program.max_rows)
        (logits,) = np.asarray(self.model.run(plan.bucket, packed))
        ends = np.cumsum([row.length for row in known])
        sampled: list[int] = []
        for row, part in zip(known, np.split(logits[: ends[-1]], ends[:-1]), strict=True):
            for position, one in enumerate(part, start=row.start):
                self.logits[row.request_id, position] = one
            sampled.append(int(part[-1].argmax()))
            self._last_token[row.slot] = sampled[-1]
        self.num_tokens += int(ends[-1])
        self._results[plan.step_id] = StepResult(
            step_id=plan.step_id,
            tokens=np.array(sampled, np.int32),
            finite=np.array([bool(np.isfinite(logits[: ends[-1]]).all())] * len(known)),
        )
        return plan.step_id

    def collect(self, handle: int) -> StepResult:
        return self._results.pop(handle)


class Server(SchedulerDriver):
    """A server on the real model whose free pages hold NaN."""

    executor: LogitsExecutor

    def __init__(self, policy: CachePolicy, num_pages: int = NUM_PAGES):
        engine = EngineConfig(
            dtype="float32", max_rows=4, max_context_tokens=MAX_TOKENS, max_prefill_tokens=CHUNK,
            max_prefill_rows=3,
        )  # fmt: skip
        limits = make_limits(engine, geometry(), num_pages=num_pages, vocab_size=CFG.vocab_size)
        limits = dataclasses.replace(limits, buckets=BUCKETS)
        super().__init__(limits, LogitsExecutor(model()), geometry(), num_pages, policy)
        self.requests: dict[str, Request] = {}

    def plan(self) -> StepPlan | None:
        free = [bool(self.state.table.free_bits >> page & 1) for page in range(NUM_PAGES)]
        model().pool = _poison(model().pool, np.array(free))
        return super().plan()

    def ask(self, prompt: tuple[int, ...], max_tokens: int = 3) -> str:
        name = f"r{len(self.requests)}"
        self.requests[name] = Request(
            request_id=name,
            prompt=prompt,
            sampling=SamplingParams(temperature=0.0, seed=0, max_tokens=max_tokens),
            eos_token_ids=(),
        )
        self.submit(self.requests[name])
        return name

    def check_logits(self) -> int:
        """Compare all that was computed with cold runs; returns how many tokens were reused."""
        reused = 0
        finished = [
            n for n in self.requests if self.outputs[n] and self.outputs[n][-1].finish_reason
        ]
        logits = dict(self.executor.logits)
        for name in finished:
            tokens = (*self.requests[name].prompt, *self.tokens(name))
            if self.outputs[name][-1].finish_reason == "length":
                tokens = tokens[:-1]  # the last token is never computed
            want = cold(tokens)
            mine = {p: one for (other, p), one in logits.items() if other == name}
            mine = {p: one for p, one in mine.items() if p < len(tokens)}
            if mine:
                got = np.stack([mine[position] for position in sorted(mine)])
                assert relative_error(got, want[sorted(mine)]) < TOLERANCE, name
            reused += self.outputs[name][-1].cached_tokens
        return reused


def prompt(shared: int, own: int, seed: int) -> tuple[int, ...]:
    """`shared` tokens that all prompts begin with, then `own` ones of this seed."""
    rest = np.random.default_rng(1000 + seed).integers(0, CFG.vocab_size, own)
    return tuple(int(token) for token in (*BASE[:shared], *rest))


EDGES = sorted(
    {
        length + offset
        for length in (UNIT, PAGE - UNIT, PAGE, PAGE + UNIT, EXPORT_TOKENS, 2 * PAGE, CHUNK)
        for offset in (-1, 0, 1)
    }
)


@pytest.mark.parametrize(
    "name",
    ["server", "pages", *(pytest.param(n, marks=pytest.mark.slow) for n in ("plain", "dense"))],
)
def test_kf_c10_every_prefix_length_around_an_edge(name: str) -> None:
    server = Server(POLICIES[name])
    for shared in EDGES:
        first = prompt(shared, 0, 0)
        server.ask(first)
        server.finish()
        server.ask(first)  # again
        server.ask((*first, 1, 2, 3))  # and longer
        server.ask(prompt(shared, 9, shared))
        server.finish()
    assert server.check_logits() > sum(EDGES)  # a good part of what was asked thrice
    assert server.state.table.num_free == NUM_PAGES - 1


def test_hits_and_misses_in_one_batch() -> None:
    server = Server(POLICY)
    server.ask(prompt(81, 0, 0), max_tokens=20)
    server.finish()
    conversation = (*server.requests["r0"].prompt, *server.tokens("r0"))
    server.ask(prompt(0, 33, 1))  # a miss
    server.ask(conversation + prompt(0, 5, 2))  # the next turn
    server.ask(prompt(81, 0, 0))  # a resend
    server.finish()
    assert server.check_logits() > 0
    assert server.outputs["r1"][-1].cached_tokens == 0
    assert server.outputs["r2"][-1].cached_tokens >= 96  # of 101 tokens, inside the answer
    assert server.outputs["r3"][-1].cached_tokens == 80


def test_kf_c19_a_turn_that_parts_inside_a_page_and_then_the_first_one_again() -> None:
    server = Server(POLICY)
    for tokens in (prompt(100, 0, 0), prompt(70, 30, 1), prompt(100, 0, 0)):
        server.ask(tokens)
        server.finish()
    server.check_logits()
    parted, again = (server.outputs[name][-1].cached_tokens for name in ("r1", "r2"))
    assert parted <= 70
    assert again == 99 // UNIT * UNIT


REQUESTS = st.tuples(
    st.sampled_from(EDGES), st.sampled_from([0, 0, 1, 5, 17]), st.integers(0, 2), st.integers(1, 12)
)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), REQUESTS),
        st.tuples(st.sampled_from(["step", "plan", "commit"]), st.none()),
        st.tuples(st.sampled_from(["abort", "retry", "preempt", "evict"]), st.integers(0, 9)),
    ),
    min_size=4,
    max_size=20,
)


@settings(
    max_examples=25, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip
@given(EVENTS, st.sampled_from(sorted(POLICIES)), st.sampled_from([14, 20, NUM_PAGES]))
def test_kf_c13_preemption_abort_and_retry_at_random_points(
    events: list, policy: str, num_pages: int
) -> None:
    server = Server(POLICIES[policy], num_pages)
    for kind, value in (("ask", (PAGE + 1, 0, 0, 4)), *events):
        table = server.state.table
        match kind:
            case "ask":
                shared, own, seed, max_tokens = value
                server.ask(prompt(shared, own, seed), max_tokens)
            case "step":
                server.step()
            case "plan":
                if len(server.state.in_flight) < 2:
                    server.plan()
            case "commit":
                if server.state.in_flight:
                    server.commit()
            case "abort":
                live = [n for n in server.requests if not _is_done(server.outputs[n])]
                for name in live[value : value + 1]:
                    server.abort(name)
            case "retry":
                done = [n for n in server.requests if _is_done(server.outputs[n])]
                for name in done[value : value + 1]:
                    server.ask(server.requests[name].prompt)
            case "preempt":
                for name in [*server.state.running][value : value + 1]:
                    server.state = preempt(server.state, name)
                    scheduler.check_state(server.state, server.limits)
            case "evict":
                pages = [*table.idle][value : value + 1]
                table = page_table.evict(table, pages)
                server.state = dataclasses.replace(server.state, table=table)
    server.finish()
    server.check_logits()
    assert server.state.table.num_free == num_pages - 1


def _is_done(outputs: list[Output]) -> bool:
    return bool(outputs) and outputs[-1].finish_reason is not None


@pytest.mark.parametrize("length", [65, 68, 72])
def test_kf_c07_a_state_kept_inside_a_chunk_is_that_of_its_position(length: int) -> None:
    server = Server(POLICY)
    tokens = prompt(0, length, length)
    server.ask(tokens)
    step = server.step()
    assert step is not None
    (export,) = [row.export for row in step.rows]
    assert export is not None
    assert export.position == (length - 1) // UNIT * UNIT
    server.finish()
    server.ask(tokens)
    server.finish()
    assert server.outputs["r1"][-1].cached_tokens == export.position
    assert server.check_logits() == export.position
