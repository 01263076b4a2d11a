"""Drafts with the trained model on meshes: greedy tokens are those without (KF-S09, KF-S10).

200 prompts whose lengths lie around the edges of prefix units, kept states and pages. They begin
alike in tens, so that prefixes are reused, and pages are so few that requests are preempted. With
`XLA_FLAGS=--xla_backend_optimization_level=2` in the environment it takes half the time.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from k3jax.buckets import Bucket
from k3jax.cache_spec import cache_spec
from k3jax.config import EngineConfig
from k3jax.inputs import EXPORT_TOKENS
from k3jax.paged_model import PagedModel
from k3jax.program import DRAFT_PREFIX
from k3jax.step import serving_step
from k3jax.weights import (
    EMBEDDED_DRAFT,
    EMBEDDED_MODEL,
    load_params,
    read_draft_config,
    read_model_config,
)
from serving.executor import Executor
from serving.page_table import CachePolicy, PageGeometry, align, empty_table
from serving.request import Request, SamplingParams
from serving.scheduler import make_limits, ngram
from sharding.axes import ParallelConfig
from sharding.mesh import make_mesh
from tests.fakes import ReplicasDriver
from tests.models import open_model, program_of

pytestmark = [pytest.mark.slow, pytest.mark.multi]

CFG, DRAFT = read_model_config(EMBEDDED_MODEL), read_draft_config(EMBEDDED_DRAFT)
MESHES = {"tp1": {"tp": 1}, "tp2": {"tp": 2}, "dp2": {"dp": 2}}
ROWS, NUM_DRAFTS, UNIT, CHUNK = 8, 5, 8, 128
NUM_PROMPTS, PROMPTS_ALIKE, MAX_TOKENS = 200, 10, 16
PAGES = {"tp1": 136, "tp2": 72, "dp2": 136}  # tokens
EDGES = (0, UNIT, 2 * UNIT, EXPORT_TOKENS, 72, CHUNK, 136, 144, 272)
LENGTHS = sorted({max(1, edge + offset) for edge in EDGES for offset in (-1, 0, 1)})
MAX_CONTEXT = LENGTHS[-1] + MAX_TOKENS
NUM_PAGES = 26
POLICY = CachePolicy(
    unit_tokens=UNIT, keep_answer_end=True, key_every_unit=True, checkpoint_junctions=True,
    export_tokens=EXPORT_TOKENS,
)  # fmt: skip
Answers = dict[tuple[int, ...], tuple[int, ...]]


@functools.cache
def requests() -> list[Request]:
    """Prompts are pieces of this project's sources."""
    text = b"".join(
        path.read_bytes() for path in sorted(Path(__file__).parents[2].glob("k3jax/*.py"))
    )
    rng = np.random.default_rng(0)
    starts = rng.integers(0, len(text) - MAX_CONTEXT, NUM_PROMPTS // PROMPTS_ALIKE)
    made = []
    for index in range(NUM_PROMPTS):
        start = starts[index // PROMPTS_ALIKE]
        prompt = tuple(text[start : start + LENGTHS[7 * index % len(LENGTHS)]])
        sampling = SamplingParams(
            temperature=0.0, seed=index, max_tokens=1 + 5 * index % MAX_TOKENS
        )
        made.append(
            Request(
                request_id=f"r{index}",
                prompt=prompt,
                sampling=sampling,
                eos_token_ids=CFG.eos_token_ids,
            )
        )
    return made


@functools.cache
def model(mesh: str, has_draft: bool, num_drafts: int) -> tuple[PagedModel, PageGeometry]:
    """The trained model, and its draft if it is to propose."""
    sizes, draft = MESHES[mesh], DRAFT if has_draft else None
    spec = cache_spec(CFG, tp=sizes.get("tp", 1), dtype="float32", draft=draft)
    geometry = align(spec, unit_tokens=UNIT, kernel_tokens=8)
    assert geometry.page_tokens == PAGES[mesh]
    parallel = ParallelConfig()
    params = dict(load_params(EMBEDDED_MODEL, CFG, parallel, make_mesh(parallel), "float32"))
    if draft:
        own = load_params(EMBEDDED_DRAFT, draft, parallel, make_mesh(parallel), "float32")
        params |= {f"{DRAFT_PREFIX}{part}": leaves for part, leaves in own.items()}
    program = program_of(
        CFG, page_tokens=geometry.page_tokens, num_pages=NUM_PAGES, max_rows=ROWS, draft=draft,
        num_drafts=num_drafts if draft else 0, **sizes,
    )  # fmt: skip
    return open_model(
        program, buckets(geometry, num_drafts), make_step=serving_step, params=params
    ), geometry


def buckets(geometry: PageGeometry, num_drafts: int) -> tuple[Bucket, ...]:
    pages = -(-MAX_CONTEXT // geometry.page_tokens)
    return (
        Bucket("decode", ROWS * (1 + num_drafts), ROWS, pages),
        Bucket("prefill", CHUNK // 4, 4, pages),
        Bucket("prefill", CHUNK, 4, pages),
    )


def serve(
    mesh: str, *, has_draft: bool, num_drafts: int, policy: CachePolicy | None
) -> ReplicasDriver:
    """Serve all requests, which come at once."""
    paged, geometry = model(mesh, has_draft, num_drafts)
    engine = EngineConfig(
        dtype="float32", max_rows=ROWS, max_context_tokens=MAX_CONTEXT, max_prefill_tokens=CHUNK,
        max_prefill_rows=4, num_drafts=num_drafts,
    )  # fmt: skip
    limits = make_limits(
        engine, geometry, num_pages=NUM_PAGES, vocab_size=CFG.vocab_size,
        max_waiting_tokens=NUM_PROMPTS * MAX_CONTEXT, drafter="device" if has_draft else "ngram",
    )  # fmt: skip
    limits = dataclasses.replace(limits, buckets=buckets(geometry, num_drafts))
    table = empty_table(geometry, NUM_PAGES, policy)
    driver = ReplicasDriver(limits, Executor(paged), [table] * MESHES[mesh].get("dp", 1))
    for request in requests():
        driver.submit(request)
    driver.finish(max_steps=20_000)
    return driver


@functools.cache
def plain() -> list[tuple[int, ...]]:
    """Tokens of all requests on one device, without drafts and without reuse."""
    driver = serve("tp1", has_draft=False, num_drafts=0, policy=None)
    return [driver.tokens(request.request_id) for request in requests()]


@functools.cache
def answers() -> Answers:
    """What follows each text that a request reaches."""
    found: Answers = {}
    for request, tokens in zip(requests(), plain(), strict=True):
        for end in range(len(tokens)):
            known = (*request.prompt, *tokens[:end])
            if len(found.get(known, ())) < len(tokens) - end:
                found[known] = tokens[end:]
    return found


def right(tokens: Sequence[int], num_drafts: int) -> tuple[int, ...]:
    return answers()[tuple(tokens)][: max(0, num_drafts)]


def wrong(tokens: Sequence[int], num_drafts: int) -> tuple[int, ...]:
    return tuple((token + 1) % CFG.vocab_size for token in right(tokens, num_drafts))


def chance(tokens: Sequence[int], num_drafts: int) -> tuple[int, ...]:
    """Some drafts or none, each right or any token."""
    rng = np.random.default_rng(list(tokens))
    drafts = right(tokens, min(num_drafts, int(rng.integers(NUM_DRAFTS + 1))))
    return tuple(t if rng.random() < 0.7 else int(rng.integers(CFG.vocab_size)) for t in drafts)


DRAFTERS: dict[str, Callable[[Sequence[int], int], tuple[int, ...]] | None] = {
    "dspark": None, "ngram": ngram.propose, "right": right, "wrong": wrong, "random": chance,
}  # fmt: skip


@pytest.mark.timeout(3000)
@pytest.mark.parametrize("drafter", DRAFTERS)
@pytest.mark.parametrize("mesh", MESHES)
def test_kf_s06_greedy_tokens_are_those_without_drafts(
    monkeypatch: pytest.MonkeyPatch, mesh: str, drafter: str
) -> None:
    want, propose = plain(), DRAFTERS[drafter]
    if propose:
        monkeypatch.setattr(ngram, "propose", propose)
    driver = serve(mesh, has_draft=propose is None, num_drafts=NUM_DRAFTS, policy=POLICY)
    different = {
        request.request_id: (len(request.prompt), driver.tokens(request.request_id), tokens)
        for request, tokens in zip(requests(), want, strict=True)
        if driver.tokens(request.request_id) != tokens
    }
    stats = [state.stats for state in driver.replicas]
    tried, taken = sum(s.tried_drafts for s in stats), sum(s.taken_drafts for s in stats)
    print(
        f"{mesh} {drafter}: {sum(map(len, want))} tokens, {len(different)} answers differ; "
        f"{sum(s.hit_tokens for s in stats)} tokens reused, "
        f"{sum(s.num_preemptions for s in driver.replicas)} preemptions, "
        f"{taken} of {tried} drafts taken"
    )
    assert not different
    assert sum(s.hit_tokens for s in stats) > 1000
    assert all(state.num_preemptions > 0 for state in driver.replicas)
    assert (taken == 0) == (drafter == "wrong")
    assert (taken == tried) == (drafter == "right")
