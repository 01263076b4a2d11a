"""Which drafts of a row the target model takes, and the token that follows them (section 6.7).

The target's pass over an anchor and its drafts gives, after each of them, the distribution `p` of
the next token; each draft was drawn from a distribution `q`. Both rules leave the tokens that come
out distributed exactly as `p` (KF-S07):

* `rejection`: draft i is taken if p(d) > u q(d), and the first that is not ends the run; the token
  behind it comes from max(p - q, 0), or from p if all were taken.
* `block` (Sun et al. 2024): looks at the drafts together and takes at least as many on average.
  With P_0 = 1, P_i = min(1, P_{i-1} p_i(d_i) / q_i(d_i)) and
  R_i = sum_x max(P_i p_{i+1}(x) - q_{i+1}(x), 0), the last i with u_i <= R_i / (R_i + 1 - P_i) (or
  P_N for the last draft) is how many are taken; the token behind it comes from
  max(P_i p_{i+1} - q_{i+1}, 0).

A temperature of 0 needs no rule of its own: p has all its mass on one token then, so a draft is
taken exactly if it is that token (KF-S05).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32, UInt32

from k3jax.sampling import Filters, best, filtered, gumbel

Rule = Literal["rejection", "block"]
_UNIFORM = 0x5EED  # sets the draws of the rules apart from those of tokens


class Accepted(NamedTuple):
    """What comes of a row.

    Attributes:
      num_drafts: how many drafts were taken.
      next_token: the token behind them.
    """

    num_drafts: Int32[Array, " S"]
    next_token: Int32[Array, " S"]

    def tokens(self, drafts_SN: Int32[Array, "S N"]) -> Int32[Array, "S X"]:
        """The tokens of each row: its drafts that were taken, then `next_token`, then anything."""
        padded_SX = jnp.pad(drafts_SN, ((0, 0), (0, 1)))
        is_next_SX = jnp.arange(padded_SX.shape[1])[None] == self.num_drafts[:, None]
        return jnp.where(is_next_SX, self.next_token[:, None], padded_SX)


def accept(
    target_SXV: Float32[Array, "S X V"],
    drafts_SN: Int32[Array, "S N"],
    draft_SNV: Float32[Array, "S N V"] | None,
    num_drafts_S: Int32[Array, " S"],
    seeds: UInt32[Array, " S"],
    positions: Int32[Array, " S"],
    *,
    rule: Rule,
) -> Accepted:
    """Verify the drafts of every row.

    Args:
      target_SXV: log probabilities of the target after the anchor and after each draft, X = N + 1,
        as `sampling.filtered` leaves them; need not be normalised.
      drafts_SN: proposed tokens.
      draft_SNV: log probabilities that they were drawn from, likewise; None if each draft was
        certain, as those of greedy drafting and of n-grams are.
      num_drafts_S: drafts of each row, 0 to N; what stands behind them does not matter.
      seeds, positions: of the random draws; positions of the first draft in its sequence.
      rule: see the module.
    """
    vocab = target_SXV.shape[-1]
    num_slots = drafts_SN.shape[1]
    is_draft_SN = jnp.arange(num_slots)[None] < num_drafts_S[:, None]
    p_SXV = jax.nn.softmax(target_SXV, axis=-1)
    if draft_SNV is None:
        q_SNV = jax.nn.one_hot(drafts_SN, vocab, dtype=jnp.float32)
    else:
        q_SNV = jax.nn.softmax(draft_SNV, axis=-1)
    # Behind the last draft nothing is proposed: all of p is left.
    q_SNV = jnp.where(is_draft_SN[:, :, None], q_SNV, 0.0)
    q_SXV = jnp.pad(q_SNV, ((0, 0), (0, 1), (0, 0)))
    p_SN, q_SN = (
        jnp.take_along_axis(x[:, :num_slots], drafts_SN[:, :, None], axis=-1)[..., 0]
        for x in (p_SXV, q_SXV)
    )
    u_SN = _uniform(seeds, positions, num_slots)
    if rule == "rejection":
        taken_SN = is_draft_SN & (p_SN > u_SN * q_SN)
        num_S = jnp.sum(jnp.cumprod(taken_SN.astype(jnp.int32), axis=-1), axis=-1)
        weight_SX1 = jnp.ones((*target_SXV.shape[:2], 1), jnp.float32)
    else:
        num_S, weight_SX1 = _block(p_SXV, q_SXV, p_SN, q_SN, u_SN, is_draft_SN, num_drafts_S)
    left_SXV = jnp.maximum(weight_SX1 * p_SXV - q_SXV, 0.0)
    left_SV, p_SV = (
        jnp.take_along_axis(x, num_S[:, None, None], axis=1)[:, 0] for x in (left_SXV, p_SXV)
    )
    # Rounding can leave nothing where p and q are equal; such a draft is refused with chance 0.
    left_SV = jnp.where(jnp.sum(left_SV, axis=-1, keepdims=True) > 0, left_SV, p_SV)
    noise_SV = gumbel(seeds, positions + num_S, vocab)
    return Accepted(num_S.astype(jnp.int32), best(jnp.log(left_SV) + noise_SV))


def verify(
    logits_SXV: Float32[Array, "S X V"],
    drafts_SN: Int32[Array, "S N"],
    num_drafts_S: Int32[Array, " S"],
    filters: Filters,
    seeds: UInt32[Array, " S"],
    positions: Int32[Array, " S"],
    *,
    draft_SNV: Float32[Array, "S N V"] | None = None,
    rule: Rule = "block",
) -> Accepted:
    """`accept` by the logits of the target and the filters of each row.

    Args:
      logits_SXV: of the target after the anchor and after each draft.
      Others: as in `accept`.
    """
    rows, slots, vocab = logits_SXV.shape
    each = jax.tree.map(lambda x: jnp.repeat(x, slots), filters)
    target = filtered(logits_SXV.reshape(rows * slots, vocab), each)
    return accept(
        target.reshape(rows, slots, vocab), drafts_SN, draft_SNV, num_drafts_S, seeds, positions,
        rule=rule,
    )  # fmt: skip


def verify_greedily(
    logits_SXV: Float32[Array, "S X V"],
    drafts_SN: Int32[Array, "S N"],
    num_drafts_S: Int32[Array, " S"],
) -> Accepted:
    """What `verify` gives where every temperature is 0."""
    rows, slots, vocab = logits_SXV.shape
    best_SX = best(logits_SXV.reshape(rows * slots, vocab)).reshape(rows, slots)
    is_draft = jnp.arange(slots - 1)[None] < num_drafts_S[:, None]
    taken = (drafts_SN == best_SX[:, :-1]) & is_draft
    num_S = jnp.sum(jnp.cumprod(taken.astype(jnp.int32), axis=-1), axis=-1, dtype=jnp.int32)
    return Accepted(num_S, jnp.take_along_axis(best_SX, num_S[:, None], axis=1)[:, 0])


def _block(
    p_SXV: Array,
    q_SXV: Array,
    p_SN: Array,
    q_SN: Array,
    u_SN: Array,
    is_draft_SN: Array,
    num_drafts_S: Array,
) -> tuple[Array, Array]:
    """Drafts taken by block verification, and P of every place."""

    def grow(before_S: Array, ratio_S: Array) -> tuple[Array, Array]:
        after_S = jnp.minimum(1.0, before_S * ratio_S)
        return after_S, after_S

    ratio_SN = jnp.where(is_draft_SN, p_SN / jnp.maximum(q_SN, 1e-38), 0.0)
    _, P_NS = jax.lax.scan(grow, jnp.ones(p_SN.shape[0], jnp.float32), ratio_SN.T)
    P_SN = P_NS.T
    R_SN = jnp.sum(jnp.maximum(P_SN[:, :, None] * p_SXV[:, 1:] - q_SXV[:, 1:], 0.0), axis=-1)
    total_SN = R_SN + 1.0 - P_SN
    h_SN = jnp.where(total_SN > 0, R_SN / jnp.where(total_SN > 0, total_SN, 1.0), 1.0)
    place_N = jnp.arange(1, p_SN.shape[1] + 1)
    h_SN = jnp.where(place_N[None] == num_drafts_S[:, None], P_SN, h_SN)
    taken_SN = is_draft_SN & (u_SN <= h_SN)
    num_S = jnp.max(jnp.where(taken_SN, place_N[None], 0), axis=-1, initial=0)
    return num_S, jnp.pad(P_SN, ((0, 0), (1, 0)), constant_values=1.0)[:, :, None]


def _uniform(
    seeds: UInt32[Array, " S"], positions: Int32[Array, " S"], count: int
) -> Float32[Array, "S N"]:
    """Numbers in (0, 1], one for each draft, that depend on its position alone."""

    def one(seed: Array, position: Array) -> Array:
        key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), position), _UNIFORM)
        return 1.0 - jax.random.uniform(key, dtype=jnp.float32)

    places = positions[:, None] + jnp.arange(count, dtype=jnp.int32)[None]
    return jax.vmap(jax.vmap(one, in_axes=(None, 0)))(seeds, places)
