"""Boundary of two sub-layers: the kernel for Hopper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attn_res import attn_res_norm, mosaic_gpu
from pallas_kernels.attn_res.mosaic_gpu import CHUNK
from tests.numerics.support import BF16, relative_error

EPS = 1e-5
op = jax.jit(attn_res_norm, static_argnames=("eps", "implementation"))


def _inputs(tokens, hidden, num_bank, *, has_addend=True, seed=0, spread=1.0):
    """Arguments; sources of different scale."""
    keys = iter(jax.random.split(jax.random.key(seed), num_bank + 5))

    def normal(*shape, scale=1.0):
        return (jax.random.normal(next(keys), shape, jnp.float32) * scale).astype(jnp.bfloat16)

    bank = tuple(normal(tokens, hidden, scale=1 + i) for i in range(num_bank))
    prefix, addend = normal(tokens, hidden), normal(tokens, hidden, scale=0.5)
    norm, proj = 1 + normal(hidden, scale=0.1), normal(hidden, scale=spread * hidden**-0.5)
    gain = 1 + normal(hidden, scale=0.1)
    mix_weights = (norm, proj) if num_bank else None
    return bank, prefix, addend if has_addend else None, mix_weights, gain


def _assert_matches(run, inputs):
    want_prefix, want = op(*inputs, eps=EPS, implementation="reference")
    prefix, x = run(*inputs, eps=EPS)
    np.testing.assert_array_equal(prefix, want_prefix)
    assert x.dtype == jnp.bfloat16
    assert relative_error(x, want) < BF16


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on a CPU")
@pytest.mark.parametrize(
    ("tokens", "num_bank", "has_addend", "slots"),
    [(5, 3, True, 7), (5, 0, True, 3)],
)
def test_the_interpreted_kernel_matches_without_races(tokens, num_bank, has_addend, slots):
    hidden = 2 * CHUNK
    run = functools.partial(
        mosaic_gpu.launch,
        max_blocks=2,
        shared_bytes=4 * hidden + slots * 2 * hidden,
        interpret=plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"),
    )
    _assert_matches(run, _inputs(tokens, hidden, num_bank, has_addend=has_addend))
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
    ("tokens", "num_bank", "has_addend"),
    [(1, 8, True), (8192, 5, True), (8, 0, True), (64, 1, False)],
)
def test_production_shapes_lower_for_cuda(tokens, num_bank, has_addend):
    source = jax.ShapeDtypeStruct((tokens, 7168), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((7168,), jnp.bfloat16)
    arguments = (
        (source,) * num_bank,
        source,
        source if has_addend else None,
        (weight, weight) if num_bank else None,
        weight,
    )
    launch = jax.jit(functools.partial(mosaic_gpu.launch, eps=EPS))
    lowered = launch.trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 1


def test_the_kernel_refuses_by_name(monkeypatch):
    def run(inputs):
        return attn_res_norm(*inputs, eps=EPS, implementation="mosaic")

    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match=r"mosaic: .*Hopper GPU"):
            run(_inputs(1, CHUNK, 1))
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda: None)
    with pytest.raises(NotImplementedError, match="takes widths in multiples of 1024 up to 8192"):
        run(_inputs(1, 512, 1))
    with pytest.raises(NotImplementedError, match="takes banks of up to 8: got 9"):
        run(_inputs(1, CHUNK, 9))
    wide = jnp.zeros((1, CHUNK), jnp.float32)
    with pytest.raises(NotImplementedError, match="takes bfloat16 activations: got float32"):
        run(((), wide, None, None, wide[0]))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "hidden", "num_bank", "has_addend"),
    [
        (1, 7168, 8, True),
        (7, 7168, 0, True),
        (64, 8192, 5, True),
        (133, 7168, 1, False),
        (600, 7168, 8, True),
        (600, 7168, 0, False),
        (1000, CHUNK, 3, True),
    ],
)
def test_the_kernel_matches_the_reference(tokens, hidden, num_bank, has_addend):
    seed = np.random.SeedSequence().entropy % 2**31
    for spread in (1.0, 30.0):  # 30: one source has almost all the weight
        inputs = _inputs(tokens, hidden, num_bank, has_addend=has_addend, seed=seed, spread=spread)
        _assert_matches(functools.partial(op, implementation="mosaic"), inputs)


@pytest.mark.gpu
def test_bits_of_a_token_depend_on_no_other_one():
    bank, prefix, addend, mix_weights, gain = _inputs(300, 7168, 6, seed=1)
    run = functools.partial(op, eps=EPS, implementation="mosaic")
    want = run(bank, prefix, addend, mix_weights, gain)
    others = np.arange(300) != 170
    bank = tuple(source.at[others].set(jnp.nan) for source in bank)
    prefix, addend = (x.at[others].set(jnp.nan) for x in (prefix, addend))
    for got, expected in zip(run(bank, prefix, addend, mix_weights, gain), want, strict=True):
        np.testing.assert_array_equal(got[170], expected[170])
    one = slice(170, 171)
    alone = run(tuple(x[one] for x in bank), prefix[one], addend[one], mix_weights, gain)
    for got, expected in zip(alone, want, strict=True):
        np.testing.assert_array_equal(got[0], expected[170])
