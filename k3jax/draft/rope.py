"""Rotary positions of draft models; the target has none."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from k3jax.draft.config import Rope, Yarn
from pallas_kernels.numerics import round_to


def inverse_frequencies(rope: Rope) -> Float32[np.ndarray, " half"]:
    """Radians a position, one for each pair (k3-model.md section 6.5)."""
    half = np.arange(rope.dim // 2)
    frequency = rope.theta ** (-2.0 * half / rope.dim)
    if rope.yarn is not None:
        low = max(math.floor(_turning_pair(rope, rope.yarn, rope.yarn.beta_fast)), 0)
        high = min(math.ceil(_turning_pair(rope, rope.yarn, rope.yarn.beta_slow)), rope.dim - 1)
        ramp = np.clip((half - low) / max(high - low, 1e-3), 0, 1)
        frequency = frequency / rope.yarn.factor * ramp + frequency * (1 - ramp)
    return frequency.astype(np.float32)


def rotate(
    x: Float[Array, "*lead D"], positions: Int32[Array, "*lead"], rope: Rope
) -> Float[Array, "*lead D"]:
    """Rotate the pairs of `x` by their positions, in float32.

    Args:
      positions: one for each vector of `x`.
    """
    frequency = jnp.expand_dims(inverse_frequencies(rope), tuple(range(positions.ndim)))
    angle = positions.astype(jnp.float32)[..., None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x32 = x.astype(jnp.float32)
    if rope.is_interleaved:
        a, b = x32[..., 0::2], x32[..., 1::2]
        turned = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    else:
        a, b = jnp.split(x32, 2, axis=-1)
        turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return round_to(turned, x.dtype)


def _turning_pair(rope: Rope, yarn: Yarn, turns: float) -> float:
    """The pair whose frequency makes so many turns over the original context."""
    return (
        rope.dim
        * math.log(yarn.original_tokens / (2 * math.pi * turns))
        / (2 * math.log(rope.theta))
    )
