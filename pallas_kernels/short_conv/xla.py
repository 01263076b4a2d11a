"""Short convolution in XLA: one shifted multiply-add per tap, all tokens at once.

Tap j of token t reads the input `back = X-1-j` tokens earlier: inside the row that is the flat
array shifted by `back`; before the row's start it is a place in the row's history.
"""

import jax
import jax.numpy as jnp
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
    num_tokens, num_rows, kept = x_TK.shape[0], history_SXhK.shape[0], history_SXhK.shape[1]
    row_T = row_ids(row_offsets, num_tokens)
    safe_T = jnp.minimum(row_T, num_rows - 1)
    position_T = jnp.arange(num_tokens, dtype=jnp.int32) - row_offsets[safe_T]

    total_TK = jnp.zeros(x_TK.shape, jnp.float32)
    for tap in range(kept + 1):
        back = kept - tap
        inside_TK = jnp.pad(x_TK, ((back, 0), (0, 0)))[:num_tokens]
        before_TK = (
            history_SXhK[safe_T, jnp.clip(position_T + tap, 0, kept - 1)] if back else inside_TK
        )
        input_TK = jnp.where((position_T >= back)[:, None], inside_TK, before_TK)
        total_TK += weight_KX[:, tap][None, :] * input_TK.astype(jnp.float32)
    y_TK = jnp.where((row_T < num_rows)[:, None], jax.nn.silu(total_TK), 0.0)
    first_S = row_offsets[:-1]
    new_history = _history_after(x_TK, history_SXhK, first_S, row_offsets[1:] - first_S)
    exported = _history_after(x_TK, history_SXhK, first_S, export_tokens_S)
    return round_to(y_TK, x_TK.dtype), new_history, exported


def short_conv_step(
    x_SK: Float[Array, "S K"],
    weight_KX: Float32[Array, "K X"],
    history_SXhK: Float[Array, "S Xh K"],
) -> tuple[Float[Array, "S K"], Float[Array, "S Xh K"]]:
    """See `api.short_conv_step`."""
    window_SXK = jnp.concatenate([history_SXhK, x_SK[:, None]], axis=1)
    total_SK = jnp.sum(weight_KX.T[None] * window_SXK.astype(jnp.float32), axis=1)
    return round_to(jax.nn.silu(total_SK), x_SK.dtype), window_SXK[:, 1:]


def _history_after(
    x_TK: Array, history_SXhK: Array, first_S: Array, length_S: Array
) -> Float[Array, "S Xh K"]:
    """Return the last X-1 entries of each row's old history followed by `length_S` tokens.

    `first_S` is the flat index of each row's first token.
    """
    num_rows, kept, _ = history_SXhK.shape
    place_Xh = jnp.arange(kept, dtype=jnp.int32)[None, :]
    position_SXh = length_S[:, None] - kept + place_Xh  # in the row; negative: in the old history
    token_SXh = first_S[:, None] + position_SXh
    new_SXhK = x_TK[jnp.clip(token_SXh, 0, x_TK.shape[0] - 1)]
    row_S = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
    old_SXhK = history_SXhK[row_S, jnp.minimum(length_S[:, None] + place_Xh, kept - 1)]
    return jnp.where((position_SXh >= 0)[:, :, None], new_SXhK, old_SXhK)
