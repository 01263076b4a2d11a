"""What the kernels for Hopper on the page pool share: places in a page, and a token's arithmetic.

All of them run one block of 128 threads a row and head, take the state through registers in two
halves of 64 value rows, and must agree bitwise on the state after a token: it has one definition
here.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

DIM = 128  # of a head, and of a row of the pool as a kernel sees it
TAPS = 4
HALF = 64  # value rows of a register tile
WINDOW = (TAPS - 1) * 3  # entries of a window: q, k, v of each tap; new tokens come behind

TILE = plgpu.Layout.WGMMA
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)
CHANNEL = plgpu.Layout.WG_STRIDED((DIM,), vec_size=1)
_SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)


def check_supported(
    activations: Array, num_taps: int, pool_ZPWE: Array, lower_bound: float | None
) -> None:
    """Raise NotImplementedError for arguments outside those of the released model.

    Args:
      activations: any of them; the last axis is the head dim.
    """
    if activations.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 activations: got {activations.dtype}")
    if (activations.shape[-1], num_taps) != (DIM, TAPS):
        got = f"head dim {activations.shape[-1]} and {num_taps} taps"
        raise NotImplementedError(f"takes head dim {DIM} and {TAPS} taps: got {got}")
    if lower_bound is None:
        raise NotImplementedError("takes bounded gates: got lower_bound None")
    page_words = pool_ZPWE.shape[2] * pool_ZPWE.shape[3]
    if page_words % DIM:
        raise NotImplementedError(f"takes pages of a multiple of {DIM} words: got {page_words}")


def pool_ref(pool_ZPWE: Array) -> Any:
    """A mutable pool of rows of `DIM` words, which a kernel updates in place."""
    return jax.new_ref(pool_ZPWE.reshape(*pool_ZPWE.shape[:2], -1, DIM))


def window_row(entry: int, heads: int, head: Array) -> pl.Slice:
    """Return where a page holds an entry of a head's window: tap * 3 + part of q, k, v."""
    return pl.ds((2 * DIM + entry) * heads + head, 1)


def state_rows(half: int, plane: int, heads: int, head: Array) -> pl.Slice:
    """Return where a page holds a plane of half a head's state."""
    return pl.ds((plane * heads + head) * DIM + half * HALF, HALF)


def state_scratch() -> Any:
    """Room for a head's state: [half, plane, value row, key channel]."""
    return plgpu.SMEM((2, 2, HALF, DIM), jnp.uint16, transforms=_SWIZZLED)


def load_channels(ref: Any) -> Array:
    """Load DIM numbers from global memory, one a thread."""
    return plgpu.load(ref, layout=CHANNEL, optimized=False)


def copy_page_in(
    page_g: Any, window_s: Any, state_s: Any, window_full: Any, half_full: Any, heads: int
) -> None:
    """Ask for this block's window and state of a page."""
    head = lax.axis_index("head")
    for entry in range(WINDOW):
        old = page_g.at[window_row(entry, heads, head)]
        plgpu.copy_gmem_to_smem(old, window_s.at[pl.ds(entry, 1)], window_full)
    for half in range(2):
        for plane in range(2):
            old = page_g.at[state_rows(half, plane, heads, head)]
            plgpu.copy_gmem_to_smem(old, state_s.at[half, plane], half_full.at[half])


def copy_window_out(window_s: Any, first: Any, page_g: Any, heads: int) -> None:
    """Start to store the window that begins with entry `first`."""
    for entry in range(WINDOW):
        after = page_g.at[window_row(entry, heads, lax.axis_index("head"))]
        plgpu.copy_smem_to_gmem(window_s.at[pl.ds(first + entry, 1)], after)


def copy_half_out(state_s: Any, half: int, page_g: Any, heads: int) -> None:
    """Start to store half a state."""
    for plane in range(2):
        after = page_g.at[state_rows(half, plane, heads, lax.axis_index("head"))]
        plgpu.copy_smem_to_gmem(state_s.at[half, plane], after)


def zero_window(window_s: Any) -> None:
    """Overwrite the window of a row that starts from zeros."""
    for entry in range(WINDOW):
        window_s[entry] = plgpu.layout_cast(jnp.zeros((DIM,), jnp.uint16), CHANNEL)


def read_half(half_s: Any, source: Array) -> Array:
    """Half a state as a float32 tile; zeros for a row that starts from them."""

    @pl.when(source == 0)
    def _() -> None:
        for plane in range(2):
            half_s[plane] = plgpu.layout_cast(jnp.zeros((HALF, DIM), jnp.uint16), TILE)

    high, low = (plgpu.load(half_s.at[plane], layout=TILE).astype(jnp.uint32) for plane in range(2))
    return lax.bitcast_convert_type((high << 16) | low, jnp.float32)


def write_half(half_s: Any, state: Array) -> None:
    """Put half a state where it came from."""
    bits = lax.bitcast_convert_type(state, jnp.uint32)
    half_s[0] = (bits >> 16).astype(jnp.uint16)
    half_s[1] = bits.astype(jnp.uint16)


def words_to_f32(words: Array) -> Array:
    """Numbers whose bfloat16 words these are."""
    return lax.bitcast_convert_type(words, jnp.bfloat16).astype(jnp.float32)


def _apart(product: Array) -> Array:
    """Return a product, never joined with a sum behind it.

    The bound changes no finite number. Without it the compiler chooses which product of a sum it
    joins with the addition, not alike in all kernels, and their results differ by a rounding.
    """
    return jnp.maximum(product, jnp.finfo(jnp.float32).min)


def convolve(taps: Sequence[Array], inputs: Sequence[Array]) -> Array:
    """Convolution with SiLU, rounded to bfloat16 as the model does; a channel a thread."""
    total = _apart(taps[0] * inputs[0])
    for tap in range(1, TAPS):
        total = total + taps[tap] * inputs[tap]
    return (total * jax.nn.sigmoid(total)).astype(jnp.bfloat16)


def normalise(x: Array) -> Array:
    """L2-normalise; a channel a thread."""
    x = x.astype(jnp.float32)
    return x * lax.rsqrt(jnp.sum(x * x) + 1e-6)


def decay(f: Array, dt_bias: Array, rate: Array, lower_bound: float) -> Array:
    """Factor by which a token shrinks the state; a channel a thread."""
    return jnp.exp(lower_bound * jax.nn.sigmoid(rate * (f.astype(jnp.float32) + dt_bias)))


def column(ref: Any) -> Array:
    """Load DIM numbers, one a column of a state tile."""
    values = plgpu.load(ref, layout=COLUMN, optimized=False)
    return lax.broadcast_in_dim(values, (HALF, DIM), (1,))


def row(ref: Any) -> Array:
    """Load HALF numbers, one a row of a state tile."""
    return plgpu.load(ref, layout=ROW, optimized=False)


def shrink(state: Array, decay: Array) -> Array:
    """Return the state, decayed."""
    return _apart(state * decay)


def fold(shrunk: Array, u: Array, k: Array) -> Array:
    """Return the state after a token."""
    return shrunk + lax.broadcast_in_dim(u, (HALF, DIM), (0,)) * k


def gated_norm(o: Array, out_scale: Array, eps: float) -> Array:
    """Return the norm of an output that was rounded to bfloat16; a channel a thread."""
    o = o.astype(jnp.bfloat16).astype(jnp.float32)
    return o * lax.rsqrt(jnp.sum(o * o) * (1.0 / DIM) + eps) * out_scale
