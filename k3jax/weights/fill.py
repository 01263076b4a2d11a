"""Filling of one piece from the stored tensors: ranged reads, conversion, checks of the values.

A row range is read once and handed to every local shard that needs part of it. Only the columns
that a shard owns are kept.
"""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from k3jax.config import Dtype, ModelConfig
from k3jax.params import AnyConfig
from k3jax.weights.errors import Problem, raise_if_any, refusal
from k3jax.weights.folder import open_checkpoint
from k3jax.weights.names import Bound, BoundSource, bind, num_leading_dims
from k3jax.weights.plan import Piece
from k3jax.weights.safetensors_file import DTYPES, TensorEntry, TensorFiles

# E8M0 scales are 2^(byte - 127). Released ones lie near 2^-10 and 255 means "not a number": a
# weight above 6 * 2^10 is a damaged or misread file (KF-L03).
MAX_SCALE_BYTE = 127 + 10

# Rows of a local shard to fill, and where its columns begin in the stored tensor.
Target = tuple[np.ndarray, tuple[int, ...]]


class CheckpointReader:
    """A checkpoint that is opened and checked when it is first needed. Used by several threads."""

    def __init__(self, model_dir: Path, cfg: AnyConfig, dtype: Dtype):
        self._model_dir = model_dir
        self._cfg = cfg
        self._dtype: Dtype = dtype
        self._files = TensorFiles()
        self._lock = threading.Lock()
        self._bound: Bound | None = None

    def __enter__(self) -> CheckpointReader:
        return self

    def __exit__(self, *_: object) -> None:
        self._files.close()

    def open(self) -> Bound:
        """Check everything that can be checked before weights are read.

        Raises:
          WeightError: with all problems of the headers, or of the padding.
        """
        with self._lock:
            if self._bound is None:
                bound = bind(open_checkpoint(self._model_dir), self._cfg, self._dtype)
                if isinstance(self._cfg, ModelConfig):
                    check_padding(bound, self._cfg, self._files)
                self._bound = bound
            return self._bound

    def fill(self, piece: Piece) -> tuple[np.ndarray, ...]:
        """Read one piece, see `fill`."""
        return fill(piece, self.open(), self._files)


def fill(piece: Piece, bound: Bound, files: TensorFiles) -> tuple[np.ndarray, ...]:
    """Read one piece.

    Returns:
      A new array for each of `piece.leaf.shard_starts`, of the piece's shape and the leaf's dtype.

    Raises:
      WeightError: a file ends early, or holds values that no real weight has.
    """
    leaf = piece.leaf
    sources = bound[leaf.module][leaf.name]
    lead = num_leading_dims(leaf.spec)
    row_shape = leaf.spec.shape[lead + 1 :]
    blocks = tuple(np.empty(piece.shape, leaf.dtype) for _ in leaf.shard_starts)
    begins = [
        tuple(a + b for a, b in zip(shard, piece.start, strict=True)) for shard in leaf.shard_starts
    ]
    for position in np.ndindex(*piece.shape[:lead]):
        # Shards that need the same rows of the same tensor share one read.
        wanted: dict[tuple[TensorEntry, int], list[Target]] = {}
        for block, begin in zip(blocks, begins, strict=True):
            place = tuple(a + b for a, b in zip(begin[:lead], position, strict=True))
            entry = _entry_at(sources, place, has_layers=bool(leaf.spec.layers))
            target = (block[position], begin[lead + 1 :])
            wanted.setdefault((entry, begin[lead]), []).append(target)
        for (entry, start), targets in wanted.items():
            _read(entry, start, row_shape, targets, files)
    return blocks


def check_padding(bound: Bound, cfg: ModelConfig, files: TensorFiles) -> None:
    """Check that what will be cut off `A_log` is zero (KF-L04).

    Raises:
      WeightError: with every tensor whose tail holds something else.
    """
    problems: list[Problem] = []
    for source in bound.get("kda", {}).get("A_log", ()):
        for entry in source.entries:
            size = max(entry.shape)
            tail = np.empty(max(0, size - cfg.kda_num_heads), DTYPES[entry.dtype])
            files.read_rows(entry, cfg.kda_num_heads, tail)
            if np.any(tail != 0):
                got = f"got {size} values for {cfg.kda_num_heads} heads"
                message = f"tensor {entry.name} in {entry.file} is not zero beyond the heads: {got}"
                problems.append(Problem("padding", message, entry.file, entry.name))
    raise_if_any(problems)


def _entry_at(
    sources: tuple[BoundSource, ...], place: tuple[int, ...], *, has_layers: bool
) -> TensorEntry:
    """The tensor that fills one place of a leaf: layer of the stack, then place inside it."""
    layer_idx, inside = (place[0], place[1:]) if has_layers else (0, place)
    for bound_source in sources:
        index = bound_source.source.index
        if all(want in (None, got) for want, got in zip(index, inside, strict=True)):
            expert = inside[index.index(None)] if None in index else 0
            return bound_source.entry(layer_idx, expert)
    raise AssertionError(f"no source fills {place}")  # sources cover every leaf: test_params


def _read(
    entry: TensorEntry,
    start: int,
    row_shape: tuple[int, ...],
    targets: list[Target],
    files: TensorFiles,
) -> None:
    """Read a row range of one tensor, and give each target its own columns."""
    is_scale = entry.name.endswith(".weight_scale")
    stored = np.dtype(np.uint8) if is_scale else DTYPES[entry.dtype]
    first, _ = targets[0]
    if len(targets) == 1 and first.dtype == stored and first.shape[1:] == row_shape:
        rows = first
        files.read_rows(entry, start, rows)
    else:
        rows = np.empty((first.shape[0], *row_shape), stored)
        files.read_rows(entry, start, rows)
        for target, begin in targets:
            sizes = zip(begin, target.shape[1:], strict=True)
            target[...] = rows[:, *(slice(at, at + size) for at, size in sizes)]
    if is_scale:
        _check_scales(entry, rows)


def _check_scales(entry: TensorEntry, scales: np.ndarray) -> None:
    highest = int(scales.max())
    if highest > MAX_SCALE_BYTE:
        raise refusal(
            "scale",
            f"tensor {entry.name} in {entry.file} holds an MXFP4 scale that no weight has: "
            f"got byte {highest}; expected at most {MAX_SCALE_BYTE} (2^{MAX_SCALE_BYTE - 127})",
            entry.file,
            entry.name,
        )
