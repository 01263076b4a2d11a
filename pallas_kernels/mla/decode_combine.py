"""Second kernel of `mla_decode` for Hopper: the parts of a row become one.

One block a (row, head, 128 numbers of the value). It copies the parts into shared memory at once
and adds them in their order.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

from pallas_kernels import pdl as launch_order

COLUMNS = 128  # of a block
BATCH = 16  # splits of a copy
THREAD = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=1)
F32 = jnp.float32


@functools.partial(jax.jit, static_argnames=("heads", "groups", "pdl", "interpret"))
def combine(
    num_splits_S: Int32[Array, " S"],
    z_SXNxL: Float32[Array, "S X Nx L"],
    stats_S2YNx: Float32[Array, "S 2 128 Nx"],
    *,
    heads: int,
    groups: int,
    pdl: bool = False,
    interpret: Any = None,
) -> BFloat16[Array, "S N L"]:
    """Return sum z * 2^peak / sum total * 2^peak over the splits of each row, zero without any.

    Args:
      num_splits_S: splits of each row.
      z_SXNxL, stats_S2YNx: as `decode_attend.attend` returns them; X is a multiple of 16.
      heads, groups: as there.
      pdl: `KernelSettings.pdl`.
      interpret: parameters of the interpreter; None compiles.
    """
    num_rows, splits, width, latent = z_SXNxL.shape
    kernel = plgpu.kernel(
        functools.partial(_block, padding=width // groups - heads // groups, group=heads // groups,
                          pdl=pdl),
        out_type=jax.ShapeDtypeStruct((num_rows, heads, latent), jnp.bfloat16),
        grid=(num_rows, heads, latent // COLUMNS),
        grid_names=("row", "head", "part"),
        scratch_types={
            "z_s": plgpu.SMEM((splits, COLUMNS), F32),
            "weight_s": plgpu.SMEM((stats_S2YNx.shape[2],), F32),
            "full": plgpu.Barrier(num_barriers=splits // BATCH),
        },
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )  # fmt: skip
    return kernel(num_splits_S, z_SXNxL, stats_S2YNx)


def _block(
    num_splits_g, z_g, stats_g, out_g, *, z_s, weight_s, full, padding: int, group: int, pdl: bool
) -> None:  # fmt: skip
    row, head, part = (lax.axis_index(name) for name in ("row", "head", "part"))
    launch_order.wait(pdl)
    launch_order.launch_dependents(pdl)
    num_splits = num_splits_g[row]
    columns = pl.ds(part * COLUMNS, COLUMNS)
    column = head + head // group * padding
    num_batches = (num_splits + BATCH - 1) // BATCH

    @pl.loop(0, num_batches)
    def _(batch: Array) -> None:
        some = pl.ds(pl.multiple_of(batch * BATCH, BATCH), BATCH)
        plgpu.copy_gmem_to_smem(z_g.at[row, some, column, columns], z_s.at[some], full.at[batch])

    peak, total = (plgpu.load(stats_g.at[row, i, :, column], layout=THREAD) for i in range(2))
    split = plgpu.broadcasted_iota(jnp.int32, peak.shape, 0, layout=THREAD)
    peak = jnp.where(split < num_splits, peak, -jnp.inf)
    weight = jnp.where(split < num_splits, jnp.exp2(peak - jnp.max(peak)), 0.0)
    total = jnp.sum(jnp.where(split < num_splits, total, 0.0) * weight)
    weight_s[...] = weight

    def add(batch: Array, z: Array) -> Array:
        plgpu.barrier_wait(full.at[batch])
        for i in range(BATCH):
            split = batch * BATCH + i  # behind the last one, that one with weight 0
            value = plgpu.load(z_s.at[jnp.minimum(split, num_splits - 1)], layout=THREAD)
            z += weight_s[split] * value
        return z

    z = lax.fori_loop(0, num_batches, add, plgpu.layout_cast(jnp.zeros((COLUMNS,), F32), THREAD))
    z /= jnp.where(num_splits > 0, total, 1.0)
    out_g[row, head, columns] = z.astype(out_g.dtype)
