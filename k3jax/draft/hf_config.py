"""Reading of a released draft's `config.json` into `DraftConfig` (k3-model.md section 6).

Two formats: `k3_dspark`, whose layers have latent attention, and the Speculators format with a
nested `transformer_layer_config` and grouped-query attention. Neither says all that matters: what a
key does not give follows from how the released file of that format was trained, and three keys of
our own may say it instead: `tap_mode`, `causal_block` and `context_window`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from k3jax.config import MAX_DRAFTS, ConfigError
from k3jax.draft.config import GqaShape, MlaShape, Rope, Yarn, mla_softmax_scale
from k3jax.hf_config import Reader, refuse_unknown

_OURS = frozenset({"tap_mode", "causal_block", "context_window"})
_IGNORED = frozenset(
    """
    architectures auto_map dtype torch_dtype transformers_version initializer_range use_cache
    bos_token_id eos_token_id pad_token_id model_type _name_or_path attention_dropout
    max_position_embeddings num_anchors max_anchors
    """.split()  # noqa: SIM905
)
_MLA_USED = frozenset(
    """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads
    q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim mla_use_nope
    mla_use_output_gate vocab_size draft_vocab_size rms_norm_eps rope_theta rope_parameters
    num_target_layers target_hidden_size target_num_hidden_layers target_layer_ids mask_token_id
    markov_rank markov_head_type enable_confidence_head confidence_head_with_markov hidden_act
    block_size
    """.split()  # noqa: SIM905
)
_SPECULATORS_USED = frozenset(
    """
    speculators_model_type speculators_version speculators_config transformer_layer_config
    block_size aux_hidden_state_layer_ids mask_token_id draft_vocab_size target_hidden_size
    markov_rank markov_head_type enable_confidence_head confidence_head_with_markov
    sample_from_anchor tie_word_embeddings
    """.split()  # noqa: SIM905
)
_LAYER_USED = frozenset(
    """
    hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim
    vocab_size rms_norm_eps rope_theta rope_parameters rope_scaling sliding_window layer_types
    use_sliding_window max_window_layers hidden_act attention_bias tie_word_embeddings
    """.split()  # noqa: SIM905
)
_NUMBER = (int, float)


def parse(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments of `DraftConfig`.

    Raises:
      ConfigError: with one line for each key that is missing, unknown, mistyped or not implemented.
    """
    problems: list[str] = []
    if config.get("model_type") == "k3_dspark":
        fields = _mla(config, problems)
    elif config.get("speculators_model_type") == "dspark":
        fields = _gqa(config, problems)
    else:
        got = {key: config.get(key) for key in ("model_type", "speculators_model_type")}
        raise ConfigError(
            f"format of the draft is unknown: got {got}; expected model_type 'k3_dspark' or "
            "speculators_model_type 'dspark'"
        )
    if problems:
        raise ConfigError(problems)
    return fields


