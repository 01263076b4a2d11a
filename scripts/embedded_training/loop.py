"""What both trainings share: first parameters, learning rate, steps and their progress."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from k3jax.layers import initializer
from k3jax.params import AnyConfig, describe

Tree = Mapping[str, Mapping[str, Any]]
_LOG_EVERY = 25  # steps


@dataclasses.dataclass(frozen=True, kw_only=True)
class Schedule:
    """How long and how fast to learn.

    Attributes:
      batch, tokens: sequences of a step, and their length.
    """

    steps: int
    batch: int
    tokens: int
    peak_rate: float
    seed: int


class Progress(NamedTuple):
    """Where a training is.

    Attributes:
      loss: mean since the last report. seconds: since the start.
    """

    step: int
    loss: float
    seconds: float
    params: Tree


def initial_params(cfg: AnyConfig, seed: int) -> dict[str, dict[str, Array]]:
    """Random float32 parameters of all leaves."""
    key = jax.random.key(seed)
    params: dict[str, dict[str, Array]] = {}
    for part, specs in describe(cfg).items():
        params[part] = {}
        for name, spec in specs.items():
            key, own = jax.random.split(key)
            params[part][name] = initializer(spec)(own, spec.shape, jnp.dtype(jnp.float32))
    return params


def optimizer(schedule: Schedule, **adamw: Any) -> optax.GradientTransformation:
    """AdamW with clipped gradients, a warm-up and a cosine."""
    rate = optax.warmup_cosine_decay_schedule(
        0.0, schedule.peak_rate, min(200, schedule.steps // 10 + 1), schedule.steps,
        schedule.peak_rate * 0.02,
    )  # fmt: skip
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(rate, b2=0.95, **adamw))


def run(
    schedule: Schedule,
    params: Tree,
    state: Any,
    step: Callable[..., tuple[Tree, Any, Array]],
    draw: Callable[[], tuple[Any, ...]],
) -> Iterator[Progress]:
    """Yield from time to time, and at the end.

    Args:
      state: of the optimizer.
      step: `(params, state, *inputs) -> (params, state, loss)`.
      draw: the inputs of a step.
    """
    begin_s, losses = time.monotonic(), []
    for number in range(1, schedule.steps + 1):
        params, state, loss = step(params, state, *draw())
        losses.append(loss)
        if number % _LOG_EVERY == 0 or number == schedule.steps:
            mean = float(np.mean([float(value) for value in losses]))
            losses = []
            yield Progress(number, mean, time.monotonic() - begin_s, params)
