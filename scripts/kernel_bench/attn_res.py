"""Cases of `attn_res_norm`: sub-layer boundaries of K3, each with a bank and weights of its own.

A call is a chain of boundaries, since one takes less time than the host needs to start a program:
what one norms is added to the prefix by the next.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from kernel_bench.case import Case, Work

from pallas_kernels.attn_res import attn_res_norm

HIDDEN = 7168


def cases() -> list[Case]:
    """Decode batches and a prefill chunk; the first, a middle and the largest bank of K3."""
    shapes = [(rows, bank) for bank in (0, 4, 8) for rows in (1, 8, 64, 256, 8192)]
    full = [
        Case(
            op="attn_res_norm",
            shape=f"rows{rows}-bank{bank}-layers{_num_layers(rows)}",
            build=functools.partial(_build, rows, bank, HIDDEN, _num_layers(rows)),
            tolerance=3e-2,  # the roundings of a whole chain
        )
        for rows, bank in shapes
    ]
    smoke = Case(
        op="attn_res_norm",
        shape="smoke",
        build=functools.partial(_build, 3, 2, 64, 2),
        implementations=("xla",),
        smoke=True,
    )
    return [*full, smoke]


def _num_layers(rows: int) -> int:
    return 32 if rows <= 64 else 16 if rows <= 256 else 2


def _build(rows: int, bank: int, hidden: int, layers: int) -> Work:
    keys = iter(jax.random.split(jax.random.key(rows), layers * (bank + 4) + 1))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
        return (jax.random.normal(key, shape) * scale).astype(jnp.bfloat16)

    def source() -> jax.Array:
        return normal(next(keys), (rows, hidden), 1.0)

    banks = [tuple(source() for _ in range(bank)) for _ in range(layers)]
    weights = [
        tuple(1 + normal(next(keys), (hidden,), hidden**-0.5) for _ in range(3))
        for _ in range(layers)
    ]
    return Work(
        call=_call,
        inputs=[(source(), source(), banks)],
        weights=tuple(weights),
        num_bytes=layers * ((bank + 4) * rows + 3) * hidden * 2,
        num_flops=layers * rows * hidden * (bank * 6 + 10),
    )


def _call(
    implementation: str, inputs: tuple[Any, ...], weights: tuple[tuple[jax.Array, ...], ...]
) -> jax.Array:
    x, prefix, banks = inputs
    for bank, (norm, proj, gain) in zip(banks, weights, strict=True):
        prefix, x = attn_res_norm(
            bank, prefix, x, (norm, proj), gain, eps=1e-5, implementation=implementation
        )
    return x.astype(jnp.float32) + prefix
