"""Loading: every value in its place, on every mesh, in any pieces, within the memory bound."""

import dataclasses
import json
import math
import shutil
import threading
import tracemalloc
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from k3jax.config import ConfigError, Dtype, ModelConfig
from k3jax.weights import Progress, load, load_params, read_model_config
from k3jax.weights.fill import CheckpointReader, fill
from k3jax.weights.folder import SINGLE_FILE
from k3jax.weights.mxfp4 import dequantize
from k3jax.weights.plan import Params, cut, flight_bytes, plan_leaves
from k3jax.weights.safetensors_file import TensorFiles, write_file
from sharding.axes import ParallelConfig
from sharding.mesh import make_mesh
from tests.checkpoints import PREFIX, edit, read_all, replace, rewrite
from tests.tiny import (
    DATA,
    mesh_shardings,
    one_device_shardings,
    random_params,
    write_tiny_checkpoint,
)

A_LOG = f"{PREFIX}layers.0.self_attn.A_log"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def want(intact: Path) -> Params:
    return random_params(read_model_config(intact), dtype="bfloat16")


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "model"))


def load_whole(folder: Path, dtype: Dtype = "bfloat16") -> Params:
    cfg = read_model_config(folder)
    return load(folder, cfg, one_device_shardings(cfg), dtype=dtype)


def assert_same_bits(got: Params, want: Params) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for (path, left), right in zip(
        jax.tree.leaves_with_path(got), jax.tree.leaves(want), strict=True
    ):
        assert left.dtype == right.dtype, path
        np.testing.assert_array_equal(
            np.asarray(left).view(np.uint8), np.asarray(right).view(np.uint8), err_msg=str(path)
        )


MESHES = [
    pytest.param(ParallelConfig(), id="tp1"),
    pytest.param(ParallelConfig(tp=4), id="tp4"),
    pytest.param(ParallelConfig(dp=2, tp=2), id="dp2xtp2"),
    pytest.param(ParallelConfig(dp=4), id="dp4"),
]


@pytest.mark.multi
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("parallel", MESHES)
def test_a_load_is_the_described_tree(intact: Path, parallel: ParallelConfig, dtype: Dtype):
    cfg, mesh = read_model_config(intact), make_mesh(parallel)
    got = load_params(intact, cfg, parallel, mesh, dtype)
    assert_same_bits(got, random_params(cfg, dtype=dtype))
    for leaf, sharding in zip(
        jax.tree.leaves(got), jax.tree.leaves(mesh_shardings(cfg, parallel)), strict=True
    ):
        assert leaf.sharding == sharding


@pytest.mark.multi
def test_dense_experts_split_inside(tmp_path: Path):
    cfg, parallel = (
        write_tiny_checkpoint(tmp_path, packed=False),
        ParallelConfig(tp=4, experts="tp"),
    )
    got = load(tmp_path, cfg, mesh_shardings(cfg, parallel))
    assert got["moe"]["w2"].sharding.shard_shape(got["moe"]["w2"].shape)[-1] == 8
    assert_same_bits(got, random_params(cfg, dtype="bfloat16"))


@pytest.mark.multi
@pytest.mark.parametrize("parallel", [MESHES[0], MESHES[2]])
def test_a_load_in_small_pieces_is_the_same(intact: Path, want: Params, parallel: ParallelConfig):
    cfg = read_model_config(intact)
    shardings = mesh_shardings(cfg, parallel)
    max_flight_bytes = 200_000
    pieces = cut(plan_leaves(cfg, shardings, "bfloat16"), max_flight_bytes=max_flight_bytes)
    leaves = {piece.leaf for piece in pieces if not piece.is_whole_leaf}
    assert {leaf.label for leaf in leaves} >= {"kda.qkv", "moe.w13_codes", "moe.shared_gate_up"}
    got = load(intact, cfg, shardings, max_flight_bytes=max_flight_bytes)
    assert_same_bits(got, want)


