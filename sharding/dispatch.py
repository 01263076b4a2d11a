"""How tokens reach the experts of other ranks, and their results come back.

Called inside `shard_map` over the `(dp, tp)` mesh. What crosses is the experts' input, which in a
LatentMoE is the latent of half the hidden width (k3-model.md section 5.3), with the token's expert
ids and weights. A token goes at most once to a rank, however many of its experts are there. No
token is ever dropped, and results are summed in float32.

The exchange runs over `axes`: `(dp, tp)` when the tokens are sharded over `tp`, and `(dp,)` when
all `tp` ranks of a replica have the same tokens. Then a rank exchanges only with the ranks of the
same `tp` index, whose experts are one part of all, and the sum over `tp` is left to the caller.

Letters: `T` tokens of this rank, `N` ranks of the exchange, `C` places for tokens of one rank at
another, `A` experts a token, `L` width of the experts' input.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Float32, Int32, UInt

from sharding.axes import DP, TP, ParallelConfig

Experts = Callable[[Array, Array, Array], Array]
_ROOM = 1.25  # places for tokens, of those that an even routing needs
_MULTIPLE = 8  # places come in multiples of this

ragged_all_to_all = lax.ragged_all_to_all
NOT_RAGGED = frozenset({"cpu"})  # platforms whose compiler does not have it


def check_platform(parallel: ParallelConfig, platform: str) -> None:
    """Refuse an exchange that a platform does not have.

    Raises:
      ValueError: it is `ragged`, on a CPU.
    """
    if parallel.dispatch == "ragged" and platform in NOT_RAGGED and parallel.num_ranks > 1:
        raise ValueError(
            f"dispatch is not supported here: got 'ragged' on platform {platform!r}; expected "
            "'all_gather' or 'all_to_all'"
        )


def expert_axes(*, is_sharded: bool) -> tuple[str, ...]:
    """Axes of the exchange; `is_sharded` tells whether tokens are sharded over `tp`."""
    return (DP, TP) if is_sharded else (DP,)


def first_expert(parallel: ParallelConfig, num_local: int) -> Int32[Array, ""]:
    """Id of this rank's first expert, of `num_local` that it holds."""
    if parallel.experts == "tp":
        return jnp.int32(0)
    return jnp.int32(num_local) * lax.axis_index((DP, TP)).astype(jnp.int32)


