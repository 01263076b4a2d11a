"""Short causal convolution over ragged rows."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.short_conv import short_conv, short_conv_step
from pallas_kernels.short_conv.api import SHORT_CONV, SHORT_CONV_STEP
from tests.numerics.support import (
    BF16,
    F32,
    RAGGED_LENGTHS,
    each_implementation,
    golden,
    offsets,
    relative_error,
    unchecked_annotations,
)

export = jax.jit(short_conv, static_argnames="implementation")
step = jax.jit(short_conv_step, static_argnames="implementation")


def conv(x, weight, history, row_offsets, **settings):
    """`short_conv` that exports nothing."""
    none = jnp.zeros(history.shape[0], jnp.int32)
    return export(x, weight, history, row_offsets, none, **settings)[:2]


def _inputs(lengths, *, channels=6, taps=4, slack=0, dtype=jnp.float32):
    keys = jax.random.split(jax.random.key(len(lengths)), 3)
    x = jax.random.normal(keys[0], (sum(lengths) + slack, channels), jnp.float32).astype(dtype)
    weight = jax.random.normal(keys[1], (channels, taps), jnp.float32)
    history = jax.random.normal(keys[2], (len(lengths), taps - 1, channels), jnp.float32)
    return x, weight, history.astype(dtype)


@each_implementation(SHORT_CONV)
def test_conv_matches_golden(implementation):
    data = {name: jnp.asarray(value) for name, value in golden("causal_conv").items()}
    rows = offsets((21,))
    for history, want in ((data["tail"], "y"), (jnp.zeros_like(data["tail"]), "y_zero_tail")):
        y, new = conv(data["x"], data["weight"], history[None], rows, implementation=implementation)
        assert relative_error(y, data[want]) < F32
        np.testing.assert_array_equal(new[0], data["new_tail"])


@each_implementation(SHORT_CONV)
@pytest.mark.parametrize("taps", [2, 4])
def test_kf_k05_packed_windows_equal_windows_alone(implementation, taps):
    x, weight, history = _inputs(RAGGED_LENGTHS, taps=taps)
    rows = offsets(RAGGED_LENGTHS)
    y, new = conv(x, weight, history, rows, implementation=implementation)
    for row, length in enumerate(RAGGED_LENGTHS):
        own = slice(int(rows[row]), int(rows[row + 1]))
        seen = np.concatenate([history[row], x[own]])
        np.testing.assert_array_equal(new[row], seen[len(seen) - (taps - 1) :])
        windows = np.stack([seen[t : t + taps] for t in range(length)]) if length else seen[:0]
        total = np.einsum("txk,kx->tk", windows.astype(np.float64), weight) if length else windows
        np.testing.assert_allclose(y[own], total / (1 + np.exp(-total)), rtol=1e-5, atol=1e-5)


@each_implementation(SHORT_CONV)
def test_kf_k06_padding_of_any_content_has_no_effect_on_windows(implementation):
    x, weight, history = _inputs((2, 0, 39), slack=23)
    rows = offsets((2, 0, 39))
    y, new = conv(x.at[41:].set(jnp.nan), weight, history, rows, implementation=implementation)
    clean_y, clean_new = conv(x, weight, history, rows, implementation=implementation)
    np.testing.assert_array_equal(y, clean_y)
    np.testing.assert_array_equal(new, clean_new)
    assert not np.any(np.asarray(y[41:]))


@each_implementation(SHORT_CONV)
def test_kf_k07_chunks_shorter_than_the_window_carry_it_on(implementation):
    x, weight, _ = _inputs((10,))
    history = jnp.zeros((1, 3, 6), jnp.float32)
    whole, last = conv(x, weight, history, offsets((10,)), implementation=implementation)
    parts, done = [], 0
    for length in (1, 1, 2, 1, 5):
        part = x[done : done + length]
        y, history = conv(part, weight, history, offsets((length,)), implementation=implementation)
        if done == 0:
            np.testing.assert_array_equal(history[0], [0 * x[0], 0 * x[0], x[0]])
        parts.append(y)
        done += length
    np.testing.assert_allclose(np.concatenate(parts), whole, rtol=1e-6, atol=1e-6)
    np.testing.assert_array_equal(history, last)


@each_implementation(SHORT_CONV_STEP)
def test_steps_equal_the_whole_sequence(implementation):
    x, weight, history = _inputs((7,))
    whole, last = conv(x, weight, history, offsets((7,)), implementation="reference")
    for t in range(7):
        y, history = step(x[t : t + 1], weight, history, implementation=implementation)
        assert relative_error(y[0], whole[t]) < F32
    np.testing.assert_array_equal(history, last)


@each_implementation(SHORT_CONV)
def test_bfloat16_inputs_accumulate_in_float32(implementation):
    x, weight, history = _inputs((5, 30), dtype=jnp.bfloat16)
    rows = offsets((5, 30))
    y, new = conv(x, weight, history, rows, implementation=implementation)
    wide = (x.astype(jnp.float32), weight, history.astype(jnp.float32), rows)
    want, _ = conv(*wide, implementation="reference")
    assert y.dtype == new.dtype == jnp.bfloat16
    assert relative_error(y, want) < BF16 / 2


@each_implementation(SHORT_CONV)
def test_exported_history_is_that_of_the_split_row(implementation):
    exports = {130: 64, 65: 64, 7: 0, 0: 0, 5: 1, 6: 2, 4: 3, 2: 2, 128: 127}
    lengths = tuple(exports)
    x, weight, history = _inputs(lengths, slack=9)
    rows, counts = offsets(lengths), jnp.asarray(tuple(exports.values()), jnp.int32)
    want_y, want_new = conv(x, weight, history, rows, implementation=implementation)
    y, new, got = export(x, weight, history, rows, counts, implementation=implementation)
    np.testing.assert_array_equal(y, want_y)
    np.testing.assert_array_equal(new, want_new)
    for row, tokens in enumerate(exports.values()):
        start = int(rows[row])
        seen = np.concatenate([history[row], x[start : start + tokens]])
        np.testing.assert_array_equal(got[row], seen[len(seen) - 3 :])


def test_bad_arguments_are_named():
    x, weight, history = _inputs((4,))
    none = jnp.zeros(1, jnp.int32)
    with unchecked_annotations():
        with pytest.raises(
            ValueError, match="history length is wrong: got 2; expected 3 for 4 taps"
        ):
            short_conv(x, weight, history[:, 1:], offsets((4,)), none)
        with pytest.raises(
            ValueError, match=r"row_offsets is wrong: got int32\[3\]; expected int32"
        ):
            short_conv(x, weight, history, offsets((2, 2)), none)
        with pytest.raises(TypeError, match="dtype of weight_KX is wrong: got bfloat16"):
            short_conv(x, weight.astype(jnp.bfloat16), history, offsets((4,)), none)
        with pytest.raises(ValueError, match=r"export_tokens is wrong: got int32\[2\]; expected"):
            short_conv(x, weight, history, offsets((4,)), jnp.zeros(2, jnp.int32))


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_k3_shapes_trace(implementation):
    shape = jax.ShapeDtypeStruct
    weight, history = shape((36864, 4), jnp.float32), shape((8, 3, 36864), jnp.bfloat16)
    x = shape((8192, 36864), jnp.bfloat16)
    rows, exports = shape((9,), jnp.int32), shape((8,), jnp.int32)
    got = jax.eval_shape(
        lambda *a: export(*a, implementation=implementation), x, weight, history, rows, exports
    )
    assert got == (x, history, history)
