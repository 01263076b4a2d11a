"""Feed-forward layers: dense, and LatentMoE with shared experts (k3-model.md 2.5 to 2.7)."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from k3jax.config import ModelConfig
from k3jax.layers import Weights, linear, linear_f32, rms_norm
from pallas_kernels.moe import PackedWeight, moe_experts
from pallas_kernels.moe_tail import moe_tail
from pallas_kernels.numerics import round_to
from pallas_kernels.router import route
from pallas_kernels.situ import situ_glu, swiglu
from sharding import collectives, dispatch
from sharding.axes import TP, ParallelConfig


def activation(cfg: ModelConfig) -> Callable[[Array, Array], Array]:
    """The gated activation of every feed-forward network of the model."""
    return swiglu if cfg.situ_beta is None else _situ(cfg.situ_beta, cfg.situ_linear_beta)


@cache
def _situ(beta: float, linear_beta: float | None) -> Callable[[Array, Array], Array]:
    """One function for all layers: what is compiled with it is compiled once."""
    return partial(situ_glu, beta=beta, linear_beta=linear_beta)


def glu(
    x: Float[Array, "T H"],
    gate_up: Float[Array, "2 F H"],
    down: Float[Array, "H F"],
    cfg: ModelConfig,
) -> Float[Array, "T H"]:
    """Gated feed-forward network on this rank's columns; a float32 partial."""
    both = linear(x, gate_up.reshape(-1, x.shape[1])).reshape(x.shape[0], 2, -1)
    return linear_f32(activation(cfg)(both[:, 0], both[:, 1]), down)


def dense_ffn(
    weights: Weights, cfg: ModelConfig, x: Float[Array, "t H"], *, layer: int, is_sharded: bool
) -> Float[Array, "t H"]:
    """The dense feed-forward network of a first layer.

    Args:
      x: normed hidden states: all tokens, or with `is_sharded` this rank's.
    """
    with jax.named_scope("dense"):
        out = _glu_of_all(x, weights["gate_up"][layer], weights["down"][layer], cfg, is_sharded)
        if not is_sharded:
            out = collectives.sum_partials(out)
        return round_to(out, x.dtype)


def _glu_of_all(
    x: Float[Array, "t H"],
    gate_up: Float[Array, "2 F H"],
    down: Float[Array, "H F"],
    cfg: ModelConfig,
    is_sharded: bool,
) -> Float[Array, "t H"]:
    """`glu` on tokens of all ranks: a partial of them, or with `is_sharded` this rank's sums."""
    if not is_sharded:
        return glu(x, gate_up, down, cfg)
    return collectives.scatter_partials(glu(collectives.gather_tokens(x), gate_up, down, cfg))


def latent_moe(
    weights: Weights,
    cfg: ModelConfig,
    parallel: ParallelConfig,
    x: Float[Array, "t H"],
    used: Bool[Array, " t"],
    *,
    layer: int,
    is_sharded: bool,
) -> tuple[Float[Array, "t H"], Int32[Array, " R"]]:
    """Routed experts in the latent, plus shared experts at full width.

    Args:
      x: normed hidden states: all tokens of the replica, or with `is_sharded` this rank's.
      used: tokens that are not padding; the others are sent to no expert.
      layer: index in the stacked weights.

    Returns:
      The summed output of these tokens, and the load that they put on the experts of each rank.
    """
    # The experts stay stacked: their kernel takes the whole stack and the layer's index.
    w = {
        name: stack[layer] for name, stack in weights.items() if not name.startswith(("w13", "w2"))
    }
    with jax.named_scope("moe/route"):
        logits = linear_f32(x.astype(jnp.float32), w["router"].astype(jnp.float32))
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
    with jax.named_scope("moe/latent_down"):
        z = linear(x, w["latent_down"]) if cfg.has_latent_moe else x
    w13, w2 = expert_weights(weights, cfg)
    num_local = jax.tree.leaves(w13)[0].shape[1]

    def experts(z: Array, ids: Array, mixing: Array) -> Array:
        first = dispatch.first_expert(parallel, num_local)
        return moe_experts(
            z, ids, mixing, w13, w2, layer=layer, first_expert=first, activation=activation(cfg)
        )

    with jax.named_scope("moe/experts"):
        axes = dispatch.expert_axes(is_sharded=is_sharded)
        routed = dispatch.exchange(parallel, axes, experts, z, ids, mixing, num_local=num_local)
        load = dispatch.expert_load(parallel, ids, num_local)
    with jax.named_scope("moe/shared"):
        shared = _glu_of_all(x, w["shared_gate_up"], w["shared_down"], cfg, is_sharded)
    with jax.named_scope("moe/tail"):
        return _tail(w, cfg, parallel, routed, shared, is_sharded, x.dtype), load


def _tail(
    w: Weights,
    cfg: ModelConfig,
    parallel: ParallelConfig,
    routed: Float[Array, "t L"],
    shared: Float[Array, "t H"],
    is_sharded: bool,
    dtype: jnp.dtype,
) -> Float[Array, "t H"]:
    """Norm and up-projection of the routed sum, plus the shared experts.

    Args:
      routed, shared: float32 partials of all tokens, or with `is_sharded` sums of this rank's.
    """

    def norm(latent: Float[Array, "t L"]) -> Float[Array, "t L"]:
        if cfg.has_latent_norm:
            latent = rms_norm(latent, w["latent_norm"], cfg.rms_norm_eps)
        return round_to(latent, dtype)

    if is_sharded:
        out = linear_f32(norm(routed), w["latent_up"]) if cfg.has_latent_moe else routed
        return round_to(out + shared, dtype)
    if not cfg.has_latent_moe:
        return round_to(collectives.sum_partials(routed + shared), dtype)
    form = collectives.choose_tail(parallel, cfg.hidden_size, routed.shape[0])
    if form == "fused":
        return moe_tail(
            routed, shared, w["latent_norm"], w["latent_up"], axis=TP, eps=cfg.rms_norm_eps
        )
    return collectives.moe_tail(
        form, routed, shared, norm=norm, up=w["latent_up"], linear=linear_f32,
        finish=lambda x: round_to(x, dtype),
    )  # fmt: skip


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
