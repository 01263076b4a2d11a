"""Boundary of two sub-layers: residual add, attention-residual mix, RMSNorm."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res import attn_res_norm
from pallas_kernels.attn_res.api import ATTN_RES_NORM
from pallas_kernels.numerics import round_to
from tests.numerics.support import (
    BF16,
    F32,
    each_implementation,
    golden,
    relative_error,
    unchecked_annotations,
)

EPS = 1e-5


def _normed(mix, gain, eps=EPS):
    """RMSNorm in float64."""
    mix, gain = np.asarray(mix, np.float64), np.asarray(gain, np.float64)
    return mix / np.sqrt((mix**2).mean(axis=-1, keepdims=True) + eps) * gain


@each_implementation(ATTN_RES_NORM)
@pytest.mark.parametrize("case", ["n1", "n3", "n8"])
def test_mix_matches_golden(implementation, case, key):
    data = golden("attn_res")
    bank, prefix = [*map(jnp.asarray, data[f"{case}.blocks"])], jnp.asarray(data[f"{case}.partial"])
    mix_weights = (
        jnp.asarray(data[f"{case}.norm_weight"]),
        jnp.asarray(data[f"{case}.proj_weight"]),
    )
    gain, eps = jax.random.normal(key, prefix.shape[1:], jnp.float32), float(data["eps"])
    settings = {"eps": eps, "implementation": implementation}
    got_prefix, x = attn_res_norm(bank, prefix, None, mix_weights, gain, **settings)
    np.testing.assert_array_equal(got_prefix, prefix)
    assert relative_error(x, _normed(data[f"{case}.out"], gain, eps)) < F32


@each_implementation(ATTN_RES_NORM)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_without_a_bank_it_adds_and_norms(implementation, dtype, key):
    prefix, addend = jax.random.normal(key, (2, 5, 24), jnp.float32).astype(dtype)
    gain = jax.random.normal(key, (24,), jnp.float32).astype(dtype)
    run = functools.partial(attn_res_norm, eps=EPS, implementation=implementation)
    total = round_to(prefix.astype(jnp.float32) + addend.astype(jnp.float32), dtype)
    for got, x in (run((), prefix, addend, None, gain), run((), total, None, None, gain)):
        assert got.dtype == x.dtype == dtype
        np.testing.assert_array_equal(got, total)
        assert relative_error(x, _normed(total, gain)) < (F32 if dtype == jnp.float32 else BF16)


@each_implementation(ATTN_RES_NORM)
def test_the_sum_takes_part_in_the_mix(implementation, key):
    a, b, c = jax.random.normal(key, (3, 5, 24), jnp.float32)
    run = functools.partial(attn_res_norm, eps=EPS, implementation=implementation)
    prefix, x = run([a], b, c, (c[0], a[0]), b[0])
    want_prefix, want = run([a], b + c, None, (c[0], a[0]), b[0])
    np.testing.assert_array_equal(prefix, want_prefix)
    assert relative_error(x, want) < F32


@each_implementation(ATTN_RES_NORM)
def test_scores_ignore_the_scale_of_a_source_but_the_mix_does_not(implementation, key):
    a, b, c = jax.random.normal(key, (3, 5, 24), jnp.float32)
    ones, zeros = jnp.ones(24, jnp.float32), jnp.zeros(24, jnp.float32)
    run = functools.partial(attn_res_norm, eps=EPS, implementation=implementation)
    _, x = run([a], 4 * b, None, (zeros, c[0]), ones)
    assert relative_error(x, _normed((a + 4 * b) / 2, ones)) < F32
    # One source has all the weight, whatever its scale.
    query = 100 * b[0]
    for scale in (1e-3, 1.0, 1e3):
        _, x = attn_res_norm(
            [a], scale * b, None, (query, ones), ones, eps=0.0, implementation=implementation
        )
        assert relative_error(x[0], _normed(b[0], ones, 0.0)) < F32


@each_implementation(ATTN_RES_NORM)
def test_bfloat16_sources_are_mixed_in_float32(implementation, key):
    *bank, prefix = jax.random.normal(key, (4, 6, 40), jnp.float32).astype(jnp.bfloat16)
    norm, proj, gain = jax.random.normal(key, (3, 40), jnp.float32).astype(jnp.bfloat16)
    wide = [source.astype(jnp.float32) for source in (*bank, prefix)]
    run = functools.partial(attn_res_norm, eps=EPS)
    _, want = run(wide[:-1], wide[-1], None, (norm, proj), gain, implementation="reference")
    _, x = run(bank, prefix, None, (norm, proj), gain, implementation=implementation)
    assert x.dtype == jnp.bfloat16
    assert relative_error(x, want) < BF16


def test_bad_arguments_are_named():
    x, w = jnp.zeros((2, 3), jnp.float32), jnp.zeros(3, jnp.float32)
    with pytest.raises(ValueError, match="mix_weights is wrong: got None; expected norm and proj"):
        attn_res_norm([x], x, None, None, w, eps=EPS)
    with (
        unchecked_annotations(),
        pytest.raises(ValueError, match=r"prefix_TH .*T=1; expected T=2"),
    ):
        attn_res_norm([x], x[:1], None, (w, w), w, eps=EPS)


def test_k3_shapes_trace():
    source = jax.ShapeDtypeStruct((8192, 7168), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((7168,), jnp.bfloat16)
    run = functools.partial(attn_res_norm, eps=EPS)
    arguments = ([source] * 8, source, source, (weight, weight), weight)
    assert jax.eval_shape(run, *arguments) == (source, source)
