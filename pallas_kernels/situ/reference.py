"""Reference gated activations, written with exponentials."""

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
    capped = _cap(g, beta) / (1.0 + jnp.exp(-g))
    return round_to(capped * (u if linear_beta is None else _cap(u, linear_beta)), gate.dtype)


def swiglu(gate: Float[Array, "*dims"], up: Float[Array, "*dims"]) -> Float[Array, "*dims"]:
    """See `api.swiglu`."""
    g, u = gate.astype(jnp.float32), up.astype(jnp.float32)
    return round_to(g / (1.0 + jnp.exp(-g)) * u, gate.dtype)


def _cap(x: Array, bound: float) -> Array:
    """Return bound * tanh(x / bound)."""
    e = jnp.expm1(-2.0 * jnp.abs(x) / bound)
    return bound * jnp.sign(x) * -e / (2.0 + e)
