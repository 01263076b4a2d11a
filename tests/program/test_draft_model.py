"""A draft model in the serving loop: its proposals are the oracle's, and change no token."""

from __future__ import annotations

import functools
from collections.abc import Iterable

import numpy as np
import pytest

from k3jax.buckets import Bucket, bucket_table
from k3jax.cache_spec import cache_spec
from k3jax.config import DraftSampling, EngineConfig
from k3jax.draft.config import DraftConfig
from k3jax.paged_model import PagedModel
from k3jax.step import serving_step
from serving.page_table.alignment import PageGeometry, align
from serving.request import Request, SamplingParams
from serving.scheduler import make_limits
from serving.scheduler.state import preempt
from tests import draft_oracle, oracle, tiny
from tests.fakes import SchedulerDriver
from tests.models import Row, StepExecutor, open_model, program_of, start_plans
from tests.unit.test_draft_config import SMALL_GQA, SMALL_MLA

CFG = tiny.tiny_config(linear_attn_config={"short_conv_kernel_size": 3})
NUM_DRAFTS, NUM_PAGES, MAX_TOKENS = 3, 26, 24
TAPS = (0, 2, 4)
DRAFTS = {
    "mla": SMALL_MLA | {"target_layer_ids": list(TAPS), "rope_theta": 100.0},
    "mla-mixture": SMALL_MLA | {"target_layer_ids": [0, 1, 4], "tap_mode": "mixture"},
    "gqa": SMALL_GQA,
}
LENGTHS = (1, 39, 41, 64, 65)
# Also those of `test_partial_acceptance`, which then finds their programs in the cache.
PREFILL, VERIFY = Bucket("prefill", 155, 4, 3), Bucket("decode", 4 * (1 + NUM_DRAFTS), 4, 3)


@functools.cache
def draft_config(name: str) -> DraftConfig:
    cfg = DraftConfig.from_hf(DRAFTS[name])
    cfg.check_target(CFG)
    return cfg


@functools.cache
def geometry(name: str | None, tp: int) -> PageGeometry:
    draft = draft_config(name) if name else None
    return align(
        cache_spec(CFG, tp=1, dtype="float32", draft=draft), unit_tokens=8, kernel_tokens=8
    )


def engine(name: str | None) -> EngineConfig:
    return EngineConfig(
        dtype="float32", max_rows=4, max_context_tokens=100, max_prefill_tokens=64,
        max_prefill_rows=2, num_drafts=NUM_DRAFTS if name else 0,
    )  # fmt: skip


def model(name: str | None, tp: int, sampling: DraftSampling = "greedy") -> PagedModel:
    program = program_of(
        CFG, page_tokens=geometry(name, tp).page_tokens, num_pages=NUM_PAGES, tp=tp,
        draft=draft_config(name) if name else None, num_drafts=NUM_DRAFTS if name else 0,
        draft_sampling=sampling,
    )  # fmt: skip
    buckets = bucket_table(engine(name), page_tokens=geometry(name, tp).page_tokens)
    return open_model(program, buckets, make_step=serving_step)


@functools.cache
def answers(name: str | None, tp: int) -> list[tuple[int, ...]]:
    """Greedy tokens of all requests, served together."""
    return serve(name, model(name, tp), geometry(name, tp), range(len(LENGTHS)), temperature=0.0)


def serve(
    name: str | None,
    paged: PagedModel,
    pages: PageGeometry,
    requests: Iterable[int],
    *,
    temperature: float,
    preempt_after: int = 0,
) -> list[tuple[int, ...]]:
    """Tokens of some requests, served together; the last one is preempted after so many."""
    limits = make_limits(
        engine(name), pages, num_pages=NUM_PAGES, vocab_size=CFG.vocab_size, drafter="device"
    )
    driver = SchedulerDriver(limits, StepExecutor(paged), pages, NUM_PAGES)
    requests = list(requests)
    for index in requests:
        length = LENGTHS[index]
        prompt = np.random.default_rng(index).integers(0, CFG.vocab_size, length).tolist()
        driver.submit(
            Request(
                request_id=f"r{index}", prompt=tuple(prompt), eos_token_ids=(),
                sampling=SamplingParams(temperature=temperature, seed=index, max_tokens=MAX_TOKENS),
            )
        )  # fmt: skip
    if preempt_after:
        last = f"r{requests[-1]}"
        while len(driver.tokens(last)) < preempt_after:
            driver.step()
        driver.state = preempt(driver.state, last)
    driver.finish()
    return [driver.tokens(f"r{index}") for index in requests]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "tp"), [("mla", 1), ("mla", 2), ("gqa", 2)])
def test_greedy_tokens_are_those_without_a_draft(name: str, tp: int) -> None:
    assert answers(name, tp) == answers(None, 1)


@functools.cache
def small_model(name: str) -> PagedModel:
    """For steps of a few rows."""
    program = program_of(
        CFG, page_tokens=geometry(name, 1).page_tokens, num_pages=30, draft=draft_config(name),
        num_drafts=NUM_DRAFTS,
    )  # fmt: skip
    return open_model(program, [PREFILL, VERIFY], make_step=serving_step)


def held(paged: PagedModel) -> list[int]:
    """The newest token of the first row, and the drafts behind it."""
    return np.asarray(paged._buffers.tokens)[0].tolist()


