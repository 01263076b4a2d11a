"""Sampling on the device: greedy, temperature, top-k and top-p, with one random stream a request.

The key of a draw is the request's seed folded with the position of the token to be drawn. So a
result depends on neither the row, the bucket nor the neighbours, and a recomputed request draws the
same tokens again (KF-V15).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32, UInt32


def sample(
    logits: Float32[Array, "S V"],
    temperature: Float32[Array, " S"],
    top_k: Int32[Array, " S"],
    top_p: Float32[Array, " S"],
    seeds: UInt32[Array, " S"],
    positions: Int32[Array, " S"],
) -> tuple[Int32[Array, " S"], Bool[Array, " S"]]:
    """Draw one token a row.

    Args:
      temperature: 0 takes the most likely token; of equal ones the lowest id.
      top_k: number of tokens kept; 0 or at least `V` keeps all.
      top_p: the most likely tokens are kept until their mass reaches it; 1 keeps all.
      positions: of the token to be drawn in its sequence.

    Returns:
      Token ids, and whether all logits of the row were finite. The id of a row that was not is
      meaningless.
    """
    finite = jnp.all(jnp.isfinite(logits), axis=-1)
    greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    drawn = lax.cond(
        jnp.any(temperature > 0),
        lambda: _draw(logits, temperature, top_k, top_p, seeds, positions),
        lambda: greedy,
    )
    return jnp.where(temperature > 0, drawn, greedy), finite


def _draw(
    logits: Float32[Array, "S V"],
    temperature: Float32[Array, " S"],
    top_k: Int32[Array, " S"],
    top_p: Float32[Array, " S"],
    seeds: UInt32[Array, " S"],
    positions: Int32[Array, " S"],
) -> Int32[Array, " S"]:
    """Gumbel-max over the tokens that top-k and then top-p keep."""
    vocab = logits.shape[1]
    scaled = logits / jnp.where(temperature > 0, temperature, 1.0)[:, None]
    order = jnp.argsort(-scaled, axis=-1, stable=True)
    ranked = jnp.take_along_axis(scaled, order, axis=-1)
    limit = jnp.where((top_k <= 0) | (top_k > vocab), vocab, top_k)
    ranked = jnp.where(jnp.arange(vocab)[None] < limit[:, None], ranked, -jnp.inf)
    probs = jax.nn.softmax(ranked, axis=-1)
    # Mass of the better tokens: the first token is always kept.
    before = jnp.cumsum(probs, axis=-1) - probs
    keep = (before < top_p[:, None]) | (top_p[:, None] >= 1.0)
    noise = jax.vmap(_noise, in_axes=(0, 0, None))(seeds, positions, vocab)
    noise = jnp.take_along_axis(noise, order, axis=-1)
    best = jnp.argmax(jnp.where(keep, ranked + noise, -jnp.inf), axis=-1)
    return jnp.take_along_axis(order, best[:, None], axis=-1)[:, 0].astype(jnp.int32)


def _noise(seed: UInt32[Array, ""], position: Int32[Array, ""], vocab: int) -> Float32[Array, " V"]:
    key = jax.random.fold_in(jax.random.key(seed), position)
    return jax.random.gumbel(key, (vocab,), jnp.float32)
