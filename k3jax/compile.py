"""Compilation before serving, and a guard that notices compilation after it.

All buckets are compiled ahead of time with the abstract arguments that serving will pass, so that
no request waits for a compiler (KF-V20).
"""

from __future__ import annotations

import concurrent.futures
import os
import time
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax import inputs
from k3jax.buckets import Bucket
from k3jax.config import ConfigError
from k3jax.controls import CALL_SIZE, MASK_ROWS, mask_words
from k3jax.layers import param_dtype
from k3jax.pool import abstract_pool
from k3jax.program import Program, RowBuffers
from k3jax.step import (
    CLEAR_WIDTH,
    COPY_WIDTH,
    MakeStep,
    clearing_step,
    controlling_step,
    copying_step,
    masking_step,
)
from sharding.mesh import AnyMesh

# XLA counts every in-place update of the pool as a pool of its own, and would spend half of the
# compilation on recomputing activations to save memory that is not used (seen on an H200 with a
# pool of 62 GiB).
COMPILER_OPTIONS = {"xla_disable_hlo_passes": "rematerialization"}
_COMPILE_EVENT = "/jax/core/compile/backend_compile_duration"


def abstract_arguments(program: Program, mesh: AnyMesh, bucket: Bucket) -> tuple[Any, ...]:
    """Abstract `(params, pool, buffers, packed)` of a step, with their shardings."""

    def on_mesh(shape: tuple[int, ...], dtype: Any, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = {
        part: {
            name: on_mesh(
                spec.shape, param_dtype(spec, program.dtype), program.param_specs[part][name]
            )
            for name, spec in specs.items()
        }
        for part, specs in program.tree.items()
    }
    pool = abstract_pool(program.layout, program.parallel.num_ranks)
    packed = inputs.packed_size(bucket, program.num_recurrent_groups)
    return (
        params,
        on_mesh(pool.shape, pool.dtype, program.pool_spec),
        jax.tree.map(
            lambda x, spec: on_mesh(x.shape, x.dtype, spec), program.buffers, program.buffer_specs
        ),
        on_mesh((program.parallel.dp, packed), jnp.int32, PartitionSpec()),
    )


def initial_state(program: Program, mesh: Mesh) -> tuple[jax.Array, RowBuffers]:
    """A zeroed pool and row buffers on the mesh."""
    state = (abstract_pool(program.layout, program.parallel.num_ranks), program.buffers)
    specs = (program.pool_spec, program.buffer_specs)
    make = jax.jit(
        lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), state),
        out_shardings=jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs),
    )
    return make()


def compile_steps(
    make_step: MakeStep,
    program: Program,
    mesh: Mesh,
    buckets: Iterable[Bucket],
    *,
    on_compiled: Callable[[Bucket, float], None] = lambda bucket, seconds: None,
) -> dict[Bucket, jax.stages.Compiled]:
    """Compile one step program for each bucket, several at a time.

    Args:
      make_step: `serving_step` or `scoring_step`.
      on_compiled: told each bucket and the seconds it took, in the order of `buckets`.

    Raises:
      ConfigError: an operator has no implementation that takes a step, or the one asked for
        refuses it.
    """

    def compile_one(bucket: Bucket) -> tuple[jax.stages.Compiled, float]:
        start = time.monotonic()
        arguments = abstract_arguments(program, mesh, bucket)
        try:
            lowered = make_step(program, mesh, bucket).lower(*arguments)
        except NotImplementedError as refusal:
            raise ConfigError(f"kernels of the {bucket.kind} step: {refusal}") from refusal
        compiled = lowered.compile(compiler_options=COMPILER_OPTIONS)
        return compiled, time.monotonic() - start

    buckets, compiled = list(buckets), {}
    with concurrent.futures.ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        for bucket, (step, seconds) in zip(buckets, threads.map(compile_one, buckets), strict=True):
            compiled[bucket] = step
            on_compiled(bucket, seconds)
    return compiled


def compile_clearing(program: Program, mesh: Mesh) -> jax.stages.Compiled:
    """Compile the program that zeroes pages."""
    return _compile_pages(
        clearing_step(program, mesh), program, mesh, (program.parallel.dp, CLEAR_WIDTH)
    )


def compile_copying(program: Program, mesh: Mesh) -> jax.stages.Compiled:
    """Compile the program that copies pages."""
    shape = (program.parallel.dp, 3, COPY_WIDTH)
    return _compile_pages(copying_step(program, mesh), program, mesh, shape)


def compile_controlling(program: Program, mesh: Mesh) -> jax.stages.Compiled:
    """Compile the program that sets the controls of rows."""
    buffers = abstract_arguments(program, mesh, Bucket("decode", 1, 1, 1))[2]
    array = jax.ShapeDtypeStruct(
        (program.parallel.dp, CALL_SIZE), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec())
    )
    step = controlling_step(program, mesh)
    return step.lower(buffers.counts, buffers.biases, array).compile()


def compile_masking(program: Program, mesh: Mesh) -> jax.stages.Compiled:
    """Compile the program that sets masks of rows."""
    buffers = abstract_arguments(program, mesh, Bucket("decode", 1, 1, 1))[2]
    shape = (program.parallel.dp, MASK_ROWS, 1 + mask_words(program.cfg.vocab_size))
    array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return masking_step(program, mesh).lower(buffers.masks, array).compile()


def _compile_pages(
    step: jax.stages.Wrapped, program: Program, mesh: Mesh, shape: tuple[int, ...]
) -> jax.stages.Compiled:
    """Compile a program of the pool and one int32 array."""
    pool = abstract_arguments(program, mesh, Bucket("decode", 1, 1, 1))[1]
    array = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return step.lower(pool, array).compile()


class CompileCounter:
    """Counts compilations of this process from its creation on."""

    def __init__(self) -> None:
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **_: str | int) -> None:
        if event == _COMPILE_EVENT:
            self.count += 1
