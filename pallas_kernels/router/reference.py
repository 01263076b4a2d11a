"""Reference router: rank everything with stable sorts."""

import jax.numpy as jnp
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
    num_tokens, num_experts = logits_TE.shape
    score_TE = 1.0 / (1.0 + jnp.exp(-logits_TE))
    choice_TE = score_TE + bias_E[None, :]
    if num_groups > 1:
        group_of_E = jnp.arange(num_experts, dtype=jnp.int32) // (num_experts // num_groups)
        best_two = jnp.sort(choice_TE.reshape(num_tokens, num_groups, -1), axis=-1)[:, :, -2:]
        winners = _first(jnp.sum(best_two, axis=-1), topk_groups)
        eligible_TE = jnp.any(group_of_E[None, :, None] == winners[:, None, :], axis=-1)
        choice_TE = jnp.where(eligible_TE, choice_TE, -jnp.inf)
    ids_TA = _first(choice_TE, top_k)
    weights_TA = jnp.take_along_axis(score_TE, ids_TA, axis=1)
    if renormalize and top_k > 1:
        weights_TA = weights_TA / (jnp.sum(weights_TA, axis=1, keepdims=True) + 1e-20)
    return ids_TA, weights_TA * scaling


def _first(values_TE: Float32[Array, "T E"], count: int) -> Int32[Array, "T count"]:
    """Return the indices of the `count` largest values, equal values by ascending index."""
    return jnp.argsort(-values_TE, axis=1, stable=True)[:, :count].astype(jnp.int32)
