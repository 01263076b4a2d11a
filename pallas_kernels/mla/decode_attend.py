"""First kernel of `mla_decode` for Hopper: parts of rows, each without regard to the others.

Entries are the left operand of both products, so that few heads waste nothing: a tile has 64 slots
on the side that takes multiples of 64, and the heads of a group, a multiple of 8, on the other.
One block of threads a multiprocessor takes parts from the work list, one after the other:

    warpgroup 0         scores and softmax        P = 2^(k q - peak), [slots, heads]
    warpgroups 1 and 2  half of the values each   z <- z * 2^(old peak - peak) + v^T P

A ring of two tiles lies in shared memory. A tile has three parts, the halves of the values and the
rest; the warpgroup that reads a part last asks for the one that takes its place, also across the
ends of parts, so that the copies never stop.

Dims: `U` parts, `X` splits of a row, `Nx` heads, padded.
"""

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32, UInt16

from pallas_kernels import pdl as launch_order

TILE = 64  # slots
ENTRY, LATENT = 576, 512  # numbers of an entry, and of its value part
CHUNK = 64  # numbers of a row of swizzled shared memory
HALF = LATENT // 2
RING = 2  # tiles
BLOCKS = 132  # multiprocessors of an H200
STAT_SPLITS = 128  # most splits of a row

