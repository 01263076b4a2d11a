"""What is trained: a small K3 and its draft."""

from __future__ import annotations

from typing import Any

from embedded_training.tokenizer import NUM_RANKS, NUM_RESERVED
from k3jax.weights.synthetic import mxfp4_quantization_config

TAP_LAYERS = (2, 5, 8)
NUM_DRAFTS = 7


def model_config() -> dict[str, Any]:
    """`config.json` of the model: everything K3 has, in at most 12 MB."""
    ids = {
        "bos_token_id": NUM_RANKS,
        "eos_token_id": NUM_RANKS + 2,
        "pad_token_id": NUM_RANKS + 255,
    }
    text = ids | {
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "dtype": "bfloat16",
        "vocab_size": NUM_RANKS + NUM_RESERVED,
        "hidden_size": 192,
        "num_hidden_layers": 9,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 512,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "num_experts": 24,
        "num_experts_per_token": 4,
        "num_shared_experts": 1,
        "moe_intermediate_size": 128,
        "routed_expert_hidden_size": 96,
        "latent_moe_use_norm": True,
        "moe_router_activation_func": "sigmoid",
        "topk_method": "noaux_tc",
        "use_grouped_topk": True,
        "num_expert_group": 1,
        "topk_group": 1,
        "moe_renormalize": True,
        "routed_scaling_factor": 1.0,
        "attn_res_block_size": 3,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": False,
        "linear_attn_config": {
            "num_heads": 8,
            "head_dim": 32,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "full_attn_layers": [4, 8, 9],
        },
        "quantization_config": mxfp4_quantization_config(),
    }
    return ids | {
        "architectures": ["KimiK3ForConditionalGeneration"],
        "model_type": "kimi_k3",
        "dtype": "bfloat16",
        "media_placeholder_token_id": NUM_RANKS + 21,
        "tie_word_embeddings": False,
        "text_config": text,
    }


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
