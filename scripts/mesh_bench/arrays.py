"""Pseudo-random arrays, made on the devices that hold them.

An element depends only on its array's name and its global index, so every mesh and every layout of
processes gets the same values, and a reference can make them again.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float32, UInt32

_FACTORS = (0x9E3779B1, 0x85EBCA6B, 0xC2B2AE35, 0x27D4EB2F, 0x165667B1)  # odd, one a dim


class Leaf(NamedTuple):
    """One array.

    Attributes:
      make: random uint32 words -> the values.
      spec: which mesh axes its dims are split over.
    """

    shape: tuple[int, ...]
    make: Callable[[Array], Array]
    spec: PartitionSpec = PartitionSpec()


def normal(scale: float, dtype: str) -> Callable[[Array], Array]:
    """Values of mean 0 and this standard deviation; uniform, for speed."""
    return lambda words: (unit(words) * (scale * math.sqrt(12.0))).astype(dtype)


def unit(words: UInt32[Array, "..."]) -> Float32[Array, "..."]:
    """Uniform numbers in [-0.5, 0.5)."""
    return (words >> 8).astype(jnp.float32) * 2.0**-24 - 0.5


def fill(mesh: Mesh, leaves: Mapping[str, Leaf]) -> dict[str, jax.Array]:
    """All arrays on the mesh; each device makes its own part."""

    def local() -> dict[str, Array]:
        return {name: leaf.make(_local_words(name, leaf, mesh)) for name, leaf in leaves.items()}

    specs = {name: leaf.spec for name, leaf in leaves.items()}
    make = jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=specs, check_vma=False)
    return jax.jit(make)()


def whole(leaves: Mapping[str, Leaf]) -> dict[str, Array]:
    """All arrays in full, to be called inside a trace."""
    return {
        name: leaf.make(_words(name, leaf.shape, (0,) * len(leaf.shape)))
        for name, leaf in leaves.items()
    }


def _local_words(name: str, leaf: Leaf, mesh: Mesh) -> UInt32[Array, "..."]:
    shape, starts = [], []
    for dim, size in enumerate(leaf.shape):
        axes = leaf.spec[dim] if dim < len(leaf.spec) else None
        names = (axes,) if isinstance(axes, str) else axes or ()
        local = size // math.prod(mesh.shape[axis] for axis in names)
        shape.append(local)
        starts.append(lax.axis_index(names).astype(jnp.uint32) * jnp.uint32(local) if names else 0)
    return _words(name, tuple(shape), tuple(starts))


def _words(
    name: str, shape: tuple[int, ...], starts: tuple[Array | int, ...]
) -> UInt32[Array, "..."]:
    """Hash of the name and the index, which counts from `starts` in each dim."""
    words = jnp.full(shape, zlib.crc32(name.encode()), jnp.uint32)
    for dim, (start, factor) in enumerate(zip(starts, _FACTORS, strict=False)):
        index = lax.broadcasted_iota(jnp.uint32, shape, dim) + jnp.uint32(start)
        words += index * jnp.uint32(factor)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        words = (words ^ (words >> shift)) * jnp.uint32(factor)
    return words ^ (words >> 16)
