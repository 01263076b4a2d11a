"""Training of the small K3: cross entropy, balanced experts, weights rounded as in the file."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float32, Int32

from embedded_training import data, loop
from embedded_training.forward import Output, forward
from embedded_training.loop import Progress, Schedule, Tree
from embedded_training.mxfp4 import through
from k3jax.config import ModelConfig
from k3jax.params import describe

_BALANCE_STEP = 1e-3  # of a router's bias, against the load (loss-free balancing)
_OWN_BATCH = 256


def initial_params(cfg: ModelConfig, seed: int) -> dict[str, dict[str, Array]]:
    """Random float32 parameters; states that remember, since their decay is slow at first."""
    params = loop.initial_params(cfg, seed)
    bias = params["kda"]["dt_bias"]
    params["kda"]["dt_bias"] = jax.random.uniform(
        jax.random.key(seed), bias.shape, jnp.float32, -6.0, -1.0
    )
    return params


def computed(params: Tree, cfg: ModelConfig) -> dict[str, dict[str, Array]]:
    """Parameters as the server computes with them: experts through MXFP4, the rest in bfloat16."""
    result: dict[str, dict[str, Array]] = {}
    for part, specs in describe(cfg).items():
        result[part] = {}
        for name, spec in specs.items():
            value = params[part][name]
            if part == "moe" and name in ("w13", "w2"):
                value = through(value)
            result[part][name] = value.astype(
                jnp.bfloat16 if spec.dtype == "compute" else jnp.float32
            )
    return result


def run_batch(
    params: Tree, cfg: ModelConfig, tokens: Int32[Array, "B T"], tap_layers: tuple[int, ...] = ()
) -> Output:
    """`forward` on every row of a batch."""
    return jax.vmap(lambda row: forward(params, cfg, row, tap_layers))(tokens)


def loss_of(
    params: Tree, cfg: ModelConfig, tokens: Int32[Array, "B T1"]
) -> tuple[Float32[Array, ""], Float32[Array, "Z E"]]:
    """Mean cross entropy in nats a token, and the load of the experts."""
    out = run_batch(computed(params, cfg), cfg, tokens[:, :-1])
    losses = optax.softmax_cross_entropy_with_integer_labels(out.logits, tokens[:, 1:])
    return jnp.mean(losses), jnp.sum(out.load, axis=0)


def train(cfg: ModelConfig, stream: np.ndarray, schedule: Schedule) -> Iterator[Progress]:
    """Train on random pieces of a stream."""
    optimizer = loop.optimizer(schedule, weight_decay=0.1, mask=_decays)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params: Tree, state: Any, tokens: Array) -> tuple[Tree, Any, Array]:
        grad = jax.value_and_grad(lambda p: loss_of(p, cfg, tokens), has_aux=True)
        (loss, load), gradient = grad(params)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        bias = params["moe"]["router_bias"]
        bias = bias + _BALANCE_STEP * jnp.sign(jnp.mean(load, axis=-1, keepdims=True) - load)
        return {**params, "moe": {**params["moe"], "router_bias": bias}}, state, loss

    rng = np.random.default_rng(schedule.seed)

    def draw() -> tuple[np.ndarray]:
        return (data.crops(rng, stream, schedule.batch, schedule.tokens + 1),)

    params = initial_params(cfg, schedule.seed)
    return loop.run(schedule, params, optimizer.init(params), step, draw)


def held_out_loss(
    params: Tree, cfg: ModelConfig, stream: np.ndarray, batch: int, tokens: int
) -> float:
    """Mean loss on the start of a stream, in nats a token."""
    run = jax.jit(lambda p, t: loss_of(p, cfg, t)[0])
    batches = data.pieces(stream, batch, tokens + 1, most=16)
    return float(np.mean([float(run(params, piece)) for piece in batches]))


def own_texts(
    params: Tree, cfg: ModelConfig, stream: np.ndarray, *, texts: int, tokens: int, seed: int
) -> Int32[np.ndarray, "N T"]:
    """What the model writes, greedily, behind random pieces of a stream: a quarter is given.

    Args:
      params: as `computed` returns them.
      texts: a multiple of a batch, which has at most `_OWN_BATCH`.
    """
    given = tokens // 4

    @jax.jit
    def write(params: Tree, prompts: Int32[Array, "B P"]) -> Int32[Array, "B T"]:
        def place(i: Array, text: Array) -> Array:
            logits = run_batch(params, cfg, text).logits[:, i - 1]
            return text.at[:, i].set(jnp.argmax(logits, axis=-1).astype(jnp.int32))

        blank = jnp.zeros((prompts.shape[0], tokens), jnp.int32).at[:, :given].set(prompts)
        return jax.lax.fori_loop(given, tokens, place, blank)

    rng, batch = np.random.default_rng(seed), min(texts, _OWN_BATCH)
    written = [write(params, data.crops(rng, stream, batch, given)) for _ in range(texts // batch)]
    return np.concatenate([np.asarray(text) for text in written])


def _decays(params: Tree) -> Any:
    """Matrices decay; gains, gates and biases do not."""
    return jax.tree.map(lambda x: x.ndim >= 3, params)
