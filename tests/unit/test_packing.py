"""A plan, packed and unpacked again, is what the step program must see."""

from __future__ import annotations

import numpy as np
import pytest

from k3jax.buckets import Bucket
from k3jax.inputs import EXPORT_TOKENS, FROM_DEVICE, GIVEN, spans
from serving.packing import pack_group, pack_plan
from serving.plan import GroupPlan, RowPlan, StateExport, StepPlan
from serving.request import SamplingParams
from tests.fakes import group_of_one

NUM_GROUPS = 2
SCRATCH_SLOT = 9


def unpack(
    packed: np.ndarray, bucket: Bucket, num_groups: int = NUM_GROUPS
) -> dict[str, np.ndarray]:
    """The arrays of a buffer by field name."""
    return {
        field.name: packed[offset : offset + int(np.prod(shape))].view(field.dtype).reshape(shape)
        for field, offset, shape in spans(bucket, num_groups)
    }


def row(
    name: str,
    *,
    slot: int,
    start: int,
    tokens: tuple[int, ...] | None,
    pages: tuple[int, ...],
    samples: bool = True,
    sampling: SamplingParams | None = None,
) -> RowPlan:
    return RowPlan(
        request_id=name,
        slot=slot,
        start=start,
        length=1 if tokens is None else len(tokens),
        tokens=tokens,
        attention_pages=pages,
        state_source=(20 + slot, 30 + slot),
        state_target=(40 + slot, 50 + slot),
        samples=samples,
        sampling=sampling or SamplingParams(seed=1, max_tokens=1),
    )


def plan_of(bucket: Bucket, *rows: RowPlan) -> StepPlan:
    return StepPlan(step_id=0, bucket=bucket, rows=rows, clear_pages=())


PREFILL = plan_of(
    Bucket("prefill", 8, 4, 3),
    row("a", slot=2, start=4, tokens=(11, 12, 13), pages=(5, 6), samples=False),
    row("b", slot=0, start=0, tokens=(21, 22), pages=(7,)),
)
DECODE = plan_of(
    Bucket("decode", 4, 4, 3),
    row("a", slot=2, start=7, tokens=None, pages=(5, 6)),
    row("b", slot=0, start=9, tokens=(22,), pages=(7, 1, 8)),
)


def test_prefill_rows_are_packed_one_after_the_other():
    arrays = unpack(pack_plan(PREFILL, NUM_GROUPS, SCRATCH_SLOT), PREFILL.bucket)
    np.testing.assert_array_equal(arrays["tokens"], [11, 12, 13, 21, 22, 0, 0, 0])
    np.testing.assert_array_equal(arrays["row_offsets"], [0, 3, 5, 5, 5])
    np.testing.assert_array_equal(arrays["computed"], [4, 0, 0, 0])
    np.testing.assert_array_equal(arrays["slots"], [2, 0, SCRATCH_SLOT, SCRATCH_SLOT])
    np.testing.assert_array_equal(arrays["sample"], [0, 1, 0, 0])


def test_decode_rows_have_one_token_each_and_padding_rows_none():
    arrays = unpack(pack_plan(DECODE, NUM_GROUPS, SCRATCH_SLOT), DECODE.bucket)
    np.testing.assert_array_equal(arrays["tokens"], [FROM_DEVICE, 22, 0, 0])
    np.testing.assert_array_equal(arrays["row_offsets"], [0, 1, 2, 2, 2])
    np.testing.assert_array_equal(arrays["computed"], [7, 9, 0, 0])
    np.testing.assert_array_equal(arrays["slots"], [2, 0, SCRATCH_SLOT, SCRATCH_SLOT])
    np.testing.assert_array_equal(arrays["sample"], [1, 1, 0, 0])


@pytest.mark.parametrize("plan", [PREFILL, DECODE], ids=["prefill", "decode"])
def test_kf_c17_padding_points_at_the_null_page(plan: StepPlan):
    arrays = unpack(pack_plan(plan, NUM_GROUPS, SCRATCH_SLOT), plan.bucket)
    for row_idx, planned in enumerate(plan.rows):
        pages = arrays["attention_pages"][row_idx]
        width = len(planned.attention_pages)
        np.testing.assert_array_equal(pages[:width], planned.attention_pages)
        np.testing.assert_array_equal(pages[width:], 0)
    for name in ("attention_pages", "state_source", "state_target"):
        np.testing.assert_array_equal(arrays[name][len(plan.rows) :], 0)


