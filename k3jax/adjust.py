"""Penalties, biases and masks of a row's logits, from the buffers that `k3jax.controls` describes.

With `c` the times that a token was generated, in this order:

    logit += its bias, as long as that holds
    logit  = logit / r if it is positive, else logit * r, if the token is in prompt or output
    logit -= frequency * c + presence * (c > 0)
    logit  = -inf, if its row has a mask and the token is not in it

A row that asks for nothing keeps its logits bit by bit, whatever its neighbours ask for.
"""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from k3jax.controls import COUNT_WIDTH, IN_PROMPT, MAX_BIASES, NO_TOKEN


def is_penalised(fields: Mapping[str, Array]) -> Bool[Array, "*dims"]:
    """Whether a row's counts matter."""
    moves = (fields["presence"] != 0) | (fields["frequency"] != 0)
    return moves | (fields["repetition"] != 1)


def adjusted(
    logits_SXV: Float32[Array, "S X V"],
    drafts_SN: Int32[Array, "S N"],
    counts_RV: Int32[Array, "R V"],
    biases_R3K: Int32[Array, "R 3 K"],
    masks_RW: Int32[Array, "R W"],
    positions: Int32[Array, " S"],
    fields: Mapping[str, Array],
) -> Float32[Array, "S X V"]:
    """Logits after biases, penalties and masks.

    Args:
      logits_SXV: of the target after each row's newest token and after each of its drafts.
      drafts_SN: those drafts; a place is penalised as if all before it were generated.
      positions: of the token that follows the newest one, in its sequence.
      fields: of the step's inputs. A row with a mask has no drafts.
    """
    slots = fields["slots"]
    biased = _biased(logits_SXV, biases_R3K[slots], positions, fields["biased"])
    penalised = jax.vmap(_penalised)(
        biased, drafts_SN, counts_RV[slots], fields["presence"], fields["frequency"],
        fields["repetition"],
    )  # fmt: skip
    allowed_SV = _bits(masks_RW[slots], logits_SXV.shape[-1]) | (fields["masked"] == 0)[:, None]
    return jnp.where(allowed_SV[:, None], penalised, -jnp.inf)


def count(
    counts_RV: Int32[Array, "R V"],
    tokens_SX: Int32[Array, "S X"],
    is_new_SX: Bool[Array, "S X"],
    fields: Mapping[str, Array],
) -> Int32[Array, "R V"]:
    """Count generated tokens of the rows that are penalised."""
    taken_SX = is_new_SX & is_penalised(fields)[:, None]
    slots_SX = jnp.where(taken_SX, fields["slots"][:, None], counts_RV.shape[0])
    return counts_RV.at[slots_SX, tokens_SX].add(1, mode="drop")


def set_controls(
    counts_RV: Int32[Array, "R V"], biases_R3K: Int32[Array, "R 3 K"], call: Int32[Array, " n"]
) -> tuple[Int32[Array, "R V"], Int32[Array, "R 3 K"]]:
    """Carry out one call of `k3jax.controls.calls` on the buffers of a replica."""
    slot, is_first = call[0], call[1]
    tokens, values = call[2 : 2 + 2 * COUNT_WIDTH].reshape(2, COUNT_WIDTH)
    row = jnp.where(is_first != 0, 0, counts_RV[slot]).at[tokens].set(values, mode="drop")
    biases = call[2 + 2 * COUNT_WIDTH :].reshape(3, MAX_BIASES)
    return counts_RV.at[slot].set(row), biases_R3K.at[slot].set(biases)


def set_masks(masks_RW: Int32[Array, "R W"], call: Int32[Array, "N n"]) -> Int32[Array, "R W"]:
    """Carry out one call of `k3jax.controls.mask_calls` on the buffer of a replica."""
    return masks_RW.at[call[:, 0]].set(call[:, 1:])


def _bits(masks_SW: Int32[Array, "S W"], vocab: int) -> Bool[Array, "S V"]:
    token_V = jnp.arange(vocab, dtype=jnp.int32)
    return (masks_SW[:, token_V // 32] >> (token_V % 32)[None]) & 1 != 0


def _biased(
    logits_SXV: Float32[Array, "S X V"],
    biases_S3K: Int32[Array, "S 3 K"],
    positions: Int32[Array, " S"],
    is_biased: Int32[Array, " S"],
) -> Float32[Array, "S X V"]:
    def one(logits_XV: Array, biases: Array, position: Array, is_on: Array) -> Array:
        tokens, bits, until = biases
        places = position + jnp.arange(logits_XV.shape[0], dtype=jnp.int32)
        holds_XK = (is_on != 0) & (places[:, None] < until[None])
        tokens_XK = jnp.where(holds_XK, tokens[None], NO_TOKEN)
        values_K = lax.bitcast_convert_type(bits, jnp.float32)
        rows = jnp.arange(logits_XV.shape[0])[:, None]
        values_XK = jnp.broadcast_to(values_K[None], tokens_XK.shape)
        return logits_XV.at[rows, tokens_XK].add(values_XK, mode="drop")

    return jax.vmap(one)(logits_SXV, biases_S3K, positions, is_biased)


def _penalised(
    logits_XV: Float32[Array, "X V"],
    drafts_N: Int32[Array, " N"],
    counts_V: Int32[Array, " V"],
    presence: Float32[Array, ""],
    frequency: Float32[Array, ""],
    repetition: Float32[Array, ""],
) -> Float32[Array, "X V"]:
    num_slots = logits_XV.shape[0]
    generated_XV = jnp.broadcast_to(counts_V[None] & (IN_PROMPT - 1), logits_XV.shape)
    place, draft = jnp.meshgrid(jnp.arange(num_slots), jnp.arange(num_slots - 1), indexing="ij")
    tokens = jnp.where(draft < place, drafts_N[None], NO_TOKEN)
    generated_XV = generated_XV.at[place, tokens].add(1, mode="drop")
    was_generated = generated_XV > 0
    is_known = was_generated | (counts_V[None] >= IN_PROMPT)
    factor = jnp.where(is_known, repetition, 1.0)
    logits_XV = jnp.where(logits_XV > 0, logits_XV / factor, logits_XV * factor)
    logits_XV = logits_XV - frequency * generated_XV.astype(jnp.float32)
    return logits_XV - jnp.where(was_generated, presence, 0.0)
