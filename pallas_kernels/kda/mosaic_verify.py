"""`kda_verify_paged` as one kernel for Hopper: the block of `mosaic_decode`, several tokens long.

A block prepares q, k, v and the decay of all its tokens with one channel a thread while its state
is on the way, then keeps each half of the state in registers from the first token to the last. The
state is read once and never written; `mosaic_commit` folds the accepted tokens into it.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Float32, Int32, UInt16

from pallas_kernels import pdl as launch_order
from pallas_kernels import settings
from pallas_kernels.hopper import require_hopper
from pallas_kernels.kda import mosaic_parts as parts
from pallas_kernels.kda.mosaic_parts import CHANNEL, DIM, HALF, TAPS, WINDOW
from pallas_kernels.kda.records import KdaRecords


def kda_verify_paged(
    qkv_SX3ND: Float[Array, "S X 3 N D"],
    f_SXND: Float[Array, "S X N D"],
    b_SXN: Float[Array, "S X N"],
    gate_SXND: Float[Array, "S X N D"],
    taps_3NDK: Float32[Array, "3 N D K"],
    A_log_N: Float32[Array, " N"],
    dt_bias_ND: Float32[Array, "N D"],
    o_norm_D: Float32[Array, " D"],
    pool_ZPWE: UInt16[Array, "Z P W E"],
    source_S: Int32[Array, " S"],
    lengths_S: Int32[Array, " S"],
    *,
    position: int,
    lower_bound: float | None,
    eps: float,
) -> tuple[Float[Array, "S X N D"], KdaRecords]:
    """See `verify.kda_verify_paged`.

    Raises:
      NotImplementedError: no Hopper GPU, or arguments outside those of the released model.
    """
    require_hopper()
    parts.check_supported(qkv_SX3ND, taps_3NDK.shape[-1], pool_ZPWE, lower_bound)
    return launch(
        qkv_SX3ND, f_SXND, b_SXN, gate_SXND, taps_3NDK, A_log_N, dt_bias_ND, o_norm_D, pool_ZPWE,
        source_S, lengths_S, jnp.full((1,), position, jnp.int32), lower_bound=lower_bound, eps=eps,
        pdl=settings.current().pdl,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("lower_bound", "eps", "pdl", "interpret"))
def launch(
    qkv_SX3ND: Array,
    f_SXND: Array,
    b_SXN: Array,
    gate_SXND: Array,
    taps_3NDK: Array,
    A_log_N: Array,
    dt_bias_ND: Array,
    o_norm_D: Array,
    pool_ZPWE: Array,
    source_S: Array,
    lengths_S: Array,
    position_1: Array,
    *,
    lower_bound: float,
    eps: float,
    pdl: bool = False,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Array, KdaRecords]:
    """Run the kernel, or interpret it on a CPU; arguments as in `mosaic_decode.launch`."""
    num_rows, num_slots, _, heads, _ = qkv_SX3ND.shape
    vectors = plgpu.SMEM((num_slots, DIM), jnp.float32)
    kernel = plgpu.kernel(
        functools.partial(_block, heads=heads, lower_bound=lower_bound, eps=eps, pdl=pdl),
        out_type=(
            jax.ShapeDtypeStruct(gate_SXND.shape, gate_SXND.dtype),
            jax.ShapeDtypeStruct(gate_SXND.shape, jnp.float32),
            jax.ShapeDtypeStruct(gate_SXND.shape, gate_SXND.dtype),
        ),
        grid=(num_rows, heads),
        grid_names=("row", "head"),
        scratch_types={
            "state_s": parts.state_scratch(),
            "window_s": plgpu.SMEM((WINDOW, DIM), jnp.uint16),
            "column_s": plgpu.SMEM((num_slots, 3, DIM), jnp.float32),
            "value_s": vectors,
            "beta_s": vectors,
            "u_s": vectors,
            "output_s": vectors,
            "window_full": plgpu.Barrier(num_arrivals=WINDOW),
            "half_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    num_positions, num_pages = pool_ZPWE.shape[:2]
    y_SXND, u_SXND, k_SXND = kernel(
        qkv_SX3ND, f_SXND, b_SXN, gate_SXND, taps_3NDK, A_log_N, dt_bias_ND, o_norm_D,
        position_1, source_S, lengths_S, pool_ZPWE.reshape(num_positions, num_pages, -1, DIM),
    )  # fmt: skip
    return y_SXND, KdaRecords(u_SXND=u_SXND, k_SXND=k_SXND)


def _block(
    qkv_g, f_g, b_g, gate_g, taps_g, A_log_g, dt_bias_g, o_norm_g,
    position_g, source_g, lengths_g, pool_g, y_g, u_g, k_g,
    *, state_s, window_s, column_s, value_s, beta_s, u_s, output_s, window_full, half_full,
    heads: int, lower_bound: float, eps: float, pdl: bool,
) -> None:  # fmt: skip
    row, head = lax.axis_index("row"), lax.axis_index("head")
    num_slots = qkv_g.shape[1]
    load = parts.load_channels

    taps = [[load(taps_g.at[part, head, :, tap]) for tap in range(TAPS)] for part in range(3)]
    dt_bias, o_norm, rate = load(dt_bias_g.at[head]), load(o_norm_g), jnp.exp(A_log_g[head])
    launch_order.wait(pdl)
    launch_order.launch_dependents(pdl)
    position, source, length = position_g[0], source_g[row], lengths_g[row]

    def no_output(x: int) -> None:
        y_g[row, x, head] = plgpu.layout_cast(jnp.zeros((DIM,), y_g.dtype), CHANNEL)

    @pl.when(length == 0)
    def _() -> None:
        for x in range(num_slots):
            no_output(x)

    @pl.when(length != 0)
    def _() -> None:
        page_g = pool_g.at[position, source]
        parts.copy_page_in(page_g, window_s, state_s, window_full, half_full, heads)
        new = [
            [load(qkv_g.at[row, x, part, head]).astype(jnp.float32) for x in range(num_slots)]
            for part in range(3)
        ]
        for x in range(num_slots):
            column_s[x, 2] = parts.decay(load(f_g.at[row, x, head]), dt_bias, rate, lower_bound)
            beta = jax.nn.sigmoid(b_g[row, x, head].astype(jnp.float32))
            beta_s[x] = plgpu.layout_cast(lax.broadcast_in_dim(beta, (DIM,), ()), CHANNEL)
        plgpu.barrier_wait(window_full)

        @pl.when(source == 0)
        def _() -> None:
            parts.zero_window(window_s)

        seen = []
        for part in range(3):
            old = [plgpu.load(window_s.at[i * 3 + part], layout=CHANNEL) for i in range(TAPS - 1)]
            seen.append([*map(parts.words_to_f32, old), *new[part]])
        for x in range(num_slots):
            q, k, v = (parts.convolve(taps[part], seen[part][x : x + TAPS]) for part in range(3))
            column_s[x, 0] = parts.normalise(q) * DIM**-0.5
            column_s[x, 1] = parts.normalise(k)
            value_s[x] = v.astype(jnp.float32)
            k_g[row, x, head] = k

        for half in range(2):
            rows = pl.ds(half * HALF, HALF)

            def token(x: Array, state: Array, rows: pl.Slice = rows) -> Array:
                k = parts.column(column_s.at[x, 1])
                state = parts.shrink(state, parts.column(column_s.at[x, 2]))
                error = parts.row(value_s.at[x, rows]) - jnp.sum(state * k, axis=1)
                u = parts.row(beta_s.at[x, rows]) * error
                state = parts.fold(state, u, k)
                u_s[x, rows] = u
                output_s[x, rows] = jnp.sum(state * parts.column(column_s.at[x, 0]), axis=1)
                return state

            plgpu.barrier_wait(half_full.at[half])
            lax.fori_loop(0, length, token, parts.read_half(state_s.at[half], source))

        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(u_s, u_g.at[row, :, head])
        for x in range(num_slots):

            @pl.when(x < length)
            def _(x: int = x) -> None:
                gate = load(gate_g.at[row, x, head]).astype(jnp.float32)
                o = plgpu.load(output_s.at[x], layout=CHANNEL)
                y = parts.gated_norm(o, o_norm * jax.nn.sigmoid(gate), eps)
                y_g[row, x, head] = y.astype(y_g.dtype)

            @pl.when(x >= length)
            def _(x: int = x) -> None:
                no_output(x)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
