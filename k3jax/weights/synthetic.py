"""Random checkpoints in the released layout, from a configuration and a seed.

A tensor's values depend on the seed and its own name only, and are made from the raw PCG64 stream,
which NumPy keeps stable between versions. Scales are chosen so that activations stay of order one
through the layers, decay gates neither forget at once nor keep everything, and logits differ
clearly.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Float32

from k3jax.config import ModelConfig
from k3jax.param_spec import ParamSpec, Source
from k3jax.params import AnyConfig, describe
from k3jax.weights.folder import INDEX_FILE
from k3jax.weights.mxfp4 import quantize
from k3jax.weights.names import num_experts, num_leading_dims, released_name, stored_shapes
from k3jax.weights.safetensors_file import write_file


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], *, seed: int, num_shards: int = 2
) -> ModelConfig:
    """Write `config.json`, the shards and their index.

    Args:
      folder: an existing folder.
      config: as a released `config.json`; with a `quantization_config`, experts are packed.

    Returns:
      The configuration, read back.
    """
    cfg = ModelConfig.from_hf(config)
    write_tensors(folder, config, dict(random_tensors(cfg, seed=seed)), num_shards=num_shards)
    return cfg


def write_tensors(
    folder: Path,
    config: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    num_shards: int = 2,
) -> None:
    """Write `config.json` and given tensors."""
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    write_shards(folder, tensors, num_shards=num_shards)


def write_shards(
    folder: Path, tensors: Mapping[str, np.ndarray], *, num_shards: int
) -> Mapping[str, str]:
    """Write tensors into equally filled shards, and the index. Returns its weight map."""
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:06d}.safetensors"
        part = names[len(names) * shard // num_shards : len(names) * (shard + 1) // num_shards]
        write_file(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    total = sum(array.nbytes for array in tensors.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / INDEX_FILE).write_text(json.dumps(index, indent=2) + "\n")
    return weight_map


def random_tensors(cfg: AnyConfig, *, seed: int) -> Iterator[tuple[str, np.ndarray]]:
    """Every tensor of a released checkpoint: name, and array, as they are stored."""
    for params in describe(cfg).values():
        for spec in params.values():
            for source in spec.sources:
                experts = range(num_experts(source, cfg))
                for layer in spec.layers or (0,):
                    for expert in experts:
                        name = source.name.format(layer=layer, expert=expert)
                        yield released_name(name, cfg), _stored(cfg, spec, source, name, seed)


def random_values(name: str, shape: Sequence[int], *, seed: int) -> Float32[np.ndarray, "..."]:
    """Values of a tensor, before they are stored.

    Args:
      name: without prefix; its ending chooses the distribution.
      shape: of the described block; the last dim is the fan-in.
    """
    kind = name.rpartition("self_attn.")[2]
    if kind == "A_log":
        return _uniform(name, shape, -0.7, 0.7, seed=seed)
    if kind == "dt_bias":
        return _uniform(name, shape, -5.0, -1.0, seed=seed)
    normal = _normal(name, shape, seed=seed)
    if name.endswith("norm.weight"):
        return 1 + np.float32(0.1) * normal
    if name.endswith("e_score_correction_bias"):
        return np.float32(0.05) * normal
    if name == "embed_tokens.weight":
        return normal
    gain = 2.0 if name == "lm_head.weight" else 1.0
    return np.float32(gain / math.sqrt(shape[-1])) * normal


def mxfp4_quantization_config() -> dict[str, Any]:
    """As released: the `ignore` list omits three bf16 tensors (k3-model.md section 3.4)."""
    return {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "format": "mxfp4-pack-quantized",
                "input_activations": None,
                "output_activations": None,
                "weights": {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32},
            }
        },
        "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\..*", "re:.*lm_head.*"],
    }


def _stored(cfg: AnyConfig, spec: ParamSpec, source: Source, name: str, seed: int) -> np.ndarray:
    """One tensor as it lies in a file."""
    shape = spec.shape[num_leading_dims(spec) :]
    weight, _, part = name.rpartition(".")
    if part in ("weight_packed", "weight_scale"):
        assert isinstance(cfg, ModelConfig)  # drafts are dense
        packed, scales = quantize(
            random_values(f"{weight}.weight", _unpacked(cfg, name), seed=seed)
        )
        return packed if part == "weight_packed" else scales
    values = random_values(name, shape, seed=seed)
    stored_shape = stored_shapes(spec, source, cfg)[0]
    if source.convert == "a_log":
        values = np.pad(values, (0, math.prod(stored_shape) - values.size))
    dtype = np.float32 if spec.dtype == "float32" else ml_dtypes.bfloat16
    return values.reshape(stored_shape).astype(dtype)


def _unpacked(cfg: ModelConfig, name: str) -> tuple[int, int]:
    """`[out, in]` of a routed expert's matrix."""
    ff, latent = cfg.moe_intermediate_size, cfg.latent_size
    return (latent, ff) if ".w2." in name else (ff, latent)


def _bits(name: str, count: int, *, seed: int) -> Float32[np.ndarray, " count"]:
    """Uniform values in [0, 1)."""
    bits = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())]))
    return (bits.random_raw(count) >> np.uint64(40)).astype(np.float32) * np.float32(2**-24)


def _uniform(
    name: str, shape: Sequence[int], low: float, high: float, *, seed: int
) -> Float32[np.ndarray, "..."]:
    values = _bits(name, math.prod(shape), seed=seed).reshape(shape)
    return np.float32(low) + np.float32(high - low) * values


def _normal(name: str, shape: Sequence[int], *, seed: int) -> Float32[np.ndarray, "..."]:
    """Nearly normal, mean 0 and deviation 1: the sum of four uniform values."""
    values = _bits(name, 4 * math.prod(shape), seed=seed).reshape(4, *shape)
    return (values.sum(axis=0) - np.float32(2)) * np.float32(math.sqrt(3))
