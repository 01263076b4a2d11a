"""Reference short convolution: one token at a time, in float32, sliding a window per row."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from pallas_kernels.numerics import round_to
from pallas_kernels.ragged import row_ids


def short_conv(
    x_TK: Float[Array, "T K"],
    weight_KX: Float32[Array, "K X"],
    history_SXhK: Float[Array, "S Xh K"],
    row_offsets: Int32[Array, " S1"],
) -> tuple[Float[Array, "T K"], Float[Array, "S Xh K"]]:
    """See `api.short_conv`."""
    num_rows = history_SXhK.shape[0]

    def token(history: Array, inputs: tuple[Array, Array]) -> tuple[Array, Array]:
        x_K, row = inputs
        window_XK = jnp.concatenate([history[jnp.minimum(row, num_rows - 1)], x_K[None]])
        y_K = jax.nn.silu(jnp.sum(weight_KX.T * window_XK.astype(jnp.float32), axis=0))
        y_K = jnp.where(row < num_rows, y_K, 0.0)
        return history.at[row].set(window_XK[1:], mode="drop"), round_to(y_K, x_TK.dtype)

    new_history, y_TK = lax.scan(token, history_SXhK, (x_TK, row_ids(row_offsets, x_TK.shape[0])))
    return y_TK, new_history


def short_conv_step(
    x_SK: Float[Array, "S K"],
    weight_KX: Float32[Array, "K X"],
    history_SXhK: Float[Array, "S Xh K"],
) -> tuple[Float[Array, "S K"], Float[Array, "S Xh K"]]:
    """See `api.short_conv_step`."""
    return short_conv(x_SK, weight_KX, history_SXhK, jnp.arange(x_SK.shape[0] + 1, dtype=jnp.int32))
