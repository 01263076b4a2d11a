"""Reference routed experts: every expert on every token, weighted, in float32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.moe.mxfp4 import PackedWeight, dequantize
from pallas_kernels.numerics import contract


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
    w13_E2FL, w2_ELF = _layer(w13, layer), _layer(w2, layer)
    num_experts = w2_ELF.shape[0]
    chosen_TAE = jax.nn.one_hot(ids_TA - first_expert, num_experts, dtype=jnp.bool_)
    mix_TE = jnp.sum(jnp.where(chosen_TAE, weights_TA[:, :, None], 0.0), axis=1)
    local_T1 = jnp.any(chosen_TAE, axis=(1, 2))[:, None]
    x_TL = jnp.where(local_T1, z_TL.astype(jnp.float32), 0.0)
    hidden_2ETF = contract("tl,egfl->getf", x_TL, w13_E2FL)
    out_ETL = contract("etf,elf->etl", activation(hidden_2ETF[0], hidden_2ETF[1]), w2_ELF)
    return contract("te,etl->tl", mix_TE, out_ETL)


def _layer(weight: Array | PackedWeight, layer: int) -> Float32[Array, " E *matrix"]:
    """Return one layer's dense float32 weights."""
    if isinstance(weight, PackedWeight):
        return dequantize(weight.codes[layer], weight.scales[layer], jnp.float32)
    return weight[layer].astype(jnp.float32)
