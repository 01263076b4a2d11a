"""KDA prefill: the Hopper kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import kda_prefill, mosaic_prefill
from tests.numerics.support import BF16, offsets, relative_error

D = 128
INTERPRETER = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
run = jax.jit(kda_prefill, static_argnames=("lower_bound", "implementation"))


def _inputs(rng, lengths, padding, *, heads=1, pattern="typical"):
    """Arguments of `kda_prefill` up to the row offsets; padding tokens are NaN."""
    used, rows = sum(lengths), len(lengths)
    wide = (used + padding, heads, D)

    def normal(*shape):
        return rng.standard_normal(shape, np.float32)

    k, b = normal(*wide), normal(*wide[:2])
    f = {
        "typical": 2 * normal(*wide) - 2,
        "all -5": np.full(wide, 40.0),
        "-5 and 0": np.where(normal(*wide) > 0, 40.0, -12.0),
        "parallel keys": np.full(wide, -12.0),
    }[pattern]
    if pattern == "parallel keys":
        k, b = normal(1, 1, D) + 0.01 * k, np.full(wide[:2], 20.0)
    activations = [jnp.asarray(x, jnp.bfloat16) for x in (normal(*wide), k, normal(*wide), f, b)]
    activations = [x.at[used:].set(jnp.nan) for x in activations]
    parameters = [0.3 * normal(heads), 0.3 * normal(heads, D), 0.1 * normal(rows, heads, D, D)]
    return [*activations, *map(jnp.asarray, parameters), offsets(lengths)]


def _error(got, want):
    """Norm of the difference over the norm; infinite when a number is not finite."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    if not np.isfinite(got).all():
        return np.inf
    return np.linalg.norm(got - want) / np.linalg.norm(want)


def test_interpreted_kernels_equal_the_reference_without_races():
    lengths = (3, 0, 66)
    inputs = _inputs(np.random.default_rng(0), lengths, padding=5)
    exports = jnp.asarray((0, 0, 64), jnp.int32)
    want = run(*inputs, exports, lower_bound=-5.0, implementation="reference")
    got = mosaic_prefill.launch(*inputs, exports, lower_bound=-5.0, interpret=INTERPRETER)
    assert not gpu_callbacks.get_races().races_found
    for have, expected in zip(got, want, strict=True):
        assert _error(have, expected) < BF16
    assert not np.any(np.asarray(got[0][sum(lengths) :]))


@pytest.mark.parametrize(("num_tokens", "heads", "rows"), [(8192, 96, 8), (5, 12, 1)])
def test_production_shapes_lower_for_cuda(num_tokens, heads, rows):
    bf16, f32, i32 = jnp.bfloat16, jnp.float32, jnp.int32
    wide = ((num_tokens, heads, D), bf16)
    specs = [*(wide,) * 4, (wide[0][:2], bf16), ((heads,), f32), ((heads, D), f32)]
    specs += [((rows, heads, D, D), f32), ((rows + 1,), i32), ((rows,), i32)]
    launch = functools.partial(mosaic_prefill.launch, lower_bound=-5.0)
    lowered = (
        jax.jit(launch)
        .trace(*(jax.ShapeDtypeStruct(*spec) for spec in specs))
        .lower(lowering_platforms=("cuda",))
    )
    assert lowered.as_text().count("@mosaic_gpu_v2") == 2


