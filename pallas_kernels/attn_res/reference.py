"""Reference attention-residual mix: attention over stacked sources, normed keys, raw values."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.numerics import contract, round_to


def attn_res_mix(
    sources: tuple[Float[Array, "T H"], ...],
    norm_weight_H: Float[Array, " H"],
    proj_weight_H: Float[Array, " H"],
    *,
    eps: float,
) -> Float[Array, "T H"]:
    """See `api.attn_res_mix`."""
    value_BTH = jnp.stack(sources).astype(jnp.float32)
    rms_BT1 = jnp.sqrt(jnp.mean(value_BTH**2, axis=-1, keepdims=True) + eps)
    key_BTH = value_BTH / rms_BT1 * norm_weight_H.astype(jnp.float32)[None, None, :]
    score_BT = contract("bth,h->bt", key_BTH, proj_weight_H.astype(jnp.float32))
    weight_BT = jnp.exp(score_BT - jnp.max(score_BT, axis=0, keepdims=True))
    weight_BT = weight_BT / jnp.sum(weight_BT, axis=0, keepdims=True)
    return round_to(contract("bt,bth->th", weight_BT, value_BTH), sources[0].dtype)
