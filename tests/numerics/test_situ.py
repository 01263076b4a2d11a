"""Gated activations."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.situ import situ_glu, swiglu
from pallas_kernels.situ.api import SITU_GLU, SWIGLU
from tests.numerics.support import (
    BF16,
    F32,
    each_implementation,
    golden,
    relative_error,
    unchecked_annotations,
)


@each_implementation(SITU_GLU)
@pytest.mark.parametrize(
    ("name", "beta", "linear_beta"),
    [("b4_l25", 4.0, 25.0), ("b2.5_l9", 2.5, 9.0), ("b1_none", 1.0, None)],
)
def test_situ_matches_golden(implementation, name, beta, linear_beta):
    data = golden("situ")
    gate, up = jnp.asarray(data["gate"]), jnp.asarray(data["up"])
    got = situ_glu(gate, up, beta=beta, linear_beta=linear_beta, implementation=implementation)
    assert relative_error(got, data[name]) < F32


@each_implementation(SITU_GLU)
def test_situ_sigmoid_sees_the_uncapped_gate_and_both_branches_saturate(implementation):
    gate = jnp.asarray([100.0, -100.0, 1.0], jnp.float32)
    up = jnp.asarray([1000.0, -1000.0, -1.0], jnp.float32)
    got = situ_glu(gate, up, beta=4.0, linear_beta=25.0, implementation=implementation)
    small = 4 * np.tanh(0.25) / (1 + np.exp(-1.0)) * 25 * np.tanh(-0.04)
    assert relative_error(got, np.array([100.0, 0.0, small])) < F32


@each_implementation(SWIGLU)
def test_swiglu_matches_float64(implementation):
    gate, up = np.random.default_rng(0).normal(size=(2, 7, 33)).astype(np.float32) * 4
    want = gate / (1 + np.exp(-gate.astype(np.float64))) * up
    got = swiglu(jnp.asarray(gate), jnp.asarray(up), implementation=implementation)
    assert relative_error(got, want) < F32


@each_implementation(SITU_GLU)
def test_bfloat16_is_evaluated_in_float32_and_rounded_once(implementation):
    values = np.random.default_rng(0).normal(size=(2, 500)) * 4
    gate, up = jnp.asarray(values, jnp.bfloat16)
    bounds = {"beta": 4.0, "linear_beta": 25.0}
    exact = situ_glu(gate.astype(jnp.float32), up.astype(jnp.float32), **bounds)
    got = situ_glu(gate, up, **bounds, implementation=implementation)
    assert got.dtype == jnp.bfloat16
    assert relative_error(got, exact) < BF16
    assert np.mean(np.asarray(got == exact.astype(jnp.bfloat16))) > 0.99


def test_bad_arguments_are_named():
    x = jnp.zeros((2, 3), jnp.float32)
    with pytest.raises(ValueError, match="linear_beta is wrong: got 0"):
        situ_glu(x, x, beta=4.0, linear_beta=0.0)
    with unchecked_annotations():
        with pytest.raises(ValueError, match=r"shape of up is wrong: got \(2, 2\)"):
            swiglu(x, x[:, :2])
        with pytest.raises(TypeError, match="dtype of up is wrong: got bfloat16; expected float32"):
            swiglu(x, x.astype(jnp.bfloat16))
