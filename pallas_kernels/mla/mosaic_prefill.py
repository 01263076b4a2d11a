"""`mla_prefill` as a kernel for Hopper: the list of its blocks' work, and what it refuses."""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt16

from pallas_kernels.hopper import require_hopper
from pallas_kernels.mla.mosaic_parts import ENTRY, LATENT, MAX_INDEX, check_supported
from pallas_kernels.mla.prefill_attend import attend
from pallas_kernels.mla.prefill_block import QUERIES


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
    interpret: Any = None,
) -> Float[Array, "T N latent"]:
    """See `api.mla_prefill`; `block` has no meaning here.

    Raises:
      NotImplementedError: no Hopper GPU, or arguments outside those of the released model.
    """
    del block
    if interpret is None:
        require_hopper()
    num_tokens, heads, _ = q_TNC.shape
    _, num_pages, page_tokens, _ = pool_ZPWCw.shape
    check_supported(q_TNC, latent, dtype, page_tokens, scale)
    longest = page_table_SM.shape[1] * page_tokens + num_tokens
    if max(pool_ZPWCw.size // ENTRY, longest * heads) > MAX_INDEX:
        raise NotImplementedError(f"counts entries and pairs in int32: got pool {pool_ZPWCw.shape}")

    work_U4 = work_list(row_offsets, computed_S, num_tokens=num_tokens, heads=heads)
    q_RC = q_TNC.reshape(-1, ENTRY)
    missing = max(QUERIES - q_RC.shape[0], 0)  # a copy takes 64 queries, clipped only at the end
    z_RL = attend(
        work_U4,
        jnp.full((1,), position * num_pages, jnp.int32),
        page_table_SM,
        jnp.pad(q_RC, ((0, missing), (0, 0))),
        pool_ZPWCw.reshape(-1, ENTRY),
        heads=heads,
        page_tokens=page_tokens,
        scale=scale,
        interpret=interpret,
    )
    return z_RL[: num_tokens * heads].reshape(num_tokens, heads, LATENT)


def work_list(
    row_offsets: Int32[Array, " S1"], computed_S: Int32[Array, " S"], *, num_tokens: int, heads: int
) -> Int32[Array, "U 4"]:
    """Cut the (token, head) pairs of every row, and the padding, into units of at most 64.

    Units are in reverse order: the last ones of a row see the most slots and take the longest.

    Returns:
      For each unit `row, first, count, x` as in `prefill_attend.attend`; count is 0 for a unit
      without work. The number of units is the most that S rows and the padding can need.
    """
    num_rows = computed_S.shape[0]
    end = jnp.full((1,), num_tokens, jnp.int32)
    first_S1 = row_offsets * heads
    length_S1 = jnp.diff(jnp.concatenate([row_offsets, end])) * heads
    end_S1 = jnp.cumsum((length_S1 + QUERIES - 1) // QUERIES, dtype=jnp.int32)

    num_units = (num_tokens * heads + (num_rows + 1) * (QUERIES - 1)) // QUERIES
    unit_U = end_S1[-1] - 1 - jnp.arange(num_units, dtype=jnp.int32)
    row_U = jnp.searchsorted(end_S1, unit_U, side="right", method="compare_all").astype(jnp.int32)
    row_U = jnp.minimum(row_U, num_rows)
    before_U = jnp.where(row_U > 0, end_S1[row_U - 1], 0)
    local_U = (unit_U - before_U) * QUERIES
    count_U = jnp.minimum(length_S1[row_U] - local_U, QUERIES)
    x_U = computed_S[jnp.minimum(row_U, num_rows - 1)] * heads + local_U
    count_U = jnp.where(unit_U >= 0, count_U, 0)
    return jnp.stack([row_U, first_S1[row_U] + local_U, count_U, x_U], axis=1)
