"""Released configurations: what is understood, and what is refused by name.

Trap numbers are those of k3-model.md sections 3.4 and 9.
"""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from k3jax.config import ConfigError, ModelConfig
from tests.tiny import DATA, tiny_json

Json = dict[str, Any]


def released(name: str) -> Json:
    return json.loads((DATA / name).read_text())


@pytest.fixture
def k3() -> Json:
    return released("k3-config.json")


@pytest.fixture
def kimi_linear() -> Json:
    return released("kimi-linear-tiny/config.json")


def refused(config: Json) -> str:
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(config)
    return str(caught.value)


def with_text(config: Json, **changes: Any) -> Json:
    """Set keys of `text_config`; `...` removes one."""
    config = copy.deepcopy(config)
    _apply(config["text_config"], changes)
    return config


def with_linear(config: Json, **changes: Any) -> Json:
    """Set keys of `linear_attn_config`; `...` removes one."""
    config = copy.deepcopy(config)
    _apply(config["text_config"]["linear_attn_config"], changes)
    return config


def _apply(mapping: Json, changes: Json) -> None:
    for key, value in changes.items():
        if value is ...:
            del mapping[key]
        else:
            mapping[key] = value


# What is read


def test_every_field_of_k3(k3: Json):
    assert ModelConfig.from_hf(k3) == ModelConfig(
        family="kimi_k3",
        vocab_size=163840,
        hidden_size=7168,
        num_layers=93,
        intermediate_size=33792,
        num_dense_layers=1,
        max_position_tokens=1048576,
        rms_norm_eps=1e-5,
        mla_lora_norm_eps=1e-6,
        situ_beta=4.0,
        situ_linear_beta=25.0,
        kda_layers=tuple(i for i in range(93) if i % 4 != 3 and i != 92),
        kda_num_heads=96,
        kda_head_dim=128,
        conv_width=4,
        kda_full_rank_gate=True,
        gate_lower_bound=-5.0,
        mla_layers=(*range(3, 92, 4), 92),
        mla_num_heads=96,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        mla_output_gate=True,
        num_experts=896,
        experts_per_token=16,
        num_shared_experts=2,
        moe_intermediate_size=3072,
        latent_size=3584,
        has_latent_moe=True,
        has_latent_norm=True,
        num_expert_groups=1,
        topk_groups=1,
        renormalize=True,
        routed_scaling_factor=1.0,
        expert_format="mxfp4",
        attn_res_block_layers=12,
        bos_token_id=163584,
        eos_token_ids=(163586,),
        pad_token_id=163839,
    )


def test_every_field_of_kimi_linear(kimi_linear: Json):
    assert ModelConfig.from_hf(kimi_linear) == ModelConfig(
        family="kimi_linear",
        vocab_size=160,
        hidden_size=48,
        num_layers=5,
        intermediate_size=80,
        num_dense_layers=1,
        max_position_tokens=4096,
        rms_norm_eps=1e-5,
        situ_beta=None,
        situ_linear_beta=None,
        kda_layers=(0, 1, 3),
        kda_num_heads=4,
        kda_head_dim=16,
        conv_width=4,
        kda_full_rank_gate=False,
        gate_lower_bound=None,
        mla_layers=(2, 4),
        mla_num_heads=4,
        q_lora_rank=None,
        kv_lora_rank=32,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        mla_output_gate=False,
        num_experts=8,
        experts_per_token=2,
        num_shared_experts=1,
        moe_intermediate_size=32,
        latent_size=48,
        has_latent_moe=False,
        has_latent_norm=False,
        num_expert_groups=1,
        topk_groups=1,
        renormalize=True,
        routed_scaling_factor=2.446,
        expert_format="dense",
        attn_res_block_layers=None,
        bos_token_id=156,
        eos_token_ids=(157,),
        pad_token_id=159,
    )


@pytest.mark.parametrize("name", ["k3-tiny", "k3-tiny-mxfp4", "kimi-linear-tiny"])
def test_golden_configurations_are_read(name: str):
    assert ModelConfig.from_hf(released(f"{name}/config.json")).num_layers > 0


def test_derived_widths(k3: Json):
    cfg = ModelConfig.from_hf(k3)
    assert cfg.kda_width == 12288
    assert cfg.qk_head_dim == 192  # the unrotated dims take part in the score (section 9, trap 17)
    assert cfg.mla_entry_width == 576
    assert cfg.shared_intermediate_size == 6144


# Section 9, traps 1 and 2
def test_layer_lists_count_from_one_and_end_with_two_mla_layers(k3: Json):
    cfg = ModelConfig.from_hf(k3)
    assert 0 in cfg.kda_layers
    assert cfg.mla_layers[0] == 3
    assert cfg.mla_layers[-2:] == (91, 92)


# Section 9, trap 3
def test_routed_experts_work_at_the_latent_width(k3: Json):
    cfg = ModelConfig.from_hf(k3)
    assert (cfg.latent_size, cfg.hidden_size) == (3584, 7168)


