"""Draft models: their released configurations, parameters and files (k3-model.md section 6)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from k3jax.config import ConfigError, ModelConfig
from k3jax.draft.config import DraftConfig
from k3jax.params import describe
from k3jax.weights import synthetic
from k3jax.weights.errors import WeightError
from k3jax.weights.loader import load_params
from sharding.axes import ParallelConfig
from sharding.mesh import make_mesh
from tests import tiny

# As published with Inferact/Kimi-K3-DSpark.
MLA = {
    "model_type": "k3_dspark",
    "architectures": ["K3DSparkModel"],
    "hidden_size": 7168,
    "intermediate_size": 14336,
    "num_hidden_layers": 5,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": False,
    "mla_use_output_gate": False,
    "vocab_size": 163840,
    "draft_vocab_size": 163840,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1048576,
    "rope_theta": 50000.0,
    "rope_parameters": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 50000.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "num_target_layers": 5,
    "target_hidden_size": 7168,
    "target_num_hidden_layers": 93,
    "target_layer_ids": [2, 23, 47, 71, 89],
    "mask_token_id": 163837,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
}
# The layout of RedHatAI/Kimi-K3-speculator.dspark.
GQA = {
    "architectures": ["DSparkDraftModel"],
    "speculators_model_type": "dspark",
    "block_size": 8,
    "aux_hidden_state_layer_ids": [24, 48, 72, 88, 92],
    "mask_token_id": 163837,
    "draft_vocab_size": 163840,
    "markov_rank": 256,
    "markov_head_type": "vanilla",
    "enable_confidence_head": True,
    "confidence_head_with_markov": True,
    "transformer_layer_config": {
        "hidden_size": 7168,
        "intermediate_size": 14336,
        "num_hidden_layers": 5,
        "num_attention_heads": 96,
        "num_key_value_heads": 16,
        "head_dim": 64,
        "vocab_size": 163840,
        "rms_norm_eps": 1e-5,
        "sliding_window": 2048,
        "hidden_act": "silu",
    },
}
SMALL_MLA = MLA | {
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 14,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6,
    "v_head_dim": 8,
    "vocab_size": 160,
    "draft_vocab_size": 160,
    "num_target_layers": 3,
    "target_hidden_size": 40,
    "target_layer_ids": [0, 2, 4],
    "mask_token_id": 158,
    "markov_rank": 12,
}
SMALL_GQA = GQA | {
    "aux_hidden_state_layer_ids": [1, 3],
    "mask_token_id": 158,
    "draft_vocab_size": 160,
    "markov_rank": 12,
    "block_size": 4,
    "transformer_layer_config": GQA["transformer_layer_config"]
    | {
        "hidden_size": 40,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 160,
        "sliding_window": 20,
    },
}


def num_parameters(cfg: DraftConfig) -> int:
    return sum(math.prod(spec.shape) for part in describe(cfg).values() for spec in part.values())


def names(cfg: DraftConfig) -> list[str]:
    return [name for name, _ in synthetic.random_tensors(cfg, seed=0)]


def test_kf_s08_the_released_mla_draft_is_read_as_it_was_trained() -> None:
    cfg = DraftConfig.from_hf(MLA)
    assert cfg.softmax_scale == pytest.approx(0.130861, abs=1e-6)
    assert (cfg.tap_layers, cfg.tap_mode) == ((2, 23, 47, 71, 89), "prefix")
    assert (cfg.num_drafts, cfg.is_causal, cfg.window) == (7, False, None)
    assert cfg.rope.is_interleaved
    assert cfg.attention.entry_width == 576
    assert num_parameters(cfg) == 2_387_907_841


def test_kf_s08_the_released_gqa_draft_is_read_as_it_was_trained() -> None:
    cfg = DraftConfig.from_hf(GQA)
    assert cfg.softmax_scale == 0.125
    assert cfg.tap_layers == (23, 47, 71, 87, 91)
    assert (cfg.num_drafts, cfg.is_causal, cfg.window) == (7, True, 2048)
    assert (cfg.rope.theta, cfg.rope.is_interleaved, cfg.has_own_vocab) == (10000.0, False, True)
    assert cfg.attention.entry_width == 2048
    assert num_parameters(cfg) == 4_744_900_481


@pytest.mark.parametrize(("config", "count"), [(SMALL_MLA, 31), (SMALL_GQA, 31)])
def test_every_layer_has_the_released_tensors(config: dict[str, Any], count: int) -> None:
    found = names(DraftConfig.from_hf(config))
    assert len(found) == len(set(found)) == count
    assert {"layers.1.mlp.up_proj.weight", "confidence_head.proj.bias"} <= set(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_layer_ids": [2, 47, 23, 71, 89]}, "ascending"),
        ({"target_layer_ids": [2, 23]}, "expected num_target_layers = 5"),
        ({"mask_token_id": 163840}, "outside the vocabulary: got 163840; expected below 163840"),
        ({"mask_token_id": None}, "mask_token_id has the wrong type: got None; expected int"),
        ({"markov_head_type": "gated"}, "markov_head_type is not implemented: got 'gated'"),
        ({"markov_rank": 0}, "markov_rank is out of range"),
        ({"mla_use_nope": True}, "mla_use_nope is not implemented: got True"),
        ({"fc_norm": True}, "fc_norm is unknown"),
        ({"tap_mode": "last"}, "tap_mode is unknown: got 'last'"),
        ({"model_type": "eagle"}, "format of the draft is unknown"),
    ],
)
def test_a_configuration_that_is_not_implemented_is_refused(
    change: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        DraftConfig.from_hf(MLA | change)


def test_keys_of_our_own_say_what_the_formats_leave_open() -> None:
    ours = {"tap_mode": "mixture", "causal_block": True, "context_window": 64}
    cfg = DraftConfig.from_hf(MLA | ours)
    assert (cfg.tap_mode, cfg.is_causal, cfg.window) == ("mixture", True, 64)


def test_a_draft_of_another_target_is_refused() -> None:
    released = json.loads((tiny.DATA / "k3-config.json").read_text())
    DraftConfig.from_hf(MLA).check_target(ModelConfig.from_hf(released))
    with pytest.raises(ConfigError) as caught:
        DraftConfig.from_hf(MLA).check_target(tiny.tiny_config())
    assert [problem.split(" ")[0] for problem in caught.value.problems] == [
        "target_hidden_size", "vocab_size", "hidden_size", "tapped"
    ]  # fmt: skip


@pytest.mark.parametrize("config", [SMALL_MLA, SMALL_GQA])
def test_files_load_and_nothing_is_silently_left_out(tmp_path: Path, config: dict) -> None:
    cfg = DraftConfig.from_hf(config)
    tensors = dict(synthetic.random_tensors(cfg, seed=0))
    parallel = ParallelConfig(tp=2)
    mesh = make_mesh(parallel)
    # The frozen copy of the target's embedding comes along in the released MLA file.
    extra = {} if cfg.has_own_vocab else {"embed_tokens.weight": np.zeros((160, 40), np.float32)}
    synthetic.write_tensors(tmp_path, config, tensors | extra)
    params = load_params(tmp_path, cfg, parallel, mesh, "bfloat16")
    np.testing.assert_array_equal(
        np.asarray(params["markov"]["w2"], np.float32),
        tensors["markov_head.markov_w2.weight"].astype(np.float32),
    )
    first, *others = tensors
    renamed = {"eagle." + first: tensors[first]} | {name: tensors[name] for name in others}
    synthetic.write_tensors(tmp_path, config, renamed)
    with pytest.raises(WeightError) as caught:
        load_params(tmp_path, cfg, parallel, mesh, "bfloat16")
    assert f"no file holds tensor {first}" in str(caught.value)
    assert f"tensor eagle.{first} in" in str(caught.value)
