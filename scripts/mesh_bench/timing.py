"""Times and checks of programs that run on all devices, from one process or from several."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

WARM_UPS = 2
LEAST_SAMPLES = 5


class WrongResult(Exception):
    """A program does not compute what it should."""


def sample(call: Callable[[], Any], *, target_s: float, most: int) -> list[float]:
    """Seconds of single calls, each waited for; equally many on all processes."""
    for _ in range(WARM_UPS):
        jax.block_until_ready(call())
    count = max(LEAST_SAMPLES, min(most, int(target_s / _timed(call))))
    return [_timed(call) for _ in range(int(_of_all_processes(count)[0]))]


def check_values(result: jax.Array, reference: jax.Array, *, most_error: float) -> float:
    """Largest relative error of any device's part of a result.

    Args:
      reference: sharded as the result is; may have only the first rows of each part.

    Raises:
      WrongResult: it is above `most_error`, or no number. All processes say the same.
    """
    errors: list[float] = []
    for got, want in zip(result.addressable_shards, reference.addressable_shards, strict=True):
        wanted = np.asarray(want.data, np.float32)
        difference = np.asarray(got.data[: len(wanted)], np.float32) - wanted
        errors.append(float(np.linalg.norm(difference) / np.linalg.norm(wanted)))
    error = float(np.max(_of_all_processes(np.max(errors))))
    if not error <= most_error:
        raise WrongResult(f"relative error is too large: got {error:.3g}; expected {most_error:g}")
    return error


def _of_all_processes(value: float) -> np.ndarray:
    """What each process has."""
    return np.atleast_1d(multihost_utils.process_allgather(np.float32(value)))


def _timed(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start