# Section 9, trap 18
def test_mla_lora_norms_do_not_use_the_model_s_epsilon(k3: Json):
    cfg = ModelConfig.from_hf(k3)
    assert (cfg.rms_norm_eps, cfg.mla_lora_norm_eps) == (1e-5, 1e-6)


def test_a_list_of_end_tokens_is_kept(k3: Json):
    cfg = ModelConfig.from_hf({**k3, "eos_token_id": [163586, 163585]})
    assert cfg.eos_token_ids == (163586, 163585)


def test_a_configuration_is_hashable(k3: Json):
    assert hash(ModelConfig.from_hf(k3)) == hash(ModelConfig.from_hf(k3))


# Layer lists


@pytest.mark.parametrize(
    ("kda", "mla"),
    [
        ([1, 2, 4], [3]),  # layer 5 is in neither
        ([1, 2, 4], [3, 4, 5]),  # layer 4 in both
        ([1, 2, 4, 4], [3, 5]),  # twice
        ([0, 1, 3], [2, 4]),  # counted from zero
        ([1, 2, 4], [3, 5, 6]),  # beyond the layers
        ([], [3, 5]),
    ],
)
def test_layer_lists_must_partition_the_layers(kda: list[int], mla: list[int]):
    config = with_linear(tiny_json(), kda_layers=kda, full_attn_layers=mla)
    assert "do not partition the 5 layers" in refused(config)


@pytest.mark.parametrize("key", ["kda_layers", "full_attn_layers"])
def test_both_layer_lists_are_needed(k3: Json, key: str):
    assert f"text_config.linear_attn_config.{key} is missing" in refused(
        with_linear(k3, **{key: ...})
    )


# Keys


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (with_text, "sliding_window"),
        (with_text, "logit_softcap"),
        (
            with_text,
            "num_experts_per_tok",
        ),  # section 3.4, trap 5: the released name is `_per_token`
        (with_linear, "num_kv_heads"),
    ],
)
def test_an_unknown_key_is_refused_by_name(k3: Json, change: Callable[..., Json], name: str):
    assert f"{name} is unknown: got 8" in refused(change(k3, **{name: 8}))


def test_an_unknown_top_level_key_is_refused_by_name(k3: Json):
    assert "draft_config is unknown" in refused({**k3, "draft_config": {}})


# Section 3.4, traps 4 and 5: the released class would take a default and build another model
@pytest.mark.parametrize(
    "key",
    [
        "mla_use_output_gate",
        "mla_use_nope",
        "latent_moe_use_norm",
        "routed_expert_hidden_size",
        "attn_res_block_size",
        "activation_situ_beta",
        "activation_situ_linear_beta",
        "num_experts_per_token",
        "num_shared_experts",
        "moe_intermediate_size",
        "moe_router_activation_func",
        "moe_renormalize",
        "routed_scaling_factor",
        "first_k_dense_replace",
        "kv_lora_rank",
        "hidden_act",
        "vocab_size",
        "rms_norm_eps",
        "linear_attn_config",
    ],
)
def test_a_lost_key_of_k3_is_refused(k3: Json, key: str):
    assert f"text_config.{key}" in refused(with_text(k3, **{key: ...}))


@pytest.mark.parametrize(
    "key",
    ["use_full_rank_gate", "gate_lower_bound", "num_heads", "head_dim", "short_conv_kernel_size"],
)
def test_a_lost_key_of_k3_s_linear_attention_is_refused(k3: Json, key: str):
    assert f"text_config.linear_attn_config.{key}" in refused(with_linear(k3, **{key: ...}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("mla_use_nope", False),
        ("mla_use_output_gate", False),
        ("latent_moe_use_norm", False),
        ("moe_layer_freq", 2),
        ("moe_router_activation_func", "softmax"),
        ("topk_method", "greedy"),
        ("hidden_act", "gelu"),
        ("tie_word_embeddings", True),
        ("rope_scaling", {"type": "yarn"}),
        ("num_key_value_heads", 8),
        ("model_type", "kimi_k3"),
    ],
)
def test_a_value_that_is_not_implemented_is_refused(k3: Json, key: str, value: Any):
    text = refused(with_text(k3, **{key: value}))
    assert f"text_config.{key}" in text
    assert str(value) in text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_size", "7168"),
        ("hidden_size", 7168.0),
        ("hidden_size", True),
        ("q_lora_rank", "none"),
        ("moe_renormalize", 1),
        ("rms_norm_eps", None),
        ("linear_attn_config", []),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(k3: Json, key: str, value: Any):
    assert f"text_config.{key} has the wrong type: got {value!r}" in refused(
        with_text(k3, **{key: value})
    )


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("num_experts", 0, "num_experts is out of range: got 0"),
        ("hidden_size", -1, "hidden_size is out of range: got -1"),
        (
            "num_experts_per_token",
            900,
            "num_experts_per_token is too large: got 900; expected <= 896",
        ),
        ("first_k_dense_replace", 94, "num_dense_layers is out of range: got 94"),
        ("attn_res_block_size", 0, "attn_res_block_size is out of range: got 0"),
        (
            "routed_expert_hidden_size",
            3600,
            "latent_size does not divide into MXFP4 groups: got 3600",
        ),
        ("num_expert_group", 5, "expert groups do not fit: got num_expert_group 5"),
    ],
)
def test_a_value_out_of_range_is_refused(k3: Json, key: str, value: int, words: str):
    assert words in refused(with_text(k3, **{key: value}))


