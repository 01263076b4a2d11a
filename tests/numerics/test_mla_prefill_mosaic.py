"""`mla_prefill`: the kernel for Hopper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.mla import mla_prefill, mosaic_prefill
from tests.numerics.support import BF16, offsets, relative_error

C, LATENT, POSITION, NAN_WORD = 576, 512, 1, 0x7FC1
SETTINGS = {"position": POSITION, "latent": LATENT, "dtype": "bfloat16", "scale": 192**-0.5}
STATIC = (*SETTINGS, "block", "implementation")
prefill = jax.jit(mla_prefill, static_argnames=STATIC)


def _inputs(lengths, computed, *, heads, page_tokens, padding=0, seed=None):
    """Arguments with random pages; whatever no row uses is NaN."""
    rng = np.random.default_rng(seed)
    contexts = [old + new for old, new in zip(computed, lengths, strict=True)]
    columns = [-(-context // page_tokens) for context in contexts]
    num_pages = sum(columns) + 2
    pages = iter(rng.permutation(num_pages).tolist())
    table = np.full((len(lengths), max(columns)), num_pages - 1)
    pool = np.full((POSITION + 1, num_pages, page_tokens, C), NAN_WORD, np.uint16)
    for row, context in enumerate(contexts):
        table[row, : columns[row]] = [next(pages) for _ in range(columns[row])]
        slot = np.arange(context)
        words = _bfloat16(rng, context, C).view(np.uint16)
        pool[POSITION, table[row, slot // page_tokens], slot % page_tokens] = words
    num_tokens = sum(lengths)
    q = jnp.asarray(_bfloat16(rng, num_tokens + padding, heads, C)).at[num_tokens:].set(jnp.nan)
    table, computed = (jnp.asarray(x, jnp.int32) for x in (table, computed))
    return q, jnp.asarray(pool), table, computed, offsets(tuple(lengths))


def _bfloat16(rng, *shape):
    return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)


def _check(z, inputs):
    num_tokens = int(inputs[-1][-1])
    want = prefill(*inputs, **SETTINGS, implementation="reference")
    assert relative_error(z[:num_tokens], want[:num_tokens]) < BF16
    assert not np.any(np.asarray(z[num_tokens:], np.float32))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on a CPU")
def test_the_interpreted_kernel_equals_the_reference_without_races():
    inputs = _inputs((1, 0, 6), (70, 0, 125), heads=12, page_tokens=64, padding=2, seed=0)
    interpreter = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    run = functools.partial(mosaic_prefill.mla_prefill, **SETTINGS, block=64)
    _check(jax.jit(functools.partial(run, interpret=interpreter))(*inputs), inputs)
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
    ("num_tokens", "heads", "page_tokens"), [(1, 12, 768), (8192, 12, 768), (1024, 96, 6144)]
)
def test_the_kernel_lowers_for_hopper_once_for_all_layers(
    monkeypatch, num_tokens, heads, page_tokens
):
    monkeypatch.setattr(mosaic_prefill, "require_hopper", lambda: None)
    shape, rows = jax.ShapeDtypeStruct, 8

    def layers(q, *others):
        for position in (3, 23):
            z = mla_prefill(
                q, *others, **SETTINGS | {"position": position}, implementation="mosaic"
            )
            q = jnp.pad(z, ((0, 0), (0, 0), (0, C - LATENT)))
        return q

    traced = jax.jit(layers).trace(
        shape((num_tokens, heads, C), jnp.bfloat16),
        shape((24, 768 * 4000 // page_tokens, page_tokens, C), jnp.uint16),
        shape((rows, 2**20 // page_tokens), jnp.int32),
        shape((rows,), jnp.int32),
        shape((rows + 1,), jnp.int32),
    )
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("@mosaic_gpu_v2") == 1


@pytest.mark.parametrize("heads", [1, 12, 96])
def test_units_cover_every_query_once(heads):
    lengths, computed = (0, 1, 63, 64, 65, 3), (9, 0, 5, 64, 1000, 70)
    starts, num_tokens = offsets(lengths), sum(lengths) + 7
    work = mosaic_prefill.work_list(
        starts, jnp.asarray(computed, jnp.int32), num_tokens=num_tokens, heads=heads
    )
    seen = np.full(num_tokens * heads, -1)  # last visible slot
    for row, first, count, x in np.asarray(work).tolist():
        assert 0 <= count <= 64
        if count == 0:
            continue
        queries = first + np.arange(count)
        assert (seen[queries] == -1).all()
        if row < len(lengths):
            assert starts[row] * heads <= first
            assert first + count <= starts[row + 1] * heads
        seen[queries] = (x + np.arange(count)) // heads if row < len(lengths) else 10**6
    want = [old + i for old, new in zip(computed, lengths, strict=True) for i in range(new)]
    np.testing.assert_array_equal(seen, np.repeat([*want, *[10**6] * 7], heads))


def test_refusals_give_their_reason(monkeypatch):
    inputs = _inputs((1,), (0,), heads=1, page_tokens=64)
    q, pool, *others = inputs
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="backend is cpu, not a Hopper GPU"):
            prefill(*inputs, **SETTINGS, implementation="mosaic")
    monkeypatch.setattr(mosaic_prefill, "require_hopper", lambda: None)
    call = functools.partial(mla_prefill, **SETTINGS, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="takes bfloat16: got float32 queries"):
        call(q.astype(jnp.float32), pool, *others)
    with pytest.raises(NotImplementedError, match="multiple of 64 tokens: got 32"):
        call(q, pool[:, :, :32], *others)
    with pytest.raises(NotImplementedError, match="got 512 numbers, 512 of them the value"):
        call(q[..., :512], pool[..., :512], *others)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "page_tokens", "lengths", "computed", "padding"),
    [
        (12, 64, (1, 0, 6), (70, 5, 60), 2),
        (12, 768, (0, 1, 63, 64, 65, 3), (5, 800, 767, 0, 129, 2048), 60),
        (24, 5760, (130, 5, 1), (1, 63, 0), 0),
        (48, 768, (65, 64), (64, 700), 3),
        (96, 6144, (0, 1, 63, 64, 65), (64, 700, 0, 768, 1), 7),
        (12, 768, (1,), (300,), 0),
    ],
)
def test_the_kernel_equals_the_reference(heads, page_tokens, lengths, computed, padding):
    inputs = _inputs(lengths, computed, heads=heads, page_tokens=page_tokens, padding=padding)
    z = prefill(*inputs, **SETTINGS, implementation="mosaic")
    _check(z, inputs)
    # A row alone, at another place: the same bits.
    q, *others, starts = inputs
    row = int(np.argmax(lengths))
    first, last = int(starts[row]), int(starts[row + 1])
    q = jnp.full_like(q, jnp.nan).at[: last - first].set(q[first:last])
    alone = [length if i == row else 0 for i, length in enumerate(lengths)]
    again = prefill(q, *others, offsets(tuple(alone)), **SETTINGS, implementation="mosaic")
    np.testing.assert_array_equal(again[: last - first], z[first:last])


@pytest.mark.gpu
def test_large_scores_and_equal_keys_stay_exact():
    q, pool, *others = _inputs((70,), (200,), heads=12, page_tokens=64)
    pool = pool.at[POSITION].set(pool[POSITION, others[0][0, 0], 0])  # all slots hold one entry
    z = prefill(q * 30, pool, *others, **SETTINGS, implementation="mosaic")
    value = jax.lax.bitcast_convert_type(pool[POSITION, 0, 0, :LATENT], jnp.bfloat16)
    assert relative_error(z, jnp.broadcast_to(value, z.shape)) < BF16
