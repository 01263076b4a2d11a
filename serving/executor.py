"""The device side of the engine: plans of all replicas in, sampled tokens out.

`dispatch` returns at once; the devices run what was dispatched in order. `collect` waits for one
step's result.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import numpy as np
from jaxtyping import Int32

from k3jax import controls
from k3jax.paged_model import PagedModel
from k3jax.results import StepArrays, TokenLogprobs, unpack, unpack_logprobs
from serving.packing import pack_group
from serving.plan import GroupPlan, GroupResult, RowPlan, StepResult
from serving.processes.repeat import SharedModel

type PlaceLogprobs = tuple[TokenLogprobs, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Handle:
    """A dispatched step whose result is on its way to the host.

    Attributes:
      arrays: log probabilities only if rows ask for them, else None.
    """

    plan: GroupPlan
    arrays: StepArrays


class Executor:
    """Runs step plans on a model that was opened with `serving_step`. Used by one thread."""

    def __init__(self, model: PagedModel | SharedModel):
        self._model = model

    def dispatch(self, plan: GroupPlan) -> Handle:
        """Start a step. Before it, the pages it hands out are cleared, then some are copied, and
        the controls of new requests and the masks of grammars are set."""
        program = self._model.program
        self._model.clear([one.clear_pages if one else () for one in plan.plans])
        self._model.copy([one.copies if one else () for one in plan.plans])
        if any(one.controls for one in plan.plans if one):
            new = [one.controls if one else () for one in plan.plans]
            for call in controls.calls(new, program.max_rows):
                self._model.control(call)
        if any(one.masks for one in plan.plans if one):
            masks = [one.masks if one else () for one in plan.plans]
            for call in controls.mask_calls(masks, program.cfg.vocab_size, program.max_rows):
                self._model.mask(call)
        packed = pack_group(plan, program.num_recurrent_groups, program.max_rows)
        arrays = self._model.run(plan.bucket, packed)
        special = [
            row for one in plan.plans if one for row in one.rows if not row.sampling.is_plain
        ]
        arrays = arrays._replace(
            logprobs=arrays.logprobs if any(map(_tells, special)) else None,
            prompt_logprobs=arrays.prompt_logprobs if any(row.scored for row in special) else None,
        )
        for array in arrays:
            if array is not None:
                array.copy_to_host_async()
        return Handle(plan, arrays)

    def collect(self, handle: Handle) -> GroupResult:
        """Wait for a step and return its sampled tokens, one a row of each plan."""
        plan, bucket = handle.plan, handle.plan.bucket
        output = unpack(np.asarray(handle.arrays.result), bucket.rows, bucket.num_drafts)
        results: list[StepResult | None] = []
        for number, one in enumerate(plan.plans):
            if one is None:
                results.append(None)
                continue
            count = len(one.rows)
            result = StepResult(
                step_id=plan.step_id,
                tokens=output.tokens[number, :count],
                finite=output.finite[number, :count],
                accepted=output.accepted[number][:count],
            )
            logprobs, prompt_logprobs = handle.arrays.logprobs, handle.arrays.prompt_logprobs
            if logprobs is not None:
                told = _of_tokens(np.asarray(logprobs)[number], one.rows, result.accepted)
                result = dataclasses.replace(result, logprobs=told)
            if prompt_logprobs is not None:
                told = _of_prompts(np.asarray(prompt_logprobs)[number], one.rows)
                result = dataclasses.replace(result, prompt_logprobs=told)
            results.append(result)
        load = tuple(output.expert_load.tolist())
        return GroupResult(step_id=plan.step_id, results=tuple(results), expert_load=load)


def _tells(row: RowPlan) -> bool:
    """Whether the log probabilities of the row's new tokens are asked for."""
    return row.samples and row.sampling.logprobs is not None


def _of_tokens(
    packed: Int32[np.ndarray, "S X n"],
    rows: Iterable[RowPlan],
    accepted: tuple[tuple[int, ...], ...],
) -> tuple[PlaceLogprobs, ...]:
    """Log probabilities of the tokens that each row generated."""
    told: list[PlaceLogprobs] = []
    for index, row in enumerate(rows):
        num_tokens = 1 + (len(accepted[index]) if accepted else 0) if _tells(row) else 0
        told.append(unpack_logprobs(packed[index, :num_tokens], row.sampling.logprobs or 0))
    return tuple(told)


def _of_prompts(
    packed: Int32[np.ndarray, "T n"], rows: Iterable[RowPlan]
) -> tuple[PlaceLogprobs, ...]:
    """Log probabilities of what follows each token of each row."""
    told: list[PlaceLogprobs] = []
    start = 0
    for row in rows:
        part = packed[start : start + row.length] if row.scored else packed[:0]
        told.append(unpack_logprobs(part, row.sampling.prompt_logprobs or 0))
        start += row.length
    return tuple(told)
