"""The kernel of `mla_prefill` for Hopper: one block of threads attends with 64 queries.

All heads of a token see the same entries, so a query is a (token, head) pair and the pairs of a row
lie one after the other: query x of a row whose first new token has place c sees the slots up to
c + x // N. A block takes 64 queries of one row; `prefill_block` says how.
"""

import functools
import math
from typing import Any

import jax
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int32, UInt16

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
from pallas_kernels.mla.prefill_block import QUERIES, WARPGROUPS, attend_block


# Jitted, and the position an operand, so that a program of many layers lowers and compiles the
# kernel once.
@functools.partial(jax.jit, static_argnames=("heads", "page_tokens", "scale", "interpret"))
def attend(
    work_U4: Int32[Array, "U 4"],
    first_page_1: Int32[Array, "1"],
    page_table_SM: Int32[Array, "S M"],
    q_RC: BFloat16[Array, "R C"],
    pool_KC: UInt16[Array, "K C"],
    *,
    heads: int,
    page_tokens: int,
    scale: float,
    interpret: Any = None,
) -> BFloat16[Array, "R latent"]:
    """Attend with R queries.

    Args:
      work_U4: what each block does: the row, its first query, how many queries (0: nothing), and x
        so that its query i sees the slots up to (x + i) // heads. A row of S stands for queries
        that see nothing.
      first_page_1: page of the pool that counts as page 0.
      page_table_SM: pages of each row.
      q_RC: queries, at least 64.
      pool_KC: entries, bfloat16 as words; page after page.
      heads: queries of a token.
      page_tokens: slots of a page, a multiple of 64.
      scale: multiplies the scores; positive.
      interpret: parameters of the interpreter; None compiles.

    Returns:
      z, one row a query; what no block has written is undefined.
    """
    compiled = interpret is None
    values, rest = (2, RING, TILE, HALF), (RING, TILE, CHUNK)
    if compiled:
        # What copies into, and what the products see: the same bytes.
        kv_s = plgpu.RefUnion(*((tiles(*values, dtype=x), tiles(*rest, dtype=x)) for x in WORDS))
        chunks = (ENTRY // CHUNK, QUERIES, CHUNK)
        q_s = plgpu.RefUnion(tiles(*chunks, tiled=False), tiles(*chunks), _output())
    else:  # The interpreter would keep unions apart.
        pool_KC = lax.bitcast_convert_type(pool_KC, BF16)
        kv_s = ((tiles(*values), tiles(*rest)),)
        q_s = (tiles(ENTRY // CHUNK, QUERIES, CHUNK), _output())
    kernel = plgpu.kernel(
        functools.partial(
            attend_block, heads=heads, page_tokens=page_tokens, factor=scale * math.log2(math.e),
            compiled=compiled,
        ),
        out_type=jax.ShapeDtypeStruct((q_RC.shape[0], LATENT), BF16),
        grid=(work_U4.shape[0],),
        grid_names=("unit",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types={
            "kv_s": kv_s,
            "q_s": q_s,
            "weight_s": tiles(QUERIES, TILE),
            "factor_s": plgpu.SMEM((QUERIES,), F32),
            "q_full": plgpu.Barrier(num_arrivals=ENTRY // CHUNK),
            "value_full": plgpu.Barrier(num_barriers=2 * RING),
            "rest_full": plgpu.Barrier(num_barriers=RING),
            "weight_full": plgpu.Barrier(),
            "weight_empty": plgpu.Barrier(num_arrivals=2),
            "next_scored": plgpu.Barrier(),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        interpret=interpret,
    )  # fmt: skip
    return kernel(work_U4, first_page_1, page_table_SM, q_RC, pool_KC)


def _output() -> Any:
    return plgpu.SMEM((2, HALF // CHUNK, QUERIES, CHUNK), BF16)
