"""Converted checkpoints: the described tree as an Orbax checkpoint, restored onto any mesh.

The folder holds `config.json` and the tokenizer's files as released, `weights/` written by Orbax,
and a manifest that is written last: an interrupted conversion is not taken for a checkpoint.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from k3jax.config import ConfigError, Dtype, ModelConfig
from k3jax.weights.errors import Problem, raise_if_any, refusal
from k3jax.weights.folder import CONVERTED_FORMAT, MANIFEST_FILE, Manifest, read_manifest
from k3jax.weights.plan import Leaf, Params

WEIGHTS_FOLDER = "weights"

# What a client needs besides the weights: configuration, tokenizer, its code and templates.
_COPIED = (
    "config.json",
    "generation_config.json",
    "tiktoken.model",
    "tokenizer*",
    "special_tokens_map.json",
    "chat_template*",
    "*.py",
    "LICENSE*",
)
_LOSSLESS_CAST = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float32))
_CONCURRENT_BYTES = 512 << 20


def save(params: Params, cfg: ModelConfig, *, model_dir: Path, out_dir: Path, dtype: Dtype) -> None:
    """Write a converted checkpoint.

    Args:
      params: the tree that `load` returned.
      cfg: its configuration.
      model_dir: where the configuration and the tokenizer are copied from.
      out_dir: new or empty folder.
      dtype: with which the tree was loaded.

    Raises:
      ConfigError: `out_dir` holds something.
    """
    check_output(out_dir)
    v1 = _orbax()
    out_dir.mkdir(parents=True, exist_ok=True)
    with _context(v1):
        v1.save((out_dir / WEIGHTS_FOLDER).absolute(), params)
    for pattern in _COPIED:
        for file in model_dir.glob(pattern):
            shutil.copyfile(file, out_dir / file.name)
    manifest = Manifest(format=CONVERTED_FORMAT, dtype=dtype, expert_format=cfg.expert_format)
    text = json.dumps(dataclasses.asdict(manifest), indent=2) + "\n"
    (out_dir / MANIFEST_FILE).write_text(text)


def check_output(out_dir: Path) -> None:
    """Refuse an output folder that holds something, before the work of loading.

    Raises:
      ConfigError: it is not empty, or no folder.
    """
    if out_dir.exists() and (not out_dir.is_dir() or any(out_dir.iterdir())):
        raise ConfigError(f"output folder is not empty: got {out_dir}; expected a new or empty one")


def restore(model_dir: Path, leaves: tuple[Leaf, ...]) -> Params:
    """Read a converted checkpoint onto the mesh of `leaves`, whatever mesh it was written from.

    Raises:
      WeightError: it is of another version, damaged, not of this model, or has a dtype that would
        lose precision.
    """
    manifest = read_manifest(model_dir)
    folder = (model_dir / WEIGHTS_FOLDER).absolute()
    v1 = _orbax()
    try:
        stored = v1.metadata(folder).metadata
    except (OSError, ValueError, KeyError) as error:
        got = f"{type(error).__name__}: {error}"
        message = f"{folder} is no Orbax checkpoint: got {got}; convert the checkpoint again"
        raise refusal("converted", message, folder) from error
    raise_if_any(_problems(folder, stored, leaves, manifest))
    target: dict[str, dict[str, jax.ShapeDtypeStruct]] = {leaf.module: {} for leaf in leaves}
    for leaf in leaves:
        target[leaf.module][leaf.name] = jax.ShapeDtypeStruct(
            leaf.spec.shape, leaf.dtype, sharding=leaf.sharding
        )
    with _context(v1):
        return v1.load(folder, target)


def _problems(
    folder: Path,
    stored: Mapping[str, Mapping[str, Any]],
    leaves: tuple[Leaf, ...],
    manifest: Manifest,
) -> list[Problem]:
    """Compare what is stored with what is described."""
    left = {
        f"{module}.{name}": array
        for module, params in stored.items()
        for name, array in params.items()
    }
    problems: list[Problem] = []

    def refuse(tensor: str, what: str) -> None:
        message = f"leaf {tensor} in {folder} {what}"
        problems.append(Problem("converted", message, folder, tensor))

    for leaf in leaves:
        array, want = left.pop(leaf.label, None), leaf.spec.shape
        if array is None:
            refuse(leaf.label, f"is missing: expected {leaf.dtype} {list(want)}")
        elif tuple(array.shape) != want:
            got = list(array.shape)
            refuse(leaf.label, f"has the wrong shape: got {got}; expected {list(want)}")
        elif array.dtype != leaf.dtype and (array.dtype, leaf.dtype) != _LOSSLESS_CAST:
            got = f"got {array.dtype} (converted for {manifest.dtype})"
            refuse(leaf.label, f"would lose precision: {got}; expected {leaf.dtype}")
    for label in left:
        refuse(label, "is not a parameter of this model; the configuration does not belong to it")
    return problems


def _orbax() -> Any:
    """Orbax takes a second to import, and only converted checkpoints need it."""
    from orbax.checkpoint import v1

    return v1


def _context(v1: Any) -> Any:
    """Without compression: with it, saving takes four times as long (multihost.md section 4)."""
    context = v1.Context()
    context.array.saving.use_compression = False
    context.memory.read_concurrent_bytes = _CONCURRENT_BYTES
    context.memory.write_concurrent_bytes = _CONCURRENT_BYTES
    return context
