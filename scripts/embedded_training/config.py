"""What is trained: a small K3 and its draft."""

from __future__ import annotations

from typing import Any

from k3jax.weights.embedded import embedded_config

TAP_LAYERS = (2, 5, 8)
NUM_DRAFTS = 7


def model_config() -> dict[str, Any]:
    """`config.json` of the model: everything K3 has, in at most 12 MB."""
    config = embedded_config()
    sizes = {
        "hidden_size": 192,
        "num_hidden_layers": 9,
        "intermediate_size": 512,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_experts": 24,
        "num_shared_experts": 1,
        "moe_intermediate_size": 128,
        "routed_expert_hidden_size": 96,
        "linear_attn_config": config["text_config"]["linear_attn_config"]
        | {"head_dim": 32, "kda_layers": [1, 2, 3, 5, 6, 7], "full_attn_layers": [4, 8, 9]},
    }
    return config | {"text_config": config["text_config"] | sizes}


def draft_config() -> dict[str, Any]:
    """`config.json` of the draft, in the released MLA format."""
    text = model_config()["text_config"]
    same = ("vocab_size", "hidden_size", "kv_lora_rank", "q_lora_rank", "rms_norm_eps")
    return {
        "architectures": ["K3DSparkModel"],
        "model_type": "k3_dspark",
        "dtype": "bfloat16",
        **{name: text[name] for name in same},
        "num_hidden_layers": 4,
        "intermediate_size": 512,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "mla_use_nope": False,
        "mla_use_output_gate": False,
        "draft_vocab_size": text["vocab_size"],
        "max_position_embeddings": text["max_position_embeddings"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "num_target_layers": len(TAP_LAYERS),
        "target_hidden_size": text["hidden_size"],
        "target_num_hidden_layers": text["num_hidden_layers"],
        "target_layer_ids": list(TAP_LAYERS),
        "tap_mode": "prefix",
        "block_size": NUM_DRAFTS,
        "mask_token_id": text["vocab_size"] - 3,
        "markov_rank": 32,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
