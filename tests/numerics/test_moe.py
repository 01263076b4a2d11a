"""Routed experts and MXFP4 weights."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.moe import PackedWeight, dequantize, moe_experts, schedule, xla
from pallas_kernels.situ import situ_glu
from tests.numerics.support import (
    BF16,
    F32,
    golden,
    relative_error,
    unchecked_annotations,
)

Z, E, F, L, A, LAYER = 3, 5, 64, 32, 2, 1
ACTIVATION = functools.partial(situ_glu, beta=4.0, linear_beta=25.0)
EACH_FORM = pytest.mark.parametrize("implementation", ["reference", "xla", "tiles"])


@functools.partial(jax.jit, static_argnames="implementation")
def experts(z, ids, weights, w13, w2, *, first_expert, implementation=None):
    """Also by tiles: XLA's form takes them for larger experts."""
    if implementation == "tiles":
        local = schedule.local_experts(ids, first_expert, w2.shape[1])
        return xla.by_tiles(z, local, weights, w13, w2, LAYER, ACTIVATION)
    return moe_experts(
        z, ids, weights, w13, w2, layer=LAYER, first_expert=first_expert, activation=ACTIVATION,
        implementation=implementation,
    )  # fmt: skip


def _weights(dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(7), 2)
    w13 = jax.random.normal(keys[0], (Z, E, 2, F, L), jnp.float32) * L**-0.5
    w2 = jax.random.normal(keys[1], (Z, E, L, F), jnp.float32) * F**-0.5
    return w13.astype(dtype), w2.astype(dtype)


