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
    export_tokens_S: Int32[Array, " S"],
) -> tuple[Float[Array, "T K"], Float[Array, "S Xh K"], Float[Array, "S Xh K"]]:
    """See `api.short_conv`."""
    num_tokens, num_rows = x_TK.shape[0], history_SXhK.shape[0]
    last_exported_S = row_offsets[:-1] + export_tokens_S - 1

    def token(
        histories: tuple[Array, Array], inputs: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], Array]:
        (history, exported), (x_K, row, token_idx) = histories, inputs
        window_XK = jnp.concatenate([history[jnp.minimum(row, num_rows - 1)], x_K[None]])
        y_K = jax.nn.silu(jnp.sum(weight_KX.T * window_XK.astype(jnp.float32), axis=0))
        y_K = jnp.where(row < num_rows, y_K, 0.0)
        is_exported = last_exported_S.at[row].get(mode="fill", fill_value=-1) == token_idx
        exported = exported.at[jnp.where(is_exported, row, num_rows)].set(
            window_XK[1:], mode="drop"
        )
        history = history.at[row].set(window_XK[1:], mode="drop")
        return (history, exported), round_to(y_K, x_TK.dtype)

    inputs = (x_TK, row_ids(row_offsets, num_tokens), jnp.arange(num_tokens, dtype=jnp.int32))
    (new_history, exported), y_TK = lax.scan(token, (history_SXhK, history_SXhK), inputs)
    return y_TK, new_history, exported


def short_conv_step(
    x_SK: Float[Array, "S K"],
    weight_KX: Float32[Array, "K X"],
    history_SXhK: Float[Array, "S Xh K"],
) -> tuple[Float[Array, "S K"], Float[Array, "S Xh K"]]:
    """See `api.short_conv_step`."""
    num_rows = x_SK.shape[0]
    rows = (jnp.arange(num_rows + 1, dtype=jnp.int32), jnp.zeros(num_rows, jnp.int32))
    y_SK, history_SXhK, _ = short_conv(x_SK, weight_KX, history_SXhK, *rows)
    return y_SK, history_SXhK
