"""Cases of `kda_decode_paged`: a decode step through layers of K3 on one rank of eight, or on one.

A call is a whole chain of layers, since one layer takes less time than the host needs to start a
program. The layers depend on each other through the pool, a mutable array that stays in place. Rows
move from one page to another, so that all calls read the same states.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from kernel_bench.case import Case, Work

from pallas_kernels.kda import kda_decode_paged
from pallas_kernels.words import to_words

PAGE_WORDS = 36864  # of a head: 128 x 128 float32, 9 x 128 bfloat16, and padding
ENTRY_WORDS = 576
TAPS = 4


def cases() -> list[Case]:
    """Decode batches at 12 heads (eight ranks) and 96 (one rank)."""
    shapes = [(rows, heads) for heads in (12, 96) for rows in (1, 8, 32, 64, 256)]
    full = [
        Case(
            op="kda_decode_paged",
            shape=f"rows{rows}-heads{heads}-layers{_num_layers(rows, heads)}",
            build=functools.partial(_build, rows, heads, 128, _num_layers(rows, heads)),
        )
        for rows, heads in shapes
    ]
    smoke = Case(
        op="kda_decode_paged",
        shape="smoke",
        build=functools.partial(_build, 3, 2, 16, 2),
        implementations=("xla",),
        smoke=True,
    )
    return [*full, smoke]


def _num_layers(rows: int, heads: int) -> int:
    return 32 if rows * heads <= 800 else 8


def _build(rows: int, heads: int, dim: int, layers: int) -> Work:
    rng = np.random.default_rng(rows)
    num_sets = 4 if rows <= 8 else 1

    def normal(*shape: int, scale: float = 1.0, dtype: DTypeLike = jnp.float32) -> jax.Array:
        return jnp.asarray(rng.standard_normal(shape, np.float32) * scale, dtype)

    activations = [(rows, 3, heads, dim), (rows, heads, dim), (rows, heads), (rows, heads, dim)]
    pages = 1 + rng.permutation(2 * num_sets * rows).reshape(num_sets, 2, rows)
    inputs = [
        (
            *(normal(*shape, dtype=jnp.bfloat16) for shape in activations),
            jnp.asarray(source, jnp.int32),
            jnp.asarray(target, jnp.int32),
        )
        for source, target in pages
    ]
    parameters = (
        normal(layers, 3, heads, dim, TAPS),
        normal(layers, heads, scale=0.3),
        normal(layers, heads, dim, scale=0.3),
        1 + normal(layers, dim, scale=0.1),
    )
    state = to_words(normal(heads * dim * dim, scale=0.3), jnp.float32)
    window = to_words(normal((TAPS - 1) * 3 * heads * dim), jnp.bfloat16)
    used = jnp.concatenate([state, window])
    page = jnp.pad(used, (0, heads * PAGE_WORDS - used.size)).reshape(-1, ENTRY_WORDS)
    shape = (layers, 1 + 2 * num_sets * rows, *page.shape)
    pool = jax.new_ref(jax.jit(lambda page: jnp.broadcast_to(page, shape))(page))
    words = 2 * used.size + heads * dim * 7  # twice the state; activations, output
    return Work(
        call=_call,
        inputs=inputs,
        weights=(*parameters, pool),
        num_bytes=layers * (rows * words * 2 + heads * dim * 5 * 4),
        num_flops=layers * rows * heads * dim * dim * 7,
    )


def _call(
    implementation: str, inputs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...]
) -> jax.Array:
    qkv, f, b, gate, source, target = inputs
    taps, A_log, dt_bias, o_norm, pool_ref = weights
    pool = pool_ref[...]
    outputs = []
    for layer in range(pool.shape[0]):
        y, pool = kda_decode_paged(
            qkv,
            f,
            b,
            gate,
            taps[layer],
            A_log[layer],
            dt_bias[layer],
            o_norm[layer],
            pool,
            source,
            target,
            position=layer,
            lower_bound=-5.0,
            eps=1e-5,
            implementation=implementation,
        )
        outputs.append(y)
    pool_ref[...] = pool
    return jnp.stack(outputs).astype(jnp.float32)
