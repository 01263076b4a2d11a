"""Cases of `mla_decode`: decode batches at K3's sizes, on one rank of eight or of one.

A call is a chain of layers, each with pages of its own; a barrier of the compiler, which costs
nothing on the device, makes a layer wait for the one before.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from kernel_bench.case import Case, Work

from pallas_kernels.mla import mla_decode

ENTRY, LATENT = 576, 512
PAGE_TOKENS = {12: 768, 96: 6144}  # by heads
MOST_SLOTS = 4_200_000  # of all layers together: 5 GB of entries


def cases() -> list[Case]:
    """8k and 128k slots a row, at 12 heads (eight ranks) and 96 (one rank)."""
    sizes = [(rows, 8192) for rows in (1, 8, 64, 256)] + [(rows, 131_072) for rows in (1, 8)]
    full = []
    for heads, page_tokens in PAGE_TOKENS.items():
        for rows, context in sizes:
            layers = min(24, max(1, MOST_SLOTS // (rows * context)))
            build = functools.partial(
                _build, rows, context, heads, layers, page_tokens, ENTRY, LATENT
            )
            shape = f"rows{rows}-context{context}-heads{heads}-layers{layers}"
            full.append(Case(op="mla_decode", shape=shape, build=build))
    smoke = Case(
        op="mla_decode",
        shape="smoke",
        build=functools.partial(_build, 3, 20, 2, 2, 8, 20, 12),
        implementations=("xla",),
        smoke=True,
    )
    return [*full, smoke]


def _build(
    rows: int, context: int, heads: int, layers: int, page_tokens: int, entry: int, latent: int
) -> Work:
    columns = -(-context // page_tokens)
    pages = np.random.default_rng(rows).permutation(rows * columns).reshape(rows, columns)
    key = jax.random.key(rows)

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16)

    words = jax.jit(lambda: lax.bitcast_convert_type(
        normal(layers, pages.size, page_tokens, entry), jnp.uint16
    ))  # fmt: skip
    pairs = rows * context * heads
    entries = rows * context
    return Work(
        call=functools.partial(_call, latent),
        inputs=[(normal(rows, heads, entry), jnp.asarray(pages, jnp.int32))],
        weights=(words(), jnp.full((rows,), context, jnp.int32)),
        num_bytes=layers * 2 * (entries * entry + rows * heads * (entry + latent)),
        num_flops=layers * pairs * 2 * (entry + latent),
    )


def _call(
    latent: int, implementation: str, inputs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...]
) -> jax.Array:
    q, table = inputs
    pool, context = weights
    outputs = []
    for layer in range(pool.shape[0]):
        z = mla_decode(
            q,
            pool,
            table,
            context,
            position=layer,
            latent=latent,
            dtype=jnp.bfloat16,
            scale=192**-0.5,
            implementation=implementation,
        )
        q, z = lax.optimization_barrier((q, z))
        outputs.append(z)
    return jnp.stack(outputs).astype(jnp.float32)
