"""Replicas on real devices: each has pages, states and a token buffer of its own."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from k3jax.buckets import Bucket
from k3jax.cache_spec import cache_spec
from k3jax.config import EngineConfig
from k3jax.paged_model import PagedModel
from k3jax.step import serving_step
from serving.executor import Executor
from serving.page_table import CachePolicy, PageGeometry, align, empty_table
from serving.request import Request, SamplingParams
from serving.scheduler import make_limits
from tests import tiny
from tests.fakes import ReplicasDriver
from tests.models import open_model, program_of

CFG = tiny.tiny_config(num_experts=8)
ENGINE = EngineConfig(
    dtype="float32", max_rows=3, max_context_tokens=96, max_prefill_tokens=48, max_prefill_rows=2
)
NUM_REPLICAS, NUM_PAGES = 2, 26
PREFIX_TOKENS = 44
# What some requests ask for besides, so that replicas differ in it.
ASKED: dict[int, dict[str, Any]] = {
    2: {"presence_penalty": -2.0, "frequency_penalty": 1.2, "min_p": 0.05},
    3: {"repetition_penalty": 0.5, "logprobs": 2},
    4: {"logit_bias": ((5, 4.0),), "min_tokens": 4, "stop_token_ids": tuple(range(0, 160, 3))},
    7: {"prompt_logprobs": 3, "logprobs": 0},
}


@functools.cache
def geometry() -> PageGeometry:
    return align(cache_spec(CFG, tp=1, dtype="float32"), unit_tokens=8, kernel_tokens=8)


@functools.cache
def model() -> PagedModel:
    program = program_of(
        CFG, page_tokens=geometry().page_tokens, num_pages=NUM_PAGES, dp=NUM_REPLICAS,
        max_rows=ENGINE.max_rows,
    )  # fmt: skip
    return open_model(program, buckets(), make_step=serving_step)


def buckets() -> tuple[Bucket, ...]:
    pages = -(-ENGINE.max_context_tokens // geometry().page_tokens)
    return (Bucket("prefill", 48, 2, pages), Bucket("decode", 3, 3, pages))


def driver() -> ReplicasDriver:
    limits = make_limits(ENGINE, geometry(), num_pages=NUM_PAGES, vocab_size=CFG.vocab_size)
    limits = dataclasses.replace(limits, buckets=buckets())
    table = empty_table(geometry(), NUM_PAGES, CachePolicy(unit_tokens=8))
    return ReplicasDriver(limits, Executor(model()), [table] * NUM_REPLICAS)


def request(index: int) -> Request:
    """Prompts of several lengths; every second one begins with the same prefix."""
    prefix = np.random.default_rng(1).integers(0, CFG.vocab_size, PREFIX_TOKENS)
    own = np.random.default_rng(2 + index).integers(0, CFG.vocab_size, 3 + 5 * index)
    return Request(
        request_id=f"r{index}",
        prompt=tuple(np.concatenate([prefix[: PREFIX_TOKENS * (index % 2)], own]).tolist()),
        sampling=SamplingParams(
            temperature=float(index % 3 == 0),
            seed=index,
            max_tokens=6 + index,
            **ASKED.get(index, {}),
        ),
        eos_token_ids=(),
    )


def told(driver: ReplicasDriver, index: int) -> list[float]:
    """All log probabilities that a request was told."""
    outputs = driver.outputs[f"r{index}"]
    places = [one for output in outputs for one in (*output.prompt_logprobs, *output.logprobs)]
    return [number for one in places for number in (one.chosen, *one.top)]


def test_requests_on_two_replicas_equal_their_solo_runs() -> None:
    together = driver()
    places = {together.submit(request(index)) for index in range(8)}
    assert places == {0, 1}
    together.finish()
    expected = []
    for index in range(8):
        alone = driver()
        alone.submit(request(index))
        alone.finish()
        expected.append(alone.tokens(f"r{index}"))
        np.testing.assert_allclose(told(together, index), told(alone, index), atol=1e-4)
        assert bool(told(alone, index)) == (index in (3, 7))
    assert [together.tokens(f"r{index}") for index in range(8)] == expected
    assert len(set(expected)) == 8
    together.submit(dataclasses.replace(request(3), request_id="again"))
    together.finish()
    assert together.tokens("again") == expected[3]
    assert together.outputs["again"][-1].cached_tokens % geometry().page_tokens
    assert sum(state.stats.copied_pages for state in together.replicas) == 1
