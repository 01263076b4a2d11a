"""The device side of the engine: plans of all replicas in, sampled tokens out.

`dispatch` returns at once; the devices run what was dispatched in order. `collect` waits for one
step's result.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from k3jax.paged_model import PagedModel
from k3jax.results import unpack
from serving.packing import pack_group
from serving.plan import GroupPlan, GroupResult, StepResult
from serving.processes.repeat import SharedModel


@dataclasses.dataclass(frozen=True, slots=True)
class Handle:
    """A dispatched step whose result is on its way to the host.

    Attributes:
      max_rows: of each replica in the result, padding included.
      num_drafts: that each row of the step can bring.
      num_rows: of each replica's plan; 0 if it has none.
    """

    step_id: int
    max_rows: int
    num_drafts: int
    num_rows: tuple[int, ...]
    result: jax.Array


class Executor:
    """Runs step plans on a model that was opened with `serving_step`. Used by one thread."""

    def __init__(self, model: PagedModel | SharedModel):
        self._model = model

    def dispatch(self, plan: GroupPlan) -> Handle:
        """Start a step. Before it, the pages it hands out are cleared, then some are copied."""
        program = self._model.program
        self._model.clear([one.clear_pages if one else () for one in plan.plans])
        self._model.copy([one.copies if one else () for one in plan.plans])
        packed = pack_group(plan, program.num_recurrent_groups, program.max_rows)
        result = self._model.run(plan.bucket, packed)
        result.copy_to_host_async()
        num_rows = tuple(len(one.rows) if one else 0 for one in plan.plans)
        bucket = plan.bucket
        return Handle(plan.step_id, bucket.rows, bucket.num_drafts, num_rows, result)

    def collect(self, handle: Handle) -> GroupResult:
        """Wait for a step and return its sampled tokens, one a row of each plan."""
        output = unpack(np.asarray(handle.result), handle.max_rows, handle.num_drafts)
        return GroupResult(
            step_id=handle.step_id,
            results=tuple(
                StepResult(
                    step_id=handle.step_id,
                    tokens=tokens[:count],
                    finite=finite[:count],
                    accepted=accepted[:count],
                )
                if count
                else None
                for tokens, finite, accepted, count in zip(
                    output.tokens, output.finite, output.accepted, handle.num_rows, strict=True
                )
            ),
            expert_load=tuple(output.expert_load.tolist()),
        )
