"""From a model folder to a running executor: configuration, mesh, weights, pool, compiled steps."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import numpy as np
from jax.sharding import Mesh

from k3jax import inputs
from k3jax.buckets import Bucket, bucket_table
from k3jax.cache_spec import CacheSpec, cache_spec
from k3jax.config import CacheConfig, ConfigError, EngineConfig, ModelConfig, validate
from k3jax.draft.config import DraftConfig
from k3jax.paged_model import PagedModel, ParamArrays
from k3jax.pool import pool_layout
from k3jax.program import DRAFT_PREFIX, Program
from k3jax.step import serving_step
from k3jax.weights import Progress, load_params, read_draft_config, read_model_config
from serving.executor import Executor
from serving.page_table.alignment import PageGeometry, align
from sharding.axes import ParallelConfig
from sharding.devices import device_memory
from sharding.dispatch import check_platform
from sharding.mesh import make_mesh

# Share of a device's memory that weights and pool may take; the rest is for activations.
_MEMORY_SHARE = 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoadedModel:
    """A checkpoint on the mesh, and the page geometry that its cache asks for."""

    cfg: ModelConfig
    engine: EngineConfig
    parallel: ParallelConfig
    mesh: Mesh
    spec: CacheSpec
    geometry: PageGeometry
    params: ParamArrays
    draft: DraftConfig | None = None

    def program(self, num_pages: int) -> Program:
        """What to compile for a pool of `num_pages`, the null page included."""
        cache = CacheConfig(page_tokens=self.geometry.page_tokens, num_pages=num_pages)
        return Program(
            cfg=self.cfg,
            parallel=self.parallel,
            layout=pool_layout(
                self.cfg, cache, self.spec, tp=self.parallel.tp, dtype=self.engine.dtype
            ),
            dtype=self.engine.dtype,
            max_rows=self.engine.max_rows,
            kernels=self.engine.kernels,
            draft=self.draft,
            num_drafts=self.engine.num_drafts if self.draft else 0,
            draft_sampling=self.engine.draft_sampling,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class BuiltModel:
    """A model that is loaded and compiled, with what the host needs to know of it."""

    executor: Executor
    cfg: ModelConfig
    spec: CacheSpec
    geometry: PageGeometry
    num_pages: int
    buckets: tuple[Bucket, ...]


def load_model(
    model_dir: Path,
    engine: EngineConfig,
    parallel: ParallelConfig,
    *,
    draft_dir: Path | None = None,
    unit_tokens: int = 128,
    weight_cache: Path | None = None,
    progress: Callable[[Progress], None] = lambda progress: None,
) -> LoadedModel:
    """Load a checkpoint onto a mesh.

    Args:
      draft_dir: folder of a draft model for it.
      unit_tokens: pages are a multiple of it (cache-semantics.md section 1).
      weight_cache: folder for converted weights, which lets a killed load resume.
      progress: told how far the load is, after each piece.

    Raises:
      ConfigError: the configuration does not fit the model or the devices.
      WeightError: the checkpoint is not what its configuration promises.
    """
    cfg = read_model_config(model_dir)
    validate(cfg, parallel, engine)
    try:
        mesh = make_mesh(parallel)
        check_platform(parallel, mesh.devices.flat[0].platform)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    draft = read_draft_config(draft_dir) if draft_dir else None
    spec = cache_spec(cfg, tp=parallel.tp, dtype=engine.dtype, draft=draft)
    params = load_params(
        model_dir, cfg, parallel, mesh, engine.dtype, cache_dir=weight_cache, progress=progress
    )
    if draft_dir and draft:
        own = load_params(draft_dir, draft, parallel, mesh, engine.dtype)
        params |= {f"{DRAFT_PREFIX}{part}": leaves for part, leaves in own.items()}
    return LoadedModel(
        cfg=cfg,
        engine=engine,
        parallel=parallel,
        mesh=mesh,
        spec=spec,
        geometry=align(spec, unit_tokens=unit_tokens),
        params=params,
        draft=draft,
    )


def num_buckets(loaded: LoadedModel) -> int:
    """How many steps `build_model` compiles."""
    return len(bucket_table(loaded.engine, page_tokens=loaded.geometry.page_tokens))


def build_model(
    loaded: LoadedModel,
    *,
    num_pages: int,
    on_compiled: Callable[[Bucket, float], None] = lambda bucket, seconds: None,
) -> tuple[PagedModel, tuple[Bucket, ...]]:
    """Allocate the pool and compile every bucket; return the model and its buckets.

    Args:
      num_pages: pages of the pool, the null page included; see `choose_num_pages`.
      on_compiled: told each compiled bucket and the seconds it took.
    """
    buckets = bucket_table(loaded.engine, page_tokens=loaded.geometry.page_tokens)
    model = PagedModel(
        loaded.program(num_pages),
        loaded.mesh,
        loaded.params,
        serving_step,
        buckets,
        on_compiled=on_compiled,
    )
    return model, buckets


def build_executor(
    loaded: LoadedModel,
    *,
    num_pages: int,
    on_compiled: Callable[[Bucket, float], None] = lambda bucket, seconds: None,
) -> BuiltModel:
    """Build the model, see `build_model`, for an engine of this process alone."""
    model, buckets = build_model(loaded, num_pages=num_pages, on_compiled=on_compiled)
    return BuiltModel(
        executor=Executor(model),
        cfg=loaded.cfg,
        spec=loaded.spec,
        geometry=loaded.geometry,
        num_pages=num_pages,
        buckets=buckets,
    )


def rehearse(model: PagedModel, bucket: Bucket) -> None:
    """Run one step without rows, so that connections between processes exist before requests do."""
    program = model.program
    groups = program.num_recurrent_groups
    empty = inputs.empty_inputs(bucket, groups, scratch_slot=program.max_rows)
    packed = np.tile(inputs.pack(empty, bucket, groups), (program.parallel.dp, 1))
    model.run(bucket, packed).block_until_ready()


def choose_num_pages(loaded: LoadedModel, pool_bytes: int | None = None) -> int:
    """Pages of the pool, the null page included.

    Args:
      pool_bytes: of one rank; else what its memory leaves beside the weights, or on a CPU what
        `max_rows` full contexts need, and as much again for prefixes to reuse.

    Raises:
      ConfigError: not even one full context fits.
    """
    engine, geometry, spec = loaded.engine, loaded.geometry, loaded.spec
    context = -(-engine.max_context_tokens // geometry.page_tokens) + len(spec.recurrent_groups)
    if pool_bytes is None:
        memory = device_memory()
        if memory is None:
            return 1 + 2 * engine.max_rows * context
        limit, in_use = memory
        pool_bytes = int(limit * _MEMORY_SHARE) - in_use
    num_pages = pool_bytes // (geometry.page_bytes * spec.num_positions)
    if num_pages < 1 + context:
        raise ConfigError(
            f"pool is too small: got {pool_bytes} bytes = {num_pages} pages; expected at least "
            f"{1 + context} pages for one context of {engine.max_context_tokens} tokens"
        )
    return num_pages
