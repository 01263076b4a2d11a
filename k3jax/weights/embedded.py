"""The embedded model: a small K3-shaped checkpoint of our own, in the released layout.

It is generated into a cache folder at first use, the same everywhere, and has what K3 has: MXFP4
experts, a dense first layer, KDA and MLA layers with an adjacent MLA pair at the end, two
attention-residual blocks, `A_log` with its zero padding, a byte tokenizer with the reserved ids.
Heads, experts, widths and vocabulary divide by 8.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import BFloat16

from k3jax.config import ModelConfig
from k3jax.weights import synthetic
from k3jax.weights.names import released_name

NUM_RANKS = 256
NUM_RESERVED = 256
SEED = 20260303

# Raised whenever the generator changes what it writes.
_VERSION = 2
_STAMP = "embedded.json"

# Offset behind the ranks -> control token (k3-model.md section 8).
CONTROL_TOKENS: Mapping[int, str] = {
    0: "[BOS]",
    1: "[EOS]",
    2: "<|end_of_msg|>",
    3: "<|open|>",
    4: "<|close|>",
    5: "<|sep|>",
    6: "[start_header_id]",
    7: "[end_header_id]",
    9: "[EOT]",
    18: "<|media_begin|>",
    19: "<|media_content|>",
    20: "<|media_end|>",
    21: "<|media_pad|>",
    254: "[UNK]",
    255: "[PAD]",
}


def ensure_embedded(cache_dir: Path) -> Path:
    """Return the folder of the embedded model; generate it if it is missing, damaged or old.

    Several processes may do so at once: one generates, the others wait for it. An interrupted start
    leaves nothing that would be taken for a model.

    Args:
      cache_dir: created if it does not exist.
    """
    folder = cache_dir / f"k3jax-embedded-v{_VERSION}"
    if _is_intact(folder):
        return folder
    cache_dir.mkdir(parents=True, exist_ok=True)
    with _locked(cache_dir):
        if not _is_intact(folder):
            partial = cache_dir / f".{folder.name}.partial"
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            write_embedded(partial)
            shutil.rmtree(folder, ignore_errors=True)
            partial.rename(folder)
    return folder


def write_embedded(folder: Path) -> None:
    """Write the model, its tokenizer and the stamp that lists every file."""
    config = embedded_config()
    cfg = ModelConfig.from_hf(config)
    tensors = dict(synthetic.random_tensors(cfg, seed=SEED))
    head = released_name("lm_head.weight", cfg)
    tensors[head] = _readable_head(tensors[head])
    synthetic.write_tensors(folder, config, tensors)
    write_tokenizer(folder)
    files = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    _write_json(folder / _STAMP, {"version": _VERSION, "config": _fingerprint(), "files": files})


def embedded_config() -> dict[str, Any]:
    """The model's `config.json`."""
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
        "hidden_size": 96,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "intermediate_size": 192,
        "first_k_dense_replace": 1,
        "moe_layer_freq": 1,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "mla_use_nope": True,
        "mla_use_output_gate": True,
        "q_lora_rank": 40,
        "kv_lora_rank": 32,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 24,
        "num_experts": 16,
        "num_experts_per_token": 4,
        "num_shared_experts": 2,
        "moe_intermediate_size": 64,
        "routed_expert_hidden_size": 64,
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
            "head_dim": 16,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3, 5, 6],
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


def _readable_head(head_VH: BFloat16[np.ndarray, "V H"]) -> BFloat16[np.ndarray, "V H"]:
    """Favour printable characters and the end of the message, so that one can read and stop.

    The factors are powers of two, hence exact.
    """
    favoured = [*range(ord(" "), ord("~") + 1), ord("\n"), NUM_RANKS + 2]
    gain_V1 = np.full((head_VH.shape[0], 1), 0.25, head_VH.dtype)
    gain_V1[favoured] = 2
    return head_VH * gain_V1


def write_tokenizer(folder: Path) -> None:
    """Byte ranks in tiktoken's format, and the named control tokens behind them."""
    lines = [f"{base64.b64encode(bytes([rank])).decode()} {rank}\n" for rank in range(NUM_RANKS)]
    (folder / "tiktoken.model").write_text("".join(lines))
    added = {
        str(NUM_RANKS + offset): {
            "content": content,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for offset, content in CONTROL_TOKENS.items()
    }
    _write_json(
        folder / "tokenizer_config.json",
        {
            "added_tokens_decoder": added,
            "bos_token": CONTROL_TOKENS[0],
            "eos_token": CONTROL_TOKENS[2],
            "unk_token": CONTROL_TOKENS[254],
            "pad_token": CONTROL_TOKENS[255],
            "clean_up_tokenization_spaces": False,
            "model_max_length": embedded_config()["text_config"]["max_position_embeddings"],
            "tokenizer_class": "TikTokenTokenizer",
        },
    )
    _write_json(
        folder / "generation_config.json",
        {
            "bos_token_id": NUM_RANKS,
            "eos_token_id": [NUM_RANKS + 2, NUM_RANKS + 1],
            "pad_token_id": NUM_RANKS + 255,
            "do_sample": True,
            "temperature": 1.0,
            "top_p": 1.0,
        },
    )


def _fingerprint() -> str:
    """Of what the model is made from: a change regenerates it, even if the version is forgotten."""
    text = json.dumps([embedded_config(), SEED, dict(CONTROL_TOKENS)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _is_intact(folder: Path) -> bool:
    try:
        stamp = json.loads((folder / _STAMP).read_bytes())
        sizes = {name: (folder / name).stat().st_size for name in stamp["files"]}
        return sizes == stamp["files"] and stamp["config"] == _fingerprint()
    except (OSError, ValueError, KeyError, TypeError):
        return False


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold a lock on a folder; the system gives it up when the process ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _write_json(file: Path, value: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(value, indent=2) + "\n")