BF16, F32 = jnp.bfloat16, jnp.float32
WORDS = (jnp.uint16, BF16)  # of the pool, and as numbers
REGISTERS = plgpu.Layout.WGMMA
COLUMN = REGISTERS.reduce(0)
_TILING = plgpu.TilingTransform((8, CHUNK))  # pyright: ignore[reportAbstractUsage]
_SWIZZLE = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]


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
    values, rest = (2, RING, TILE, HALF), (RING, TILE, CHUNK)
    queries = (ENTRY // CHUNK, width, CHUNK)
    if compiled:
        # What copies into, and what the products see: the same bytes.
        kv_s = plgpu.RefUnion(*((_tiles(*values, dtype=x), _tiles(*rest, dtype=x)) for x in WORDS))
        q_s = plgpu.RefUnion(_tiles(*queries, tiled=False), _tiles(*queries))
    else:  # The interpreter would keep unions apart.
        pool_KC = lax.bitcast_convert_type(pool_KC, BF16)
        kv_s = ((_tiles(*values), _tiles(*rest)),)
        q_s = (_tiles(*queries),)
    kernel = plgpu.kernel(
        functools.partial(
            _block, heads=heads, groups=groups, width=width, page_tokens=page_tokens,
            factor=scale * math.log2(math.e), compiled=compiled, pdl=pdl,
        ),
        out_type=(
            jax.ShapeDtypeStruct((num_rows, splits, groups * width, LATENT), F32),
            jax.ShapeDtypeStruct((num_rows, 2, STAT_SPLITS, groups * width), F32),
        ),
        grid=(min(BLOCKS, work_U4.shape[0] * groups),),
        grid_names=("block",),
        num_threads=3,
        thread_name="warpgroup",
        scratch_types={
            "kv_s": kv_s,
            "q_s": q_s,
            "weight_s": _tiles(width, TILE),
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


def _tiles(*shape: int, dtype: Any = BF16, tiled: bool = True) -> Any:
    """Shared memory for operands of `wgmma`.

    A copy between tiled memory and global memory has to start at a multiple of 8 rows there. With
    rows of `CHUNK` numbers the bytes lie in the same places without the tiling.
    """
    return plgpu.SMEM(shape, dtype, transforms=(_TILING, _SWIZZLE) if tiled else (_SWIZZLE,))


class _Cursor(NamedTuple):
    """A tile of this block: its part, its number in the part, and what the list says of the part
    and, so that nobody waits for it later, of the part after it."""

    part: Array
    tile: Array
    row: Array
    first: Array
    slots: Array
    next_row: Array
    next_first: Array
    next_slots: Array


def _block(
    num_parts_g, work_g, first_page_g, pages_g, q_g, pool_g, z_g, stats_g,
    *, kv_s, q_s, weight_s, factor_s, stats_s, q_full, value_full, rest_full, weight_full,
    weight_empty, heads: int, groups: int, width: int, page_tokens: int, factor: float,
    compiled: bool, pdl: bool,
) -> None:  # fmt: skip
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    launch_order.wait(pdl)
    launch_order.launch_dependents(pdl)
    (arriving_values_s, arriving_rest_s), (values_s, rest_s) = kv_s[0], kv_s[-1]
    arriving_q_s, queries_s = q_s[0], q_s[-1]
    num_blocks = jnp.int32(min(BLOCKS, work_g.shape[0] * groups))
    num_parts = num_parts_g[0] * groups
    own_parts = (num_parts - block + num_blocks - 1) // num_blocks
    shape = (TILE, width)

    def slot_of(step: Array) -> Array:
        return lax.rem(step, jnp.int32(RING))

    def columns(x: Array, num_rows: int) -> Array:
        return lax.broadcast_in_dim(x, (num_rows, width), (1,))

    def work_of(part: Array) -> tuple[Array, Array, Array]:
        entry = jnp.minimum(part, num_parts - 1) // groups
        return work_g[entry, 0], work_g[entry, 1], work_g[entry, 2]

    def begin() -> _Cursor:
        return _Cursor(block, jnp.int32(0), *work_of(block), *work_of(block + num_blocks))

    def advance(at: _Cursor) -> _Cursor:
        is_last = (at.tile + 1) * TILE >= at.slots
        part = at.part + num_blocks
        after = work_of(part + num_blocks)
        moved = _Cursor(part, jnp.int32(0), at.next_row, at.next_first, at.next_slots, *after)
        stayed = at._replace(tile=at.tile + 1)
        return _Cursor(*(jnp.where(is_last, a, b) for a, b in zip(moved, stayed, strict=True)))

    def copy_part(at: _Cursor, page: Array, columns: pl.Slice, target: Any, full: Any) -> None:
        tile = at.first + at.tile
        first = page * page_tokens + lax.rem(tile * TILE, jnp.int32(page_tokens))
        slots = pl.ds(pl.multiple_of(first, TILE), TILE)
        plgpu.copy_gmem_to_smem(pool_g.at[slots, columns], target, full)

    def page_of(at: _Cursor) -> Array:
        return first_page_g[0] + pages_g[at.row, (at.first + at.tile) * TILE // page_tokens]

    def copy_rest(at: _Cursor, page: Array, slot: Array) -> None:
        columns = pl.ds(LATENT, CHUNK)
        copy_part(at, page, columns, arriving_rest_s.at[slot], rest_full.at[slot])

    def copy_values(half: Array, at: _Cursor, page: Array, slot: Array) -> None:
        columns = pl.ds(pl.multiple_of(half * HALF, HALF), HALF)
        full = value_full.at[half * RING + slot]
        copy_part(at, page, columns, arriving_values_s.at[half, slot], full)

    def fill(copy: Any) -> _Cursor:
        """Ask for the first tiles; return the one after them."""
        at = begin()
        for slot in range(RING):

            @pl.when(at.part < num_parts)
            def _(at: _Cursor = at, slot: int = slot) -> None:
                copy(at, page_of(at), jnp.int32(slot))

            at = advance(at)
        return at

    def for_each_part(run: Any, carry: Any) -> Any:
        def one(i: Array, carry: Any) -> Any:
            part = block + i * num_blocks
            return run(part, part // groups, carry)

        return lax.fori_loop(0, own_parts, one, carry)

    def copy_queries(part: Array) -> None:
        row, group = work_g[part // groups, 0], lax.rem(part, jnp.int32(groups))
        num = heads // groups
        rows = pl.ds(row * heads + group * num, num)
        for i in range(ENTRY // CHUNK):
            target = arriving_q_s.at[i, pl.ds(0, num)]
            plgpu.copy_gmem_to_smem(q_g.at[rows, pl.ds(i * CHUNK, CHUNK)], target, q_full)

    def find_weights() -> None:
        copy_queries(block)
        start = fill(copy_rest)

        def one_part(part: Array, entry: Array, carry: tuple[Array, _Cursor]) -> Any:
            row, slots, split = work_g[entry, 0], work_g[entry, 2], work_g[entry, 3]
            num_tiles = (slots + TILE - 1) // TILE
            plgpu.barrier_wait(q_full)

            def one_tile(tile: Array, carry: Any) -> Any:
                peak, total, step, ahead = carry
                slot = slot_of(step)
                next_page = page_of(ahead)

                def products(scores: Any) -> Array:
                    for half in range(2):
                        plgpu.barrier_wait(value_full.at[half * RING + slot])
                        for i in range(HALF // CHUNK):
                            keys = values_s.at[half, slot, :, pl.ds(i * CHUNK, CHUNK)]
                            q = queries_s.at[half * (HALF // CHUNK) + i]
                            plgpu.wgmma(scores, keys, q.T)
                    plgpu.barrier_wait(rest_full.at[slot])
                    plgpu.wgmma(scores, rest_s.at[slot], queries_s.at[LATENT // CHUNK].T)
                    return scores[...]

                scores = pl.run_scoped(products, plgpu.ACC(shape, F32))  # pyright: ignore[reportPrivateImportUsage]

                place = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=REGISTERS)
                scores = jnp.where(place < slots - tile * TILE, scores * factor, -jnp.inf)
                new_peak = jnp.maximum(peak, jnp.max(scores, axis=0))
                weights = jnp.exp2(scores - columns(new_peak, TILE))
                keep = jnp.exp2(peak - new_peak)
                total = total * keep + jnp.sum(weights, axis=0)

                @pl.when(step > 0)
                def _() -> None:
                    plgpu.barrier_wait(weight_empty)

                weight_s.T[...] = weights.astype(BF16)
                factor_s[...] = keep
                plgpu.commit_smem()  # and all warps have read the keys and the queries
                plgpu.barrier_arrive(weight_full)

                @pl.when(ahead.part < num_parts)
                def _() -> None:
                    copy_rest(ahead, next_page, slot)

                @pl.when((tile == num_tiles - 1) & (part + num_blocks < num_parts))
                def _() -> None:
                    copy_queries(part + num_blocks)

                return new_peak, total, step + 1, advance(ahead)

            # Finite, so that peak - new_peak is never inf - inf.
            lowest = plgpu.layout_cast(jnp.full((width,), -1e30, F32), COLUMN)
            nothing = plgpu.layout_cast(jnp.zeros((width,), F32), COLUMN)
            peak, total, *carry = lax.fori_loop(0, num_tiles, one_tile, (lowest, nothing, *carry))
            group = lax.rem(part, jnp.int32(groups))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # of the part before
            stats_s[0] = peak
            stats_s[1] = total
            plgpu.commit_smem()
            target = stats_g.at[row, :, split, pl.ds(group * width, width)]
            plgpu.copy_smem_to_gmem(stats_s, target)
            return tuple(carry)

        for_each_part(one_part, (jnp.int32(0), start))
        plgpu.barrier_wait(weight_empty)
        plgpu.wait_smem_to_gmem(0)

    def add_values() -> None:
        half = warpgroup - 1
        start = fill(functools.partial(copy_values, half))

        def one_part(part: Array, entry: Array, carry: tuple[Array, _Cursor]) -> Any:
            row, slots, split = work_g[entry, 0], work_g[entry, 2], work_g[entry, 3]
            num_tiles = (slots + TILE - 1) // TILE

            def one_tile(tile: Array, carry: Any) -> Any:
                z, step, ahead = carry
                slot = slot_of(step)
                next_page = page_of(ahead)
                plgpu.barrier_wait(value_full.at[half * RING + slot])
                plgpu.barrier_wait(weight_full)
                keep = plgpu.load(factor_s, layout=COLUMN, optimized=False)

                # What no query sees may be NaN, and a weight of zero does not hide that.
                @pl.when((tile + 1) * TILE > slots)
                def _() -> None:
                    _clear_unseen(values_s.at[half, slot], slots - tile * TILE)

                z = z * columns(keep, HALF)
                z = _add_product(z, values_s.at[half, slot].T, weight_s.T, compiled=compiled)
                plgpu.barrier_arrive(weight_empty)

                @pl.when(ahead.part < num_parts)
                def _() -> None:
                    plgpu.commit_smem()  # all warps have read this place
                    copy_values(half, ahead, next_page, slot)

                return z, step + 1, advance(ahead)

            nothing = plgpu.layout_cast(jnp.zeros((HALF, width), F32), REGISTERS)
            z, *carry = lax.fori_loop(0, num_tiles, one_tile, (nothing, *carry))
            group = lax.rem(part, jnp.int32(groups))
            target = z_g.at[row, split, pl.ds(group * width, width), pl.ds(half * HALF, HALF)]
            z = plgpu.layout_cast(z, plgpu.Layout.WGMMA_TRANSPOSED)
            target.T[...] = z
            return tuple(carry)

        for_each_part(one_part, (jnp.int32(0), start))

    @pl.when(block < num_parts)
    def _() -> None:
        @pl.when(warpgroup == 0)
        def _() -> None:
            find_weights()

        @pl.when(warpgroup != 0)
        def _() -> None:
            add_values()


def _clear_unseen(values: Any, num_seen: Array) -> None:
    for i in range(HALF // CHUNK):
        chunk = values.at[:, pl.ds(i * CHUNK, CHUNK)]
        entries = plgpu.load(chunk, layout=REGISTERS)
        slot = plgpu.broadcasted_iota(jnp.int32, (TILE, CHUNK), 0, layout=REGISTERS)
        chunk[...] = jnp.where(slot < num_seen, entries, jnp.zeros((), BF16))
    plgpu.commit_smem()


def _add_product(total: Array, left: Any, right: Any, *, compiled: bool) -> Array:
    """Return total + left @ right. The interpreter does not take sums that start at a value."""

    def run(sums: Any) -> Array:
        plgpu.wgmma(sums, left, right)
        return sums[...]

    if not compiled:
        return total + pl.run_scoped(run, plgpu.ACC(total.shape, F32))  # pyright: ignore[reportPrivateImportUsage]

    def add(sums: Any) -> None:
        plgpu.wgmma(sums, left, right)

    return pl.run_state(add)(plgpu.ACC.init(total))  # pyright: ignore[reportPrivateImportUsage]
