"""Boundary of two sub-layers in XLA: the sources are read in place and never stacked."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32

from pallas_kernels.numerics import round_to


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
        total_TH = prefix_TH.astype(jnp.float32) + addend_TH.astype(jnp.float32)
        prefix_TH = round_to(total_TH, dtype)
    mix_TH = prefix_TH
    if mix_weights is not None:
        mix_TH = round_to(mix((*bank, prefix_TH), *mix_weights, eps=eps), dtype)
    mix_TH = mix_TH.astype(jnp.float32)
    scale_T1 = lax.rsqrt(jnp.mean(jnp.square(mix_TH), axis=-1, keepdims=True) + eps)
    x_TH = round_to(mix_TH * scale_T1 * gain_H.astype(jnp.float32)[None, :], dtype)
    return prefix_TH, x_TH


def mix(
    sources: tuple[Float[Array, "T H"], ...],
    norm_H: Float[Array, " H"],
    proj_H: Float[Array, " H"],
    *,
    eps: float,
) -> Float32[Array, "T H"]:
    """Mix the sources by their scores, see the formulas of `api`."""
    query_1H = (norm_H.astype(jnp.float32) * proj_H.astype(jnp.float32))[None, :]

    def score(source_TH: Array) -> Array:
        s_TH = source_TH.astype(jnp.float32)
        return lax.rsqrt(jnp.mean(s_TH * s_TH, axis=-1) + eps) * jnp.sum(s_TH * query_1H, axis=-1)

    weight_BT = jax.nn.softmax(jnp.stack([score(source) for source in sources]), axis=0)
    mix_TH = jnp.zeros(sources[0].shape, jnp.float32)
    for weight_T, source_TH in zip(weight_BT, sources, strict=True):
        mix_TH += weight_T[:, None] * source_TH.astype(jnp.float32)
    return mix_TH
