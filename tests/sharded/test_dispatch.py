"""Exchange of tokens with the experts of other ranks: equal to a dense computation (KF-H04)."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array, lax
from jax.sharding import PartitionSpec as P

from sharding import dispatch
from sharding.axes import DP, TP, ParallelConfig
from sharding.mesh import make_mesh
from tests import ragged

TOKENS, CHOICES, EXPERTS, WIDTH = 6, 3, 24, 5  # tokens of one rank of the exchange
NUM_ROUTINGS = 50  # for each of four meshes
ON_GPU = jax.default_backend() == "gpu"
MESHES = [(2, 1), (1, 2)] if ON_GPU else [(8, 1), (2, 4), (4, 2), (1, 8)]
# Three places: a full rank takes two rounds.
FORMS = [("all_gather", None), ("all_to_all", None), ("all_to_all", 3), ("ragged", None)]

pytestmark = pytest.mark.multi


@pytest.fixture(autouse=True)
def _emulate(monkeypatch: pytest.MonkeyPatch) -> None:
    ragged.emulate_on_cpu(monkeypatch)


def run_experts(weights: Array, first: Array, z: Array, ids: Array, mixing: Array) -> Array:
    """Weighted sum of `tanh(z W_e)` over a token's experts, of those in `weights`."""
    local = ids - first
    held = (local >= 0) & (local < weights.shape[0])
    chosen = jax.nn.one_hot(jnp.where(held, local, -1), weights.shape[0])
    mix = jnp.sum(chosen * jnp.where(held, mixing, 0.0)[:, :, None], axis=1)
    clean = jnp.where(jnp.any(held, axis=1)[:, None], z, 0.0)
    return jnp.einsum("te,etl->tl", mix, jnp.tanh(jnp.einsum("tk,ekl->etl", clean, weights)))


@functools.cache
def exchanged(
    parallel: ParallelConfig, capacity: int | None, is_sharded: bool
) -> jax.stages.Wrapped:
    """`(weights, z, ids, mixing) -> (y, load)` on whole arrays, tokens over the exchange's axes."""
    axes = dispatch.expert_axes(is_sharded=is_sharded)

    def step(weights: Array, z: Array, ids: Array, mixing: Array) -> tuple[Array, Array]:
        num_local = weights.shape[0]
        first = dispatch.first_expert(parallel, num_local)
        y = dispatch.exchange(
            parallel, axes, functools.partial(run_experts, weights, first), z, ids, mixing,
            num_local=num_local, capacity=capacity,
        )  # fmt: skip
        load = lax.psum(dispatch.expert_load(parallel, ids, num_local), axes)
        return y if is_sharded else lax.psum(y, TP), load

    return jax.jit(
        jax.shard_map(
            step, mesh=make_mesh(parallel), check_vma=False,
            in_specs=(P((DP, TP)), P(axes), P(axes), P(axes)), out_specs=(P(axes), P()),
        )
    )  # fmt: skip


def routing(rng: np.random.Generator, num_tokens: int, num_ranks: int) -> np.ndarray:
    """Distinct experts for each token, most of them of a few ranks; some tokens have none."""
    per_rank = EXPERTS // num_ranks
    weight = rng.choice([0.0, 0.02, 1.0], num_ranks, p=[0.4, 0.3, 0.3])
    if rng.random() < 0.15:
        weight[:] = 0.0  # one rank gets everything
    while np.count_nonzero(weight) * per_rank < CHOICES:
        weight[rng.integers(num_ranks)] = 1.0
    odds = np.repeat(weight, per_rank) / (weight.sum() * per_rank)
    ids = np.stack([rng.choice(EXPERTS, CHOICES, replace=False, p=odds) for _ in range(num_tokens)])
    ids[rng.random(num_tokens) < rng.choice([0.0, 0.5, 1.0], p=[0.6, 0.3, 0.1])] = -1
    return ids.astype(np.int32)


