"""The per-channel decay gate, one definition for every implementation."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def kda_gate(
    f_TNDk: Float[Array, "T N Dk"],
    A_log_N: Float32[Array, " N"],
    dt_bias_NDk: Float32[Array, "N Dk"],
    lower_bound: float | None,
) -> Float32[Array, "T N Dk"]:
    """Return the log decay g <= 0 of each token, head and key channel, in float32.

    With a lower bound, g = lower_bound * sigmoid(exp(A_log) * (f + dt_bias)); without one,
    g = -exp(A_log) * softplus(f + dt_bias). Neither is a clamp of the other (KF-K02).
    """
    rate_N1 = jnp.exp(A_log_N)[None, :, None]
    x_TNDk = f_TNDk.astype(jnp.float32) + dt_bias_NDk[None]
    if lower_bound is None:
        return -rate_N1 * jax.nn.softplus(x_TNDk)
    return lower_bound * jax.nn.sigmoid(rate_N1 * x_TNDk)
