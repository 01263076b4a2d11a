"""A second request goes on from what a first one left: a partly copied attention page and a state
that a prefill step kept on its way."""

from __future__ import annotations

import dataclasses
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.buckets import Bucket
from k3jax.paged_model import PagedModel
from serving.packing import pack_group
from serving.plan import PageCopy, RowPlan, StateExport, StepPlan
from tests import tiny
from tests.fakes import group_of_one
from tests.models import Row, open_model, program_of, relative_error

PAGE = 40
BUCKET = Bucket("prefill", 200, 3, 5)
LENGTH = 170  # of the first request's prompt
TOLERANCE = 1e-5  # float32 rounding of sums of another order
NAN_WORD = 0xFFFF  # a NaN in bfloat16, and in both halves of a float32

CFG = tiny.tiny_config()
TOKENS = np.random.default_rng(5).integers(0, CFG.vocab_size, LENGTH).astype(np.int32)
FIRST = Row(TOKENS, attention=(1, 2, 3, 4, 19), states=(5, 6))
BUNDLE = (7, 8)  # where the kept state goes
OTHER = Row(TOKENS[::-1], attention=(9, 10), states=(11, 12), slot=1)
SECOND_STATES = (13, 14)
SECOND_PAGES = (15, 16, 17, 18, 20)


@functools.cache
def model() -> PagedModel:
    return open_model(program_of(CFG, page_tokens=PAGE, num_pages=21), [BUCKET])


def poison_pool() -> None:
    """Fill every page with NaN."""
    model().pool = jnp.full_like(model().pool, NAN_WORD)


def step(
    *rows: RowPlan, clear: tuple[int, ...] = (), copies: tuple[PageCopy, ...] = ()
) -> list[np.ndarray]:
    """Logits of each row of one step."""
    plan = StepPlan(step_id=0, bucket=BUCKET, rows=rows, clear_pages=clear, copies=copies)
    model().clear([clear])
    model().copy([copies])
    program = model().program
    packed = pack_group(group_of_one(plan), program.num_recurrent_groups, program.max_rows)
    (logits,) = np.asarray(model().run(BUCKET, packed))
    ends = np.cumsum([row.length for row in rows])
    return np.split(logits[: ends[-1]], ends[:-1])


def prefill_first(start: int, end: int, *, export: StateExport | None) -> list[np.ndarray]:
    """The first request's prompt to `end`, the tokens from `start` on beside another request."""
    poison_pool()
    step(FIRST.plan(0, start or 1), clear=FIRST.attention)
    beside = OTHER.plan(0, 45)
    return step(FIRST.plan(start, end)._replace(export=export), beside, clear=OTHER.attention)


@functools.cache
def cold() -> np.ndarray:
    poison_pool()
    (logits,) = step(FIRST.plan(0, LENGTH), clear=FIRST.attention)
    return logits


@pytest.mark.parametrize(
    ("start", "position", "end"), [(0, 64, 149), (0, 128, 149), (40, 104, 149), (0, 64, 65)]
)
def test_kf_c06_pages_of_40_tokens_and_states_kept_every_64_are_told_apart(
    start: int, position: int, end: int
) -> None:
    want = cold()
    without, _ = prefill_first(start, end, export=None)
    first, other = prefill_first(start, end, export=StateExport(position, BUNDLE))
    np.testing.assert_array_equal(first, without)
    assert np.isfinite(other).all()
    before = np.asarray(model().pool)

    inside, valid = divmod(position, PAGE)
    shared = FIRST.attention[:inside]
    second = Row(TOKENS, attention=(*shared, *SECOND_PAGES[inside:]), states=BUNDLE, slot=2)
    resumed = second.plan(position, 165)._replace(state_target=SECOND_STATES)
    # The copied page is not cleared: the row overwrites what it holds behind the copy.
    copy = PageCopy(FIRST.attention[inside], SECOND_PAGES[inside], valid)
    (ahead,) = step(resumed, clear=SECOND_PAGES[inside + 1 :], copies=(copy,))
    assert relative_error(ahead, want[position:165]) <= TOLERANCE
    changed = (np.asarray(model().pool) != before).any(axis=(0, 1, 3, 4))
    assert set(np.flatnonzero(changed)) == {*SECOND_PAGES[inside:], *SECOND_STATES}

    behind, goes_on = step(
        dataclasses.replace(second, states=SECOND_STATES).plan(165, LENGTH),
        FIRST.plan(end, end + 1),
    )
    assert relative_error(behind, want[165:]) <= TOLERANCE
    assert relative_error(goes_on, want[end : end + 1]) <= TOLERANCE


def test_a_step_without_an_export_leaves_all_other_pages_alone() -> None:
    prefill_first(0, 149, export=None)
    pool = np.asarray(model().pool)
    written = [*FIRST.attention, *FIRST.states, *OTHER.attention, *OTHER.states]
    others = [page for page in range(pool.shape[2]) if page not in written]
    assert (pool[:, :, others] == NAN_WORD).all()
    prefill_first(0, 149, export=StateExport(64, BUNDLE))
    changed = (np.asarray(model().pool) != pool).any(axis=(0, 1, 3, 4))
    np.testing.assert_array_equal(np.flatnonzero(changed), BUNDLE)


def test_a_page_that_is_cleared_and_copied_onto_holds_the_copy_and_zeros() -> None:
    prefill_first(0, 149, export=None)
    source, target = FIRST.attention[0], SECOND_PAGES[0]
    step(FIRST.plan(149, LENGTH), clear=(target,), copies=(PageCopy(source, target, 10),))
    pool = np.asarray(model().pool)
    np.testing.assert_array_equal(pool[:, :, target, :10], pool[:, :, source, :10])
    assert not pool[:, :, target, 10:].any()
    assert pool[:, :, target, :10].any()
