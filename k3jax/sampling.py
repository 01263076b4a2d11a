"""Sampling on the device: greedy, temperature, min-p, top-k, top-p, one random stream a request.

The key of a draw is the request's seed folded with the position of the token to be drawn. So a
result depends on neither the row, the bucket nor the neighbours, and a recomputed request draws the
same tokens again (KF-V15).
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, UInt32

_DRAFT = 0x9E3779B9  # sets the random streams of drafts apart


class Filters(NamedTuple):
    """What may be drawn, for each row or place.

    Attributes:
      temperature: 0 leaves the most likely token alone; of equal ones the lowest id.
      top_k: number of tokens kept; 0 or at least `V` keeps all.
      top_p: the most likely tokens are kept until their mass reaches it; 1 keeps all.
      min_p: tokens are kept that are at least so likely as a share of the most likely one; 0 keeps
        all. It applies before the other two, which then share out what is left.
    """

    temperature: Float32[Array, " S"]
    top_k: Int32[Array, " S"]
    top_p: Float32[Array, " S"]
    min_p: Float32[Array, " S"]


def sample(
    logits: Float32[Array, "S V"],
    filters: Filters,
    seeds: UInt32[Array, " S"],
    positions: Int32[Array, " S"],
) -> Int32[Array, " S"]:
    """Draw one token a row.

    Args:
      positions: of the token to be drawn in its sequence.
    """
    noise = gumbel(seeds, positions, logits.shape[1])
    return jnp.where(filters.temperature > 0, best(filtered(logits, filters) + noise), best(logits))


def best(scores: Float32[Array, "S V"]) -> Int32[Array, " S"]:
    """The token with the largest score of each row; of equal ones the lowest id."""
    return jnp.argmax(scores, axis=-1).astype(jnp.int32)


def filtered(logits: Float32[Array, "S V"], filters: Filters) -> Float32[Array, "S V"]:
    """Unnormalised log probabilities of what the filters leave, -inf elsewhere.

    The vocabulary is sorted only if some row has a top-k or a top-p.
    """
    temperature, top_k, top_p, min_p = filters
    left = tempered(logits, temperature)
    least = jnp.max(left, axis=-1, keepdims=True) + jnp.log(min_p)[:, None]
    left = jnp.where(left >= least, left, -jnp.inf)
    is_ranked = ((top_k > 0) & (top_k < logits.shape[1])) | (top_p < 1.0)
    return lax.cond(
        jnp.any(is_ranked & (temperature > 0)), lambda: _ranked(left, top_k, top_p), lambda: left
    )


def _ranked(
    scores: Float32[Array, "S V"], top_k: Int32[Array, " S"], top_p: Float32[Array, " S"]
) -> Float32[Array, "S V"]:
    """What top-k and top-p leave of log probabilities, -inf elsewhere."""
    vocab = scores.shape[1]
    order = jnp.argsort(-scores, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scores, order, axis=-1)
    limit = jnp.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    in_top_k = jnp.arange(vocab)[None] < limit[:, None]
    probs = jax.nn.softmax(jnp.where(in_top_k, ranked, -jnp.inf), axis=-1)
    # Mass of the better tokens: the first token is always kept.
    before = jnp.cumsum(probs, axis=-1) - probs
    kept = in_top_k & ((before < top_p[:, None]) | (top_p[:, None] >= 1.0))
    # Those kept are the first ones of the order, in which equal tokens stand by id.
    last = jnp.take_along_axis(order, jnp.sum(kept, axis=-1, keepdims=True) - 1, axis=-1)
    least = jnp.take_along_axis(scores, last, axis=-1)
    is_kept = (scores > least) | ((scores == least) & (jnp.arange(vocab)[None] <= last))
    return jnp.where(is_kept, scores, -jnp.inf)


def tempered(
    logits: Float32[Array, "S V"], temperature: Float32[Array, " S"]
) -> Float32[Array, "S V"]:
    """Log probabilities at a temperature, which leaves all tokens, and at 0 the most likely one."""
    is_left = (temperature > 0)[:, None] | (
        jnp.arange(logits.shape[1])[None] == best(logits)[:, None]
    )
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    return jnp.where(is_left, scaled, -jnp.inf)


def gumbel(
    seeds: UInt32[Array, " S"], positions: Int32[Array, " S"], vocab: int
) -> Float32[Array, "S V"]:
    """Noise that turns the largest of log probabilities into a draw; see the module for its key."""
    return jax.vmap(_noise, in_axes=(0, 0, None))(seeds, positions, vocab)


def draft_gumbel(
    seeds: UInt32[Array, " S"], positions: Int32[Array, " S"], vocab: int
) -> Float32[Array, "S V"]:
    """Noise for drafts, independent of `gumbel`: what replaces a refused draft must not depend on
    how it was drawn."""
    return gumbel(seeds ^ jnp.uint32(_DRAFT), positions, vocab)


def _noise(seed: UInt32[Array, ""], position: Int32[Array, ""], vocab: int) -> Float32[Array, " V"]:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (vocab,), jnp.float32)
