"""Trained parameters as a checkpoint in the released layout, and a checkpoint as parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jaxtyping import Array

from k3jax.config import ModelConfig
from k3jax.params import AnyConfig, describe
from k3jax.weights import load_params, read_model_config
from k3jax.weights.mxfp4 import dequantize, quantize
from k3jax.weights.names import num_experts, num_leading_dims, released_name, stored_shapes
from sharding.axes import ParallelConfig
from sharding.mesh import make_mesh

Tree = Mapping[str, Mapping[str, Any]]


def read_target(folder: Path, cfg: ModelConfig) -> dict[str, dict[str, Array]]:
    """Parameters of a written model as the server computes with them, experts unpacked.

    Args:
      folder: checkpoint with MXFP4 experts.
      cfg: of the result, with dense experts.
    """
    parallel = ParallelConfig()
    packed = read_model_config(folder)
    loaded = load_params(folder, packed, parallel, make_mesh(parallel), "bfloat16")
    params = {part: {n: jnp.asarray(np.asarray(x)) for n, x in leaves.items()}
              for part, leaves in loaded.items()}  # fmt: skip
    moe = params["moe"]
    for name in ("w13", "w2"):
        codes, scales = (np.asarray(moe.pop(f"{name}_{part}")) for part in ("codes", "scales"))
        moe[name] = jnp.asarray(dequantize(codes, scales), jnp.bfloat16)  # exact
    assert {part: set(leaves) for part, leaves in params.items()} == {
        part: set(specs) for part, specs in describe(cfg).items()
    }
    return params


def released_tensors(cfg: AnyConfig, params: Tree) -> dict[str, np.ndarray]:
    """Every tensor of the checkpoint by its name.

    Args:
      cfg: of the file: with `expert_format` mxfp4, the dense experts of `params` are packed.
      params: float32 values.
    """
    values = {part: {name: np.asarray(x, np.float32) for name, x in leaves.items()}
              for part, leaves in params.items()}  # fmt: skip
    if isinstance(cfg, ModelConfig) and cfg.expert_format == "mxfp4":
        moe = values["moe"]
        for name in ("w13", "w2"):
            moe[f"{name}_codes"], moe[f"{name}_scales"] = quantize(moe.pop(name))
    tensors: dict[str, np.ndarray] = {}
    for part, specs in describe(cfg).items():
        for name, spec in specs.items():
            leaf = values[part][name]
            dtype = {"compute": ml_dtypes.bfloat16, "float32": np.float32, "uint8": np.uint8}
            for source in spec.sources:
                for layer_idx, layer in enumerate(spec.layers or (0,)):
                    for expert in range(num_experts(source, cfg)):
                        place = tuple(expert if i is None else i for i in source.index)
                        block = leaf[(layer_idx, *place) if spec.layers else place]
                        assert block.ndim == len(spec.shape) - num_leading_dims(spec)
                        shape = stored_shapes(spec, source, cfg)[0]
                        if source.convert == "a_log":
                            block = np.pad(block, (0, math.prod(shape) - block.size))
                        stored = source.name.format(layer=layer, expert=expert)
                        tensors[released_name(stored, cfg)] = block.reshape(shape).astype(
                            dtype[spec.dtype]
                        )
    return tensors
