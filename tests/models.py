"""Small models on a mesh, and steps on them by row: what the model's tests share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from k3jax.buckets import Bucket
from k3jax.cache_spec import cache_spec
from k3jax.config import CacheConfig, DraftSampling, Dtype, EngineConfig, ModelConfig
from k3jax.draft.config import DraftConfig
from k3jax.paged_model import PagedModel
from k3jax.pool import pool_layout
from k3jax.program import Program
from k3jax.step import scoring_step
from serving.build import LoadedModel, load_model
from serving.executor import Executor, Handle
from serving.packing import pack_plan
from serving.plan import RowPlan, StepPlan, StepResult
from serving.request import SamplingParams
from sharding.axes import ParallelConfig
from sharding.mesh import make_mesh
from tests import tiny
from tests.fakes import group_of_one

# Scoring steps of `tiny.tiny_config()` that several files use: whoever comes second finds the
# compiled programs in the cache.
SHARED_PAGES = 40  # of `SHARED_PAGE_TOKENS` each
SHARED_PAGE_TOKENS = 40
BATCH = Bucket("prefill", 128, 4, 4)
ALONE = Bucket("prefill", 160, 1, 4)
DECODE = Bucket("decode", 4, 4, 4)

GREEDY = SamplingParams(temperature=0.0, seed=0, max_tokens=1)


def load_golden(name: str, *, dtype: Dtype = "float32", **mesh: Any) -> LoadedModel:
    """A golden checkpoint on a mesh, see `load_folder`."""
    return load_folder(tiny.DATA / name, dtype=dtype, **mesh)


def load_folder(folder: Path, *, dtype: Dtype = "float32", **mesh: Any) -> LoadedModel:
    """A checkpoint with pages as small as its state allows; `mesh` goes to `ParallelConfig`."""
    engine = EngineConfig(dtype=dtype, max_rows=1, max_prefill_rows=1, max_context_tokens=128)
    return load_model(folder, engine, ParallelConfig(**mesh), unit_tokens=16)


def program_of(
    cfg: ModelConfig,
    *,
    page_tokens: int,
    num_pages: int,
    dtype: Dtype = "float32",
    max_rows: int = 4,
    draft: DraftConfig | None = None,
    num_drafts: int = 0,
    draft_sampling: DraftSampling = "greedy",
    **mesh: Any,
) -> Program:
    """What to compile for a small pool; `mesh` goes to `ParallelConfig`."""
    parallel = ParallelConfig(**mesh)
    spec = cache_spec(cfg, tp=parallel.tp, dtype=dtype, draft=draft)
    cache = CacheConfig(page_tokens=page_tokens, num_pages=num_pages)
    layout = pool_layout(cfg, cache, spec, tp=parallel.tp, dtype=dtype)
    return Program(
        cfg=cfg, parallel=parallel, layout=layout, dtype=dtype, max_rows=max_rows, draft=draft,
        num_drafts=num_drafts, draft_sampling=draft_sampling,
    )  # fmt: skip


def open_model(
    program: Program,
    buckets: Sequence[Bucket],
    *,
    make_step: Callable[..., Any] = scoring_step,
    params: Any = None,
) -> PagedModel:
    """A model with random weights, or with `params`, compiled for `buckets`."""
    mesh = make_mesh(program.parallel)
    if params is None:
        params = tiny.program_params(program)
    placed = jax.tree.map(
        lambda x, spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, spec)),
        params,
        program.param_specs,
    )
    return PagedModel(program, mesh, placed, make_step, buckets)


@dataclasses.dataclass(frozen=True)
class Row:
    """A sequence that lives on fixed pages of the pool."""

    tokens: np.ndarray
    attention: tuple[int, ...]
    states: tuple[int, ...]
    slot: int = 0

    def plan(self, start: int, end: int) -> RowPlan:
        """This row's part of a step that computes tokens `start` to `end`."""
        return RowPlan(
            request_id=f"row{self.slot}", slot=self.slot, start=start, length=end - start,
            tokens=tuple(int(t) for t in self.tokens[start:end]), attention_pages=self.attention,
            state_source=self.states, state_target=self.states, samples=True, sampling=GREEDY,
        )  # fmt: skip


def run_rows(
    model: PagedModel, bucket: Bucket, parts: Sequence[tuple[Row, int, int]]
) -> list[np.ndarray]:
    """Run `(row, start, end)` parts as one step; the result of each part, row by row."""
    return run_plans(model, bucket, [row.plan(start, end) for row, start, end in parts])


def run_replicas(
    model: PagedModel, bucket: Bucket, parts: Sequence[Sequence[tuple[Row, int, int]]]
) -> list[list[np.ndarray]]:
    """Run each replica's `(row, start, end)` parts as one step; their results, row by row."""
    program = model.program
    plans = [[row.plan(start, end) for row, start, end in rows] for rows in parts]
    packed = [
        pack_plan(
            StepPlan(step_id=0, bucket=bucket, rows=tuple(rows), clear_pages=()),
            program.num_recurrent_groups,
            program.max_rows,
        )
        for rows in plans
    ]
    logits = np.asarray(model.run(bucket, np.stack(packed)))
    results = []
    for rows, result in zip(plans, logits, strict=True):
        ends = np.cumsum([row.length for row in rows], dtype=int)
        results.append(np.split(result[: ends[-1]], ends[:-1]) if rows else [])
    return results


def start_plans(model: PagedModel, bucket: Bucket, rows: Sequence[RowPlan]) -> Any:
    """Start rows as one step of a model with one replica; returns the step's arrays."""
    plan = StepPlan(step_id=0, bucket=bucket, rows=tuple(rows), clear_pages=())
    program = model.program
    packed = pack_plan(plan, program.num_recurrent_groups, program.max_rows)
    return model.run(bucket, packed[None])


def run_plans(model: PagedModel, bucket: Bucket, rows: Sequence[RowPlan]) -> list[np.ndarray]:
    """Run rows as one scoring step of a model with one replica; the logits of each row."""
    (result,) = np.asarray(start_plans(model, bucket, rows))
    ends = np.cumsum([row.length for row in rows])
    return np.split(result[: ends[-1]], ends[:-1])


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the largest expected magnitude."""
    assert got.shape == want.shape
    return float(np.abs(got - want).max() / np.abs(want).max())


class StepExecutor(Executor):
    """The real executor of one replica, with steps collected by their number as `SchedulerDriver`
    does."""

    def __init__(self, model: PagedModel):
        super().__init__(model)
        self.model = model
        self._handles: dict[int, Handle] = {}

    def dispatch(self, plan: StepPlan) -> Handle:
        self._handles[plan.step_id] = super().dispatch(group_of_one(plan))
        return self._handles[plan.step_id]

    def collect(self, handle: int) -> StepResult:
        (result,) = super().collect(self._handles.pop(handle)).results
        assert result is not None
        return result
