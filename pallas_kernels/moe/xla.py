"""Routed experts in XLA: sort the assignments by expert, one scan over tiles of rows of one expert.

The sorted assignments are a ragged batch whose rows are the experts, cut into row-aligned tiles.
The tile count is static (the most that any routing needs, so nothing is dropped); tiles without
work are skipped. A tile reads its expert's weights straight from the stack of all layers, and
unpacks MXFP4 then.

The combine gathers every token's results and adds them in the order of its choices: no atomics, so
the result is deterministic and does not depend on the other tokens.

Dims: `TA` assignments (token, choice), `Bn` tiles, `Tb` rows of a tile.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.moe.mxfp4 import PackedWeight, dequantize
from pallas_kernels.numerics import contract, round_to
from pallas_kernels.ragged import row_blocks, to_blocks

SMALL_TILE, LARGE_TILE = 8, 64
SMALL_TILE_MAX_ASSIGNMENTS = 1024


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
    num_experts = w2.shape[1]
    num_choices, num_assignments = ids_TA.shape[1], ids_TA.size
    tile_rows = SMALL_TILE if num_assignments <= SMALL_TILE_MAX_ASSIGNMENTS else LARGE_TILE

    with jax.named_scope("sort"):
        expert_TA = ids_TA - first_expert
        is_local_TA = (expert_TA >= 0) & (expert_TA < num_experts)
        expert_flat = jnp.where(is_local_TA, expert_TA, num_experts).reshape(-1)
        order = jnp.argsort(expert_flat, stable=True).astype(jnp.int32)
        first_of_expert = jnp.searchsorted(
            expert_flat[order], jnp.arange(num_experts + 1, dtype=jnp.int32)
        )
        tiles = row_blocks(
            first_of_expert.astype(jnp.int32), num_tokens=num_assignments, block=tile_rows
        )

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
        token_BnTb = to_blocks(order // num_choices, tiles)
        _, y_BnTbL = lax.scan(tile, None, (tiles.row_Bn, token_BnTb))

    with jax.named_scope("combine"):
        slot_TA = tiles.slot_T[jnp.argsort(order)].reshape(
            ids_TA.shape
        )  # out of range where not local
        y_slots = y_BnTbL.reshape(-1, z_TL.shape[1])
        y_TL = jnp.zeros(z_TL.shape, jnp.float32)
        for choice in range(num_choices):
            y_choice = y_slots.at[slot_TA[:, choice]].get(mode="fill", fill_value=0.0)
            y_TL += (
                jnp.where(is_local_TA[:, choice], weights_TA[:, choice], 0.0)[:, None] * y_choice
            )
    return y_TL


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
