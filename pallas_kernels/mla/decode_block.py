"""What a block of threads of `decode_attend` does.

It takes parts from the work list, one after the other:

    warpgroup 0         scores and softmax        P = 2^(k q - peak), [slots, heads]
    warpgroups 1 and 2  half of the values each   z <- z * 2^(old peak - peak) + v^T P

A ring of two tiles lies in shared memory. A tile has three parts, the halves of the values and the
rest; the warpgroup that reads a part last asks for the one that takes its place, also across the
ends of parts of a row, so that the copies never stop.
"""

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

from pallas_kernels import pdl as launch_order
from pallas_kernels.mla.mosaic_parts import (
    BF16,
    CHUNK,
    ENTRY,
    F32,
    HALF,
    LATENT,
    RING,
    TILE,
    add_product,
)

REGISTERS = plgpu.Layout.WGMMA
COLUMN = REGISTERS.reduce(0)


class _Cursor(NamedTuple):
    """A tile of this block: its part, and its number there.

    With it comes what the list says of the part and, so that nobody waits for it later, of the part
    that this block takes next.
    """

    part: Array
    tile: Array
    row: Array
    first: Array
    slots: Array
    next_row: Array
    next_first: Array
    next_slots: Array


def attend_block(
    num_parts_g, work_g, first_page_g, pages_g, q_g, pool_g, z_g, stats_g,
    *, kv_s, q_s, weight_s, factor_s, stats_s, q_full, value_full, rest_full, weight_full,
    weight_empty, heads: int, groups: int, width: int, page_tokens: int, factor: float,
    num_blocks: int, compiled: bool, pdl: bool,
) -> None:  # fmt: skip
    """See the module; arguments as in `decode_attend.attend`."""
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    launch_order.wait(pdl)
    launch_order.launch_dependents(pdl)
    (arriving_values_s, arriving_rest_s), (values_s, rest_s) = kv_s[0], kv_s[-1]
    arriving_q_s, queries_s = q_s[0], q_s[-1]
    stride = jnp.int32(num_blocks)
    num_parts = num_parts_g[0] * groups
    own_parts = (num_parts - block + stride - 1) // stride
    shape = (TILE, width)

    def slot_of(step: Array) -> Array:
        return lax.rem(step, jnp.int32(RING))

    def columns(x: Array, num_rows: int) -> Array:
        return lax.broadcast_in_dim(x, (num_rows, width), (1,))

    def work_of(part: Array) -> tuple[Array, Array, Array]:
        entry = jnp.minimum(part, num_parts - 1) // groups
        return work_g[entry, 0], work_g[entry, 1], work_g[entry, 2]

    def begin() -> _Cursor:
        return _Cursor(block, jnp.int32(0), *work_of(block), *work_of(block + stride))

    def advance(at: _Cursor) -> _Cursor:
        is_last = (at.tile + 1) * TILE >= at.slots
        part = at.part + stride
        after = work_of(part + stride)
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
            part = block + i * stride
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

        def one_part(part: Array, entry: Array, carry: Any) -> Any:
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

                @pl.when((tile == num_tiles - 1) & (part + stride < num_parts))
                def _() -> None:
                    copy_queries(part + stride)

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

        def one_part(part: Array, entry: Array, carry: Any) -> Any:
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
                z = add_product(z, values_s.at[half, slot].T, weight_s.T, compiled=compiled)
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
