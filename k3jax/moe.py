"""Feed-forward layers: dense, and LatentMoE with shared experts (k3-model.md 2.5 to 2.7)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from k3jax.config import ModelConfig
from k3jax.layers import Weights, linear, linear_f32, rms_norm
from pallas_kernels.moe import PackedWeight, moe_experts
from pallas_kernels.numerics import contract, round_to
from pallas_kernels.router import route
from pallas_kernels.situ import situ_glu, swiglu
from sharding.axes import ParallelConfig
from sharding.collectives import first_expert, sum_partials


def activation(cfg: ModelConfig) -> Callable[[Array, Array], Array]:
    """The gated activation of every feed-forward network of the model."""
    if cfg.situ_beta is None:
        return swiglu
    return partial(situ_glu, beta=cfg.situ_beta, linear_beta=cfg.situ_linear_beta)


def glu(
    x: Float[Array, "T H"],
    gate_up: Float[Array, "2 F H"],
    down: Float[Array, "H F"],
    cfg: ModelConfig,
) -> Float[Array, "T H"]:
    """Gated feed-forward network on this rank's columns; a float32 partial."""
    both = round_to(contract("th,sfh->tsf", x, gate_up), x.dtype)
    return linear_f32(activation(cfg)(both[:, 0], both[:, 1]), down)


def dense_ffn(
    weights: Weights, cfg: ModelConfig, x: Float[Array, "T H"], *, layer: int
) -> Float[Array, "T H"]:
    """The dense feed-forward network of a first layer."""
    with jax.named_scope("dense"):
        partial_out = glu(x, weights["gate_up"][layer], weights["down"][layer], cfg)
        return round_to(sum_partials(partial_out), x.dtype)


def latent_moe(
    weights: Weights,
    cfg: ModelConfig,
    parallel: ParallelConfig,
    x: Float[Array, "T H"],
    used: Bool[Array, " T"],
    *,
    layer: int,
) -> Float[Array, "T H"]:
    """Routed experts in the latent, plus shared experts at full width.

    Args:
      x: normed hidden states.
      used: tokens that are not padding; the others are sent to no expert.
      layer: index in the stacked weights.

    Returns:
      The summed output, equal on all ranks.
    """
    # The experts stay stacked: their kernel takes the whole stack and the layer's index.
    w = {
        name: stack[layer] for name, stack in weights.items() if not name.startswith(("w13", "w2"))
    }
    with jax.named_scope("moe/route"):
        logits = contract("th,eh->te", x.astype(jnp.float32), w["router"].astype(jnp.float32))
        ids, mixing = route(
            logits,
            w["router_bias"],
            top_k=cfg.experts_per_token,
            num_groups=cfg.num_expert_groups,
            topk_groups=cfg.topk_groups,
            renormalize=cfg.renormalize,
            scaling=cfg.routed_scaling_factor,
        )
        ids = jnp.where(used[:, None], ids, -1)
    z = linear(x, w["latent_down"]) if cfg.has_latent_moe else x
    with jax.named_scope("moe/experts"):
        w13, w2 = expert_weights(weights, cfg)
        num_local = jax.tree.leaves(w13)[0].shape[1]
        routed = moe_experts(
            z, ids, mixing, w13, w2, layer=layer, first_expert=first_expert(parallel, num_local),
            activation=activation(cfg),
        )  # fmt: skip
    with jax.named_scope("moe/tail"):
        routed = sum_partials(routed)
        if cfg.has_latent_norm:
            routed = rms_norm(routed, w["latent_norm"], cfg.rms_norm_eps)
        if cfg.has_latent_moe:
            routed = linear_f32(round_to(routed, x.dtype), w["latent_up"])
    with jax.named_scope("moe/shared"):
        shared = sum_partials(glu(x, w["shared_gate_up"], w["shared_down"], cfg))
    return round_to(routed + shared, x.dtype)


def expert_weights(
    weights: Weights, cfg: ModelConfig
) -> tuple[Array, Array] | tuple[PackedWeight, PackedWeight]:
    """`w13` and `w2` of all layers, dense or packed."""
    if cfg.expert_format == "dense":
        return weights["w13"], weights["w2"]
    return (
        PackedWeight(weights["w13_codes"], weights["w13_scales"]),
        PackedWeight(weights["w2_codes"], weights["w2_scales"]),
    )
