"""Each broken checkpoint is refused by an error of its own that names file and tensor.

What headers can show is refused before a weight is read.
"""

import json
import shutil
from pathlib import Path
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

from k3jax.config import ConfigError
from k3jax.weights import WeightError, load, read_model_config
from k3jax.weights.folder import INDEX_FILE, SINGLE_FILE
from k3jax.weights.safetensors_file import TensorFiles, write_file
from tests.checkpoints import PREFIX, edit, edit_index, read_all, replace, rewrite
from tests.tiny import DATA, one_device_shardings, write_tiny_checkpoint

BF16 = ml_dtypes.bfloat16
SHARD_1, SHARD_2 = (f"model-0000{i}-of-000002.safetensors" for i in (1, 2))

ROUTER = f"{PREFIX}layers.1.block_sparse_moe.gate.weight"
EXPERT = f"{PREFIX}layers.3.block_sparse_moe.experts.7.w2"
CONV = f"{PREFIX}layers.0.self_attn.k_conv1d.weight"
A_LOG = f"{PREFIX}layers.0.self_attn.A_log"
NORM = f"{PREFIX}norm.weight"
RES_PROJ = f"{PREFIX}layers.2.mlp_res_proj.weight"
KDA_GATE = f"{PREFIX}layers.0.self_attn.g_proj.weight"


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intact")
    write_tiny_checkpoint(folder)
    return folder


@pytest.fixture
def folder(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "model"))


def attempt(folder: Path, dtype: str = "bfloat16") -> None:
    cfg = read_model_config(folder)
    load(folder, cfg, one_device_shardings(cfg), dtype=dtype)


def refusal(folder: Path, kind: str, *names: str, dtype: str = "bfloat16") -> WeightError:
    """The one problem of a checkpoint: of `kind`, naming `names`."""
    with pytest.raises(WeightError) as caught:
        attempt(folder, dtype)
    assert [problem.kind for problem in caught.value.found] == [kind]
    for name in names:
        assert name in str(caught.value)
    return caught.value


def early_refusal(folder: Path, kind: str, *names: str, dtype: str = "bfloat16") -> WeightError:
    """A `refusal` that comes before the first weight is read."""
    error = AssertionError("a weight was read")
    with mock.patch.object(TensorFiles, "read_rows", side_effect=error):
        return refusal(folder, kind, *names, dtype=dtype)


def shard_of(folder: Path, name: str) -> str:
    return json.loads((folder / INDEX_FILE).read_bytes())["weight_map"][name]


@pytest.mark.parametrize("name", [ROUTER, f"{EXPERT}.weight_scale", f"{EXPERT}.weight_packed"])
def test_kf_l02_missing_tensor(folder: Path, name: str):
    edit(folder, lambda tensors: tensors.pop(name))
    assert early_refusal(folder, "missing_tensor", name).found[0].tensor == name


def test_kf_l02_tensor_that_the_index_puts_in_a_file_that_lacks_it(folder: Path):
    other = SHARD_1 if shard_of(folder, ROUTER) == SHARD_2 else SHARD_2
    edit_index(folder, lambda weight_map: weight_map.update({ROUTER: other}))
    early_refusal(folder, "misplaced_tensor", ROUTER, other)


def test_kf_l02_tensor_that_only_the_index_knows(folder: Path):
    edit_index(folder, lambda weight_map: weight_map.update({f"{ROUTER}.x": SHARD_1}))
    early_refusal(folder, "misplaced_tensor", f"{ROUTER}.x", SHARD_1, "no file holds it")


def test_kf_l02_tensor_that_the_index_does_not_list(folder: Path):
    edit_index(folder, lambda weight_map: weight_map.pop(ROUTER))
    early_refusal(folder, "misplaced_tensor", ROUTER, SHARD_1, INDEX_FILE)


def test_kf_l02_missing_shard(folder: Path):
    (folder / SHARD_2).unlink()
    early_refusal(folder, "missing_file", SHARD_2, "No such file")


