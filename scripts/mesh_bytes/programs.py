"""Step programs at a model's real widths, without weights."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import NamedTuple

import jax

from k3jax.buckets import Bucket
from k3jax.cache_spec import cache_spec
from k3jax.compile import abstract_arguments
from k3jax.config import CacheConfig, EngineConfig, ModelConfig, validate
from k3jax.layers import param_dtype
from k3jax.params import describe
from k3jax.pool import pool_layout
from k3jax.program import Program
from k3jax.step import serving_step
from serving.page_table.alignment import align
from sharding.axes import ParallelConfig
from sharding.mesh import make_mesh
from sharding.specs import local_shape

_NUM_PAGES = 8  # of the abstract pool; no collective depends on it


class Texts(NamedTuple):
    """A program's HLO text. `optimised` is None where the backend cannot compile it."""

    optimised: str | None
    lowered: str


def shortened(cfg: ModelConfig) -> ModelConfig:
    """The first layers of a model, as many as it takes to have each kind of layer."""
    kinds = Counter(layer_kind(cfg, i) for i in range(cfg.num_layers))
    num_layers = 1 + max(
        next(i for i in range(cfg.num_layers) if layer_kind(cfg, i) == kind) for kind in kinds
    )
    return dataclasses.replace(
        cfg,
        num_layers=num_layers,
        kda_layers=tuple(i for i in cfg.kda_layers if i < num_layers),
        mla_layers=tuple(i for i in cfg.mla_layers if i < num_layers),
        num_dense_layers=min(cfg.num_dense_layers, num_layers),
    )


def layer_kind(cfg: ModelConfig, layer: int) -> str:
    """Such as `kda+moe`."""
    attention = "kda" if layer in cfg.kda_layers else "mla"
    return f"{attention}+{'dense' if layer < cfg.num_dense_layers else 'moe'}"


def step_texts(cfg: ModelConfig, parallel: ParallelConfig, bucket: Bucket) -> Texts:
    """Compile a serving step for abstract arguments.

    Raises:
      ConfigError: the model does not divide over the mesh.
    """
    engine = EngineConfig(
        max_rows=bucket.rows,
        max_prefill_rows=bucket.rows,
        max_prefill_tokens=bucket.tokens,
        max_context_tokens=cfg.max_position_tokens,
    )
    validate(cfg, parallel, engine)
    spec = cache_spec(cfg, tp=parallel.tp, dtype=engine.dtype)
    cache = CacheConfig(page_tokens=align(spec).page_tokens, num_pages=_NUM_PAGES)
    program = Program(
        cfg=cfg,
        parallel=parallel,
        layout=pool_layout(cfg, cache, spec, tp=parallel.tp, dtype=engine.dtype),
        dtype=engine.dtype,
        max_rows=engine.max_rows,
    )
    mesh = make_mesh(parallel)
    lowered = serving_step(program, mesh, bucket).lower(*abstract_arguments(program, mesh, bucket))
    text = lowered.as_text(dialect="hlo", debug_info=True)
    # XLA:CPU has no ragged exchange.
    if parallel.dispatch == "ragged" and jax.default_backend() == "cpu":
        return Texts(None, text)
    options = {"xla_backend_optimization_level": 0}  # of machine code, which nobody runs
    return Texts(lowered.compile(compiler_options=options).as_text(), text)


def weight_bytes(cfg: ModelConfig, parallel: ParallelConfig) -> dict[str, int]:
    """Bytes of one rank's parameters: the routed experts', and all others'."""
    sizes = {"experts": 0, "others": 0}
    for params in describe(cfg).values():
        for spec in params.values():
            shape = local_shape(spec.shape, spec.axes, parallel)
            part = "experts" if "expert" in spec.axes else "others"
            sizes[part] += math.prod(shape) * param_dtype(spec, "bfloat16").itemsize
    return sizes
