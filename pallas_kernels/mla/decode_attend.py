"""First kernel of `mla_decode` for Hopper: parts of rows, each without regard to the others.

Entries are the left operand of both products, so that few heads waste nothing: a tile has 64 slots
on the side that takes multiples of 64, and the heads of a group, a multiple of 8, on the other.
One block of threads a multiprocessor takes parts from the work list (`decode_block`).

Dims: `U` parts, `X` splits of a row, `Nx` heads, padded.
"""

import functools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32, UInt16

from pallas_kernels.mla.decode_block import attend_block
from pallas_kernels.mla.mosaic_parts import (
    BF16,
    CHUNK,
    ENTRY,
    F32,
    HALF,
    LATENT,
    RING,
    TILE,
    WORDS,
    tiles,
)

BLOCKS = 132  # multiprocessors of an H200
STAT_SPLITS = 128  # most splits of a row


# Jitted, and the position an operand, so that a program of many layers lowers and compiles the
# kernel once.
@functools.partial(
    jax.jit, static_argnames=("groups", "splits", "page_tokens", "scale", "pdl", "interpret")
)
def attend(
    num_parts_1: Int32[Array, "1"],
    work_U4: Int32[Array, "U 4"],
    first_page_1: Int32[Array, "1"],
    page_table_SM: Int32[Array, "S M"],
    q_SNC: BFloat16[Array, "S N C"],
    pool_KC: UInt16[Array, "K C"],
    *,
    groups: int,
    splits: int,
    page_tokens: int,
    scale: float,
    pdl: bool = False,
    interpret: Any = None,
) -> tuple[Float32[Array, "S X Nx latent"], Float32[Array, "S 2 128 Nx"]]:
    """Attend with every row to each of its parts.

    Args:
      num_parts_1: how many parts the list has.
      work_U4: of each part the row, its first tile, its visible slots (at least 1), its split.
      first_page_1: page of the pool that counts as page 0.
      page_table_SM: pages of each row.
      q_SNC: queries.
      pool_KC: entries, bfloat16 as words; page after page.
      groups: the heads are taken in so many groups of equal size.
      splits: X.
      page_tokens: slots of a page, a multiple of 64.
      scale: multiplies the scores; positive.
      pdl: `KernelSettings.pdl`.
      interpret: parameters of the interpreter; None compiles.

    Returns:
      sum over the slots of a part of 2^(score - peak) * value, and the peaks and the sums without
      value; what belongs to no part, and the padding of heads, is undefined.
    """
    compiled = interpret is None
    num_rows, heads, _ = q_SNC.shape
    width = padded(heads // groups)
    num_blocks = min(BLOCKS, work_U4.shape[0] * groups)
    values, rest = (2, RING, TILE, HALF), (RING, TILE, CHUNK)
    queries = (ENTRY // CHUNK, width, CHUNK)
    if compiled:
        # What copies into, and what the products see: the same bytes.
        kv_s = plgpu.RefUnion(*((tiles(*values, dtype=x), tiles(*rest, dtype=x)) for x in WORDS))
        q_s = plgpu.RefUnion(tiles(*queries, tiled=False), tiles(*queries))
    else:  # The interpreter would keep unions apart.
        pool_KC = lax.bitcast_convert_type(pool_KC, BF16)
        kv_s = ((tiles(*values), tiles(*rest)),)
        q_s = (tiles(*queries),)
    kernel = plgpu.kernel(
        functools.partial(
            attend_block, heads=heads, groups=groups, width=width, page_tokens=page_tokens,
            factor=scale * math.log2(math.e), num_blocks=num_blocks, compiled=compiled, pdl=pdl,
        ),
        out_type=(
            jax.ShapeDtypeStruct((num_rows, splits, groups * width, LATENT), F32),
            jax.ShapeDtypeStruct((num_rows, 2, STAT_SPLITS, groups * width), F32),
        ),
        grid=(num_blocks,),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types={
            "kv_s": kv_s,
            "q_s": q_s,
            "weight_s": tiles(width, TILE),
            "factor_s": plgpu.SMEM((width,), F32),
            "stats_s": plgpu.SMEM((2, width), F32),
            "q_full": plgpu.Barrier(num_arrivals=ENTRY // CHUNK),
            "value_full": plgpu.Barrier(num_barriers=2 * RING),
            "rest_full": plgpu.Barrier(num_barriers=RING),
            "weight_full": plgpu.Barrier(),
            "weight_empty": plgpu.Barrier(num_arrivals=2),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )  # fmt: skip
    return kernel(
        num_parts_1, work_U4, first_page_1, page_table_SM, q_SNC.reshape(-1, ENTRY), pool_KC
    )


def padded(heads: int) -> int:
    """How many columns of a product `heads` take."""
    return -(-heads // 8) * 8
