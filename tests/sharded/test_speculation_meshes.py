"""Drafts with reused prefixes on meshes: greedy tokens are those without (KF-S09, KF-S10)."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
import pytest

from k3jax.buckets import Bucket
from k3jax.cache_spec import cache_spec
from k3jax.config import EngineConfig
from k3jax.draft.config import DraftConfig
from k3jax.step import serving_step
from serving.executor import Executor
from serving.page_table import CachePolicy, PageGeometry, align, empty_table
from serving.request import Request, SamplingParams
from serving.scheduler import make_limits
from tests import tiny
from tests.fakes import ReplicasDriver
from tests.models import open_model, program_of
from tests.unit.test_draft_config import SMALL_MLA

pytestmark = pytest.mark.slow

CFG = tiny.tiny_config(num_experts=8)
DRAFT = DraftConfig.from_hf(SMALL_MLA | {"target_layer_ids": [0, 2, 4]})
ROWS, NUM_PAGES, NUM_DRAFTS, PREFIX_TOKENS = 3, 26, 3, 44
MESHES = {"tp1": {"tp": 1}, "tp2": {"tp": 2}, "dp2": {"dp": 2}}


def request(name: str, index: int) -> Request:
    """Every second prompt begins with the same prefix."""
    prefix = np.random.default_rng(1).integers(0, CFG.vocab_size, PREFIX_TOKENS)
    own = np.random.default_rng(2 + index).integers(0, CFG.vocab_size, 3 + 5 * index)
    return Request(
        request_id=name,
        prompt=tuple(np.concatenate([prefix[: PREFIX_TOKENS * (index % 2)], own]).tolist()),
        sampling=SamplingParams(
            temperature=0.0,
            seed=index,
            max_tokens=6 + index,
            presence_penalty=-2.0 * (index == 4),
            repetition_penalty=0.5 if index == 5 else 1.0,
        ),
        eos_token_ids=(),
    )


@functools.cache
def answers(mesh: str, drafter: str | None) -> tuple[list[tuple[int, ...]], int, int]:
    """Tokens of all requests, twice over; tokens that were reused; drafts that were taken."""
    sizes = MESHES[mesh]
    draft = DRAFT if drafter == "device" else None
    num_drafts = NUM_DRAFTS if drafter else 0
    spec = cache_spec(CFG, tp=sizes.get("tp", 1), dtype="float32", draft=draft)
    geometry: PageGeometry = align(spec, unit_tokens=8, kernel_tokens=8)
    pages = -(-96 // geometry.page_tokens)
    slots = 1 + num_drafts
    buckets = (Bucket("prefill", 48, 2, pages), Bucket("decode", ROWS * slots, ROWS, pages))
    program = program_of(
        CFG, page_tokens=geometry.page_tokens, num_pages=NUM_PAGES, max_rows=ROWS, draft=draft,
        num_drafts=num_drafts if draft else 0, **sizes,
    )  # fmt: skip
    model = open_model(program, buckets, make_step=serving_step)
    engine = EngineConfig(
        dtype="float32", max_rows=ROWS, max_context_tokens=96, max_prefill_tokens=48,
        max_prefill_rows=2, num_drafts=num_drafts,
    )  # fmt: skip
    limits = make_limits(
        engine, geometry, num_pages=NUM_PAGES, vocab_size=CFG.vocab_size,
        drafter="ngram" if drafter == "ngram" else "device",
    )  # fmt: skip
    limits = dataclasses.replace(limits, buckets=buckets)
    table = empty_table(geometry, NUM_PAGES, CachePolicy(unit_tokens=8))
    driver = ReplicasDriver(limits, Executor(model), [table] * sizes.get("dp", 1))
    names = []
    for again in range(2):
        for index in range(6):
            names.append(f"r{index}-{again}")
            driver.submit(request(names[-1], index))
        driver.finish()
    stats = [state.stats for state in driver.replicas]
    return (
        [driver.tokens(name) for name in names],
        sum(one.hit_tokens for one in stats),
        sum(one.taken_drafts for one in stats),
    )


@pytest.mark.parametrize("drafter", ["device", "ngram"])
@pytest.mark.parametrize("mesh", MESHES)
def test_kf_s10_greedy_tokens_are_those_without_drafts_on_meshes(mesh: str, drafter: str) -> None:
    want, *_ = answers("tp1", None)
    tokens, reused, _ = answers(mesh, drafter)
    assert tokens == want
    assert tokens[:6] == tokens[6:]
    assert reused > PREFIX_TOKENS
