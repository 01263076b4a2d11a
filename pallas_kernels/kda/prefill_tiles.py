"""Shared memory and registers of the kernels of `kda_prefill`."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array

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


def movable(*shape: int, compiled: bool) -> list[Any]:
    """`tiles` that are also copied: the form for copies first, then the one for everything else."""
    return [landing(*shape), tiles(*shape)] if compiled else [tiles(*shape)]


def union(*refs: Any, compiled: bool) -> Any:
    """Refs that share their memory. The interpreter keeps them apart."""
    return plgpu.RefUnion(*refs) if compiled else refs


def accumulator(rows: int, columns: int) -> Any:
    """Registers that `wgmma` adds to, zero at first."""
    return plgpu.ACC((rows, columns), F32)  # pyright: ignore[reportPrivateImportUsage]


def multiply(*sums: list[tuple[Any, Any]], park: Any) -> list[Array]:
    """Sums of products, all of them at once.

    Args:
      sums: the pairs that each sum adds up: a [64, K] array, or `tiles`, and `tiles` [K, N].
      park: None, or what the interpreter, which takes no left operands from registers, has instead:
        `tiles` of bfloat16 and of float16.
    """

    def left(a: Any) -> Any:
        if park is None or not isinstance(a, jax.Array):
            return a
        ref = park[0 if a.dtype == BF16 else 1]
        ref[...] = a
        plgpu.commit_smem()
        return ref

    def run(*totals: Any) -> list[Array]:
        for total, pairs in zip(totals, sums, strict=True):
            for a, b in pairs:
                plgpu.wgmma(total, left(a), b)
                if park is not None:
                    plgpu.wgmma_wait(0)
        plgpu.wgmma_wait(0)
        return [total[...] for total in totals]

    shapes = [(CHUNK, pairs[0][1].shape[1]) for pairs in sums]
    return pl.run_scoped(run, *(accumulator(*shape) for shape in shapes))