def test_packed_and_dense_golden_experts_are_the_same_function():
    dense, packed = load_whole(DATA / "k3-tiny")["moe"], load_whole(DATA / "k3-tiny-mxfp4")["moe"]
    for name in ("w13", "w2"):
        codes, scales = (np.asarray(packed[f"{name}_{part}"]) for part in ("codes", "scales"))
        np.testing.assert_array_equal(
            dequantize(codes, scales), np.asarray(dense[name]).astype(np.float32)
        )


def test_kimi_linear_keeps_float32_parameters_exact():
    # This file stores convolutions and `o_norm` in bf16, and `A_log` as `[1, 1, heads, 1]`.
    got = load_whole(DATA / "kimi-linear-tiny")
    stored = read_all(DATA / "kimi-linear-tiny")
    assert stored["model.layers.0.self_attn.q_conv1d.weight"].dtype == ml_dtypes.bfloat16
    for i, part in enumerate("qkv"):
        np.testing.assert_array_equal(
            got["kda"]["conv"][1, i],
            stored[f"model.layers.1.self_attn.{part}_conv1d.weight"][:, 0].astype(np.float32),
        )
    np.testing.assert_array_equal(
        got["kda"]["A_log"][2], stored["model.layers.3.self_attn.A_log"].reshape(-1)
    )
    assert got["kda"]["A_log"].dtype == np.float32


@pytest.mark.parametrize("shape", [(4,), (12,), (1, 1, 4, 1)], ids=str)
def test_kf_l04_a_log_is_cut_to_its_heads_before_it_is_sharded(
    folder: Path, shape: tuple[int, ...]
):
    values = np.zeros(math.prod(shape), np.float32)
    values[:4] = [0.5, -0.25, 1.0, 2.0]
    replace(folder, A_LOG, values.reshape(shape))
    cfg = read_model_config(folder)
    got = load(folder, cfg, mesh_shardings(cfg, ParallelConfig(tp=2)))["kda"]["A_log"]
    np.testing.assert_array_equal(got[0], values[:4])
    assert [shard.data.shape[1] for shard in got.addressable_shards] == [2, 2]


def test_a_checkpoint_in_one_file_without_an_index(folder: Path, want: Params):
    tensors = read_all(folder)
    for file in folder.glob("model*"):
        file.unlink()
    write_file(folder / SINGLE_FILE, tensors)
    assert_same_bits(load_whole(folder), want)


# k3-model.md section 3.4, trap 8
def test_an_export_that_drops_the_inner_prefix(folder: Path, want: Params):
    tensors = {
        name.replace("language_model.model.layers.", "language_model.layers."): array
        for name, array in read_all(folder).items()
    }
    rewrite(folder, tensors)
    assert_same_bits(load_whole(folder), want)


@pytest.mark.parametrize(
    "name",
    [
        "vision_tower.encoder.blocks.0.wo.weight",
        "mm_projector.proj.0.weight",
        "language_model.model.layers.5.eh_proj.weight",
        "language_model.model.mtp.0.norm.weight",
        "language_model.mtp.norm.weight",
    ],
)
def test_tensors_of_other_parts_are_skipped(folder: Path, want: Params, name: str):
    edit(folder, lambda tensors: tensors.update({name: np.full((3, 5), np.nan, np.float16)}))
    assert_same_bits(load_whole(folder), want)


@pytest.mark.parametrize("stored", [np.float32, np.float16])
def test_stored_dtypes_that_convert_without_loss(folder: Path, stored: type):
    name = f"{PREFIX}layers.1.block_sparse_moe.gate.weight"
    values = (np.arange(12 * 40).reshape(12, 40) / 1024).astype(stored)
    replace(folder, name, values)
    got = load_whole(folder, "float32")["moe"]["router"]
    np.testing.assert_array_equal(got[0], values.astype(np.float32))


