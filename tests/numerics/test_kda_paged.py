"""The fused decode step of KDA on the page pool: values, pages, and the kernel for Hopper."""

import functools
import importlib.util
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import kda_decode_paged, mosaic_decode, triton_decode
from pallas_kernels.kda.paged import KDA_DECODE_PAGED
from tests.numerics.kda_pages import PAGES, POSITION, paged_inputs, states
from tests.numerics.support import BF16, CHUNKED_F32, F32, each_implementation, relative_error

SETTINGS = {"position": POSITION, "lower_bound": -5.0, "eps": 1e-5}
each_kernel = pytest.mark.parametrize("implementation", ["mosaic", "triton"])
op = jax.jit(kda_decode_paged, static_argnames=("position", "lower_bound", "eps", "implementation"))


def _inputs(source, target, **options):
    pages = {name: jnp.asarray(value, jnp.int32) for name, value in zip(
        ("source", "target"), (source, target), strict=True)}  # fmt: skip
    return paged_inputs(source, **options) | pages


def _float64(inputs):
    """Outputs, windows and states of all rows, from the equations."""
    window, state = states(inputs, inputs["pool"], inputs["source"])
    x = {name: np.asarray(value, np.float64) for name, value in inputs.items()}

    def sigmoid(z):
        return (1 + np.tanh(z / 2)) / 2

    seen = np.concatenate([np.asarray(window, np.float64), x["qkv"][:, None]], axis=1)
    y = np.einsum("stcnd,cndt->scnd", seen, x["taps"])
    q, k, v = np.moveaxis(y * sigmoid(y), 1, 0)
    q, k = (a / np.sqrt((a**2).sum(-1, keepdims=True) + 1e-6) for a in (q, k))
    g = -5.0 * sigmoid(np.exp(x["A_log"])[:, None] * (x["f"] + x["dt_bias"]))
    s = np.asarray(state, np.float64) * np.exp(g)[:, :, None]
    u = sigmoid(x["b"])[..., None] * (v - np.einsum("snvk,snk->snv", s, k))
    s = s + u[..., None] * k[:, :, None]
    o = np.einsum("snvk,snk->snv", s, q) * q.shape[-1] ** -0.5
    o = o / np.sqrt((o**2).mean(-1, keepdims=True) + 1e-5) * x["o_norm"]
    return o * sigmoid(x["gate"]), seen[:, 1:], s


@each_implementation(KDA_DECODE_PAGED)
def test_outputs_and_states_match_float64(implementation):
    inputs = _inputs([3, 0, 8, 1], [3, 4, 2, 1])
    y, pool = op(*inputs.values(), **SETTINGS, implementation=implementation)
    want_y, want_window, want_state = _float64(inputs)
    window, state = states(inputs, pool, inputs["target"])
    assert relative_error(y, want_y) < F32
    np.testing.assert_array_equal(window, want_window.astype(np.float32))
    assert relative_error(state, want_state) < F32


def _check_pages(run):
    """Rows that start, move, stay and are not in use, beside pages of NaN."""
    inputs = _inputs([3, 0, 8, 0], [3, 4, 2, 0], dim=128, dtype=jnp.bfloat16)
    want_y, want = op(*inputs.values(), **SETTINGS, implementation="reference")
    y, pool = run(*inputs.values(), **SETTINGS)
    assert relative_error(y, want_y) < BF16
    assert not np.any(np.asarray(y[3]))
    window, state = states(inputs, pool, inputs["target"])
    want_window, want_state = states(inputs, want, inputs["target"])
    np.testing.assert_array_equal(window, want_window)
    assert relative_error(state, want_state) < CHUNKED_F32
    words = 2 * 128 * (2 * 128 + 9)
    is_state = np.zeros(pool.shape, bool).reshape(*pool.shape[:2], -1)
    is_state[1, [3, 4, 2], :words] = True
    old, new = (np.asarray(p).reshape(is_state.shape)[~is_state] for p in (inputs["pool"], pool))
    np.testing.assert_array_equal(new, old)


