"""A request's logits depend on nothing but the request: general rule 1 of the known failures.

One tiny float32 model, compiled for a few buckets, runs the same sequences in other company, rows,
buckets, pieces and memory.
"""

from __future__ import annotations

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.buckets import Bucket
from k3jax.paged_model import PagedModel
from tests import oracle, tiny
from tests.models import (
    ALONE,
    BATCH,
    DECODE,
    SHARED_PAGE_TOKENS,
    SHARED_PAGES,
    Row,
    open_model,
    program_of,
    relative_error,
    run_rows,
)

PAGE = SHARED_PAGE_TOKENS
DECODE_1 = Bucket("decode", 1, 1, 4)
LENGTHS = (1, PAGE - 1, PAGE, PAGE + 1)
TOLERANCE = 1e-5  # float32 rounding of sums of another order
NAN_WORD = 0xFFFF  # a NaN in bfloat16, and in both halves of a float32

CFG = tiny.tiny_config()


@functools.cache
def model() -> PagedModel:
    program = program_of(CFG, page_tokens=PAGE, num_pages=SHARED_PAGES)
    return open_model(program, [BATCH, ALONE, DECODE, DECODE_1])


@functools.cache
def sequences() -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(11)
    return tuple(rng.integers(0, CFG.vocab_size, n).astype(np.int32) for n in LENGTHS)


def row_of(index: int, tokens: np.ndarray, *, pages: tuple[int, ...] = ()) -> Row:
    """A row on pages of its own; `pages` chooses other ones."""
    own = pages or tuple(range(1 + 4 * index, 5 + 4 * index))
    groups = model().program.num_recurrent_groups
    return Row(tokens, attention=own[:2], states=own[2 : 2 + groups], slot=index)


def clear(*rows: Row) -> None:
    model().clear([[page for row in rows for page in (*row.attention, *row.states)]])


def prefill_alone(tokens: np.ndarray, *, bucket: Bucket = ALONE) -> np.ndarray:
    row = row_of(0, tokens)
    clear(row)
    return run_rows(model(), bucket, [(row, 0, len(tokens))])[0]


def poison_pool() -> None:
    """Fill every page, the null page included, with NaN."""
    model().pool = jnp.full_like(model().pool, NAN_WORD)


def test_batched_prefill_equals_each_row_alone() -> None:
    rows = [row_of(i, tokens) for i, tokens in enumerate(sequences())]
    clear(*rows)
    together = run_rows(model(), BATCH, [(row, 0, len(row.tokens)) for row in rows])
    for tokens, got in zip(sequences(), together, strict=True):
        assert relative_error(got, prefill_alone(tokens)) <= TOLERANCE


def test_kf_m09_prefill_equals_the_uncompiled_oracle() -> None:
    tokens = sequences()[3]
    want, _ = oracle.forward(CFG, tiny.random_params(CFG), tokens)
    assert relative_error(prefill_alone(tokens), want) <= 1e-4


def test_row_order_does_not_matter() -> None:
    parts = [row_of(i, tokens) for i, tokens in enumerate(sequences())]
    clear(*parts)
    forward = run_rows(model(), BATCH, [(row, 0, len(row.tokens)) for row in parts])
    clear(*parts)
    backward = run_rows(model(), BATCH, [(row, 0, len(row.tokens)) for row in parts[::-1]])
    for a, b in zip(forward, backward[::-1], strict=True):
        assert relative_error(a, b) <= TOLERANCE


def test_page_numbers_do_not_matter() -> None:
    tokens = sequences()[3]
    row = row_of(0, tokens, pages=(17, 3, 19, 8))
    clear(row)
    (got,) = run_rows(model(), ALONE, [(row, 0, len(tokens))])
    np.testing.assert_array_equal(got, prefill_alone(tokens))


@pytest.mark.parametrize(
    "pieces",
    [[16, 16, 9], [17, 17, 7], [1, 1, 2, 1, 5, 31], [PAGE, 1], [PAGE - 1, 2]],
    ids=str,
)
def test_kf_m07_any_chunking_equals_one_shot(pieces: list[int]) -> None:
    tokens = sequences()[3]
    row = row_of(1, tokens)
    clear(row)
    ends = np.cumsum(pieces).tolist()
    assert ends[-1] == len(tokens)
    got = [
        run_rows(model(), ALONE, [(row, start, end)])[0]
        for start, end in zip([0, *ends[:-1]], ends, strict=True)
    ]
    assert relative_error(np.concatenate(got), prefill_alone(tokens)) <= TOLERANCE


