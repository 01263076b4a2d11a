"""Filling of one piece from the stored tensors: ranged reads, lossless conversion, checks of the
values.

A row range is read once and handed to every local shard that needs part of it. Only the columns
that a shard owns are kept.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from k3jax.config import Dtype, ModelConfig
from k3jax.weights.errors import Problem, WeightError, raise_if_any
from k3jax.weights.folder import open_checkpoint
from k3jax.weights.names import Bound, BoundSource, bind, num_leading_dims
from k3jax.weights.plan import Piece
from k3jax.weights.safetensors_file import DTYPES, TensorEntry, TensorFiles

# E8M0 scales are 2^(byte - 127). Released ones lie near 2^-10 and 255 means "not a number": a
# weight above 6 * 2^10 is a damaged or misread file (KF-L03).
MAX_SCALE_BYTE = 127 + 10


class CheckpointReader:
    """A checkpoint that is opened and checked when it is first needed. Used by several threads."""

    def __init__(self, model_dir: Path, cfg: ModelConfig, dtype: Dtype):
        self._model_dir, self._cfg, self._dtype = model_dir, cfg, dtype
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
    blocks = tuple(np.empty(piece.shape, leaf.dtype) for _ in leaf.shard_starts)
    lead = num_leading_dims(leaf.spec)
    for position in itertools.product(*(range(size) for size in piece.shape[:lead])):
        wanted: dict[tuple[str, int], list[tuple[np.ndarray, tuple[slice, ...]]]] = {}
        entries: dict[str, TensorEntry] = {}
        for block, window in zip(blocks, _windows(piece), strict=True):
            place = tuple(
                part.start + step for part, step in zip(window[:lead], position, strict=True)
            )
            entry = _entry_at(sources, place, has_layers=bool(leaf.spec.layers))
            entries[entry.name] = entry
            rows, *columns = window[lead:]
            wanted.setdefault((entry.name, rows.start), []).append(
                (block[position], tuple(columns))
            )
        row_shape = leaf.spec.shape[lead + 1 :]
        for (name, start), targets in wanted.items():
            _read(entries[name], start, row_shape, targets, files)
    return blocks


def check_padding(bound: Bound, cfg: ModelConfig, files: TensorFiles) -> None:
    """Check that what will be cut off `A_log` is zero (KF-L04).

    Raises:
      WeightError: with every tensor whose tail holds something else.
    """
    problems: list[Problem] = []
    for source in bound.get("kda", {}).get("A_log", ()):
        for entry in source.entries:
            extra = max(entry.shape) - cfg.kda_num_heads
            if extra <= 0:
                continue
            tail = np.empty((extra,), DTYPES[entry.dtype])
            files.read_rows(entry, cfg.kda_num_heads, tail)
            if np.any(tail != 0):
                problems.append(
                    Problem(
                        kind="padding",
                        file=entry.file.name,
                        tensor=entry.name,
                        message=f"tensor {entry.name} in {entry.file} is longer than "
                        f"{cfg.kda_num_heads} heads and "
                        f"not zero beyond them: got {entry.shape[-1]} values; expected a zero tail",
                    )
                )
    raise_if_any(problems)


def _windows(piece: Piece) -> Iterator[tuple[slice, ...]]:
    """The piece in coordinates of the whole leaf, for each local shard."""
    for shard in piece.leaf.shard_starts:
        begins = [a + b for a, b in zip(shard, piece.start, strict=True)]
        yield tuple(
            slice(begin, begin + size) for begin, size in zip(begins, piece.shape, strict=True)
        )


def _entry_at(
    sources: tuple[BoundSource, ...], place: tuple[int, ...], *, has_layers: bool
) -> TensorEntry:
    """The tensor that fills one place of a leaf: layer of the stack, then position inside the
    layer."""
    layer_idx, inside = (place[0], place[1:]) if has_layers else (0, place)
    for bound_source in sources:
        expert = 0
        for want, got in zip(bound_source.source.index, inside, strict=True):
            if want is None:
                expert = got
            elif want != got:
                break
        else:
            return bound_source.entry(layer_idx, expert)
    raise AssertionError(f"no source fills {place}")  # the sources cover a leaf: tested


def _read(
    entry: TensorEntry,
    start: int,
    row_shape: tuple[int, ...],
    targets: list[tuple[np.ndarray, tuple[slice, ...]]],
    files: TensorFiles,
) -> None:
    """Read a row range of one tensor into each target, which keeps its own columns."""
    stored = np.dtype(np.uint8) if entry.name.endswith(".weight_scale") else DTYPES[entry.dtype]
    first, _ = targets[0]
    if len(targets) == 1 and first.dtype == stored and first.shape[1:] == row_shape:
        files.read_rows(entry, start, first)
        rows = first
    else:
        rows = np.empty((first.shape[0], *row_shape), stored)
        files.read_rows(entry, start, rows)
        for target, columns in targets:
            target[...] = rows[(slice(None), *columns)].astype(target.dtype, copy=False)
    if entry.name.endswith(".weight_scale"):
        _check_scales(entry, rows)


def _check_scales(entry: TensorEntry, scales: np.ndarray) -> None:
    highest = int(scales.max())
    if highest > MAX_SCALE_BYTE:
        raise WeightError(
            Problem(
                kind="scale",
                file=entry.file.name,
                tensor=entry.name,
                message=f"tensor {entry.name} in {entry.file} holds an MXFP4 scale that no weight "
                f"has: got byte "
                f"{highest}{' (not a number)' if highest == 255 else f' (2^{highest - 127})'}; "
                f"expected at most "
                f"{MAX_SCALE_BYTE} (2^{MAX_SCALE_BYTE - 127})",
            )
        )
