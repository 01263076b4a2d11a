"""First kernel of `kda_prefill` on Hopper: what a chunk of 64 tokens needs that no state enters.

A block of 128 threads prepares one chunk of one head. With q and k normalised, g the log decays in base 2,
G(i) their sum from the chunk's start through token i, and beta the write strengths:

    A[i, j]      = beta_i sum_d k_i 2^(G(i) - G(j)) k_j    for j < i
    attend[i, j] =        sum_d q_i 2^(G(i) - G(j)) k_j    for j <= i
    T            = (I + A)^-1 diag(beta)
    w = T (k 2^G),  u = T v,  q_in = q 2^G,  k_out = k 2^(G(last) - G),  decay = 2^G(last)

Two blocks fit on a multiprocessor and fill each other's waits; inside a block, what the outputs
need is computed beside the products of the inverse, which wait for each other. Everything goes in
halves of 64 channels, which are tiles of their own.

Decays. Sums of g are products with matrices of zeros and ones on the tensor cores, on g rounded to
float16 (scaled, so that small gates are not subnormal): every sum has the relative error of one
rounding, 2^-12, and all are sums of the same numbers. A factor 2^(G(i) - G(j)) is split between the
operands of a product. Inside a sub-block of 32 tokens both count from its first token and half of
the largest possible exponent, 31 * 5 * log2(e), goes to either side, so that none overflows: keys
and queries must be smaller than 2^15. Across the two sub-blocks they meet at token 32, where
neither grows. Entries above the diagonal may overflow; they are masked by selection. No sum sees a
gate behind the row that uses it (KF-K01).

Inverse. Neumann series of the 8 x 8 diagonal blocks, then merges of neighbours to 16, 32 and 64,
X <- X - X A X restricted to the blocks between them, with float16 operands: in bfloat16, or as one
series, it fails for nearly parallel keys (KF-K03).
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels.kda.prefill_tiles import (
    BF16,
    CHUNK,
    COLUMN,
    DIM,
    F16,
    F32,
    ROW,
    TILE,
    accumulator,
    landing,
    tiles,
    union,
)

type Work = Callable[[], Sequence[Array]]

SUB = 32  # tokens of a sub-block
LOWEST_BOUND = -5.0  # of the log decays; SHIFT relies on it
GATE_SCALE = 2.0**10  # of g in float16
SHIFT = 112.0  # bits, about (SUB - 1) * 5 * log2(e) / 2
EPS = 1e-6

# Which tokens (columns) the sums of each row include.
_I, _J = np.indices((CHUNK, CHUNK))
_WITHIN = (_J <= _I) & (_J > _I // SUB * SUB)  # from the sub-block's second token on
_TO_MIDDLE = (_J > _I) & (_J <= SUB)
_FROM_START = _J <= _I
_TO_END = _J > _I
_SUMS = np.stack([_WITHIN, _TO_MIDDLE, _FROM_START, _TO_END]).astype(np.float16)
_ALL = np.ones((8, CHUNK), np.float16)


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
      lower_bound: LOWEST_BOUND or more.
      interpret: parameters of the interpreter; None compiles.
    """
    num_chunks, heads = count_Bn.shape[0], q_TND.shape[1]
    compiled = interpret is None
    square, halves = (CHUNK, CHUNK), (2, CHUNK, CHUNK)

    def out(*shape: int, dtype: Any = BF16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((num_chunks, heads, *shape), dtype)

    def arriving() -> list[Any]:
        return [landing(*halves), tiles(*halves)] if compiled else [tiles(*halves)]

    scratch = {
        "q_s": union(*arriving(), compiled=compiled),
        "k_s": union(*arriving(), compiled=compiled),
        "v_s": union(*arriving(), compiled=compiled),
        "f_s": union(*arriving(), tiles(*halves, dtype=F16), compiled=compiled),  # then the gates
        "within_s": tiles(*halves),  # right operands of the scores, then those of w, then w
        "across_s": union(  # the same for tokens of another sub-block, operands of the inverse, u
            tiles(*halves), tiles(*halves, dtype=F16), tiles(DIM, CHUNK), compiled=compiled
        ),
        "attend_s": union(  # ones, an operand of the inverse, then `attend`
            tiles(*square),
            tiles(*square, dtype=F16),
            tiles(*_ALL.shape, dtype=F16),
            compiled=compiled,
        ),
        "beta_s": plgpu.SMEM((CHUNK,), F32),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=5),
    }
    if not compiled:
        scratch["park"] = (tiles(*square), tiles(*square, dtype=F16))
    kernel = plgpu.kernel(
        functools.partial(_block, lower_bound=lower_bound, compiled=compiled),
        out_type=[
            out(CHUNK, DIM),
            out(DIM, CHUNK),
            out(CHUNK, DIM),
            out(CHUNK, DIM),
            out(CHUNK, CHUNK),
            out(DIM, dtype=F32),
        ],
        grid=(num_chunks, heads),
        grid_names=("chunk", "head"),
        scratch_types=scratch,
        # A thread overwrites what it alone has read; everything else is behind `commit_smem`.
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
        interpret=interpret,
    )
    inputs = (first_Bn, count_Bn, q_TND, k_TND, v_TND, f_TND, beta_BnNTb, rate_N, offset_ND)
    return tuple(kernel(*inputs, _SUMS, _ALL))


