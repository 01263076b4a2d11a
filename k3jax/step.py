"""The jitted programs of a step: one `shard_map` around the whole model.

A serving step takes parameters, the donated pool, the donated token buffer and one packed int32
array; it returns the pool, the token buffer and one small int32 array. A scoring step returns the
logits of every token instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array, Int32, UInt16

from k3jax import inputs
from k3jax.buckets import Bucket
from k3jax.cache_spec import layer_groups
from k3jax.config import Dtype, ModelConfig
from k3jax.model import K3
from k3jax.params import describe
from k3jax.pool import PoolLayout, clear_pages
from k3jax.sampling import sample
from k3jax.step_meta import last_token_of_row, step_meta
from sharding.axes import ParallelConfig
from sharding.mesh import AnyMesh
from sharding.specs import partition_spec

CLEAR_WIDTH = 16  # pages that one call of the clearing program takes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What the step programs are compiled for. Hashable: everything here is static.

    Attributes:
      max_rows: entries of the token buffer; one more is scratch, for rows not in use.
    """

    cfg: ModelConfig
    parallel: ParallelConfig
    layout: PoolLayout
    dtype: Dtype
    max_rows: int

    @property
    def num_recurrent_groups(self) -> int:
        return sum(group.kind == "recurrent" for group in layer_groups(self.cfg))

    @property
    def param_specs(self) -> dict[str, dict[str, PartitionSpec]]:
        """`PartitionSpec` of each parameter."""
        return {
            part: {name: partition_spec(spec.axes, self.parallel) for name, spec in params.items()}
            for part, params in describe(self.cfg).items()
        }

    @property
    def pool_spec(self) -> PartitionSpec:
        return partition_spec(("ranks", None, None, None, None), self.parallel)


def serving_step(program: Program, mesh: AnyMesh, bucket: Bucket) -> Callable[..., Any]:
    """The jitted step of a bucket.

    Returns:
      `(params, pool, tokens, packed) -> (pool, tokens, result)` with pool and token buffer donated.
      `result` is int32 `[2, S]`: sampled ids, and 1 where the row's logits were finite.
    """

    def step(params, pool, buffer, packed):
        fields = unpack(packed, bucket, program.num_recurrent_groups)
        tokens = _resolve_tokens(fields, buffer)
        model, hidden, loc_pool, meta = _run(program, bucket, params, tokens, pool[0], fields)
        rows = jnp.take(hidden, last_token_of_row(meta.row_offsets), axis=0)
        logits = model.apply({"params": params}, rows, method="logits")
        with jax.named_scope("sample"):
            ids, finite = sample(
                logits,
                fields["temperature"],
                fields["top_k"],
                fields["top_p"],
                fields["seeds"],
                meta.context,
            )
        wanted = (fields["sample"] != 0) & (meta.context > 0)
        slots = jnp.where(wanted, fields["slots"], program.max_rows)
        buffer = buffer.at[slots].set(ids, mode="drop")
        return loc_pool[None], buffer, jnp.stack([ids, finite.astype(jnp.int32)])

    return _jit(program, mesh, step, (PartitionSpec(), PartitionSpec(), PartitionSpec()))


def scoring_step(program: Program, mesh: AnyMesh, bucket: Bucket) -> Callable[..., Any]:
    """The jitted forward pass of a bucket that returns logits of all its tokens.

    Returns:
      `(params, pool, tokens, packed) -> (pool, tokens, logits)`; `logits` is float32 `[T, V]`.
    """

    def step(params, pool, buffer, packed):
        fields = unpack(packed, bucket, program.num_recurrent_groups)
        tokens = _resolve_tokens(fields, buffer)
        model, hidden, loc_pool, _ = _run(program, bucket, params, tokens, pool[0], fields)
        return loc_pool[None], buffer, model.apply({"params": params}, hidden, method="logits")

    return _jit(program, mesh, step, (PartitionSpec(), PartitionSpec(), PartitionSpec()))


def clearing_step(program: Program, mesh: AnyMesh) -> Callable[..., Any]:
    """The jitted program that zeroes up to `CLEAR_WIDTH` pages: `(pool, page_ids) -> pool`, pool
    donated.

    It is a program of its own, since most steps hand out no page. The device runs programs in the
    order in which they were called, so a page is clear before the step that first writes it.
    """
    pool = NamedSharding(mesh, program.pool_spec)
    return jax.jit(
        clear_pages,
        donate_argnums=0,
        in_shardings=(pool, NamedSharding(mesh, PartitionSpec())),
        out_shardings=pool,
    )


def unpack(
    packed: Int32[Array, " n"], bucket: Bucket, num_recurrent_groups: int
) -> dict[str, Array]:
    """The arrays of `StepInputs` from the packed buffer."""
    fields = {}
    for field, offset, shape in inputs.spans(bucket, num_recurrent_groups):
        size = 1
        for dim in shape:
            size *= dim
        words = packed[offset : offset + size].reshape(shape)
        fields[field.name] = lax.bitcast_convert_type(words, field.dtype)
    return fields


def _resolve_tokens(fields: dict[str, Array], buffer: Int32[Array, " R"]) -> Int32[Array, " T"]:
    """Token ids of the step; those that the host does not know yet come from the token buffer."""
    tokens = fields["tokens"]
    row = jnp.searchsorted(
        fields["row_offsets"][1:], jnp.arange(tokens.shape[0], dtype=jnp.int32), side="right"
    )
    slot = fields["slots"][jnp.minimum(row, fields["slots"].shape[0] - 1)]
    return jnp.where(tokens == inputs.FROM_DEVICE, buffer[slot], tokens)


def _run(
    program: Program,
    bucket: Bucket,
    params: dict[str, dict[str, Array]],
    tokens: Int32[Array, " T"],
    pool: UInt16[Array, "Z P W words"],
    fields: dict[str, Array],
):
    """Run the model on one rank; returns it with its hidden states, pool and index arrays."""
    layout = program.layout
    meta = step_meta(
        bucket.kind,
        bucket.tokens,
        fields["row_offsets"],
        fields["computed"],
        fields["attention_pages"],
        fields["state_source"],
        fields["state_target"],
        page_tokens=layout.page_tokens,
        num_pages=layout.num_pages,
    )
    model = K3(program.cfg, program.parallel, program.dtype)
    hidden, pool = model.apply({"params": params}, tokens, pool, meta, layout)
    return model, hidden, pool, meta


def _jit(
    program: Program, mesh: AnyMesh, step: Callable[..., Any], specs: tuple[PartitionSpec, ...]
) -> Callable[..., Any]:
    """`shard_map` and jit a step: explicit shardings in and out, pool and token buffer donated."""
    buffer, packed, result = specs
    in_specs = (program.param_specs, program.pool_spec, buffer, packed)
    out_specs = (program.pool_spec, buffer, result)

    mapped = jax.shard_map(step, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    shard = lambda tree: jax.tree.map(  # noqa: E731
        lambda spec: NamedSharding(mesh, spec), tree, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )
    return jax.jit(
        mapped, donate_argnums=(1, 2), in_shardings=shard(in_specs), out_shardings=shard(out_specs)
    )
