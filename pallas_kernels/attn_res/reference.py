"""Reference boundary of two sub-layers: attention over stacked sources, normed keys, raw values."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from pallas_kernels.numerics import contract, round_to


def attn_res_norm(
    bank: tuple[Float[Array, "T H"], ...],
    prefix_TH: Float[Array, "T H"],
    addend_TH: Float[Array, "T H"] | None,
    mix_weights: tuple[Float[Array, " H"], Float[Array, " H"]] | None,
    gain_H: Float[Array, " H"],
    *,
    eps: float,
) -> tuple[Float[Array, "T H"], Float[Array, "T H"]]:
    """See `api.attn_res_norm`."""
    dtype = prefix_TH.dtype
    if addend_TH is not None:
        both_2TH = jnp.stack([prefix_TH, addend_TH]).astype(jnp.float32)
        prefix_TH = round_to(jnp.sum(both_2TH, axis=0), dtype)
    value_BTH = jnp.stack([*bank, prefix_TH]).astype(jnp.float32)
    mix_TH = value_BTH[0]
    if mix_weights is not None:
        norm_H, proj_H = (weight_H.astype(jnp.float32) for weight_H in mix_weights)
        key_BTH = _normed(value_BTH, eps) * norm_H[None, None, :]
        score_BT = contract("bth,h->bt", key_BTH, proj_H)
        weight_BT = jnp.exp(score_BT - jnp.max(score_BT, axis=0, keepdims=True))
        weight_BT = weight_BT / jnp.sum(weight_BT, axis=0, keepdims=True)
        mix_TH = round_to(contract("bt,bth->th", weight_BT, value_BTH), dtype)
    x_TH = _normed(mix_TH.astype(jnp.float32), eps) * gain_H.astype(jnp.float32)[None, :]
    return prefix_TH, round_to(x_TH, dtype)


def _normed(x: Float32[Array, "*lead H"], eps: float) -> Float32[Array, "*lead H"]:
    return x / jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + eps)
