"""MLA over the page pool: write, decode, prefill."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.mla import mla_decode, mla_prefill, mla_write, xla
from pallas_kernels.mla.api import MLA_DECODE, MLA_PREFILL, MLA_WRITE
from pallas_kernels.words import from_words, to_words
from tests.numerics.support import (
    BF16,
    F32,
    RAGGED_LENGTHS,
    each_implementation,
    offsets,
    relative_error,
    unchecked_annotations,
)

N, C, LATENT, SCALE = 3, 20, 12, 0.2
Z, W, POSITION = 3, 8, 1
NAN_WORD = 0x7FC1
SETTINGS = {"position": POSITION, "latent": LATENT, "scale": SCALE}
STATIC = ("position", "latent", "dtype", "scale", "block", "implementation")
decode = jax.jit(mla_decode, static_argnames=STATIC[:4] + STATIC[5:])
prefill = jax.jit(mla_prefill, static_argnames=STATIC)
each_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def _cache(contexts, *, dtype="float32", columns=None, seed=0):
    """Fill a pool in which all that no row uses is NaN.

    Returns the pool, a page table with a random page for every column, and the entries of each row
    in float64 as the pool holds them.
    """
    rng = np.random.default_rng(seed)
    words = [np.asarray(to_words(_normal(rng, context), dtype)) for context in contexts]
    columns = columns or max(-(-context // W) for context in contexts)
    num_pages = len(contexts) * columns + 3
    table = rng.permutation(num_pages)[: len(contexts) * columns].reshape(len(contexts), columns)
    pool = np.full((Z, num_pages, W, words[0].shape[1]), NAN_WORD, np.uint16)
    for row, context in enumerate(contexts):
        slot = np.arange(context)
        pool[POSITION, table[row, slot // W], slot % W] = words[row]
    rows = [np.asarray(from_words(jnp.asarray(w), dtype), np.float64) for w in words]
    return jnp.asarray(pool), jnp.asarray(table, jnp.int32), rows


def _normal(rng, num):
    return jnp.asarray(rng.normal(size=(num, C)), jnp.float32)


def _queries(num, dtype="float32", seed=1):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(num, N, C)) * 2, dtype)


def _float64(q_NC, entries_KC):
    scores = np.asarray(q_NC, np.float64) @ entries_KC.T * SCALE
    weight = np.exp(scores - scores.max(-1, keepdims=True))
    return weight / weight.sum(-1, keepdims=True) @ entries_KC[:, :LATENT]


@each_implementation(MLA_WRITE)
@each_dtype
def test_write_changes_the_named_places_only(implementation, dtype):
    pool, _, _ = _cache((20, 9), dtype=dtype)
    num_pages = pool.shape[1]
    entries = jax.random.normal(jax.random.key(0), (5, C), jnp.float32)
    entries = entries.at[3].set(jnp.nan)  # a padding token
    pages, places = np.array([2, 0, 2, num_pages, 1]), np.array([7, 0, 3, 0, 5])
    got = mla_write(
        pool,
        entries,
        jnp.asarray(pages, jnp.int32),
        jnp.asarray(places, jnp.int32),
        position=POSITION,
        implementation=implementation,
    )
    want, kept = np.array(pool), np.array([0, 1, 2, 4])
    want[POSITION, pages[kept], places[kept]] = np.asarray(to_words(entries, dtype))[kept]
    np.testing.assert_array_equal(got, want)


def test_write_is_in_place_when_the_pool_is_donated():
    pool = jax.ShapeDtypeStruct((Z, 512, W, C), jnp.uint16)
    entries, index = (
        jax.ShapeDtypeStruct((4, C), jnp.bfloat16),
        jax.ShapeDtypeStruct((4,), jnp.int32),
    )
    write = jax.jit(lambda *a: mla_write(*a, position=POSITION), donate_argnums=0)
    memory = write.lower(pool, entries, index, index).compile().memory_analysis()
    pool_bytes = pool.size * 2
    assert memory.alias_size_in_bytes >= pool_bytes
    assert memory.temp_size_in_bytes < pool_bytes // 10


@each_implementation(MLA_DECODE)
@each_dtype
def test_kf_c01_decode_matches_float64_beside_slots_of_nan(implementation, dtype):
    contexts = (1, 7, 8, 9, 0, 37)
    pool, table, rows = _cache(contexts, dtype=dtype)
    q = _queries(len(contexts)).at[4].set(jnp.nan)  # a padding row
    context = jnp.asarray(contexts, jnp.int32)
    z = decode(q, pool, table, context, **SETTINGS, dtype=dtype, implementation=implementation)
    assert not np.any(np.asarray(z[4]))
    for row in (0, 1, 2, 3, 5):
        assert relative_error(z[row], _float64(q[row], rows[row])) < F32


@each_implementation(MLA_PREFILL)
@each_dtype
def test_kf_k05_packed_prefill_matches_float64(implementation, dtype):
    computed = (5, 0, 14, 8, 1, 0, 40)
    contexts = tuple(c + n for c, n in zip(computed, RAGGED_LENGTHS, strict=True))
    pool, table, rows = _cache(contexts, dtype=dtype)
    starts, num_tokens = offsets(RAGGED_LENGTHS), sum(RAGGED_LENGTHS)
    q = _queries(num_tokens + 10).at[num_tokens:].set(jnp.nan)
    z = prefill(
        q,
        pool,
        table,
        jnp.asarray(computed, jnp.int32),
        starts,
        **SETTINGS,
        dtype=dtype,
        implementation=implementation,
    )
    assert not np.any(np.asarray(z[num_tokens:]))
    want = [
        _float64(q[starts[row] + i], rows[row][: computed[row] + i + 1])
        for row, length in enumerate(RAGGED_LENGTHS)
        for i in range(length)
    ]
    assert relative_error(z[:num_tokens], np.stack(want)) < F32


@each_implementation(MLA_DECODE)
def test_bfloat16_queries_stay_close_to_float64(implementation):
    contexts = (37, 64)
    pool, table, rows = _cache(contexts, dtype="bfloat16")
    q = _queries(2, "bfloat16")
    z = decode(
        q,
        pool,
        table,
        jnp.asarray(contexts, jnp.int32),
        **SETTINGS,
        dtype="bfloat16",
        implementation=implementation,
    )
    assert z.dtype == jnp.bfloat16
    want = np.stack([_float64(q[row], rows[row]) for row in range(2)])
    assert relative_error(z, want) < BF16


@pytest.mark.slow
def test_kf_k04_pool_of_more_than_two_billion_words():
    num_pages = 2**31 // (W * C) + 3
    entries = to_words(_normal(np.random.default_rng(2), 5), "bfloat16")
    last = jnp.full(5, num_pages - 1, jnp.int32)
    write = jax.jit(mla_write, static_argnames="position", donate_argnums=0)
    pool = jnp.zeros((1, num_pages, W, C), jnp.uint16)
    pool = write(
        pool, from_words(entries, "bfloat16"), last, jnp.arange(5, dtype=jnp.int32), position=0
    )
    q, settings = _queries(1), {**SETTINGS, "position": 0, "dtype": "bfloat16"}
    z = decode(q, pool, last[None, :1], jnp.asarray([5], jnp.int32), **settings)
    want = np.asarray(from_words(entries, "bfloat16"), np.float64)
    assert relative_error(z[0], _float64(q[0], want)) < F32


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_the_width_of_the_page_table_does_not_change_a_bit(step):
    contexts, settings = (3, 30), {**SETTINGS, "dtype": "float32"}
    results = []
    for columns in (4, 5, 9):
        pool, table, _ = _cache(contexts, columns=columns)
        if step == "decode":
            context = jnp.asarray(contexts, jnp.int32)
            z = decode(_queries(2), pool, table, context, **settings)
        else:
            computed = jnp.zeros(2, jnp.int32)
            z = prefill(_queries(33), pool, table, computed, offsets(contexts), **settings)
        results.append(np.asarray(z))
    np.testing.assert_array_equal(results[0], results[1])
    np.testing.assert_array_equal(results[0], results[2])


@each_implementation(MLA_DECODE)
def test_kf_m06_order_and_place_of_the_visible_entries_do_not_matter(implementation):
    pool, table, _ = _cache((4 * W,))
    settings = {**SETTINGS, "dtype": "float32", "implementation": implementation}
    context, q = jnp.asarray([4 * W], jnp.int32), _queries(1)
    z = decode(q, pool, table, context, **settings)
    moved = decode(q, pool, table[:, ::-1], context, **settings)
    turned = decode(q, pool[:, :, ::-1], table, context, **settings)
    assert relative_error(moved, z) < F32
    assert relative_error(turned, z) < F32


@each_implementation(MLA_DECODE)
def test_kf_k11_one_compiled_program_serves_any_rows_and_lengths(implementation):
    pool, table, rows = _cache((9, 30))
    settings = {**SETTINGS, "dtype": "float32", "implementation": implementation}
    program = jax.jit(lambda *a: mla_decode(*a, **settings))
    q, context = _queries(2), jnp.asarray([9, 30], jnp.int32)
    straight = program(q, pool, table, context)
    crossed = program(q[::-1], pool, table[::-1], context[::-1])
    shorter = program(q, pool, table, context - 5)
    assert program._cache_size() == 1
    np.testing.assert_array_equal(crossed[::-1], straight)
    assert relative_error(shorter[1], _float64(q[1], rows[1][:25])) < F32


@each_implementation(MLA_PREFILL)
def test_prefill_in_pieces_and_decode_equal_prefill_at_once(implementation):
    pool, table, _ = _cache((70,))
    settings = {**SETTINGS, "dtype": "float32", "implementation": implementation}
    q = _queries(70)
    whole = prefill(q, pool, table, jnp.zeros(1, jnp.int32), offsets((70,)), **settings)
    rest = prefill(q[33:], pool, table, jnp.asarray([33], jnp.int32), offsets((37,)), **settings)
    last = decode(q[69:], pool, table, jnp.asarray([70], jnp.int32), **settings)
    assert relative_error(rest, whole[33:]) < F32
    assert relative_error(last, whole[69:]) < F32


def test_long_pages_are_read_in_tiles(monkeypatch):
    contexts = (5, 30)
    pool, table, rows = _cache(contexts)
    monkeypatch.setattr(xla, "MAX_TILE_TOKENS", 3)  # pages of 8 are read in tiles of 2
    q = _queries(2)
    z = mla_decode(q, pool, table, jnp.asarray(contexts, jnp.int32), **SETTINGS, dtype="float32")
    want = np.stack([_float64(q[row], rows[row]) for row in range(2)])
    assert relative_error(z, want) < F32


@pytest.mark.parametrize("step", ["decode", "prefill"])
def test_attention_copies_no_layer_of_the_pool(step):
    shape = jax.ShapeDtypeStruct
    pool = shape((Z, 2048, W, C), jnp.uint16)
    table, numbers, q = (
        shape((2, 4), jnp.int32),
        shape((2,), jnp.int32),
        shape((2, N, C), jnp.bfloat16),
    )
    settings = {**SETTINGS, "dtype": "bfloat16"}
    if step == "decode":
        lowered = decode.lower(q, pool, table, numbers, **settings)
    else:
        lowered = prefill.lower(q, pool, table, numbers, shape((3,), jnp.int32), **settings)
    layer_bytes = pool.size * 2 // Z
    assert lowered.compile().memory_analysis().temp_size_in_bytes < layer_bytes // 2


def test_bad_arguments_are_named():
    pool, table, _ = _cache((9, 30))
    q, context = _queries(2), jnp.asarray([9, 30], jnp.int32)
    good = {**SETTINGS, "dtype": "float32"}
    with pytest.raises(
        ValueError, match="words of a pool entry is wrong: got 40; expected 20 for 20"
    ):
        mla_decode(q, pool, table, context, **{**good, "dtype": "bfloat16"})
    with pytest.raises(ValueError, match="position is wrong: got 3; expected 0 to 2"):
        mla_decode(q, pool, table, context, **{**good, "position": 3})
    with pytest.raises(ValueError, match="latent is wrong: got 21; expected 1 to 20"):
        mla_decode(q, pool, table, context, **{**good, "latent": 21})
    with pytest.raises(ValueError, match="block is wrong: got 0"):
        mla_prefill(q, pool, table, context, offsets((1, 1)), **good, block=0)
    with pytest.raises(ValueError, match=r"got 40; expected 19 \(bfloat16\) or 38 \(float32\)"):
        mla_write(pool, jnp.zeros((2, 19), jnp.float32), context, context, position=0)
    with (
        unchecked_annotations(),
        pytest.raises(ValueError, match=r"page_table_SM .*S=1; expected S=2"),
    ):
        mla_decode(q, pool, table[:1], context, **good)


def test_k3_shapes_trace():
    shape, heads, settings = (
        jax.ShapeDtypeStruct,
        12,
        {"position": 23, "latent": 512, "scale": 0.07},
    )
    pool = shape((24, 1000, 768, 576), jnp.uint16)
    settings["dtype"] = "bfloat16"
    q, table, numbers = shape((256, heads, 576), jnp.bfloat16), shape((256, 1366), jnp.int32), 256
    z = jax.eval_shape(
        lambda *a: mla_decode(*a, **settings), q, pool, table, shape((numbers,), jnp.int32)
    )
    assert z.shape == (256, heads, 512)
    q, table, numbers = shape((8192, heads, 576), jnp.bfloat16), shape((8, 1366), jnp.int32), 8
    rows = (shape((numbers,), jnp.int32), shape((numbers + 1,), jnp.int32))
    z = jax.eval_shape(lambda *a: mla_prefill(*a, **settings), q, pool, table, *rows)
    assert (z.shape, z.dtype) == ((8192, heads, 512), jnp.bfloat16)
