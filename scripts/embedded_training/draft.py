"""Training of the DSpark draft against the frozen target (k3-model.md section 6).

Half of the texts are from the corpus, half are what the target itself writes greedily: drafts
follow the target's text, which repeats itself more than the corpus does. At random anchors of a
text the draft sees what it will see in the server: context rows of the tokens before the anchor,
and the block. It learns the target's distributions of the tokens that
follow: 0.9 of the total variation, which is the chance that a draft is refused, and 0.1 of the
cross entropy of the text, both less for places further on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Float32, Int32

from embedded_training import data, loop
from embedded_training.loop import Progress, Schedule, Tree
from embedded_training.target import run_batch
from k3jax.config import ModelConfig
from k3jax.draft import model
from k3jax.draft.config import DraftConfig, MlaShape
from k3jax.layers import linear_f32
from sharding.axes import ParallelConfig
from sharding.mesh import make_mesh

ANCHORS = 48  # of a sequence
_GAMMA = 4.0  # places until a loss counts 1/e


class Score(NamedTuple):
    """How well the drafts of a batch do, by place in the block.

    Attributes:
      agree: share of the target's probability that the draft shares: the chance to be taken.
      equal: how often the most likely tokens are the same.
    """

    agree: Float32[Array, " N"]
    equal: Float32[Array, " N"]


def initial_params(cfg: DraftConfig, seed: int) -> dict[str, dict[str, Array]]:
    """Random float32 parameters; the Markov head has little effect at first."""
    params = loop.initial_params(cfg, seed)
    return params | {"markov": {name: 0.1 * x for name, x in params["markov"].items()}}


def train(
    cfg: DraftConfig, target_cfg: ModelConfig, target: Tree, stream: np.ndarray,
    own: Int32[np.ndarray, "N T"], schedule: Schedule,
) -> Iterator[Progress]:  # fmt: skip
    """Train at random anchors in random pieces of a stream and of the target's own texts.

    Args:
      own: see `target.own_texts`; as many side by side as fit into a piece.
    """
    own = own.reshape(-1, schedule.tokens)
    optimizer = loop.optimizer(schedule)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(
        params: Tree, state: Any, target: Tree, tokens: Array, anchors: Array
    ) -> tuple[Tree, Any, Array]:
        loss, gradient = jax.value_and_grad(
            lambda p: _loss(p, cfg, target_cfg, target, tokens, anchors)[0]
        )(params)
        updates, state = optimizer.update(gradient, state, params)
        return optax.apply_updates(params, updates), state, loss

    rng = np.random.default_rng(schedule.seed + 1)

    def draw() -> tuple[Tree, np.ndarray, np.ndarray]:
        mine = own[rng.integers(0, len(own), schedule.batch // 2)]
        theirs = data.crops(rng, stream, schedule.batch - len(mine), schedule.tokens)
        tokens = np.concatenate([mine, theirs])
        return target, tokens, _anchors(rng, cfg, schedule.batch, schedule.tokens)

    params = initial_params(cfg, schedule.seed)
    return loop.run(schedule, params, optimizer.init(params), step, draw)


def held_out_score(
    params: Tree, cfg: DraftConfig, target_cfg: ModelConfig, target: Tree, stream: np.ndarray,
    batch: int, tokens: int,
) -> Score:  # fmt: skip
    """Mean score on the start of a stream."""
    run = jax.jit(lambda p, w, t, a: _loss(p, cfg, target_cfg, w, t, a)[1])
    rng = np.random.default_rng(0)
    scores = [
        run(params, target, piece, _anchors(rng, cfg, batch, tokens))
        for piece in data.pieces(stream, batch, tokens, most=16)
    ]
    return Score(*(np.mean([np.asarray(s[i]) for s in scores], axis=0) for i in range(2)))


def _anchors(
    rng: np.random.Generator, cfg: DraftConfig, batch: int, tokens: int
) -> Int32[np.ndarray, "B A"]:
    return rng.integers(1, tokens - cfg.num_drafts, (batch, ANCHORS)).astype(np.int32)


def _loss(
    params: Tree,
    cfg: DraftConfig,
    target_cfg: ModelConfig,
    target: Tree,
    tokens: Int32[Array, "B T"],
    anchors: Int32[Array, "B A"],
) -> tuple[Float32[Array, ""], Score]:
    """Mean loss of all blocks, and their score."""
    out = jax.lax.stop_gradient(run_batch(target, target_cfg, tokens, cfg.tap_layers))

    def all_rows(params: Tree, taps: Array, logits: Array, tokens: Array, anchors: Array) -> Any:
        compute = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
        row = functools.partial(_row, compute, cfg, target["top"])
        losses, scores = jax.vmap(row)(taps, logits, tokens, anchors)
        return jnp.mean(losses), Score(*(jnp.mean(x, axis=0) for x in scores))

    # The model's collectives need a mesh, also of one device.
    on_one = jax.shard_map(
        all_rows, mesh=make_mesh(ParallelConfig()), in_specs=PartitionSpec(),
        out_specs=PartitionSpec(), check_vma=False,
    )  # fmt: skip
    return on_one(params, out.taps, out.logits, tokens, anchors)


def _row(
    params: Tree,
    cfg: DraftConfig,
    top: Any,
    taps: Float[Array, "T BH"],
    logits: Float32[Array, "T V"],
    tokens: Int32[Array, " T"],
    anchors: Int32[Array, " A"],
) -> tuple[Float32[Array, ""], Score]:
    """Loss and score of one sequence."""
    width = cfg.num_drafts
    place = jnp.arange(width, dtype=jnp.int32)
    positions = anchors[:, None] + place[None]
    context = model.context_entries(params, cfg, taps, jnp.arange(tokens.shape[0], dtype=jnp.int32))
    inputs = jnp.where(place[None] == 0, tokens[anchors][:, None], cfg.mask_token_id)
    embedded = jnp.take(top["embed"], inputs, axis=0)
    hidden = model.block_hidden(params, cfg, embedded, positions, _attention(cfg, context, anchors))
    markov = params["markov"]
    bias = linear_f32(jnp.take(markov["w1"], tokens[positions], axis=0), markov["w2"])
    draft = linear_f32(hidden, top["lm_head"]) + bias
    p, q = jax.nn.softmax(logits[positions], axis=-1), jax.nn.softmax(draft, axis=-1)
    agree = jnp.sum(jnp.minimum(p, q), axis=-1)
    cross = optax.softmax_cross_entropy_with_integer_labels(draft, tokens[positions + 1])
    weight = jnp.exp(-place.astype(jnp.float32) / _GAMMA)[None]
    loss = jnp.mean(weight * (0.9 * (1 - agree) + 0.1 * cross))
    if cfg.has_confidence:
        sure = model.confidence(params, hidden, tokens[anchors], tokens[positions + 1])
        wanted = jax.lax.stop_gradient(agree)
        surprise = wanted * jnp.log(sure + 1e-6) + (1 - wanted) * jnp.log(1 - sure + 1e-6)
        loss = loss - 0.1 * jnp.mean(surprise)
    equal = jnp.argmax(logits[positions], axis=-1) == jnp.argmax(draft, axis=-1)
    return loss, Score(jnp.mean(agree, axis=0), jnp.mean(equal.astype(jnp.float32), axis=0))


def _attention(
    cfg: DraftConfig, context: Float[Array, "Z T C"], anchors: Int32[Array, " A"]
) -> model.Attend:
    """Dense attention of blocks over the context before their anchors and over themselves."""
    assert isinstance(cfg.attention, MlaShape)
    latent = cfg.attention.kv_lora_rank

    def attend(layer: int, query: Array, own: Array) -> Array:
        before = jnp.arange(context.shape[1])[None] < anchors[:, None]
        far = jnp.einsum("axnc,tc->axnt", query, context[layer]).astype(jnp.float32)
        far = jnp.where(before[:, None, None], far, -jnp.inf)
        near = jnp.einsum("axnc,ayc->axny", query, own).astype(jnp.float32)
        scores = jnp.concatenate([far, near], axis=-1) * cfg.softmax_scale
        weight = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
        z = jnp.einsum("axnt,tc->axnc", weight[..., : far.shape[-1]], context[layer, :, :latent])
        return z + jnp.einsum("axny,ayc->axnc", weight[..., far.shape[-1] :], own[..., :latent])

    return attend
