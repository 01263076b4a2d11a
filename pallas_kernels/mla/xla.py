"""MLA in XLA: scan the page columns with online softmax, for blocks of queries that share a row.

Decode is the case of one query a block. A column gathers one page a block out of the pool, so no
more than a column of the cache is ever copied. Pages longer than `MAX_TILE_TOKENS` are read as
several shorter ones, which bounds the scores.

A column in which a query sees nothing leaves its running maximum, sum and accumulator bit for bit
unchanged, so the width of the page table does not show in the result. Slots that no query of the
block sees are zeroed before use: what an unused page holds, NaN included, cannot leak (KF-C01).

Dims: `Bn` query blocks, `Tb` queries of a block, `Wt` slots of a tile.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt16

from pallas_kernels.numerics import contract, round_to
from pallas_kernels.ragged import from_blocks, row_blocks, to_blocks
from pallas_kernels.words import from_words, to_words

MAX_TILE_TOKENS = 512


def mla_write(
    pool_ZPWCw: UInt16[Array, "Z P W Cw"],
    entries_TC: Float[Array, "T C"],
    pages_T: Int32[Array, " T"],
    offsets_T: Int32[Array, " T"],
    *,
    position: int,
    dtype: DTypeLike,
) -> UInt16[Array, "Z P W Cw"]:
    """See `api.mla_write`."""
    return pool_ZPWCw.at[position, pages_T, offsets_T].set(to_words(entries_TC, dtype), mode="drop")


def mla_decode(
    q_SNC: Float[Array, "S N C"],
    pool_ZPWCw: UInt16[Array, "Z P W Cw"],
    page_table_SM: Int32[Array, "S M"],
    context_S: Int32[Array, " S"],
    *,
    position: int,
    latent: int,
    dtype: DTypeLike,
    scale: float,
) -> Float[Array, "S N latent"]:
    """See `api.mla_decode`."""
    z_S1NL = _attend(
        q_SNC[:, None],
        pool_ZPWCw,
        page_table_SM,
        context_S[:, None] - 1,
        position=position,
        latent=latent,
        dtype=dtype,
        scale=scale,
    )
    return z_S1NL[:, 0]


def mla_prefill(
    q_TNC: Float[Array, "T N C"],
    pool_ZPWCw: UInt16[Array, "Z P W Cw"],
    page_table_SM: Int32[Array, "S M"],
    computed_S: Int32[Array, " S"],
    row_offsets: Int32[Array, " S1"],
    *,
    position: int,
    latent: int,
    dtype: DTypeLike,
    scale: float,
    block: int,
) -> Float[Array, "T N latent"]:
    """See `api.mla_prefill`."""
    blocks = row_blocks(row_offsets, num_tokens=q_TNC.shape[0], block=block)
    row_Bn = jnp.minimum(blocks.row_Bn, computed_S.shape[0] - 1)
    first_Bn1 = (computed_S[row_Bn] + blocks.start_Bn)[:, None]
    last_BnTb = jnp.where(
        blocks.mask_BnTb, first_Bn1 + jnp.arange(block, dtype=jnp.int32)[None, :], -1
    )
    z_BnTbNL = _attend(
        to_blocks(q_TNC, blocks),
        pool_ZPWCw,
        page_table_SM[row_Bn],
        last_BnTb,
        position=position,
        latent=latent,
        dtype=dtype,
        scale=scale,
    )
    return from_blocks(z_BnTbNL, blocks)


def _attend(
    q_BnTbNC: Float[Array, "Bn Tb N C"],
    pool_ZPWCw: UInt16[Array, "Z P W Cw"],
    pages_BnM: Int32[Array, "Bn M"],
    last_BnTb: Int32[Array, "Bn Tb"],
    *,
    position: int,
    latent: int,
    dtype: DTypeLike,
    scale: float,
) -> Float[Array, "Bn Tb N latent"]:
    """Attend with each query to slots 0..last of its block's pages; last = -1 sees none: zero."""
    compute = q_BnTbNC.dtype
    pool_ZPWCw, pages_BnM = _tile_pages(pool_ZPWCw, pages_BnM)
    tile_tokens = pool_ZPWCw.shape[2]
    num_slots_Bn = jnp.max(last_BnTb, axis=1) + 1  # slots that any query of the block sees

    def column(
        carry: tuple[Array, ...], inputs: tuple[Array, Array]
    ) -> tuple[tuple[Array, ...], None]:
        peak_BnTbN, total_BnTbN, sum_BnTbNL = carry
        page_Bn, first_slot = inputs
        slot_Wt = first_slot + jnp.arange(tile_tokens, dtype=jnp.int32)
        entries_BnWtC = from_words(pool_ZPWCw.at[position, page_Bn].get(mode="clip"), dtype)
        in_use_BnWt = slot_Wt[None, :] < num_slots_Bn[:, None]
        entries_BnWtC = jnp.where(
            in_use_BnWt[:, :, None], round_to(entries_BnWtC, compute), jnp.zeros((), compute)
        )

        scores = contract("btnc,bwc->btnw", q_BnTbNC, entries_BnWtC) * scale
        visible_BnTbWt = slot_Wt[None, None, :] <= last_BnTb[:, :, None]
        scores = jnp.where(visible_BnTbWt[:, :, None, :], scores, -jnp.inf)
        new_peak = jnp.maximum(peak_BnTbN, jnp.max(scores, axis=-1))
        keep = jnp.exp(peak_BnTbN - new_peak)
        weight = jnp.exp(scores - new_peak[..., None])
        values = contract("btnw,bwl->btnl", round_to(weight, compute), entries_BnWtC[:, :, :latent])
        new_total = keep * total_BnTbN + jnp.sum(weight, axis=-1)
        return (new_peak, new_total, keep[..., None] * sum_BnTbNL + values), None

    shape = q_BnTbNC.shape[:3]
    # The peak starts at a finite number so that peak - new_peak is never inf - inf.
    start = (
        jnp.full(shape, jnp.finfo(jnp.float32).min, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, latent), jnp.float32),
    )
    first_slots_M = jnp.arange(pages_BnM.shape[1], dtype=jnp.int32) * tile_tokens
    (_, total, value_sum), _ = lax.scan(column, start, (pages_BnM.T, first_slots_M))
    seen = (last_BnTb >= 0)[:, :, None]
    z = value_sum / jnp.where(seen, total, 1.0)[..., None]
    return round_to(jnp.where(seen[..., None], z, 0.0), compute)


def _tile_pages(
    pool_ZPWCw: UInt16[Array, "Z P W Cw"], pages_BnM: Int32[Array, "Bn M"]
) -> tuple[UInt16[Array, "Z _ _ Cw"], Int32[Array, "Bn _"]]:
    """View a page as consecutive pages of at most `MAX_TILE_TOKENS` tokens; no copy."""
    layers, _, page_tokens, words = pool_ZPWCw.shape
    splits = next(
        n
        for n in range(1, page_tokens + 1)
        if page_tokens % n == 0 and page_tokens // n <= MAX_TILE_TOKENS
    )
    tiles = pages_BnM[:, :, None] * splits + jnp.arange(splits, dtype=jnp.int32)[None, None, :]
    return (
        pool_ZPWCw.reshape(layers, -1, page_tokens // splits, words),
        tiles.reshape(pages_BnM.shape[0], -1),
    )
