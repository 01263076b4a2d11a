"""The DSpark draft model: context rows, one pass over a block, and its tokens (section 6).

A block is the newest token, the anchor, and masks in place of the tokens behind it. Each of its
rows proposes the token that follows it. Keys and values are those of the target's tokens before
the anchor, made from what the target computed for them, and of the block's own rows.

Runs inside `shard_map` on one rank's parameters. Dims: `B` tapped layers, `X` rows of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32

from k3jax.draft import attention
from k3jax.draft.config import DraftConfig
from k3jax.layers import Weights, add, linear, linear_f32, rms_norm
from pallas_kernels.numerics import contract, round_to, sigmoid_f32
from pallas_kernels.situ import swiglu
from sharding import collectives

Params = Mapping[str, Weights]
# (layer, queries, entries of the block) -> what each query attended to
Attend = Callable[[int, Float[Array, "S X N Dq"], Float[Array, "S X C"]], Float[Array, "S X N Dz"]]


def context_entries(
    params: Params, cfg: DraftConfig, taps: Float[Array, "T BH"], positions: Int32[Array, " T"]
) -> Float[Array, "Z T C"]:
    """Cache entries that all draft layers keep of some target tokens.

    Args:
      taps: outputs of the tapped target layers side by side, in ascending order of the layers.
      positions: of the tokens in their sequences.
    """
    weights = params["context"]
    context = rms_norm(linear(taps, weights["proj"]), weights["norm"], cfg.rms_norm_eps)
    return jnp.stack(
        [
            attention.entries(_layer(params["attention"], j), cfg, context, positions)
            for j in range(cfg.num_layers)
        ]
    )


def block_hidden(
    params: Params,
    cfg: DraftConfig,
    embedded: Float[Array, "S X H"],
    positions: Int32[Array, "S X"],
    attend: Attend,
) -> Float[Array, "S X H"]:
    """Hidden states of a block after the last norm, equal on all ranks.

    Args:
      embedded: of the anchor and the masks.
      attend: does the softmax over a layer's cached context and the block.
    """
    rows, width = embedded.shape[:2]
    h = embedded
    for j in range(cfg.num_layers):
        w, norms = _layer(params["attention"], j), _layer(params["norms"], j)
        with jax.named_scope(f"draft_{j}/attention"):
            x = rms_norm(h, norms["input"], cfg.rms_norm_eps)
            own = attention.entries(
                w, cfg, x.reshape(rows * width, -1), positions.reshape(rows * width)
            )
            query = attention.queries(w, cfg, x, positions)
            z = attend(j, query, own.reshape(rows, width, -1))
            h = add(h, _summed(attention.output(w, cfg, z), h.dtype))
        with jax.named_scope(f"draft_{j}/mlp"):
            x = rms_norm(h, norms["post_attention"], cfg.rms_norm_eps)
            mlp = _layer(params["mlp"], j)
            both = round_to(contract("sxh,gfh->sxgf", x, mlp["gate_up"]), x.dtype)
            wide = swiglu(both[:, :, 0], both[:, :, 1])
            h = add(h, _summed(linear_f32(wide, mlp["down"]), h.dtype))
    return rms_norm(h, params["top"]["norm"], cfg.rms_norm_eps)


def propose(
    params: Params,
    base_SXV: Float32[Array, "S X V"],
    anchor_S: Int32[Array, " S"],
    choose: Callable[[Int32[Array, ""], Float32[Array, "S V"]], Int32[Array, " S"]],
) -> tuple[Int32[Array, "S X"], Float32[Array, "S X V"]]:
    """Take tokens from left to right, each biased by the one before it (section 6.6).

    Args:
      base_SXV: logits of the block's rows, equal on all ranks.
      choose: (place in the block, logits) -> tokens.

    Returns:
      The drafts, and the logits that each was chosen from.
    """
    weights = params["markov"]

    def one(prev_S: Array, inputs: tuple[Array, Array]) -> tuple[Array, tuple[Array, Array]]:
        place, base_SV = inputs
        bias = linear_f32(jnp.take(weights["w1"], prev_S, axis=0), weights["w2"])
        logits_SV = base_SV + collectives.gather_columns(bias)
        token_S = choose(place, logits_SV)
        return token_S, (token_S, logits_SV)

    places = jnp.arange(base_SXV.shape[1], dtype=jnp.int32)
    inputs = places, jnp.moveaxis(base_SXV, 1, 0)
    # A loop on a GPU asks the host at every turn; a block has few places.
    _, (tokens_XS, logits_XSV) = lax.scan(one, anchor_S, inputs, unroll=True)
    return tokens_XS.T, jnp.moveaxis(logits_XSV, 0, 1)


def confidence(
    params: Params,
    hidden_SXH: Float[Array, "S X H"],
    anchor_S: Int32[Array, " S"],
    drafts_SX: Int32[Array, "S X"],
) -> Float32[Array, "S X"]:
    """How likely the target takes each draft, if it took those before it."""
    prev_SX = jnp.concatenate([anchor_S[:, None], drafts_SX[:, :-1]], axis=1)
    markov = jnp.take(params["markov"]["w1"], prev_SX, axis=0)
    features = jnp.concatenate([hidden_SXH, markov.astype(hidden_SXH.dtype)], axis=-1)
    weights = params["confidence"]
    score = contract("sxf,f->sx", features.astype(jnp.float32), weights["proj"].astype(jnp.float32))
    return sigmoid_f32(score + weights["bias"][0].astype(jnp.float32))


def _layer(weights: Weights, j: int) -> Weights:
    return {name: stack[j] for name, stack in weights.items()}


def _summed(partial: Float32[Array, "S X H"], dtype: jnp.dtype) -> Float[Array, "S X H"]:
    return round_to(collectives.sum_partials(partial), dtype)
