"""Cases of `mla_prefill`: chunks of prompts, cold and behind a cached prefix, at K3's sizes.

`num_flops` counts the absorbed form, 2176 a (query, visible slot, head). The form that first
expands the entries to keys and values of every head would need 640, and 262144 an entry and head.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from kernel_bench.case import Case, Work

from pallas_kernels.mla import mla_prefill

ENTRY, LATENT, PAGE_TOKENS = 576, 512, 768


def cases() -> list[Case]:
    """Prompt chunks at 12 heads (one rank of eight), if the name has no other number."""
    shapes = {
        "tokens8192": ((8192,), 0, 12),
        "tokens2048-cached6144": ((2048,), 6144, 12),
        "rows4-cached2048": ((500, 24, 300, 200), 2048, 12),
        "tokens256-cached32512": ((256,), 32512, 12),
        "tokens16-cached8192": ((16,), 8192, 12),
        "tokens1024-heads96": ((1024,), 0, 96),
    }
    full = [
        Case(
            op="mla_prefill",
            shape=shape,
            build=functools.partial(_build, *arguments, PAGE_TOKENS, ENTRY, LATENT),
            implementations=("xla", "mosaic"),
        )
        for shape, arguments in shapes.items()
    ]
    smoke = Case(
        op="mla_prefill",
        shape="smoke",
        build=functools.partial(_build, (5, 2), 9, 2, 8, 20, 12),
        implementations=("xla",),
        smoke=True,
    )
    return [*full, smoke]


def _build(
    lengths: tuple[int, ...], cached: int, heads: int, page_tokens: int, entry: int, latent: int
) -> Work:
    """Every set of inputs has pages of its own."""
    rng = np.random.default_rng(sum(lengths))
    rows, num_tokens, num_sets = len(lengths), sum(lengths), 2
    columns = -(-(cached + max(lengths)) // page_tokens)
    pages = rng.permutation(num_sets * rows * columns).reshape(num_sets, rows, columns)
    key = jax.random.key(0)

    def normal(*shape: int) -> jax.Array:
        return jax.random.normal(key, shape, jnp.bfloat16)

    words = jax.jit(lambda: jax.lax.bitcast_convert_type(
        normal(1, pages.size, page_tokens, entry), jnp.uint16
    ))  # fmt: skip
    starts = jnp.asarray(np.concatenate([[0], np.cumsum(lengths)]), jnp.int32)
    q = normal(num_tokens, heads, entry)
    pairs = sum(length * cached + length * (length + 1) // 2 for length in lengths) * heads
    entries = rows * cached + num_tokens
    return Work(
        call=functools.partial(_call, latent),
        inputs=[(q, jnp.asarray(table, jnp.int32)) for table in pages],
        weights=(words(), jnp.full((rows,), cached, jnp.int32), starts),
        num_bytes=2 * (entries * entry + num_tokens * heads * (entry + latent)),
        num_flops=pairs * 2 * (entry + latent),
    )


def _call(
    latent: int, implementation: str, inputs: tuple[jax.Array, ...], weights: tuple[jax.Array, ...]
) -> jax.Array:
    q, table = inputs
    pool, cached, starts = weights
    z = mla_prefill(
        q,
        pool,
        table,
        cached,
        starts,
        position=0,
        latent=latent,
        dtype=jnp.bfloat16,
        scale=192**-0.5,
        implementation=implementation,
    )
    return z.astype(jnp.float32)
