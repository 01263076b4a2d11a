"""The parameters, described once: shapes, dtypes, logical axes, checkpoint tensors.

`describe(cfg)` is the only description. From it follow the abstract tree, the shardings, the Flax
modules' declarations, random weights for tests, and the targets of the loader. Layers of one kind
are stacked on a leading axis `Z`, so that a step has few arguments. Matrices keep the checkpoint's
`[out, in]` orientation.

Letters: `H` hidden, `ND` heads x head dim, `F` feed-forward width, `L` latent, `E` experts, `C` MLA
latent, `Q` MLA query rank, `X` convolution taps, `V` vocabulary.
"""

from __future__ import annotations

from typing import Literal

from k3jax.config import MXFP4_GROUP, ModelConfig
from k3jax.draft.config import DraftConfig
from k3jax.draft.params import draft_tree
from k3jax.param_spec import ParamSpec, ParamTree, Source, glu, matrix, vector

AnyConfig = ModelConfig | DraftConfig


def describe(cfg: AnyConfig) -> ParamTree:
    """The parameter tree of a model: module name -> parameter name -> description."""
    if isinstance(cfg, DraftConfig):
        return draft_tree(cfg)
    every_layer = tuple(range(cfg.num_layers))
    tree = {"top": _top(cfg), "norms": _norms(cfg, every_layer)}
    if cfg.kda_layers:
        tree["kda"] = _kda(cfg)
    if cfg.mla_layers:
        tree["mla"] = _mla(cfg)
    if cfg.dense_layers:
        tree["dense"] = glu(
            cfg.dense_layers,
            "mlp",
            cfg.hidden_size,
            cfg.intermediate_size,
            prefix="layers.{layer}.",
        )
    if cfg.moe_layers:
        tree["moe"] = _moe(cfg)
    return tree


def num_parameters(cfg: ModelConfig) -> int:
    """Parameters as the publisher counts them: an MXFP4 code is one, a scale none, stored padding
    included.

    The released `A_log` holds 128 entries for 96 heads; `a_log_stored` adds the difference.
    """
    total = 0
    for module in describe(cfg).values():
        for spec in module.values():
            size = 1
            for dim in spec.shape:
                size *= dim
            if spec.dtype == "uint8":
                is_scale = any(source.name.endswith("weight_scale") for source in spec.sources)
                size = 0 if is_scale else 2 * size
            total += size
    return total + len(cfg.kda_layers) * (a_log_stored(cfg) - cfg.kda_num_heads)


def a_log_stored(cfg: ModelConfig) -> int:
    """Entries of `A_log` in a released K3 file: the head dim, zero-padded beyond the heads (section
    3.1)."""
    return (
        max(cfg.kda_num_heads, cfg.kda_head_dim) if cfg.family == "kimi_k3" else cfg.kda_num_heads
    )


def _top(cfg: ModelConfig) -> dict[str, ParamSpec]:
    vocab = (cfg.vocab_size, cfg.hidden_size)
    params = {
        "embed": ParamSpec(vocab, ("vocab", None), (Source("embed_tokens.weight"),)),
        "lm_head": ParamSpec(vocab, ("vocab", None), (Source("lm_head.weight"),)),
        "norm": ParamSpec((cfg.hidden_size,), (None,), (Source("norm.weight"),), init="ones"),
    }
    if cfg.attn_res_block_layers is not None:
        width = (cfg.hidden_size,)
        params["output_res_norm"] = ParamSpec(
            width, (None,), (Source("output_attn_res_norm.weight"),), init="ones"
        )
        params["output_res_proj"] = ParamSpec(
            width, (None,), (Source("output_attn_res_proj.weight", convert="squeeze_row"),)
        )
    return params


def _norms(cfg: ModelConfig, layers: tuple[int, ...]) -> dict[str, ParamSpec]:
    prefix, hidden = "layers.{layer}.", cfg.hidden_size
    params = {
        "input": vector(layers, prefix + "input_layernorm.weight", hidden),
        "post_attention": vector(layers, prefix + "post_attention_layernorm.weight", hidden),
    }
    if cfg.attn_res_block_layers is not None:
        for name, file in (("attn_res", "self_attention_res"), ("mlp_res", "mlp_res")):
            params[f"{name}_norm"] = vector(layers, f"{prefix}{file}_norm.weight", hidden)
            params[f"{name}_proj"] = vector(
                layers, f"{prefix}{file}_proj.weight", hidden, init="normal", convert="squeeze_row"
            )
    return params


