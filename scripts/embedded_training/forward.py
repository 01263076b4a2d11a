"""A differentiable K3 on whole sequences: no pages, no mesh, the server's parameters and operators.

It exists for training. What the server computes is `k3jax.model.K3`; a test compares the two.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from k3jax.config import ModelConfig
from k3jax.layers import Weights, add, linear, linear_f32, rms_norm
from k3jax.moe import activation, glu
from pallas_kernels.kda import kda_prefill
from pallas_kernels.numerics import contract, round_to, sigmoid_f32
from pallas_kernels.router import route
from pallas_kernels.short_conv import short_conv

Params = Mapping[str, Weights]


class Output(NamedTuple):
    """What a sequence gives.

    Attributes:
      hidden: after the last norm, [T, H].
      logits: [T, V].
      taps: outputs of the tapped layers side by side, [T, BH].
      load: tokens of each expert, by layer with experts, [Z, E].
    """

    hidden: Float[Array, "T H"]
    logits: Float32[Array, "T V"]
    taps: Float[Array, "T BH"]
    load: Float32[Array, "Z E"]


def forward(
    params: Params, cfg: ModelConfig, tokens: Int32[Array, " T"], tap_layers: Sequence[int] = ()
) -> Output:
    """Run one sequence from its start.

    Args:
      params: the tree of `describe(cfg)` with dense experts.
    """
    norms, top, eps = params["norms"], params["top"], cfg.rms_norm_eps
    prefix = jnp.take(top["embed"], tokens, axis=0)
    bank: list[Array] = []
    taps, loads = [], []
    for i in range(cfg.num_layers):
        x = rms_norm(_mix(bank, prefix, norms, "attn_res", i, eps), norms["input"][i], eps)
        attention = _kda if i in cfg.kda_layers else _mla
        out = jax.checkpoint(attention, static_argnums=(1, 3))(params, cfg, x, i)
        if cfg.attn_res_block_layers and i % cfg.attn_res_block_layers == 0:
            bank, prefix = [*bank, prefix], out
        else:
            prefix = add(prefix, out)
        x = rms_norm(_mix(bank, prefix, norms, "mlp_res", i, eps), norms["post_attention"][i], eps)
        if i < cfg.num_dense_layers:
            dense = params["dense"]
            out = round_to(glu(x, dense["gate_up"][i], dense["down"][i], cfg), x.dtype)
        else:
            layer = i - cfg.num_dense_layers
            out, load = jax.checkpoint(_moe, static_argnums=(1, 3))(params, cfg, x, layer)
            loads.append(load)
        prefix = add(prefix, out)
        if i in tap_layers:
            taps.append(prefix)
    if bank:
        prefix = _attend(bank, prefix, top["output_res_norm"], top["output_res_proj"], eps)
    hidden = rms_norm(prefix, top["norm"], eps)
    return Output(
        hidden=hidden,
        logits=linear_f32(hidden, top["lm_head"]),
        taps=jnp.concatenate(taps, axis=-1) if taps else hidden[:, :0],
        load=jnp.stack(loads),
    )


def _mix(
    bank: list[Array], prefix: Array, norms: Weights, name: str, i: int, eps: float
) -> Float[Array, "T H"]:
    if not bank:
        return prefix
    return _attend(bank, prefix, norms[f"{name}_norm"][i], norms[f"{name}_proj"][i], eps)


def _attend(
    bank: list[Array], prefix: Array, norm: Array, proj: Array, eps: float
) -> Float[Array, "T H"]:
    """Attention residual (k3-model.md section 2.8)."""
    sources = jnp.stack([*bank, prefix]).astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(sources**2, axis=-1) + eps)
    direction = norm.astype(jnp.float32) * proj.astype(jnp.float32)
    scores = scale * jnp.einsum("bth,h->bt", sources, direction)
    weight = jax.nn.softmax(scores, axis=0)
    return round_to(jnp.einsum("bt,bth->th", weight, sources), prefix.dtype)


def _kda(params: Params, cfg: ModelConfig, x: Array, i: int) -> Float[Array, "T H"]:
    w = {name: stack[cfg.kda_layers.index(i)] for name, stack in params["kda"].items()}
    tokens, heads, dim = x.shape[0], cfg.kda_num_heads, cfg.kda_head_dim
    qkv = round_to(contract("th,sch->tsc", x, w["qkv"]), x.dtype)
    f = linear(linear(x, w["f_a"]), w["f_b"]).reshape(tokens, heads, dim)
    gate = linear(x, w["g"]).reshape(tokens, heads, dim)
    one_row, nothing = jnp.array([0, tokens], jnp.int32), jnp.zeros(1, jnp.int32)
    window = jnp.zeros((1, cfg.conv_width - 1, 3 * cfg.kda_width), x.dtype)
    taps = w["conv"].reshape(-1, cfg.conv_width)
    qkv, *_ = short_conv(qkv.reshape(tokens, -1), taps, window, one_row, nothing)
    q, k, v = jnp.unstack(qkv.reshape(tokens, 3, heads, dim), axis=1)
    state = jnp.zeros((1, heads, dim, dim), jnp.float32)
    o, *_ = kda_prefill(
        q, k, v, f, linear(x, w["b"]), w["A_log"], w["dt_bias"].reshape(heads, dim), state,
        one_row, nothing, lower_bound=cfg.gate_lower_bound, implementation="xla",
    )  # fmt: skip
    y = rms_norm(o.astype(jnp.float32), w["o_norm"], cfg.rms_norm_eps) * sigmoid_f32(gate)
    return linear(round_to(y, x.dtype).reshape(tokens, -1), w["o"])


def _mla(params: Params, cfg: ModelConfig, x: Array, i: int) -> Float[Array, "T H"]:
    w = {name: stack[cfg.mla_layers.index(i)] for name, stack in params["mla"].items()}
    tokens, latent, nope = x.shape[0], cfg.kv_lora_rank, cfg.qk_nope_head_dim
    q = linear(rms_norm(linear(x, w["q_a"]), w["q_a_norm"], cfg.mla_lora_norm_eps), w["q_b"])
    q = q.reshape(tokens, -1, cfg.qk_head_dim)
    entry = linear(x, w["kv_a"])
    normed = rms_norm(entry[:, :latent], w["kv_a_norm"], cfg.mla_lora_norm_eps)
    kv = linear(normed, w["kv_b"]).reshape(tokens, -1, nope + cfg.v_head_dim)
    scores = contract("tnk,snk->nts", q[..., :nope], kv[..., :nope])
    scores += contract("tnk,sk->nts", q[..., nope:], entry[:, latent:])
    causal = jnp.tril(jnp.ones((tokens, tokens), bool))[None]
    scores = jnp.where(causal, scores * cfg.qk_head_dim**-0.5, -jnp.inf)
    weight = round_to(jax.nn.softmax(scores, axis=-1), x.dtype)
    att = contract("nts,snv->tnv", weight, kv[..., nope:]).reshape(tokens, -1)
    return linear(round_to(att * sigmoid_f32(linear_f32(x, w["g"])), x.dtype), w["o"])


def _moe(
    params: Params, cfg: ModelConfig, x: Array, layer: int
) -> tuple[Float[Array, "T H"], Float32[Array, " E"]]:
    """Every expert on every token, weighted: a small model has few."""
    w = {name: stack[layer] for name, stack in params["moe"].items()}
    logits = contract("th,eh->te", x.astype(jnp.float32), w["router"].astype(jnp.float32))
    ids, mixing = route(
        logits, w["router_bias"], top_k=cfg.experts_per_token, renormalize=cfg.renormalize,
        scaling=cfg.routed_scaling_factor, implementation="xla",
    )  # fmt: skip
    chosen = jax.nn.one_hot(ids, cfg.num_experts, dtype=jnp.float32)
    weight = jnp.einsum("ta,tae->te", mixing, chosen)
    z = linear(x, w["latent_down"])
    both = contract("tl,egfl->tegf", z, w["w13"])
    wide = activation(cfg)(both[:, :, 0], both[:, :, 1]) * weight[:, :, None]
    routed = contract("tef,elf->tl", round_to(wide, x.dtype), w["w2"])
    routed = round_to(rms_norm(routed, w["latent_norm"], cfg.rms_norm_eps), x.dtype)
    shared = glu(x, w["shared_gate_up"], w["shared_down"], cfg)
    return round_to(linear_f32(routed, w["latent_up"]) + shared, x.dtype), chosen.sum((0, 1))
