"""Verification of several tokens and the commit of some, against decode a token at a time."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.kda import (
    kda_commit_paged,
    kda_decode_paged,
    kda_verify_paged,
    mosaic_commit,
    mosaic_verify,
)
from pallas_kernels.kda.verify import KDA_COMMIT_PAGED, KDA_VERIFY_PAGED
from tests.numerics.kda_pages import POSITION, paged_inputs, states
from tests.numerics.support import BF16, CHUNKED_F32, each_implementation, relative_error

GATES = {"position": POSITION, "lower_bound": -5.0}
_STATIC = ("position", "lower_bound", "implementation")
decode = jax.jit(kda_decode_paged, static_argnames=(*_STATIC, "eps"))
verify = jax.jit(kda_verify_paged, static_argnames=(*_STATIC, "eps"))
commit = jax.jit(functools.partial(kda_commit_paged, taps=4), static_argnames=_STATIC)
NAMES = ("qkv", "f", "b", "gate")


def _pages(*values):
    return [jnp.asarray(pages, jnp.int32) for pages in values]


def _verify(run, inputs, source, lengths, **settings):
    return run(*inputs.values(), *_pages(source, lengths), eps=1e-5, **settings)


def _commit(run, records, inputs, source, target, accepted, **settings):
    arrays = [inputs[name] for name in ("qkv", "f", "A_log", "dt_bias", "pool")]
    return run(records, *arrays, *_pages(source, target, accepted), **settings)


def _decode(inputs, source, target, lengths, **settings):
    """Outputs, and the pool, after as many tokens of each row as `lengths` says."""
    pool, outputs = inputs["pool"], []
    for x in range(max(lengths)):
        # A row that has ended keeps its state: it is not in use.
        on = np.asarray(lengths) > x
        token = {name: inputs[name][:, x] for name in NAMES}
        before, after = np.where(on, source if x == 0 else target, 0), np.where(on, target, 0)
        arguments = inputs | token | {"pool": pool}
        y, pool = decode(*arguments.values(), *_pages(before, after), eps=1e-5, **settings)
        outputs.append(y)
    return jnp.stack(outputs, axis=1), pool


def _check_against_decode(inputs, source, target, lengths, check, **settings):
    """Every number of accepted tokens leaves the state and the window that decode leaves."""
    y, records = _verify(verify, inputs, source, lengths, **settings)
    want_y, _ = _decode(inputs, source, target, lengths, **settings)
    check(y[:, : want_y.shape[1]], want_y)
    assert not np.any(np.asarray(y[:, want_y.shape[1] :]))
    for most in range(1, max(lengths) + 1):
        accepted = np.minimum(lengths, most)
        pool = _commit(commit, records, inputs, source, target, accepted, **settings)
        _, want = _decode(inputs, source, target, accepted, **settings)
        on = np.asarray(target)[accepted > 0]
        window, state = states(inputs, pool, *_pages(on))
        want_window, want_state = states(inputs, want, *_pages(on))
        np.testing.assert_array_equal(window, want_window)
        check(state, want_state)


@each_implementation(KDA_VERIFY_PAGED)
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_verified_tokens_equal_decode(implementation, lower_bound):
    assert set(KDA_COMMIT_PAGED.implementations) == set(KDA_VERIFY_PAGED.implementations)
    inputs = paged_inputs([3, 0, 8, 0], slots=(3,))
    settings = GATES | {"lower_bound": lower_bound, "implementation": implementation}

    def check(got, want):
        assert relative_error(got, want) < 1e-6

    _check_against_decode(inputs, [3, 0, 8, 0], [4, 5, 2, 0], [3, 2, 1, 0], check, **settings)


@each_implementation(KDA_COMMIT_PAGED)
def test_a_commit_of_nothing_copies_and_other_pages_stay(implementation):
    inputs = paged_inputs([3, 0, 8], slots=(2,))
    inputs["qkv"] = inputs["qkv"].at[:, 1].set(jnp.nan)  # not verified
    source, target = [3, 0, 8], [4, 5, 0]
    settings = GATES | {"implementation": implementation}
    _, records = _verify(verify, inputs, source, [1, 1, 1], **settings)
    pool = _commit(commit, records, inputs, source, target, [0, 1, 1], **settings)
    old, new = (np.array(p).reshape(3, 9, -1) for p in (inputs["pool"], pool))
    words = 2 * 8 * (2 * 8 + 2 * 9)
    np.testing.assert_array_equal(new[1, 4, :words], old[1, 3, :words])
    assert all(np.isfinite(x).all() for x in states(inputs, pool, *_pages([5])))
    new[1, [4, 5], :words] = old[1, [4, 5], :words]
    np.testing.assert_array_equal(new, old)


def _at(launch, *arguments, position, **settings):
    return launch(*arguments, jnp.full((1,), position, jnp.int32), **settings)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on a CPU")
def test_the_kernels_match_and_have_no_race():
    inputs = paged_inputs([3, 0, 0], slots=(2,), heads=1, dim=128, dtype=jnp.bfloat16)
    rows = ([3, 0, 0], [2, 1, 0])
    interpret = {
        "interpret": plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    }
    run_verify = functools.partial(_at, mosaic_verify.launch, **interpret)
    run_commit = functools.partial(_at, mosaic_commit.launch, **interpret)
    y, records = _verify(run_verify, inputs, *rows, **GATES)
    want_y, want_records = _verify(verify, inputs, *rows, **GATES, implementation="reference")
    assert relative_error(y, want_y) < BF16
    assert relative_error(records.u_SXND[0], want_records.u_SXND[0]) < BF16
    np.testing.assert_array_equal(records.k_SXND[:2], want_records.k_SXND[:2])
    commits = (inputs, [3, 0, 0], [4, 5, 0], [2, 0, 0])
    pool = _commit(run_commit, records, *commits, **GATES)
    want = _commit(commit, want_records, *commits, **GATES, implementation="reference")
    for got, expected in zip(
        *(states(inputs, p, *_pages([4, 5])) for p in (pool, want)), strict=True
    ):
        assert relative_error(got, expected) < CHUNKED_F32
    assert not gpu_callbacks.get_races().races_found


def _production(slots, rows=8, heads=12):
    """Shapes of the released model: the arguments of a verification, and of a commit."""
    lead, bf16 = (rows, slots), jnp.bfloat16
    shaped = jax.ShapeDtypeStruct
    qkv, f = shaped((*lead, 3, heads, 128), bf16), shaped((*lead, heads, 128), bf16)
    A_log, dt_bias = shaped((heads,), jnp.float32), shaped((heads, 128), jnp.float32)
    taps, o_norm = shaped((3, heads, 128, 4), jnp.float32), shaped((128,), jnp.float32)
    pool = shaped((23, 300, 64 * heads, 576), jnp.uint16)
    pages = shaped((rows,), jnp.int32)
    arguments = (qkv, f, shaped((*lead, heads), bf16), f, taps, A_log, dt_bias, o_norm, pool)
    return (*arguments, pages, pages), (qkv, f, A_log, dt_bias, pool, pages, pages, pages)


@pytest.mark.parametrize("slots", [1, 8])
def test_the_kernels_lower_for_hopper(slots):
    for_verify, for_commit = _production(slots)
    run = jax.jit(functools.partial(_at, mosaic_verify.launch, **GATES, eps=1e-5, pdl=True))
    traced = run.trace(*for_verify)
    assert "mosaic_gpu" in traced.lower(lowering_platforms=("cuda",)).as_text()
    run = jax.jit(functools.partial(_at, mosaic_commit.launch, **GATES, pdl=True), donate_argnums=5)
    records = traced.out_info[1]
    text = run.trace(records, *for_commit).lower(lowering_platforms=("cuda",)).as_text()
    assert "output_operand_alias<output_tuple_indices = []" in text


def test_bad_arguments_are_named():
    inputs = paged_inputs([1], slots=(9,))
    with pytest.raises(ValueError, match="token slots is wrong: got 9; expected 1 to 8"):
        _verify(kda_verify_paged, inputs, [1], [9], **GATES)
    inputs = paged_inputs([1], slots=(2,))
    with pytest.raises(ValueError, match="position is wrong: got 3; expected 0 to 2"):
        _verify(kda_verify_paged, inputs, [1], [2], **GATES | {"position": 3})


def _adversarial(case, rows, slots, heads):
    seed = np.random.SeedSequence().entropy % 2**31
    pages = np.random.default_rng(seed).permutation(np.arange(1, 9))
    source, target = pages[:rows], pages[::-1][:rows]
    options = {"slots": (slots,), "heads": heads, "dim": 128, "dtype": jnp.bfloat16, "seed": seed}
    inputs = paged_inputs(source, **options)
    if case == "gates at -5":
        inputs["f"] = jnp.full_like(inputs["f"], 100.0)
    if case == "parallel keys":
        inputs["qkv"] = inputs["qkv"].at[:, :, 1].set(inputs["qkv"][:1, :1, 1, :1, :1])
        inputs["b"] = jnp.full_like(inputs["b"], 8.0)
        inputs["f"] = jnp.full_like(inputs["f"], -30.0)
    return inputs, source, target


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["random", "gates at -5", "parallel keys"])
@pytest.mark.parametrize(("rows", "slots", "heads"), [(1, 1, 12), (4, 4, 12), (4, 8, 48)])
def test_the_kernels_equal_the_decode_kernel_bitwise(case, rows, slots, heads):
    inputs, source, target = _adversarial(case, rows, slots, heads)
    source = np.where(np.arange(rows) == 1, 0, source)
    lengths = np.maximum(1, slots - np.arange(rows))
    check = np.testing.assert_array_equal
    settings = GATES | {"implementation": "mosaic"}
    _check_against_decode(inputs, source, target, lengths, check, **settings)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["random", "gates at -5", "parallel keys"])
def test_the_kernels_match_the_reference(case):
    inputs, source, target = _adversarial(case, 4, 8, 12)
    lengths, accepted = [8, 3, 1, 0], [5, 3, 0, 0]
    got, want = {}, {}
    for implementation, results in (("mosaic", got), ("reference", want)):
        settings = GATES | {"implementation": implementation}
        results["y"], records = _verify(verify, inputs, source, lengths, **settings)
        pool = _commit(commit, records, inputs, source, target, accepted, **settings)
        results["window"], results["state"] = states(inputs, pool, *_pages(target))
    assert relative_error(got["y"], want["y"]) < BF16
    np.testing.assert_array_equal(got["window"], want["window"])
    assert relative_error(got["state"], want["state"]) < BF16 / 10
