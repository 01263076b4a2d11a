"""One case in this process: check every implementation against the first, then time it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from kernel_bench.case import Case, Work
from read_trace import profiled

from pallas_kernels.settings import KernelSettings, using

SAMPLES = 7
TARGET_S = 0.1  # of one sample
CHAIN_LIMIT_S = 0.02  # a slower call is timed alone, without a chain

Line = dict[str, Any]


def measure(case: Case) -> Iterator[Line]:
    """Yield one line for each implementation."""
    work = case.build()
    want: jax.Array | None = None
    for implementation in case.implementations:
        line: Line = {"op": case.op, "shape": case.shape, "implementation": implementation}
        line |= {"floor_us": work.floor_s * 1e6, "device": jax.devices()[0].device_kind}
        try:
            got = _program(work, implementation, 1)(work.inputs[:1], work.weights)
            want = got if want is None else want
            line["error"] = float(jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want)))
            if not line["error"] <= case.tolerance:
                raise ValueError(f"differs from {case.implementations[0]} by {line['error']:.1e}")
            line |= _timed(work, implementation)
        except Exception as error:
            line["failure"] = f"{type(error).__name__}: {error}"[:500]
        yield line


def measure_peer(case: Case, peer: str) -> Line:
    """Time another project's kernel."""
    line: Line = {"op": case.op, "shape": case.shape, "implementation": peer}
    try:
        line |= case.peers[peer]()
    except ImportError as missing:
        line["skipped"] = str(missing)
    except Exception as error:
        line["failure"] = f"{type(error).__name__}: {error}"[:500]
    return line


def _timed(work: Work, implementation: str) -> Line:
    """Time a chain of calls on all sets of inputs in one program; a call is a share of it."""
    one = _program(work, implementation, 1)
    single_s = min(_seconds(one, work.inputs[:1], work.weights, 1) for _ in range(2))
    length = 1 if single_s > CHAIN_LIMIT_S else len(work.inputs)
    program = _program(work, implementation, length)
    inputs = work.inputs[:length]
    jax.block_until_ready(program(inputs, work.weights))
    repeats = max(1, int(TARGET_S / _seconds(program, inputs, work.weights, 1)))
    samples = [_seconds(program, inputs, work.weights, repeats) / length for _ in range(SAMPLES)]
    median = statistics.median(samples)
    busy_us = profiled(lambda: program(inputs, work.weights)).busy_us / length
    return {
        "us": median * 1e6,
        "us_min": min(samples) * 1e6,
        "us_max": max(samples) * 1e6,
        "busy_us": busy_us,
        "gb_per_s": work.num_bytes / median / 1e9,
        "tflop_per_s": work.num_flops / median / 1e12,
        "times_floor": median / work.floor_s,
        "chain": length,
    }


def _program(work: Work, implementation: str, length: int) -> Callable[..., jax.Array]:
    """Compile `length` calls that depend on each other, each with a set of inputs of its own."""
    name, _, launch = implementation.partition("+")

    def chain(inputs: list[tuple[jax.Array, ...]], weights: tuple[object, ...]) -> jax.Array:
        with using(KernelSettings(pdl=launch == "pdl")):
            y = work.call(name, inputs[0], weights)
            for first, *others in inputs[1:length]:
                follows = first + (y.reshape(-1)[0] * 1e-30).astype(first.dtype)
                y = work.call(name, (follows, *others), weights)
        return y

    return jax.jit(chain)


def _seconds(program: Callable[..., jax.Array], inputs: Any, weights: Any, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        y = program(inputs, weights)
    jax.block_until_ready(y)
    return (time.perf_counter() - start) / repeats
