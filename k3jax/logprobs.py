"""Log probabilities of tokens that were drawn, and of a prompt's tokens; see `k3jax.results`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32, Shaped

from k3jax.results import MAX_LOGPROBS
from k3jax.run import Run

_BLOCK_TOKENS = 64  # of a prompt, whose logits are there at once


def packed_width(vocab: int) -> int:
    """Words of the log probabilities at one place."""
    return 1 + 2 * min(MAX_LOGPROBS, vocab)


def packed_logprobs(
    logits: Float32[Array, "places V"], chosen: Int32[Array, " places"]
) -> Int32[Array, "places n"]:
    """Log probabilities of the chosen tokens and of the likeliest ones, packed."""
    total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    top, ids = lax.top_k(logits, min(MAX_LOGPROBS, logits.shape[1]))
    own = jnp.take_along_axis(logits, chosen[:, None], axis=-1)
    numbers = jnp.concatenate([own, top], axis=-1) - total
    return jnp.concatenate([lax.bitcast_convert_type(numbers, jnp.int32), ids], axis=-1)


def prompt_logprobs(run: Run, following: Int32[Array, " S"]) -> Int32[Array, "T n"]:
    """Log probabilities of the token behind each token of a prefill step.

    The logits of all tokens together would not fit, so they are made in blocks.

    Args:
      following: token behind the last one of each row.
    """
    tokens, meta = run.tokens, run.meta
    last = jnp.where(meta.lengths > 0, meta.row_offsets[1:] - 1, tokens.shape[0])
    behind = jnp.roll(tokens, -1).at[last].set(following, mode="drop")
    hidden, size = run.all(), min(_BLOCK_TOKENS, tokens.shape[0])
    padding = -tokens.shape[0] % size

    def blocks(x: Shaped[Array, " T *dims"]) -> Shaped[Array, "blocks size *dims"]:
        padded = jnp.pad(x, ((0, padding), *((0, 0),) * (x.ndim - 1)))
        return padded.reshape(-1, size, *x.shape[1:])

    packed = lax.map(
        lambda block: packed_logprobs(run.logits(block[0]), block[1]),
        (blocks(hidden), blocks(behind)),
    )
    return packed.reshape(-1, packed.shape[-1])[: tokens.shape[0]]
