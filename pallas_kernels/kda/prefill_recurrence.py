"""Second kernel of `kda_prefill` on Hopper: the states of a row, chunk after chunk.

A warpgroup carries 64 value rows of a head's state S [Dv, Dk] in registers, in float32, through all
chunks of a row. Everything is transposed, so that what is in registers is the left operand:

    v'^T = u^T - S w^T
    S   <- S diag(decay) + v'^T k_out

A second warpgroup makes the outputs from bfloat16 copies of S and v' in shared memory, beside that
chain:

    o^T  = S q_in^T + v'^T attend^T

and a third fills a ring with what `prefill_prepare` made.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32, Int32

from pallas_kernels.kda.prefill_tiles import (
    BF16,
    CHUNK,
    COLUMN,
    DIM,
    F32,
    TILE,
    accumulator,
    movable,
    tiles,
    union,
)

ROWS = 64  # value rows of a warpgroup


def recur(
    w_BnNTbD: Array,
    ut_BnNDTb: Array,
    k_out_BnNTbD: Array,
    q_in_BnNTbD: Array,
    attend_BnNTbTb: Array,
    decay_BnND: Array,
    state_SNDvDk: Float32[Array, "S N Dv Dk"],
    row_offsets: Int32[Array, " S1"],
    first_block_S: Int32[Array, " S"],
    export_tokens_S: Int32[Array, " S"],
    *,
    num_tokens: int,
    warpgroups: int,
    stages: int,
    interpret: Any = None,
) -> tuple[Array, Array, Array]:
    """Return outputs [T, N, Dv], states after each row, and exported states.

    Args:
      w_BnNTbD, ...: the results of `prepare`.
      state_SNDvDk: states before each row.
      row_offsets, export_tokens_S: as in `kda_prefill`.
      first_block_S: chunk with the first token of each row.
      num_tokens: T, at least 64.
      warpgroups: how many 64 value rows one block of threads takes, 1 or 2; two share their loads.
      stages: depth of the ring.
      interpret: parameters of the interpreter; None compiles.
    """
    num_rows, heads = state_SNDvDk.shape[:2]
    compiled, square = interpret is None, (warpgroups, CHUNK, ROWS)

    def ring(*shape: int) -> Any:
        return tiles(stages, *shape)

    # One more row than there are: the padding tokens.
    kernel = plgpu.kernel(
        functools.partial(_block, warpgroups=warpgroups, stages=stages, compiled=compiled),
        out_type=[
            jax.ShapeDtypeStruct((num_tokens, heads, DIM), BF16),
            jax.ShapeDtypeStruct(state_SNDvDk.shape, F32),
            jax.ShapeDtypeStruct(state_SNDvDk.shape, F32),
        ],
        grid=(num_rows + 1, heads, DIM // (ROWS * warpgroups)),
        grid_names=("row", "head", "part"),
        num_threads=warpgroups + 2,
        thread_name="warpgroup",
        scratch_types={
            "w_s": ring(CHUNK, DIM),
            "ut_s": ring(ROWS * warpgroups, CHUNK),
            "k_out_s": ring(CHUNK, DIM),
            "q_in_s": ring(CHUNK, DIM),
            "attend_s": ring(CHUNK, CHUNK),
            "decay_s": plgpu.SMEM((stages, DIM), F32),
            # The copies of S; at the end the outputs of a chunk that is not full.
            "state_s": union(
                tiles(warpgroups, ROWS, DIM), plgpu.SMEM(square, BF16), compiled=compiled
            ),
            "values_s": tiles(warpgroups, ROWS, CHUNK),
            "o_s": union(*movable(*square, compiled=compiled), compiled=compiled),
            "full": plgpu.Barrier(num_arrivals=6, num_barriers=stages),
            "empty": plgpu.Barrier(num_arrivals=warpgroups + 1, num_barriers=stages),
            "ready": plgpu.Barrier(num_arrivals=warpgroups),
            "taken": plgpu.Barrier(),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    o_TND, new_SNDvDk, exported_SNDvDk = kernel(
        w_BnNTbD, ut_BnNDTb, k_out_BnNTbD, q_in_BnNTbD, attend_BnNTbTb, decay_BnND,
        state_SNDvDk, row_offsets, first_block_S, export_tokens_S,
    )  # fmt: skip
    return o_TND, new_SNDvDk, exported_SNDvDk


def _block(
    w_g, ut_g, k_out_g, q_in_g, attend_g, decay_g, old_g, offsets_g, first_g, export_g,
    o_g, new_g, exported_g,
    *, w_s, ut_s, k_out_s, q_in_s, attend_s, decay_s, state_s, values_s, o_s,
    full, empty, ready, taken, warpgroups: int, stages: int, compiled: bool,
) -> None:  # fmt: skip
    row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
    warpgroup = lax.axis_index("warpgroup")
    num_rows, num_tokens = old_g.shape[0], o_g.shape[0]
    leave_s, o_s = o_s[0], o_s[-1]  # what copies out of, and what the threads see: the same bytes
    state_s, tail_s = state_s
    values = pl.ds(part * (ROWS * warpgroups), ROWS * warpgroups)
    start = offsets_g[row]
    is_row = row < num_rows
    length = offsets_g[jnp.minimum(row + 1, num_rows)] - start  # 0 for the padding
    num_chunks = (length + CHUNK - 1) // CHUNK
    first_block = first_g[jnp.minimum(row, num_rows - 1)]

    def value_rows(which: Any) -> pl.Slice:
        return pl.ds(part * (ROWS * warpgroups) + which * ROWS, ROWS)

    def slot_of(i: Array) -> Array:
        return lax.rem(i, jnp.int32(stages))

    @pl.when(warpgroup == warpgroups + 1)
    def _load():
        plgpu.set_max_registers(40, action="decrease")
        shared = ((w_g, w_s), (k_out_g, k_out_s), (q_in_g, q_in_s), (attend_g, attend_s))

        @pl.loop(0, num_chunks)
        def _(i):
            slot, block = slot_of(i), first_block + i

            @pl.when(i >= stages)
            def _():
                plgpu.barrier_wait(empty.at[slot])

            for ref, target in (*shared, (decay_g, decay_s)):
                plgpu.copy_gmem_to_smem(ref.at[block, head], target.at[slot], full.at[slot])
            ut = ut_g.at[block, head, values]
            plgpu.copy_gmem_to_smem(ut, ut_s.at[slot], full.at[slot])

        @pl.loop(jnp.maximum(num_chunks - stages, 0), num_chunks)
        def _(i):
            plgpu.barrier_wait(empty.at[slot_of(i)])

    @pl.when(warpgroup == warpgroups)
    def _outputs():
        plgpu.set_max_registers(104, action="decrease")

        def store(tokens: pl.Slice) -> None:
            for i in range(warpgroups):
                plgpu.copy_smem_to_gmem(leave_s.at[i], o_g.at[tokens, head, value_rows(i)])

        @pl.loop(0, num_chunks)
        def _(i):
            slot = slot_of(i)
            plgpu.barrier_wait(full.at[slot])
            plgpu.barrier_wait(ready)

            def product(which: int, total: Any) -> Array:
                plgpu.wgmma(total, state_s.at[which], q_in_s.at[slot].T)
                plgpu.wgmma(total, values_s.at[which], attend_s.at[slot].T)
                plgpu.wgmma_wait(0)
                return total[...].astype(BF16)

            outputs = [
                pl.run_scoped(functools.partial(product, which), accumulator(ROWS, CHUNK))
                for which in range(warpgroups)
            ]
            plgpu.barrier_arrive(taken)
            plgpu.barrier_arrive(empty.at[slot])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            for which, ot in enumerate(outputs):
                o_s.at[which].T[...] = ot
            plgpu.commit_smem()
            is_full = (i + 1) * CHUNK <= length

            @pl.when(is_full)
            def _():
                store(pl.ds(start + i * CHUNK, CHUNK))

            @pl.when(jnp.logical_not(is_full))  # the next token belongs to another row
            def _():
                for which in range(warpgroups):
                    tail_s[which] = plgpu.load(o_s.at[which], layout=TILE)
                plgpu.commit_smem()

                @pl.loop(0, length - i * CHUNK)
                def _(j):
                    target = o_g.at[pl.ds(start + i * CHUNK + j, 1), head]
                    for which in range(warpgroups):
                        token = tail_s.at[which, pl.ds(j, 1)]
                        plgpu.copy_smem_to_gmem(token, target.at[:, value_rows(which)])

        @pl.when(jnp.logical_not(is_row))
        def _():
            for which in range(warpgroups):
                o_s[which] = plgpu.layout_cast(jnp.zeros((CHUNK, ROWS), BF16), TILE)
            plgpu.commit_smem()

            @pl.loop(0, (num_tokens - start + CHUNK - 1) // CHUNK)
            def _(i):
                store(pl.ds(start + i * CHUNK, CHUNK))  # clipped at the end

        plgpu.wait_smem_to_gmem(0)

    @pl.when((warpgroup < warpgroups) & is_row)
    def _states():
        plgpu.set_max_registers(232 if warpgroups == 1 else 176, action="increase")
        export = export_g[row]
        mine, own = value_rows(warpgroup), pl.ds(warpgroup * ROWS, ROWS)

        def left(x: Array, copy: Any) -> Any:
            """A left operand: registers, or what the interpreter takes instead."""
            if compiled:
                return x
            copy[...] = x
            plgpu.commit_smem()
            return copy

        def one_chunk(i: Array, state: Array) -> Array:
            @pl.when((i * CHUNK == export) & (i > 0))
            def _():
                exported_g[row, head, mine] = state

            @pl.when(i > 0)
            def _():
                plgpu.barrier_wait(taken)

            slot = slot_of(i)
            plgpu.barrier_wait(full.at[slot])
            copy, values = state_s.at[warpgroup], values_s.at[warpgroup]
            operand = state.astype(BF16)

            def read(total: Any) -> tuple[Array, Array]:
                plgpu.wgmma(total, left(operand, copy), w_s.at[slot].T)
                if compiled:
                    copy[...] = operand
                decay = plgpu.load(decay_s.at[slot], layout=COLUMN, optimized=False)
                decayed = state * lax.broadcast_in_dim(decay, (ROWS, DIM), (1,))
                ut = plgpu.load(ut_s.at[slot, own], layout=TILE).astype(F32)
                plgpu.wgmma_wait(0)
                return decayed, (ut - total[...]).astype(BF16)

            def write(vt: Array, total: Any) -> Array:
                plgpu.wgmma(total, left(vt, values), k_out_s.at[slot])
                if compiled:
                    values[...] = vt
                plgpu.commit_smem()
                plgpu.barrier_arrive(ready)
                plgpu.wgmma_wait(0)
                return total[...]

            decayed, vt = pl.run_scoped(read, accumulator(ROWS, CHUNK))
            update = pl.run_scoped(functools.partial(write, vt), accumulator(ROWS, DIM))
            plgpu.barrier_arrive(empty.at[slot])
            return decayed + update

        state = plgpu.load(old_g.at[row, head, mine], layout=TILE, optimized=False)

        @pl.when(export == 0)
        def _():
            exported_g[row, head, mine] = state

        state = lax.fori_loop(0, num_chunks, one_chunk, state)
        new_g[row, head, mine] = state

        @pl.when(num_chunks > 0)
        def _():
            plgpu.barrier_wait(taken)
