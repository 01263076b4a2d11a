"""Random inputs of the KDA operators on the page pool, shared by their tests."""

import jax
import jax.numpy as jnp

from pallas_kernels.kda import read_states, write_states

POSITION, PAGES = 1, 9


def paged_inputs(source, *, slots=(), heads=2, dim=8, dtype=jnp.float32, seed=0):
    """Random arguments as a dict, up to the pool; pages that no row reads hold NaN.

    `slots` are the dims between rows and heads: none, or the number of token slots.
    """
    keys = iter(jax.random.split(jax.random.key(seed), 10))

    def normal(*shape, dtype=jnp.float32):
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    rows, page_words = len(source), heads * dim * (2 * dim + 24)
    inputs = {
        "qkv": normal(rows, *slots, 3, heads, dim, dtype=dtype),
        "f": normal(rows, *slots, heads, dim, dtype=dtype),
        "b": normal(rows, *slots, heads, dtype=dtype),
        "gate": normal(rows, *slots, heads, dim, dtype=dtype),
        "taps": normal(3, heads, dim, 4),
        "A_log": normal(heads),
        "dt_bias": normal(heads, dim),
        "o_norm": normal(dim),
    }
    window, state = normal(rows, 3, 3, heads, dim, dtype=dtype), normal(rows, heads, dim, dim)
    pool = jnp.full((3, PAGES, 8, page_words // 8), 0xFFFF, jnp.uint16)
    pool = write_states(pool, jnp.asarray(source, jnp.int32), window, state, position=POSITION)
    return inputs | {"pool": pool}


def states(inputs, pool, pages):
    """Windows and states in some pages."""
    shape = (3, *inputs["qkv"].shape[-3:])
    return read_states(pool, pages, shape, inputs["qkv"].dtype, position=POSITION)[:2]
