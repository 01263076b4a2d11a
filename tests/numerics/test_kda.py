"""KDA: chunked prefill and decode against golden values and a float64 token recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda import kda_decode, kda_gate, kda_prefill
from pallas_kernels.kda.api import KDA_DECODE, KDA_PREFILL
from tests.numerics.support import (
    BF16,
    CHUNKED_F32,
    F32,
    RAGGED_LENGTHS,
    each_implementation,
    golden,
    offsets,
    relative_error,
    unchecked_annotations,
)

CASES = ["B2_T9_softplus", "T1", "T64_lb", "T70_lb_state", "T131_softplus", "varlen_lb"]
N, DK, DV = 2, 16, 24
export = jax.jit(kda_prefill, static_argnames=("lower_bound", "chunk", "implementation"))
decode = jax.jit(kda_decode, static_argnames=("lower_bound", "implementation"))


def prefill(*arguments, **settings):
    """`kda_prefill` that exports nothing."""
    none = jnp.zeros(arguments[-1].shape[0] - 1, jnp.int32)
    return export(*arguments, none, **settings)[:2]


def _inputs(num_tokens, num_rows=1, *, dtype=jnp.float32, seed=0):
    """Random arguments of `kda_prefill` up to the state, as a dict."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))

    def normal(*shape, dtype=jnp.float32):
        return jax.random.normal(next(keys), shape, jnp.float32).astype(dtype)

    return {
        "q": normal(num_tokens, N, DK, dtype=dtype),
        "k": normal(num_tokens, N, DK, dtype=dtype),
        "v": normal(num_tokens, N, DV, dtype=dtype),
        "f": normal(num_tokens, N, DK, dtype=dtype),
        "b": normal(num_tokens, N, dtype=dtype),
        "A_log": normal(N),
        "dt_bias": normal(N, DK),
        "state": normal(num_rows, N, DV, DK),
    }


def _float64(inputs, lower_bound):
    """Run one row token by token in float64; the state goes in and out as [N, Dv, Dk]."""
    x = {name: np.asarray(value, np.float64) for name, value in inputs.items()}
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (x["q"], x["k"]))
    rate, z = np.exp(x["A_log"])[:, None], x["f"] + x["dt_bias"]
    softplus, sigmoid = np.logaddexp(0, z), (1 + np.tanh(rate * z / 2)) / 2
    g = -rate * softplus if lower_bound is None else lower_bound * sigmoid
    beta, s, outputs = 1 / (1 + np.exp(-x["b"])), x["state"][0], []
    for t in range(len(q)):
        s = s * np.exp(g[t])[:, None, :]
        u = beta[t][:, None] * (x["v"][t] - np.einsum("nvk,nk->nv", s, k[t]))
        s = s + u[:, :, None] * k[t][:, None, :]
        outputs.append(np.einsum("nvk,nk->nv", s, q[t]) * DK**-0.5)
    return np.stack(outputs), s[None]


def _tokens(inputs, tokens, rows=slice(None)):
    """Restrict arguments to some tokens and rows."""
    cut = {name: inputs[name][tokens] for name in ("q", "k", "v", "f", "b")}
    return {**inputs, **cut, "state": inputs["state"][rows]}


@each_implementation(KDA_PREFILL)
@pytest.mark.parametrize("case", CASES)
def test_prefill_matches_golden(implementation, case):
    data = golden(f"kda_{case}")
    batch, length = data["q"].shape[:2]
    rows = data["cu_seqlens"] if batch == 1 else np.arange(batch + 1) * length
    flat = {
        n: jnp.asarray(data[n]).reshape(-1, *data[n].shape[2:]) for n in data if data[n].ndim > 2
    }
    o, state = prefill(
        *(flat[name] for name in ("q", "k", "v", "g_raw", "beta_raw")),
        data["A_log"],
        data["dt_bias"],
        jnp.asarray(data["initial_state"].swapaxes(-1, -2)),
        jnp.asarray(rows, jnp.int32),
        lower_bound=None if np.isnan(data["lower_bound"]) else float(data["lower_bound"]),
        implementation=implementation,
    )
    assert relative_error(o, flat["o"]) < CHUNKED_F32
    assert relative_error(state, data["final_state"].swapaxes(-1, -2)) < CHUNKED_F32


