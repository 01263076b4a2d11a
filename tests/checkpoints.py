"""Editing of tiny checkpoints on disk, for tests of what must be refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np

from k3jax.weights.folder import INDEX_FILE, open_checkpoint
from k3jax.weights.safetensors_file import DTYPES, TensorFiles
from k3jax.weights.synthetic import write_shards

PREFIX = "language_model.model."


def read_all(folder: Path) -> dict[str, np.ndarray]:
    """Every tensor of a checkpoint, in the order of the shards."""
    tensors = {}
    with TensorFiles() as files:
        for name, entry in open_checkpoint(folder).items():
            tensors[name] = np.empty(entry.shape, DTYPES[entry.dtype])
            files.read_rows(entry, 0, tensors[name])
    return tensors


def rewrite(folder: Path, tensors: dict[str, np.ndarray]) -> None:
    """Replace the weights of a checkpoint."""
    for file in folder.glob("*.safetensors"):
        file.unlink()
    write_shards(folder, tensors, num_shards=2)


def edit(folder: Path, change: Callable[[dict[str, np.ndarray]], None]) -> None:
    """Let `change` alter the tensors of a checkpoint."""
    tensors = read_all(folder)
    change(tensors)
    rewrite(folder, tensors)


def replace(folder: Path, name: str, array: np.ndarray) -> None:
    """Replace one tensor."""
    edit(folder, lambda tensors: tensors.update({name: array}))


def edit_index(folder: Path, change: Callable[[dict[str, str]], None]) -> None:
    """Let `change` alter the weight map, and leave the shards alone."""
    file = folder / INDEX_FILE
    index = json.loads(file.read_bytes())
    change(index["weight_map"])
    file.write_text(json.dumps(index))
