"""MXFP4 weights: 4-bit E2M1 codes, 32 of which share one power-of-two scale.

A byte holds two codes, the low nibble first. A code is sign, two exponent bits, one mantissa bit:
0, 0.5, 1, 1.5, 2, 3, 4, 6. A scale byte s means 2**(s - 127); 255 is NaN.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int32, UInt8

from pallas_kernels.checks import wrong

GROUP = 32  # numbers that share a scale
_INF, _NAN = 0x7F800000, 0x7FC00000


class PackedWeight(NamedTuple):
    """A matrix stack whose last axis of n numbers is packed.

    | field | shape |
    |---|---|
    | `codes` | uint8 [..., n / 2] |
    | `scales` | uint8 [..., n / 32] |
    """

    codes: UInt8[Array, "*lead n_half"]
    scales: UInt8[Array, "*lead n_groups"]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the matrix stack that the codes stand for."""
        return (*self.codes.shape[:-1], 2 * self.codes.shape[-1])


def dequantize(
    codes: UInt8[Array, "*lead n_half"], scales: UInt8[Array, "*lead n_groups"], dtype: DTypeLike
) -> Float[Array, "*lead n"]:
    """Return the numbers in `dtype`; every product is exact in bfloat16 and float32.

    Raises:
      ValueError: there is not one scale for every 32 numbers.
    """
    if codes.shape[:-1] != scales.shape[:-1] or codes.shape[-1] * 2 != scales.shape[-1] * GROUP:
        expected = f"one for every {GROUP} numbers of codes {codes.shape}, two numbers a byte"
        raise ValueError(
            wrong("dequantize", "shape of scales", scales.shape, expected, "check the packing")
        )
    nibbles = jnp.stack([codes & jnp.uint8(15), codes >> jnp.uint8(4)], axis=-1)
    grouped = nibbles.reshape(*scales.shape, GROUP)
    bits = _float32_bits(grouped.astype(jnp.int32), scales.astype(jnp.int32)[..., None])
    numbers = lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)
    return numbers.reshape(*codes.shape[:-1], -1)


def _float32_bits(code: Int32[Array, "*groups 32"], scale: Int32[Array, "*groups 1"]) -> Array:
    """Build code * 2**(scale - 127) from integers: a float multiply may flush subnormals."""
    magnitude = code & 7
    exponent = (
        scale + (magnitude >> 1) - 1
    )  # biased; magnitude 1 is 0.5, the one without a leading 1
    mantissa = jnp.where(magnitude == 1, 0, magnitude & 1) << 22
    subnormal = ((1 << 23) | mantissa) >> jnp.clip(1 - exponent, 0, 2)
    bits = jnp.where(exponent > 0, (exponent << 23) | mantissa, subnormal)
    bits = jnp.where(exponent >= 255, _INF, bits)
    bits = jnp.where(magnitude == 0, 0, bits)
    bits = jnp.where(scale == 255, _NAN, bits)
    return bits | ((code >> 3) << 31)
