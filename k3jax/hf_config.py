"""Reading of a released `config.json` into `ModelConfig` (k3-model.md sections 1 and 3.4)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3jax.config import MXFP4_GROUP, ConfigError

# Keys that no implementation reads for this text model, or that only describe the file.
_IGNORED = frozenset(
    """
    architectures auto_map dtype torch_dtype transformers_version initializer_range
    use_cache head_dim rope_theta ignore_index image_placeholder media_placeholder_token_id
    vision_config bos_token_id eos_token_id pad_token_id model_type num_nextn_predict_layers
    _name_or_path attention_dropout pretraining_tp return_dict output_attentions
    output_hidden_states use_return_dict chunk_size_feed_forward is_encoder_decoder
    is_decoder cross_attention_hidden_size add_cross_attention tie_encoder_decoder id2label
    label2id problem_type name_or_path aux_loss_alpha seq_aux
    """.split()  # noqa: SIM905
)
_USED = frozenset(
    """
    vocab_size hidden_size num_hidden_layers num_attention_heads num_key_value_heads
    intermediate_size first_k_dense_replace moe_layer_freq hidden_act activation_situ_beta
    activation_situ_linear_beta rms_norm_eps max_position_embeddings model_max_length
    mla_use_nope mla_use_output_gate q_lora_rank kv_lora_rank qk_nope_head_dim
    qk_rope_head_dim v_head_dim num_experts num_experts_per_token num_shared_experts
    moe_intermediate_size routed_expert_hidden_size latent_moe_use_norm
    moe_router_activation_func topk_method use_grouped_topk num_expert_group topk_group
    moe_renormalize routed_scaling_factor attn_res_block_size tie_word_embeddings
    linear_attn_config quantization_config rope_scaling
    """.split()  # noqa: SIM905
)
_USED_LINEAR = frozenset(
    """
    num_heads head_dim short_conv_kernel_size use_full_rank_gate gate_lower_bound
    full_attn_layers kda_layers
    """.split()  # noqa: SIM905
)
# The released class gives these defaults that build another model without an error, so K3 must
# spell them out.
_K3_REQUIRED = {
    "mla_use_output_gate": True,
    "latent_moe_use_norm": True,
    "attn_res_block_size": None,
    "routed_expert_hidden_size": None,
    "activation_situ_beta": None,
    "activation_situ_linear_beta": None,
}
# Only these values are implemented; a missing key means the first.
_FIXED: Mapping[str, tuple[Any, ...]] = {
    "mla_use_nope": (True,),
    "moe_layer_freq": (1,),
    "moe_router_activation_func": ("sigmoid",),
    "topk_method": ("noaux_tc",),
    "tie_word_embeddings": (False,),
    "rope_scaling": (None,),
}
_FIXED_REQUIRED = ("mla_use_nope", "moe_router_activation_func")


class Reader:
    """Takes keys out of one mapping and remembers what was wrong."""

    def __init__(self, mapping: Mapping[str, Any], where: str, problems: list[str]):
        self._mapping, self._where, self._problems = mapping, where, problems

    def get(self, key: str, kind: type | tuple[type, ...], default: Any = ...) -> Any:
        value = self._mapping.get(key, default)
        if value is ...:
            self._problems.append(f"{self._where}{key} is missing: expected {_kind_name(kind)}")
            return None
        if value is default:
            return value
        if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
            self._problems.append(
                f"{self._where}{key} has the wrong type: got {value!r}; expected {_kind_name(kind)}"
            )
            return None
        return value

    def get_ints(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers."""
        values = self.get(key, list) or []
        if not all(type(value) is int for value in values):
            self._problems.append(
                f"{self._where}{key} has the wrong type: got {values!r}; expected whole numbers"
            )
            return ()
        return tuple(values)

    def expect(self, key: str, value: Any) -> None:
        """Refuse any other value of `key`; a missing one counts as null."""
        if self._mapping.get(key) != value:
            self._problems.append(
                f"{self._where}{key} is not implemented: got {self._mapping.get(key)!r}; expected "
                f"{value!r}"
            )


def _kind_name(kind: type | tuple[type, ...]) -> str:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return " or ".join("null" if k is type(None) else k.__name__ for k in kinds)