def _packed():
    def pack(key, *shape):
        codes, scales = jax.random.split(key)
        return PackedWeight(
            codes=jax.random.bits(codes, (*shape[:-1], shape[-1] // 2), jnp.uint8),
            scales=jax.random.randint(scales, (*shape[:-1], shape[-1] // 32), 122, 127).astype(
                jnp.uint8
            ),
        )

    keys = jax.random.split(jax.random.key(8), 2)
    return pack(keys[0], Z, E, 2, F, L), pack(keys[1], Z, E, L, F)


def _tokens(num, *, dtype=jnp.float32, seed=0):
    """Random tokens that each choose A different experts of E."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((num, E)), axis=1)[:, :A]
    return (
        jnp.asarray(rng.normal(size=(num, L)), dtype),
        jnp.asarray(ids, jnp.int32),
        jnp.asarray(rng.random((num, A)), jnp.float32),
    )


def _float64(z, ids, weights, w13, w2, first_expert=0):
    z, w13, w2 = (np.asarray(x, np.float64) for x in (z, w13[LAYER], w2[LAYER]))
    y = np.zeros(z.shape)
    for token, choice in np.ndindex(*ids.shape):
        expert = int(ids[token, choice]) - first_expert
        if 0 <= expert < len(w2):
            gate, up = w13[expert] @ z[token]
            act = 4 * np.tanh(gate / 4) / (1 + np.exp(-gate)) * 25 * np.tanh(up / 25)
            y[token] += float(weights[token, choice]) * (w2[expert] @ act)
    return y


@EACH_FORM
@pytest.mark.parametrize("num_tokens", [1, 37, 600])  # the last one takes the large tiles
def test_experts_equal_the_dense_computation(implementation, num_tokens):
    tokens, weights = _tokens(num_tokens), _weights()
    y = experts(*tokens, *weights, first_expert=0, implementation=implementation)
    assert y.dtype == jnp.float32
    assert relative_error(y, _float64(*tokens, *weights)) < F32


@EACH_FORM
def test_packed_weights_equal_the_same_dense_weights(implementation):
    tokens, packed = _tokens(37), _packed()
    dense = [dequantize(*weight, jnp.float32) for weight in packed]
    y = experts(*tokens, *packed, first_expert=0, implementation=implementation)
    want = experts(*tokens, *dense, first_expert=0, implementation=implementation)
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)


@EACH_FORM
def test_parts_of_the_experts_add_up(implementation):
    tokens, (w13, w2) = _tokens(37), _weights()
    whole = experts(*tokens, w13, w2, first_expert=0, implementation=implementation)
    total = jnp.zeros_like(whole)
    for first, last in ((0, 2), (2, 5)):
        part = (w13[:, first:last], w2[:, first:last])
        start = jnp.asarray(first, jnp.int32)  # traced, as a rank's share is
        y = experts(*tokens, *part, first_expert=start, implementation=implementation)
        assert relative_error(y, _float64(*tokens, *part, first)) < F32
        total += y
    assert relative_error(total, whole) < F32


@EACH_FORM
def test_kf_k06_padding_of_any_content_has_no_effect_on_experts(implementation):
    z, ids, mix = _tokens(40)
    weights = _weights()
    want = experts(z, ids, mix, *weights, first_expert=0, implementation=implementation)
    z, mix = z.at[30:].set(jnp.nan), mix.at[30:].set(jnp.nan)
    ids = ids.at[30:35].set(-1).at[35:].set(E)
    y = experts(z, ids, mix, *weights, first_expert=0, implementation=implementation)
    np.testing.assert_array_equal(y[:30], want[:30])
    assert not np.any(np.asarray(y[30:]))
    # Unused places of a tile compute token 0 again; that token may itself be padding.
    first = jnp.roll(z, 10, axis=0), jnp.roll(ids, 10, axis=0), jnp.roll(mix, 10, axis=0)
    y = experts(*first, *weights, first_expert=0, implementation=implementation)
    assert relative_error(y[10:], want[:30]) < F32
    assert not np.any(np.asarray(y[:10]))


@EACH_FORM
@pytest.mark.parametrize("num_tokens", [90, 600])
def test_kf_m04_one_expert_for_all_drops_nothing(implementation, num_tokens):
    z, ids, mix = _tokens(num_tokens)
    ids, weights = jnp.full_like(ids, 3), _weights()
    y = experts(z, ids, mix, *weights, first_expert=0, implementation=implementation)
    assert relative_error(y, _float64(z, ids, mix, *weights)) < F32


@EACH_FORM
def test_a_token_does_not_see_its_batch_mates(implementation):
    z, ids, mix = _tokens(40)
    weights = _weights()
    y = experts(z, ids, mix, *weights, first_expert=0, implementation=implementation)
    other = _tokens(40, seed=1)
    mixed = [b.at[5].set(a[5]) for a, b in zip((z, ids, mix), other, strict=True)]
    other_y = experts(*mixed, *weights, first_expert=0, implementation=implementation)
    np.testing.assert_array_equal(other_y[5], y[5])


@EACH_FORM
def test_a_nan_token_leaves_the_others_alone(implementation):
    z, ids, mix = _tokens(40)
    weights, settings = _weights(), {"first_expert": 0, "implementation": implementation}
    y = experts(z, ids, mix, *weights, **settings)
    dirty = experts(z.at[5].set(jnp.nan), ids, mix, *weights, **settings)
    others = np.arange(40) != 5
    assert relative_error(dirty[others], y[others]) < F32


def test_tile_size_does_not_show(monkeypatch):
    tokens, weights = _tokens(40), _weights()
    want = experts(*tokens, *weights, first_expert=0, implementation="tiles")
    monkeypatch.setattr(xla, "SMALL_TILE", 3)
    with jax.disable_jit():
        got = experts(*tokens, *weights, first_expert=0, implementation="tiles")
    assert relative_error(got, want) < 1e-6


@EACH_FORM
def test_bfloat16_activates_and_sums_in_float32(implementation):
    tokens, weights = _tokens(37, dtype=jnp.bfloat16), _weights(jnp.bfloat16)
    y = experts(*tokens, *weights, first_expert=0, implementation=implementation)
    assert y.dtype == jnp.float32
    assert relative_error(y, _float64(*tokens, *weights)) < BF16


def test_one_layer_of_the_stack_is_never_copied():
    shape = jax.ShapeDtypeStruct
    tokens = shape((4, L), jnp.bfloat16), shape((4, A), jnp.int32), shape((4, A), jnp.float32)
    w13, w2 = shape((Z, 256, 2, F, L), jnp.bfloat16), shape((Z, 256, L, F), jnp.bfloat16)
    memory = experts.lower(*tokens, w13, w2, first_expert=0).compile().memory_analysis()
    assert memory.temp_size_in_bytes < w2.size * 2 // Z // 2


def test_mxfp4_matches_golden_exactly():
    data = golden("mxfp4")
    for codes, scales, want in (
        ("packed", "scale", data["dequant"]),
        ("round_trip_packed", "round_trip_scale", None),
    ):
        got = dequantize(jnp.asarray(data[codes]), jnp.asarray(data[scales]), jnp.float32)
        narrow = dequantize(jnp.asarray(data[codes]), jnp.asarray(data[scales]), jnp.bfloat16)
        if want is not None:
            np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(narrow.astype(jnp.float32), got)


def test_kf_l03_experts_read_nibbles_and_scales():
    def numbers(byte, scale):
        codes = jnp.full((16,), byte, jnp.uint8)
        return dequantize(codes, jnp.asarray([scale], jnp.uint8), jnp.float32)[:2].tolist()

    assert numbers(0x72, 127) == [1.0, 6.0]
    assert numbers(0x9A, 127) == [-1.0, -0.5]
    assert numbers(0x72, 126) == [0.5, 3.0]
    assert numbers(0x72, 128) == [2.0, 12.0]
    assert numbers(0x72, 254) == [2.0**127, np.inf]
    assert np.isnan(numbers(0x70, 255)).all()
    codes, scale = jnp.full((16,), 0x91, jnp.uint8), jnp.asarray([0], jnp.uint8)
    smallest = dequantize(codes, scale, jnp.float32).view(jnp.uint32)[:2]
    assert smallest.tolist() == [0x00200000, 0x80200000]  # +-0.5 * 2**-127, subnormal


def test_bad_arguments_are_named():
    tokens, (w13, w2), (p13, p2) = _tokens(4), _weights(), _packed()
    good = {"first_expert": 0, "activation": ACTIVATION}
    with pytest.raises(ValueError, match="layer is wrong: got 3; expected 0 to 2"):
        moe_experts(*tokens, w13, w2, layer=3, **good)
    with unchecked_annotations():
        with pytest.raises(ValueError, match=r"w2_ZELF .*L=16; expected L=32 as in z_TL"):
            moe_experts(*tokens, w13, w2[:, :, :16], layer=0, **good)
        with pytest.raises(ValueError, match=r"shape of w2.scales is wrong: got \(3, 5, 32, 1\)"):
            moe_experts(*tokens, p13, p2._replace(scales=p2.scales[..., :1]), layer=0, **good)
        signed = p13._replace(codes=p13.codes.astype(jnp.int8))
        with pytest.raises(TypeError, match=r"dtype of w13.codes is wrong: got int8"):
            moe_experts(*tokens, signed, p2, layer=0, **good)


@pytest.mark.parametrize("num_tokens", [8, 8192])
def test_k3_shapes_trace(num_tokens):
    shape = jax.ShapeDtypeStruct

    def packed(*dims):
        codes = shape((*dims[:-1], dims[-1] // 2), jnp.uint8)
        return PackedWeight(codes=codes, scales=shape((*dims[:-1], dims[-1] // 32), jnp.uint8))

    y = jax.eval_shape(
        lambda *a: moe_experts(*a, layer=91, first_expert=112, activation=ACTIVATION),
        shape((num_tokens, 3584), jnp.bfloat16),
        shape((num_tokens, 16), jnp.int32),
        shape((num_tokens, 16), jnp.float32),
        packed(92, 112, 2, 3072, 3584),
        packed(92, 112, 3584, 3072),
    )
    assert (y.shape, y.dtype) == ((num_tokens, 3584), jnp.float32)
