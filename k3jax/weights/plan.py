"""Cutting of the parameter tree into pieces, the unit of reading, writing and resuming.

A piece is a box in the coordinates of a leaf's local shard. Shards of one leaf are equally large,
so the same box exists on every device: one piece fills that box on all of them, each from its own
part of the checkpoint. A small leaf is one piece; a large one is cut along its stack, then its
experts, then the rows of a tensor.

The plan depends on the configuration and the shardings only: a later process finds the same pieces.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping

import jax
import ml_dtypes
import numpy as np
from jax.sharding import Mesh, NamedSharding

from k3jax.config import ConfigError, Dtype
from k3jax.param_spec import ParamSpec
from k3jax.params import AnyConfig, describe
from k3jax.weights.names import num_leading_dims
from sharding.axes import ParallelConfig
from sharding.specs import named_sharding

# module name -> parameter name -> array
Params = dict[str, dict[str, jax.Array]]
# Congruent with `describe(cfg)`.
Shardings = Mapping[str, Mapping[str, NamedSharding]]

_NUMPY: Mapping[str, np.dtype] = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float32": np.dtype(np.float32),
    "uint8": np.dtype(np.uint8),
}
_MIN_FLIGHT_BYTES = 64 << 20
_MAX_FLIGHT_BYTES = 512 << 20
# A piece may need its stored and its converted form at once, and four readers work in parallel.
_PIECES_IN_FLIGHT = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaf:
    """A leaf of the tree, and how it lies on the devices of this process.

    Attributes:
      local_shape: of the shard on one device.
      shard_starts: where each distinct local shard begins in the leaf; replicas count once.
    """

    module: str
    name: str
    spec: ParamSpec
    dtype: np.dtype
    sharding: NamedSharding
    local_shape: tuple[int, ...]
    shard_starts: tuple[tuple[int, ...], ...]

    @property
    def label(self) -> str:
        return f"{self.module}.{self.name}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A box of a leaf's local shard.

    Attributes:
      index: in the plan.
      start, shape: the box.
      num_bytes: of its distinct copies in this process, converted.
      offset: of those copies in a file that holds all pieces one after the other.
    """

    index: int
    leaf: Leaf
    start: tuple[int, ...]
    shape: tuple[int, ...]
    num_bytes: int
    offset: int

    @property
    def is_whole_leaf(self) -> bool:
        return self.shape == self.leaf.local_shape


def numpy_dtype(spec: ParamSpec, dtype: Dtype) -> np.dtype:
    """The dtype of a leaf when computing in `dtype`."""
    return _NUMPY[dtype if spec.dtype == "compute" else spec.dtype]


def param_shardings(cfg: AnyConfig, parallel: ParallelConfig, mesh: Mesh) -> Shardings:
    """The sharding of every leaf on a mesh."""
    return {
        module: {name: named_sharding(spec.axes, parallel, mesh) for name, spec in params.items()}
        for module, params in describe(cfg).items()
    }


def plan_leaves(cfg: AnyConfig, shardings: Shardings, dtype: Dtype) -> tuple[Leaf, ...]:
    """Describe where every leaf lies.

    Raises:
      ConfigError: a leaf has no sharding, or one that does not divide it or splits a wrong axis.
    """
    leaves: list[Leaf] = []
    problems: list[str] = []
    for module, params in describe(cfg).items():
        for name, spec in params.items():
            try:
                sharding = shardings[module][name]
                leaf = _plan_leaf(module, name, spec, numpy_dtype(spec, dtype), sharding)
            except (KeyError, ValueError) as error:
                problems.append(
                    f"leaf {module}.{name} of shape {spec.shape} cannot be placed: {error}"
                )
            else:
                leaves.append(leaf)
    if problems:
        raise ConfigError(problems)
    return tuple(leaves)


def flight_bytes(leaves: tuple[Leaf, ...]) -> int:
    """Host memory for pieces in flight: at most twice the largest tensor, and not below 64 MiB."""
    largest = max(
        math.prod(leaf.spec.shape[num_leading_dims(leaf.spec) :]) * leaf.dtype.itemsize
        for leaf in leaves
    )
    return min(_MAX_FLIGHT_BYTES, max(_MIN_FLIGHT_BYTES, 2 * largest))


def cut(leaves: tuple[Leaf, ...], *, max_flight_bytes: int) -> tuple[Piece, ...]:
    """Cut all leaves, in the order of the tree, into pieces of an eighth of `max_flight_bytes`.

    A piece may be larger only if a single row of its tensor is.
    """
    pieces: list[Piece] = []
    offset = 0
    for leaf in leaves:
        copies = len(leaf.shard_starts) * leaf.dtype.itemsize
        limit = max(1, max_flight_bytes // _PIECES_IN_FLIGHT // copies)
        for start, shape in _boxes(leaf.local_shape, limit):
            num_bytes = math.prod(shape) * copies
            pieces.append(
                Piece(
                    index=len(pieces),
                    leaf=leaf,
                    start=start,
                    shape=shape,
                    num_bytes=num_bytes,
                    offset=offset,
                )
            )
            offset += num_bytes
    return tuple(pieces)


def _plan_leaf(
    module: str, name: str, spec: ParamSpec, dtype: np.dtype, sharding: NamedSharding
) -> Leaf:
    local_shape = sharding.shard_shape(spec.shape)
    split = [axis for axis, size in enumerate(spec.shape) if local_shape[axis] != size]
    unnamed = [axis for axis in split if spec.axes[axis] is None]
    if unnamed:
        raise ValueError(f"got {sharding.spec}; expected splits of {spec.axes} only")
    starts = {
        tuple(part.start or 0 for part in index): None
        for index in sharding.addressable_devices_indices_map(spec.shape).values()
        if index is not None
    }
    return Leaf(
        module=module,
        name=name,
        spec=spec,
        dtype=dtype,
        sharding=sharding,
        local_shape=local_shape,
        shard_starts=tuple(starts),
    )


def _boxes(shape: tuple[int, ...], limit: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Cut a shape into boxes (start, shape) of at most `limit` elements, in C order.

    The last axis is cut only if it is the only one.
    """
    size, *rest = shape
    inner = math.prod(rest)
    if inner > limit and len(rest) > 1:
        for at in range(size):
            for start, box in _boxes(tuple(rest), limit):
                yield (at, *start), (1, *box)
        return
    step = max(1, limit // inner)
    for at in range(0, size, step):
        yield (at, *(0 for _ in rest)), (min(step, size - at), *rest)