@each_implementation(KDA_DECODE)
def test_decode_matches_golden(implementation):
    data = {name: jnp.asarray(value) for name, value in golden("kda_T1").items()}
    o, state = decode(
        *(data[name][0] for name in ("q", "k", "v", "g_raw", "beta_raw")),
        data["A_log"],
        data["dt_bias"],
        data["initial_state"].swapaxes(-1, -2),
        lower_bound=None if np.isnan(data["lower_bound"]) else float(data["lower_bound"]),
        implementation=implementation,
    )
    assert relative_error(o, data["o"][0]) < F32
    assert relative_error(state, data["final_state"].swapaxes(-1, -2)) < F32


@pytest.mark.parametrize("case", CASES)
def test_gate_matches_golden(case):
    data = {name: jnp.asarray(value) for name, value in golden(f"kda_{case}").items()}
    bound = None if np.isnan(data["lower_bound"]) else float(data["lower_bound"])
    g = kda_gate(
        data["g_raw"].reshape(-1, *data["dt_bias"].shape), data["A_log"], data["dt_bias"], bound
    )
    assert relative_error(g, data["log_decay"].reshape(g.shape)) < F32


@pytest.mark.parametrize(
    ("bound", "a_log", "x", "want"),
    [
        (-5.0, 0.0, 0.0, -2.5),
        (-5.0, np.log(2), 1.0, -4.40399),
        (-5.0, 0.0, 100.0, -5.0),
        (None, 0.0, 0.0, -0.693147),
        (None, np.log(2), 100.0, -200.0),
    ],
)
def test_kf_k02_gate_is_bounded_sigmoid_or_softplus(bound, a_log, x, want):
    half = jnp.full((1, 1, 1), x / 2, jnp.float32)  # the other half comes as the bias
    g = kda_gate(half, jnp.asarray([a_log], jnp.float32), half[0], bound)
    assert relative_error(g, np.full((1, 1, 1), want)) < F32


@each_implementation(KDA_PREFILL)
@pytest.mark.parametrize("pattern", ["all -5", "all -3", "uniform", "one channel at -5"])
def test_kf_k01_bounded_gates_at_their_limit_match_float64(implementation, pattern):
    inputs = _inputs(256)
    uniform = np.random.default_rng(0).uniform(1e-6, 1 - 1e-6, (256, N, DK))
    one = np.where(np.arange(DK) == 3, 100.0, -100.0) * np.ones((256, N, 1))
    f = {
        "all -5": np.full((256, N, DK), 100.0),
        "all -3": np.full((256, N, DK), np.log(1.5)),
        "uniform": np.log(uniform / (1 - uniform)),
        "one channel at -5": one,
    }[pattern]
    inputs |= {"A_log": jnp.zeros(N, jnp.float32), "dt_bias": jnp.zeros((N, DK), jnp.float32)}
    inputs |= {"f": jnp.asarray(f, jnp.float32)}
    got = prefill(
        *inputs.values(), offsets((256,)), lower_bound=-5.0, implementation=implementation
    )
    for have, want in zip(got, _float64(inputs, -5.0), strict=True):
        assert relative_error(have, want) < CHUNKED_F32


@each_implementation(KDA_PREFILL)
@pytest.mark.parametrize("spread", [10.0, 1000.0])
def test_kf_k01_unbounded_gates_of_any_strength_match_float64(implementation, spread):
    inputs = _inputs(256)
    # Within one chunk some tokens forget everything and others almost nothing.
    inputs |= {"f": inputs["f"] * spread - 5.0, "A_log": jnp.zeros(N, jnp.float32)}
    got = prefill(
        *inputs.values(), offsets((256,)), lower_bound=None, implementation=implementation
    )
    for have, want in zip(got, _float64(inputs, None), strict=True):
        assert relative_error(have, want) < CHUNKED_F32


