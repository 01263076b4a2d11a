"""The cache of pieces: a killed load resumes, a whole cache is enough, damage is repaired."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from k3jax.weights import Progress, WeightError, load, read_model_config
from k3jax.weights.folder import INDEX_FILE
from k3jax.weights.plan import Params
from sharding.axes import ParallelConfig
from tests.tiny import mesh_shardings, random_params, write_tiny_checkpoint

ROOT = Path(__file__).parents[2]
FLIGHT_BYTES = 1_500_000  # several pieces for the largest leaves

# Loads into a cache, and kills itself without any clean-up when a share of the bytes is done.
KILLED_LOAD = f"""
import os, signal, sys
from pathlib import Path
from k3jax.weights import load, read_model_config
from sharding.axes import ParallelConfig
from tests.tiny import mesh_shardings

def kill(progress):
    if progress.done_bytes > 0.6 * progress.total_bytes:
        os.kill(os.getpid(), signal.SIGKILL)

model, cache = map(Path, sys.argv[1:])
cfg = read_model_config(model)
load(model, cfg, mesh_shardings(cfg, ParallelConfig(tp=2)), cache_dir=cache, progress=kill,
     max_flight_bytes={FLIGHT_BYTES})
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def want(model: Path) -> Params:
    return random_params(read_model_config(model), dtype="bfloat16")