@pytest.mark.parametrize(("form", "capacity"), FORMS, ids=str)
@pytest.mark.parametrize(("dp", "tp"), MESHES, ids=str)
def test_kf_h04_uneven_routings_equal_dense(
    dp: int, tp: int, form: str, capacity: int | None
) -> None:
    rng = np.random.default_rng(dp * 100 + tp)
    parallel = ParallelConfig(dp=dp, tp=tp, dispatch=form)
    weights = rng.standard_normal((EXPERTS, WIDTH, WIDTH)).astype(np.float32)
    dense = jax.jit(functools.partial(run_experts, weights, jnp.int32(0)))
    loads = []
    for number in range(NUM_ROUTINGS):
        is_sharded = tp == 1 or number % 2 == 0
        num_tokens = TOKENS * (dp * tp if is_sharded else dp)
        ids = routing(rng, num_tokens, parallel.num_ranks)
        z = rng.standard_normal((num_tokens, WIDTH)).astype(np.float32)
        z[ids[:, 0] < 0] = np.nan  # padding
        mixing = rng.random((num_tokens, CHOICES)).astype(np.float32)
        y, load = exchanged(parallel, capacity, is_sharded)(weights, z, ids, mixing)
        want = np.asarray(dense(z, ids, mixing))
        np.testing.assert_allclose(np.asarray(y), want, rtol=2e-6, atol=2e-6)
        ranks = ids[ids >= 0] // (EXPERTS // parallel.num_ranks)
        np.testing.assert_array_equal(load, np.bincount(ranks, minlength=parallel.num_ranks))
        loads.append(np.asarray(load))
    share = np.stack(loads) / np.maximum(1, np.sum(loads, axis=1, keepdims=True))
    assert (share == 0).any(), "no rank was ever empty"
    assert (share == 1).any(), "no rank ever had everything"


@pytest.mark.parametrize("form", ["all_gather", "all_to_all", "ragged"])
def test_experts_split_inside_get_every_token(form: str) -> None:
    dp, tp = MESHES[0] if ON_GPU else (2, 4)
    parallel = ParallelConfig(dp=dp, tp=tp, dispatch=form, experts="tp")
    rng = np.random.default_rng(3)
    ranks = dp * tp
    # The parts of an expert add up, so here each rank's part is a random share of its output.
    parts = rng.standard_normal((ranks, 1, EXPERTS, WIDTH, WIDTH)).astype(np.float32)
    ids = routing(rng, TOKENS * ranks, 2)
    z = rng.standard_normal((TOKENS * ranks, WIDTH)).astype(np.float32)
    mixing = rng.random(ids.shape).astype(np.float32)

    def linear(weights: Array, z: Array, ids: Array, mixing: Array) -> Array:
        mix = jnp.sum(jax.nn.one_hot(ids, EXPERTS) * mixing[:, :, None], axis=1)
        return jnp.einsum("te,tk,ekl->tl", mix, z, weights)

    def step(weights: Array, z: Array, ids: Array, mixing: Array) -> Array:
        run = functools.partial(linear, weights[0, 0])
        axes = dispatch.expert_axes(is_sharded=True)
        return dispatch.exchange(parallel, axes, run, z, ids, mixing, num_local=EXPERTS)

    mesh, ranked = make_mesh(parallel), P((DP, TP))
    y = jax.jit(
        jax.shard_map(step, mesh=mesh, in_specs=(ranked,) * 4, out_specs=ranked, check_vma=False)
    )(parts, z, ids, mixing)
    want = linear(parts.sum((0, 1)), z, ids, mixing)
    np.testing.assert_allclose(np.asarray(y), np.asarray(want), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32], ids=str)
def test_every_bit_of_a_token_arrives(dtype: Any) -> None:
    rng = np.random.default_rng(4)
    bits = rng.integers(0, 2**16, (TOKENS, WIDTH * jnp.dtype(dtype).itemsize // 2), np.uint16)
    z = jnp.asarray(bits.view(np.uint32) if dtype == jnp.float32 else bits)
    z = lax.bitcast_convert_type(z, dtype)
    ids = rng.integers(-1, EXPERTS, (TOKENS, CHOICES), np.int32)
    mixing = rng.random((TOKENS, CHOICES)).astype(np.float32)
    words = dispatch.to_words(z, jnp.asarray(ids), jnp.asarray(mixing))
    got = dispatch.from_words(words, z, jnp.asarray(ids))
    for one, sent in zip(got, (z, ids, mixing), strict=True):
        assert np.asarray(one).tobytes() == np.asarray(sent).tobytes()


def test_ragged_is_refused_on_a_cpu() -> None:
    parallel = ParallelConfig(dp=2, dispatch="ragged")
    dispatch.check_platform(parallel, "gpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "NOT_RAGGED", frozenset({"cpu"}))
        with pytest.raises(ValueError, match="got 'ragged' on platform 'cpu'; expected"):
            dispatch.check_platform(parallel, "cpu")


def test_default_capacity() -> None:
    assert dispatch.default_capacity(64, 8, 16) == 64  # nearly every token reaches every rank
    assert dispatch.default_capacity(64, 64, 16) == 24  # 64 x 0.223 x 1.25, in eights
    assert dispatch.default_capacity(3, 64, 16) == 3