def test_kf_l03_a_scale_is_e8m0_whatever_its_label(folder: Path, want: Params):
    def relabel(tensors: dict[str, np.ndarray]) -> None:
        for name, array in tensors.items():
            if name.endswith(".weight_scale"):
                tensors[name] = array.view(ml_dtypes.float8_e8m0fnu)

    edit(folder, relabel)
    assert_same_bits(load_whole(folder), want)


# k3-model.md section 3.4, trap 2
@pytest.mark.parametrize("packed", [True, False])
def test_the_tensors_decide_the_expert_format(tmp_path: Path, packed: bool):
    write_tiny_checkpoint(tmp_path, packed=packed)
    other = tmp_path / "other"
    write_tiny_checkpoint(other, packed=not packed)
    shutil.copy(other / "config.json", tmp_path / "config.json")
    cfg = read_model_config(tmp_path)
    assert cfg.expert_format == ("mxfp4" if packed else "dense")
    assert ("w2_codes" in load_whole(tmp_path)["moe"]) == packed


def test_progress_grows_to_the_total(intact: Path):
    seen: list[Progress] = []
    cfg = read_model_config(intact)
    got = load(intact, cfg, one_device_shardings(cfg), progress=seen.append)
    done = [progress.done_bytes for progress in seen]
    assert done == sorted(done)
    assert done[-1] == seen[-1].total_bytes == sum(leaf.nbytes for leaf in jax.tree.leaves(got))
    assert seen[-1].reused_bytes == 0


def test_a_sharding_that_does_not_fit_is_refused(intact: Path):
    cfg = read_model_config(intact)
    mesh = make_mesh(ParallelConfig(tp=8))
    shardings = {m: dict(params) for m, params in one_device_shardings(cfg).items()}
    shardings["kda"]["A_log"] = NamedSharding(mesh, PartitionSpec(None, "tp"))  # 4 heads
    shardings["norms"]["input"] = NamedSharding(mesh, PartitionSpec(None, "tp"))  # never split
    del shardings["mla"]["o"]
    with pytest.raises(ConfigError) as caught:
        load(intact, cfg, shardings)
    assert len(caught.value.problems) == 3
    for leaf in ("kda.A_log", "norms.input", "mla.o"):
        assert f"leaf {leaf} " in str(caught.value)


# Memory and share


