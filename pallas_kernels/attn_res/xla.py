"""Attention-residual mix in XLA: the sources are read in place and never stacked."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.numerics import round_to


def attn_res_mix(
    sources: tuple[Float[Array, "T H"], ...],
    norm_weight_H: Float[Array, " H"],
    proj_weight_H: Float[Array, " H"],
    *,
    eps: float,
) -> Float[Array, "T H"]:
    """See `api.attn_res_mix`."""
    query_1H = (norm_weight_H.astype(jnp.float32) * proj_weight_H.astype(jnp.float32))[None, :]

    def score(source_TH: Array) -> Array:
        s_TH = source_TH.astype(jnp.float32)
        return lax.rsqrt(jnp.mean(s_TH * s_TH, axis=-1) + eps) * jnp.sum(s_TH * query_1H, axis=-1)

    weight_BT = jax.nn.softmax(jnp.stack([score(source) for source in sources]), axis=0)
    mix_TH = jnp.zeros(sources[0].shape, jnp.float32)
    for weight_T, source_TH in zip(weight_BT, sources, strict=True):
        mix_TH += weight_T[:, None] * source_TH.astype(jnp.float32)
    return round_to(mix_TH, sources[0].dtype)
