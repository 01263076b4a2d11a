"""Collectives of the model, to be called inside `shard_map` over the `(dp, tp)` mesh.

Everything here is written out: nothing is left to the compiler's partitioner. The MoE tail is the
all-reduce form (k3-model.md section 5.3): latent partials are summed in float32 before the norm,
since the norm of a sum is not the sum of norms.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32

from sharding.axes import DP, TP, ParallelConfig


def sum_partials(x: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """Sum of the row-parallel partial results of all `tp` ranks."""
    return lax.psum(x, TP)


def gather_columns(x: Float[Array, "S v"]) -> Float[Array, "S V"]:
    """Column-parallel results of all `tp` ranks, side by side."""
    return lax.all_gather(x, TP, axis=1, tiled=True)


def first_expert(parallel: ParallelConfig, num_local: int) -> Int32[Array, ""]:
    """Id of this rank's first expert, of `num_local` that it holds."""
    if parallel.experts == "tp":
        return jnp.int32(0)
    return jnp.int32(num_local) * lax.axis_index((DP, TP)).astype(jnp.int32)


def embed(table: Float[Array, "v H"], tokens: Int32[Array, " T"]) -> Float[Array, "T H"]:
    """Rows of a vocabulary-parallel table; each id is held by exactly one rank."""
    local = tokens - table.shape[0] * lax.axis_index(TP).astype(jnp.int32)
    held = (local >= 0) & (local < table.shape[0])
    rows = jnp.take(table, jnp.where(held, local, 0), axis=0)
    return lax.psum(jnp.where(held[:, None], rows, jnp.zeros_like(rows)), TP)
