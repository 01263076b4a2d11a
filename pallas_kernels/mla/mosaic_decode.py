"""`mla_decode` as two kernels for Hopper: the list of parts, and what they refuse.

A row is split into parts by its own length alone, so its bits do not depend on the batch.
"""

from typing import Any

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt16

from pallas_kernels import settings
from pallas_kernels.hopper import require_hopper
from pallas_kernels.mla.decode_attend import STAT_SPLITS, attend, padded
from pallas_kernels.mla.decode_combine import BATCH, combine
from pallas_kernels.mla.mosaic_parts import ENTRY, LATENT, MAX_INDEX, TILE, check_supported

PART_TILES = 4  # least length of a part that is not a row's last, for one group of heads
MAX_HEADS = 48  # of a group: registers for the sums
MAX_SUMS = 2**29  # float32 numbers of all parts together: 2 GiB


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
    interpret: Any = None,
) -> Float[Array, "S N latent"]:
    """See `api.mla_decode`.

    Raises:
      NotImplementedError: no Hopper GPU, or arguments outside those of the released model.
    """
    if interpret is None:
        require_hopper()
    _, num_pages, page_tokens, _ = pool_ZPWCw.shape
    heads = q_SNC.shape[1]
    check_supported(q_SNC, latent, dtype, page_tokens, scale)
    if pool_ZPWCw.size // ENTRY > MAX_INDEX:
        raise NotImplementedError(f"counts entries in int32: got pool {pool_ZPWCw.shape}")

    groups = next(n for n in range(1, heads + 1) if heads % n == 0 and heads // n <= MAX_HEADS)
    longest = page_table_SM.shape[1] * page_tokens // TILE
    part_tiles = PART_TILES * groups
    splits = min(-(-longest // part_tiles), STAT_SPLITS)
    splits = -(-splits // BATCH) * BATCH
    if (sums := q_SNC.shape[0] * splits * groups * padded(heads // groups) * LATENT) > MAX_SUMS:
        raise NotImplementedError(f"takes at most {MAX_SUMS} sums of parts: got {sums}")
    num_splits_S, num_parts_1, work_U4 = work_list(context_S, splits=splits, part_tiles=part_tiles)
    pdl = settings.current().pdl and interpret is None
    z_SXNxL, stats = attend(
        num_parts_1,
        work_U4,
        jnp.full((1,), position * num_pages, jnp.int32),
        page_table_SM,
        q_SNC,
        pool_ZPWCw.reshape(-1, ENTRY),
        groups=groups,
        splits=splits,
        page_tokens=page_tokens,
        scale=scale,
        pdl=pdl,
        interpret=interpret,
    )
    return combine(
        num_splits_S, z_SXNxL, stats, heads=heads, groups=groups, pdl=pdl, interpret=interpret
    )


def work_list(
    context_S: Int32[Array, " S"], *, splits: int, part_tiles: int
) -> tuple[Int32[Array, " S"], Int32[Array, "1"], Int32[Array, "U 4"]]:
    """Split every row into parts of equal length, the last one shorter.

    Args:
      context_S: visible slots of each row.
      splits: the most parts of a row that there is room for.
      part_tiles: the least length of a part; rows longer than 128 of them have longer parts.

    Returns:
      Parts of each row, their number, and the list as `decode_attend.attend` takes it.
    """
    tiles_S = -(-context_S // TILE)
    length_S = jnp.maximum(part_tiles, -(-tiles_S // STAT_SPLITS))  # of a part
    num_splits_S = -(-tiles_S // length_S)
    end_S = jnp.cumsum(num_splits_S, dtype=jnp.int32)
    part_U = jnp.arange(context_S.shape[0] * splits, dtype=jnp.int32)
    row_U = jnp.searchsorted(end_S, part_U, side="right", method="compare_all").astype(jnp.int32)
    row_U = jnp.minimum(row_U, context_S.shape[0] - 1)
    split_U = part_U - (end_S - num_splits_S)[row_U]
    first_U = split_U * length_S[row_U]
    slots_U = jnp.minimum(context_S[row_U] - first_U * TILE, length_S[row_U] * TILE)
    return num_splits_S, end_S[-1:], jnp.stack([row_U, first_U, slots_U, split_U], axis=1)
