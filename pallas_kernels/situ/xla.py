"""Gated activations in XLA; they fuse with their neighbours."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.numerics import round_to


def situ_glu(
    gate: Float[Array, "*dims"],
    up: Float[Array, "*dims"],
    *,
    beta: float,
    linear_beta: float | None,
) -> Float[Array, "*dims"]:
    """See `api.situ_glu`."""
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    if linear_beta is not None:
        u = linear_beta * jnp.tanh(u / linear_beta)
    return round_to(beta * jnp.tanh(g / beta) * jax.nn.sigmoid(g) * u, gate.dtype)


def swiglu(gate: Float[Array, "*dims"], up: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """See `api.swiglu`."""
    return round_to(jax.nn.silu(gate.astype(jnp.float32)) * up.astype(jnp.float32), gate.dtype)
