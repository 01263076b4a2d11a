"""The page pool on the device: one buffer, two views (cache-semantics.md section 2).

`pool [R, Z, P, W, words]`, uint16: `R` ranks, `Z` layer positions, `P` pages, `W` tokens in a page.
Inside `shard_map` a rank sees its own `[Z, P, W, words]`.

* MLA view: entry `w` of page `p` at position `z` is `pool[z, p, w]`.
* KDA view: one state, laid out as `pallas_kernels.kda.pages` says.

Words are 16-bit so that no float type can change a bit pattern on the way; a float32 is its high
and its low half in two planes. Page 0 is the null page: it is never written and nobody reads it as
data.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int32, UInt16

from k3jax.cache_spec import CacheSpec
from k3jax.config import DTYPE_BYTES, CacheConfig, Dtype, ModelConfig

WORD_BYTES = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolLayout:
    """Static shape of one rank's pool.

    Attributes:
      entry_words: of one token's MLA entry.
      conv_shape: `[Xh, 3, N, D]` of one rank. state_shape: `[N, Dv, Dk]` of one rank.
      dtype: of MLA entries and convolution windows.
    """

    num_positions: int
    num_pages: int
    page_tokens: int
    entry_words: int
    conv_shape: tuple[int, int, int, int]
    state_shape: tuple[int, int, int]
    dtype: Dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """`[Z, P, W, words]`."""
        return (self.num_positions, self.num_pages, self.page_tokens, self.entry_words)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * WORD_BYTES

    @property
    def conv_words(self) -> int:
        return math.prod(self.conv_shape) * DTYPE_BYTES[self.dtype] // WORD_BYTES

    @property
    def state_words(self) -> int:
        return math.prod(self.state_shape) * 4 // WORD_BYTES


def pool_layout(
    cfg: ModelConfig, cache: CacheConfig, spec: CacheSpec, *, tp: int, dtype: Dtype
) -> PoolLayout:
    """Layout of one rank's pool.

    Raises:
      ValueError: a KDA state does not fit in a page.
    """
    heads = cfg.kda_num_heads // tp
    layout = PoolLayout(
        num_positions=spec.num_positions,
        num_pages=cache.num_pages,
        page_tokens=cache.page_tokens,
        entry_words=spec.token_bytes // WORD_BYTES,
        conv_shape=(cfg.conv_width - 1, 3, heads, cfg.kda_head_dim),
        state_shape=(heads, cfg.kda_head_dim, cfg.kda_head_dim),
        dtype=dtype,
    )
    page_words = layout.page_tokens * layout.entry_words
    if layout.conv_words + layout.state_words > page_words:
        raise ValueError(
            f"page_tokens is too small for a KDA state: got {layout.page_tokens} tokens = "
            f"{page_words * WORD_BYTES} bytes; expected at least {spec.state_bytes} bytes"
        )
    return layout


def clear_pages(
    pool: UInt16[Array, "Z P W words"], pages: Int32[Array, " K"]
) -> UInt16[Array, "Z P W words"]:
    """Zero whole pages in every layer position. Ids beyond the pool are padding."""
    return pool.at[:, pages].set(jnp.uint16(0), mode="drop")


def copy_pages(
    pool: UInt16[Array, "Z P W words"], copies: Int32[Array, "3 K"]
) -> UInt16[Array, "Z P W words"]:
    """Copy the first tokens of some pages onto other pages, in every layer position.

    All sources of a layer position are read before any target is written. One position at a time,
    since a page of the released model has 21 MB in all of them.

    Args:
      copies: source pages, target pages, and how many tokens of each; targets beyond the pool are
        padding. What a target holds behind these tokens stays.
    """
    num_positions, num_pages, page_tokens, _ = pool.shape
    sources_K, targets_K, tokens_K = copies
    offset_1W = jnp.arange(page_tokens, dtype=jnp.int32)[None]
    target_KW = jnp.where(offset_1W < tokens_K[:, None], targets_K[:, None], num_pages)

    def copy_position(position: Int32[Array, ""], pool: Array) -> Array:
        # Without the barrier the pages could be read while they are written, as in
        # `pallas_kernels.kda.pages`.
        pages_KWw, pool = lax.optimization_barrier(
            (pool.at[position, sources_K].get(mode="clip"), pool)
        )
        return pool.at[position, target_KW, offset_1W].set(pages_KWw, mode="drop")

    return lax.fori_loop(0, num_positions, copy_position, pool)


def abstract_pool(layout: PoolLayout, num_ranks: int) -> jax.ShapeDtypeStruct:
    """The global pool `[R, Z, P, W, words]`."""
    return jax.ShapeDtypeStruct((num_ranks, *layout.shape), jnp.uint16)
