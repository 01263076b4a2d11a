"""Converted checkpoints: bit for bit on any mesh, whole folders, clear refusals."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from k3jax.config import ConfigError, Dtype, ModelConfig
from k3jax.weights import EMBEDDED_MODEL, WeightError, load, read_model_config
from k3jax.weights.converted import WEIGHTS_FOLDER, save
from k3jax.weights.folder import MANIFEST_FILE
from k3jax.weights.plan import Params
from sharding.axes import ParallelConfig
from tests.tiny import mesh_shardings, one_device_shardings, random_params, write_tiny_checkpoint

ROOT = Path(__file__).parents[2]


def convert(model: Path, out: Path, parallel: ParallelConfig, dtype: Dtype = "bfloat16") -> None:
    cfg = read_model_config(model)
    params = load(model, cfg, mesh_shardings(cfg, parallel), dtype=dtype)
    save(params, cfg, model_dir=model, out_dir=out, dtype=dtype)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture(scope="module")
def cfg(model: Path) -> ModelConfig:
    return read_model_config(model)


@pytest.fixture(scope="module")
def converted(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Written from one device."""
    folder = tmp_path_factory.mktemp("converted") / "out"
    convert(model, folder, ParallelConfig())
    return folder


@pytest.fixture
def folder(converted: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(converted, tmp_path / "converted"))


def assert_same_bits(got: Params, want: Params) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for left, right in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(
            np.asarray(left).view(np.uint8), np.asarray(right).view(np.uint8)
        )


def restore(folder: Path, parallel: ParallelConfig, dtype: Dtype = "bfloat16") -> Params:
    cfg = read_model_config(folder)
    return load(folder, cfg, mesh_shardings(cfg, parallel), dtype=dtype)


@pytest.mark.multi
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "parallel",
    [ParallelConfig(), ParallelConfig(tp=4), ParallelConfig(dp=2, tp=2)],
    ids=["tp1", "tp4", "dp2xtp2"],
)
def test_one_device_to_any_mesh(
    converted: Path, cfg: ModelConfig, parallel: ParallelConfig, dtype: Dtype
):
    got = restore(converted, parallel, dtype)
    assert_same_bits(got, random_params(cfg, dtype=dtype))
    shardings = jax.tree.leaves(mesh_shardings(cfg, parallel))
    assert [leaf.sharding for leaf in jax.tree.leaves(got)] == shardings


@pytest.mark.multi
def test_four_devices_to_two(model: Path, cfg: ModelConfig, tmp_path: Path):
    convert(model, tmp_path / "out", ParallelConfig(tp=4))
    got = restore(tmp_path / "out", ParallelConfig(tp=2))
    assert_same_bits(got, random_params(cfg, dtype="bfloat16"))
    assert len(got["top"]["embed"].sharding.device_set) == 2


def test_the_folder_keeps_configuration_and_tokenizer(tmp_path: Path):
    model = EMBEDDED_MODEL
    convert(model, tmp_path / "out", ParallelConfig())
    for name in (
        "config.json",
        "generation_config.json",
        "tiktoken.model",
        "tokenizer_config.json",
    ):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    assert read_model_config(tmp_path / "out") == read_model_config(model)


def test_a_float32_conversion_is_not_rounded_on_restore(model: Path, tmp_path: Path):
    convert(model, tmp_path / "out", ParallelConfig(), "float32")
    with pytest.raises(
        WeightError, match=r"got float32 \(converted for float32\); expected bfloat16"
    ):
        restore(tmp_path / "out", ParallelConfig())


def test_an_interrupted_conversion_is_no_checkpoint(folder: Path):
    (folder / MANIFEST_FILE).unlink()
    with pytest.raises(WeightError, match="no weights in"):
        read_model_config(folder)


@pytest.mark.parametrize("manifest", [{"format": 0}, {}, {"format": 1, "more": 2}])
def test_a_conversion_by_another_version_is_refused(folder: Path, manifest: dict):
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest))
    with pytest.raises(WeightError, match=r"of another version.*convert the checkpoint again"):
        read_model_config(folder)


def test_lost_weights_are_refused(folder: Path):
    shutil.rmtree(folder / WEIGHTS_FOLDER)
    with pytest.raises(WeightError, match="no Orbax checkpoint"):
        restore(folder, ParallelConfig())


def test_a_configuration_of_another_model_is_refused_by_leaf(folder: Path, tmp_path: Path):
    other = tmp_path / "other"
    cfg = write_tiny_checkpoint(other, packed=False, hidden_size=44)
    with pytest.raises(WeightError) as caught:
        load(folder, cfg, one_device_shardings(cfg))
    text = " ".join(problem.message for problem in caught.value.found)
    assert {problem.kind for problem in caught.value.found} == {"converted"}
    assert "leaf top.embed" in text
    assert "got [160, 40]; expected [160, 44]" in text
    assert "leaf moe.w2 in" in text
    assert "is missing" in text
    assert "leaf moe.w2_codes in" in text
    assert "is not a parameter of this model" in text


def test_an_output_folder_that_holds_something_is_left_alone(model: Path, tmp_path: Path):
    (tmp_path / "mine").write_text("keep")
    with pytest.raises(ConfigError, match="output folder is not empty"):
        convert(model, tmp_path, ParallelConfig())
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]


def run_script(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(
        [sys.executable, "scripts/convert_checkpoint.py", *map(str, arguments)],
        cwd=ROOT,
        env=environment | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_the_script_converts(model: Path, cfg: ModelConfig, tmp_path: Path):
    run = run_script("--model", model, "--out", tmp_path / "out", "--mesh", "tp2")
    assert run.returncode == 0, run.stderr
    assert_same_bits(
        restore(tmp_path / "out", ParallelConfig(tp=4)), random_params(cfg, dtype="bfloat16")
    )


@pytest.mark.parametrize(
    ("mesh", "words"), [("tp3", "cannot be placed"), ("8", "mesh is not understood")]
)
def test_the_script_fails_with_a_reason(model: Path, tmp_path: Path, mesh: str, words: str):
    run = run_script("--model", model, "--out", tmp_path / "out", "--mesh", mesh)
    assert run.returncode == 2
    assert "Traceback" not in run.stderr
    assert words in run.stderr
    assert not (tmp_path / "out").exists()
