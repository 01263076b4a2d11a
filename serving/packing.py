"""Turn plans into the one int32 buffer that a step program reads.

Every call makes fresh arrays: JAX may alias a NumPy buffer until the step has run, so none is used
twice (KF-C20).
"""

from __future__ import annotations

import itertools

import numpy as np
from jaxtyping import Int32

from k3jax.buckets import Bucket
from k3jax.inputs import EXPORT_TOKENS, FROM_DEVICE, GIVEN, StepInputs, empty_inputs, pack
from serving.plan import GroupPlan, RowPlan, StepPlan


def pack_group(
    plan: GroupPlan, num_recurrent_groups: int, scratch_slot: int
) -> Int32[np.ndarray, "dp n"]:
    """Pack the plan of each replica; see `pack_plan`. One without a plan has padding only."""
    idle = StepPlan(step_id=plan.step_id, bucket=plan.bucket, rows=(), clear_pages=())
    packed = [pack_plan(one or idle, num_recurrent_groups, scratch_slot) for one in plan.plans]
    return packed[0][None] if len(packed) == 1 else np.stack(packed)


def pack_plan(
    plan: StepPlan, num_recurrent_groups: int, scratch_slot: int
) -> Int32[np.ndarray, " n"]:
    """Pack a plan into the shape of its bucket.

    Rows beyond the plan's are padding: empty, so that they read and write nothing (KF-C17).

    Args:
      num_recurrent_groups: `G`.
      scratch_slot: entry of the device's token buffer that no request owns.

    Returns:
      A fresh buffer, laid out by `k3jax.inputs.FIELDS`.

    Raises:
      ValueError: the plan does not fit its bucket, or no step can export a state there.
    """
    inputs = empty_inputs(plan.bucket, num_recurrent_groups, scratch_slot=scratch_slot)
    if plan.rows:
        _fill_rows(inputs, plan, num_recurrent_groups)
    return pack(inputs, plan.bucket, num_recurrent_groups)


def _fill_rows(inputs: StepInputs, plan: StepPlan, num_recurrent_groups: int) -> None:
    count = len(plan.rows)
    # A plan has up to hundreds of rows: one turn from rows to columns, then whole columns.
    _, slots, starts, lengths, tokens, pages, sources, targets, samples, sampling, *_ = zip(
        *plan.rows, strict=True
    )
    _fill_tokens(inputs, lengths, tokens)
    _fill_attention_pages(inputs, pages)
    inputs.computed[:count] = starts
    inputs.slots[:count] = slots
    inputs.state_source[:count] = _matrix(sources, num_recurrent_groups)
    inputs.state_target[:count] = _matrix(targets, num_recurrent_groups)
    inputs.sample[:count] = samples
    _fill_rare(inputs, plan)
    inputs.temperature[:count] = [one.temperature for one in sampling]
    inputs.top_k[:count] = [max(0, one.top_k) for one in sampling]
    inputs.top_p[:count] = [one.top_p for one in sampling]
    inputs.seeds[:count] = [one.seed for one in sampling]
    for index, one in enumerate(sampling):
        if not one.is_plain:
            _fill_special(inputs, index, plan.rows[index])


def _fill_special(inputs: StepInputs, index: int, row: RowPlan) -> None:
    """What few rows ask for."""
    one = row.sampling
    inputs.min_p[index] = one.min_p
    inputs.presence[index] = one.presence_penalty
    inputs.frequency[index] = one.frequency_penalty
    inputs.repetition[index] = one.repetition_penalty
    inputs.biased[index] = one.has_biases
    inputs.masked[index] = one.grammar is not None
    inputs.logprobs[index] = one.logprobs is not None and row.samples
    inputs.scored[index] = row.scored
    inputs.following[index] = row.following


def _fill_tokens(
    inputs: StepInputs, lengths: tuple[int, ...], tokens: tuple[tuple[int, ...] | None, ...]
) -> None:
    """Token ids, and the offsets that cut them into rows."""
    if tokens.count(None) == len(tokens) == sum(lengths):  # the usual decoding step
        inputs.tokens[: len(tokens)] = FROM_DEVICE
        inputs.row_offsets[:] = np.minimum(np.arange(len(inputs.row_offsets)), len(tokens))
        return
    known = [
        (FROM_DEVICE,) * length if row is None else row
        for length, row in zip(lengths, tokens, strict=True)
    ]
    flat = list(itertools.chain.from_iterable(known))
    inputs.tokens[: len(flat)] = flat
    inputs.row_offsets[1:] = len(flat)
    inputs.row_offsets[1 : len(known) + 1] = list(itertools.accumulate(map(len, known)))


def _fill_attention_pages(inputs: StepInputs, pages: tuple[tuple[int, ...], ...]) -> None:
    """Each row's pages from the left; the null page after them."""
    lengths_S = np.array([len(row) for row in pages])
    column_M = np.arange(inputs.attention_pages.shape[1], dtype=np.int32)
    flat = np.fromiter(itertools.chain.from_iterable(pages), np.int32)
    inputs.attention_pages[: len(pages)][column_M < lengths_S[:, None]] = flat


def _fill_rare(inputs: StepInputs, plan: StepPlan) -> None:
    """What few rows of few steps do: go on from a known token, keep a state inside their tokens."""
    for index, row in enumerate(plan.rows):
        if row.goes_on:
            inputs.sample[index] = GIVEN
            inputs.following[index] = row.following
        if row.export is not None:
            inputs.export_tokens[index] = _export_tokens(row, row.export.position, plan.bucket)
            inputs.export_pages[index] = row.export.pages


def _export_tokens(row: RowPlan, position: int, bucket: Bucket) -> int:
    """Tokens of the row in front of the state that it keeps."""
    tokens = position - row.start
    if bucket.kind == "prefill" and 0 < tokens < row.length and tokens % EXPORT_TOKENS == 0:
        return tokens
    raise ValueError(
        f"export of {row.request_id!r} cannot be made: got position {position} in a {bucket.kind} "
        f"row of {row.length} tokens from {row.start}; expected a prefill row and a multiple of "
        f"{EXPORT_TOKENS} tokens strictly inside it"
    )


def _matrix(rows: tuple[tuple[int, ...], ...], width: int) -> Int32[np.ndarray, "S width"]:
    flat = itertools.chain.from_iterable(rows)
    return np.fromiter(flat, np.int32, len(rows) * width).reshape(len(rows), width)