@each_implementation(KDA_DECODE_PAGED)
def test_kf_c03_rows_start_move_and_stay_on_pages_beside_nan(implementation):
    _check_pages(functools.partial(op, implementation=implementation))


def _launch(*arguments, position, **settings):
    position = jnp.full((1,), position, jnp.int32)
    return mosaic_decode.launch(*arguments, position, **settings)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on a CPU")
def test_kf_c03_kernel_starts_and_continues_rows_without_races():
    settings = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    _check_pages(functools.partial(_launch, interpret=settings))
    assert not gpu_callbacks.get_races().races_found


def _production(rows, heads):
    """Shapes and dtypes of the released model."""
    dtypes = {"qkv": jnp.bfloat16, "f": jnp.bfloat16, "b": jnp.bfloat16, "gate": jnp.bfloat16}
    shapes = {
        "qkv": (rows, 3, heads, 128), "f": (rows, heads, 128), "b": (rows, heads),
        "gate": (rows, heads, 128), "taps": (3, heads, 128, 4), "A_log": (heads,),
        "dt_bias": (heads, 128), "o_norm": (128,), "pool": (23, 300, 64 * heads, 576),
        "source": (rows,), "target": (rows,),
    }  # fmt: skip
    dtypes |= {"pool": jnp.uint16, "source": jnp.int32, "target": jnp.int32}
    return [jax.ShapeDtypeStruct(shapes[n], dtypes.get(n, jnp.float32)) for n in shapes]


@pytest.mark.parametrize(("rows", "heads"), [(1, 12), (32, 48), (256, 96)])
def test_the_kernel_lowers_for_hopper_in_place(rows, heads):
    launch = jax.jit(functools.partial(_launch, **SETTINGS), donate_argnums=8)
    lowered = launch.trace(*_production(rows, heads)).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    assert "mosaic_gpu" in text
    assert "output_operand_alias<output_tuple_indices = [1], operand_index = 11" in text


def test_the_kernel_refuses_by_name(monkeypatch):
    inputs = _inputs([1], [1])
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match=r"mosaic: .*Hopper GPU"):
            op(*inputs.values(), **SETTINGS, implementation="mosaic")
        with pytest.raises(NotImplementedError, match="triton: the JAX backend is cpu, not a GPU"):
            op(*inputs.values(), **SETTINGS, implementation="triton")
    monkeypatch.setattr(mosaic_decode, "require_hopper", lambda: None)
    with pytest.raises(NotImplementedError, match="takes bfloat16 activations: got float32"):
        kda_decode_paged(*inputs.values(), **SETTINGS, implementation="mosaic")
    inputs = _inputs([1], [1], dtype=jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="takes head dim 128 and 4 taps: got head dim 8"):
        kda_decode_paged(*inputs.values(), **SETTINGS, implementation="mosaic")
    inputs = _inputs([1], [1], dim=128, dtype=jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="takes bounded gates: got lower_bound None"):
        kda_decode_paged(
            *inputs.values(), **SETTINGS | {"lower_bound": None}, implementation="mosaic"
        )


def test_triton_refuses_by_name(monkeypatch):
    def devices(capability):
        device = types.SimpleNamespace(platform="gpu", compute_capability=capability)
        monkeypatch.setattr(jax, "devices", lambda: [device])

    for capability in ("7.5", "gfx942"):
        devices(capability)
        with pytest.raises(NotImplementedError, match=f"compute capability {capability}, not 8.0"):
            triton_decode.require_triton()
    devices("8.0")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match="the package jax_triton is not installed"):
        triton_decode.require_triton()
    monkeypatch.setattr(triton_decode, "require_triton", lambda: None)
    inputs = _inputs([1], [1])
    with pytest.raises(NotImplementedError, match=r"takes a head dim of \(16, .*\): got 8"):
        kda_decode_paged(*inputs.values(), **SETTINGS, implementation="triton")


def test_bad_arguments_are_named():
    inputs = _inputs([1], [1])
    with pytest.raises(ValueError, match="position is wrong: got 3; expected 0 to 2"):
        kda_decode_paged(*inputs.values(), **SETTINGS | {"position": 3})
    with pytest.raises(ValueError, match="page size is wrong: got 320 words; expected 544 or more"):
        kda_decode_paged(*(inputs | {"pool": inputs["pool"][:, :, :4]}).values(), **SETTINGS)


