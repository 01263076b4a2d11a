"""The device side of the engine: step plans in, sampled tokens out.

`dispatch` returns at once; the devices run what was dispatched in order. `collect` waits for one
step's result.
"""

from __future__ import annotations

import dataclasses

import jax
import numpy as np

from k3jax.paged_model import PagedModel
from serving.packing import pack_plan
from serving.plan import StepPlan, StepResult


@dataclasses.dataclass(frozen=True, slots=True)
class Handle:
    """A dispatched step whose result is on its way to the host."""

    step_id: int
    num_rows: int
    result: jax.Array


class Executor:
    """Runs step plans on a model that was opened with `serving_step`. Used by one thread."""

    def __init__(self, model: PagedModel):
        self._model = model

    def dispatch(self, plan: StepPlan) -> Handle:
        """Start a step. Before it, the pages it hands out are cleared, then some are copied."""
        program = self._model.program
        self._model.clear(plan.clear_pages)
        self._model.copy(plan.copies)
        packed = pack_plan(plan, program.num_recurrent_groups, program.max_rows)
        result = self._model.run(plan.bucket, packed)
        result.copy_to_host_async()
        return Handle(plan.step_id, len(plan.rows), result)

    def collect(self, handle: Handle) -> StepResult:
        """Wait for a step and return its sampled tokens, one a row of its plan."""
        result = np.asarray(handle.result)[:, : handle.num_rows]
        return StepResult(step_id=handle.step_id, tokens=result[0], finite=result[1] != 0)
