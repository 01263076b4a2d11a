"""The parameters, described once: shapes, dtypes, logical axes, checkpoint tensors.

`describe(cfg)` is the only description. From it follow the abstract tree, the shardings, the Flax
modules' declarations, random weights for tests, and the targets of the loader. Layers of one kind
are stacked on a leading axis `Z`, so that a step has few arguments. Matrices keep the checkpoint's
`[out, in]` orientation.

Letters: `H` hidden, `ND` heads x head dim, `F` feed-forward width, `L` latent, `E` experts, `C` MLA
latent, `Q` MLA query rank, `X` convolution taps, `V` vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from k3jax.config import MXFP4_GROUP, ModelConfig

Init = Literal["normal", "ones", "zeros", "a_log", "bytes"]
# How a checkpoint tensor becomes the described block.
Convert = Literal[
    "none",
    "squeeze_conv",  # [ND, 1, X] -> [ND, X]
    "squeeze_row",  # [1, H] -> [H]
    "a_log",  # [heads], [1, 1, heads, 1] or a zero-padded longer vector -> [heads]
]


@dataclasses.dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint tensor that fills `leaf[layer][index]`.

    Attributes:
      name: without the family's prefix; `{layer}` is the 0-based layer, `{expert}` the expert.
      index: position inside one layer's block. None stands for the expert.
    """

    name: str
    index: tuple[int | None, ...] = ()
    convert: Convert = "none"


@dataclasses.dataclass(frozen=True, slots=True)
class ParamSpec:
    """One leaf of the parameter tree.

    Attributes:
      shape: global shape, the stack axis included.
      dtype: `compute` follows the run's dtype; the others are fixed.
      axes: logical axis of each dim, or None where it is never split. Names: vocab, heads, ff,
        expert, expert_ff.
      layers: model layers on the stack axis; empty for a leaf without one.
      sources: checkpoint tensors that fill one layer (or the leaf); together they cover it exactly
        once.
      init: distribution for random weights.
    """

    shape: tuple[int, ...]
    axes: tuple[str | None, ...]
    sources: tuple[Source, ...]
    layers: tuple[int, ...] = ()
    dtype: Literal["compute", "float32", "uint8"] = "compute"
    init: Init = "normal"


ParamTree = Mapping[str, Mapping[str, ParamSpec]]


