"""The kernel of `mla_prefill` for Hopper: one block of threads attends with 64 queries.

All heads of a token see the same entries, so a query is a (token, head) pair and the pairs of a row
lie one after the other: query x of a row whose first new token has place c sees the slots up to
c + x // N. A block takes 64 queries of one row through all tiles of 64 slots that they see:

    warpgroup 0         scores and softmax      P = 2^(q k^T - peak)
    warpgroups 1 and 2  half of the values each   o <- o * 2^(old peak - peak) + P v

A ring of two tiles lies in shared memory. A tile has three parts, the halves of the values and the
rest; the warpgroup that reads a part last asks for the one that takes its place. P goes through
shared memory, since both halves need it.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Int32, UInt16

QUERIES = 64  # of a block
TILE = 64  # slots
ENTRY, LATENT = 576, 512  # numbers of an entry, and of its value part
CHUNK = 64  # numbers of a row of swizzled shared memory
HALF = LATENT // 2
RING = 2  # tiles

SOFTMAX = 0  # warpgroup
SOFTMAX_REGISTERS, VALUE_REGISTERS = 152, 176  # of a thread

BF16, F32 = jnp.bfloat16, jnp.float32
WORDS = (jnp.uint16, BF16)  # of the pool, and as numbers
REGISTERS = plgpu.Layout.WGMMA
ROW = REGISTERS.reduce(1)
_TILING = plgpu.TilingTransform((8, CHUNK))  # pyright: ignore[reportAbstractUsage]
_SWIZZLE = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]


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
        kv_s = plgpu.RefUnion(*((_tiles(*values, dtype=x), _tiles(*rest, dtype=x)) for x in WORDS))
        chunks = (ENTRY // CHUNK, QUERIES, CHUNK)
        q_s = plgpu.RefUnion(_tiles(*chunks, tiled=False), _tiles(*chunks), _output())
    else:  # The interpreter would keep unions apart.
        pool_KC = lax.bitcast_convert_type(pool_KC, BF16)
        kv_s = ((_tiles(*values), _tiles(*rest)),)
        q_s = (_tiles(ENTRY // CHUNK, QUERIES, CHUNK), _output())
    kernel = plgpu.kernel(
        functools.partial(
            _block, heads=heads, page_tokens=page_tokens, factor=scale * math.log2(math.e),
            compiled=compiled,
        ),
        out_type=jax.ShapeDtypeStruct((q_RC.shape[0], LATENT), BF16),
        grid=(work_U4.shape[0],),
        grid_names=("unit",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types={
            "kv_s": kv_s,
            "q_s": q_s,
            "weight_s": _tiles(QUERIES, TILE),
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


def _tiles(*shape: int, dtype: Any = BF16, tiled: bool = True) -> Any:
    """Shared memory for operands of `wgmma`.

    A copy between tiled memory and global memory has to start at a multiple of 8 rows there. With
    rows of `CHUNK` numbers the bytes lie in the same places without the tiling.
    """
    return plgpu.SMEM(shape, dtype, transforms=(_TILING, _SWIZZLE) if tiled else (_SWIZZLE,))


def _output() -> Any:
    return plgpu.SMEM((2, HALF // CHUNK, QUERIES, CHUNK), BF16)


def _block(
    work_g, first_page_g, pages_g, q_g, pool_g, z_g,
    *, kv_s, q_s, weight_s, factor_s, q_full, value_full, rest_full, weight_full, weight_empty,
    next_scored, heads: int, page_tokens: int, factor: float, compiled: bool,
) -> None:  # fmt: skip
    unit, warpgroup = lax.axis_index("unit"), lax.axis_index("warpgroup")
    row, start, count, x = (work_g[unit, i] for i in range(4))
    is_padding = row == pages_g.shape[0]
    num_visible = jnp.where(is_padding, 0, (x + count - 1) // heads + 1)  # to the last query
    num_tiles = (num_visible + TILE - 1) // TILE
    (arriving_values_s, arriving_rest_s), (values_s, rest_s) = kv_s[0], kv_s[-1]
    arriving_q_s, queries_s, output_s = q_s[0], q_s[-2], q_s[-1]
    shape = (QUERIES, TILE)

    def slot_of(tile: Array) -> Array:
        return lax.rem(tile, jnp.int32(RING))

    def rows(x: Array, width: int) -> Array:
        return lax.broadcast_in_dim(x, (QUERIES, width), (0,))

    def page_of(tile: Array) -> Array:
        safe_row = jnp.minimum(row, pages_g.shape[0] - 1)
        return first_page_g[0] + pages_g[safe_row, tile * TILE // page_tokens]

    def copy_part(tile: Array, page: Array, columns: pl.Slice, target: Any, full: Any) -> None:
        first = page * page_tokens + lax.rem(tile * TILE, jnp.int32(page_tokens))
        slots = pl.ds(pl.multiple_of(first, TILE), TILE)
        plgpu.copy_gmem_to_smem(pool_g.at[slots, columns], target, full)

    def copy_rest(tile: Array, page: Array) -> None:
        slot = slot_of(tile)
        columns = pl.ds(LATENT, CHUNK)
        copy_part(tile, page, columns, arriving_rest_s.at[slot], rest_full.at[slot])

    def copy_values(half: Array, tile: Array, page: Array) -> None:
        slot = slot_of(tile)
        columns = pl.ds(pl.multiple_of(half * HALF, HALF), HALF)
        full = value_full.at[half * RING + slot]
        copy_part(tile, page, columns, arriving_values_s.at[half, slot], full)

    def fill(copy: Callable[[Array, Array], None]) -> None:
        @pl.loop(0, jnp.minimum(num_tiles, RING))
        def _(tile: Array) -> None:
            copy(tile, page_of(tile))

    def find_weights() -> None:
        for i in range(ENTRY // CHUNK):
            chunk = q_g.at[pl.ds(start, QUERIES), pl.ds(i * CHUNK, CHUNK)]
            plgpu.copy_gmem_to_smem(chunk, arriving_q_s.at[i], q_full)
        fill(copy_rest)
        plgpu.barrier_wait(q_full)

        def one_tile(
            tile: Array, carry: tuple[Array, Array], *, masked: bool
        ) -> tuple[Array, Array]:
            peak, total = carry
            slot = slot_of(tile)
            has_next = tile + RING < num_tiles
            next_page = page_of(jnp.minimum(tile + RING, num_tiles - 1))

            def products(scores: Any) -> Array:
                plgpu.barrier_wait(rest_full.at[slot])
                plgpu.wgmma(scores, queries_s.at[LATENT // CHUNK], rest_s.at[slot].T)
                for half in range(2):
                    plgpu.barrier_wait(value_full.at[half * RING + slot])
                    for i in range(HALF // CHUNK):
                        keys = values_s.at[half, slot, :, pl.ds(i * CHUNK, CHUNK)]
                        plgpu.wgmma(scores, queries_s.at[half * (HALF // CHUNK) + i], keys.T)
                return scores[...]

            scores = pl.run_scoped(products, plgpu.ACC(shape, F32))  # pyright: ignore[reportPrivateImportUsage]

            @pl.when(tile > 0)
            def _() -> None:
                plgpu.barrier_arrive(next_scored)

            if masked:
                query = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=REGISTERS)
                place = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=REGISTERS)
                is_visible = query - place * heads >= tile * (TILE * heads) - x
                scores = jnp.where(is_visible, scores, -jnp.inf)
            new_peak = jnp.maximum(peak, jnp.max(scores, axis=1) * factor)
            weights = jnp.exp2(scores * factor - rows(new_peak, TILE))
            keep = jnp.exp2(peak - new_peak)
            total = total * keep + jnp.sum(weights, axis=1)

            @pl.when(tile > 0)
            def _() -> None:
                plgpu.barrier_wait(weight_empty)

            weight_s[...] = weights.astype(BF16)
            factor_s[...] = keep
            plgpu.commit_smem()
            plgpu.barrier_arrive(weight_full)

            @pl.when(has_next)
            def _() -> None:
                copy_rest(tile + RING, next_page)

            return new_peak, total

        # Finite, so that peak - new_peak is never inf - inf.
        lowest = plgpu.layout_cast(jnp.full((QUERIES,), -1e30, F32), ROW)
        nothing = plgpu.layout_cast(jnp.zeros((QUERIES,), F32), ROW)
        first_masked = jnp.minimum((x // heads + 1) // TILE, num_tiles)
        carry = lax.fori_loop(
            0, first_masked, functools.partial(one_tile, masked=False), (lowest, nothing)
        )
        _, total = lax.fori_loop(
            first_masked, num_tiles, functools.partial(one_tile, masked=True), carry
        )

        @pl.when(num_tiles > 0)
        def _() -> None:
            plgpu.barrier_arrive(next_scored)
            plgpu.barrier_wait(weight_empty)

        factor_s[...] = 1.0 / jnp.where(total == 0.0, 1.0, total)
        plgpu.barrier_arrive(weight_full)

    def add_values() -> None:
        half = warpgroup - 1
        fill(functools.partial(copy_values, half))

        def clear_unseen(values: Any, num_seen: Array) -> None:
            for i in range(HALF // CHUNK):
                chunk = values.at[:, pl.ds(i * CHUNK, CHUNK)]
                entries = plgpu.load(chunk, layout=REGISTERS)
                slot = plgpu.broadcasted_iota(jnp.int32, (TILE, CHUNK), 0, layout=REGISTERS)
                chunk[...] = jnp.where(slot < num_seen, entries, jnp.zeros((), BF16))
            plgpu.commit_smem()

        def one_tile(tile: Array, z: Array) -> Array:
            slot = slot_of(tile)
            has_next = tile + RING < num_tiles
            next_page = page_of(jnp.minimum(tile + RING, num_tiles - 1))
            plgpu.barrier_wait(value_full.at[half * RING + slot])
            plgpu.barrier_wait(weight_full)
            keep = plgpu.load(factor_s, layout=ROW, optimized=False)

            # What no query sees may be NaN, and a weight of zero does not hide that.
            @pl.when((tile + 1) * TILE > num_visible)
            def _() -> None:
                clear_unseen(values_s.at[half, slot], num_visible - tile * TILE)

            @pl.when(half == 1)
            def _() -> None:
                plgpu.barrier_wait(next_scored)

            z = _add_product(
                z * rows(keep, HALF), weight_s, values_s.at[half, slot], compiled=compiled
            )
            plgpu.barrier_arrive(weight_empty)

            @pl.when(has_next)
            def _() -> None:
                plgpu.commit_smem()  # all warps have read this place
                copy_values(half, tile + RING, next_page)

            return z

        nothing = plgpu.layout_cast(jnp.zeros((QUERIES, HALF), F32), REGISTERS)
        z = lax.fori_loop(0, num_tiles, one_tile, nothing)
        plgpu.barrier_wait(weight_full)
        z = z * rows(plgpu.load(factor_s, layout=ROW, optimized=False), HALF)
        for i in range(HALF // CHUNK):
            output_s[half, i] = z[:, i * CHUNK : (i + 1) * CHUNK].astype(BF16)
        plgpu.commit_smem()

        def store(first: Array | int, num: int) -> None:
            for i in range(HALF // CHUNK):
                columns = pl.ds(half * HALF + i * CHUNK, CHUNK)
                source = output_s.at[half, i, pl.ds(first, num)]
                plgpu.copy_smem_to_gmem(source, z_g.at[pl.ds(start + first, num), columns])

        @pl.when((count == QUERIES) | is_padding)  # a copy clips what is behind the last query
        def _() -> None:
            store(0, QUERIES)

        @pl.when((count < QUERIES) & ~is_padding)  # the next query belongs to another row
        def _() -> None:
            @pl.loop(0, count)
            def _(query: Array) -> None:
                store(query, 1)

        plgpu.wait_smem_to_gmem(0)

    @pl.when(count > 0)
    def _() -> None:
        @pl.when(warpgroup == SOFTMAX)
        def _() -> None:
            plgpu.set_max_registers(SOFTMAX_REGISTERS, action="decrease")
            find_weights()

        @pl.when(warpgroup != SOFTMAX)
        def _() -> None:
            plgpu.set_max_registers(VALUE_REGISTERS, action="increase")
            add_values()


def _add_product(total: Array, left: Any, right: Any, *, compiled: bool) -> Any:
    """Return total + left @ right. The interpreter does not take sums that start at a value."""

    def run(sums: Any) -> Array:
        plgpu.wgmma(sums, left, right)
        return sums[...]

    if not compiled:
        return total + pl.run_scoped(run, plgpu.ACC((QUERIES, HALF), F32))  # pyright: ignore[reportPrivateImportUsage]

    def add(sums: Any) -> None:
        plgpu.wgmma(sums, left, right)

    return pl.run_state(add)(plgpu.ACC.init(total))  # pyright: ignore[reportPrivateImportUsage]
