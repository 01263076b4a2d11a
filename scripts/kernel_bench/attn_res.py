"""Cases of `attn_res_norm`: consecutive sub-layer boundaries of K3.

A call is a chain of boundaries, since one takes less time than the host needs to start a program:
what one norms is added to the prefix by the next. Each boundary has its own weights. Few rows share
a bank, as they do in the model; with more, each boundary has its own, so that it comes from memory.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from kernel_bench.case import Case, Work

from pallas_kernels.attn_res import attn_res_norm

HIDDEN = 7168
SHARED_BANK_ROWS = 8


def cases() -> list[Case]:
    """Decode batches and a prefill chunk with a middle bank of K3; some with other banks."""
    shapes = [(rows, 4) for rows in (1, 8, 64, 256, 8192)]
    shapes += [(rows, bank) for bank in (0, 1, 8) for rows in (1, 8192)]
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
    return 32 if rows <= SHARED_BANK_ROWS else 16 if rows <= 256 else 2


def _build(rows: int, bank: int, hidden: int, layers: int) -> Work:
    num_banks = 1 if rows <= SHARED_BANK_ROWS else layers
    keys = iter(jax.random.split(jax.random.key(rows), num_banks * bank + 3 * layers + 2))

    @functools.partial(jax.jit, static_argnums=(1, 2))
    def normal(key: jax.Array, shape: tuple[int, ...], scale: float) -> jax.Array:
        return (jax.random.normal(key, shape) * scale).astype(jnp.bfloat16)

    def sources(count: int) -> tuple[jax.Array, ...]:
        return tuple(normal(next(keys), (rows, hidden), 1.0) for _ in range(count))

    def weights() -> tuple[jax.Array, ...]:
        proj = normal(next(keys), (hidden,), hidden**-0.5)
        norm, gain = (1 + normal(next(keys), (hidden,), 0.1) for _ in range(2))
        return norm, proj, gain

    return Work(
        call=_call,
        inputs=[(*sources(2), [sources(bank) for _ in range(num_banks)])],
        weights=tuple(weights() for _ in range(layers)),
        num_bytes=layers * ((bank + 4) * rows + 3) * hidden * 2,
        num_flops=layers * rows * hidden * (bank * 6 + 10),
    )


def _call(
    implementation: str, inputs: tuple[Any, ...], weights: tuple[tuple[jax.Array, ...], ...]
) -> jax.Array:
    x, prefix, banks = inputs
    for layer, (norm, proj, gain) in enumerate(weights):
        bank = banks[layer % len(banks)]
        prefix, x = attn_res_norm(
            bank, prefix, x, (norm, proj), gain, eps=1e-5, implementation=implementation
        )
    return x
