"""Routed experts in XLA: sort the assignments by expert, one scan over tiles of rows of one expert.

Tiles without work are skipped. A tile reads its expert's weights straight from the stack of all
layers, and unpacks MXFP4 then. The combine gathers every token's results and adds them in the order
of its choices: no atomics, so the result is deterministic and does not depend on the other tokens.

Where the experts' matrices are small, each assignment takes a copy of its own instead: a GPU then
multiplies all at once, while in a scan every tile waits for the host, which decides what is
skipped.

Dims: `Bn` tiles, `Tb` rows of a tile.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.moe import schedule
from pallas_kernels.moe.mxfp4 import PackedWeight, dequantize
from pallas_kernels.numerics import contract, round_to

SMALL_TILE, LARGE_TILE = 8, 64
SMALL_TILE_MAX_ASSIGNMENTS = 1024
COPIES_MAX_BYTES = 16 << 20


def moe_experts(
    z_TL: Float[Array, "T L"],
    ids_TA: Int32[Array, "T A"],
    weights_TA: Float32[Array, "T A"],
    w13: Float[Array, "Z E 2 F L"] | PackedWeight,
    w2: Float[Array, "Z E L F"] | PackedWeight,
    *,
    layer: int,
    first_expert: int | Int32[Array, ""],
    activation: Callable[[Array, Array], Array],
) -> Float32[Array, "T L"]:
    """See `api.moe_experts`."""
    expert_TA = schedule.local_experts(ids_TA, first_expert, w2.shape[1])
    expert_bytes = math.prod((3, *w2.shape[2:])) * z_TL.dtype.itemsize
    form = by_copies if ids_TA.size * expert_bytes <= COPIES_MAX_BYTES else by_tiles
    return form(z_TL, expert_TA, weights_TA, w13, w2, layer, activation)


def by_tiles(
    z_TL: Float[Array, "T L"],
    expert_TA: Int32[Array, "T A"],
    weights_TA: Float32[Array, "T A"],
    w13: Array | PackedWeight,
    w2: Array | PackedWeight,
    layer: int,
    activation: Callable[[Array, Array], Array],
) -> Float32[Array, "T L"]:
    """One scan over the tiles, with one copy of one expert's matrices at a time."""
    num_experts, num_assignments = w2.shape[1], expert_TA.size
    tile_rows = SMALL_TILE if num_assignments <= SMALL_TILE_MAX_ASSIGNMENTS else LARGE_TILE

    with jax.named_scope("sort"):
        tiles = schedule.by_expert(expert_TA, num_experts=num_experts, tile_rows=tile_rows)

    def tile(_: None, inputs: tuple[Array, Array]) -> tuple[None, Array]:
        expert, token_Tb = inputs

        def work() -> Array:
            w13_2FL = _expert_matrix(w13, layer, expert, z_TL.dtype)
            hidden_2TbF = contract("tl,gfl->gtf", z_TL[token_Tb], w13_2FL)
            act_TbF = round_to(activation(hidden_2TbF[0], hidden_2TbF[1]), z_TL.dtype)
            return contract("tf,lf->tl", act_TbF, _expert_matrix(w2, layer, expert, z_TL.dtype))

        def skip() -> Array:
            return jnp.zeros((tile_rows, z_TL.shape[1]), jnp.float32)

        return None, lax.cond(expert < num_experts, work, skip)

    with jax.named_scope("tiles"):
        # A place without an assignment computes token 0 again; nothing reads the result.
        _, y_BnTbL = lax.scan(tile, None, (tiles.expert_Bn, tiles.token_BnTb))

    with jax.named_scope("combine"):
        return schedule.combine(y_BnTbL, tiles.slot_TA, weights_TA)


def by_copies(
    z_TL: Float[Array, "T L"],
    expert_TA: Int32[Array, "T A"],
    weights_TA: Float32[Array, "T A"],
    w13: Array | PackedWeight,
    w2: Array | PackedWeight,
    layer: int,
    activation: Callable[[Array, Array], Array],
) -> Float32[Array, "T L"]:
    """All assignments at once, each with a copy of its expert's matrices."""
    num_experts, num_choices = w2.shape[1], expert_TA.shape[1]
    with jax.named_scope("tiles"):
        expert_N = jnp.minimum(expert_TA, num_experts - 1).reshape(-1)
        z_NL = jnp.repeat(z_TL, num_choices, axis=0)
        w13_N2FL = _expert_matrices(w13, layer, expert_N, z_TL.dtype)
        hidden_2NF = contract("nl,ngfl->gnf", z_NL, w13_N2FL)
        act_NF = round_to(activation(hidden_2NF[0], hidden_2NF[1]), z_TL.dtype)
        y_NL = contract("nf,nlf->nl", act_NF, _expert_matrices(w2, layer, expert_N, z_TL.dtype))
    with jax.named_scope("combine"):
        slot_TA = jnp.arange(expert_TA.size, dtype=jnp.int32).reshape(expert_TA.shape)
        slot_TA = jnp.where(expert_TA < num_experts, slot_TA, expert_TA.size)
        return schedule.combine(y_NL[:, None], slot_TA, weights_TA)


def _expert_matrices(
    weight: Array | PackedWeight, layer: int, expert_N: Int32[Array, " N"], dtype: DTypeLike
) -> Float[Array, " N *matrix"]:
    """Read experts of one layer in the compute dtype."""
    if isinstance(weight, PackedWeight):
        return dequantize(weight.codes[layer, expert_N], weight.scales[layer, expert_N], dtype)
    return round_to(weight[layer, expert_N], dtype)


def _expert_matrix(
    weight: Array | PackedWeight, layer: int, expert: Int32[Array, ""], dtype: DTypeLike
) -> Float[Array, "*matrix"]:
    """Read one expert of one layer in the compute dtype."""
    if isinstance(weight, PackedWeight):
        return dequantize(
            _at(weight.codes, layer, expert), _at(weight.scales, layer, expert), dtype
        )
    return round_to(_at(weight, layer, expert), dtype)


def _at(stack: Array, layer: int, expert: Int32[Array, ""]) -> Array:
    """Slice out stack[layer, expert] at once; stack[layer] first would copy the layer."""
    start = (layer, expert, *([0] * (stack.ndim - 2)))
    return lax.dynamic_slice(stack, start, (1, 1, *stack.shape[2:])).reshape(stack.shape[2:])
