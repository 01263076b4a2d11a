"""MXFP4 on the host: packing of random experts, and an unpacking to check against (k3-model.md
section 3.2).

A byte holds two E2M1 codes, the even input column in the low nibble. A scale byte `s` means `2^(s -
127)` and covers 32 consecutive input columns.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float32, UInt8

from k3jax.params import MXFP4_GROUP

MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)

_BIAS = 127
_MAX_EXPONENT = 2  # of E2M1: 6 = 1.5 * 2^2


def quantize(
    values: Float32[np.ndarray, "*rows K"],
) -> tuple[UInt8[np.ndarray, "*rows K//2"], UInt8[np.ndarray, "*rows K//32"]]:
    """Round to the nearest code, ties to even, with the group exponent `floor(log2(max |value|)) -
    2`.

    Args:
      values: finite; `K` is a multiple of 32.

    Returns:
      Packed codes `[..., K / 2]` and scales `[..., K / 32]`.
    """
    groups = values.reshape(*values.shape[:-1], -1, MXFP4_GROUP)
    # frexp: |value| = fraction * 2^exponent with a fraction in [0.5, 1).
    _, exponent = np.frexp(np.abs(groups).max(axis=-1))
    scales = np.clip(exponent - 1 - _MAX_EXPONENT + _BIAS, 0, 254).astype(np.uint8)
    scaled = np.ldexp(groups, _BIAS - scales.astype(np.int32)[..., None])
    codes = _nearest_code(np.abs(scaled))
    codes |= ((scaled < 0) & (codes != 0)).astype(np.uint8) << 3  # zero has no sign
    codes = codes.reshape(values.shape)
    return codes[..., 0::2] | (codes[..., 1::2] << 4), scales


def dequantize(
    packed: UInt8[np.ndarray, "*rows bytes"], scales: UInt8[np.ndarray, "*rows G"]
) -> Float32[np.ndarray, "*rows 32*G"]:
    """Unpack to float32, exactly.

    Args:
      packed: two codes a byte, `K / 2` bytes a row.
      scales: one byte for 32 values, `G = K / 32` a row.

    Returns:
      `code value * 2^(scale - 127)`, shape `[..., K]`.
    """
    codes = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = np.where(codes & 8, np.float32(-1), np.float32(1)) * MAGNITUDES[codes & 7]
    exponents = np.repeat(scales.astype(np.int32) - _BIAS, MXFP4_GROUP, axis=-1)
    return np.ldexp(values, exponents)


def _nearest_code(magnitudes: Float32[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    middles = (MAGNITUDES[1:] + MAGNITUDES[:-1]) / 2
    low = np.searchsorted(middles, magnitudes, side="left")  # a tie stays at the lower code
    high = np.searchsorted(middles, magnitudes, side="right")
    return np.where(low % 2 == 0, low, high).astype(np.uint8)