def expert_load(
    parallel: ParallelConfig, ids: Int32[Array, "T A"], num_local: int
) -> Int32[Array, " R"]:
    """How many (token, expert) pairs of these go to each rank of the mesh."""
    valid = ids >= 0
    if parallel.experts == "tp":
        return jnp.full(parallel.num_ranks, jnp.sum(valid, dtype=jnp.int32))
    rank = jnp.where(valid, ids // num_local, parallel.num_ranks).reshape(-1)
    return jnp.zeros(parallel.num_ranks, jnp.int32).at[rank].add(1, mode="drop")


def exchange(
    parallel: ParallelConfig,
    axes: tuple[str, ...],
    experts: Experts,
    z: Float[Array, "T L"],
    ids: Int32[Array, "T A"],
    mixing: Float32[Array, "T A"],
    *,
    num_local: int,
    capacity: int | None = None,
) -> Float32[Array, "T L"]:
    """Weighted results of the experts of all ranks of `axes`, for this rank's tokens.

    * `all_gather`: every rank gets all tokens; results are reduce-scattered.
    * `all_to_all`: each rank gets the tokens that need it, in a fixed number of places. What does
      not fit follows in another round; all ranks do the same number of rounds.
    * `ragged`: as that, in exactly as many places as are needed. Not on CPUs.

    Args:
      axes: of `expert_axes`.
      experts: `(z [n, L], ids [n, A], mixing [n, A]) -> float32 [n, L]`, the part of this rank's
        experts; rows with ids of -1 contribute nothing, whatever else they hold.
      ids: global expert ids; -1 for no expert.
      num_local: experts that each rank holds, whole or in part.
      capacity: places for tokens of one rank at another in a round of `all_to_all`; see
        `default_capacity`.
    """
    num_ranks = parallel.num_ranks if TP in axes else parallel.dp
    if num_ranks == 1:
        return experts(z, ids, mixing)
    words = to_words(z, ids, mixing)

    def run(words: Array) -> Array:
        return experts(*from_words(words, z, ids))

    if parallel.dispatch == "all_gather":
        with jax.named_scope("dispatch"):
            everyone = lax.all_gather(words, axes, axis=0, tiled=True)
        partials = run(everyone)
        with jax.named_scope("combine"):
            return lax.psum_scatter(partials, axes, scatter_dimension=0, tiled=True)
    needs = _needs(parallel, axes, ids, num_local)
    if parallel.dispatch == "ragged":
        return _ragged(axes, run, words, needs)
    if capacity is None:
        capacity = default_capacity(z.shape[0], num_ranks, ids.shape[1])
    return _padded(axes, run, words, needs, capacity)


def default_capacity(num_tokens: int, num_ranks: int, num_choices: int) -> int:
    """Places for tokens of one rank at another: as many as an even routing sends, and a quarter
    more. Among few ranks that is every token."""
    share = 1.0 - (1.0 - 1.0 / num_ranks) ** num_choices
    places = math.ceil(_ROOM * share * num_tokens / _MULTIPLE) * _MULTIPLE
    return min(num_tokens, places)


def to_words(
    z: Float[Array, "T L"], ids: Int32[Array, "T A"], mixing: Float32[Array, "T A"]
) -> UInt[Array, "T W"]:
    """All that is sent of a token, in words of the size of `z`: one collective instead of three.

    A place without a token holds words of ones, which are ids of -1.
    """
    kind = _word_type(z)
    parts = [lax.bitcast_convert_type(x, kind).reshape(x.shape[0], -1) for x in (z, ids, mixing)]
    return jnp.concatenate(parts, axis=1)


def from_words(
    words: UInt[Array, "n W"], z: Float[Array, "T L"], ids: Int32[Array, "T A"]
) -> tuple[Float[Array, "n L"], Int32[Array, "n A"], Float32[Array, "n A"]]:
    """Take `to_words` apart; `z` and `ids` tell types and widths."""
    latents, routing = jnp.split(words, [z.shape[1]], axis=1)
    if words.dtype.itemsize == 2:
        routing = routing.reshape(words.shape[0], -1, 2)
    got_ids, mixing = jnp.split(lax.bitcast_convert_type(routing, jnp.int32), 2, axis=1)
    latents = lax.bitcast_convert_type(latents, z.dtype)
    return latents, got_ids, lax.bitcast_convert_type(mixing, jnp.float32)


def _word_type(z: Array) -> jnp.dtype:
    return jnp.dtype(jnp.uint16 if z.dtype.itemsize == 2 else jnp.uint32)


def _ones(words: Array) -> int:
    return int(jnp.iinfo(words.dtype).max)


def _needs(
    parallel: ParallelConfig, axes: tuple[str, ...], ids: Int32[Array, "T A"], num_local: int
) -> Bool[Array, "T N"]:
    """Which ranks of the exchange each token has to reach."""
    valid = ids >= 0
    num_ranks = parallel.num_ranks if TP in axes else parallel.dp
    if parallel.experts == "tp":
        return jnp.broadcast_to(jnp.any(valid, axis=1)[:, None], (ids.shape[0], num_ranks))
    rank = ids // num_local
    if TP not in axes:  # only ranks with this rank's `tp` index
        valid &= rank % parallel.tp == lax.axis_index(TP).astype(jnp.int32)
        rank //= parallel.tp
    one_hot = rank[:, :, None] == jnp.arange(num_ranks, dtype=jnp.int32)[None, None]
    return jnp.any(one_hot & valid[:, :, None], axis=1)


def _places(needs: Bool[Array, "T N"]) -> Int32[Array, "T N"]:
    """Position of each token among those that go to the same rank."""
    return jnp.cumsum(needs, axis=0, dtype=jnp.int32) - 1


def _tokens_in_places(
    needs: Bool[Array, "T N"], places: Int32[Array, "T N"], num_places: int
) -> Int32[Array, "N C"]:
    """Token in each place of each rank; `T` where there is none."""
    num_tokens, num_ranks = needs.shape
    token = jnp.broadcast_to(jnp.arange(num_tokens, dtype=jnp.int32)[:, None], needs.shape)
    rank = jnp.broadcast_to(jnp.arange(num_ranks, dtype=jnp.int32)[None], needs.shape)
    place = jnp.where(needs & (places >= 0), places, num_places)
    empty = jnp.full((num_ranks, num_places), num_tokens, jnp.int32)
    return empty.at[rank, place].set(token, mode="drop")


def _collect(
    back: Float32[Array, "N C L"], needs: Bool[Array, "T N"], places: Int32[Array, "T N"]
) -> Float32[Array, "T L"]:
    """Sum each token's results, in the order of the ranks."""
    total = jnp.zeros((needs.shape[0], back.shape[2]), jnp.float32)
    for rank in range(back.shape[0]):
        taken = back[rank].at[places[:, rank]].get(mode="clip")
        total += jnp.where(needs[:, rank, None], taken, 0.0)
    return total


def _padded(
    axes: tuple[str, ...],
    run: Callable[[Array], Array],
    words: UInt[Array, "T W"],
    needs: Bool[Array, "T N"],
    capacity: int,
) -> Float32[Array, "T L"]:
    """All-to-all in rounds of `capacity` places."""
    num_tokens, num_ranks = needs.shape
    places = _places(needs)

    def swap(x: Array) -> Array:
        return lax.all_to_all(x, axes, split_axis=0, concat_axis=0, tiled=True)

    def one_round(first: Int32[Array, ""] | int) -> Array:
        here = places - first
        in_round = needs & (here >= 0) & (here < capacity)
        token = _tokens_in_places(in_round, here, capacity)
        sent = words.at[token].get(mode="fill", fill_value=_ones(words))
        with jax.named_scope("dispatch"):
            got = swap(sent).reshape(num_ranks * capacity, -1)
        back = run(got).reshape(num_ranks, capacity, -1)
        with jax.named_scope("combine"):
            back = swap(back)
        return _collect(back, in_round, here)

    if capacity >= num_tokens:
        return one_round(0)
    most = lax.pmax(jnp.max(jnp.sum(needs, axis=0, dtype=jnp.int32)), axes)

    def go_on(state: tuple[Array, Array]) -> Array:
        return state[0] < most

    def step(state: tuple[Array, Array]) -> tuple[Array, Array]:
        first, total = state
        return first + jnp.int32(capacity), total + one_round(first)

    total = jax.eval_shape(one_round, 0)
    start = (jnp.int32(0), jnp.zeros(total.shape, total.dtype))
    return lax.while_loop(go_on, step, start)[1]


def _ragged(
    axes: tuple[str, ...],
    run: Callable[[Array], Array],
    words: UInt[Array, "T W"],
    needs: Bool[Array, "T N"],
) -> Float32[Array, "T L"]:
    """Exact sizes. Buffers have room for every token of every rank, one rank after the other."""
    num_tokens, num_ranks = needs.shape
    places = _places(needs)
    token = _tokens_in_places(needs, places, num_tokens).reshape(-1)
    num_sent = jnp.sum(needs, axis=0, dtype=jnp.int32)
    num_got = lax.all_to_all(num_sent, axes, split_axis=0, concat_axis=0, tiled=True)
    block_of_rank = jnp.arange(num_ranks, dtype=jnp.int32) * num_tokens
    own_block = jnp.full(num_ranks, num_tokens, jnp.int32) * lax.axis_index(axes).astype(jnp.int32)

    def swap(x: Array, fill: int, sizes: tuple[Array, Array]) -> Array:
        out = jnp.full((num_ranks * num_tokens, x.shape[1]), fill, x.dtype)
        return ragged_all_to_all(
            x, out, block_of_rank, sizes[0], own_block, sizes[1], axis_name=axes
        )

    sent = words.at[token].get(mode="fill", fill_value=_ones(words))
    with jax.named_scope("dispatch"):
        got = swap(sent, _ones(words), (num_sent, num_got))
    back = run(got)
    with jax.named_scope("combine"):
        back = swap(back, 0, (num_got, num_sent))
    return _collect(back.reshape(num_ranks, num_tokens, -1), needs, places)