def _kda(cfg: ModelConfig) -> dict[str, ParamSpec]:
    layers, attn = cfg.kda_layers, "layers.{layer}.self_attn."
    z, h, nd, d, n = (
        len(layers),
        cfg.hidden_size,
        cfg.kda_width,
        cfg.kda_head_dim,
        cfg.kda_num_heads,
    )
    heads = (nd, "heads")
    params = {
        "qkv": ParamSpec(
            shape=(z, 3, nd, h),
            axes=(None, None, "heads", None),
            layers=layers,
            sources=tuple(Source(f"{attn}{x}_proj.weight", (i,)) for i, x in enumerate("qkv")),
        ),
        "conv": ParamSpec(
            shape=(z, 3, nd, cfg.conv_width),
            axes=(None, None, "heads", None),
            layers=layers,
            dtype="float32",
            sources=tuple(
                Source(f"{attn}{x}_conv1d.weight", (i,), "squeeze_conv")
                for i, x in enumerate("qkv")
            ),
        ),
        "f_a": matrix(layers, attn + "f_a_proj.weight", (d, None), (h, None)),
        "f_b": matrix(layers, attn + "f_b_proj.weight", heads, (d, None)),
        "b": matrix(layers, attn + "b_proj.weight", (n, "heads"), (h, None)),
        "A_log": vector(
            layers, attn + "A_log", n, axis="heads", dtype="float32", init="a_log", convert="a_log"
        ),
        "dt_bias": vector(
            layers, attn + "dt_bias", nd, axis="heads", dtype="float32", init="zeros"
        ),
        "o_norm": vector(layers, attn + "o_norm.weight", d, dtype="float32"),
        "o": matrix(layers, attn + "o_proj.weight", (h, None), heads),
    }
    if cfg.kda_full_rank_gate:
        params["g"] = matrix(layers, attn + "g_proj.weight", heads, (h, None))
    else:
        params["g_a"] = matrix(layers, attn + "g_a_proj.weight", (d, None), (h, None))
        params["g_b"] = matrix(layers, attn + "g_b_proj.weight", heads, (d, None))
    return params


def _mla(cfg: ModelConfig) -> dict[str, ParamSpec]:
    layers, attn = cfg.mla_layers, "layers.{layer}.self_attn."
    h, n = cfg.hidden_size, cfg.mla_num_heads
    q_out = (n * cfg.qk_head_dim, "heads")
    v_out = (n * cfg.v_head_dim, "heads")
    params = {
        "kv_a": matrix(
            layers, attn + "kv_a_proj_with_mqa.weight", (cfg.mla_entry_width, None), (h, None)
        ),
        "kv_a_norm": vector(layers, attn + "kv_a_layernorm.weight", cfg.kv_lora_rank),
        "kv_b": matrix(
            layers,
            attn + "kv_b_proj.weight",
            (n * (cfg.qk_nope_head_dim + cfg.v_head_dim), "heads"),
            (cfg.kv_lora_rank, None),
        ),
        "o": matrix(layers, attn + "o_proj.weight", (h, None), v_out),
    }
    if cfg.q_lora_rank is None:
        params["q"] = matrix(layers, attn + "q_proj.weight", q_out, (h, None))
    else:
        params["q_a"] = matrix(layers, attn + "q_a_proj.weight", (cfg.q_lora_rank, None), (h, None))
        params["q_a_norm"] = vector(layers, attn + "q_a_layernorm.weight", cfg.q_lora_rank)
        params["q_b"] = matrix(layers, attn + "q_b_proj.weight", q_out, (cfg.q_lora_rank, None))
    if cfg.mla_output_gate:
        params["g"] = matrix(layers, attn + "g_proj.weight", v_out, (h, None))
    return params


def _moe(cfg: ModelConfig) -> dict[str, ParamSpec]:
    layers, moe = cfg.moe_layers, "layers.{layer}.block_sparse_moe."
    h, latent = cfg.hidden_size, cfg.latent_size
    shared = glu(layers, "shared_experts", h, cfg.shared_intermediate_size, prefix=moe)
    params = {
        "router": matrix(layers, moe + "gate.weight", (cfg.num_experts, None), (h, None)),
        "router_bias": vector(
            layers,
            moe + "gate.e_score_correction_bias",
            cfg.num_experts,
            dtype="float32",
            init="zeros",
        ),
        "shared_gate_up": shared["gate_up"],
        "shared_down": shared["down"],
        **_experts(cfg, moe + "experts.{expert}."),
    }
    if cfg.has_latent_moe:
        params["latent_down"] = matrix(
            layers, moe + "routed_expert_down_proj.weight", (latent, None), (h, None)
        )
        params["latent_up"] = matrix(
            layers, moe + "routed_expert_up_proj.weight", (h, None), (latent, None)
        )
    if cfg.has_latent_norm:
        params["latent_norm"] = vector(layers, moe + "routed_expert_norm.weight", latent)
    return params


def _experts(cfg: ModelConfig, name: str) -> dict[str, ParamSpec]:
    """`w13 [Z, E, 2, F, L]` (gate, up) and `w2 [Z, E, L, F]`, dense or as MXFP4 codes and
    scales."""
    z, e, f, latent = (
        len(cfg.moe_layers),
        cfg.num_experts,
        cfg.moe_intermediate_size,
        cfg.latent_size,
    )

    def leaf(
        which: str,
        suffix: str,
        group: int,
        dtype: Literal["compute", "uint8"],
        init: Literal["normal", "bytes"],
    ) -> ParamSpec:
        if which == "w13":
            shape, axes = (z, e, 2, f, latent // group), (None, "expert", None, "expert_ff", None)
            files = (
                Source(f"{name}w1.{suffix}", (None, 0)),
                Source(f"{name}w3.{suffix}", (None, 1)),
            )
        else:
            shape, axes = (z, e, latent, f // group), (None, "expert", None, "expert_ff")
            files = (Source(f"{name}w2.{suffix}", (None,)),)
        return ParamSpec(shape, axes, files, cfg.moe_layers, dtype, init)

    if cfg.expert_format == "dense":
        return {w: leaf(w, "weight", 1, "compute", "normal") for w in ("w13", "w2")}
    packed = {f"{w}_codes": leaf(w, "weight_packed", 2, "uint8", "bytes") for w in ("w13", "w2")}
    scales = {
        f"{w}_scales": leaf(w, "weight_scale", MXFP4_GROUP, "uint8", "bytes") for w in ("w13", "w2")
    }
    return packed | scales
