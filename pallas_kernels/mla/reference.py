"""Reference MLA: gather every slot of every query's row, mask, explicit softmax, in float32."""

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt16

from pallas_kernels.numerics import contract, round_to
from pallas_kernels.ragged import row_ids
from pallas_kernels.words import from_words, to_words


def mla_write(
    pool_ZPWCw: UInt16[Array, "Z P W Cw"],
    entries_TC: Float[Array, "T C"],
    pages_T: Int32[Array, " T"],
    offsets_T: Int32[Array, " T"],
    *,
    position: int,
    dtype: DTypeLike,
) -> UInt16[Array, "Z P W Cw"]:
    """See `api.mla_write`: every place of the pool looks for the token that names it."""
    _, num_pages, page_tokens, _ = pool_ZPWCw.shape
    page_P1 = jnp.arange(num_pages, dtype=jnp.int32)[:, None, None]
    offset_1W = jnp.arange(page_tokens, dtype=jnp.int32)[None, :, None]
    hit_PWT = (page_P1 == pages_T[None, None, :]) & (offset_1W == offsets_T[None, None, :])
    words_PWCw = to_words(entries_TC, dtype)[jnp.argmax(hit_PWT, axis=-1)]
    layer_PWCw = jnp.where(jnp.any(hit_PWT, axis=-1)[:, :, None], words_PWCw, pool_ZPWCw[position])
    return pool_ZPWCw.at[position].set(layer_PWCw)


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
    slots_SKC = _slots(pool_ZPWCw, page_table_SM, position, dtype)
    visible_SK = jnp.arange(slots_SKC.shape[1], dtype=jnp.int32)[None, :] < context_S[:, None]
    return _attend(q_SNC, slots_SKC, visible_SK, latent, scale)


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
    """See `api.mla_prefill`; `block` has no meaning here."""
    del block
    num_tokens, num_rows = q_TNC.shape[0], computed_S.shape[0]
    row_T = row_ids(row_offsets, num_tokens)
    safe_T = jnp.minimum(row_T, num_rows - 1)
    slot_T = computed_S[safe_T] + jnp.arange(num_tokens, dtype=jnp.int32) - row_offsets[safe_T]
    slots_TKC = _slots(pool_ZPWCw, page_table_SM, position, dtype)[safe_T]
    slot_K = jnp.arange(slots_TKC.shape[1], dtype=jnp.int32)
    visible_TK = (slot_K[None, :] <= slot_T[:, None]) & (row_T < num_rows)[:, None]
    return _attend(q_TNC, slots_TKC, visible_TK, latent, scale)


def _slots(
    pool_ZPWCw: Array, page_table_SM: Array, position: int, dtype: DTypeLike
) -> Float32[Array, "S K C"]:
    """Return all M * W slots of every row as float32."""
    pages_SMWCw = pool_ZPWCw[position][page_table_SM]
    numbers = from_words(pages_SMWCw, dtype).astype(jnp.float32)
    return numbers.reshape(numbers.shape[0], -1, numbers.shape[-1])


def _attend(
    q_TNC: Float[Array, "T N C"],
    slots_TKC: Float32[Array, "T K C"],
    visible_TK: Bool[Array, "T K"],
    latent: int,
    scale: float,
) -> Float[Array, "T N latent"]:
    """Attend with each query to its own slots; no visible slot gives zero."""
    slots_TKC = jnp.where(visible_TK[:, :, None], slots_TKC, 0.0)
    scores_TNK = contract("tnc,tkc->tnk", q_TNC.astype(jnp.float32), slots_TKC) * scale
    peak_TN1 = jnp.max(jnp.where(visible_TK[:, None, :], scores_TNK, -1e30), axis=-1, keepdims=True)
    weight_TNK = jnp.where(visible_TK[:, None, :], jnp.exp(scores_TNK - peak_TN1), 0.0)
    weight_TNK = weight_TNK / jnp.maximum(jnp.sum(weight_TNK, axis=-1, keepdims=True), 1e-30)
    z_TNL = contract("tnk,tkl->tnl", weight_TNK, slots_TKC[:, :, :latent])
    return round_to(jnp.where(jnp.any(visible_TK, axis=-1)[:, None, None], z_TNL, 0.0), q_TNC.dtype)
