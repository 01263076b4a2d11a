"""The choice of a step's tokens from its logits, and what rows may ask for besides.

A step whose rows are all greedy and ask for nothing else just takes the likeliest tokens. Others
draw, and adjust logits or rank log probabilities only if some row asks for that. What exchanges
something between ranks they all do or none does, because each looks at the rows of all replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float32, Int32

from k3jax.adjust import adjusted, is_penalised
from k3jax.draft.acceptance import Accepted
from k3jax.logprobs import packed_logprobs, packed_width, prompt_logprobs
from k3jax.run import Run
from k3jax.sampling import Filters
from sharding import collectives
from sharding.axes import DP

Choose = Callable[[Float32[Array, "S X V"]], Accepted]


class Asked(NamedTuple):
    """Whether any row of any replica asks for adjusted logits, for log probabilities of new tokens,
    for those of prompts."""

    adjusted: Bool[Array, ""]
    logprobs: Bool[Array, ""]
    scored: Bool[Array, ""]


def asked_of(fields: Mapping[str, Array]) -> Asked:
    """What the rows of all replicas ask for, from their inputs `[dp, S]`."""
    changes = is_penalised(fields) | (fields["biased"] != 0) | (fields["masked"] != 0)
    return Asked(jnp.any(changes), jnp.any(fields["logprobs"] != 0), jnp.any(fields["scored"] != 0))


def filters_of(fields: Mapping[str, Array]) -> Filters:
    """Filters of the step's rows."""
    return Filters(fields["temperature"], fields["top_k"], fields["top_p"], fields["min_p"])


def choose(
    run: Run,
    fields: Mapping[str, Array],
    asked: Asked,
    logits_SXV: Float32[Array, "S X V"],
    drafts_SN: Int32[Array, "S N"],
    positions: Int32[Array, " S"],
    *,
    drawn: Choose,
    greedy: Choose,
) -> tuple[Accepted, Int32[Array, "dp S X n"]]:
    """Choose the next tokens of each row.

    Args:
      logits_SXV: after each row's newest token and after each of its drafts.
      positions: of the token that follows the newest one.
      drawn: chooses for rows of any temperature. greedy: for rows without.

    Returns:
      The choice, and the packed log probabilities of its tokens on all replicas.
    """
    rows, slots, vocab = logits_SXV.shape
    is_drawn = jnp.any(fields["temperature"] > 0)
    replicas = lax.axis_size(DP)
    none = jnp.zeros((replicas, rows, slots, packed_width(vocab)), jnp.int32)

    def logprobs(choice: Accepted) -> Int32[Array, "dp S X n"]:
        tokens = choice.tokens(drafts_SN).reshape(-1)
        packed = packed_logprobs(logits_SXV.reshape(rows * slots, vocab), tokens)
        return collectives.gather_replicas(packed.reshape(rows, slots, -1))

    def general() -> tuple[Accepted, Int32[Array, "dp S X n"]]:
        buffers = run.buffers
        logits = lax.cond(
            asked.adjusted,
            lambda: adjusted(
                logits_SXV,
                drafts_SN,
                buffers.counts,
                buffers.biases,
                buffers.masks,
                positions,
                fields,
            ),
            lambda: logits_SXV,
        )
        choice = drawn(logits)
        with jax.named_scope("logprobs"):
            return choice, lax.cond(asked.logprobs, lambda: logprobs(choice), lambda: none)

    return lax.cond(
        is_drawn | asked.adjusted | asked.logprobs, general, lambda: (greedy(logits_SXV), none)
    )


def scored(run: Run, fields: Mapping[str, Array], asked: Asked) -> Int32[Array, "dp T n"]:
    """Packed log probabilities of prompts' tokens on all replicas; none outside of prefill."""
    tokens = run.tokens.shape[0] if run.meta.kind == "prefill" else 0
    shape = (lax.axis_size(DP), tokens, packed_width(run.model.cfg.vocab_size))
    if not tokens:
        return jnp.zeros(shape, jnp.int32)
    with jax.named_scope("logprobs"):
        return lax.cond(
            asked.scored,
            lambda: collectives.gather_replicas(prompt_logprobs(run, fields["following"])),
            lambda: jnp.zeros(shape, jnp.int32),
        )