def test_states_keep_their_order_of_groups():
    arrays = unpack(pack_plan(DECODE, NUM_GROUPS, SCRATCH_SLOT), DECODE.bucket)
    np.testing.assert_array_equal(arrays["state_source"][:2], [[22, 32], [20, 30]])
    np.testing.assert_array_equal(arrays["state_target"][:2], [[42, 52], [40, 50]])


def test_sampling_parameters_keep_their_bits():
    sampling = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, seed=2**32 - 1, max_tokens=1)
    bucket = Bucket("decode", 2, 2, 1)
    plan = plan_of(bucket, row("a", slot=0, start=1, tokens=None, pages=(1,), sampling=sampling))
    arrays = unpack(pack_plan(plan, NUM_GROUPS, SCRATCH_SLOT), bucket)
    np.testing.assert_array_equal(arrays["temperature"], np.array([0.7, 0], np.float32))
    np.testing.assert_array_equal(arrays["top_k"], [5, 0])
    np.testing.assert_array_equal(arrays["top_p"], np.array([0.9, 1], np.float32))
    np.testing.assert_array_equal(arrays["seeds"], np.array([2**32 - 1, 0], np.uint32))


def test_what_few_rows_ask_for_goes_to_their_own_places():
    asked = SamplingParams(
        min_p=0.25, presence_penalty=0.5, frequency_penalty=-0.5, repetition_penalty=1.5,
        min_tokens=1, logprobs=0, prompt_logprobs=0, seed=0, max_tokens=1,
    )  # fmt: skip
    plain = row("a", slot=0, start=4, tokens=(1,), pages=(1,))
    prompt = row("b", slot=1, start=0, tokens=(2, 3), pages=(2,), samples=False, sampling=asked)
    prompt = prompt._replace(scored=True, following=9)
    whole = row("c", slot=2, start=0, tokens=(4,), pages=(3,), sampling=asked)
    plan = plan_of(Bucket("prefill", 8, 4, 1), plain, prompt, whole)
    arrays = unpack(pack_plan(plan, NUM_GROUPS, SCRATCH_SLOT), plan.bucket)
    assert arrays["min_p"].tolist() == [0, 0.25, 0.25, 0]
    assert arrays["presence"].tolist() == [0, 0.5, 0.5, 0]
    assert arrays["frequency"].tolist() == [0, -0.5, -0.5, 0]
    assert arrays["repetition"].tolist() == [1, 1.5, 1.5, 1]
    assert arrays["biased"].tolist() == [0, 1, 1, 0]
    assert arrays["logprobs"].tolist() == [0, 0, 1, 0]  # of rows that sample
    assert arrays["scored"].tolist() == [0, 1, 0, 0]
    assert arrays["following"].tolist() == [0, 9, 0, 0]


def test_a_row_that_goes_on_is_given_the_token_behind_it():
    known = row("a", slot=0, start=4, tokens=(1, 2), pages=(1,), samples=False)
    known = known._replace(goes_on=True, following=7)
    other = row("b", slot=1, start=0, tokens=(3,), pages=(2,))
    plan = plan_of(Bucket("prefill", 8, 4, 1), known, other)
    arrays = unpack(pack_plan(plan, NUM_GROUPS, SCRATCH_SLOT), plan.bucket)
    assert arrays["sample"].tolist() == [GIVEN, 1, 0, 0]
    assert arrays["following"].tolist() == [7, 0, 0, 0]


def test_a_negative_top_k_means_no_limit():
    sampling = SamplingParams(top_k=-1, seed=0, max_tokens=1)
    bucket = Bucket("decode", 1, 1, 1)
    plan = plan_of(bucket, row("a", slot=0, start=1, tokens=None, pages=(1,), sampling=sampling))
    assert unpack(pack_plan(plan, NUM_GROUPS, SCRATCH_SLOT), bucket)["top_k"].tolist() == [0]


def test_a_full_bucket_has_no_padding():
    bucket = Bucket("prefill", 5, 2, 2)
    plan = plan_of(bucket, *PREFILL.rows)
    arrays = unpack(pack_plan(plan, NUM_GROUPS, SCRATCH_SLOT), bucket)
    np.testing.assert_array_equal(arrays["tokens"], [11, 12, 13, 21, 22])
    np.testing.assert_array_equal(arrays["row_offsets"], [0, 3, 5])
    np.testing.assert_array_equal(arrays["attention_pages"], [[5, 6], [7, 0]])