def _adversarial(case, rows, heads, seed):
    pages = np.random.default_rng(seed).permutation(np.arange(1, PAGES))[:rows]
    inputs = _inputs(pages, pages[::-1] if case == "moved" else pages, heads=heads, dim=128,
                     dtype=jnp.bfloat16, seed=seed)  # fmt: skip
    if case == "gates at -5":
        inputs["f"] = jnp.full_like(inputs["f"], 100.0)
    if case == "parallel keys":  # the state's rows are along the key, and beta is near 1
        inputs["qkv"] = inputs["qkv"].at[:, 1].set(inputs["qkv"][:1, 1, :1, :1])
        inputs["b"] = jnp.full_like(inputs["b"], 8.0)
        inputs["f"] = jnp.full_like(inputs["f"], -30.0)
    return inputs


@pytest.mark.gpu
@each_kernel
@pytest.mark.parametrize("case", ["random", "gates at -5", "parallel keys"])
@pytest.mark.parametrize(("rows", "heads"), [(1, 12), (8, 12), (3, 48), (8, 96)])
def test_the_kernel_matches_the_reference(implementation, case, rows, heads):
    inputs = _adversarial(case, rows, heads, seed=np.random.SeedSequence().entropy % 2**31)
    want_y, want = op(*inputs.values(), **SETTINGS, implementation="reference")
    y, pool = op(*inputs.values(), **SETTINGS, implementation=implementation)
    assert relative_error(y, want_y) < BF16
    window, state = states(inputs, pool, inputs["target"])
    want_window, want_state = states(inputs, want, inputs["target"])
    np.testing.assert_array_equal(window, want_window)
    # Of a million values some come out of the convolution on the other side of a bf16 tie, which
    # is up to 2**-7 of the value.
    assert relative_error(state, want_state) < BF16
    assert np.quantile(np.abs(state - want_state), 0.999) < CHUNKED_F32 * np.abs(want_state).max()


@pytest.mark.gpu
@each_kernel
def test_kf_c03_kernel_on_a_gpu_changes_only_target_pages(implementation):
    _check_pages(functools.partial(op, implementation=implementation))


@pytest.mark.gpu
@pytest.mark.parametrize(("lower_bound", "dtype"), [(-5.0, jnp.float32), (None, jnp.bfloat16)])
@pytest.mark.parametrize("dim", [16, 64])
def test_the_triton_kernel_takes_other_sizes_and_gates(lower_bound, dtype, dim):
    inputs = _inputs([3, 0, 8, 1], [3, 4, 2, 1], heads=3, dim=dim, dtype=dtype)
    settings = SETTINGS | {"lower_bound": lower_bound}
    want_y, want = op(*inputs.values(), **settings, implementation="reference")
    y, pool = op(*inputs.values(), **settings, implementation="triton")
    tolerance = F32 if dtype == jnp.float32 else BF16
    assert relative_error(y, want_y) < tolerance
    window, state = states(inputs, pool, inputs["target"])
    want_window, want_state = states(inputs, want, inputs["target"])
    np.testing.assert_array_equal(window, want_window)
    assert relative_error(state, want_state) < tolerance


@pytest.mark.gpu
@each_kernel
def test_bits_of_a_row_do_not_depend_on_its_batch(implementation):
    inputs = _adversarial("random", 8, 12, seed=5)
    y, pool = op(*inputs.values(), **SETTINGS, implementation=implementation)
    for row in (0, 5):
        alone = {
            name: value[row : row + 1] if name in ("qkv", "f", "b", "gate", "source", "target")
            else value for name, value in inputs.items()
        }  # fmt: skip
        y_alone, pool_alone = op(*alone.values(), **SETTINGS, implementation=implementation)
        np.testing.assert_array_equal(y_alone[0], y[row])
        page = int(inputs["target"][row])
        np.testing.assert_array_equal(pool_alone[1, page], pool[1, page])
