"""First kernel of `kda_prefill` on Hopper: what a chunk of 64 tokens needs that no state enters.

A warpgroup prepares one chunk of one head. With q and k normalised, g the log decays in base 2,
G(i) their sum from the chunk's start through token i, and beta the write strengths:

    A[i, j]      = beta_i sum_d k_i 2^(G(i) - G(j)) k_j    for j < i
    attend[i, j] =        sum_d q_i 2^(G(i) - G(j)) k_j    for j <= i
    T            = (I + A)^-1 diag(beta)
    w = T (k 2^G),  u = T v,  q_in = q 2^G,  k_out = k 2^(G(last) - G),  decay = 2^G(last)

Three warpgroups, all that fit on a multiprocessor, form a block and do not know of each other; they
fill each other's waits. Everything goes in halves of 64 channels, which are tiles of their own.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels.kda import prefill_decays as decays
from pallas_kernels.kda.prefill_inverse import unit_lower_inverse
from pallas_kernels.kda.prefill_tiles import (
    BF16,
    CHUNK,
    COLUMN,
    DIM,
    F16,
    F32,
    ROW,
    TILE,
    movable,
    multiply,
    tiles,
    union,
)

EPS = 1e-6
WARPGROUPS = 3  # of a block


def prepare(
    first_Bn: Int32[Array, " Bn"],
    count_Bn: Int32[Array, " Bn"],
    q_TND: BFloat16[Array, "T N D"],
    k_TND: BFloat16[Array, "T N D"],
    v_TND: BFloat16[Array, "T N D"],
    f_TND: BFloat16[Array, "T N D"],
    beta_BnNTb: Float32[Array, "Bn N Tb"],
    rate_N: Float32[Array, " N"],
    offset_ND: Float32[Array, "N D"],
    *,
    lower_bound: float,
    interpret: Any = None,
) -> tuple[Array, ...]:
    """Return w, u^T, k_out, q_in, attend and decay of every chunk and head, [Bn, N, ...].

    Args:
      first_Bn: first token of each chunk. count_Bn: its number of tokens, 0 for an unused chunk,
        whose results are not written.
      q_TND, k_TND, v_TND, f_TND: as in `kda_prefill`; T >= 64.
      beta_BnNTb: write strengths, zero where a chunk has no token.
      rate_N, offset_ND: the gate is lower_bound / (1 + 2^(f * rate + offset)).
      lower_bound: decays.LOWEST_BOUND or more.
      interpret: parameters of the interpreter; None compiles.
    """
    num_chunks, heads = count_Bn.shape[0], q_TND.shape[1]
    compiled = interpret is None
    halves = (WARPGROUPS, 2, CHUNK, CHUNK)
    work = (WARPGROUPS, 3, CHUNK, CHUNK)

    def out(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_chunks, heads, *shape), dtype)

    scratch = {
        "q_s": union(*movable(*halves, compiled=compiled), compiled=compiled),
        "k_s": union(*movable(*halves, compiled=compiled), compiled=compiled),
        # Inputs of the gates, the gates, then keys and w.
        "f_s": union(
            *movable(*halves, compiled=compiled), tiles(*halves, dtype=F16), compiled=compiled
        ),
        # Right operands of the scores, those of the inverse, then `attend` and v, and u.
        "work_s": union(
            *movable(*work, compiled=compiled),
            tiles(WARPGROUPS, 3 * CHUNK, CHUNK),
            tiles(*work, dtype=F16),
            compiled=compiled,
        ),
        "all_s": tiles(WARPGROUPS, *decays.ALL.shape, dtype=F16),
        "beta_s": plgpu.SMEM((WARPGROUPS, CHUNK), F32),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=5 * WARPGROUPS),
    }
    if not compiled:
        scratch["park"] = (
            tiles(WARPGROUPS, CHUNK, CHUNK),
            tiles(WARPGROUPS, CHUNK, CHUNK, dtype=F16),
        )
    kernel = plgpu.kernel(
        functools.partial(_block, lower_bound=lower_bound),
        out_type=[
            out(CHUNK, DIM),
            out(DIM, CHUNK),
            out(CHUNK, DIM),
            out(CHUNK, DIM),
            out(CHUNK, CHUNK),
            out(DIM, dtype=F32),
        ],
        grid=(-(-num_chunks * heads // WARPGROUPS),),
        grid_names=("block",),
        num_threads=WARPGROUPS,
        thread_name="warpgroup",
        scratch_types=scratch,
        # A thread overwrites what it alone has read; everything else is behind `commit_smem`.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    inputs = (first_Bn, count_Bn, q_TND, k_TND, v_TND, f_TND, beta_BnNTb, rate_N, offset_ND)
    return tuple(kernel(*inputs, decays.SUMS, decays.ALL))


def _block(
    first_g, count_g, q_g, k_g, v_g, f_g, beta_g, rate_g, offset_g, sums_g, all_g,
    w_g, ut_g, k_out_g, q_in_g, attend_g, decay_g,
    *, q_s, k_s, f_s, work_s, all_s, beta_s, full, lower_bound: float, park: Any = None,
) -> None:  # fmt: skip
    warpgroup = lax.axis_index("warpgroup")
    num_chunks, heads = decay_g.shape[:2]
    unit = lax.axis_index("block") * WARPGROUPS + warpgroup
    chunk, head = lax.div(unit, jnp.int32(heads)), lax.rem(unit, jnp.int32(heads))
    safe = jnp.minimum(chunk, num_chunks - 1)
    first, count = first_g[safe], jnp.where(chunk < num_chunks, count_g[safe], 0)
    # First what copies into, then what the threads and products see: the same bytes.
    q_s, k_s, f_s, work_s = (
        [ref.at[warpgroup] for ref in refs] for refs in (q_s, k_s, f_s, work_s)
    )
    *f_s, gates_s = f_s
    *work_s, rows_s, inverse_s = work_s
    lands = [f_s[0], k_s[0], q_s[0]]
    v_land, v_s = (refs.at[pl.ds(1, 2)] for refs in (work_s[0], work_s[-1]))
    q_s, k_s, f_s, work_s = (refs[-1] for refs in (q_s, k_s, f_s, work_s))
    ut_s = rows_s.at[pl.ds(CHUNK, DIM)]
    all_s, beta_s = all_s.at[warpgroup], beta_s.at[warpgroup]

    shape = (CHUNK, CHUNK)
    row = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE)
    column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=TILE)

    def load(ref: Any) -> Array:
        return plgpu.load(ref, layout=TILE).astype(F32)

    def rows(x: Array) -> Array:
        return lax.broadcast_in_dim(x, shape, (0,))

    def columns(x: Array) -> Array:
        return lax.broadcast_in_dim(x, shape, (1,))

    def channels(half: int) -> pl.Slice:
        return pl.ds(half * CHUNK, CHUNK)

    if park is not None:
        park = [ref.at[warpgroup] for ref in park]
    products = functools.partial(multiply, park=park)

    def included(which: int) -> Array:
        return plgpu.load(sums_g.at[which], layout=TILE, optimized=False)

    def arrived(which: int) -> Any:
        return full.at[warpgroup * 5 + which]

    def mask(ref: Any, fill: float) -> None:
        @pl.when(count < CHUNK)
        def _():
            for half in range(2):
                ref[half] = jnp.where(row < count, load(ref.at[half]), fill).astype(BF16)

    @pl.when(count > 0)
    def _():
        tokens = pl.ds(first, CHUNK)

        def fetch(source: Any, land: Any, which: int) -> None:
            for half in range(2):
                part = source.at[tokens, head, channels(half)]
                plgpu.copy_gmem_to_smem(part, land.at[half], arrived(which))

        for which, (source, land) in enumerate(zip((f_g, k_g, q_g), lands, strict=True)):
            fetch(source, land, which)
        plgpu.copy_gmem_to_smem(beta_g.at[chunk, head], beta_s, arrived(4))
        plgpu.copy_gmem_to_smem(all_g, all_s, arrived(4))
        rate = rate_g[head]
        offsets = [
            plgpu.load(offset_g.at[head, channels(half)], layout=COLUMN, optimized=False)
            for half in range(2)
        ]
        beta = plgpu.load(beta_g.at[chunk, head], layout=ROW, optimized=False)

        plgpu.barrier_wait(arrived(0))
        mask(f_s, -jnp.inf)
        for half in range(2):
            x = load(f_s.at[half]) * rate + columns(offsets[half])
            gates_s[half] = decays.scaled_gate(x, lower_bound)
        plgpu.commit_smem()

        plgpu.barrier_wait(arrived(1))
        plgpu.barrier_wait(arrived(2))
        mask(k_s, 0.0)
        mask(q_s, 0.0)

        def squares(ref: Any) -> Array:
            parts = [load(ref.at[half]) for half in range(2)]
            return jnp.sum(parts[0] * parts[0] + parts[1] * parts[1], axis=1) + EPS

        q_norm, k_squares = lax.rsqrt(squares(q_s)) * DIM**-0.5, squares(k_s)
        k_norm, k_bits = lax.rsqrt(k_squares), rows(jnp.log2(k_squares) * -0.5)

        # Only the upper halves of these tiles count: each half's lower one is overwritten.
        to_middle = included(decays.TO_MIDDLE)
        for half in range(2):
            (total,) = products([(to_middle, gates_s.at[half])])
            keys = load(k_s.at[half]) * jnp.exp2(total * decays.PER_BIT + k_bits)
            rows_s[pl.ds(half * decays.SUB, CHUNK)] = keys.astype(BF16)
            plgpu.commit_smem()
        within = included(decays.WITHIN)
        q_left, k_left = [], []
        for half in range(2):
            (total,) = products([(within, gates_s.at[half])])
            growth, keys = jnp.exp2(total * decays.PER_BIT + decays.SHIFT), load(k_s.at[half])
            q_left.append((load(q_s.at[half]) * growth).astype(BF16))
            k_left.append((keys * growth).astype(BF16))
            keys = keys * jnp.exp2(total * -decays.PER_BIT + (k_bits - decays.SHIFT))
            rows_s[pl.ds((half + 1) * CHUNK, CHUNK)] = keys.astype(BF16)
        plgpu.commit_smem()

        crosses = (row >= decays.SUB) & (column < decays.SUB)

        def scores(operands: list[Array], scale: Array) -> Array:
            inside, between = products(
                [(x, rows_s.at[pl.ds((half + 1) * CHUNK, CHUNK)].T)
                 for half, x in enumerate(operands)],
                [(x, rows_s.at[pl.ds(half * decays.SUB, CHUNK)].T)
                 for half, x in enumerate(operands)],
            )  # fmt: skip
            return jnp.where(crosses, between * 2.0**-decays.SHIFT, inside) * rows(scale)

        attend = jnp.where(column <= row, scores(q_left, q_norm), 0.0).astype(BF16)
        lower = jnp.where(column < row, scores(k_left, beta * k_norm), 0.0)
        plgpu.commit_smem()  # all have read the right operands

        x = unit_lower_inverse(lower, inverse_s, products)
        plgpu.barrier_wait(arrived(4))
        x = x * columns(plgpu.load(beta_s, layout=COLUMN, optimized=False))
        x = x.astype(BF16)
        plgpu.commit_smem()  # all have read the operands of the inverse
        fetch(v_g, v_land, 3)
        work_s[0] = attend

        from_start, to_end = included(decays.FROM_START), included(decays.TO_END)
        for half in range(2):
            # The last sum is the same in all 8 columns.
            started, ending, total = products(
                [(from_start, gates_s.at[half])],
                [(to_end, gates_s.at[half])],
                [(gates_s.at[half].T, all_s.T)],
            )
            decay_g[chunk, head, channels(half)] = jnp.exp2(jnp.max(total, axis=1) * decays.PER_BIT)
            started, keys = jnp.exp2(started * decays.PER_BIT), load(k_s.at[half])
            q_s[half] = (load(q_s.at[half]) * started * rows(q_norm)).astype(BF16)
            k_s[half] = (keys * jnp.exp2(ending * decays.PER_BIT + k_bits)).astype(BF16)
            plgpu.commit_smem()  # all have read the gates
            f_s[half] = (keys * started * rows(k_norm)).astype(BF16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(work_s.at[0], attend_g.at[chunk, head])
        for ref, target in ((q_s, q_in_g), (k_s, k_out_g)):
            for half in range(2):
                plgpu.copy_smem_to_gmem(ref.at[half], target.at[chunk, head, :, channels(half)])

        plgpu.barrier_wait(arrived(3))
        mask(v_s, 0.0)
        plgpu.commit_smem()
        w = [part.astype(BF16) for part in products(*([(x, f_s.at[half])] for half in range(2)))]
        u = [part.astype(BF16) for part in products(*([(x, v_s.at[half])] for half in range(2)))]
        plgpu.commit_smem()  # all have read keys and values
        for half in range(2):
            f_s[half] = w[half]
            ut_s.at[channels(half)].T[...] = u[half]
        plgpu.commit_smem()
        for half in range(2):
            plgpu.copy_smem_to_gmem(f_s.at[half], w_g.at[chunk, head, :, channels(half)])
        plgpu.copy_smem_to_gmem(ut_s, ut_g.at[chunk, head])
        plgpu.wait_smem_to_gmem(0)