def test_kf_k08_decode_continues_what_prefill_wrote() -> None:
    tokens = sequences()[3]
    row = row_of(2, tokens)
    clear(row)
    got = list(run_rows(model(), ALONE, [(row, 0, 20)]))
    got += [run_rows(model(), DECODE_1, [(row, t, t + 1)])[0] for t in range(20, len(tokens))]
    assert relative_error(np.concatenate(got), prefill_alone(tokens)) <= TOLERANCE


def test_kf_m09_decode_in_a_full_bucket_equals_decode_alone() -> None:
    tokens = sequences()[3]
    rows = [row_of(i, tokens) for i in range(4)]
    starts = (20, 3, 40, 11)
    clear(*rows)
    for row, start in zip(rows, starts, strict=True):
        run_rows(model(), ALONE, [(row, 0, start)])
    batch = [(row, start, start + 1) for row, start in zip(rows, starts, strict=True)]
    got = run_rows(model(), DECODE, batch)
    want = prefill_alone(tokens)
    for start, logits in zip(starts, got, strict=True):
        assert relative_error(logits, want[start : start + 1]) <= TOLERANCE


def test_kf_c17_a_partly_filled_decode_bucket_leaves_other_pages_alone() -> None:
    tokens = sequences()[3]
    row = row_of(3, tokens)
    clear(row)
    run_rows(model(), ALONE, [(row, 0, 10)])
    before = np.asarray(model().pool)
    run_rows(model(), DECODE, [(row, 10, 11)])
    after = np.asarray(model().pool)
    mine = [*row.attention, *row.states]
    others = [page for page in range(before.shape[2]) if page not in mine]
    np.testing.assert_array_equal(before[:, :, others], after[:, :, others])
    assert (before[:, :, mine] != after[:, :, mine]).any()


@pytest.mark.parametrize("tokens", sequences(), ids=lambda tokens: f"length{len(tokens)}")
def test_kf_c01_old_bytes_of_pages_do_not_matter(tokens: np.ndarray) -> None:
    want = prefill_alone(tokens)
    poison_pool()
    np.testing.assert_array_equal(prefill_alone(tokens), want)


def test_kf_c01_decode_beside_pages_full_of_nan() -> None:
    tokens = sequences()[3]
    want = prefill_alone(tokens)
    poison_pool()
    row = row_of(1, tokens)
    clear(row)
    run_rows(model(), ALONE, [(row, 0, 38)])
    got = [run_rows(model(), DECODE, [(row, t, t + 1)])[0] for t in range(38, len(tokens))]
    assert relative_error(np.concatenate(got), want[38:]) <= TOLERANCE


def test_kf_c02_a_new_request_starts_from_zero_state_even_on_a_dirty_page() -> None:
    tokens = sequences()[1]
    want = prefill_alone(tokens)
    poison_pool()
    row = row_of(0, tokens)
    model().clear([row.attention])  # the state pages stay full of NaN
    (got,) = run_rows(model(), ALONE, [(row, 0, len(tokens))])
    np.testing.assert_array_equal(got, want)


def test_kf_c02_the_same_holds_for_a_first_token_in_the_decode_program() -> None:
    tokens = sequences()[0]
    want = prefill_alone(tokens)
    poison_pool()
    row = row_of(0, tokens)
    model().clear([row.attention])
    (got,) = run_rows(model(), DECODE_1, [(row, 0, 1)])
    assert relative_error(got, want) <= TOLERANCE


def test_kf_m04_tied_router_scores_are_deterministic_and_batch_independent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = {part: dict(leaves) for part, leaves in model()._params.items()}
    params["moe"]["router"] = jnp.zeros_like(params["moe"]["router"])
    monkeypatch.setattr(model(), "_params", params)
    rows = [row_of(i, tokens) for i, tokens in enumerate(sequences())]
    together = run_rows(model(), BATCH, [(row, 0, len(row.tokens)) for row in rows])
    for row, got in zip(rows, together, strict=True):
        want, _ = oracle.forward(CFG, params, row.tokens)
        assert relative_error(got, want) <= 1e-4
