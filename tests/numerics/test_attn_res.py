"""Attention-residual mix."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attn_res import attn_res_mix
from pallas_kernels.attn_res.api import ATTN_RES_MIX
from tests.numerics.support import (
    BF16,
    F32,
    each_implementation,
    golden,
    relative_error,
    unchecked_annotations,
)

EPS = 1e-5


@each_implementation(ATTN_RES_MIX)
@pytest.mark.parametrize("case", ["n1", "n3", "n8"])
def test_mix_matches_golden(implementation, case):
    data = golden("attn_res")
    sources = [*map(jnp.asarray, data[f"{case}.blocks"]), jnp.asarray(data[f"{case}.partial"])]
    norm, proj = jnp.asarray(data[f"{case}.norm_weight"]), jnp.asarray(data[f"{case}.proj_weight"])
    got = attn_res_mix(sources, norm, proj, eps=float(data["eps"]), implementation=implementation)
    assert relative_error(got, data[f"{case}.out"]) < F32


@each_implementation(ATTN_RES_MIX)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_single_source_comes_back_unchanged(implementation, dtype, key):
    source = jax.random.normal(key, (5, 24), jnp.float32).astype(dtype)
    weight = jnp.ones(24, dtype)
    got = attn_res_mix([source], weight, weight, eps=EPS, implementation=implementation)
    np.testing.assert_array_equal(got, source)


@each_implementation(ATTN_RES_MIX)
def test_scores_ignore_the_scale_of_a_source_but_the_mix_does_not(implementation, key):
    a, b, c = jax.random.normal(key, (3, 5, 24), jnp.float32)
    zeros = jnp.zeros(24, jnp.float32)
    got = attn_res_mix([a, 4 * b], zeros, c[0], eps=EPS, implementation=implementation)
    assert relative_error(got, (a + 4 * b) / 2) < F32
    mix = attn_res_mix([a, b], c[0], c[1], eps=0.0, implementation=implementation)
    scaled = attn_res_mix([a, 4 * b], c[0], c[1], eps=0.0, implementation=implementation)
    # With equal weights p: mix = a + p (b - a), scaled = a + p (4 b - a).
    p = ((mix - a) / (b - a)).mean(axis=1, keepdims=True)
    assert relative_error(scaled, a + p * (4 * b - a)) < 1e-4


@each_implementation(ATTN_RES_MIX)
def test_bfloat16_sources_are_mixed_in_float32(implementation, key):
    sources = list(jax.random.normal(key, (4, 6, 40), jnp.float32).astype(jnp.bfloat16))
    norm, proj = jax.random.normal(key, (2, 40), jnp.float32).astype(jnp.bfloat16)
    wide = [source.astype(jnp.float32) for source in sources]
    want = attn_res_mix(wide, norm, proj, eps=EPS, implementation="reference")
    got = attn_res_mix(sources, norm, proj, eps=EPS, implementation=implementation)
    assert got.dtype == jnp.bfloat16
    assert relative_error(got, want) < BF16


def test_bad_arguments_are_named():
    x, w = jnp.zeros((2, 3), jnp.float32), jnp.zeros(3, jnp.float32)
    with pytest.raises(ValueError, match="number of sources is wrong: got 0"):
        attn_res_mix([], w, w, eps=EPS)
    with (
        unchecked_annotations(),
        pytest.raises(ValueError, match=r"source1_TH .*T=1; expected T=2"),
    ):
        attn_res_mix([x, x[:1]], w, w, eps=EPS)


def test_k3_shapes_trace():
    source = jax.ShapeDtypeStruct((8192, 7168), jnp.bfloat16)
    weight = jax.ShapeDtypeStruct((7168,), jnp.bfloat16)
    out = jax.eval_shape(
        lambda s, n, p: attn_res_mix(s, n, p, eps=EPS), [source] * 9, weight, weight
    )
    assert out == source