@each_implementation(KDA_PREFILL)
@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_kf_k03_parallel_keys_with_hardly_any_decay_match_float64(implementation, noise):
    inputs = _inputs(256)
    inputs |= {
        "k": inputs["k"][:1] + noise * inputs["k"],
        "f": jnp.full((256, N, DK), np.log(2e-4 / (1 - 2e-4)), jnp.float32),  # g = -1e-3
        "b": jnp.full((256, N), np.log(99.0), jnp.float32),  # beta = 0.99
        "A_log": jnp.zeros(N, jnp.float32),
        "dt_bias": jnp.zeros((N, DK), jnp.float32),
    }
    got = prefill(
        *inputs.values(), offsets((256,)), lower_bound=-5.0, implementation=implementation
    )
    for have, want in zip(got, _float64(inputs, -5.0), strict=True):
        assert relative_error(have, want) < CHUNKED_F32


@each_implementation(KDA_PREFILL)
def test_kf_k05_packed_rows_equal_rows_alone(implementation):
    rows = offsets(RAGGED_LENGTHS)
    inputs = _inputs(sum(RAGGED_LENGTHS), len(RAGGED_LENGTHS))
    o, state = prefill(*inputs.values(), rows, lower_bound=-5.0, implementation=implementation)
    for row, length in enumerate(RAGGED_LENGTHS):
        own = slice(int(rows[row]), int(rows[row + 1]))
        if not length:
            np.testing.assert_array_equal(state[row], inputs["state"][row])
            continue
        want_o, want_state = _float64(_tokens(inputs, own, slice(row, row + 1)), -5.0)
        assert relative_error(o[own], want_o) < CHUNKED_F32
        assert relative_error(state[row : row + 1], want_state) < CHUNKED_F32


@each_implementation(KDA_PREFILL)
def test_kf_k06_padding_of_any_content_has_no_effect(implementation):
    inputs, rows = _inputs(64, 3), offsets((1, 0, 40))
    dirty = {
        name: value.at[41:].set(jnp.nan) if name in "qkvfb" else value
        for name, value in inputs.items()
    }
    settings = {"lower_bound": -5.0, "implementation": implementation}
    clean_o, clean_state = prefill(*inputs.values(), rows, **settings)
    o, state = prefill(*dirty.values(), rows, **settings)
    np.testing.assert_array_equal(o, clean_o)
    np.testing.assert_array_equal(state, clean_state)
    np.testing.assert_array_equal(state[1], inputs["state"][1])
    assert not np.any(np.asarray(o[41:]))


@each_implementation(KDA_PREFILL)
def test_an_empty_last_row_keeps_every_bit_of_its_state(implementation):
    inputs, rows = _inputs(64, 2), offsets((40, 0))
    odd = jnp.asarray([jnp.inf, -jnp.inf, jnp.nan, -0.0], jnp.float32)
    inputs |= {"state": inputs["state"].at[1, 0, 0, :4].set(odd)}
    _, state = prefill(*inputs.values(), rows, lower_bound=-5.0, implementation=implementation)
    np.testing.assert_array_equal(state[1].view(jnp.uint32), inputs["state"][1].view(jnp.uint32))
    assert np.isfinite(state[0]).all()


@each_implementation(KDA_PREFILL)
def test_small_queries_and_keys_show_that_epsilon_joins_the_sum_of_squares(implementation):
    inputs = _inputs(40)
    inputs |= {"q": inputs["q"] * 3e-4, "k": inputs["k"] * 3e-4}
    rows, settings = offsets((40,)), {"lower_bound": -5.0, "implementation": implementation}
    for have, want in zip(
        prefill(*inputs.values(), rows, **settings), _float64(inputs, -5.0), strict=True
    ):
        assert relative_error(have, want) < CHUNKED_F32
    step = _tokens(inputs, slice(1))
    for have, want in zip(decode(*step.values(), **settings), _float64(step, -5.0), strict=True):
        assert relative_error(have, want) < F32


@each_implementation(KDA_PREFILL)
def test_a_row_with_nan_leaves_the_other_rows_alone(implementation):
    inputs, rows = _inputs(130, 2), offsets((65, 65))
    settings = {"lower_bound": -5.0, "implementation": implementation}
    clean_o, clean_state = prefill(*inputs.values(), rows, **settings)
    for own, row, bad in ((slice(65), 0, 70), (slice(65, 130), 1, 3)):
        dirty = {**inputs, "k": inputs["k"].at[bad].set(jnp.nan)}
        o, state = prefill(*dirty.values(), rows, **settings)
        np.testing.assert_array_equal(o[own], clean_o[own])
        np.testing.assert_array_equal(state[row], clean_state[row])


