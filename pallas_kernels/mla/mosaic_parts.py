"""What the kernels for Hopper of `mla_decode` and `mla_prefill` share."""

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.typing import DTypeLike
from jaxtyping import Array

TILE = 64  # slots
ENTRY, LATENT = 576, 512  # numbers of an entry, and of its value part
CHUNK = 64  # numbers of a row of swizzled shared memory
HALF = LATENT // 2
RING = 2  # tiles
MAX_INDEX = 2**31 - 1  # what is counted in int32

BF16, F32 = jnp.bfloat16, jnp.float32
WORDS = (jnp.uint16, BF16)  # of the pool, and as numbers
_TILING = plgpu.TilingTransform((8, CHUNK))  # pyright: ignore[reportAbstractUsage]
_SWIZZLE = plgpu.SwizzleTransform(128)  # pyright: ignore[reportAbstractUsage]


def check_supported(
    query: Array, latent: int, dtype: DTypeLike, page_tokens: int, scale: float
) -> None:
    """Refuse what neither kernel takes.

    Args:
      query: its last axis is an absorbed query.

    Raises:
      NotImplementedError: the arguments are not those of the released model in bfloat16.
    """
    if query.dtype != jnp.bfloat16 or jnp.dtype(dtype) != jnp.bfloat16:
        raise NotImplementedError(f"takes bfloat16: got {query.dtype} queries, {dtype} entries")
    if (query.shape[-1], latent) != (ENTRY, LATENT):
        got = f"{query.shape[-1]} numbers, {latent} of them the value"
        raise NotImplementedError(
            f"takes entries of {ENTRY}, {LATENT} of them the value: got {got}"
        )
    if page_tokens % TILE:
        raise NotImplementedError(f"takes pages of a multiple of {TILE} tokens: got {page_tokens}")
    if scale <= 0:
        raise NotImplementedError(f"takes a positive scale: got {scale}")


def tiles(*shape: int, dtype: Any = BF16, tiled: bool = True) -> Any:
    """Shared memory for operands of `wgmma`.

    A copy between tiled memory and global memory has to start at a multiple of 8 rows there. With
    rows of `CHUNK` numbers the bytes lie in the same places without the tiling.
    """
    return plgpu.SMEM(shape, dtype, transforms=(_TILING, _SWIZZLE) if tiled else (_SWIZZLE,))


def add_product(total: Array, left: Any, right: Any, *, compiled: bool) -> Any:
    """Return total + left @ right; the interpreter takes no product that starts at a value."""
    if compiled:
        product = functools.partial(plgpu.wgmma, a=left, b=right)
        return pl.run_state(product)(plgpu.ACC.init(total))  # pyright: ignore[reportPrivateImportUsage]

    def product_alone(sums: Any) -> Array:
        plgpu.wgmma(sums, left, right)
        return sums[...]

    rows, width = total.shape
    return total + pl.run_scoped(product_alone, plgpu.ACC((rows, width), F32))  # pyright: ignore[reportPrivateImportUsage]