def describe(cfg: ModelConfig) -> ParamTree:
    """The parameter tree of a model: module name -> parameter name -> description."""
    every_layer = tuple(range(cfg.num_layers))
    tree = {"top": _top(cfg), "norms": _norms(cfg, every_layer)}
    if cfg.kda_layers:
        tree["kda"] = _kda(cfg)
    if cfg.mla_layers:
        tree["mla"] = _mla(cfg)
    if cfg.dense_layers:
        tree["dense"] = _glu(
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


def _matrix(
    layers: tuple[int, ...], name: str, out: tuple[int, str | None], inp: tuple[int, str | None]
) -> ParamSpec:
    """A stacked `[Z, out, in]` matrix from one tensor a layer."""
    return ParamSpec(
        shape=(len(layers), out[0], inp[0]),
        axes=(None, out[1], inp[1]),
        layers=layers,
        sources=(Source(name),),
    )


def _vector(
    layers: tuple[int, ...],
    name: str,
    size: int,
    *,
    axis: str | None = None,
    dtype: Literal["compute", "float32"] = "compute",
    init: Init = "ones",
    convert: Convert = "none",
) -> ParamSpec:
    """A stacked `[Z, size]` vector from one tensor a layer."""
    return ParamSpec(
        shape=(len(layers), size),
        axes=(None, axis),
        layers=layers,
        dtype=dtype,
        init=init,
        sources=(Source(name, convert=convert),),
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
        "input": _vector(layers, prefix + "input_layernorm.weight", hidden),
        "post_attention": _vector(layers, prefix + "post_attention_layernorm.weight", hidden),
    }
    if cfg.attn_res_block_layers is not None:
        for name, file in (("attn_res", "self_attention_res"), ("mlp_res", "mlp_res")):
            params[f"{name}_norm"] = _vector(layers, f"{prefix}{file}_norm.weight", hidden)
            params[f"{name}_proj"] = _vector(
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
        "f_a": _matrix(layers, attn + "f_a_proj.weight", (d, None), (h, None)),
        "f_b": _matrix(layers, attn + "f_b_proj.weight", heads, (d, None)),
        "b": _matrix(layers, attn + "b_proj.weight", (n, "heads"), (h, None)),
        "A_log": _vector(
            layers, attn + "A_log", n, axis="heads", dtype="float32", init="a_log", convert="a_log"
        ),
        "dt_bias": _vector(
            layers, attn + "dt_bias", nd, axis="heads", dtype="float32", init="zeros"
        ),
        "o_norm": _vector(layers, attn + "o_norm.weight", d, dtype="float32"),
        "o": _matrix(layers, attn + "o_proj.weight", (h, None), heads),
    }
    if cfg.kda_full_rank_gate:
        params["g"] = _matrix(layers, attn + "g_proj.weight", heads, (h, None))
    else:
        params["g_a"] = _matrix(layers, attn + "g_a_proj.weight", (d, None), (h, None))
        params["g_b"] = _matrix(layers, attn + "g_b_proj.weight", heads, (d, None))
    return params


def _mla(cfg: ModelConfig) -> dict[str, ParamSpec]:
    layers, attn = cfg.mla_layers, "layers.{layer}.self_attn."
    h, n = cfg.hidden_size, cfg.mla_num_heads
    q_out = (n * cfg.qk_head_dim, "heads")
    v_out = (n * cfg.v_head_dim, "heads")
    params = {
        "kv_a": _matrix(
            layers, attn + "kv_a_proj_with_mqa.weight", (cfg.mla_entry_width, None), (h, None)
        ),
        "kv_a_norm": _vector(layers, attn + "kv_a_layernorm.weight", cfg.kv_lora_rank),
        "kv_b": _matrix(
            layers,
            attn + "kv_b_proj.weight",
            (n * (cfg.qk_nope_head_dim + cfg.v_head_dim), "heads"),
            (cfg.kv_lora_rank, None),
        ),
        "o": _matrix(layers, attn + "o_proj.weight", (h, None), v_out),
    }
    if cfg.q_lora_rank is None:
        params["q"] = _matrix(layers, attn + "q_proj.weight", q_out, (h, None))
    else:
        params["q_a"] = _matrix(
            layers, attn + "q_a_proj.weight", (cfg.q_lora_rank, None), (h, None)
        )
        params["q_a_norm"] = _vector(layers, attn + "q_a_layernorm.weight", cfg.q_lora_rank)
        params["q_b"] = _matrix(layers, attn + "q_b_proj.weight", q_out, (cfg.q_lora_rank, None))
    if cfg.mla_output_gate:
        params["g"] = _matrix(layers, attn + "g_proj.weight", v_out, (h, None))
    return params


def _glu(
    layers: tuple[int, ...], module: str, width: int, ff: int, *, prefix: str
) -> dict[str, ParamSpec]:
    """Gate, up and down of a dense or shared feed-forward network."""
    z, name = len(layers), f"{prefix}{module}."
    return {
        "gate_up": ParamSpec(
            shape=(z, 2, ff, width),
            axes=(None, None, "ff", None),
            layers=layers,
            sources=(
                Source(name + "gate_proj.weight", (0,)),
                Source(name + "up_proj.weight", (1,)),
            ),
        ),
        "down": _matrix(layers, name + "down_proj.weight", (width, None), (ff, "ff")),
    }


def _moe(cfg: ModelConfig) -> dict[str, ParamSpec]:
    layers, moe = cfg.moe_layers, "layers.{layer}.block_sparse_moe."
    h, latent = cfg.hidden_size, cfg.latent_size
    shared = _glu(layers, "shared_experts", h, cfg.shared_intermediate_size, prefix=moe)
    params = {
        "router": _matrix(layers, moe + "gate.weight", (cfg.num_experts, None), (h, None)),
        "router_bias": _vector(
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
        params["latent_down"] = _matrix(
            layers, moe + "routed_expert_down_proj.weight", (latent, None), (h, None)
        )
        params["latent_up"] = _matrix(
            layers, moe + "routed_expert_up_proj.weight", (h, None), (latent, None)
        )
    if cfg.has_latent_norm:
        params["latent_norm"] = _vector(layers, moe + "routed_expert_norm.weight", latent)
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