@each_implementation(KDA_PREFILL)
def test_the_past_does_not_see_the_future(implementation):
    inputs, rows = _inputs(130), offsets((130,))
    settings = {"lower_bound": -5.0, "implementation": implementation}
    other = {n: v.at[37:].multiply(3) if n in "qkvfb" else v for n, v in inputs.items()}
    o, _ = prefill(*inputs.values(), rows, **settings)
    other_o, _ = prefill(*other.values(), rows, **settings)
    np.testing.assert_array_equal(o[:37], other_o[:37])
    assert np.any(np.asarray(o[37:] != other_o[37:]))


@each_implementation(KDA_PREFILL)
def test_kf_k08_prefill_continue_and_decode_equal_one_recurrence(implementation):
    inputs = _inputs(220)
    want_o, want_state = _float64(inputs, -5.0)
    settings = {"lower_bound": -5.0, "implementation": implementation}
    outputs, state = [], inputs["state"]
    for own in (slice(0, 100), slice(100, 200)):
        part = {**_tokens(inputs, own), "state": state}
        o, state = prefill(*part.values(), offsets((100,)), **settings)
        outputs.append(o)
    for t in range(200, 220):
        part = {**_tokens(inputs, slice(t, t + 1)), "state": state}
        o, state = decode(*part.values(), **settings)
        outputs.append(o)
    assert relative_error(np.concatenate(outputs), want_o) < CHUNKED_F32
    assert relative_error(state, want_state) < CHUNKED_F32


# Rows of one to many chunks, some without an export, one empty, one that ends with a chunk.
EXPORTS = {130: 64, 65: 64, 64: 0, 0: 0, 193: 128, 128: 64, 3: 0, 129: 128, 200: 0}


@each_implementation(KDA_PREFILL)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_exported_states_are_those_of_split_rows(implementation, lower_bound):
    lengths = tuple(EXPORTS)
    exports = jnp.asarray(tuple(EXPORTS.values()), jnp.int32)
    inputs = _inputs(sum(lengths) + 30, len(lengths))  # some padding tokens
    rows = offsets(lengths)
    settings = {"lower_bound": lower_bound, "implementation": implementation}
    got_o, got_state, exported = export(*inputs.values(), rows, exports, **settings)
    want_o, want_state = prefill(*inputs.values(), rows, **settings)
    np.testing.assert_array_equal(got_o, want_o)
    np.testing.assert_array_equal(got_state, want_state)

    row_T = np.repeat(np.arange(len(lengths)), lengths)
    is_head_T = np.arange(len(row_T)) - np.asarray(rows)[row_T] < np.asarray(exports)[row_T]
    head, rest = np.flatnonzero(is_head_T), np.flatnonzero(~is_head_T)
    head_lengths = tuple(EXPORTS.values())
    _, want = prefill(*_tokens(inputs, head).values(), offsets(head_lengths), **settings)
    assert relative_error(exported, want) < F32
    one = slice(int(rows[4]), int(rows[4]) + 128)
    _, alone = _float64(_tokens(inputs, one, slice(4, 5)), lower_bound)
    assert relative_error(exported[4:5], alone) < CHUNKED_F32

    rest_lengths = tuple(length - tokens for length, tokens in EXPORTS.items())
    resumed = {**_tokens(inputs, rest), "state": exported}
    o, state = prefill(*resumed.values(), offsets(rest_lengths), **settings)
    assert relative_error(o, want_o[rest]) < CHUNKED_F32
    assert relative_error(state, want_state) < CHUNKED_F32


