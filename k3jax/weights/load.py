"""Loading of a checkpoint onto a mesh: streamed, sharded, in place.

Each leaf is allocated once on the devices. Reader threads fill pieces and hand every device its own part; the main
thread writes them into the leaves by a donated update, in the order of the plan. Host memory is bounded by the
pieces in flight, not by the model (k3-model.md section 3.4, trap 7).
"""

from __future__ import annotations

import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.config import Dtype, ModelConfig
from k3jax.weights import fill, names, plan
from k3jax.weights.plan import Leaf, Piece, Shardings
from k3jax.weights.progress import OnProgress, Progress, ignore
from k3jax.weights.safetensors_file import TensorFiles
from k3jax.weights.stream import read_ahead

# module name -> parameter name -> array
Params = dict[str, dict[str, jax.Array]]

READER_THREADS = 4


def load(
    model_dir: Path,
    cfg: ModelConfig,
    shardings: Shardings,
    *,
    dtype: Dtype = "bfloat16",
    progress: OnProgress = ignore,
    max_flight_bytes: int | None = None,
    threads: int = READER_THREADS,
) -> Params:
    """Load the weights of a released checkpoint.

    Args:
      model_dir: folder with safetensors files.
      cfg: from `names.read_config`, so that its expert format is the checkpoint's.
      shardings: one for each leaf of `describe(cfg)`.
      dtype: of the leaves described as `compute`.
      progress: called after each piece.
      max_flight_bytes: host memory for pieces in flight; by default at most twice the largest tensor.

    Returns:
      The tree of `describe(cfg)`, each leaf with its sharding. MXFP4 experts stay packed.

    Raises:
      WeightError: the checkpoint is incomplete, damaged or not of this model. All that headers can show is found
        before the first weight is read.
      ConfigError: a sharding does not fit.
    """
    leaves = plan.plan_leaves(cfg, shardings, dtype)
    budget = plan.flight_bytes(leaves) if max_flight_bytes is None else max_flight_bytes
    pieces = plan.cut(leaves, max_flight_bytes=budget)
    bound = names.bind(names.open_checkpoint(model_dir), cfg, dtype)
    params: Params = {leaf.module: {} for leaf in leaves}
    total, done, begin = sum(piece.num_bytes for piece in pieces), 0, time.monotonic()
    with TensorFiles() as files:
        fill.check_padding(bound, cfg, files)

        def produce(piece: Piece) -> jax.Array:
            return to_devices(piece, fill.fill(piece, bound, files))

        stream = read_ahead(
            pieces, produce, cost=lambda p: 2 * p.num_bytes, max_cost=budget, threads=threads
        )
        for piece, block in stream:
            write(params, piece, block)
            del block
            done += piece.num_bytes
            progress(
                Progress(
                    done_bytes=done,
                    total_bytes=total,
                    reused_bytes=0,
                    elapsed_s=time.monotonic() - begin,
                )
            )
    return params


def to_devices(piece: Piece, blocks: tuple[np.ndarray, ...]) -> jax.Array:
    """Give each device its copy of a piece.

    Args:
      blocks: one for each distinct local shard.

    Returns:
      One array whose shard on a device is that device's block.
    """
    leaf = piece.leaf
    by_start = dict(zip(leaf.shard_starts, blocks, strict=True))
    sharding = leaf.sharding
    index_map = sharding.addressable_devices_indices_map(leaf.spec.shape)
    shards = [
        jax.device_put(by_start[tuple(part.start or 0 for part in index)], device)
        for device, index in index_map.items()
        if index is not None
    ]
    shape = tuple(
        size * (whole // local)
        for size, whole, local in zip(piece.shape, leaf.spec.shape, leaf.local_shape, strict=True)
    )
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def write(params: Params, piece: Piece, block: jax.Array) -> None:
    """Put a piece into its leaf, and wait until its host memory is free."""
    leaf = piece.leaf
    module = params[leaf.module]
    if piece.is_whole_leaf:
        module[leaf.name] = jax.block_until_ready(block)
        return
    if leaf.name not in module:
        module[leaf.name] = _allocate(leaf)
    start = np.asarray(piece.start, np.int32)  # every process of a mesh may pass a host array
    module[leaf.name] = jax.block_until_ready(
        _write_block(module.pop(leaf.name), block, start, sharding=leaf.sharding)
    )


def _allocate(leaf: Leaf) -> jax.Array:
    zeros = jax.jit(
        lambda: jnp.zeros(leaf.spec.shape, leaf.dtype), out_shardings=leaf.sharding
    )
    return zeros()


@functools.partial(jax.jit, donate_argnums=0, static_argnames="sharding")
def _write_block(
    leaf: jax.Array, block: jax.Array, start: jax.Array, *, sharding: NamedSharding
) -> jax.Array:
    """Write `block` into every shard of `leaf` at the same local position."""

    @functools.partial(
        jax.shard_map,
        mesh=sharding.mesh,
        in_specs=(sharding.spec, sharding.spec, PartitionSpec()),
        out_specs=sharding.spec,
        check_vma=False,
    )
    def local_write(leaf: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_slice(leaf, block, tuple(start))

    return local_write(leaf, block, start)
