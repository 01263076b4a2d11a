"""Tiny models for tests: configurations, checkpoints in the released layout, random trees.

Sizes are unequal everywhere, so that a transposed or swapped dim cannot cancel out. All of them
divide by 2 and 4.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from k3jax.config import Dtype, ModelConfig
from k3jax.param_spec import ParamSpec
from k3jax.params import AnyConfig, describe
from k3jax.program import DRAFT_PREFIX, Program
from k3jax.weights import plan, synthetic
from k3jax.weights.names import num_experts, num_leading_dims, released_name
from sharding.axes import ParallelConfig
from sharding.mesh import make_mesh

DATA = Path(__file__).parent / "data"

_TEXT: Mapping[str, Any] = {
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": 160,
    "hidden_size": 40,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 56,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "hidden_act": "situ",
    "activation_situ_beta": 4.0,
    "activation_situ_linear_beta": 25.0,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "mla_use_nope": True,
    "mla_use_output_gate": True,
    "q_lora_rank": 18,
    "kv_lora_rank": 22,
    "qk_nope_head_dim": 14,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "num_experts": 12,
    "num_experts_per_token": 3,
    "num_shared_experts": 3,
    "moe_intermediate_size": 32,
    "routed_expert_hidden_size": 64,
    "latent_moe_use_norm": True,
    "moe_router_activation_func": "sigmoid",
    "topk_method": "noaux_tc",
    "use_grouped_topk": True,
    "num_expert_group": 1,
    "topk_group": 1,
    "moe_renormalize": True,
    "routed_scaling_factor": 1.0,
    "attn_res_block_size": 2,
    "num_nextn_predict_layers": 0,
    "tie_word_embeddings": False,
    "bos_token_id": 156,
    "eos_token_id": 157,
    "pad_token_id": 159,
    "linear_attn_config": {
        "num_heads": 4,
        "head_dim": 12,
        "short_conv_kernel_size": 4,
        "use_full_rank_gate": True,
        "gate_lower_bound": -5.0,
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3, 5],
    },
}


def tiny_json(*, packed: bool = True, **overrides: Any) -> dict[str, Any]:
    """A `config.json` of a tiny K3.

    Args:
      packed: MXFP4 experts.
      overrides: keys of `text_config`; those of `linear_attn_config` may be given alone.
    """
    text = {**_TEXT, **overrides}
    text["linear_attn_config"] = {
        **_TEXT["linear_attn_config"],
        **overrides.get("linear_attn_config", {}),
    }
    if packed:
        text.setdefault("quantization_config", synthetic.mxfp4_quantization_config())
    return {"model_type": "kimi_k3", "dtype": "bfloat16", "text_config": text}


def tiny_config(*, packed: bool = True, **overrides: Any) -> ModelConfig:
    """The configuration of `tiny_json`."""
    return ModelConfig.from_hf(tiny_json(packed=packed, **overrides))


def short_config() -> ModelConfig:
    """One layer of each kind: KDA with a dense network, KDA and MLA with experts."""
    return tiny_config(
        num_hidden_layers=3, linear_attn_config={"kda_layers": [1, 2], "full_attn_layers": [3]}
    )


def write_tiny_checkpoint(
    folder: Path, *, packed: bool = True, seed: int = 0, num_shards: int = 2, **overrides: Any
) -> ModelConfig:
    """Write a tiny K3 in the released layout; the folder is created."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_json(packed=packed, **overrides)
    return synthetic.write_checkpoint(folder, config, seed=seed, num_shards=num_shards)


def program_params(program: Program) -> dict[str, dict[str, jax.Array]]:
    """A random tree of all that a program needs."""
    params = random_params(program.cfg, dtype=program.dtype)
    if program.draft is not None:
        draft = random_params(program.draft, dtype=program.dtype).items()
        params |= {f"{DRAFT_PREFIX}{part}": leaves for part, leaves in draft}
    return params


def random_params(
    cfg: AnyConfig, *, dtype: Dtype = "float32", seed: int = 0
) -> dict[str, dict[str, jax.Array]]:
    """A random tree of `describe(cfg)` on the default device.

    It is what a load of `write_tiny_checkpoint` with the same seed yields, made without `load`.
    """
    stored = dict(synthetic.random_tensors(cfg, seed=seed))
    tree = {
        module: {name: _assemble(spec, stored, cfg, dtype) for name, spec in params.items()}
        for module, params in describe(cfg).items()
    }
    return jax.tree.map(jax.numpy.asarray, tree)


def _assemble(
    spec: ParamSpec, stored: Mapping[str, np.ndarray], cfg: AnyConfig, dtype: Dtype
) -> np.ndarray:
    """Put the stored tensors of one leaf together, as `ParamSpec` says."""
    leaf = np.zeros(spec.shape, plan.numpy_dtype(spec, dtype))
    shape = spec.shape[num_leading_dims(spec) :]
    for source, (layer_idx, layer) in itertools.product(
        spec.sources, enumerate(spec.layers or (0,))
    ):
        for expert in range(num_experts(source, cfg)):
            tensor = stored[released_name(source.name.format(layer=layer, expert=expert), cfg)]
            inside = tuple(expert if part is None else part for part in source.index)
            place = (layer_idx, *inside) if spec.layers else inside
            # Only `A_log` is stored longer than it is used.
            leaf[place] = tensor.reshape(-1)[: math.prod(shape)].reshape(shape).astype(leaf.dtype)
    return leaf


def one_device_shardings(cfg: ModelConfig) -> plan.Shardings:
    """Every leaf whole on the first device."""
    return mesh_shardings(cfg, ParallelConfig())


def mesh_shardings(cfg: ModelConfig, parallel: ParallelConfig) -> plan.Shardings:
    """The shardings of every leaf on a mesh of the first devices."""
    return plan.param_shardings(cfg, parallel, make_mesh(parallel))