def test_kf_l05_host_memory_stays_within_the_pieces_in_flight(tmp_path: Path):
    cfg = write_tiny_checkpoint(tmp_path, vocab_size=65536, bos_token_id=1)
    budget, slack = 2 << 20, 1 << 20
    load_whole(tmp_path)  # compiles and imports
    tracemalloc.start()
    try:
        got = load(tmp_path, cfg, one_device_shardings(cfg), max_flight_bytes=budget)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Leaves that are one piece may share their memory with the device, which is this host here.
    shared = sum(leaf.nbytes for leaf in jax.tree.leaves(got) if leaf.nbytes <= budget // 8)
    assert sum(leaf.nbytes for leaf in jax.tree.leaves(got)) > 4 * budget
    assert peak <= budget + shared + slack


@dataclasses.dataclass
class CountingFiles(TensorFiles):
    """Counts what is read."""

    num_bytes: int = 0

    def __post_init__(self) -> None:
        super().__init__()

    def read_rows(self, entry, start, out) -> None:
        self.num_bytes += out.nbytes
        super().read_rows(entry, start, out)


def test_kf_l05_a_process_reads_its_own_rows_and_experts_only(intact: Path):
    cfg = read_model_config(intact)
    leaves = plan_leaves(cfg, mesh_shardings(cfg, ParallelConfig(tp=4)), "bfloat16")
    rank = 3
    # What a process sees that has the last device only.
    own = [
        dataclasses.replace(leaf, shard_starts=leaf.shard_starts[rank:] or leaf.shard_starts)
        for leaf in leaves
    ]
    with CheckpointReader(intact, cfg, "bfloat16") as reader:
        bound = reader.open()
    for leaf, whole in zip(own, leaves, strict=True):
        files = CountingFiles()
        with files:
            pieces = cut((leaf,), max_flight_bytes=1 << 20)
            blocks = [fill(piece, bound, files) for piece in pieces]
        held = sum(block.nbytes for piece in blocks for block in piece)
        share = math.prod(leaf.local_shape) * leaf.dtype.itemsize
        assert held == share, leaf.label
        is_split_by_columns = (
            leaf.local_shape[-1] != leaf.spec.shape[-1] and leaf.dtype.itemsize == 2
        )
        if not is_split_by_columns or len(whole.shard_starts) == 1:
            assert files.num_bytes == share, leaf.label


def test_flight_bytes_are_at_most_twice_the_largest_tensor(tmp_path: Path):
    k3 = ModelConfig.from_hf(json.loads((DATA / "k3-config.json").read_text()))
    leaves = plan_leaves(k3, mesh_shardings(k3, ParallelConfig(tp=8)), "bfloat16")
    assert flight_bytes(leaves) <= 2 * k3.vocab_size * k3.hidden_size * 2


def test_k3_is_cut_into_pieces_of_bounded_size():
    k3 = ModelConfig.from_hf(json.loads((DATA / "k3-config.json").read_text()))
    leaves = plan_leaves(k3, mesh_shardings(k3, ParallelConfig(tp=8)), "bfloat16")
    pieces = cut(leaves, max_flight_bytes=512 << 20)
    assert max(piece.num_bytes for piece in pieces) <= 64 << 20
    assert len(pieces) < 40_000
    # Few programs: at most two block shapes for a leaf.
    shapes = {(piece.leaf.label, piece.shape) for piece in pieces if not piece.is_whole_leaf}
    assert len(shapes) <= 2 * len(leaves)
    local = sum(
        len(leaf.shard_starts) * math.prod(leaf.local_shape) * leaf.dtype.itemsize
        for leaf in leaves
    )
    assert sum(piece.num_bytes for piece in pieces) == local


@pytest.mark.parametrize("max_flight_bytes", [1, 5_000, 100_000, 1 << 30])
def test_pieces_cover_every_leaf_exactly_once(intact: Path, max_flight_bytes: int):
    cfg = read_model_config(intact)
    leaves = plan_leaves(cfg, mesh_shardings(cfg, ParallelConfig(tp=2)), "bfloat16")
    counts = {leaf.label: np.zeros(leaf.local_shape, np.int8) for leaf in leaves}
    end = 0
    for piece in cut(leaves, max_flight_bytes=max_flight_bytes):
        box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
        counts[piece.leaf.label][box] += 1
        assert piece.offset == end
        end += piece.num_bytes
    assert all((count == 1).all() for count in counts.values())


def test_a_failing_read_ends_the_load(intact: Path, monkeypatch: pytest.MonkeyPatch):
    cfg, calls = read_model_config(intact), 0
    original = TensorFiles.read_rows

    def fail_late(self, entry, start, out):
        nonlocal calls
        calls += 1
        if calls == 300:
            raise OSError("disk is gone")
        original(self, entry, start, out)

    monkeypatch.setattr(TensorFiles, "read_rows", fail_late)
    with pytest.raises(OSError, match="disk is gone"):
        load(intact, cfg, one_device_shardings(cfg))
    monkeypatch.undo()
    load_whole(intact)


def test_a_failing_device_ends_the_readers_before_their_files_are_closed(
    intact: Path, monkeypatch: pytest.MonkeyPatch
):
    readers: list[str] = []

    def fail(*_: object) -> None:
        raise RuntimeError("device is gone")

    def note_readers(*_: object) -> None:
        readers.extend(t.name for t in threading.enumerate() if t.name.startswith("weights"))

    monkeypatch.setattr("k3jax.weights.loader.write", fail)
    monkeypatch.setattr(CheckpointReader, "__exit__", note_readers)
    cfg = read_model_config(intact)
    with pytest.raises(RuntimeError, match="device is gone"):
        load(intact, cfg, one_device_shardings(cfg))
    assert readers == []