def test_refusals_give_their_reason(monkeypatch):
    inputs = _inputs(np.random.default_rng(0), (3,), 0)
    none = jnp.zeros(1, jnp.int32)
    call = functools.partial(kda_prefill, implementation="mosaic")
    if jax.default_backend() != "gpu":
        with pytest.raises(NotImplementedError, match="backend is cpu, not a Hopper GPU"):
            call(*inputs, none, lower_bound=-5.0)
    monkeypatch.setattr(mosaic_prefill, "require_hopper", lambda: None)
    for bound in (None, -5.1):
        with pytest.raises(NotImplementedError, match=f"gates bounded by -5.0: got {bound}"):
            call(*inputs, none, lower_bound=bound)
    with pytest.raises(NotImplementedError, match="takes chunks of 64 tokens: got 32"):
        call(*inputs, none, lower_bound=-5.0, chunk=32)
    wide = [x.astype(jnp.float32) for x in inputs[:5]]
    with pytest.raises(NotImplementedError, match="takes bfloat16 activations: got float32"):
        call(*wide, *inputs[5:], none, lower_bound=-5.0)
    narrow = [x[..., :64] if x.ndim > 2 else x for x in inputs[:7]]
    narrow[6] = narrow[6][:, :64]
    with pytest.raises(NotImplementedError, match=r"takes head dim 128: got \(64, 64\)"):
        call(*narrow, inputs[7][..., :64, :64], *inputs[8:], none, lower_bound=-5.0)


# Lengths around one chunk, and exports at every chunk that a row of 200 tokens has.
RAGGED = {0: 0, 1: 0, 63: 0, 64: 0, 65: 64, 130: 128, 200: 64, 201: 192}


@pytest.mark.gpu
@pytest.mark.parametrize("padding", [0, 37, 300])
@pytest.mark.parametrize(
    ("pattern", "limit"),
    [("typical", BF16), ("all -5", BF16), ("-5 and 0", BF16), ("parallel keys", 6e-2)],
)
def test_kernels_equal_the_reference(pattern, limit, padding):
    rng = np.random.default_rng()
    lengths = tuple(int(x) for x in rng.permutation(list(RAGGED)))
    exports = jnp.asarray([RAGGED[length] for length in lengths], jnp.int32)
    inputs = _inputs(rng, lengths, padding, heads=3, pattern=pattern)
    want = run(*inputs, exports, lower_bound=-5.0, implementation="reference")
    got = run(*inputs, exports, lower_bound=-5.0, implementation="mosaic")
    for have, expected in zip(got, want, strict=True):
        assert _error(have, expected) < limit
    assert not np.any(np.asarray(got[0][sum(lengths) :], np.float32))
    for have, again in zip(
        got, run(*inputs, exports, lower_bound=-5.0, implementation="mosaic"), strict=True
    ):
        np.testing.assert_array_equal(have, again)


@pytest.mark.gpu
def test_a_rows_bits_depend_neither_on_the_batch_nor_on_how_it_was_split():
    rng = np.random.default_rng()
    inputs = _inputs(rng, (201, 65), 0, heads=2)
    settings = {"lower_bound": -5.0, "implementation": "mosaic"}
    exports = jnp.asarray([128, 0], jnp.int32)
    o, state, exported = run(*inputs, exports, **settings)

    def part(tokens, states):
        count = tokens.stop - tokens.start
        wide = [x[tokens] for x in inputs[:5]]
        rest = [*inputs[5:7], states, offsets((count,)), jnp.zeros(1, jnp.int32)]
        return run(*wide, *rest, **settings)

    head_o, head_state, _ = part(slice(0, 128), inputs[7][:1])
    np.testing.assert_array_equal(head_o, o[:128])
    np.testing.assert_array_equal(head_state, exported[:1])
    rest_o, rest_state, _ = part(slice(128, 201), head_state)
    np.testing.assert_array_equal(rest_o, o[128:201])
    np.testing.assert_array_equal(rest_state, state[:1])


@pytest.mark.gpu
def test_a_long_row_of_slow_gates_keeps_its_precision():
    rng = np.random.default_rng()
    inputs = _inputs(rng, (65536,), 0)
    inputs[3] = jnp.asarray(rng.normal(-8, 1, inputs[3].shape), jnp.bfloat16)
    none = jnp.zeros(1, jnp.int32)
    want = run(*inputs, none, lower_bound=-5.0, implementation="reference")
    got = run(*inputs, none, lower_bound=-5.0, implementation="mosaic")
    for have, expected in zip(got, want, strict=True):
        assert _error(have, expected) < BF16
    assert relative_error(got[0], want[0]) < 2 * BF16
