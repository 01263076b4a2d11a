"""The triangular inverse inside `prefill_prepare`."""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float32

from pallas_kernels.kda.prefill_tiles import CHUNK, F16, TILE


def unit_lower_inverse(
    lower: Float32[Array, "64 64"], tiles_s: Any, products: Callable[..., list[Array]]
) -> Float32[Array, "64 64"]:
    """Return (I + A)^-1 of a strictly lower triangular A, by one warpgroup.

    Neumann series of the 8 x 8 diagonal blocks, then merges of neighbours to 16, 32 and 64,
    X <- X - X A X restricted to the blocks between them, with float16 operands: in bfloat16, or as
    one series, it fails for nearly parallel keys (KF-K03). What multiplies A takes all of it, and
    the product is masked.

    Args:
      lower: A, in registers.
      tiles_s: three float16 `tiles` that may be overwritten; they are not read after the return,
        but other warps may still read them.
      products: `prefill_tiles.multiply`.
    """
    row = plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 0, layout=TILE)
    column = plgpu.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), 1, layout=TILE)

    def same(bits: int) -> Array:
        return (row >> bits) == (column >> bits)

    a_s = tiles_s.at[0]
    a_s[...] = lower.astype(F16)
    plgpu.commit_smem()
    blocks = jnp.where(same(3), lower, 0.0)
    (power,) = products([(blocks.astype(F16), a_s)])
    power = jnp.where(same(3), power, 0.0).astype(F16)
    tiles_s[1] = power
    plgpu.commit_smem()
    x = jnp.where(row == column, 1.0, 0.0) - blocks
    step, power = products([(x.astype(F16), tiles_s.at[1])], [(power, tiles_s.at[1])])
    x = x + step
    tiles_s[2] = power.astype(F16)
    plgpu.commit_smem()
    (step,) = products([(x.astype(F16), tiles_s.at[2])])
    x = x + step
    for i, bits in enumerate((4, 5, 6)):
        x_s = tiles_s.at[1 + i % 2]
        operand = x.astype(F16)
        x_s[...] = operand
        plgpu.commit_smem()
        (step,) = products([(operand, a_s)])
        step = jnp.where(same(bits), jnp.where(same(bits - 1), 0.0, step), 0.0)
        (step,) = products([(step.astype(F16), x_s)])
        x = x - step
    return x
