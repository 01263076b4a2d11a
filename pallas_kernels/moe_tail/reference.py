"""Reference MoE tail: all partials everywhere, summed in the order of the ranks."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from pallas_kernels.numerics import contract, round_to


def moe_tail(
    routed_TL: Float[Array, "T L"],
    shared_TH: Float[Array, "T H"],
    gain_L: Float[Array, " L"],
    up_HL: Float[Array, "H L"],
    *,
    axis: str,
    eps: float,
) -> Float[Array, "T H"]:
    """See `api.moe_tail`."""
    latent, shared = (
        jnp.sum(lax.all_gather(partial.astype(jnp.float32), axis), axis=0)
        for partial in (routed_TL, shared_TH)
    )
    scale = lax.rsqrt(jnp.mean(latent * latent, axis=1, keepdims=True) + eps)
    normed = round_to(latent * scale * gain_L.astype(jnp.float32)[None, :], up_HL.dtype)
    return round_to(contract("tl,hl->th", normed, up_HL) + shared, up_HL.dtype)
