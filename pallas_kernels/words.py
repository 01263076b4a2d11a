"""Numbers as 16-bit words, the only element type of the page pool.

bfloat16 takes one word a number, its bit pattern. float32 takes two planes over the last axis:
first the high 16 bits of all n numbers, then the low 16 bits of all n. Both directions move bits
only, so NaN payloads survive.
"""

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, UInt16

from pallas_kernels.checks import wrong
from pallas_kernels.numerics import round_to


def words_per_number(dtype: DTypeLike) -> int:
    """Return how many 16-bit words a number of `dtype` takes: 1 for bfloat16, 2 for float32.

    Raises:
      TypeError: another dtype.
    """
    if jnp.dtype(dtype) == jnp.bfloat16:
        return 1
    if jnp.dtype(dtype) == jnp.float32:
        return 2
    raise TypeError(
        wrong("words", "dtype", jnp.dtype(dtype), "bfloat16 or float32", "convert first")
    )


def to_words(x: Float[Array, "*lead n"], dtype: DTypeLike) -> UInt16[Array, "*lead words"]:
    """Store `x` as words of `dtype`, rounding first if `x` is wider.

    Returns:
      uint16[..., n] for bfloat16, uint16[..., 2n] for float32.
    """
    x = round_to(x, dtype)
    if words_per_number(dtype) == 1:
        return lax.bitcast_convert_type(x, jnp.uint16)
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    high, low = bits >> jnp.uint32(16), bits & jnp.uint32(0xFFFF)
    return jnp.concatenate([high, low], axis=-1).astype(jnp.uint16)


def from_words(words: UInt16[Array, "*lead words"], dtype: DTypeLike) -> Float[Array, "*lead n"]:
    """Read numbers of `dtype` back; the inverse of `to_words`.

    Raises:
      ValueError: an odd number of words for float32.
    """
    if words_per_number(dtype) == 1:
        return lax.bitcast_convert_type(words, jnp.bfloat16)
    if words.shape[-1] % 2:
        raise ValueError(
            wrong("from_words", "last axis", words.shape[-1], "an even number", "pass both planes")
        )
    high, low = jnp.split(words.astype(jnp.uint32), 2, axis=-1)
    return lax.bitcast_convert_type((high << jnp.uint32(16)) | low, jnp.float32)
