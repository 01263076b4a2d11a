"""The embedded model: the same everywhere, in the released layout, safe to make twice at once."""

import base64
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest

from k3jax.config import ModelConfig
from k3jax.params import a_log_stored
from k3jax.weights import embedded, ensure_embedded, load, read_model_config
from k3jax.weights.folder import open_checkpoint
from sharding.axes import ParallelConfig
from tests.tiny import mesh_shardings


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_embedded(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def cfg(model: Path) -> ModelConfig:
    return read_model_config(model)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_it_is_the_same_everywhere(model: Path, tmp_path: Path):
    assert contents(ensure_embedded(tmp_path / "new" / "cache")) == contents(model)


def test_a_second_start_uses_the_first_one_s_files(model: Path):
    before = {path: path.stat().st_mtime_ns for path in model.iterdir()}
    assert ensure_embedded(model.parent) == model
    assert {path: path.stat().st_mtime_ns for path in model.iterdir()} == before


@pytest.mark.parametrize("damage", ["missing", "cut", "stamp"])
def test_a_damaged_model_is_made_again(model: Path, tmp_path: Path, damage: str):
    folder = Path(shutil.copytree(model, tmp_path / model.name))
    shard = next(folder.glob("*.safetensors"))
    if damage == "missing":
        shard.unlink()
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    else:
        (folder / "embedded.json").write_text("{}")
    assert contents(ensure_embedded(tmp_path)) == contents(model)
    assert [path.name for path in tmp_path.iterdir()] == [model.name]


def test_a_changed_generator_makes_it_again(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    shutil.copytree(model, tmp_path / model.name)
    monkeypatch.setattr(embedded, "SEED", embedded.SEED + 1)
    assert contents(ensure_embedded(tmp_path)) != contents(model)


def test_starts_at_the_same_time_do_not_disturb_each_other(model: Path, tmp_path: Path):
    # The lock belongs to an open folder, so threads exclude each other as processes do.
    with ThreadPoolExecutor(3) as pool:
        folders = list(pool.map(ensure_embedded, [tmp_path] * 3))
    assert set(folders) == {tmp_path / model.name}
    assert contents(folders[0]) == contents(model)
    assert [path.name for path in tmp_path.iterdir()] == [model.name]


def test_an_interrupted_start_leaves_no_model(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def fail(folder: Path) -> None:
        raise OSError("disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(embedded, "write_tokenizer", fail)
        with pytest.raises(OSError, match="disk is full"):
            ensure_embedded(tmp_path)
    assert not (tmp_path / model.name).exists()
    assert contents(ensure_embedded(tmp_path)) == contents(model)
    assert [path.name for path in tmp_path.iterdir()] == [model.name]


def test_it_has_the_shape_of_k3(cfg: ModelConfig):
    assert cfg.family == "kimi_k3"
    assert cfg.expert_format == "mxfp4"
    assert cfg.mla_layers[-2:] == (cfg.num_layers - 2, cfg.num_layers - 1)
    assert cfg.dense_layers == (0,)
    assert cfg.attn_res_block_layers is not None
    assert -(-cfg.num_layers // cfg.attn_res_block_layers) == 2
    assert a_log_stored(cfg) > cfg.kda_num_heads
    assert len({cfg.kda_head_dim, cfg.qk_head_dim, cfg.kv_lora_rank, cfg.q_lora_rank}) == 4


def test_it_has_the_released_layout(model: Path):
    entries = open_checkpoint(model)
    assert len({entry.file for entry in entries.values()}) == 2
    prefix = "language_model.model.layers."
    found = {
        name.removeprefix(prefix): (entry.dtype, entry.shape) for name, entry in entries.items()
    }
    assert found["language_model.lm_head.weight"] == ("BF16", (512, 96))
    assert found["0.self_attn.A_log"] == ("F32", (16,))
    assert found["0.self_attn.q_conv1d.weight"] == ("F32", (128, 1, 4))
    assert found["1.block_sparse_moe.experts.3.w2.weight_packed"] == ("U8", (64, 32))
    assert found["1.block_sparse_moe.experts.3.w2.weight_scale"] == ("U8", (64, 2))
    assert found["5.self_attention_res_proj.weight"] == ("BF16", (1, 96))


@pytest.mark.multi
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_every_mesh_divides_it(model: Path, cfg: ModelConfig, tp: int):
    params = load(model, cfg, mesh_shardings(cfg, ParallelConfig(tp=tp)))
    for leaf in jax.tree.leaves(params):
        assert np.isfinite(np.asarray(leaf).astype(np.float32)).all()


def test_its_vocabulary_is_bytes_and_reserved_ids(model: Path, cfg: ModelConfig):
    lines = (model / "tiktoken.model").read_text().splitlines()
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines}
    assert ranks == {bytes([byte]): byte for byte in range(256)}
    assert cfg.vocab_size == 256 + 256
    added = json.loads((model / "tokenizer_config.json").read_bytes())["added_tokens_decoder"]
    # The same offsets behind the ranks as in K3 (k3-model.md section 8).
    released = {
        163584: "[BOS]",
        163585: "[EOS]",
        163586: "<|end_of_msg|>",
        163587: "<|open|>",
        163588: "<|close|>",
        163589: "<|sep|>",
        163590: "[start_header_id]",
        163591: "[end_header_id]",
        163593: "[EOT]",
        163602: "<|media_begin|>",
        163603: "<|media_content|>",
        163604: "<|media_end|>",
        163605: "<|media_pad|>",
        163838: "[UNK]",
        163839: "[PAD]",
    }
    assert {int(key): value["content"] for key, value in added.items()} == {
        key - 163584 + 256: content for key, content in released.items()
    }


def test_readable_text_and_the_end_of_the_message_are_likely(model: Path, cfg: ModelConfig):
    head = np.asarray(load(model, cfg, mesh_shardings(cfg, ParallelConfig()))["top"]["lm_head"])
    size = np.abs(head.astype(np.float32)).mean(axis=1)
    readable = [*range(32, 127), 10, *cfg.eos_token_ids]
    assert size[readable].min() > 4 * np.delete(size, readable).max()


def test_its_token_ids_agree_between_files(model: Path, cfg: ModelConfig):
    generation = json.loads((model / "generation_config.json").read_bytes())
    assert (cfg.bos_token_id, cfg.eos_token_ids, cfg.pad_token_id) == (256, (258,), 511)
    assert generation["eos_token_id"] == [258, 257]
    assert generation["temperature"] == 1.0
