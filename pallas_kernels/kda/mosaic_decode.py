"""`kda_decode_paged` as one kernel for Hopper: one block of 128 threads a row and head.

The bytes are those of the state, read once and written once, so everything else hides behind their
copies. A block asks for its window and its state at once (bulk copies into shared memory, 64 KB),
computes q, k, v and the decay with one channel a thread meanwhile, then takes the state through
registers in two halves of 64 value rows and hands each half to a bulk copy back to the page. Three
blocks fit on a multiprocessor: some load while others compute and store.

Nothing depends on another row, so a row's bits do not depend on the batch. Pages are addressed by
the copies' coordinates, which do not overflow in pools of more than 2^31 words.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, UInt16

from pallas_kernels.hopper import require_hopper

DIM = 128  # of a head, and of a row of the pool as the kernel sees it
TAPS = 4
HALF = 64  # value rows of a register tile

_NEW = (TAPS - 1) * 3  # entries of a window: q, k, v of each tap; the new token's come behind

_TILE = plgpu.Layout.WGMMA
_ROW, _COLUMN = _TILE.reduce(1), _TILE.reduce(0)
_CHANNEL = plgpu.Layout.WG_STRIDED((DIM,), vec_size=1)
_SWIZZLED = (
    plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
    plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
)


def kda_decode_paged(
    qkv_S3ND: Float[Array, "S 3 N D"],
    f_SND: Float[Array, "S N D"],
    b_SN: Float[Array, "S N"],
    gate_SND: Float[Array, "S N D"],
    taps_3NDX: Float32[Array, "3 N D X"],
    A_log_N: Float32[Array, " N"],
    dt_bias_ND: Float32[Array, "N D"],
    o_norm_D: Float32[Array, " D"],
    pool_ZPWE: UInt16[Array, "Z P W E"],
    source_S: Int32[Array, " S"],
    target_S: Int32[Array, " S"],
    *,
    position: int,
    lower_bound: float | None,
    eps: float,
) -> tuple[Float[Array, "S N D"], UInt16[Array, "Z P W E"]]:
    """See `paged.kda_decode_paged`.

    Raises:
      NotImplementedError: no Hopper GPU, or arguments outside those of the released model.
    """
    require_hopper()
    if qkv_S3ND.dtype != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16 activations: got {qkv_S3ND.dtype}")
    if (qkv_S3ND.shape[-1], taps_3NDX.shape[-1]) != (DIM, TAPS):
        got = f"head dim {qkv_S3ND.shape[-1]} and {taps_3NDX.shape[-1]} taps"
        raise NotImplementedError(f"takes head dim {DIM} and {TAPS} taps: got {got}")
    if lower_bound is None:
        raise NotImplementedError("takes bounded gates: got lower_bound None")
    page_words = pool_ZPWE.shape[2] * pool_ZPWE.shape[3]
    if page_words % DIM:
        raise NotImplementedError(f"takes pages of a multiple of {DIM} words: got {page_words}")
    return launch(
        qkv_S3ND, f_SND, b_SN, gate_SND, taps_3NDX, A_log_N, dt_bias_ND, o_norm_D, pool_ZPWE,
        source_S, target_S, jnp.full((1,), position, jnp.int32), lower_bound=lower_bound, eps=eps,
    )  # fmt: skip


# Jitted, and the position an operand, so that a program of many layers lowers and compiles the
# kernel once.
@functools.partial(jax.jit, static_argnames=("lower_bound", "eps", "interpret"))
def launch(
    qkv_S3ND: Array,
    f_SND: Array,
    b_SN: Array,
    gate_SND: Array,
    taps_3NDX: Array,
    A_log_N: Array,
    dt_bias_ND: Array,
    o_norm_D: Array,
    pool_ZPWE: Array,
    source_S: Array,
    target_S: Array,
    position_1: Array,
    *,
    lower_bound: float,
    eps: float,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Array, Array]:
    """Run the kernel, or interpret it on a CPU.

    Arguments as in `kda_decode_paged`, and the position as int32[1].
    """
    num_rows, _, heads, _ = qkv_S3ND.shape
    kernel = plgpu.kernel(
        functools.partial(_block, heads=heads, lower_bound=lower_bound, eps=eps),
        out_type=jax.ShapeDtypeStruct(gate_SND.shape, gate_SND.dtype),
        grid=(num_rows, heads),
        grid_names=("row", "head"),
        scratch_types={
            "state_s": plgpu.SMEM((2, 2, HALF, DIM), jnp.uint16, transforms=_SWIZZLED),
            "window_s": plgpu.SMEM((TAPS * 3, DIM), jnp.uint16),
            "column_s": plgpu.SMEM((3, DIM), jnp.float32),
            "value_s": plgpu.SMEM((DIM,), jnp.float32),
            "output_s": plgpu.SMEM((DIM,), jnp.float32),
            "window_full": plgpu.Barrier(num_arrivals=_NEW),
            "half_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    num_positions, num_pages = pool_ZPWE.shape[:2]
    pool = jax.new_ref(pool_ZPWE.reshape(num_positions, num_pages, -1, DIM))
    y_SND = kernel(
        qkv_S3ND, f_SND, b_SN, gate_SND, taps_3NDX, A_log_N, dt_bias_ND, o_norm_D,
        position_1, source_S, target_S, pool,
    )  # fmt: skip
    return y_SND, jax.freeze(pool).reshape(pool_ZPWE.shape)


def _block(
    qkv_g, f_g, b_g, gate_g, taps_g, A_log_g, dt_bias_g, o_norm_g,
    position_g, source_g, target_g, pool_g, y_g,
    *, state_s, window_s, column_s, value_s, output_s, window_full, half_full,
    heads: int, lower_bound: float, eps: float,
) -> None:  # fmt: skip
    row, head = lax.axis_index("row"), lax.axis_index("head")
    position, source, target = position_g[0], source_g[row], target_g[row]

    def window_row(entry: int) -> pl.Slice:  # in a page; entry: tap * 3 + part of q, k, v
        return pl.ds((2 * DIM + entry) * heads + head, 1)

    def state_rows(half: int, plane: int) -> pl.Slice:
        return pl.ds((plane * heads + head) * DIM + half * HALF, HALF)

    def load(ref) -> Array:
        return plgpu.load(ref, layout=_CHANNEL, optimized=False)

    # All that does not wait for a page number is asked for before the first use.
    new = [load(qkv_g.at[row, part, head]) for part in range(3)]
    weights = [[load(taps_g.at[part, head, :, tap]) for tap in range(TAPS)] for part in range(3)]
    gate_input = load(f_g.at[row, head]).astype(jnp.float32) + load(dt_bias_g.at[head])
    rate, beta = jnp.exp(A_log_g[head]), jax.nn.sigmoid(b_g[row, head].astype(jnp.float32))
    out_scale = load(o_norm_g) * jax.nn.sigmoid(load(gate_g.at[row, head]).astype(jnp.float32))

    @pl.when(target == 0)
    def _():
        y_g[row, head] = plgpu.layout_cast(jnp.zeros((DIM,), y_g.dtype), _CHANNEL)

    @pl.when(target != 0)
    def _():
        for entry in range(_NEW):
            old = pool_g.at[position, source, window_row(entry)]
            plgpu.copy_gmem_to_smem(old, window_s.at[pl.ds(entry, 1)], window_full)
        for half in range(2):
            for plane in range(2):
                old = pool_g.at[position, source, state_rows(half, plane)]
                plgpu.copy_gmem_to_smem(old, state_s.at[half, plane], half_full.at[half])

        column_s[2] = jnp.exp(lower_bound * jax.nn.sigmoid(rate * gate_input))
        for part in range(3):
            window_s[_NEW + part] = lax.bitcast_convert_type(new[part], jnp.uint16)
        plgpu.barrier_wait(window_full)

        @pl.when(source == 0)
        def _():
            for entry in range(_NEW):
                window_s[entry] = plgpu.layout_cast(jnp.zeros((DIM,), jnp.uint16), _CHANNEL)

        plgpu.commit_smem()

        def convolve(part: int) -> Array:
            total = 0.0
            for tap in range(TAPS - 1):
                words = plgpu.load(window_s.at[tap * 3 + part], layout=_CHANNEL)
                old = lax.bitcast_convert_type(words, jnp.bfloat16).astype(jnp.float32)
                total = total + weights[part][tap] * old
            total = total + weights[part][TAPS - 1] * new[part].astype(jnp.float32)
            return (total * jax.nn.sigmoid(total)).astype(jnp.bfloat16).astype(jnp.float32)

        q, k = convolve(0), convolve(1)
        column_s[0] = q * (lax.rsqrt(jnp.sum(q * q) + 1e-6) * DIM**-0.5)
        column_s[1] = k * lax.rsqrt(jnp.sum(k * k) + 1e-6)
        value_s[...] = convolve(2)
        for entry in range(_NEW):
            after = pool_g.at[position, target, window_row(entry)]
            plgpu.copy_smem_to_gmem(window_s.at[pl.ds(entry + 3, 1)], after)

        def columns(i: int) -> Array:
            column = plgpu.load(column_s.at[i], layout=_COLUMN, optimized=False)
            return lax.broadcast_in_dim(column, (HALF, DIM), (1,))

        for half in range(2):
            rows = pl.ds(half * HALF, HALF)
            plgpu.barrier_wait(half_full.at[half])

            @pl.when(source == 0)
            def _(half: int = half):
                for plane in range(2):
                    zeros = jnp.zeros((HALF, DIM), jnp.uint16)
                    state_s[half, plane] = plgpu.layout_cast(zeros, _TILE)

            high, low = (
                plgpu.load(state_s.at[half, plane], layout=_TILE).astype(jnp.uint32)
                for plane in range(2)
            )
            state = lax.bitcast_convert_type((high << 16) | low, jnp.float32)
            state = state * columns(2)
            value = plgpu.load(value_s.at[rows], layout=_ROW, optimized=False)
            u = beta * (value - jnp.sum(state * columns(1), axis=1))
            state = state + lax.broadcast_in_dim(u, (HALF, DIM), (0,)) * columns(1)
            output_s[rows] = jnp.sum(state * columns(0), axis=1)
            bits = lax.bitcast_convert_type(state, jnp.uint32)
            state_s[half, 0] = (bits >> 16).astype(jnp.uint16)
            state_s[half, 1] = bits.astype(jnp.uint16)
            plgpu.commit_smem()
            for plane in range(2):
                after = pool_g.at[position, target, state_rows(half, plane)]
                plgpu.copy_smem_to_gmem(state_s.at[half, plane], after)

        o = plgpu.load(output_s, layout=_CHANNEL).astype(jnp.bfloat16).astype(jnp.float32)
        y = o * lax.rsqrt(jnp.sum(o * o) * (1.0 / DIM) + eps) * out_scale
        y_g[row, head] = y.astype(y_g.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