def _mla(config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    refuse_unknown(config, _IGNORED | _MLA_USED | _OURS, "", problems)
    read = Reader(config, "", problems)
    for key in ("mla_use_nope", "mla_use_output_gate"):
        read.expect(key, value=False)
    names = (
        "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"
    )  # fmt: skip
    shape = MlaShape(**{name: read.get(name, int) or 0 for name in names})
    heads, kv_heads = read.get("num_attention_heads", int), read.get("num_key_value_heads", int)
    if heads != kv_heads:
        problems.append(f"num_key_value_heads is not implemented: got {kv_heads}; expected {heads}")
    parameters = read.get("rope_parameters", Mapping, {})
    rope_read = Reader(parameters, "rope_parameters.", problems)
    theta = rope_read.get("rope_theta", _NUMBER, None) or read.get("rope_theta", _NUMBER)
    yarn, mscale = _yarn(rope_read)
    taps = read.get_ints("target_layer_ids")
    if len(taps) != read.get("num_target_layers", int, len(taps)):
        problems.append(
            f"target_layer_ids are wrong: got {list(taps)}; expected num_target_layers = "
            f"{config.get('num_target_layers')} of them"
        )
    return _shared(read, problems) | {
        "vocab_size": read.get("vocab_size", int),
        "hidden_size": read.get("hidden_size", int),
        "num_layers": read.get("num_hidden_layers", int),
        "intermediate_size": read.get("intermediate_size", int),
        "num_heads": heads,
        "attention": shape,
        "softmax_scale": mla_softmax_scale(shape, yarn.factor if yarn else 1.0, mscale)
        if shape.qk_nope_head_dim + shape.qk_rope_head_dim
        else 0.0,
        "rms_norm_eps": read.get("rms_norm_eps", _NUMBER),
        "rope": Rope(
            dim=shape.qk_rope_head_dim, theta=float(theta or 0), is_interleaved=True, yarn=yarn
        ),
        "target_hidden_size": read.get("target_hidden_size", int),
        "tap_layers": taps,
        "num_drafts": min(read.get("block_size", int, MAX_DRAFTS) or 0, MAX_DRAFTS),
        "is_causal": read.get("causal_block", bool, False),
        "window": read.get("context_window", (int, type(None)), None),
        "has_own_vocab": False,
    }


def _gqa(config: Mapping[str, Any], problems: list[str]) -> dict[str, Any]:
    refuse_unknown(config, _IGNORED | _SPECULATORS_USED | _OURS, "", problems)
    read = Reader(config, "", problems)
    where = "transformer_layer_config."
    layer = read.get("transformer_layer_config", Mapping) or {}
    refuse_unknown(layer, _IGNORED | _LAYER_USED, where, problems)
    read_layer = Reader(layer, where, problems)
    for key in ("attention_bias", "rope_scaling"):
        if layer.get(key):
            problems.append(f"{where}{key} is not implemented: got {layer[key]!r}; expected none")
    if config.get("sample_from_anchor") is False:
        problems.append("sample_from_anchor is not implemented: got False; expected true")
    parameters = read_layer.get("rope_parameters", Mapping, {})
    rope_read = Reader(parameters, f"{where}rope_parameters.", problems)
    if parameters.get("rope_type", "default") != "default":
        rope_read.expect("rope_type", "default")
    theta = rope_read.get("rope_theta", _NUMBER, None) or read_layer.get(
        "rope_theta", _NUMBER, 10000.0
    )
    head_dim = read_layer.get("head_dim", int)
    vocab = read_layer.get("vocab_size", int)
    if read.get("draft_vocab_size", int, vocab) != vocab:
        problems.append(
            f"draft_vocab_size is not implemented: got {config['draft_vocab_size']}; expected the "
            f"whole vocabulary, {vocab}"
        )
    hidden = read_layer.get("hidden_size", int)
    window = read_layer.get("sliding_window", (int, type(None)), None)
    # The file counts layers that are done: its 24 is the output of layer 23.
    taps = tuple(layer - 1 for layer in read.get_ints("aux_hidden_state_layer_ids"))
    return _shared(read, problems) | {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "num_layers": read_layer.get("num_hidden_layers", int),
        "intermediate_size": read_layer.get("intermediate_size", int),
        "num_heads": read_layer.get("num_attention_heads", int),
        "attention": GqaShape(
            num_kv_heads=read_layer.get("num_key_value_heads", int) or 1, head_dim=head_dim or 0
        ),
        "softmax_scale": head_dim**-0.5 if head_dim else 0.0,
        "rms_norm_eps": read_layer.get("rms_norm_eps", _NUMBER),
        "rope": Rope(dim=head_dim or 0, theta=float(theta), is_interleaved=False),
        "target_hidden_size": read.get("target_hidden_size", (int, type(None)), None) or hidden,
        "tap_layers": taps,
        "num_drafts": min(read.get("block_size", int) or 0, MAX_DRAFTS),
        "is_causal": read.get("causal_block", bool, True),
        "window": read.get("context_window", (int, type(None)), window),
        "has_own_vocab": True,
    }


def _shared(read: Reader, problems: list[str]) -> dict[str, Any]:
    """What both formats have on their top level."""
    read.expect("markov_head_type", "vanilla")
    has_confidence = read.get("enable_confidence_head", bool, False)
    if has_confidence:
        read.expect("confidence_head_with_markov", value=True)
    mode = read.get("tap_mode", str, "prefix")
    if mode not in ("prefix", "mixture"):
        problems.append(f"tap_mode is unknown: got {mode!r}; expected 'prefix' or 'mixture'")
    return {
        "tap_mode": mode,
        "mask_token_id": read.get("mask_token_id", int),
        "markov_rank": read.get("markov_rank", int),
        "has_confidence": has_confidence,
    }


def _yarn(read: Reader) -> tuple[Yarn | None, float]:
    """YaRN and its `mscale_all_dim`; none for the default type."""
    kind = read.get("rope_type", str, "default")
    if kind == "default":
        return None, 0.0
    read.expect("rope_type", "yarn")
    mscale, all_dim = (read.get(key, _NUMBER, 1.0) for key in ("mscale", "mscale_all_dim"))
    if mscale != all_dim:
        # Else cosine and sine would have an amplitude of their own.
        read.expect("mscale", all_dim)
    yarn = Yarn(
        factor=float(read.get("factor", _NUMBER) or 1),
        original_tokens=read.get("original_max_position_embeddings", int) or 1,
        beta_fast=float(read.get("beta_fast", _NUMBER, 32) or 32),
        beta_slow=float(read.get("beta_slow", _NUMBER, 1) or 1),
    )
    return yarn, float(all_dim or 0)
