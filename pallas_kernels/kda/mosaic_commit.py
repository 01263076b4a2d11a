"""`kda_commit_paged` as one kernel for Hopper: fold accepted tokens into a row's state.

One block of 128 threads a row and head reads the state once and writes it once, as `mosaic_decode`
does, and applies to it in registers what `mosaic_verify` recorded of each token.
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
from pallas_kernels.kda.mosaic_parts import DIM, HALF, WINDOW
from pallas_kernels.kda.records import KdaRecords


def kda_commit_paged(
    records: KdaRecords,
    qkv_SX3ND: Float[Array, "S X 3 N D"],
    f_SXND: Float[Array, "S X N D"],
    A_log_N: Float32[Array, " N"],
    dt_bias_ND: Float32[Array, "N D"],
    pool_ZPWE: UInt16[Array, "Z P W E"],
    source_S: Int32[Array, " S"],
    target_S: Int32[Array, " S"],
    accepted_S: Int32[Array, " S"],
    *,
    position: int,
    lower_bound: float | None,
    taps: int,
) -> UInt16[Array, "Z P W E"]:
    """See `verify.kda_commit_paged`.

    Raises:
      NotImplementedError: no Hopper GPU, or arguments outside those of the released model.
    """
    require_hopper()
    parts.check_supported(qkv_SX3ND, taps, pool_ZPWE, lower_bound)
    return launch(
        records, qkv_SX3ND, f_SXND, A_log_N, dt_bias_ND, pool_ZPWE, source_S, target_S, accepted_S,
        jnp.full((1,), position, jnp.int32), lower_bound=lower_bound, pdl=settings.current().pdl,
    )  # fmt: skip


@functools.partial(jax.jit, static_argnames=("lower_bound", "pdl", "interpret"))
def launch(
    records: KdaRecords,
    qkv_SX3ND: Array,
    f_SXND: Array,
    A_log_N: Array,
    dt_bias_ND: Array,
    pool_ZPWE: Array,
    source_S: Array,
    target_S: Array,
    accepted_S: Array,
    position_1: Array,
    *,
    lower_bound: float,
    pdl: bool = False,
    interpret: plgpu.InterpretGPUParams | None = None,
) -> Array:
    """Run the kernel, or interpret it on a CPU; arguments as in `mosaic_decode.launch`."""
    num_rows, num_slots, _, heads, _ = qkv_SX3ND.shape
    kernel = plgpu.kernel(
        functools.partial(_block, heads=heads, lower_bound=lower_bound, pdl=pdl),
        out_type=(),
        grid=(num_rows, heads),
        grid_names=("row", "head"),
        scratch_types={
            "state_s": parts.state_scratch(),
            "window_s": plgpu.SMEM((WINDOW + 3 * num_slots, DIM), jnp.uint16),
            "column_s": plgpu.SMEM((num_slots, 2, DIM), jnp.float32),
            "u_s": plgpu.SMEM((num_slots, DIM), jnp.float32),
            "window_full": plgpu.Barrier(num_arrivals=WINDOW),
            "u_full": plgpu.Barrier(),
            "half_full": plgpu.Barrier(num_arrivals=2, num_barriers=2),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )
    pool = parts.pool_ref(pool_ZPWE)
    kernel(
        records.u_SXND, records.k_SXND, qkv_SX3ND, f_SXND, A_log_N, dt_bias_ND,
        position_1, source_S, target_S, accepted_S, pool,
    )  # fmt: skip
    return jax.freeze(pool).reshape(pool_ZPWE.shape)


def _block(
    u_g, k_g, qkv_g, f_g, A_log_g, dt_bias_g, position_g, source_g, target_g, accepted_g, pool_g,
    *, state_s, window_s, column_s, u_s, window_full, u_full, half_full,
    heads: int, lower_bound: float, pdl: bool,
) -> None:  # fmt: skip
    row, head = lax.axis_index("row"), lax.axis_index("head")
    num_slots = qkv_g.shape[1]
    load = parts.load_channels

    dt_bias, rate = load(dt_bias_g.at[head]), jnp.exp(A_log_g[head])
    launch_order.wait(pdl)
    launch_order.launch_dependents(pdl)
    position, source, target = position_g[0], source_g[row], target_g[row]

    @pl.when(target != 0)
    def _() -> None:
        accepted = accepted_g[row]
        old_g, new_g = pool_g.at[position, source], pool_g.at[position, target]
        parts.copy_page_in(old_g, window_s, state_s, window_full, half_full, heads)
        plgpu.copy_gmem_to_smem(u_g.at[row, :, head], u_s, u_full)
        for x in range(num_slots):
            for part in range(3):
                words = lax.bitcast_convert_type(load(qkv_g.at[row, x, part, head]), jnp.uint16)
                window_s[WINDOW + 3 * x + part] = words
            column_s[x, 0] = parts.normalise(load(k_g.at[row, x, head]))
            column_s[x, 1] = parts.decay(load(f_g.at[row, x, head]), dt_bias, rate, lower_bound)
        plgpu.barrier_wait(window_full)

        @pl.when(source == 0)
        def _() -> None:
            parts.zero_window(window_s)

        plgpu.commit_smem()
        parts.copy_window_out(window_s, 3 * accepted, new_g, heads)
        plgpu.barrier_wait(u_full)
        for half in range(2):
            rows = pl.ds(half * HALF, HALF)

            def token(x: Array, state: Array, rows: pl.Slice = rows) -> Array:
                k, decay = parts.column(column_s.at[x, 0]), parts.column(column_s.at[x, 1])
                return parts.fold(parts.shrink(state, decay), parts.row(u_s.at[x, rows]), k)

            plgpu.barrier_wait(half_full.at[half])
            state = parts.read_half(state_s.at[half], source)
            parts.write_half(state_s.at[half], lax.fori_loop(0, accepted, token, state))
            plgpu.commit_smem()
            parts.copy_half_out(state_s, half, new_g, heads)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
