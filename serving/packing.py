"""Turn a `StepPlan` into the one int32 buffer that a step program reads.

Every call makes fresh arrays: JAX may alias a NumPy buffer until the step has run, so none is used
twice (KF-C20).
"""

from __future__ import annotations

import itertools

import numpy as np
from jaxtyping import Int32

from k3jax.inputs import FROM_DEVICE, StepInputs, empty_inputs, pack
from serving.plan import RowPlan, StepPlan


def pack_plan(
    plan: StepPlan, num_recurrent_groups: int, scratch_slot: int
) -> Int32[np.ndarray, " n"]:
    """Pack a plan into the shape of its bucket.

    Rows beyond the plan's are padding: empty in a prefill step; in a decode step one token each,
    which reads and writes the null page 0 and the scratch slot, and samples nothing (KF-C17).

    Args:
      num_recurrent_groups: `G`.
      scratch_slot: entry of the device's token buffer that no request owns.

    Returns:
      A fresh buffer, laid out by `k3jax.inputs.FIELDS`.
    """
    rows, count = plan.rows, len(plan.rows)
    inputs = empty_inputs(plan.bucket, num_recurrent_groups, scratch_slot=scratch_slot)
    _fill_tokens(inputs, plan)
    _fill_attention_pages(inputs, rows)
    inputs.computed[:count] = [row.start for row in rows]
    inputs.slots[:count] = [row.slot for row in rows]
    inputs.state_source[:count] = [row.state_source for row in rows]
    inputs.state_target[:count] = [row.state_target for row in rows]
    inputs.sample[:count] = [row.samples for row in rows]
    inputs.temperature[:count] = [row.sampling.temperature for row in rows]
    inputs.top_k[:count] = [max(0, row.sampling.top_k) for row in rows]
    inputs.top_p[:count] = [row.sampling.top_p for row in rows]
    inputs.seeds[:count] = [row.sampling.seed for row in rows]
    return pack(inputs, plan.bucket, num_recurrent_groups)


def _fill_tokens(inputs: StepInputs, plan: StepPlan) -> None:
    """Token ids, and the offsets that cut them into rows."""
    tokens = [row.tokens if row.tokens is not None else (FROM_DEVICE,) for row in plan.rows]
    flat = list(itertools.chain.from_iterable(tokens))
    inputs.tokens[: len(flat)] = flat
    if plan.bucket.kind == "decode":
        inputs.row_offsets[:] = np.arange(plan.bucket.rows + 1)
        return
    ends = list(itertools.accumulate(len(row) for row in tokens))
    inputs.row_offsets[1 : len(ends) + 1] = ends
    inputs.row_offsets[len(ends) + 1 :] = len(flat)


def _fill_attention_pages(inputs: StepInputs, rows: tuple[RowPlan, ...]) -> None:
    """Each row's pages from the left; the null page after them."""
    lengths_S = np.array([len(row.attention_pages) for row in rows])
    used_SM = np.arange(inputs.attention_pages.shape[1]) < lengths_S[:, None]
    pages = itertools.chain.from_iterable(row.attention_pages for row in rows)
    inputs.attention_pages[: len(rows)][used_SM] = np.fromiter(pages, np.int32)
