"""`mla_decode`: the kernels for Hopper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import settings
from pallas_kernels.mla import decode_attend, mla_decode, mosaic_decode
from tests.numerics.support import BF16, relative_error

C, LATENT, POSITION, NAN_WORD = 576, 512, 1, 0x7FC1
SETTINGS = {"position": POSITION, "latent": LATENT, "dtype": "bfloat16", "scale": 192**-0.5}
decode = jax.jit(mla_decode, static_argnames=(*SETTINGS, "implementation"))


def _inputs(contexts, *, heads, page_tokens, seed=None):
    """Arguments with random pages; whatever no row sees is NaN."""
    rng = np.random.default_rng(seed)
    columns = [-(-context // page_tokens) for context in contexts]
    num_pages = sum(columns) + 2
    pages = iter(rng.permutation(num_pages).tolist())
    table = np.full((len(contexts), max(columns) + 1), num_pages - 1)
    pool = np.full((POSITION + 1, num_pages, page_tokens, C), NAN_WORD, np.uint16)
    for row, context in enumerate(contexts):
        table[row, : columns[row]] = [next(pages) for _ in range(columns[row])]
        slot = np.arange(context)
        words = _bfloat16(rng, context, C).view(np.uint16)
        pool[POSITION, table[row, slot // page_tokens], slot % page_tokens] = words
    q = _bfloat16(rng, len(contexts), heads, C)
    q[np.asarray(contexts) == 0] = np.nan
    table, contexts = (jnp.asarray(x, jnp.int32) for x in (table, contexts))
    return jnp.asarray(q), jnp.asarray(pool), table, contexts


def _bfloat16(rng, *shape):
    return rng.standard_normal(shape, np.float32).astype(jnp.bfloat16)


def _one(inputs, row):
    q, pool, table, contexts = inputs
    some = slice(row, row + 1)
    return q[some], pool, table[some], contexts[some]


def _check(z, inputs):
    """Compare with the reference, which takes the rows one by one to save memory."""
    for row, context in enumerate(inputs[3].tolist()):
        if context == 0:
            assert not np.any(np.asarray(z[row], np.float32))
            continue
        want = decode(*_one(inputs, row), **SETTINGS, implementation="reference")
        assert relative_error(z[row : row + 1], want) < BF16


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on a CPU")
def test_the_interpreted_kernels_equal_the_reference_without_races(monkeypatch):
    monkeypatch.setattr(mosaic_decode, "PART_TILES", 1)
    monkeypatch.setattr(mosaic_decode, "MAX_HEADS", 2)  # two groups, each padded
    monkeypatch.setattr(decode_attend, "BLOCKS", 3)  # six parts, so two for each
    inputs = _inputs((70, 0, 133), heads=4, page_tokens=64, seed=0)
    interpreter = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    run = functools.partial(mosaic_decode.mla_decode, **SETTINGS, interpret=interpreter)
    _check(jax.jit(run)(*inputs), inputs)
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
    ("rows", "heads", "page_tokens", "pdl"),
    [(1, 12, 768, True), (64, 24, 5760, False), (8, 96, 6144, False)],
)
def test_the_kernels_lower_for_hopper_once_for_all_layers(
    monkeypatch, rows, heads, page_tokens, pdl
):
    monkeypatch.setattr(mosaic_decode, "require_hopper", lambda: None)
    shape = jax.ShapeDtypeStruct

    def layers(q, *others):
        for position in (3, 23):
            z = mla_decode(q, *others, **SETTINGS | {"position": position}, implementation="mosaic")
            q = jnp.pad(z, ((0, 0), (0, 0), (0, C - LATENT)))
        return q

    with settings.using(settings.KernelSettings(pdl=pdl)):
        traced = jax.jit(layers).trace(
            shape((rows, heads, C), jnp.bfloat16),
            shape((24, 768 * 4000 // page_tokens, page_tokens, C), jnp.uint16),
            shape((rows, 2**20 // page_tokens), jnp.int32),
            shape((rows,), jnp.int32),
        )
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("@mosaic_gpu_v2") == 2  # the parts, and their sum


def test_parts_cover_every_slot_once():
    contexts = (0, 1, 63, 64, 65, 1000, 0, 8192, 100_000)
    num_splits, num_parts, work = (
        np.asarray(x)
        for x in mosaic_decode.work_list(jnp.asarray(contexts, jnp.int32), splits=128, part_tiles=4)
    )
    seen = [np.zeros(context, int) for context in contexts]
    splits = [[] for _ in contexts]
    for row, first, slots, split in work[: num_parts[0]].tolist():
        assert slots > 0
        seen[row][first * 64 : first * 64 + slots] += 1
        splits[row].append(split)
    assert all((x == 1).all() for x in seen)
    assert splits == [list(range(n)) for n in num_splits.tolist()]
    assert num_splits.max() <= 128


def test_refusals_give_their_reason(monkeypatch):
    inputs = _inputs((1,), heads=1, page_tokens=64)
    q, pool, *others = inputs
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match="backend is cpu, not a Hopper GPU"):
            decode(*inputs, **SETTINGS, implementation="mosaic")
    monkeypatch.setattr(mosaic_decode, "require_hopper", lambda: None)
    call = functools.partial(mla_decode, **SETTINGS, implementation="mosaic")
    with pytest.raises(NotImplementedError, match="takes bfloat16: got float32 queries"):
        call(q.astype(jnp.float32), pool, *others)
    with pytest.raises(NotImplementedError, match="multiple of 64 tokens: got 32"):
        call(q, pool[:, :, :32], *others)
    with pytest.raises(NotImplementedError, match="got 512 numbers, 512 of them the value"):
        call(q[..., :512], pool[..., :512], *others)
    with pytest.raises(NotImplementedError, match="takes at most 536870912 sums of parts"):
        call(jnp.zeros((1024, 12, C), q.dtype), pool, *_rows(1024, columns=512))


def _rows(num_rows, *, columns):
    return jnp.zeros((num_rows, columns), jnp.int32), jnp.ones((num_rows,), jnp.int32)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("heads", "page_tokens", "contexts"),
    [
        (12, 64, (70, 0, 330)),
        (12, 768, (0, 1, 63, 64, 65, 300, 8192, 1000)),
        (12, 768, (40_000, 1, 5000)),
        (24, 5760, (257, 900)),
        (48, 768, (64, 700, 3)),
        (96, 6144, (0, 65, 9000, 513)),
    ],
)
def test_the_kernels_equal_the_reference(heads, page_tokens, contexts):
    inputs = _inputs(contexts, heads=heads, page_tokens=page_tokens)
    z = decode(*inputs, **SETTINGS, implementation="mosaic")
    _check(z, inputs)
    for row in range(len(contexts)):  # without its mates: the same bits
        alone = decode(*_one(inputs, row), **SETTINGS, implementation="mosaic")
        np.testing.assert_array_equal(alone, z[row : row + 1])


@pytest.mark.gpu
def test_large_scores_and_equal_keys_stay_exact():
    q, pool, *others = _inputs((1000,), heads=12, page_tokens=64)
    pool = pool.at[POSITION].set(pool[POSITION, others[0][0, 0], 0])  # all slots hold one entry
    z = decode(q * 30, pool, *others, **SETTINGS, implementation="mosaic")
    value = jax.lax.bitcast_convert_type(pool[POSITION, 0, 0, :LATENT], jnp.bfloat16)
    assert relative_error(z, jnp.broadcast_to(value, z.shape)) < BF16
