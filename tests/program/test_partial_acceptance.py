"""What the pool holds after some drafts were taken is what decoding a token at a time leaves.

Four rows whose numbers of taken drafts differ, two verifications one after the other: KDA states
and convolution windows, the target's entries and those of a draft model (KF-S02, S03, S05).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest

from k3jax.buckets import Bucket
from k3jax.cache_spec import cache_spec
from k3jax.draft.config import DraftConfig
from k3jax.paged_model import PagedModel
from k3jax.step import serving_step
from tests import tiny
from tests.models import Row, open_model, program_of, relative_error, start_plans
from tests.unit.test_draft_config import SMALL_MLA

CFG = tiny.tiny_config()
DRAFT = DraftConfig.from_hf(SMALL_MLA | {"target_layer_ids": [0, 2, 4]})
SPEC = cache_spec(CFG, tp=1, dtype="float32", draft=DRAFT)
GROUPS = SPEC.recurrent_groups
NUM_DRAFTS, PAGE = 3, 40
NUM_POSITIONS = len(CFG.mla_layers) + SPEC.draft_positions
# A window that is not full yet; a block that crosses a page's edge, or begins or ends at one.
LENGTHS = (1, 38, 40, 76)
PREFILL = Bucket("prefill", sum(LENGTHS), 4, 3)
DECODE = Bucket("decode", 4, 4, 3)
VERIFY = Bucket("decode", 4 * (1 + NUM_DRAFTS), 4, 3)
SOURCES = ((13, 14), (15, 16), (17, 18), (19, 20))  # states after the prompts, only read
ROWS = [
    Row(
        np.random.default_rng(length).integers(0, CFG.vocab_size, length),
        attention=(3 * slot + 1, 3 * slot + 2, 3 * slot + 3),
        states=(21 + 2 * slot, 22 + 2 * slot),
        slot=slot,
    )
    for slot, length in enumerate(LENGTHS)
]


class Kept(NamedTuple):
    """What a row's pages hold.

    Attributes:
      states, windows: by KDA layer.
      entries: by layer position, the target's and then the draft's, and token.
    """

    states: np.ndarray
    windows: np.ndarray
    entries: np.ndarray


@functools.cache
def model() -> PagedModel:
    program = program_of(CFG, page_tokens=PAGE, num_pages=30, draft=DRAFT, num_drafts=NUM_DRAFTS)
    return open_model(program, [PREFILL, DECODE, VERIFY], make_step=serving_step)


def newest() -> list[int]:
    """The token that each row drew last."""
    return np.asarray(model()._buffers.tokens)[: len(ROWS), 0].tolist()


def pool() -> np.ndarray:
    return np.array(model().pool)


@functools.cache
def decoded() -> tuple[list[np.ndarray], list[list[int]]]:
    """The pool after each number of decoded tokens, and each row's tokens behind its prompt."""
    prompts = [
        dataclasses.replace(row, states=source).plan(0, len(row.tokens))
        for row, source in zip(ROWS, SOURCES, strict=True)
    ]
    start_plans(model(), PREFILL, prompts)
    pools, tokens = [pool()], [newest()]
    for step in range(2 * (1 + NUM_DRAFTS)):
        plans = []
        for row, source in zip(ROWS, SOURCES, strict=True):
            start = len(row.tokens) + step
            plan = dataclasses.replace(row, tokens=np.zeros(start + 1, int)).plan(start, start + 1)
            source = row.states if step else source
            plans.append(plan._replace(tokens=None, state_source=source))
        start_plans(model(), DECODE, plans)
        pools.append(pool())
        tokens.append(newest())
    return pools, np.transpose(tokens).tolist()


def numbers(words: np.ndarray) -> np.ndarray:
    """The float32 numbers whose high and low halves stand one after the other."""
    high, low = np.split(words.astype(np.uint32), 2, axis=-1)
    return (high << 16 | low).view(np.float32)


