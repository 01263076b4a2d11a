"""States of KDA layers in the page pool `[Z, P, W, E]`, uint16: position, page, token, word.

A page's words in order are the recurrent state `[N, Dv, Dk]` (value-major, float32), the
convolution window `[Xh, 3, N, D]` in the compute dtype, and padding; `pallas_kernels.words` says
how numbers become words. The state comes first so that its tiles are aligned for bulk copies. Page
0 is the null page: read as zeros, never written.
"""

import math

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Int32, UInt16

from pallas_kernels.words import from_words, to_words, words_per_number


def read_states(
    pool_ZPWE: UInt16[Array, "Z P W E"],
    pages_S: Int32[Array, " S"],
    window_shape: tuple[int, int, int, int],
    dtype: DTypeLike,
    *,
    position: int,
) -> tuple[Float[Array, "S Xh 3 N D"], Float32[Array, "S N D D"], UInt16[Array, "Z P W E"]]:
    """Convolution windows and recurrent states of some rows, and the pool to write them back to.

    Args:
      pages_S: the rows' state pages; a row with the null page gets zeros whatever any page holds.
      window_shape: `[Xh, 3, N, D]` of one row. dtype: of the windows.
    """
    num_rows, (_, _, heads, dim) = pages_S.shape[0], window_shape
    split = heads * dim * dim * words_per_number(jnp.float32)
    end = split + math.prod(window_shape) * words_per_number(dtype)
    flat = pool_ZPWE.reshape(*pool_ZPWE.shape[:2], -1)
    # Without the barrier a fusion could read the pages again after they were written, and XLA would
    # keep a copy of the whole pool for it.
    words, pool_ZPWE = lax.optimization_barrier((flat[position, pages_S], pool_ZPWE))
    words = jnp.where((pages_S == 0)[:, None], jnp.zeros_like(words), words)
    state = from_words(words[:, :split], jnp.float32).reshape(num_rows, heads, dim, dim)
    window = from_words(words[:, split:end], dtype).reshape(num_rows, *window_shape)
    return window, state, pool_ZPWE


def write_states(
    pool_ZPWE: UInt16[Array, "Z P W E"],
    pages_S: Int32[Array, " S"],
    window: Float[Array, "S Xh 3 N D"],
    state: Float32[Array, "S N D D"],
    *,
    position: int,
) -> UInt16[Array, "Z P W E"]:
    """Store the states of some rows; rows with the null page are dropped."""
    num_rows, num_pages = pages_S.shape[0], pool_ZPWE.shape[1]
    parts = [to_words(part.reshape(num_rows, -1), part.dtype) for part in (state, window)]
    words = jnp.concatenate(parts, axis=1)
    target_S = jnp.where(pages_S == 0, num_pages, pages_S)
    flat = pool_ZPWE.reshape(*pool_ZPWE.shape[:2], -1)
    flat = flat.at[position, target_S, : words.shape[1]].set(words, mode="drop")
    return flat.reshape(pool_ZPWE.shape)