def test_kf_l02_tensor_in_two_shards(folder: Path):
    tensors = read_all(folder)
    names = [name for name in tensors if shard_of(folder, name) == SHARD_2]
    again = {name: tensors[name] for name in [*names, ROUTER]}
    assert ROUTER not in names
    write_file(folder / SHARD_2, again)
    early_refusal(folder, "duplicate_tensor", ROUTER, SHARD_1, SHARD_2)


def test_kf_l02_tensor_under_two_spellings(folder: Path):
    short = ROUTER.replace("language_model.model.", "language_model.")
    edit(folder, lambda tensors: tensors.update({short: tensors[ROUTER]}))
    early_refusal(folder, "duplicate_tensor", ROUTER, short)


def test_tensor_twice_in_the_index(folder: Path):
    file = folder / INDEX_FILE
    text = file.read_text()
    file.write_text(text.replace('"weight_map": {', f'"weight_map": {{"{ROUTER}": "{SHARD_1}",'))
    early_refusal(folder, "duplicate_tensor", ROUTER, INDEX_FILE)


@pytest.mark.parametrize(
    "name",
    [
        f"{PREFIX}layers.1.self_attn.rotary_emb.inv_freq",
        "language_model.visual_head.weight",
        "model.norm.weight",
        "encoder.weight",
        # The released quantisation has no such tensor, and its `ignore` list is not trusted.
        f"{PREFIX}layers.1.block_sparse_moe.gate.weight_packed",
    ],
)
def test_unknown_tensor(folder: Path, name: str):
    edit(folder, lambda tensors: tensors.update({name: np.zeros(3, BF16)}))
    early_refusal(folder, "unknown_tensor", name, shard_of(folder, name))


@pytest.mark.parametrize("shard", [SHARD_1, SHARD_2])
def test_kf_l01_truncated_shard(folder: Path, shard: str):
    file = folder / shard
    file.write_bytes(file.read_bytes()[:-777])
    early_refusal(folder, "truncated", shard, "777 bytes are missing")


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        (ROUTER, (40, 12)),  # transposed
        (CONV, (48, 4)),
        (NORM, (41,)),
        (RES_PROJ, (40,)),
        (f"{EXPERT}.weight_scale", (64, 2)),
        (f"{EXPERT}.weight_packed", (64, 32)),  # unpacked
    ],
)
def test_wrong_shape(folder: Path, name: str, shape: tuple[int, ...]):
    old = read_all(folder)[name]
    replace(folder, name, np.zeros(shape, old.dtype))
    early_refusal(folder, "shape", name, shard_of(folder, name), str(list(shape)))


@pytest.mark.parametrize(
    ("name", "stored", "dtype"),
    [
        (ROUTER, np.float32, "bfloat16"),
        (ROUTER, np.float16, "bfloat16"),
        (ROUTER, np.int16, "float32"),
        (ROUTER, np.float64, "float32"),
        (A_LOG, np.float64, "bfloat16"),
        (f"{EXPERT}.weight_packed", np.int8, "bfloat16"),
        (f"{EXPERT}.weight_scale", BF16, "bfloat16"),
    ],
)
def test_dtype_that_would_lose_precision(folder: Path, name: str, stored: type, dtype: str):
    replace(folder, name, read_all(folder)[name].astype(stored))
    early_refusal(folder, "dtype", name, shard_of(folder, name), dtype=dtype)


@pytest.mark.parametrize("length", [3, 5, 8, 11, 13, 16])
def test_kf_l04_a_log_of_an_undocumented_length(folder: Path, length: int):
    replace(folder, A_LOG, np.zeros(length, np.float32))
    early_refusal(folder, "shape", A_LOG, f"[{length}]")


def test_kf_l04_a_log_whose_tail_is_not_zero(folder: Path):
    values = read_all(folder)[A_LOG]
    values[-1] = 1e-30
    replace(folder, A_LOG, values)
    refusal(folder, "padding", A_LOG, shard_of(folder, A_LOG))


