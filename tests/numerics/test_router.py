"""Router: selection, weights, ties, groups."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.router import route
from pallas_kernels.router.api import ROUTE
from tests.numerics.support import F32, each_implementation, golden, relative_error

PLAIN = {"renormalize": True, "scaling": 1.0}


@each_implementation(ROUTE)
@pytest.mark.parametrize("case", ["plain", "scaled", "norenorm", "top1", "grouped"])
def test_route_matches_golden(implementation, case):
    data = golden("router")
    _, top_k, num_groups, topk_groups, renormalize, scaling = data[f"{case}.params"]
    ids, weights = route(
        jnp.asarray(data[f"{case}.logits"]),
        jnp.asarray(data[f"{case}.bias"]),
        top_k=int(top_k),
        num_groups=int(num_groups),
        topk_groups=int(topk_groups),
        renormalize=bool(renormalize),
        scaling=float(scaling),
        implementation=implementation,
    )
    order = np.argsort(ids, axis=1)
    np.testing.assert_array_equal(np.take_along_axis(ids, order, 1), data[f"{case}.idx_sorted"])
    weights = np.take_along_axis(np.asarray(weights), order, 1)
    assert relative_error(weights, data[f"{case}.weight"]) < F32


@each_implementation(ROUTE)
def test_kf_m03_bias_chooses_and_nothing_else(implementation):
    logits, bias = jnp.zeros((3, 4), jnp.float32), jnp.asarray([0, 0, 0.1, 0.1], jnp.float32)
    ids, weights = route(logits, bias, top_k=2, **PLAIN, implementation=implementation)
    np.testing.assert_array_equal(ids, [[2, 3]] * 3)
    np.testing.assert_array_equal(weights, [[0.5, 0.5]] * 3)
    raw = {"renormalize": False, "scaling": 1.0}
    _, weights = route(logits, bias, top_k=2, **raw, implementation=implementation)
    np.testing.assert_array_equal(weights, [[0.5, 0.5]] * 3)


@each_implementation(ROUTE)
def test_equal_scores_go_to_the_lowest_expert_ids(implementation):
    logits = jnp.zeros((5, 896), jnp.float32)
    ids, _ = route(logits, logits[0], top_k=16, **PLAIN, implementation=implementation)
    np.testing.assert_array_equal(ids, [list(range(16))] * 5)


@each_implementation(ROUTE)
def test_losing_groups_stay_out_even_below_zero(implementation):
    logits = jnp.asarray([[5, 4, 3, -9, 1, 1, 1, 1]], jnp.float32)
    bias = jnp.full(8, -3.0, jnp.float32)  # every biased score is negative
    groups = {"num_groups": 2, "topk_groups": 1}
    ids, _ = route(logits, bias, top_k=4, **groups, **PLAIN, implementation=implementation)
    np.testing.assert_array_equal(ids, [[0, 1, 2, 3]])


@each_implementation(ROUTE)
def test_a_single_expert_keeps_its_score(implementation):
    logits, bias = jnp.asarray([[0.0, -1.0]], jnp.float32), jnp.zeros(2, jnp.float32)
    _, weights = route(
        logits, bias, top_k=1, renormalize=True, scaling=2.0, implementation=implementation
    )
    np.testing.assert_array_equal(weights, [[1.0]])  # sigmoid(0) * 2, not renormalised to 2


@each_implementation(ROUTE)
def test_kf_m01_selection_agrees_with_float64_at_full_size(implementation):
    rng = np.random.default_rng(0)
    logits = rng.normal(size=(4096, 896)).astype(np.float32)
    bias = rng.normal(size=896).astype(np.float32) * 0.1
    ids, _ = route(
        jnp.asarray(logits), jnp.asarray(bias), top_k=16, **PLAIN, implementation=implementation
    )
    choice = 1 / (1 + np.exp(-logits.astype(np.float64))) + bias
    want = np.argpartition(-choice, 16, axis=1)[:, :16]
    same = (np.sort(ids, axis=1) == np.sort(want, axis=1)).all(axis=1)
    assert same.mean() >= 0.999


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"top_k": 0}, "top_k is wrong: got 0; expected 1 to the 8"),
        ({"top_k": 9}, "top_k is wrong: got 9"),
        ({"top_k": 5, "num_groups": 2}, "top_k is wrong: got 5; expected 1 to the 4 eligible"),
        ({"top_k": 1, "num_groups": 3}, "groups is wrong: got 1 of 3 groups for 8 experts"),
        ({"top_k": 1, "num_groups": 2, "topk_groups": 3}, "groups is wrong: got 3 of 2"),
        ({"top_k": 1, "num_groups": 8}, "experts a group is wrong: got 1; expected at least 2"),
    ],
)
def test_counts_that_do_not_fit_are_named(counts, message):
    with pytest.raises(ValueError, match=message):
        route(jnp.zeros((2, 8), jnp.float32), jnp.zeros(8, jnp.float32), **counts, **PLAIN)


def test_kf_m01_logits_below_float32_are_refused():
    logits = jnp.zeros((2, 8), jnp.bfloat16)
    with pytest.raises((TypeError, ValueError)):
        route(logits, jnp.zeros(8, jnp.float32), top_k=2, **PLAIN)


def test_k3_shapes_trace():
    logits = jax.ShapeDtypeStruct((8192, 896), jnp.float32)
    bias = jax.ShapeDtypeStruct((896,), jnp.float32)
    ids, weights = jax.eval_shape(lambda x, b: route(x, b, top_k=16, **PLAIN), logits, bias)
    assert (ids.shape, ids.dtype) == ((8192, 16), jnp.int32)
    assert (weights.shape, weights.dtype) == ((8192, 16), jnp.float32)
