"""Routed experts on packed weights: the Hopper kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import settings
from pallas_kernels.moe import PackedWeight, moe_experts, mosaic_gpu, schedule
from pallas_kernels.moe.fragments import SPAN, fragment_order
from pallas_kernels.moe.mosaic_product import K_MULTIPLE
from pallas_kernels.situ import situ_glu, swiglu
from tests.numerics.support import BF16, relative_error

Z, LAYER = 2, 1
ACTIVATION = functools.partial(situ_glu, beta=4.0, linear_beta=25.0)
INTERPRETER = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")


def _packed(rng, *dims, scales=(116, 121)):
    codes = rng.integers(0, 256, (*dims[:-1], dims[-1] // 2), np.uint8)
    scales = rng.integers(*scales, (*dims[:-1], dims[-1] // 32), np.uint8)
    return PackedWeight(jnp.asarray(codes), jnp.asarray(scales))


def _weights(rng, num_experts, size_l, size_f, **kwargs):
    return (
        _packed(rng, Z, num_experts, 2, size_f, size_l, **kwargs),
        _packed(rng, Z, num_experts, size_l, size_f, **kwargs),
    )


def _tokens(rng, num, choices, num_experts, size_l):
    ids = np.argsort(rng.random((num, num_experts)), axis=1)[:, :choices]
    return (
        jnp.asarray(rng.normal(size=(num, size_l)), jnp.bfloat16),
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(rng.random((num, choices)), jnp.float32),
    )


def _reference(*arguments, first_expert=0, activation=ACTIVATION):
    return moe_experts(
        *arguments,
        layer=LAYER,
        first_expert=first_expert,
        activation=activation,
        implementation="reference",
    )


@pytest.mark.parametrize("num_tokens", [3, 9])  # without and with sorting
def test_interpreted_kernels_equal_the_reference_without_races(num_tokens):
    rng = np.random.default_rng(num_tokens)
    weights = _weights(rng, 2, K_MULTIPLE, K_MULTIPLE)
    z, ids, mix = _tokens(rng, num_tokens, 1, 4, K_MULTIPLE)
    ids = ids.at[0].set(-1).at[1].set(2)
    z, mix = z.at[0].set(jnp.nan), mix.at[0].set(jnp.nan)
    run = jax.jit(
        functools.partial(
            mosaic_gpu.moe_experts, layer=LAYER, activation=ACTIVATION, interpret=INTERPRETER
        )
    )
    first = jnp.asarray(1, jnp.int32)  # traced, as a rank's share is
    y = run(z, ids, mix, *weights, first_expert=first)
    assert relative_error(y, _reference(z, ids, mix, *weights, first_expert=1)) < BF16
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "pdl"),
    [(1, 896, False), (8, 112, True), (64, 896, True), (8192, 112, False)],
)
def test_production_shapes_lower_for_cuda(monkeypatch, num_tokens, num_experts, pdl):
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda: None)
    shape = jax.ShapeDtypeStruct

    def packed(*dims):
        codes = shape((*dims[:-1], dims[-1] // 2), jnp.uint8)
        return PackedWeight(codes=codes, scales=shape((*dims[:-1], dims[-1] // 32), jnp.uint8))

    run = functools.partial(
        mosaic_gpu.moe_experts, layer=91, first_expert=112, activation=ACTIVATION
    )
    with settings.using(settings.KernelSettings(pdl=pdl)):
        traced = jax.jit(run).trace(
            shape((num_tokens, 3584), jnp.bfloat16),
            shape((num_tokens, 16), jnp.int32),
            shape((num_tokens, 16), jnp.float32),
            packed(92, num_experts, 2, 3072, 3584),
            packed(92, num_experts, 3584, 3072),
        )
    lowered = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert lowered.count("@mosaic_gpu_v2") == 2
    assert ("griddepcontrol" in lowered) == pdl


def test_all_layers_share_the_compiled_kernels(monkeypatch):
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda: None)
    rng = np.random.default_rng(0)
    weights = _weights(rng, 2, 512, 512)

    def layers(z, ids, mix):
        for layer in range(Z):
            y = moe_experts(
                z, ids, mix, *weights, layer=layer, first_expert=0, activation=ACTIVATION,
                implementation="mosaic",
            )  # fmt: skip
            z = y.astype(z.dtype)
        return z

    traced = jax.jit(layers).trace(*_tokens(rng, 2, 1, 2, 512))
    lowered = traced.lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 2


def test_both_schedules_give_every_assignment_its_expert_and_token():
    rng = np.random.default_rng(5)
    expert_TA = jnp.asarray(rng.integers(0, 6, (7, 3)), jnp.int32)  # 5 is elsewhere
    for cut in (schedule.all_tokens, schedule.by_expert):
        tiles = cut(expert_TA, num_experts=5, tile_rows=8)
        working = np.asarray(tiles.expert_Bn)[np.asarray(tiles.expert_Bn) < 5]
        assert sorted(working) == sorted(set(working))  # 21 assignments fit in one tile each
        for token, choice in np.ndindex(*expert_TA.shape):
            tile, place = divmod(int(tiles.slot_TA[token, choice]), 8)
            if expert_TA[token, choice] == 5:
                assert tile == len(tiles.expert_Bn)
                continue
            assert tiles.expert_Bn[tile] == expert_TA[token, choice]
            assert tiles.token_BnTb[tile, place] == token


def test_fragment_order_is_a_permutation_inside_each_span():
    order = np.asarray(fragment_order(jnp.arange(2 * SPAN)))
    assert sorted(order[:SPAN]) == list(range(SPAN))
    np.testing.assert_array_equal(order[SPAN:], order[:SPAN] + SPAN)
    # Lane 0 expands the first word of group 0 into columns 0, 1 and 8, 9 of the first two products.
    assert order[[0, 1, 8, 9, 16, 17, 24, 25]].tolist() == [0, 4, 1, 5, 2, 6, 3, 7]


def test_refusals_give_their_reason(monkeypatch):
    rng = np.random.default_rng(0)
    call = functools.partial(
        moe_experts, layer=LAYER, first_expert=0, activation=ACTIVATION, implementation="mosaic"
    )
    weights, tokens = _weights(rng, 2, 512, 512), _tokens(rng, 2, 1, 2, 512)
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="backend is cpu, not a Hopper GPU"):
            call(*tokens, *weights)
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda: None)
    assert "above 2048 tokens" in mosaic_gpu.unproven(jnp.zeros((2049, 512), jnp.bfloat16))
    assert mosaic_gpu.unproven(tokens[0]) is None
    with pytest.raises(NotImplementedError, match="compute dtype is float32"):
        call(tokens[0].astype(jnp.float32), *tokens[1:], *weights)
    dense = [jnp.zeros(weight.shape, jnp.bfloat16) for weight in weights]
    with pytest.raises(NotImplementedError, match="not MXFP4-packed"):
        call(*tokens, *dense)
    with pytest.raises(NotImplementedError, match="F=256 is not a multiple of 512"):
        call(*tokens, *_weights(rng, 2, 512, 256))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_tokens", "pdl"),
    [(rows, False) for rows in (1, 7, 8, 64, 300, 600, 1100)] + [(1, True), (64, True)],
)
def test_kernels_equal_the_reference(num_tokens, pdl):
    rng = np.random.default_rng()
    weights = _weights(rng, 5, 1024, 512)
    z, ids, mix = _tokens(rng, num_tokens + 1, 3, 7, 1024)
    used = np.arange(num_tokens + 1) != num_tokens // 2
    ids = ids.at[~used].set(-1)
    z, mix = (x.at[~used].set(jnp.nan) for x in (z, mix))
    for activation in (ACTIVATION, swiglu):
        run = jax.jit(
            functools.partial(
                moe_experts, layer=LAYER, activation=activation, implementation="mosaic"
            )
        )
        for choice in (ids, jnp.full_like(ids, 2)):  # random, and all on one expert
            with settings.using(settings.KernelSettings(pdl=pdl)):
                y = run(z, choice, mix, *weights, first_expert=jnp.asarray(1, jnp.int32))
            want = _reference(z, choice, mix, *weights, first_expert=1, activation=activation)
            assert relative_error(y[used], want[used]) < BF16
            if choice is ids:
                assert not np.any(y[~used])
            again = run(z, choice, mix, *weights, first_expert=jnp.asarray(1, jnp.int32))
            np.testing.assert_array_equal(y, again)


@pytest.mark.gpu
@pytest.mark.parametrize("scales", [(18, 22), (100, 140)])
def test_scales_far_from_one_are_exact(scales):
    rng = np.random.default_rng()
    weights = _weights(rng, 3, 512, 512)
    w13 = _packed(rng, Z, 3, 2, 512, 512, scales=scales)
    scale = 2.0 ** (127.0 - max(scales))  # keeps the activations in range
    tokens = _tokens(rng, 8, 2, 3, 512)

    def activation(gate, up):
        return (gate + up) * scale

    run = jax.jit(
        functools.partial(
            moe_experts, layer=LAYER, first_expert=0, activation=activation, implementation="mosaic"
        )
    )
    y = run(*tokens, w13, weights[1])
    want = _reference(*tokens, w13, weights[1], activation=activation)
    assert relative_error(y, want) < BF16
