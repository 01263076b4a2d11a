"""Routed experts on Hopper: two grouped products on packed weights, activation fused in the first.

Dims: `Bn` tiles, `Tb` tokens of a tile.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels import settings
from pallas_kernels.hopper import require_hopper
from pallas_kernels.moe import schedule
from pallas_kernels.moe.fragments import fragment_order
from pallas_kernels.moe.mosaic_product import K_MULTIPLE, Ring, grouped_product
from pallas_kernels.moe.mxfp4 import PackedWeight
from pallas_kernels.numerics import round_to

SMALL_TILE = 8
PROVEN_TOKENS = 2048  # up to here measured to be faster than XLA, on an H200
_MAX_ROWS = 2**31 - 1  # row numbers are int32


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
    interpret: Any = None,
) -> Float32[Array, "T L"]:
    """See `api.moe_experts`; `interpret` are parameters of the interpreter, None compiles."""
    if interpret is None:
        require_hopper()
    w13, w2 = _supported(z_TL, w13, w2)
    num_experts = w2.shape[1]
    num_tokens = z_TL.shape[0]

    with jax.named_scope("sort"):
        expert_TA = schedule.local_experts(ids_TA, first_expert, num_experts)
        share_inputs = num_tokens <= SMALL_TILE
        tile_rows = SMALL_TILE if share_inputs else _tile_rows(num_tokens)
        cut = schedule.all_tokens if share_inputs else schedule.by_expert
        tiles = cut(expert_TA, num_experts=num_experts, tile_rows=tile_rows)
        token_BxTb = tiles.token_BnTb[:1] if share_inputs else tiles.token_BnTb
        x_BxTbL = fragment_order(z_TL)[token_BxTb]

    with jax.named_scope("tiles"):
        pdl = settings.current().pdl and interpret is None
        launch = {"ring": Ring(), "pdl": pdl, "interpret": interpret}
        has_work_Bn = tiles.expert_Bn < num_experts
        matrix_Bn = jnp.where(has_work_Bn, layer * num_experts + tiles.expert_Bn, -1)
        act_BnTbF = grouped_product(matrix_Bn, x_BxTbL, w13, activation=activation, **launch)
        act_BnTbF = fragment_order(round_to(act_BnTbF, z_TL.dtype))
        y_BnTbL = grouped_product(matrix_Bn, act_BnTbF, w2, activation=None, **launch)

    with jax.named_scope("combine"):
        return schedule.combine(y_BnTbL, tiles.slot_TA, weights_TA)


def unproven(z_TL: Float[Array, "T L"], *_args: object, **_kwargs: object) -> str | None:
    """Why the automatic choice passes these kernels over, for arguments that they would take."""
    if z_TL.shape[0] > PROVEN_TOKENS:
        return f"not shown to be faster than xla above {PROVEN_TOKENS} tokens"
    return None


def _tile_rows(num_tokens: int) -> int:
    """Tokens of a tile; in K3, with 16 of 896 experts, an expert gets num_tokens / 56 of them."""
    return next((rows for rows in (8, 16, 32) if num_tokens <= 32 * rows), 64)


def _supported(
    z_TL: Array, w13: Array | PackedWeight, w2: Array | PackedWeight
) -> tuple[PackedWeight, PackedWeight]:
    """Return the weights.

    Raises:
      NotImplementedError: the kernels do not take these weights or inputs.
    """
    if not isinstance(w13, PackedWeight) or not isinstance(w2, PackedWeight):
        raise NotImplementedError("the weights are not MXFP4-packed")
    if z_TL.dtype != jnp.bfloat16:
        raise NotImplementedError(f"the compute dtype is {z_TL.dtype}; the kernels take bfloat16")
    if w13.shape[0] * w13.shape[1] * 2 * w13.shape[3] > _MAX_ROWS:
        raise NotImplementedError(f"the stack {w13.shape} has more than {_MAX_ROWS} rows")
    for name, size in (("L", z_TL.shape[1]), ("F", w2.shape[-1])):
        if size % K_MULTIPLE:
            raise NotImplementedError(f"{name}={size} is not a multiple of {K_MULTIPLE}")
    return w13, w2
