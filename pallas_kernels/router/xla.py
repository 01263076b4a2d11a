"""Router in XLA: `lax.top_k`, which breaks ties towards the lowest index."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32, Int32


def route(
    logits_TE: Float32[Array, "T E"],
    bias_E: Float32[Array, " E"],
    *,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    renormalize: bool,
    scaling: float,
) -> tuple[Int32[Array, "T A"], Float32[Array, "T A"]]:
    """See `api.route`."""
    score_TE = jax.nn.sigmoid(logits_TE)
    choice_TE = score_TE + bias_E[None, :]
    if num_groups > 1:
        choice_TE = _mask_losing_groups(choice_TE, num_groups, topk_groups)
    _, ids_TA = lax.top_k(choice_TE, top_k)
    weights_TA = jnp.take_along_axis(score_TE, ids_TA, axis=1)
    if renormalize and top_k > 1:
        weights_TA = weights_TA / (jnp.sum(weights_TA, axis=1, keepdims=True) + 1e-20)
    return ids_TA, weights_TA * scaling


def _mask_losing_groups(
    choice_TE: Array, num_groups: int, topk_groups: int
) -> Float32[Array, "T E"]:
    """Set experts outside the best groups to -inf; zero would beat a negative biased score."""
    num_tokens, num_experts = choice_TE.shape
    grouped = choice_TE.reshape(num_tokens, num_groups, num_experts // num_groups)
    best_two, _ = lax.top_k(grouped, 2)
    _, winners = lax.top_k(jnp.sum(best_two, axis=-1), topk_groups)
    wins = jnp.any(jax.nn.one_hot(winners, num_groups, dtype=jnp.bool_), axis=1)
    return jnp.where(wins[:, :, None], grouped, -jnp.inf).reshape(num_tokens, num_experts)
