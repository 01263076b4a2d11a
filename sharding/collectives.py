"""Collectives of the model, to be called inside `shard_map` over the `(dp, tp)` mesh.

Everything here is written out: nothing is left to the compiler's partitioner. An array is equal on
all `tp` ranks of a replica, or a partial result to be summed over them, or sharded by columns or by
tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, Shaped

from sharding.axes import DP, TP, CollectiveTail, ParallelConfig, TailForm


def sum_partials(x: Shaped[Array, "*dims"]) -> Shaped[Array, "*dims"]:
    """Sum of the row-parallel partial results of all `tp` ranks."""
    return lax.psum(x, TP)


def gather_columns(x: Float[Array, "S v"]) -> Float[Array, "S V"]:
    """Column-parallel results of all `tp` ranks, side by side."""
    return lax.all_gather(x, TP, axis=1, tiled=True)


def gather_tokens(x: Float[Array, " t *dims"]) -> Float[Array, " T *dims"]:
    """All tokens of an array that is sharded by tokens over `tp`."""
    return lax.all_gather(x, TP, axis=0, tiled=True)


def scatter_partials(x: Float[Array, " T *dims"]) -> Float[Array, " t *dims"]:
    """Sum of the partial results of all `tp` ranks, for this rank's tokens only."""
    return lax.psum_scatter(x, TP, scatter_dimension=0, tiled=True)


def own_tokens(x: Shaped[Array, " T *dims"], tp: int) -> Shaped[Array, " t *dims"]:
    """This rank's tokens of an array that all ranks have."""
    size = x.shape[0] // tp
    return lax.dynamic_slice_in_dim(x, size * lax.axis_index(TP), size)


def take_tokens(x: Float[Array, "t d"], tokens: Int32[Array, " S"]) -> Float[Array, "S d"]:
    """Some tokens, by their global index, of an array that is sharded by tokens over `tp`."""
    return _sum_of_held(x, tokens)


def embed(table: Float[Array, "v H"], tokens: Int32[Array, " T"]) -> Float[Array, "T H"]:
    """Rows of a vocabulary-parallel table, equal on all `tp` ranks."""
    return _sum_of_held(table, tokens)


def embed_own_tokens(table: Float[Array, "v H"], tokens: Int32[Array, " T"]) -> Float[Array, "t H"]:
    """Rows of a vocabulary-parallel table for this rank's tokens."""
    return scatter_partials(_held(table, tokens))


def replica() -> Int32[Array, ""]:
    """Index of this rank's replica."""
    return lax.axis_index(DP).astype(jnp.int32)


def gather_replicas(x: Shaped[Array, "*dims"]) -> Shaped[Array, " dp *dims"]:
    """What each replica has, on all ranks."""
    return lax.all_gather(x, DP, axis=0)


def choose_tail(parallel: ParallelConfig, hidden_size: int, num_tokens: int) -> TailForm:
    """The form of the MoE tail for a step of `num_tokens`."""
    if parallel.tail != "auto":
        return parallel.tail
    if parallel.tp == 1 or hidden_size % parallel.tp or num_tokens < _FOLDED_FROM_TOKENS:
        return "all_reduce"
    return "folded"


# A guess until it is measured on several GPUs (docs/meshes.md): a step of few tokens reads the
# up-projection's weights in less time than another operation takes to start, one of many computes.
_FOLDED_FROM_TOKENS = 256


def moe_tail(
    form: CollectiveTail,
    routed: Float[Array, "T L"],
    shared: Float[Array, "T H"],
    *,
    norm: Callable[[Array], Array],
    up: Float[Array, "H L"],
    linear: Callable[[Array, Array], Array],
    finish: Callable[[Array], Array],
) -> Float[Array, "T H"]:
    """What follows the experts: `norm(sum routed) up^T + sum shared` (k3-model.md section 5.4).

    * `all_reduce`: all-reduces sum both partials; every rank does the whole up-projection.
    * `columns`: every rank projects to its own columns, adds its reduce-scattered columns of the
      shared partials, and the columns are gathered.
    * `folded`: every rank projects to its own columns and adds them to its shared partial; the
      all-reduce of the shared partials then also puts the columns together.

    The latent is summed in float32 before the norm, since the norm of a sum is no sum of norms.

    Args:
      routed, shared: this rank's float32 partials.
      norm: float32 latents -> normed latents in the compute dtype.
      up: the whole up-projection.
      linear: `(x, w) -> x w^T` in float32.
      finish: float32 -> compute dtype.

    Returns:
      The output in the compute dtype, equal on all `tp` ranks up to rounding.
    """
    latent = norm(sum_partials(routed))
    if form == "all_reduce":
        return finish(linear(latent, up) + sum_partials(shared))
    columns = up.shape[0] // lax.axis_size(TP)
    first = columns * lax.axis_index(TP)
    own = linear(latent, lax.dynamic_slice_in_dim(up, first, columns))
    if form == "columns":
        shared = lax.psum_scatter(shared, TP, scatter_dimension=1, tiled=True)
        return gather_columns(finish(own + shared))
    before = lax.dynamic_slice_in_dim(shared, first, columns, axis=1)
    shared = lax.dynamic_update_slice_in_dim(shared, before + own, first, axis=1)
    return finish(sum_partials(shared))


def _sum_of_held(rows: Float[Array, "n d"], index: Int32[Array, " S"]) -> Float[Array, "S d"]:
    return lax.psum(_held(rows, index), TP)


def _held(rows: Float[Array, "n d"], index: Int32[Array, " S"]) -> Float[Array, "S d"]:
    """Rows of an array that is sharded by rows over `tp`; zero where another rank holds the row."""
    local = index - rows.shape[0] * lax.axis_index(TP).astype(jnp.int32)
    is_held = (local >= 0) & (local < rows.shape[0])
    taken = jnp.take(rows, jnp.where(is_held, local, 0), axis=0)
    return jnp.where(is_held[:, None], taken, jnp.zeros_like(taken))
