"""What one block of `prefill_attend` does: 64 queries through all tiles of 64 slots they see.

    warpgroup 0         scores and softmax        P = 2^(q k^T - peak)
    warpgroups 1 and 2  half of the values each   z <- z * 2^(old peak - peak) + P v

A ring of two tiles lies in shared memory. A tile has three parts, the halves of the values and the
rest; the warpgroup that reads a part last asks for the one that takes its place. P goes through
shared memory, since both halves need it.

The tensor cores belong to all three warpgroups. Half 0 of the values is multiplied beside the next
tile's scores, half 1 after them: then warpgroup 0 is busy with the softmax, and half 0 of the tile
after is on its way.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

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

QUERIES = 64  # of a block
WARPGROUPS = 3
SOFTMAX_REGISTERS, VALUE_REGISTERS = 152, 176  # of a thread of warpgroup 0, and of the others

_TILE = plgpu.Layout.WGMMA
_ROW = _TILE.reduce(1)


def attend_block(
    work_g, first_page_g, pages_g, q_g, pool_g, z_g,
    *, kv_s, q_s, weight_s, factor_s, q_full, value_full, rest_full, weight_full, weight_empty,
    next_scored, heads: int, page_tokens: int, factor: float, compiled: bool,
) -> None:  # fmt: skip
    """Do one unit of work. Arguments as in `prefill_attend.attend`; `factor` scales to base 2.

    Each of `kv_s` and `q_s` has what copies into first, and then what the products see.
    """
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
                query = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=_TILE)
                place = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=_TILE)
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
        lowest = plgpu.layout_cast(jnp.full((QUERIES,), -1e30, F32), _ROW)
        nothing = plgpu.layout_cast(jnp.zeros((QUERIES,), F32), _ROW)
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
                entries = plgpu.load(chunk, layout=_TILE)
                slot = plgpu.broadcasted_iota(jnp.int32, (TILE, CHUNK), 0, layout=_TILE)
                chunk[...] = jnp.where(slot < num_seen, entries, jnp.zeros((), BF16))
            plgpu.commit_smem()

        def one_tile(tile: Array, z: Array) -> Array:
            slot = slot_of(tile)
            has_next = tile + RING < num_tiles
            next_page = page_of(jnp.minimum(tile + RING, num_tiles - 1))
            plgpu.barrier_wait(value_full.at[half * RING + slot])
            plgpu.barrier_wait(weight_full)
            keep = plgpu.load(factor_s, layout=_ROW, optimized=False)

            # What no query sees may be NaN, and a weight of zero does not hide that.
            @pl.when((tile + 1) * TILE > num_visible)
            def _() -> None:
                clear_unseen(values_s.at[half, slot], num_visible - tile * TILE)

            @pl.when(half == 1)
            def _() -> None:
                plgpu.barrier_wait(next_scored)

            z = add_product(
                z * rows(keep, HALF), weight_s, values_s.at[half, slot], compiled=compiled
            )
            plgpu.barrier_arrive(weight_empty)

            @pl.when(has_next)
            def _() -> None:
                plgpu.commit_smem()  # all warps have read this place
                copy_values(half, tile + RING, next_page)

            return z

        nothing = plgpu.layout_cast(jnp.zeros((QUERIES, HALF), F32), _TILE)
        z = lax.fori_loop(0, num_tiles, one_tile, nothing)
        plgpu.barrier_wait(weight_full)
        z = z * rows(plgpu.load(factor_s, layout=_ROW, optimized=False), HALF)
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
        @pl.when(warpgroup == 0)
        def _() -> None:
            plgpu.set_max_registers(SOFTMAX_REGISTERS, action="decrease")
            find_weights()

        @pl.when(warpgroup > 0)
        def _() -> None:
            plgpu.set_max_registers(VALUE_REGISTERS, action="increase")
            add_values()
