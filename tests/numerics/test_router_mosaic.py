"""Router: the kernel for Hopper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.router import mosaic_gpu, route
from tests.numerics.support import F32, relative_error

K3 = {"top_k": 16, "renormalize": True, "scaling": 2.5}


def _inputs(tokens, experts, *, kind="random", seed=0):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(tokens, experts)) * 2
    bias = rng.normal(size=experts) * 0.1
    if kind == "ties":  # a few values, so that almost every choice is between equals
        logits, bias = np.round(logits), np.round(bias * 10)
    if kind == "negative":  # every biased score is below zero
        bias = bias - 3
    if kind == "extreme":
        logits = logits * 100
    return jnp.asarray(logits, jnp.float32), jnp.asarray(bias, jnp.float32)


def _assert_matches(run, logits, bias, **counts):
    """Ids are exact where no two biased scores are nearly equal without being equal."""
    want_ids, want_weights = route(logits, bias, **counts, implementation="reference")
    ids, weights = run(logits, bias, **counts)
    choice = np.sort(np.asarray(jax.nn.sigmoid(logits) + bias[None]), axis=1)
    gaps = np.diff(choice, axis=1)[:, -counts["top_k"] :]
    clear = np.all((gaps == 0) | (gaps > 1e-6), axis=1)
    assert clear.mean() > 0.9
    np.testing.assert_array_equal(ids[clear], want_ids[clear])
    assert relative_error(weights[clear], want_weights[clear]) < F32
    ids = np.sort(ids, axis=1)
    assert np.all(np.diff(ids, axis=1) > 0)
    assert np.all((ids >= 0) & (ids < logits.shape[1]))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on a CPU")
@pytest.mark.parametrize(("tokens", "kind"), [(4, "ties"), (1, "negative")])
def test_the_interpreted_kernel_matches_without_races(tokens, kind):
    settings = plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan")
    run = functools.partial(mosaic_gpu.launch, interpret=settings)
    _assert_matches(run, *_inputs(tokens, 128, kind=kind), **K3 | {"top_k": 8})
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize("tokens", [1, 8, 8192])
def test_production_shapes_lower_for_cuda(tokens):
    arguments = [jax.ShapeDtypeStruct(dims, jnp.float32) for dims in ((tokens, 896), (896,))]
    launch = jax.jit(functools.partial(mosaic_gpu.launch, **K3))
    lowered = launch.trace(*arguments).lower(lowering_platforms=("cuda",))
    assert lowered.as_text().count("@mosaic_gpu_v2") == 1


def test_the_kernel_refuses_by_name(monkeypatch):
    run = functools.partial(route, implementation="mosaic")
    if jax.default_backend() == "cpu":
        with pytest.raises(NotImplementedError, match=r"mosaic: .*Hopper GPU"):
            run(*_inputs(1, 128), **K3)
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda: None)
    with pytest.raises(NotImplementedError, match="takes one group of experts: got 2"):
        run(*_inputs(1, 128), **K3, num_groups=2, topk_groups=1)
    with pytest.raises(NotImplementedError, match="takes a multiple of 128 experts: got 192"):
        run(*_inputs(1, 192), **K3)
    with pytest.raises(NotImplementedError, match="a multiple of 4 up to 32: got 6"):
        run(*_inputs(1, 128), **K3 | {"top_k": 6})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 896, 16), (7, 256, 8), (1000, 896, 16)]
)
def test_the_kernel_matches_the_reference(tokens, experts, top_k):
    counts = {"top_k": top_k, "renormalize": top_k == 16, "scaling": 2.5}
    run = jax.jit(functools.partial(route, implementation="mosaic"), static_argnames=tuple(counts))
    seed = np.random.SeedSequence().entropy % 2**31
    for kind in ("random", "ties", "negative", "extreme"):
        _assert_matches(run, *_inputs(tokens, experts, kind=kind, seed=seed), **counts)


@pytest.mark.gpu
def test_bits_of_a_token_depend_on_no_other_one():
    logits, bias = _inputs(64, 896)
    run = jax.jit(functools.partial(route, **K3, implementation="mosaic"))
    want = run(logits, bias)
    others = np.arange(64) != 30
    for got in (run(logits.at[others].set(jnp.nan), bias), run(logits[28:31], bias)):
        row = 30 if got[0].shape[0] == 64 else 2
        for one, expected in zip(got, want, strict=True):
            np.testing.assert_array_equal(one[row], expected[30])