def parse(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `ModelConfig`.

    Raises:
      ConfigError: with one line for each key that is missing, unknown, mistyped or not implemented.
    """
    problems: list[str] = []
    family = config.get("model_type")
    if family == "kimi_k3":
        text = config.get("text_config")
        if not isinstance(text, Mapping):
            raise ConfigError(
                f"text_config is missing: got {text!r}; expected the nested text model's config"
            )
        if text.get("model_type") != "kimi_linear":
            problems.append(
                f"text_config.model_type is unknown: got {text.get('model_type')!r}; expected "
                "'kimi_linear'"
            )
        refuse_unknown(
            config,
            _IGNORED | {"text_config", "tie_word_embeddings", "quantization_config"},
            "",
            problems,
        )
        where = "text_config."
    elif family == "kimi_linear":
        text, where = config, ""
    else:
        raise ConfigError(
            f"model_type is unknown: got {family!r}; expected 'kimi_k3' or 'kimi_linear'"
        )
    refuse_unknown(text, _IGNORED | _USED, where, problems)
    _check_fixed(text, where, problems)
    if family == "kimi_k3":
        _check_k3(text, where, problems)
    fields = _fields(config, text, where, problems)
    if problems:
        raise ConfigError(problems)
    fields["family"] = family
    return fields


def refuse_unknown(
    mapping: Mapping[str, Any], known: frozenset[str], where: str, problems: list[str]
) -> None:
    """Report every key that nobody reads."""
    for key in sorted(set(mapping) - known):
        problems.append(
            f"{where}{key} is unknown: got {mapping[key]!r}; it may change the model's mathematics "
            "and is not implemented"
        )


def _check_fixed(text: Mapping[str, Any], where: str, problems: list[str]) -> None:
    for key, allowed in _FIXED.items():
        if key not in text:
            if key in _FIXED_REQUIRED:
                problems.append(f"{where}{key} is missing: expected {allowed[0]!r}")
        elif text[key] not in allowed:
            problems.append(
                f"{where}{key} is not implemented: got {text[key]!r}; expected {allowed[0]!r}"
            )
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if kv_heads is not None and kv_heads != heads:
        problems.append(
            f"{where}num_key_value_heads is not implemented: got {kv_heads}; expected "
            f"num_attention_heads {heads}"
        )


def _check_k3(text: Mapping[str, Any], where: str, problems: list[str]) -> None:
    for key, value in _K3_REQUIRED.items():
        if key not in text:
            problems.append(f"{where}{key} is missing: a kimi_k3 config must state it")
        elif value is not None and text[key] != value:
            problems.append(
                f"{where}{key} is not implemented: got {text[key]!r}; expected {value!r}"
            )
    linear = text.get("linear_attn_config")
    if isinstance(linear, Mapping):
        if linear.get("use_full_rank_gate") is not True:
            problems.append(
                f"{where}linear_attn_config.use_full_rank_gate is not implemented: got "
                f"{linear.get('use_full_rank_gate')!r}; a kimi_k3 config must state true"
            )
        if linear.get("gate_lower_bound") is None:
            problems.append(
                f"{where}linear_attn_config.gate_lower_bound is missing: a kimi_k3 config must "
                "state it"
            )


def _fields(
    config: Mapping[str, Any], text: Mapping[str, Any], where: str, problems: list[str]
) -> dict[str, Any]:
    read = Reader(text, where, problems)
    linear_where = f"{where}linear_attn_config."
    linear = read.get("linear_attn_config", Mapping) or {}
    refuse_unknown(linear, _USED_LINEAR, linear_where, problems)
    read_linear = Reader(linear, linear_where, problems)
    number = (int, float)
    hidden = read.get("hidden_size", int)
    latent = read.get("routed_expert_hidden_size", (int, type(None)), None)
    max_position = text.get("max_position_embeddings", text.get("model_max_length"))
    if not isinstance(max_position, int):
        problems.append(
            f"{where}max_position_embeddings is missing: got {max_position!r}; expected int"
        )
    situ_beta, situ_linear_beta = _activation(read, where, problems)
    has_latent_norm = bool(read.get("latent_moe_use_norm", bool, False))
    return {
        "vocab_size": read.get("vocab_size", int),
        "hidden_size": hidden,
        "num_layers": read.get("num_hidden_layers", int),
        "intermediate_size": read.get("intermediate_size", int),
        "num_dense_layers": read.get("first_k_dense_replace", int),
        "max_position_tokens": max_position,
        "rms_norm_eps": read.get("rms_norm_eps", number),
        "situ_beta": situ_beta,
        "situ_linear_beta": situ_linear_beta,
        "kda_layers": _layer_list(read_linear, "kda_layers"),
        "kda_num_heads": read_linear.get("num_heads", int),
        "kda_head_dim": read_linear.get("head_dim", int),
        "conv_width": read_linear.get("short_conv_kernel_size", int),
        "kda_full_rank_gate": bool(read_linear.get("use_full_rank_gate", bool, False)),
        "gate_lower_bound": read_linear.get("gate_lower_bound", (int, float, type(None)), None),
        "mla_layers": _layer_list(read_linear, "full_attn_layers"),
        "mla_num_heads": read.get("num_attention_heads", int),
        "q_lora_rank": read.get("q_lora_rank", (int, type(None)), None),
        "kv_lora_rank": read.get("kv_lora_rank", int),
        "qk_nope_head_dim": read.get("qk_nope_head_dim", int),
        "qk_rope_head_dim": read.get("qk_rope_head_dim", int),
        "v_head_dim": read.get("v_head_dim", int),
        "mla_output_gate": bool(read.get("mla_use_output_gate", bool, False)),
        "num_experts": read.get("num_experts", int),
        "experts_per_token": read.get("num_experts_per_token", int),
        "num_shared_experts": read.get("num_shared_experts", int),
        "moe_intermediate_size": read.get("moe_intermediate_size", int),
        "latent_size": hidden if latent is None else latent,
        "has_latent_moe": latent is not None,
        "has_latent_norm": has_latent_norm and latent is not None,
        "num_expert_groups": read.get("num_expert_group", int, 1),
        "topk_groups": read.get("topk_group", int, 1),
        "renormalize": read.get("moe_renormalize", bool),
        "routed_scaling_factor": read.get("routed_scaling_factor", number),
        "expert_format": _expert_format(config, text, where, problems),
        "attn_res_block_layers": read.get("attn_res_block_size", (int, type(None)), None),
        "bos_token_id": _token_id(config, text, "bos_token_id", problems),
        "eos_token_ids": _token_ids(config, text, "eos_token_id", problems),
        "pad_token_id": _token_id(config, text, "pad_token_id", problems),
    }


def _activation(read: Reader, where: str, problems: list[str]) -> tuple[Any, Any]:
    """SiTU constants, or (None, None) for SwiGLU."""
    act = read.get("hidden_act", str)
    if act == "situ":
        beta = read.get("activation_situ_beta", (int, float, type(None)), None)
        linear_beta = read.get("activation_situ_linear_beta", (int, float, type(None)), None)
        return 1.0 if beta is None else beta, linear_beta
    if act not in ("silu", None):
        problems.append(
            f"{where}hidden_act is not implemented: got {act!r}; expected 'situ' or 'silu'"
        )
    return None, None


def _layer_list(read: Reader, key: str) -> tuple[int, ...]:
    """A 1-based layer list of the file as 0-based indices."""
    return tuple(layer - 1 for layer in read.get_ints(key))


def _token_ids(
    config: Mapping[str, Any], text: Mapping[str, Any], key: str, problems: list[str]
) -> tuple[int, ...]:
    """Token ids under `key`: the whole model's, else the text model's; none if absent or null."""
    value = config.get(key, text.get(key))
    if value is None:
        return ()
    wrapped = {key: value if isinstance(value, list) else [value]}
    return Reader(wrapped, "", problems).get_ints(key)


def _token_id(
    config: Mapping[str, Any], text: Mapping[str, Any], key: str, problems: list[str]
) -> int | None:
    ids = _token_ids(config, text, key, problems)
    return ids[0] if ids else None


def _expert_format(
    config: Mapping[str, Any], text: Mapping[str, Any], where: str, problems: list[str]
) -> str:
    """`mxfp4` when the file's quantisation is the released one.

    Its `ignore` list is not trusted, since it omits three bf16 tensors: the loader decides by the
    presence of `weight_packed` (k3-model.md section 3.4).
    """
    holder, prefix = (text, where) if "quantization_config" in text else (config, "")
    quant = Reader(holder, prefix, problems).get("quantization_config", (Mapping, type(None)), None)
    if quant is None:
        return "dense"
    prefix += "quantization_config."
    read = Reader(quant, prefix, problems)
    read.expect("quant_method", "compressed-tensors")
    read.expect("format", "mxfp4-pack-quantized")
    groups = read.get("config_groups", Mapping)
    if groups is not None and not groups:
        problems.append(f"{prefix}config_groups is empty: expected at least one group")
    for name, group in (groups or {}).items():
        inside = f"{prefix}config_groups.{name}."
        read_group = Reader(group if isinstance(group, Mapping) else {}, inside, problems)
        read_group.expect("input_activations", None)
        weights = read_group.get("weights", Mapping) or {}
        read_weights = Reader(weights, f"{inside}weights.", problems)
        read_weights.expect("num_bits", 4)
        read_weights.expect("group_size", MXFP4_GROUP)
    return "mxfp4"
