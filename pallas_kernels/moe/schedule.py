"""Which expert works on which tokens, and the sum over a token's choices.

Work is cut into tiles: some rows of inputs for one expert. The tile count is static (the most that
any routing needs, so nothing is dropped); tiles without work have the expert E.

Dims: `TA` assignments (token, choice), `Bn` tiles, `Tb` rows of a tile.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from pallas_kernels.ragged import row_blocks, to_blocks


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """Tiles of all assignments.

    | field | meaning |
    |---|---|
    | `expert_Bn` | local expert of a tile; E for a tile without work |
    | `token_BnTb` | token in each place; token 0 where a place has no assignment |
    | `slot_TA` | place of an assignment in the flattened tiles; Bn * Tb where not local |
    """

    expert_Bn: Int32[Array, " Bn"]
    token_BnTb: Int32[Array, "Bn Tb"]
    slot_TA: Int32[Array, "T A"]


def local_experts(
    ids_TA: Int32[Array, "T A"], first_expert: int | Int32[Array, ""], num_experts: int
) -> Int32[Array, "T A"]:
    """Return the index of each chosen expert among those held here; `num_experts` elsewhere."""
    expert_TA = ids_TA - first_expert
    is_local_TA: Bool[Array, "T A"] = (expert_TA >= 0) & (expert_TA < num_experts)
    return jnp.where(is_local_TA, expert_TA, num_experts)


def by_expert(expert_TA: Int32[Array, "T A"], *, num_experts: int, tile_rows: int) -> Schedule:
    """Sort the assignments by expert and cut them into tiles of one expert each."""
    num_choices, num_assignments = expert_TA.shape[1], expert_TA.size
    expert_flat = expert_TA.reshape(-1)
    order = jnp.argsort(expert_flat, stable=True).astype(jnp.int32)
    first_of_expert = jnp.searchsorted(
        expert_flat[order], jnp.arange(num_experts + 1, dtype=jnp.int32)
    )
    tiles = row_blocks(
        first_of_expert.astype(jnp.int32), num_tokens=num_assignments, block=tile_rows
    )
    return Schedule(
        expert_Bn=tiles.row_Bn,
        token_BnTb=to_blocks(order // num_choices, tiles),
        slot_TA=tiles.slot_T[jnp.argsort(order)].reshape(expert_TA.shape),
    )


def all_tokens(expert_TA: Int32[Array, "T A"], *, num_experts: int, tile_rows: int) -> Schedule:
    """Give every chosen expert one tile that holds all tokens, without sorting.

    The tile is that of the first assignment to the expert. For at most `tile_rows` tokens.
    """
    num_tokens = expert_TA.shape[0]
    expert_B = expert_TA.reshape(-1)
    first_B = jnp.argmax(expert_B[:, None] == expert_B[None, :], axis=1).astype(jnp.int32)
    place_B = jnp.arange(expert_B.size, dtype=jnp.int32)
    row_T1 = jnp.arange(num_tokens, dtype=jnp.int32)[:, None]
    slot_TA = first_B.reshape(expert_TA.shape) * tile_rows + row_T1
    row_Tb = jnp.arange(tile_rows, dtype=jnp.int32)
    return Schedule(
        expert_Bn=jnp.where(first_B == place_B, expert_B, num_experts),
        token_BnTb=jnp.broadcast_to(
            jnp.where(row_Tb < num_tokens, row_Tb, 0), (expert_B.size, tile_rows)
        ),
        slot_TA=jnp.where(expert_TA < num_experts, slot_TA, expert_B.size * tile_rows),
    )


def combine(
    y_BnTbL: Float32[Array, "Bn Tb L"],
    slot_TA: Int32[Array, "T A"],
    weights_TA: Float32[Array, "T A"],
) -> Float32[Array, "T L"]:
    """Add up every token's results in the order of its choices; what no slot names is not read."""
    num_slots = y_BnTbL.shape[0] * y_BnTbL.shape[1]
    y_slots = y_BnTbL.reshape(num_slots, y_BnTbL.shape[2])
    y_TL = jnp.zeros((slot_TA.shape[0], y_BnTbL.shape[2]), jnp.float32)
    for choice in range(slot_TA.shape[1]):
        slot_T = slot_TA[:, choice]
        y_choice: Float[Array, "T L"] = y_slots.at[slot_T].get(mode="fill", fill_value=0.0)
        weight_T = jnp.where(slot_T < num_slots, weights_TA[:, choice], 0.0)
        y_TL += weight_T[:, None] * y_choice
    return y_TL
