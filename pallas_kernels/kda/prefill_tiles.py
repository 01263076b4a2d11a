"""Shared memory and registers of the kernels of `kda_prefill`."""

from typing import Any

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

CHUNK, DIM = 64, 128
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
TILE = plgpu.Layout.WGMMA
ROW, COLUMN = TILE.reduce(1), TILE.reduce(0)


def tiles(*shape: int, dtype: Any = BF16) -> Any:
    """Operands of `wgmma`: multiples of 8 rows of 64 numbers of 16 bits."""
    transforms = (
        plgpu.TilingTransform((8, 64)),  # pyright: ignore[reportAbstractUsage]
        plgpu.SwizzleTransform(128),  # pyright: ignore[reportAbstractUsage]
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def landing(*shape: int) -> Any:
    """`tiles` of bfloat16 with rows of 64 numbers, without the tiling, which moves no byte of them.

    Copies between `tiles` and global memory must start at a multiple of 8 rows there; these need
    not.
    """
    transforms = (plgpu.SwizzleTransform(128),)  # pyright: ignore[reportAbstractUsage]
    return plgpu.SMEM(shape, BF16, transforms=transforms)


def union(*refs: Any, compiled: bool) -> Any:
    """Refs that share their memory. The interpreter keeps them apart."""
    return plgpu.RefUnion(*refs) if compiled else refs


def accumulator(*shape: int) -> Any:
    """Registers that `wgmma` adds to, zero at first."""
    return plgpu.ACC(shape, F32)  # pyright: ignore[reportPrivateImportUsage]