@pytest.mark.parametrize("bound", [0.0, 1.0, -5.5])
def test_a_gate_bound_beyond_the_safe_range_is_refused(k3: Json, bound: float):
    assert f"gate_lower_bound is out of range: got {bound}" in refused(
        with_linear(k3, gate_lower_bound=bound)
    )


# Quantisation


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"quant_method": "fp8"}, "quant_method is not implemented: got 'fp8'"),
        (
            {"format": "nvfp4-pack-quantized"},
            "format is not implemented: got 'nvfp4-pack-quantized'",
        ),
        (
            {"num_bits": 8},
            "config_groups.group_0.weights.num_bits is not implemented: got 8; expected 4",
        ),
        (
            {"group_size": 16},
            "config_groups.group_0.weights.group_size is not implemented: got 16; expected 32",
        ),
        (
            {"input_activations": {"num_bits": 8}},
            "config_groups.group_0.input_activations is not implemented",
        ),
        ({"config_groups": {}}, "config_groups is empty"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_quantisation_is_refused(k3: Json, change: Json, words: str):
    quantization = k3["text_config"]["quantization_config"]
    group = quantization["config_groups"]["group_0"]
    for key, value in change.items():
        place = (
            group["weights"] if key in group["weights"] else group if key in group else quantization
        )
        place[key] = value
    assert f"text_config.quantization_config.{words}" in refused(k3)


# Section 3.4, trap 2 and section 9, trap 29
def test_the_ignore_list_of_the_quantisation_is_not_used(k3: Json):
    k3["text_config"]["quantization_config"]["ignore"] = []
    assert ModelConfig.from_hf(k3).expert_format == "mxfp4"


def test_quantisation_may_stand_at_the_top(k3: Json):
    k3["quantization_config"] = k3["text_config"].pop("quantization_config")
    assert ModelConfig.from_hf(k3).expert_format == "mxfp4"


# The whole file


@pytest.mark.parametrize("config", [{}, {"model_type": "llama"}, {"model_type": None}])
def test_another_model_is_refused(config: Json):
    assert "model_type is unknown" in refused(config)


# Section 3.4, trap 4
def test_k3_without_its_nested_configuration_is_refused(k3: Json):
    del k3["text_config"]
    assert "text_config is missing" in refused(k3)


def test_all_problems_are_reported_at_once(k3: Json):
    config = with_text(k3, hidden_act="gelu", vocab_size=..., sliding_window=1)
    with pytest.raises(ConfigError) as caught:
        ModelConfig.from_hf(config)
    assert len(caught.value.problems) == 3


# What differs in Kimi-Linear


def test_kimi_linear_needs_no_key_that_only_k3_has(kimi_linear: Json):
    for key in ("mla_use_output_gate", "latent_moe_use_norm", "attn_res_block_size"):
        assert key not in kimi_linear
    assert ModelConfig.from_hf(kimi_linear).family == "kimi_linear"


def test_kimi_linear_takes_its_length_under_either_name(kimi_linear: Json):
    kimi_linear["max_position_embeddings"] = kimi_linear.pop("model_max_length") // 2
    assert ModelConfig.from_hf(kimi_linear).max_position_tokens == 2048


def test_kimi_linear_uses_swiglu(kimi_linear: Json):
    cfg = ModelConfig.from_hf(kimi_linear)
    assert cfg.situ_beta is None


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"quantization_config": "mxfp4"}, "quantization_config has the wrong type"),
        ({"activation_situ_beta": "4"}, "activation_situ_beta has the wrong type"),
        ({"activation_situ_linear_beta": [25]}, "activation_situ_linear_beta has the wrong type"),
        ({"activation_situ_linear_beta": 0.0}, "situ_linear_beta is out of range"),
        ({"num_hidden_layers": 10**30}, "do not partition"),
        ({"rms_norm_eps": 0.0}, "rms_norm_eps is out of range"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is out of range"),
        ({"eos_token_id": "2"}, "eos_token_id has the wrong type"),
        ({"eos_token_id": [157, 160]}, r"outside the vocabulary: got \[160\]"),
        ({"linear_attn_config": {"kda_layers": [1, 2, "4"]}}, "kda_layers has the wrong type"),
    ],
)
def test_malformed_values_are_named(overrides: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        ModelConfig.from_hf(tiny_json(packed=False, **overrides))
