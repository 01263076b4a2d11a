"""Training through MXFP4: experts are rounded in the forward pass, gradients pass unchanged."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from k3jax.config import MXFP4_GROUP
from k3jax.weights.mxfp4 import MAGNITUDES


def rounded(x: Float32[Array, "*lead K"]) -> Float32[Array, "*lead K"]:
    """What `k3jax.weights.mxfp4.quantize` and its inverse make of float32 numbers."""
    groups = x.reshape(*x.shape[:-1], -1, MXFP4_GROUP)
    largest = jnp.max(jnp.abs(groups), axis=-1, keepdims=True)
    _, exponent = jnp.frexp(largest)  # largest = fraction * 2^exponent, fraction in [0.5, 1)
    scale = jnp.ldexp(jnp.ones_like(largest), exponent - 3)
    scaled = jnp.abs(groups) / scale
    # Steps of 0.5, 1 and 2 below 2, 4 and 8; jnp.round takes ties to even.
    step = jnp.where(scaled < 2, 0.5, jnp.where(scaled < 4, 1.0, 2.0))
    nearest = jnp.minimum(jnp.round(scaled / step) * step, MAGNITUDES[-1])
    return (jnp.sign(groups) * nearest * scale).reshape(x.shape)


def through(x: Float32[Array, "*lead K"]) -> Float32[Array, "*lead K"]:
    """`rounded` with the gradient of the identity."""
    return x + jax.lax.stop_gradient(rounded(x) - x)
