"""Cases of `route`: top 16 of 896 experts, as in K3.

A call is a chain of layers, each with logits of its own; a barrier of the compiler, which costs
nothing on the device, makes a layer wait for the one before.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from kernel_bench.case import Case, Work

from pallas_kernels.router import route

NUM_EXPERTS, TOP_K = 896, 16


def cases() -> list[Case]:
    """Decode batches and a prefill chunk."""
    full = [
        Case(
            op="route",
            shape=f"rows{rows}-layers{layers}",
            build=functools.partial(_build, rows, NUM_EXPERTS, TOP_K, layers),
            tolerance=1e-4,
        )
        for rows, layers in ((1, 32), (8, 32), (64, 32), (256, 32), (8192, 4))
    ]
    smoke = Case(
        op="route",
        shape="smoke",
        build=functools.partial(_build, 3, 64, 4, 2),
        implementations=("xla",),
        smoke=True,
    )
    return [*full, smoke]


def _build(rows: int, num_experts: int, top_k: int, layers: int) -> Work:
    rng = np.random.default_rng(rows)
    logits = [
        jnp.asarray(rng.standard_normal((rows, num_experts), np.float32)) for _ in range(layers)
    ]
    bias = jnp.asarray(rng.standard_normal(num_experts, np.float32) * 0.1)
    return Work(
        call=functools.partial(_call, top_k),
        inputs=[(bias, logits)],
        weights=(),
        num_bytes=layers * rows * (num_experts + 2 * top_k) * 4,
        num_flops=layers * rows * num_experts * 4,
    )


def _call(
    top_k: int, implementation: str, inputs: tuple[jax.Array, list[jax.Array]], _: tuple[()]
) -> jax.Array:
    bias, layers = inputs
    sums = []
    for logits in layers:
        ids, weights = route(
            logits, bias, top_k=top_k, renormalize=True, scaling=2.5, implementation=implementation
        )
        bias, ids, weights = lax.optimization_barrier((bias, ids, weights))
        sums.append((ids, weights))
    return jnp.stack([ids * weights for ids, weights in sums])
