"""Cases of `moe_experts`: K3's experts, packed, all local or the share of one rank of eight."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from kernel_bench.case import Case, Work

from pallas_kernels.moe import PackedWeight, moe_experts
from pallas_kernels.situ import situ_glu

NUM_EXPERTS, CHOICES, SIZE_L, SIZE_F = 896, 16, 3584, 3072
BYTES_PER_WEIGHT = 1 / 2 + 1 / 32
_ACTIVATION = functools.partial(situ_glu, beta=4.0, linear_beta=25.0)


def cases() -> list[Case]:
    """Rows of a decode batch, and tokens of a prefill chunk on one rank of eight."""
    shapes = [(rows, local) for local in (896, 448, 112) for rows in (1, 8, 64)]
    shapes += [(256, 112), (2048, 112), (8192, 112)]
    full = [
        Case(
            op="moe_experts",
            shape=f"rows{rows}-local{local}",
            build=functools.partial(_build, rows, local, NUM_EXPERTS, CHOICES, SIZE_L, SIZE_F),
        )
        for rows, local in shapes
    ]
    smoke = Case(
        op="moe_experts",
        shape="smoke",
        build=functools.partial(_build, 3, 4, 6, 2, 64, 32),
        implementations=("xla",),
        smoke=True,
    )
    return [*full, smoke]


def _build(
    rows: int, num_local: int, num_experts: int, choices: int, size_l: int, size_f: int
) -> Work:
    rng = np.random.default_rng(rows)
    inputs, distinct, local = [], [], []
    for _ in range(8 if rows <= 64 else 2):
        ids = np.argsort(rng.random((rows, num_experts)), axis=1)[:, :choices]
        here = ids[ids < num_local]
        distinct.append(len(set(here.tolist())))
        local.append(here.size)
        z = rng.standard_normal((rows, size_l), np.float32)
        weights = rng.random((rows, choices), np.float32)
        inputs.append(
            (jnp.asarray(z, jnp.bfloat16), jnp.asarray(ids, jnp.int32), jnp.asarray(weights))
        )
    numbers = 3 * size_l * size_f
    return Work(
        call=_call,
        inputs=inputs,
        weights=(
            _packed(1, num_local, 2, size_f, size_l),
            _packed(1, num_local, size_l, size_f),
        ),
        num_bytes=float(np.mean(distinct)) * numbers * BYTES_PER_WEIGHT,
        num_flops=float(np.mean(local)) * numbers * 2,
    )


def _call(
    implementation: str, inputs: tuple[jax.Array, ...], weights: tuple[object, ...]
) -> jax.Array:
    return moe_experts(
        *inputs,
        *weights,
        layer=0,
        first_expert=0,
        activation=_ACTIVATION,
        implementation=implementation,
    )


def _packed(*dims: int) -> PackedWeight:
    lead, last = dims[:-1], dims[-1]
    return PackedWeight(_bytes((*lead, last // 2), 0, 256), _bytes((*lead, last // 32), 116, 5))


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _bytes(shape: tuple[int, ...], low: int, count: int) -> jax.Array:
    """Return mixed bytes in [low, low + count); made in place, as they may fill the device."""
    mixed = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        mixed = mixed * jnp.uint32(0x9E3779B1) + lax.broadcasted_iota(jnp.uint32, shape, axis)
        mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(0x2C1B3C6D)
    mixed = (mixed ^ (mixed >> 12)) * jnp.uint32(0x297A2D39)
    return ((mixed >> 8) % jnp.uint32(count) + jnp.uint32(low)).astype(jnp.uint8)
