"""MoE tail over several ranks: the reference, and the kernel for Hopper.

The interpreter knows neither other devices' memory nor semaphores. So it runs each step of the
kernel as a kernel of its own, for one rank after the other: what a rank stores into others' memory
goes into an array that has a copy for each of them, and what it does to flags is counted.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels.moe_tail import moe_tail, mosaic_block, mosaic_gpu
from pallas_kernels.moe_tail.mosaic_block import Peers, Sizes
from tests.numerics.support import BF16, relative_error

AXIS, EPS = "tp", 1e-5
K3 = 3584, 7168  # latent and hidden width

pytestmark = pytest.mark.multi


def _inputs(ranks, tokens, latent, hidden, *, dtype=jnp.float32, seed=0):
    """Partials of all ranks, one below the other; gain and up-projection."""
    rng = np.random.default_rng(seed)

    def normal(*shape, scale=1.0, dtype=dtype):
        return jnp.asarray(rng.normal(size=shape) * scale, dtype)

    return (
        normal(ranks * tokens, latent),
        normal(ranks * tokens, hidden),
        normal(latent, scale=0.3, dtype=jnp.float32),
        normal(hidden, latent, scale=latent**-0.5, dtype=jnp.bfloat16),
    )


def _expected(ranks, *inputs):
    routed, shared, gain, up = (np.asarray(x, np.float64) for x in inputs)
    latent, shared = (x.reshape(ranks, -1, x.shape[1]).sum(0) for x in (routed, shared))
    normed = latent / np.sqrt((latent**2).mean(1, keepdims=True) + EPS) * gain
    return normed @ up.T + shared


def _on_ranks(body, ranks, *, dp=1):
    """`body` on a mesh; the results of all ranks, one below the other."""
    devices = jax.devices()[: dp * ranks]
    mesh = jax.make_mesh((dp, ranks), ("dp", AXIS), (AxisType.Auto,) * 2, devices=devices)
    split, whole = PartitionSpec(AXIS), PartitionSpec()
    body = functools.partial(body, axis=AXIS, eps=EPS)
    return jax.jit(
        jax.shard_map(
            body, mesh=mesh, in_specs=(split, split, whole, whole), out_specs=split, check_vma=False
        )
    )


def _assert_equal_on_ranks(got, want, ranks):
    parts = np.split(np.asarray(got, np.float32), ranks)
    for part in parts:
        np.testing.assert_array_equal(part, parts[0])
    assert relative_error(parts[0], want) < BF16


@pytest.mark.parametrize(("ranks", "dtype"), [(2, jnp.float32), (8, jnp.bfloat16)])
def test_the_reference_gives_the_sum_on_all_ranks(ranks, dtype):
    inputs = _inputs(ranks, 3, 24, 40, dtype=dtype)
    got = _on_ranks(functools.partial(moe_tail, implementation="reference"), ranks)(*inputs)
    _assert_equal_on_ranks(got, _expected(ranks, *inputs), ranks)


class Staged(Peers):
    """Stands for `Peers` in an interpreted kernel.

    Attributes:
      signals: [blocks, R, flags], of each block and for each rank.
      takes: [blocks, flags], what each block takes off this rank's flags.
    """

    def __init__(self, rank: Any, signals: Any, takes: Any):
        self.rank, self.signals, self.takes = rank, signals, takes

    def remote(self, ref: Any, rank: Any) -> Any:
        return ref.at[rank]

    def signal(self, *flags: tuple[Any, Any]) -> None:
        block = lax.axis_index("block")
        for rank, index in flags:
            self.signals[block, rank, index] = self.signals[block, rank, index] + 1

    def wait(self, index: Any, count: int, *, take: bool = True) -> None:
        if take:
            self.takes[lax.axis_index("block"), index] = jnp.int32(count)


@functools.partial(jax.jit, static_argnames=("step", "size", "scratch", "out_type"))
def _run_step(step, size, scratch, out_type, rank, *operands):
    """One step of one rank: its outputs, its signals [R, flags] and what it takes [flags]."""
    signals = jax.new_ref(jnp.zeros((size.blocks, size.ranks, size.num_flags), jnp.int32))
    takes = jax.new_ref(jnp.zeros((size.blocks, size.num_flags), jnp.int32))
    types = mosaic_block.scratch(size, operands[0].dtype)

    def block(rank_g, signals_g, takes_g, *refs, **scratch_of):
        peers = Staged(rank_g[0], signals_g, takes_g)
        step(*refs, *(scratch_of[name] for name in scratch), size, peers)

    outputs = plgpu.kernel(
        block, out_type=out_type, grid=(size.blocks,), grid_names=("block",),
        scratch_types={name: types[name] for name in scratch},
        interpret=plgpu.InterpretGPUParams(detect_races=True, uninitialized_memory="nan"),
    )(rank, signals, takes, *operands)  # fmt: skip
    return outputs, signals[...].sum(0), takes[...].sum(0)


def _project(scaled, squares, columns, up, out, weights, inputs, out_s, size, peers):
    mosaic_block.start_weights(up, weights, size, peers)
    mosaic_block.project(
        scaled, squares, columns, up, out, weights, inputs, out_s, size, peers, eps=EPS
    )


def _interpret(ranks, routed, shared, gain, up):
    """Results of all ranks, one below the other; signals and takes of the flags [R, flags]."""
    routed, shared = (np.split(x, ranks) for x in (routed, shared))
    (tokens, latent), hidden = routed[0].shape, shared[0].shape[1]
    size = Sizes(ranks=ranks, tokens=tokens, latent=latent, hidden=hidden)
    signals, takes = np.zeros((2, ranks, size.num_flags), np.int32)

    def run(step, scratch, out_type, operands):
        outputs = []
        for rank in range(ranks):
            numbers = jnp.full((1,), rank, jnp.int32)
            one, sent, taken = _run_step(step, size, scratch, out_type, numbers, *operands(rank))
            signals[...] += sent
            takes[rank] += taken
            outputs.append(one)
        return outputs

    def for_ranks(array):
        return jax.ShapeDtypeStruct((ranks, *array.shape), array.dtype)

    latents, columns, scaled, squares = mosaic_block.exchanged(size, routed[0].dtype)
    pushed = run(
        mosaic_block.push, ("latents", "columns"), (for_ranks(latents), for_ranks(columns)),
        lambda rank: (routed[rank], shared[rank]),
    )  # fmt: skip

    def received(which, rank):
        return jnp.stack([pushed[source][which][rank, source] for source in range(ranks)])

    added = run(
        mosaic_block.add_latents, ("scaled_s", "squares_s"), (scaled, squares),
        lambda rank: (received(0, rank), gain),
    )  # fmt: skip
    outputs = run(
        _project, ("weights", "inputs", "out_s"),
        (for_ranks(jax.ShapeDtypeStruct((tokens, hidden), up.dtype)),),
        lambda rank: (*added[rank], received(1, rank), up),
    )  # fmt: skip
    owner = np.arange(hidden) // size.columns
    stacked = np.stack([np.asarray(sent, np.float32) for (sent,) in outputs])
    results = [stacked[owner, rank, :, np.arange(hidden)].T for rank in range(ranks)]
    return np.concatenate(results), signals, takes


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="the interpreter runs on a CPU")
@pytest.mark.parametrize(
    ("ranks", "tokens", "hidden", "dtype"),
    [
        (2, 3, 256, jnp.float32),
        (4, 9, 256, jnp.bfloat16),
        pytest.param(8, 1, 512, jnp.float32, marks=pytest.mark.slow),
    ],
)
def test_interpreted_steps_give_the_sum_on_all_ranks_without_races(
    ranks, tokens, hidden, dtype, monkeypatch
):
    # Three steps a product, of which two fit into each ring.
    monkeypatch.setattr(mosaic_block, "K_STEP", 64)
    monkeypatch.setattr(mosaic_block, "WEIGHT_BYTES", 2 * 2 * 64 * 64 // ranks)
    inputs = _inputs(ranks, tokens, 192, hidden, dtype=dtype)
    got, signals, takes = _interpret(ranks, *inputs)
    _assert_equal_on_ranks(got, _expected(ranks, *inputs), ranks)
    # Every flag is signalled, and is at zero again when the kernel ends.
    assert (signals > 0).all()
    np.testing.assert_array_equal(signals, takes)
    assert not gpu_callbacks.get_races().races_found


@pytest.mark.parametrize(
    ("ranks", "tokens", "dtype", "dp"),
    [
        (2, 32, jnp.float32, 1),
        (2, 1, jnp.float32, 4),
        (4, 7, jnp.bfloat16, 2),
        (8, 1, jnp.float32, 1),
        (8, 32, jnp.bfloat16, 1),
    ],
)
def test_production_shapes_lower_for_cuda(ranks, tokens, dtype, dp):
    latent, hidden = K3
    shapes = (ranks * tokens, latent), (ranks * tokens, hidden), (latent,), (hidden, latent)
    dtypes = dtype, dtype, jnp.float32, jnp.bfloat16
    arguments = map(jax.ShapeDtypeStruct, shapes, dtypes)
    program = _on_ranks(mosaic_gpu.launch, ranks, dp=dp)
    text = program.trace(*arguments).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("@mosaic_gpu_v2") == 1
    assert "uses_xla_collective_metadata = true" in text
    # Each launch begins with a barrier of the devices, and memory is neither multicast nor such
    # that it may be.
    assert "skip_device_barrier = false" in text
    assert "multimem" not in text
    assert "multicast" not in text
    assert "symmetric_memory" not in text


def _refusal(ranks, tokens, latent, hidden, *, weights=jnp.bfloat16):
    inputs = _inputs(ranks, tokens, latent, hidden)
    inputs = *inputs[:3], inputs[3].astype(weights)
    with pytest.raises(NotImplementedError) as refusal:
        _on_ranks(moe_tail, ranks)(*inputs)
    return str(refusal.value)


def test_the_kernel_refuses_by_name(monkeypatch):
    if jax.default_backend() == "cpu":
        assert "mosaic: the JAX backend is cpu, not a Hopper GPU" in _refusal(2, 1, 256, 256)
    monkeypatch.setattr(mosaic_gpu, "require_hopper", lambda: None)
    assert "takes 1 to 32 tokens: got 33" in _refusal(2, 33, 256, 256)
    assert "takes (2, 4, 8) ranks: got 1" in _refusal(1, 1, 256, 256)
    assert "takes bfloat16 weights: got float32" in _refusal(2, 1, 256, 256, weights=jnp.float32)
    assert "takes latent widths in multiples of 256" in _refusal(2, 1, 128, 256)
    assert "up to the hidden width: got 512" in _refusal(2, 1, 512, 256)
    assert "takes hidden widths in multiples of 256 up to 8448: got 384" in _refusal(4, 1, 256, 384)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert "takes one process that drives all GPUs: got 2" in _refusal(2, 1, 256, 256)


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", mosaic_gpu.RANKS)
@pytest.mark.parametrize(
    ("tokens", "dtype"), [(1, jnp.float32), (7, jnp.bfloat16), (32, jnp.float32)]
)
def test_the_kernel_matches_on_gpus(ranks, tokens, dtype):
    if jax.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs: got {jax.device_count()}")
    seed = np.random.SeedSequence().entropy % 2**31
    inputs = _inputs(ranks, tokens, *K3, dtype=dtype, seed=seed)
    got = _on_ranks(moe_tail, ranks)(*inputs)
    _assert_equal_on_ranks(got, _expected(ranks, *inputs), ranks)


@pytest.mark.gpu
def test_launches_follow_each_other_on_gpus():
    """Each tail takes what the one before gave: a flag or a store of another launch would show."""
    if jax.device_count() < 2:
        pytest.skip(f"needs 2 GPUs: got {jax.device_count()}")

    def chain(routed, shared, gain, up, *, implementation, **rest):
        for _ in range(50):
            out = moe_tail(routed, shared, gain, up, implementation=implementation, **rest)
            shared = out.astype(jnp.float32) * 0.25
            routed = routed + shared[:, : routed.shape[1]]
        return out

    inputs = _inputs(2, 8, *K3)
    got, want = (
        _on_ranks(functools.partial(chain, implementation=name), 2)(*inputs)
        for name in ("mosaic", "reference")
    )
    _assert_equal_on_ranks(got, np.split(np.asarray(want, np.float32), 2)[0], 2)
