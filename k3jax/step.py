"""The jitted programs of a step: one `shard_map` around the whole model.

A serving step takes parameters, the donated pool, the donated row buffers and one packed int32
array; it returns the pool, the row buffers and small int32 arrays. A scoring step returns the
logits of every token instead. All replicas of the mesh run the same program, each on its own row of
the packed array.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, UInt16

from k3jax import speculation
from k3jax.adjust import count, set_controls, set_masks
from k3jax.buckets import Bucket
from k3jax.choice import asked_of, scored
from k3jax.pool import clear_pages, copy_pages
from k3jax.program import Params, Program, RowBuffers
from k3jax.results import StepArrays
from k3jax.run import run_layers, unpack
from pallas_kernels.settings import using
from sharding import collectives
from sharding.mesh import AnyMesh
from sharding.specs import partition_spec

CLEAR_WIDTH = 16  # pages that one call of the clearing program takes
COPY_WIDTH = 4  # copies that one call of the copying program takes


MakeStep = Callable[[Program, AnyMesh, Bucket], jax.stages.Wrapped]


def serving_step(program: Program, mesh: AnyMesh, bucket: Bucket) -> jax.stages.Wrapped:
    """The jitted step of a bucket.

    Returns:
      `(params, pool, buffers, packed) -> (pool, buffers, arrays)` with pool and buffers donated.
      `packed` is int32 `[dp, n]`; `arrays` are described in `k3jax.results`.
    """

    def step(params: Params, pool: Array, buffers: RowBuffers, packed: Array) -> tuple[Any, ...]:
        groups = program.num_recurrent_groups
        asked = asked_of(jax.vmap(lambda words: unpack(words, bucket, groups))(packed))
        fields = unpack(packed[collectives.replica()], bucket, groups)
        run = run_layers(program, bucket, params, pool, buffers, fields)
        end = speculation.verified if bucket.num_drafts else speculation.sampled
        drawn = end(program, run, fields, asked)
        wanted = (fields["sample"] != 0) & (run.meta.context > 0)
        slots = jnp.where(wanted, fields["slots"], program.max_rows)
        is_new = jnp.arange(drawn.tokens.shape[1])[None] < drawn.num_tokens[:, None]
        buffers = buffers._replace(
            tokens=buffers.tokens.at[slots].set(drawn.newest, mode="drop"),
            scores=buffers.scores.at[slots].set(drawn.scores, mode="drop"),
            counts=count(buffers.counts, drawn.tokens, is_new & wanted[:, None], fields),
        )
        result = jnp.concatenate([*drawn.result, run.load])
        with jax.named_scope("result"):
            result = collectives.gather_replicas(result)
        arrays = StepArrays(result, drawn.logprobs, scored(run, fields, asked))
        return drawn.pool[None], buffers, arrays

    return _jit(program, mesh, bucket, step, StepArrays(*[PartitionSpec()] * 3))


def scoring_step(program: Program, mesh: AnyMesh, bucket: Bucket) -> jax.stages.Wrapped:
    """The jitted forward pass of a bucket that returns logits of all its tokens.

    Returns:
      `(params, pool, buffers, packed) -> (pool, buffers, logits)`; `packed` is int32 `[dp, n]`,
      `logits` float32 `[dp, T, V]`.
    """

    def step(params: Params, pool: Array, buffers: RowBuffers, packed: Array) -> tuple[Any, ...]:
        fields = unpack(packed[collectives.replica()], bucket, program.num_recurrent_groups)
        run = run_layers(program, bucket, params, pool, buffers, fields)
        return run.pool, buffers, run.logits(run.all())[None]

    return _jit(program, mesh, bucket, step, partition_spec(("replicas",), program.parallel))


def clearing_step(program: Program, mesh: AnyMesh) -> jax.stages.Wrapped:
    """The jitted program that zeroes up to `CLEAR_WIDTH` pages of each replica.

    It is a program of its own, since most steps hand out no page. The device runs programs in the
    order in which they were called, so a page is clear before the step that first writes it.

    Returns:
      `(pool, pages) -> pool`, with the pool donated; `pages` is int32 `[dp, CLEAR_WIDTH]`.
    """
    return _page_step(program, mesh, clear_pages)


def copying_step(program: Program, mesh: AnyMesh) -> jax.stages.Wrapped:
    """The jitted program that copies the first tokens of up to `COPY_WIDTH` pages of each replica.

    Each rank copies its own part of a page. A program of its own for the same reason as
    `clearing_step`; call it after that and before the step.

    Returns:
      `(pool, copies) -> pool`, with the pool donated; `copies` is int32 `[dp, 3, COPY_WIDTH]`, see
      `k3jax.pool.copy_pages`.
    """
    return _page_step(program, mesh, copy_pages)


def controlling_step(program: Program, mesh: AnyMesh) -> jax.stages.Wrapped:
    """The jitted program that sets the controls of one row of each replica.

    Call it before the first step of a request; see `k3jax.controls`.

    Returns:
      `(counts, biases, packed) -> (counts, biases)`, with these row buffers donated; `packed` is
      int32 `[dp, CALL_SIZE]`.
    """
    specs = program.buffer_specs.counts, program.buffer_specs.biases
    in_specs = (*specs, PartitionSpec())

    def step(counts: Array, biases: Array, packed: Int32[Array, "dp n"]) -> tuple[Array, Array]:
        return set_controls(counts, biases, packed[collectives.replica()])

    step.__name__ = set_controls.__name__
    return jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=specs, check_vma=False),
        donate_argnums=(0, 1),
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in in_specs),
        out_shardings=tuple(NamedSharding(mesh, spec) for spec in specs),
    )


def masking_step(program: Program, mesh: AnyMesh) -> jax.stages.Wrapped:
    """The jitted program that sets masks of some rows of each replica.

    Call it before each step of such a row; see `k3jax.controls`.

    Returns:
      `(masks, packed) -> masks`, with this row buffer donated; `packed` is int32 `[dp, MASK_ROWS,
      1 + W]`.
    """
    spec = program.buffer_specs.masks

    def step(masks: Array, packed: Int32[Array, "dp rows n"]) -> Array:
        return set_masks(masks, packed[collectives.replica()])

    step.__name__ = set_masks.__name__
    return jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec, check_vma=False
        ),
        donate_argnums=0,
        in_shardings=(NamedSharding(mesh, spec), NamedSharding(mesh, PartitionSpec())),
        out_shardings=NamedSharding(mesh, spec),
    )


def _page_step(
    program: Program, mesh: AnyMesh, change: Callable[[Array, Array], Array]
) -> jax.stages.Wrapped:
    """The jitted program that changes pages of each rank as its replica's part of an array says."""
    in_specs = (program.pool_spec, PartitionSpec())

    def step(
        pool: UInt16[Array, "1 Z P W words"], pages: Int32[Array, "dp ..."]
    ) -> UInt16[Array, "1 Z P W words"]:
        return change(pool[0], pages[collectives.replica()])[None]

    step.__name__ = change.__name__  # the program's name in a profile
    return jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=in_specs, out_specs=program.pool_spec, check_vma=False
        ),
        donate_argnums=0,
        in_shardings=tuple(NamedSharding(mesh, spec) for spec in in_specs),
        out_shardings=NamedSharding(mesh, program.pool_spec),
    )


def _jit(
    program: Program,
    mesh: AnyMesh,
    bucket: Bucket,
    step: Callable[..., tuple[Any, ...]],
    result_spec: PartitionSpec | StepArrays,
) -> jax.stages.Wrapped:
    """`shard_map` and jit a step: explicit shardings in and out, pool and row buffers donated."""
    in_specs = (program.param_specs, program.pool_spec, program.buffer_specs, PartitionSpec())
    out_specs = (program.pool_spec, program.buffer_specs, result_spec)

    def shardings(specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    def traced(*args: Any) -> tuple[Any, ...]:
        with using(program.kernels):
            return step(*args)

    traced.__name__ = f"{bucket.kind}_step"  # the program's name in a profile
    return jax.jit(
        jax.shard_map(traced, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False),
        donate_argnums=(1, 2),
        in_shardings=shardings(in_specs),
        out_shardings=shardings(out_specs),
    )