@pytest.mark.parametrize("byte", [138, 200, 255])
def test_kf_l03_mxfp4_scale_that_no_weight_has(folder: Path, byte: int):
    name = f"{EXPERT}.weight_scale"
    scales = read_all(folder)[name]
    scales[5, 0] = byte
    replace(folder, name, scales)
    refusal(folder, "scale", name, shard_of(folder, name), str(byte))


def test_layer_lists_that_do_not_belong_to_the_checkpoint(folder: Path):
    # Both kinds have `g_proj` and `o_proj`: the layer map alone tells them apart (k3-model.md
    # section 3.4).
    file = folder / "config.json"
    config = json.loads(file.read_bytes())
    linear = config["text_config"]["linear_attn_config"]
    linear["kda_layers"], linear["full_attn_layers"] = [2, 3, 4], [1, 5]
    file.write_text(json.dumps(config))
    with pytest.raises(WeightError) as caught:
        attempt(folder)
    kinds = {problem.kind for problem in caught.value.found}
    assert kinds == {"missing_tensor", "unknown_tensor", "shape"}
    assert any(p.kind == "shape" and p.tensor == KDA_GATE for p in caught.value.found)


def test_dense_and_packed_experts_in_one_checkpoint(folder: Path):
    def unpack(tensors: dict[str, np.ndarray]) -> None:
        del tensors[f"{EXPERT}.weight_packed"], tensors[f"{EXPERT}.weight_scale"]
        tensors[f"{EXPERT}.weight"] = np.zeros((64, 32), BF16)

    edit(folder, unpack)
    early_refusal(folder, "expert_format", f"{EXPERT}.weight")


def test_shard_that_the_index_does_not_know(folder: Path):
    write_file(folder / "model-00003-of-000003.safetensors", {"a": np.zeros(1, np.uint8)})
    early_refusal(folder, "unlisted_file", "model-00003-of-000003.safetensors", INDEX_FILE)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {"a": 3}}',
        '{"weight_map": {"a": "../b"}}',
    ],
)
def test_damaged_index(folder: Path, text: str):
    (folder / INDEX_FILE).write_text(text)
    early_refusal(folder, "index", INDEX_FILE)


def test_folder_without_weights(folder: Path):
    (folder / INDEX_FILE).unlink()
    early_refusal(folder, "no_weights", INDEX_FILE, SINGLE_FILE)


def test_folder_without_config(folder: Path):
    (folder / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json cannot be read: .*No such file"):
        attempt(folder)


@pytest.mark.parametrize("text", ["", "[1]", "{"])
def test_config_that_is_no_object(folder: Path, text: str):
    (folder / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=r"config\.json is not"):
        attempt(folder)


def test_all_problems_are_reported_at_once(folder: Path):
    def damage(tensors: dict[str, np.ndarray]) -> None:
        del tensors[ROUTER]
        tensors[NORM] = np.zeros(7, BF16)
        tensors["encoder.weight"] = np.zeros(7, BF16)

    edit(folder, damage)
    with pytest.raises(WeightError) as caught:
        attempt(folder)
    found = {(problem.kind, problem.tensor) for problem in caught.value.found}
    assert found == {
        ("missing_tensor", ROUTER),
        ("shape", NORM),
        ("unknown_tensor", "encoder.weight"),
    }
    assert len(str(caught.value).splitlines()) == 3


def test_many_problems_make_a_short_message(folder: Path):
    rewrite(folder, {name: np.zeros(7, BF16) for name in ("encoder.weight", "head.weight")})
    with pytest.raises(WeightError) as caught:
        attempt(folder)
    assert len(caught.value.found) > 100
    assert len(str(caught.value).splitlines()) == 21


def test_an_untouched_golden_checkpoint_is_accepted():
    attempt(DATA / "k3-tiny-mxfp4")
