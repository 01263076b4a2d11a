"""Host time of whole steps: planning, packing, commit."""

from __future__ import annotations

import gc
import random
import statistics

import numpy as np
from host_bench.clock import Clock
from host_bench.report import Bound, Result

from k3jax.config import EngineConfig
from k3jax.inputs import EXPORT_TOKENS
from serving import scheduler
from serving.cache_options import cache_policy
from serving.packing import pack_plan
from serving.page_table import PageGeometry, empty_table
from serving.plan import StepPlan, StepResult
from serving.request import Request, SamplingParams
from serving.scheduler import Limits, SchedulerState

VOCAB_SIZE = 50021
# Kimi K3 on eight ranks with a bf16 latent (cache-semantics.md section 1).
K3_PAGES = PageGeometry(
    page_tokens=768,
    unit_tokens=128,
    token_bytes=1152,
    state_bytes=814080,
    num_positions=24,
    num_state_pages=3,
    num_state_layers=69,
)


def decoding(num_rows: int, num_steps: int, seed: int, now: Clock) -> Result:
    """Host time of a decoding step: plan, packing, and the commit of the step before, as the engine
    does them with one step in flight. The cache is on, with the server's defaults."""
    state, limits = _decoding_state(num_rows, num_steps, seed)
    times: dict[str, list[float]] = {"plan": [], "pack": [], "commit": []}
    state, before = scheduler.plan(state, limits)
    gc.collect()
    gc.freeze()
    for _ in range(num_steps):
        start = now()
        state, step = scheduler.plan(state, limits)
        planned = now()
        assert step is not None
        assert before is not None
        pack_plan(step, K3_PAGES.num_state_pages, num_rows)
        packed = now()
        result = _any_result(before)
        committing = now()
        state, _ = scheduler.commit(state, result)
        done = now()
        for part, taken in (
            ("plan", planned - start), ("pack", packed - planned), ("commit", done - committing)
        ):  # fmt: skip
            times[part].append(taken / 1e3)
        before = step
    gc.unfreeze()
    parts = {part: {"ours": statistics.median(values)} for part, values in times.items()}
    return Result(
        case=f"step/{num_rows}_rows",
        unit="us",
        shapes={"rows": num_rows, "page_tokens": K3_PAGES.page_tokens, "steps": num_steps},
        samples={"ours": [sum(values) for values in zip(*times.values(), strict=True)]},
        parts=parts,
        bound=Bound("at most", 1000.0, "goal") if num_rows <= 256 else None,
    )


def _decoding_state(num_rows: int, num_steps: int, seed: int) -> tuple[SchedulerState, Limits]:
    """A scheduler whose rows all decode, each somewhere in its pages."""
    rng = random.Random(seed)
    engine = EngineConfig(
        max_rows=num_rows,
        max_context_tokens=16384,
        max_prefill_tokens=8192,
        max_prefill_rows=min(num_rows, 16),
    )
    longest = 8000
    num_pages = 1 + num_rows * (
        K3_PAGES.request_pages(longest + num_steps) + 2 * K3_PAGES.num_state_pages
    )
    limits = scheduler.make_limits(engine, K3_PAGES, num_pages=num_pages, vocab_size=VOCAB_SIZE)
    policy = cache_policy(
        K3_PAGES,
        is_enabled=True,
        hash_block_size=None,
        state_retention="semantic",
        keep_answer_end=True,
        export_tokens=EXPORT_TOKENS,
    )
    state = scheduler.initial_state(empty_table(K3_PAGES, num_pages, policy), limits)
    for number in range(num_rows):
        prompt = tuple(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(100, longest)))
        request = Request(
            request_id=f"r{number}",
            prompt=prompt,
            sampling=SamplingParams(seed=number, max_tokens=8192),
            eos_token_ids=(),
        )
        state = scheduler.submit(state, limits, request)
        # One after the other, so that the queue stays short.
        while state.waiting or any(
            row.computed < row.prefill_end for row in state.running.values()
        ):
            state, step = scheduler.plan(state, limits)
            assert step is not None
            state, _ = scheduler.commit(state, _any_result(step))
    return state, limits


def _any_result(step: StepPlan) -> StepResult:
    count = len(step.rows)
    return StepResult(
        step_id=step.step_id, tokens=np.full(count, 7, np.int32), finite=np.ones(count, np.bool_)
    )