@pytest.fixture(scope="module")
def complete(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache that a whole load has filled."""
    folder = tmp_path_factory.mktemp("complete")
    load_cached(model, folder)
    return folder


@pytest.fixture
def cache(complete: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(complete, tmp_path / "cache"))


def load_cached(
    model: Path, cache: Path, parallel: ParallelConfig | None = None, dtype: str = "bfloat16"
) -> tuple[Params, Progress]:
    """Load through a cache; also returns the last progress."""
    seen: list[Progress] = []
    cfg = read_model_config(model)
    params = load(
        model,
        cfg,
        mesh_shardings(cfg, parallel or ParallelConfig(tp=2)),
        dtype=dtype,
        cache_dir=cache,
        progress=seen.append,
        max_flight_bytes=FLIGHT_BYTES,
    )
    return params, seen[-1]


def assert_same_bits(got: Params, want: Params) -> None:
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(
            np.asarray(left).view(np.uint8), np.asarray(right).view(np.uint8)
        )


def only(cache: Path, suffix: str) -> Path:
    (file,) = cache.rglob(f"*{suffix}")
    return file


def records(cache: Path) -> list[dict]:
    lines = only(cache, ".journal").read_text().splitlines()
    return [json.loads(line) for line in lines[1:]]


def test_a_killed_load_resumes_and_equals_an_unbroken_one(
    model: Path, want: Params, tmp_path: Path
):
    run = subprocess.run(
        [sys.executable, "-c", KILLED_LOAD, str(model), str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == -signal.SIGKILL, run.stderr
    finished = sum(record["num_bytes"] for record in records(tmp_path))
    params, progress = load_cached(model, tmp_path)
    assert_same_bits(params, want)
    assert 0.6 * progress.total_bytes < progress.reused_bytes == finished < progress.total_bytes


def test_a_first_load_reuses_nothing_and_records_everything(
    model: Path, want: Params, tmp_path: Path
):
    params, progress = load_cached(model, tmp_path)
    assert_same_bits(params, want)
    assert progress.reused_bytes == 0
    assert sum(record["num_bytes"] for record in records(tmp_path)) == progress.total_bytes
    assert only(tmp_path, ".weights").stat().st_size == progress.total_bytes


def test_a_complete_cache_is_all_that_the_next_start_reads(
    model: Path, want: Params, complete: Path, tmp_path: Path
):
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    for name in (INDEX_FILE, *(path.name for path in model.glob("*.safetensors"))):
        status = (model / name).stat()
        if name != INDEX_FILE:  # same size and time, no content
            (copy / name).write_bytes(bytes(status.st_size))
        os.utime(copy / name, ns=(status.st_atime_ns, status.st_mtime_ns))
    params, progress = load_cached(copy, complete)
    assert_same_bits(params, want)
    assert progress.reused_bytes == progress.total_bytes


def test_a_damaged_piece_is_read_again_and_repaired(model: Path, want: Params, cache: Path):
    record = records(cache)[3]
    with only(cache, ".weights").open("r+b") as file:
        file.seek(record["offset"] + record["num_bytes"] // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))
    params, progress = load_cached(model, cache)
    assert_same_bits(params, want)
    assert progress.reused_bytes == progress.total_bytes - record["num_bytes"]
    _, again = load_cached(model, cache)
    assert again.reused_bytes == again.total_bytes


def test_a_torn_journal_line_costs_only_its_piece(model: Path, want: Params, cache: Path):
    last = records(cache)[-1]
    file = only(cache, ".journal")
    file.write_bytes(file.read_bytes()[:-9])
    params, progress = load_cached(model, cache)
    assert_same_bits(params, want)
    assert progress.reused_bytes == progress.total_bytes - last["num_bytes"]
    _, again = load_cached(model, cache)
    assert again.reused_bytes == again.total_bytes


@pytest.mark.parametrize(
    "change",
    [{"offset": 8}, {"num_bytes": 1}, {"piece": 10**6}, {"piece": -1}, {"extra": 1}],
    ids=lambda change: next(iter(change)),
)
def test_a_journal_line_that_does_not_fit_the_plan_is_not_believed(
    model: Path, want: Params, cache: Path, change: dict
):
    file = only(cache, ".journal")
    lines = file.read_text().splitlines()
    lines[-1] = json.dumps(json.loads(lines[-1]) | change)
    file.write_text("\n".join(lines) + "\n")
    params, progress = load_cached(model, cache)
    assert_same_bits(params, want)
    assert progress.reused_bytes < progress.total_bytes


@pytest.mark.parametrize("suffix", [".weights", ".journal"])
@pytest.mark.parametrize("keep", [0.0, 0.5])
def test_a_cut_cache_file_is_filled_again(
    model: Path, want: Params, cache: Path, suffix: str, keep: float
):
    file = only(cache, suffix)
    os.truncate(file, int(file.stat().st_size * keep))
    params, progress = load_cached(model, cache)
    assert_same_bits(params, want)
    assert progress.reused_bytes < progress.total_bytes


def test_a_lost_data_file_is_noticed(model: Path, want: Params, cache: Path):
    only(cache, ".weights").unlink()
    params, progress = load_cached(model, cache)
    assert_same_bits(params, want)
    assert progress.reused_bytes == 0


@pytest.mark.parametrize(
    ("parallel", "dtype"),
    [(ParallelConfig(tp=4), "bfloat16"), (ParallelConfig(tp=2), "float32")],
    ids=["mesh", "dtype"],
)
def test_another_mesh_or_dtype_has_a_cache_of_its_own(
    model: Path, cache: Path, parallel: ParallelConfig, dtype: str
):
    params, progress = load_cached(model, cache, parallel, dtype)
    assert progress.reused_bytes == 0
    assert_same_bits(params, random_params(read_model_config(model), dtype=dtype))
    assert len(list(cache.iterdir())) == 2


def test_a_changed_checkpoint_is_not_served_from_the_old_cache(cache: Path, tmp_path: Path):
    changed = tmp_path / "changed"
    cfg = write_tiny_checkpoint(changed, seed=1)
    params, progress = load_cached(changed, cache)
    assert progress.reused_bytes == 0
    assert_same_bits(params, random_params(cfg, dtype="bfloat16", seed=1))


def test_a_cache_does_not_hide_a_missing_shard(model: Path, complete: Path, tmp_path: Path):
    copy = Path(shutil.copytree(model, tmp_path / "model"))
    next(copy.glob("*.safetensors")).unlink()
    with pytest.raises(WeightError) as caught:
        load_cached(copy, complete)
    assert [problem.kind for problem in caught.value.found] == ["missing_file"]


def test_two_loads_do_not_share_a_cache_at_once(model: Path, cache: Path):
    import fcntl

    with only(cache, ".journal").open("r+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(WeightError, match="weight cache is in use"):
            load_cached(model, cache)


def test_a_disk_without_room_is_refused_before_loading(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(WeightError, match=r"does not fit on the disk.*got 1000 bytes free"):
        load_cached(model, tmp_path)