def kept(words: np.ndarray, row: Row, length: int) -> Kept:
    """What the pool holds of a row's first `length` tokens."""
    layout = model().program.layout
    by_layer = {}
    for group, page in zip(GROUPS, row.states, strict=True):
        for position, layer in enumerate(group.layers):
            state, window, _ = np.split(
                words[0, position, page].reshape(-1),
                [layout.state_words, layout.state_words + layout.conv_words],
            )
            by_layer[layer] = numbers(state), numbers(window)
    states, windows = zip(*(by_layer[layer] for layer in CFG.kda_layers), strict=True)
    place = np.arange(length)
    pages = np.array(row.attention)[place // PAGE]
    entries = numbers(words[0, :NUM_POSITIONS, pages, place % PAGE])
    return Kept(np.stack(states), np.stack(windows), entries.swapaxes(0, 1))


def check(got: Kept, want: Kept) -> None:
    """The numbers are those of decoding: bit by bit up to the first attention, whose sums run in
    another order when several tokens are verified."""
    before = sum(layer < CFG.mla_layers[0] for layer in CFG.kda_layers)
    assert 0 < before < len(CFG.kda_layers)
    np.testing.assert_array_equal(got.states[:before], want.states[:before])
    np.testing.assert_array_equal(got.windows[:before], want.windows[:before])
    np.testing.assert_array_equal(got.entries[0], want.entries[0])
    assert relative_error(got.states, want.states) < 1e-6
    assert relative_error(got.windows, want.windows) < 1e-6
    for position in range(NUM_POSITIONS):
        error = relative_error(got.entries[position], want.entries[position])
        assert error < (1e-6 if position < len(CFG.mla_layers) else 2e-6)


def verify(taken: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Verify drafts of which each row takes as many as `wanted` says.

    Args:
      taken: tokens of each row behind its prompt that the pool holds.

    Returns:
      The same after the step.
    """
    pools, tokens = decoded()
    before, plans = pool(), []
    for row, source, start, number in zip(ROWS, SOURCES, taken, wanted, strict=True):
        right = tokens[row.slot][start : start + 1 + NUM_DRAFTS]
        tried = [t if i <= number else (t + 1) % CFG.vocab_size for i, t in enumerate(right)]
        known = np.array([*row.tokens, *tokens[row.slot][:start], *tried])
        plan = dataclasses.replace(row, tokens=known).plan(len(row.tokens) + start, len(known))
        plan = plan._replace(num_drafts=NUM_DRAFTS)
        plans.append(plan._replace(state_source=row.states if start else source))
    start_plans(model(), VERIFY, plans)
    after = pool()
    ends = tuple(start + 1 + number for start, number in zip(taken, wanted, strict=True))
    assert newest() == [tokens[row.slot][end] for row, end in zip(ROWS, ends, strict=True)]
    num_target = len(CFG.mla_layers)
    for row, plan, end in zip(ROWS, plans, ends, strict=True):
        length = len(row.tokens) + end
        check(kept(after, row, length), kept(pools[end], row, length))
        # Below, what may differ from the pool before the step is taken out of the comparison.
        for group, page in zip(GROUPS, row.states, strict=True):
            after[0, : len(group.layers), page] = before[0, : len(group.layers), page]
        for place in range(plan.start, plan.start + plan.length):
            page, offset = row.attention[place // PAGE], place % PAGE
            written = num_target if place >= length else NUM_POSITIONS
            after[0, :written, page, offset] = before[0, :written, page, offset]
    np.testing.assert_array_equal(after, before)
    return ends


@pytest.mark.parametrize("first", range(1 + NUM_DRAFTS))
def test_kf_s02_partly_taken_drafts_leave_what_decoding_leaves(first: int) -> None:
    """Row `i` takes `first + i` drafts, modulo one more than there are, and then one more."""
    pools, _ = decoded()
    model().pool = jax.device_put(pools[0], model().pool.sharding)
    taken = (0,) * len(ROWS)
    for turn in range(2):
        wanted = tuple((first + turn + row.slot) % (1 + NUM_DRAFTS) for row in ROWS)
        taken = verify(taken, wanted)
