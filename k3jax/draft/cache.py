"""Context of draft models in the page pool.

Draft layers use layer positions of their own behind the target's attention layers, in the same
pages: a page of a prefix brings the draft's context of that prefix along. An entry that is wider
than the target's takes several positions.

Dims: `X` rows of a block, `N` query heads and `C` numbers of an entry on this rank, `Wt` slots of a
tile, `K` positions that an entry takes.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt16

from k3jax.config import Dtype
from k3jax.draft.config import DraftConfig, GqaShape, MlaShape, positions_per_entry
from pallas_kernels.numerics import contract, round_to
from pallas_kernels.words import from_words, to_words, words_per_number

_MAX_TILE_TOKENS = 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DraftCache:
    """Where the entries of a draft lie on one rank.

    Attributes:
      first: layer position of the first draft layer.
      target_width: numbers of an entry of the target.
      width: numbers of an entry of the draft.
      dtype: what the pool stores.
    """

    first: int
    target_width: int
    width: int
    dtype: Dtype

    @property
    def positions_per_layer(self) -> int:
        """How many positions an entry takes."""
        return positions_per_entry(self.width, self.target_width)

    def positions(self, layer: int) -> range:
        """Layer positions of a draft layer."""
        start = self.first + layer * self.positions_per_layer
        return range(start, start + self.positions_per_layer)


def write(
    pool: UInt16[Array, "Z P W words"],
    entries: Float[Array, "L T C"],
    pages: Int32[Array, " T"],
    offsets: Int32[Array, " T"],
    cache: DraftCache,
) -> UInt16[Array, "Z P W words"]:
    """Store the entries of all draft layers; pages beyond the pool drop a token."""
    pad = cache.positions_per_layer * cache.target_width - cache.width
    parts = jnp.pad(entries, ((0, 0), (0, 0), (0, pad)))
    parts = parts.reshape(*entries.shape[:2], cache.positions_per_layer, cache.target_width)
    for layer in range(entries.shape[0]):
        for part, position in enumerate(cache.positions(layer)):
            words = to_words(parts[layer, :, part], cache.dtype)
            pool = pool.at[position, pages, offsets].set(words, mode="drop")
    return pool


def attend(
    pool: UInt16[Array, "Z P W words"],
    page_table: Int32[Array, "S M"],
    anchors: Int32[Array, " S"],
    query: Float[Array, "S X N Dq"],
    own: Float[Array, "S X C"],
    cfg: DraftConfig,
    cache: DraftCache,
    layer: int,
) -> Float[Array, "S X N Dz"]:
    """Attention of blocks over their context in the pool and over themselves.

    Args:
      page_table: pages of each row; past its context any page may stand.
      anchors: position of each block's first token: the slots before it are its context.
      own: entries of the block.
    """
    rows, width = query.shape[:2]
    place = jnp.arange(width, dtype=jnp.int32)
    inside = (place[:, None] >= place[None]) | (not cfg.is_causal)
    state = _merge(None, query, own, jnp.broadcast_to(inside[None], (rows, width, width)), cfg)
    tiles, pages = _tiles(pool, page_table, cache, layer)
    tile_tokens = tiles.shape[2]
    oldest = anchors - cfg.window if cfg.window is not None else jnp.zeros_like(anchors)

    def column(
        state: tuple[Array, ...], inputs: tuple[Array, Array]
    ) -> tuple[tuple[Array, ...], None]:
        page, first_slot = inputs
        slot = first_slot + jnp.arange(tile_tokens, dtype=jnp.int32)[None]
        seen = (slot < anchors[:, None]) & (slot >= oldest[:, None])
        words = tiles[:, page]  # [K, S, Wt, words]
        parts = from_words(jnp.moveaxis(words, 0, 2), cache.dtype)
        entries = parts.reshape(rows, tile_tokens, -1)[..., : cache.width]
        # What an unused page holds, NaN included, must not leak.
        entries = jnp.where(seen[:, :, None], round_to(entries, query.dtype), 0).astype(query.dtype)
        visible = jnp.broadcast_to(seen[:, None], (rows, width, tile_tokens))
        return _merge(state, query, entries, visible, cfg), None

    first_slots = jnp.arange(pages.shape[1], dtype=jnp.int32) * tile_tokens
    (_, total, value), _ = lax.scan(column, state, (pages.T, first_slots))
    return round_to(value / total[..., None], query.dtype)


def _merge(
    state: tuple[Array, ...] | None,
    query: Float[Array, "S X N Dq"],
    entries: Float[Array, "S Wt C"],
    seen: Bool[Array, "S X Wt"],
    cfg: DraftConfig,
) -> tuple[Float32[Array, "S X N"], Float32[Array, "S X N"], Float32[Array, "S X N Dz"]]:
    """Take some slots into the running maximum, sum and weighted values of a softmax."""
    scores = jnp.where(seen[:, :, None], _scores(query, entries, cfg), -jnp.inf)
    peak = jnp.max(scores, axis=-1)
    if state is not None:
        peak = jnp.maximum(peak, state[0])  # the block always sees itself: it is finite
    weight = jnp.exp(scores - peak[..., None])
    total, value = jnp.sum(weight, axis=-1), _values(round_to(weight, query.dtype), entries, cfg)
    if state is not None:
        keep = jnp.exp(state[0] - peak)
        total, value = total + keep * state[1], value + keep[..., None] * state[2]
    return peak, total, value


def _scores(
    query: Float[Array, "S X N Dq"], entries: Float[Array, "S Wt C"], cfg: DraftConfig
) -> Float32[Array, "S X N Wt"]:
    if isinstance(cfg.attention, MlaShape):
        return contract("sxnc,swc->sxnw", query, entries) * cfg.softmax_scale
    key, _ = _heads(entries, cfg.attention)
    rows, width, heads, dim = query.shape
    grouped = query.reshape(rows, width, key.shape[2], -1, dim)
    scores = contract("sxkgd,swkd->sxkgw", grouped, key) * cfg.softmax_scale
    return scores.reshape(rows, width, heads, -1)


def _values(
    weight: Float[Array, "S X N Wt"], entries: Float[Array, "S Wt C"], cfg: DraftConfig
) -> Float32[Array, "S X N Dz"]:
    if isinstance(cfg.attention, MlaShape):
        return contract("sxnw,swl->sxnl", weight, entries[..., : cfg.attention.kv_lora_rank])
    _, value = _heads(entries, cfg.attention)
    rows, width, heads, slots = weight.shape
    grouped = weight.reshape(rows, width, value.shape[2], -1, slots)
    return contract("sxkgw,swkd->sxkgd", grouped, value).reshape(rows, width, heads, -1)


def _heads(
    entries: Float[Array, "S Wt C"], shape: GqaShape
) -> tuple[Float[Array, "S Wt k D"], Float[Array, "S Wt k D"]]:
    """Keys and values of this rank's heads."""
    key, value = jnp.split(entries, 2, axis=-1)
    split = (*entries.shape[:2], -1, shape.head_dim)
    return key.reshape(split), value.reshape(split)


def _tiles(
    pool: UInt16[Array, "Z P W words"], page_table: Int32[Array, "S M"], cache: DraftCache,
    layer: int,
) -> tuple[UInt16[Array, "K _ Wt words"], Int32[Array, "S _"]]:  # fmt: skip
    """A layer's positions, with pages viewed as several of at most `_MAX_TILE_TOKENS`; no copy."""
    positions = cache.positions(layer)
    _, _, page_tokens, words = pool.shape
    splits = next(
        n
        for n in range(1, page_tokens + 1)
        if page_tokens % n == 0 and page_tokens // n <= _MAX_TILE_TOKENS
    )
    assert words == cache.target_width * words_per_number(cache.dtype)
    tiles = pool[positions.start : positions.stop].reshape(
        len(positions), -1, page_tokens // splits, words
    )
    pages = page_table[:, :, None] * splits + jnp.arange(splits, dtype=jnp.int32)[None, None]
    return tiles, pages.reshape(page_table.shape[0], -1)