def wanted(name: str, tokens: np.ndarray, anchor: int | None = None) -> list[int]:
    """The target's next token, unless it is given, and the drafts behind it, from the oracles."""
    draft, params = draft_config(name), small_model(name)._params
    target = {part: leaves for part, leaves in params.items() if "/" not in part}
    own = {part.removeprefix("draft/"): leaves for part, leaves in params.items() if "/" in part}
    mixtures: list[np.ndarray] = []
    logits, stream = oracle.forward(CFG, target, tokens, mixtures=mixtures)
    anchor = int(logits[-1].argmax()) if anchor is None else anchor
    source = mixtures if draft.tap_mode == "mixture" else stream
    taps = np.concatenate([source[i] for i in draft.tap_layers], axis=1)
    vocab = own["top"] if draft.has_own_vocab else target["top"]
    inputs = [anchor, *[draft.mask_token_id] * (NUM_DRAFTS - 1)]
    embedded = np.asarray(vocab["embed"], np.float64)[inputs]
    hidden = draft_oracle.block(draft, own, taps, embedded)
    base = hidden @ np.asarray(vocab["lm_head"], np.float64).T
    w1, w2 = (np.asarray(own["markov"][key], np.float64) for key in ("w1", "w2"))
    found = [anchor]
    for row in base:
        found.append(int((row + w2 @ w1[found[-1]]).argmax()))
    return found


@pytest.mark.parametrize(
    "name", ["mla", *(pytest.param(n, marks=pytest.mark.slow) for n in ("gqa", "mla-mixture"))]
)
def test_kf_s01_proposals_are_the_oracles_after_a_prompt_and_after_a_verification(
    name: str,
) -> None:
    paged = small_model(name)
    target = {part: leaves for part, leaves in paged._params.items() if "/" not in part}
    states = tuple(range(5, 5 + paged.program.num_recurrent_groups))
    tokens = np.random.default_rng(3).integers(0, CFG.vocab_size, 47).astype(np.int32)
    first = Row(tokens, (1, 2, 3), states).plan(0, len(tokens))
    start_plans(paged, PREFILL, [first])
    assert held(paged) == wanted(name, tokens)
    # The target takes none, or some, of drafts that the host names.
    anchor = held(paged)[0]
    for num_right in (0, 2):
        right = [anchor]
        for _ in range(num_right):
            sequence = np.array([*tokens, *right], np.int32)
            right.append(int(oracle.forward(CFG, target, sequence)[0][-1].argmax()))
        drafts = [*right[1:], *[1] * (NUM_DRAFTS - num_right)]
        tried = np.array([*tokens, anchor, *drafts], np.int32)
        plan = Row(tried, (1, 2, 3), states).plan(len(tokens), len(tried))
        start_plans(paged, VERIFY, [plan._replace(num_drafts=NUM_DRAFTS)])
        tokens = np.array([*tokens, *right], np.int32)
        assert held(paged) == wanted(name, tokens)
        anchor = held(paged)[0]


def test_kf_v15_drafts_go_on_behind_a_token_that_was_known_before() -> None:
    paged, groups = small_model("mla"), small_model("mla").program.num_recurrent_groups
    tokens = np.random.default_rng(5).integers(0, CFG.vocab_size, 47).astype(np.int32)
    anchor = (wanted("mla", tokens)[0] + 1) % CFG.vocab_size  # not the likeliest
    row = Row(tokens, (1, 2, 3), tuple(range(5, 5 + groups))).plan(0, len(tokens))
    known = row._replace(samples=False, goes_on=True, following=anchor)
    start_plans(paged, PREFILL, [known])
    assert held(paged) == wanted("mla", tokens, anchor)


def test_kf_s09_a_reused_prefix_brings_the_context_of_the_drafts() -> None:
    paged = small_model("mla")
    page, groups = paged.program.layout.page_tokens, paged.program.num_recurrent_groups
    tokens = np.random.default_rng(4).integers(0, CFG.vocab_size, page + 7).astype(np.int32)
    first = Row(tokens, (1, 2, 3), tuple(range(5, 5 + groups)), slot=1)
    start_plans(paged, PREFILL, [first.plan(0, page)])
    # Another request has the first page and reads the state behind it.
    second = Row(tokens, (1, 10, 11), tuple(range(12, 12 + groups)))
    resumed = second.plan(page, len(tokens))._replace(state_source=first.states)
    start_plans(paged, PREFILL, [resumed])
    assert held(paged) == wanted("mla", tokens)


@pytest.mark.slow
def test_drawn_drafts_keep_greedy_tokens_and_do_not_depend_on_the_company() -> None:
    paged, pages = model("mla", 1, "probabilistic"), geometry("mla", 1)
    everyone = range(len(LENGTHS))
    assert serve("mla", paged, pages, everyone, temperature=0.0) == answers(None, 1)
    together = serve("mla", paged, pages, everyone, temperature=1.0)
    assert together != answers(None, 1)
    for index in (1, 4):
        alone = serve("mla", paged, pages, [index], temperature=1.0)
        assert alone == [together[index]]
        for count in range(1, MAX_TOKENS, 3):
            again = serve("mla", paged, pages, [0, index], temperature=1.0, preempt_after=count)
            assert again == [together[0], together[index]]