@each_implementation(KDA_PREFILL)
def test_an_export_sees_nothing_behind_it_and_nothing_of_other_rows(implementation):
    inputs, rows = _inputs(230, 2), offsets((100, 130))
    settings = {"lower_bound": -5.0, "implementation": implementation}
    exports = jnp.asarray([64, 64], jnp.int32)
    _, _, want = export(*inputs.values(), rows, exports, **settings)
    dirty = {
        name: value.at[64:100].set(jnp.nan) if name in "qkvfb" else value
        for name, value in inputs.items()
    }
    _, state, got = export(*dirty.values(), rows, exports, **settings)
    np.testing.assert_array_equal(got, want)
    assert np.isnan(state[0]).any()
    assert np.isfinite(state[1]).all()


@pytest.mark.parametrize("chunk", [1, 16, 128])
def test_chunk_length_does_not_show(chunk):
    inputs, rows = _inputs(130, 2), offsets((30, 100))
    want = prefill(*inputs.values(), rows, lower_bound=None, implementation="reference")
    got = prefill(*inputs.values(), rows, lower_bound=None, chunk=chunk, implementation="xla")
    assert relative_error(got[0], want[0]) < CHUNKED_F32
    assert relative_error(got[1], want[1]) < CHUNKED_F32


@each_implementation(KDA_PREFILL)
def test_kf_m08_bfloat16_inputs_keep_state_and_arithmetic_in_float32(implementation):
    inputs = _inputs(70, dtype=jnp.bfloat16)
    want_o, want_state = _float64(inputs, -5.0)
    o, state = prefill(
        *inputs.values(), offsets((70,)), lower_bound=-5.0, implementation=implementation
    )
    assert (o.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)
    assert relative_error(o, want_o) < BF16 / 2
    assert relative_error(state, want_state) < CHUNKED_F32
    step = _tokens(inputs, slice(1))
    o, state = decode(*step.values(), lower_bound=-5.0, implementation=implementation)
    assert (o.dtype, state.dtype) == (jnp.bfloat16, jnp.float32)


def test_bad_arguments_are_named():
    inputs, rows = _inputs(4), (offsets((4,)), jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="chunk is wrong: got 48; expected a power of two"):
        kda_prefill(*inputs.values(), *rows, lower_bound=-5.0, chunk=48)
    with pytest.raises(ValueError, match=r"lower_bound is wrong: got 5\.0; expected a negative"):
        kda_prefill(*inputs.values(), *rows, lower_bound=5.0)
    with unchecked_annotations():
        transposed = {**inputs, "state": inputs["state"].swapaxes(-1, -2)}
        with pytest.raises(ValueError, match=r"state_SNDvDk .* Dv=16; expected Dv=24 as in v_TNDv"):
            kda_prefill(*transposed.values(), *rows, lower_bound=-5.0)
        two = jnp.zeros(2, jnp.int32)
        with pytest.raises(ValueError, match=r"export_tokens is wrong: got int32\[2\]; expected"):
            kda_prefill(*inputs.values(), rows[0], two, lower_bound=-5.0)
        narrow = {**inputs, "state": inputs["state"].astype(jnp.bfloat16)}
        with pytest.raises(TypeError, match="dtype of state_SNDvDk is wrong: got bfloat16"):
            kda_decode(*_tokens(narrow, slice(1)).values(), lower_bound=-5.0)


def test_k3_shapes_trace():
    def shapes(tokens, rows, heads):
        bf16, f32 = jnp.bfloat16, jnp.float32
        wide, flat = (tokens, heads, 128), (tokens, heads)
        dims = [(wide, bf16)] * 4 + [(flat, bf16), ((heads,), f32), ((heads, 128), f32)]
        return [jax.ShapeDtypeStruct(*d) for d in (*dims, ((rows, heads, 128, 128), f32))]

    o, state, exported = jax.eval_shape(
        lambda *a: kda_prefill(*a, lower_bound=-5.0),
        *shapes(8192, 8, 12),
        jax.ShapeDtypeStruct((9,), jnp.int32),
        jax.ShapeDtypeStruct((8,), jnp.int32),
    )
    assert (o.shape, state.shape) == ((8192, 12, 128), (8, 12, 128, 128))
    assert exported == state
    o, state = jax.eval_shape(lambda *a: kda_decode(*a, lower_bound=-5.0), *shapes(256, 256, 6))
    assert (o.shape, state.shape) == ((256, 6, 128), (256, 6, 128, 128))