def _block(
    first_g, count_g, q_g, k_g, v_g, f_g, beta_g, rate_g, offset_g, sums_g, all_g,
    w_g, ut_g, k_out_g, q_in_g, attend_g, decay_g,
    *, q_s, k_s, v_s, f_s, within_s, across_s, attend_s, beta_s, full,
    lower_bound: float, compiled: bool, park=None,
) -> None:  # fmt: skip
    chunk, head = lax.axis_index("chunk"), lax.axis_index("head")
    first, count = first_g[chunk], count_g[chunk]
    # First what copies into, then what the threads and products see: the same bytes.
    *f_s, gates_s = f_s
    arrivals = ((f_g, f_s[0]), (k_g, k_s[0]), (q_g, q_s[0]), (v_g, v_s[0]))
    f_s, k_s, q_s, v_s = (refs[-1] for refs in (f_s, k_s, q_s, v_s))
    across_s, operand_s, ut_s = across_s
    attend_s, last_s, all_s = attend_s

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

    def left(x: Array) -> Any:
        """A left operand: registers, or what the interpreter takes instead."""
        if compiled:
            return x
        ref = park[0 if x.dtype == BF16 else 1]
        ref[...] = x
        plgpu.commit_smem()
        return ref

    def products(*sums: list[tuple[Any, Any]], meanwhile: Work | None = None) -> list[Array]:
        """Sums of products of pairs, all at once; a pair is an array or a ref, and a ref.

        What `meanwhile` returns follows the sums.
        """

        def run(*totals: Any) -> list[Array]:
            for total, pairs in zip(totals, sums, strict=True):
                for a, b in pairs:
                    plgpu.wgmma(total, left(a) if isinstance(a, jax.Array) else a, b)
                    if not compiled:
                        plgpu.wgmma_wait(0)
            others = () if meanwhile is None else meanwhile()
            plgpu.wgmma_wait(0)
            return [*(total[...] for total in totals), *others]

        shapes = [(CHUNK, pairs[0][1].shape[1]) for pairs in sums]
        return pl.run_scoped(run, *(accumulator(*shape) for shape in shapes))

    def gate_sums(which: int) -> list[list[tuple[Any, Any]]]:
        included = plgpu.load(sums_g.at[which], layout=TILE, optimized=False)
        return [[(included, gates_s.at[half])] for half in range(2)]

    per_bit = 1.0 / GATE_SCALE

    def mask(ref: Any, fill: float) -> None:
        @pl.when(count < CHUNK)
        def _():
            for half in range(2):
                ref[half] = jnp.where(row < count, load(ref.at[half]), fill).astype(BF16)

    @pl.when(count > 0)
    def _():
        for i, (source, target) in enumerate(arrivals):
            for half in range(2):
                part = source.at[pl.ds(first, CHUNK), head, channels(half)]
                plgpu.copy_gmem_to_smem(part, target.at[half], full.at[i])
        plgpu.copy_gmem_to_smem(beta_g.at[chunk, head], beta_s, full.at[4])
        plgpu.copy_gmem_to_smem(all_g, all_s, full.at[4])
        rate = rate_g[head]
        offsets = [
            plgpu.load(offset_g.at[head, channels(half)], layout=COLUMN, optimized=False)
            for half in range(2)
        ]
        beta = plgpu.load(beta_g.at[chunk, head], layout=ROW, optimized=False)

        # Gates: 1 / x as 2^-log2(x), since a division takes long, and a sigmoid by tanh has no
        # relative accuracy for small values.
        plgpu.barrier_wait(full.at[0])
        mask(f_s, -jnp.inf)
        scale = lower_bound * math.log2(math.e) * GATE_SCALE
        for half in range(2):
            x = jnp.exp2(load(f_s.at[half]) * rate + columns(offsets[half]))
            gates_s[half] = (jnp.exp2(-jnp.log2(1.0 + x)) * scale).astype(F16)
        plgpu.commit_smem()

        def squares(ref: Any) -> Array:
            parts = [load(ref.at[half]) for half in range(2)]
            return jnp.sum(parts[0] * parts[0] + parts[1] * parts[1], axis=1) + EPS

        for i in (1, 2, 4):
            plgpu.barrier_wait(full.at[i])
        mask(k_s, 0.0)
        mask(q_s, 0.0)
        within = products(*gate_sums(0))
        q_norm, k_squares = lax.rsqrt(squares(q_s)) * DIM**-0.5, squares(k_s)
        k_norm, k_bits = lax.rsqrt(k_squares), rows(jnp.log2(k_squares) * -0.5)

        def operands_within() -> list[Array]:
            operands = []
            for half in range(2):
                growth, keys = jnp.exp2(within[half] * per_bit + SHIFT), load(k_s.at[half])
                operands.append((load(q_s.at[half]) * growth).astype(BF16))
                operands.append((keys * growth).astype(BF16))
                keys = keys * jnp.exp2(within[half] * -per_bit + (k_bits - SHIFT))
                within_s[half] = keys.astype(BF16)
            return operands

        # The last two sums are over all tokens, and the same in all 8 columns.
        everything = ([(gates_s.at[half].T, all_s.T)] for half in range(2))
        *to_middle, all_0, all_1, q_0, k_0, q_1, k_1 = products(
            *gate_sums(1), *everything, meanwhile=operands_within
        )
        for half in range(2):
            keys = load(k_s.at[half]) * jnp.exp2(to_middle[half] * per_bit + k_bits)
            across_s[half] = keys.astype(BF16)
            total = jnp.max((all_0, all_1)[half], axis=1)
            decay_g[chunk, head, channels(half)] = jnp.exp2(total * per_bit)
        plgpu.commit_smem()

        crosses = (row >= SUB) & (column < SUB)

        def scores(inside: Array, between: Array, scale: Array) -> Array:
            return jnp.where(crosses, between * 2.0**-SHIFT, inside) * rows(scale)

        q_inside, q_between, k_inside, k_between = products(
            *([(x, ref.at[half].T) for half, x in enumerate(operands)]
              for operands in ((q_0, q_1), (k_0, k_1)) for ref in (within_s, across_s))
        )  # fmt: skip
        lower = jnp.where(column < row, scores(k_inside, k_between, beta * k_norm), 0.0)
        attend = jnp.where(column <= row, scores(q_inside, q_between, q_norm), 0.0).astype(BF16)
        plgpu.commit_smem()  # all have read the right operands

        # (I + A)^-1. Products with all of A are masked, instead of parts of A.
        def same(bits: int) -> Array:
            return (row >> bits) == (column >> bits)

        a_s, odd_s, even_s = operand_s.at[0], operand_s.at[1], last_s
        a_s[...] = lower.astype(F16)
        plgpu.commit_smem()
        blocks = jnp.where(same(3), lower, 0.0)
        power, *from_start = products([(blocks.astype(F16), a_s)], *gate_sums(2))

        def outputs_from_start(half: int) -> Work:
            def run() -> tuple[()]:
                growth = jnp.exp2(from_start[half] * per_bit)
                q_s[half] = (load(q_s.at[half]) * growth * rows(q_norm)).astype(BF16)
                within_s[half] = (load(k_s.at[half]) * growth * rows(k_norm)).astype(BF16)
                return ()

            return run

        power = jnp.where(same(3), power, 0.0).astype(F16)
        odd_s[...] = power
        plgpu.commit_smem()
        x = jnp.where(row == column, 1.0, 0.0) - blocks
        step, power = products(
            [(x.astype(F16), odd_s)], [(power, odd_s)], meanwhile=outputs_from_start(0)
        )
        x = x + step
        even_s[...] = power.astype(F16)
        plgpu.commit_smem()
        (step,) = products([(x.astype(F16), even_s)], meanwhile=outputs_from_start(1))
        x = x + step

        def merge(x: Array, bits: int, x_s: Any, more: Any, meanwhile: Any) -> tuple[Array, Any]:
            operand = x.astype(F16)
            x_s[...] = operand
            plgpu.commit_smem()
            step, *sums = products([(operand, a_s)], *more, meanwhile=meanwhile[0])
            step = jnp.where(same(bits), jnp.where(same(bits - 1), 0.0, step), 0.0)
            (step,) = products([(step.astype(F16), x_s)], meanwhile=meanwhile[1])
            return x - step, sums

        def copy_out(ref: Any, target: Any) -> Work:
            def run() -> tuple[()]:
                for half in range(2):
                    part = target.at[chunk, head, :, channels(half)]
                    plgpu.copy_smem_to_gmem(ref.at[half], part)
                return ()

            return run

        def outputs_to_end(half: int) -> Work:
            def run() -> tuple[()]:
                decay = jnp.exp2(to_end[half] * per_bit + k_bits)
                k_s[half] = (load(k_s.at[half]) * decay).astype(BF16)
                return ()

            return run

        x, to_end = merge(x, 4, odd_s, gate_sums(3), (copy_out(q_s, q_in_g), None))
        x, _ = merge(x, 5, even_s, (), (outputs_to_end(0), outputs_to_end(1)))
        x, _ = merge(x, 6, odd_s, (), (copy_out(k_s, k_out_g), None))

        x = x * columns(plgpu.load(beta_s, layout=COLUMN, optimized=False))
        x = x.astype(BF16)
        plgpu.barrier_wait(full.at[3])
        mask(v_s, 0.0)
        plgpu.commit_smem()

        def store_attend() -> tuple[()]:
            attend_s[...] = attend
            return ()

        w_and_u = products(
            *([(x, ref.at[half])] for ref in (within_s, v_s) for half in range(2)),
            meanwhile=store_attend,
        )
        plgpu.commit_smem()  # all have read their operands
        plgpu.copy_smem_to_gmem(attend_s, attend_g.at[chunk, head])
        for half in range(2):
            within_s[half] = w_and_u[half].astype(BF16)
            ut_s.at[channels(half)].T[...] = w_and_u[2 + half].astype(BF16)
        plgpu.commit_smem()
        copy_out(within_s, w_g)()
        plgpu.copy_smem_to_gmem(ut_s, ut_g.at[chunk, head])
        plgpu.wait_smem_to_gmem(0)
