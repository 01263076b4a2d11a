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

from pallas_kernels import pdl as launch_order
from pallas_kernels import settings
from pallas_kernels.hopper import require_hopper
from pallas_kernels.kda import mosaic_parts as parts
from pallas_kernels.kda.mosaic_parts import CHANNEL, DIM, HALF, TAPS, WINDOW


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
    parts.check_supported(qkv_S3ND, taps_3NDX.shape[-1], pool_ZPWE, lower_bound)
    return launch(
        qkv_S3ND, f_SND, b_SN, gate_SND, taps_3NDX, A_log_N, dt_bias_ND, o_norm_D, pool_ZPWE,
        source_S, target_S, jnp.full((1,), position, jnp.int32), lower_bound=lower_bound, eps=eps,
        pdl=settings.current().pdl,
    )  # fmt: skip


# Jitted, and the position an operand, so that a program of many layers lowers and compiles the
# kernel once.
@functools.partial(jax.jit, static_argnames=("lower_bound", "eps", "pdl", "interpret"))
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
    pdl: bool = False,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[Array, Array]:
    """Run the kernel, or interpret it on a CPU.

    Arguments as in `kda_decode_paged`, the position as int32[1], and `KernelSettings.pdl`.
    """
    num_rows, _, heads, _ = qkv_S3ND.shape
    kernel = plgpu.kernel(
        functools.partial(_block, heads=heads, lower_bound=lower_bound, eps=eps, pdl=pdl),
        out_type=jax.ShapeDtypeStruct(gate_SND.shape, gate_SND.dtype),
        grid=(num_rows, heads),
        grid_names=("row", "head"),
        scratch_types={
            "state_s": parts.state_scratch(),
            "window_s": plgpu.SMEM((WINDOW + 3, DIM), jnp.uint16),
            "column_s": plgpu.SMEM((3, DIM), jnp.float32),
            "value_s": plgpu.SMEM((DIM,), jnp.float32),
            "output_s": plgpu.SMEM((DIM,), jnp.float32),
            "window_full": plgpu.Barrier(num_arrivals=WINDOW),
            "half_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    pool = parts.pool_ref(pool_ZPWE)
    y_SND = kernel(
        qkv_S3ND, f_SND, b_SN, gate_SND, taps_3NDX, A_log_N, dt_bias_ND, o_norm_D,
        position_1, source_S, target_S, pool,
    )  # fmt: skip
    return y_SND, jax.freeze(pool).reshape(pool_ZPWE.shape)


def _block(
    qkv_g, f_g, b_g, gate_g, taps_g, A_log_g, dt_bias_g, o_norm_g,
    position_g, source_g, target_g, pool_g, y_g,
    *, state_s, window_s, column_s, value_s, output_s, window_full, half_full,
    heads: int, lower_bound: float, eps: float, pdl: bool,
) -> None:  # fmt: skip
    row, head = lax.axis_index("row"), lax.axis_index("head")
    load = parts.load_channels

    # All that does not wait for a page number is asked for before the first use.
    taps = [[load(taps_g.at[part, head, :, tap]) for tap in range(TAPS)] for part in range(3)]
    dt_bias, o_norm, rate = load(dt_bias_g.at[head]), load(o_norm_g), jnp.exp(A_log_g[head])
    launch_order.wait(pdl)
    launch_order.launch_dependents(pdl)
    position, source, target = position_g[0], source_g[row], target_g[row]
    new = [load(qkv_g.at[row, part, head]) for part in range(3)]
    f, gate = load(f_g.at[row, head]), load(gate_g.at[row, head])
    beta = jax.nn.sigmoid(b_g[row, head].astype(jnp.float32))
    out_scale = o_norm * jax.nn.sigmoid(gate.astype(jnp.float32))

    @pl.when(target == 0)
    def _() -> None:
        y_g[row, head] = plgpu.layout_cast(jnp.zeros((DIM,), y_g.dtype), CHANNEL)

    @pl.when(target != 0)
    def _() -> None:
        old_g, new_g = pool_g.at[position, source], pool_g.at[position, target]
        parts.copy_page_in(old_g, window_s, state_s, window_full, half_full, heads)
        column_s[2] = parts.decay(f, dt_bias, rate, lower_bound)
        for part in range(3):
            window_s[WINDOW + part] = lax.bitcast_convert_type(new[part], jnp.uint16)
        plgpu.barrier_wait(window_full)

        @pl.when(source == 0)
        def _() -> None:
            parts.zero_window(window_s)

        plgpu.commit_smem()

        def convolved(part: int) -> Array:
            old = [plgpu.load(window_s.at[i * 3 + part], layout=CHANNEL) for i in range(TAPS - 1)]
            inputs = [*map(parts.words_to_f32, old), new[part].astype(jnp.float32)]
            return parts.convolve(taps[part], inputs)

        column_s[0] = parts.normalise(convolved(0)) * DIM**-0.5
        column_s[1] = parts.normalise(convolved(1))
        value_s[...] = convolved(2).astype(jnp.float32)
        parts.copy_window_out(window_s, 3, new_g, heads)

        for half in range(2):
            rows = pl.ds(half * HALF, HALF)
            plgpu.barrier_wait(half_full.at[half])
            state = parts.read_half(state_s.at[half], source)
            state, k = (
                parts.shrink(state, parts.column(column_s.at[2])),
                parts.column(column_s.at[1]),
            )
            u = beta * (parts.row(value_s.at[rows]) - jnp.sum(state * k, axis=1))
            state = parts.fold(state, u, k)
            output_s[rows] = jnp.sum(state * parts.column(column_s.at[0]), axis=1)
            parts.write_half(state_s.at[half], state)
            plgpu.commit_smem()
            parts.copy_half_out(state_s, half, new_g, heads)

        o = plgpu.load(output_s, layout=CHANNEL)
        y_g[row, head] = parts.gated_norm(o, out_scale, eps).astype(y_g.dtype)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
