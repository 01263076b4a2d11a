"""Loading of a checkpoint onto a mesh: streamed, sharded, in place.

Each leaf is allocated once on the devices. Reader threads fill pieces and hand every device its own
part; the main thread writes them into the leaves by a donated update, in the order of the plan.
Host memory is bounded by the pieces in flight, not by the model (k3-model.md section 3.4, trap 7).
"""

from __future__ import annotations

import contextlib
import functools
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from k3jax.config import Dtype
from k3jax.params import AnyConfig
from k3jax.weights import converted, plan
from k3jax.weights.fill import CheckpointReader
from k3jax.weights.folder import is_converted
from k3jax.weights.journal import PieceCache, Record, cache_key
from k3jax.weights.plan import Leaf, Params, Piece, Shardings
from k3jax.weights.progress import OnProgress, Progress, ignore
from k3jax.weights.stream import read_ahead
from sharding.axes import ParallelConfig

READER_THREADS = 4


def load_params(
    model_dir: Path,
    cfg: AnyConfig,
    parallel: ParallelConfig,
    mesh: Mesh,
    dtype: Dtype,
    *,
    cache_dir: Path | None = None,
    progress: OnProgress = ignore,
) -> Params:
    """Load the weights onto a mesh as `parallel` splits them; see `load`."""
    shardings = plan.param_shardings(cfg, parallel, mesh)
    return load(model_dir, cfg, shardings, dtype=dtype, cache_dir=cache_dir, progress=progress)


def load(
    model_dir: Path,
    cfg: AnyConfig,
    shardings: Shardings,
    *,
    dtype: Dtype = "bfloat16",
    cache_dir: Path | None = None,
    progress: OnProgress = ignore,
    max_flight_bytes: int | None = None,
    threads: int = READER_THREADS,
) -> Params:
    """Load the weights of a released or a converted checkpoint.

    Args:
      model_dir: folder with safetensors files, or one written by `converted.save`.
      cfg: from `folder.read_model_config`, so that its expert format is the checkpoint's, or of a
        draft.
      shardings: one for each leaf of `describe(cfg)`.
      dtype: of the leaves described as `compute`.
      cache_dir: where converted pieces are kept, so that a killed load resumes and a later one
        reads only them. A converted checkpoint needs none.
      progress: called after each piece.
      max_flight_bytes: host memory for pieces in flight; by default at most twice the largest
        tensor.

    Returns:
      The tree of `describe(cfg)`, each leaf with its sharding. MXFP4 experts stay packed.

    Raises:
      WeightError: the checkpoint is incomplete, damaged or not of this model. All that headers can
        show is found before the first weight is read.
      ConfigError: a sharding does not fit.
    """
    leaves = plan.plan_leaves(cfg, shardings, dtype)
    if is_converted(model_dir):
        return converted.restore(model_dir, leaves)
    budget = plan.flight_bytes(leaves) if max_flight_bytes is None else max_flight_bytes
    pieces = plan.cut(leaves, max_flight_bytes=budget)
    params: Params = {leaf.module: {} for leaf in leaves}
    total_bytes = sum(piece.num_bytes for piece in pieces)
    done_bytes, reused_bytes, begin_s = 0, 0, time.monotonic()
    with contextlib.ExitStack() as stack:
        reader = stack.enter_context(CheckpointReader(model_dir, cfg, dtype))
        cache = None
        if cache_dir is not None:
            key = cache_key(model_dir, pieces)
            cache = stack.enter_context(PieceCache(cache_dir / key, key, pieces))
        if cache is None or not cache.is_complete:
            reader.open()
        stream = read_ahead(
            pieces,
            lambda piece: _produce(piece, reader, cache),
            cost=lambda piece: 2 * piece.num_bytes,  # stored and converted
            max_cost=budget,
            threads=threads,
        )
        # Closed before the files are: no thread may be left that uses their descriptors.
        stack.enter_context(contextlib.closing(stream))
        for piece, (block, record) in stream:
            write(params, piece, block)
            del block
            if cache is not None and record is not None:
                cache.commit(record)
            done_bytes += piece.num_bytes
            reused_bytes += piece.num_bytes if cache is not None and record is None else 0
            progress(
                Progress(
                    done_bytes=done_bytes,
                    total_bytes=total_bytes,
                    reused_bytes=reused_bytes,
                    elapsed_s=time.monotonic() - begin_s,
                )
            )
    return params


def _produce(
    piece: Piece, reader: CheckpointReader, cache: PieceCache | None
) -> tuple[jax.Array, Record | None]:
    """The block of a piece on the devices, and a record if it was newly stored in the cache."""
    blocks = None if cache is None else cache.fetch(piece)
    if blocks is not None:
        return to_devices(piece, blocks), None
    blocks = reader.fill(piece)
    record = None if cache is None else cache.store(piece, blocks)
    return to_devices(piece, blocks), record


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
    zeros = jax.jit(lambda: jnp.zeros(leaf.spec.shape, leaf.dtype), out_shardings=leaf.sharding)
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
