"""Scheduler and device together: whatever the company, a request's tokens equal those of its solo
run."""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.buckets import bucket_table
from k3jax.cache_spec import cache_spec
from k3jax.compile import CompileCounter
from k3jax.config import EngineConfig
from k3jax.paged_model import PagedModel
from k3jax.step import serving_step
from serving.page_table.alignment import PageGeometry, align
from serving.request import Request, SamplingParams
from serving.scheduler import make_limits
from tests import tiny
from tests.fakes import SchedulerDriver
from tests.models import StepExecutor, open_model, program_of

CFG = tiny.short_config()
ENGINE = EngineConfig(
    dtype="float32", max_rows=4, max_context_tokens=120, max_prefill_tokens=64, max_prefill_rows=2
)
NUM_PAGES = 26
PROMPT_LENGTHS = (1, 7, 39, 40, 41, 64, 65, 90)


@functools.cache
def geometry() -> PageGeometry:
    return align(cache_spec(CFG, tp=1, dtype="float32"), unit_tokens=8, kernel_tokens=8)


@functools.cache
def model() -> PagedModel:
    program = program_of(CFG, page_tokens=geometry().page_tokens, num_pages=NUM_PAGES)
    buckets = bucket_table(ENGINE, page_tokens=geometry().page_tokens)
    return open_model(program, buckets, make_step=serving_step)


def driver(num_pages: int = NUM_PAGES) -> SchedulerDriver:
    """A server whose scheduler may use only some of the pool's pages."""
    limits = make_limits(ENGINE, geometry(), num_pages=num_pages, vocab_size=CFG.vocab_size)
    return SchedulerDriver(limits, StepExecutor(model()), geometry(), num_pages)


def request(index: int, *, temperature: float = 0.0, max_tokens: int = 12) -> Request:
    rng = np.random.default_rng(100 + index)
    length = PROMPT_LENGTHS[index]
    return Request(
        request_id=f"r{index}",
        prompt=tuple(int(t) for t in rng.integers(0, CFG.vocab_size, length)),
        sampling=SamplingParams(
            temperature=temperature, top_k=20, top_p=0.9, seed=index, max_tokens=max_tokens
        ),
        eos_token_ids=(),
    )


@functools.cache
def solo(index: int, temperature: float, max_tokens: int = 12) -> tuple[int, ...]:
    alone = driver()
    alone.submit(request(index, temperature=temperature, max_tokens=max_tokens))
    alone.finish()
    return alone.tokens(f"r{index}")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_eight_requests_together_equal_their_solo_runs(temperature: float) -> None:
    together = driver()
    free = together.state.table.num_free
    for index in range(len(PROMPT_LENGTHS)):
        together.submit(request(index, temperature=temperature))
    together.finish(lookahead=1)
    for index in range(len(PROMPT_LENGTHS)):
        assert together.tokens(f"r{index}") == solo(index, temperature)
        assert together.finish_reason(f"r{index}") == "length"
    assert together.state.table.num_free == free


def test_solo_runs_are_not_trivial() -> None:
    runs = {solo(index, 0.0) for index in range(len(PROMPT_LENGTHS))}
    assert len(runs) == len(PROMPT_LENGTHS)
    assert solo(5, 1.0) != solo(5, 0.0)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_kf_c13_preempted_requests_equal_their_solo_runs(temperature: float) -> None:
    # Two requests of 40 tokens that grow by 70: each needs three pages and its states in the end.
    pages = 1 + 2 * geometry().num_state_pages + 4
    crowded = driver(pages)
    for index in (3, 4):
        crowded.submit(request(index, temperature=temperature, max_tokens=70))
    crowded.finish(lookahead=1)
    assert crowded.state.num_preemptions > 0
    for index in (3, 4):
        assert crowded.tokens(f"r{index}") == solo(index, temperature, 70)


def test_kf_k09_a_request_with_nan_logits_ends_alone_and_its_pages_are_clean_again() -> None:
    four = driver()
    for index in (1, 2, 3, 4):
        four.submit(request(index))
    for _ in range(6):
        four.step()
    victim = four.state.table.owners["r2"]
    nan = jnp.full_like(model().pool[:, :, jnp.array(victim.running_state)], 0xFFFF)
    model().pool = model().pool.at[:, :, jnp.array(victim.running_state)].set(nan)
    four.finish(lookahead=1)
    assert four.finish_reason("r2") == "error"
    error = four.outputs["r2"][-1].error
    assert error is not None
    assert error.status == "INTERNAL"
    assert four.tokens("r2") == solo(2, 0.0)[: len(four.tokens("r2"))]
    for index in (1, 3, 4):
        assert four.tokens(f"r{index}") == solo(index, 0.0)
    four.submit(request(2))
    four.finish()
    assert four.tokens("r2") == solo(2, 0.0)


def test_kf_v20_a_mixed_workload_compiles_nothing() -> None:
    warm = driver()
    warm.submit(request(0))
    warm.finish()
    counter = CompileCounter()
    mixed = driver(14)
    for index in range(len(PROMPT_LENGTHS)):
        mixed.submit(request(index, temperature=float(index % 2), max_tokens=3 + 3 * index))
        mixed.step()
        if index == 4:
            mixed.abort("r3")
    mixed.finish(lookahead=1)
    assert counter.count == 0