def test_a_model_without_recurrent_layers_packs_no_states():
    bucket = Bucket("decode", 1, 1, 1)
    bare = row("a", slot=0, start=1, tokens=None, pages=(1,))._replace(
        state_source=(), state_target=()
    )
    arrays = unpack(pack_plan(plan_of(bucket, bare), 0, SCRATCH_SLOT), bucket, 0)
    assert arrays["state_source"].shape == (1, 0)


def test_exports_are_counted_from_the_row_s_first_token():
    bucket = Bucket("prefill", 200, 4, 3)
    long = tuple(range(130))
    plan = plan_of(
        bucket,
        row("a", slot=1, start=0, tokens=(1, 2), pages=(5,)),
        row("b", slot=2, start=16, tokens=long, pages=(6,))._replace(
            export=StateExport(16 + 2 * EXPORT_TOKENS, (71, 72))
        ),
    )
    arrays = unpack(pack_plan(plan, NUM_GROUPS, SCRATCH_SLOT), bucket)
    np.testing.assert_array_equal(arrays["export_tokens"], [0, 2 * EXPORT_TOKENS, 0, 0])
    np.testing.assert_array_equal(arrays["export_pages"], [[0, 0], [71, 72], [0, 0], [0, 0]])


@pytest.mark.parametrize("position", [0, 16, 40, 16 + EXPORT_TOKENS - 1, 16 + 2 * EXPORT_TOKENS])
def test_kf_c06_an_export_that_no_step_can_make_is_an_error(position: int):
    tokens = tuple(range(2 * EXPORT_TOKENS))
    one = row("a", slot=0, start=16, tokens=tokens, pages=(5,))
    plan = plan_of(Bucket("prefill", 128, 1, 1), one._replace(export=StateExport(position, (7, 8))))
    with pytest.raises(ValueError, match=f"export of 'a' cannot be made: got position {position} "):
        pack_plan(plan, NUM_GROUPS, SCRATCH_SLOT)


def test_a_decode_row_exports_nothing():
    one = row("a", slot=0, start=63, tokens=None, pages=(5,))
    plan = plan_of(Bucket("decode", 1, 1, 1), one._replace(export=StateExport(64, (7, 8))))
    with pytest.raises(ValueError, match="in a decode row of 1 tokens from 63"):
        pack_plan(plan, NUM_GROUPS, SCRATCH_SLOT)


def test_kf_c20_every_step_gets_its_own_buffer():
    first = pack_plan(DECODE, NUM_GROUPS, SCRATCH_SLOT)
    kept = first.copy()
    second = pack_plan(PREFILL, NUM_GROUPS, SCRATCH_SLOT)
    third = pack_plan(DECODE, NUM_GROUPS, SCRATCH_SLOT)
    assert not np.shares_memory(first, third)
    assert not np.shares_memory(first, second)
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(first, third)


def test_replicas_are_packed_one_after_the_other_and_an_idle_one_is_padding():
    group = GroupPlan(step_id=0, bucket=DECODE.bucket, plans=(None, DECODE))
    idle, busy = pack_group(group, NUM_GROUPS, SCRATCH_SLOT)
    np.testing.assert_array_equal(busy, pack_plan(DECODE, NUM_GROUPS, SCRATCH_SLOT))
    arrays = unpack(idle, DECODE.bucket)
    np.testing.assert_array_equal(arrays["slots"], SCRATCH_SLOT)
    np.testing.assert_array_equal(arrays["top_p"], 1)
    np.testing.assert_array_equal(arrays["repetition"], 1)
    for name in arrays.keys() - {"slots", "top_p", "repetition"}:
        assert not arrays[name].any(), name


def test_one_replica_s_group_is_its_plan():
    packed = pack_group(group_of_one(PREFILL), NUM_GROUPS, SCRATCH_SLOT)
    np.testing.assert_array_equal(packed, [pack_plan(PREFILL, NUM_GROUPS, SCRATCH_SLOT)])


def test_kf_c06_a_plan_that_does_not_fit_its_bucket_is_an_error():
    plan = plan_of(Bucket("prefill", 4, 4, 3), *PREFILL.rows)
    with pytest.raises(ValueError, match="could not broadcast"):
        pack_plan(plan, NUM_GROUPS, SCRATCH_SLOT)
